"""A client of OCI registries (distribution-spec 1.1): manifests by tag or digest, blobs by digest.

Uploads are sent in chunks and continue after a cut connection; a later process continues the same upload by the record
$APR_CACHE/oci/uploads/<key>. A registry may drop an upload that was cut in the middle of a chunk, as CNCF Distribution
does: then that file is sent from its beginning. Downloads are fetched by ranges. Credentials are those of docker login
in $DOCKER_CONFIG/config.json; they are sent to the registry's own host and its token server only, and never unencrypted
but on this machine.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO
from urllib.parse import parse_qsl, urlencode, urljoin, urlsplit

from aprfmt.errors import AprError, ChecksumError, CorruptError, NotFoundError, RefusedError, StorageError
from aprfmt.io.cache import cache_home, own_folder
from aprfmt.io.jsonx import loads
from aprfmt.io.registry_path import DIGEST, SCHEME, RegistryPath, is_this_machine
from aprfmt.io.remote_file import RemoteFile
from aprfmt.io.source import Source
from aprfmt.limits import MAX_REGISTRY_ANSWER_BYTES, MIN_HUB_RATE
from aprfmt.text import one_line

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_INDEX = "application/vnd.oci.image.index.v1+json"

_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_CHUNK_BYTES = 16 << 20
_TIMEOUT_S, _ANSWER_S = 60.0, 120.0
_PAUSES_S = (0.5, 2.0, 8.0)
_PIECE_BYTES = 1 << 20
_SHOWN_BYTES = 4096

_Advance = Callable[[int], object]


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects of downloads; never from https to http. Authorization is not sent along."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if urlsplit(newurl).scheme not in ("https", urlsplit(req.full_url).scheme):
            raise StorageError("the registry redirected the request to an unencrypted address", path=req.full_url)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _CutConnectionError(Exception):
    """A connection that failed; the request may succeed when it is repeated."""


class _RefusalError(Exception):
    """A response with an error status: `status`, and the registry's words."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status, self.words = status, words


@dataclass(slots=True)
class _Answer:
    headers: http.client.HTTPMessage
    body: bytes


class Registry:
    """A repository of a registry."""

    def __init__(self, where: RegistryPath) -> None:
        self.where = where
        self._authorization: str | None = None
        self._has_answered = False
        self._opener = urllib.request.build_opener(_Redirects())

    # --- manifests ---

    def manifest(self) -> tuple[str, bytes]:
        """Digest and bytes of the manifest at the address.

        Raises NotFoundError, RefusedError (no access), ChecksumError, StorageError.
        """
        reference = self.where.reference
        found = self._ask("GET", f"{self.where.url}/manifests/{reference}", {"Accept": f"{MANIFEST}, {_INDEX}"})
        digest = f"sha256:{hashlib.sha256(found.body).hexdigest()}"
        stated = reference if DIGEST.fullmatch(reference) else found.headers.get("Docker-Content-Digest", digest)
        if stated != digest:
            raise ChecksumError("the manifest differs from its digest", path=str(self.where), hint="run it again")
        return digest, found.body

    def put_manifest(self, data: bytes) -> str:
        """Stores a manifest under the reference of the address; returns its digest. Raises as `manifest`."""
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        headers = {"Content-Type": MANIFEST}
        found = self._ask("PUT", f"{self.where.url}/manifests/{self.where.reference}", headers, data)
        if found.headers.get("Docker-Content-Digest", digest) != digest:
            raise ChecksumError("the registry stored a different manifest than was sent", path=str(self.where))
        return digest

    # --- blobs ---

    def has(self, digest: str) -> bool:
        """Whether the repository has a blob. Raises RefusedError, StorageError."""
        try:
            self._ask("HEAD", f"{self.where.url}/blobs/{digest}")
        except NotFoundError:
            return False
        return True

    def remote_file(self, digest: str, size: int, name: str) -> RemoteFile:
        """A blob that can be fetched by ranges."""
        address = f"{SCHEME}{self.where.host}/{self.where.name}@{digest}"
        fetch = partial(self._fetch, digest)
        return RemoteFile(name, address, size, digest.removeprefix("sha256:"), fetch, server="the registry")

    def _fetch(self, digest: str, start: int, end: int) -> Iterator[bytes]:
        """The bytes [start, end) of a blob; repeats the request for the rest when the connection is cut."""
        pauses = iter(_PAUSES_S)
        while start < end:
            try:
                for data in self._fetch_once(digest, start, end):
                    start += len(data)
                    pauses = iter(_PAUSES_S)
                    yield data
            except _RefusalError as error:
                raise self._failed(error) from error
            except _CutConnectionError as error:
                if (pause := next(pauses, None)) is None:
                    raise self._unreachable(error) from error
                time.sleep(pause)

    def _fetch_once(self, digest: str, start: int, end: int) -> Iterator[bytes]:
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        with self._response("GET", f"{self.where.url}/blobs/{digest}", headers) as response:
            if response.status != 206 and start:
                raise StorageError("the registry does not support range requests", path=str(self.where))
            until = time.monotonic() + _ANSWER_S + (end - start) / MIN_HUB_RATE
            while start < end:
                with _cuts():
                    data = response.read1(min(_PIECE_BYTES, end - start))
                if not data:
                    raise _CutConnectionError("the connection was closed")
                if time.monotonic() > until:
                    raise StorageError("the registry sends too slowly", path=str(self.where), hint="try again later")
                start += len(data)
                yield data

    def upload(self, path: str, digest: str, size: int, advance: _Advance) -> None:
        """Sends a file as a blob, in chunks; continues an earlier upload of it.

        Raises RefusedError (no access, or the file changed), NotFoundError, StorageError.
        """
        record = self._record(digest)
        with Source.open(path) as source:
            url, done = self._begin(record)
            if not url:
                url, done = self._start(record), 0
            advance(done)
            pauses = iter(_PAUSES_S)
            while done < size:
                try:
                    url, sent = self._send(source, url, done, size)
                except (_CutConnectionError, _RefusalError) as error:
                    if (pause := next(pauses, None)) is None or getattr(error, "status", 500) in (400, 413):
                        raise self._failed(error) from error
                    time.sleep(pause)
                    url, now = self._status(url)
                    if not url:  # the registry dropped what it had
                        url, now = self._start(record), 0
                    sent = now - done
                else:
                    pauses = iter(_PAUSES_S)
                advance(sent)
                done += sent
                _write_record(record, url)
            source.check_unchanged()
        try:
            self._ask("PUT", _with_query(url, digest=digest), {"Content-Length": "0"}, b"")
        finally:
            with suppress(OSError):
                record.unlink()

    def upload_bytes(self, data: bytes) -> str:
        """Sends a small blob unless it is there; returns its digest. Raises as `upload`."""
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if not self.has(digest):
            url = self._location(self._ask("POST", f"{self.where.url}/blobs/uploads/", {"Content-Length": "0"}, b""))
            headers = {"Content-Type": "application/octet-stream"}
            self._ask("PUT", _with_query(url, digest=digest), headers, data)
        return digest

    def _start(self, record: Path) -> str:
        url = self._location(self._ask("POST", f"{self.where.url}/blobs/uploads/", {"Content-Length": "0"}, b""))
        _write_record(record, url)
        return url

    def _begin(self, record: Path) -> tuple[str, int]:
        """The address of an earlier upload, and how much of it the registry has; "" without one."""
        url = ""
        with suppress(OSError, ValueError):
            url = record.read_text("utf-8")
        if not url or urlsplit(url).netloc != self.where.host:
            return "", 0
        return self._status(url)

    def _status(self, url: str) -> tuple[str, int]:
        """Where an upload continues, and how much the registry has; "" if it is gone."""
        try:
            found = self._ask("GET", url)
        except NotFoundError:
            return "", 0
        except AprError as error:
            if isinstance(error, RefusedError):
                raise
            return "", 0
        return self._location(found, url), _received(found)

    def _send(self, source: Source, url: str, start: int, size: int) -> tuple[str, int]:
        """Sends the next chunk; returns where the upload continues, and how many bytes arrived."""
        data = source.read(start, min(_CHUNK_BYTES, size - start))
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Range": f"{start}-{start + len(data) - 1}",
            "Content-Length": str(len(data)),
        }
        with self._response("PATCH", url, headers, data) as response:
            found = _Answer(response.headers, _read(response))
        arrived = start + len(data)
        if arrived > 1 and "Range" in found.headers:
            arrived = _received(found)
        if not start < arrived <= start + len(data):
            raise StorageError(f"the registry says that it has {arrived} bytes of the upload", path=str(self.where))
        return self._location(found, url), arrived - start

    def _location(self, found: _Answer, url: str | None = None) -> str:
        """The address at which an upload continues, on the registry's own host."""
        place = found.headers.get("Location", "") or url
        if not place:
            raise StorageError("the registry returned no upload URL", path=str(self.where))
        place = urljoin(self.where.url, place)
        parts, own = urlsplit(place), urlsplit(self.where.url)
        if parts.netloc != own.netloc:
            raise StorageError(f"the registry sends uploads to another host, {parts.netloc}", path=str(self.where))
        return parts._replace(scheme=own.scheme).geturl()  # a registry behind a proxy may not know of TLS

    def _record(self, digest: str) -> Path:
        key = hashlib.sha256(f"{self.where.host}/{self.where.name}@{digest}".encode()).hexdigest()
        return cache_home() / "oci" / "uploads" / key

    # --- requests ---

    def _ask(self, method: str, url: str, headers: Mapping[str, str] = {}, body: bytes | None = None) -> _Answer:
        """The whole response to a request; repeats it when the connection is cut, or the registry is overloaded.

        Raises NotFoundError (404), RefusedError (401, 403), StorageError.
        """
        pauses = iter(_PAUSES_S if self._has_answered else _PAUSES_S[:1])  # a wrong address stays wrong
        while True:
            try:
                with self._response(method, url, headers, body) as response:
                    return _Answer(response.headers, _read(response))
            except (_CutConnectionError, _RefusalError) as error:
                passes = isinstance(error, _CutConnectionError) or error.status in (429, 500, 502, 503, 504)
                if not passes or (pause := next(pauses, None)) is None:
                    raise self._failed(error) from error
                time.sleep(pause)

    @contextmanager
    def _response(
        self, method: str, url: str, headers: Mapping[str, str] = {}, body: bytes | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """The response to a request. Logs in if the registry asks for it. Raises _CutConnectionError, _RefusalError."""
        for attempt in (0, 1):
            request = urllib.request.Request(url, body, dict(headers), method=method)
            request.add_header("User-Agent", "aprfmt")
            if self._authorization is not None:
                request.add_unredirected_header("Authorization", self._authorization)
            try:
                with _cuts():
                    response = self._opener.open(request, timeout=_TIMEOUT_S)
                self._has_answered = True
            except urllib.error.HTTPError as error:
                self._has_answered = True
                with error:
                    words, challenge = _words(error), error.headers.get("WWW-Authenticate", "")
                if error.code == 401 and not attempt and self._log_in(challenge):
                    continue
                raise _RefusalError(error.code, words) from error
            with response:
                yield response
            return

    def _log_in(self, challenge: str) -> bool:
        """Answers a challenge with the credentials of `docker login`, if any. Raises StorageError, RefusedError."""
        kind, _, rest = challenge.partition(" ")
        reason = dict(_CHALLENGE.findall(rest))
        secret = _credentials(self.where.host)
        if kind.lower() == "basic":
            self._authorization = f"Basic {secret}" if secret else None
            return secret is not None
        realm = reason.get("realm", "")
        parts = urlsplit(realm)
        if kind.lower() != "bearer" or parts.scheme not in ("https", "http"):
            return False
        if parts.scheme == "http" and not (is_this_machine(parts.netloc) and is_this_machine(self.where.host)):
            raise RefusedError("the registry's token server does not use https", path=str(self.where))
        query = {key: reason[key] for key in ("service", "scope") if key in reason}
        request = urllib.request.Request(_with_query(realm, **query))
        if secret is not None:
            request.add_unredirected_header("Authorization", f"Basic {secret}")
        try:
            with _cuts(), self._opener.open(request, timeout=_TIMEOUT_S) as response:
                found = loads(_read(response))
        except urllib.error.HTTPError as error:
            with error:
                raise _RefusalError(error.code, _words(error)) from error
        token = (found.get("token") or found.get("access_token")) if isinstance(found, dict) else None
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise CorruptError("the registry's token server returned no token", path=realm)
        self._authorization = f"Bearer {token}"
        return True

    def _failed(self, error: _CutConnectionError | _RefusalError) -> AprError:
        if isinstance(error, _CutConnectionError):
            return self._unreachable(error)
        reason = f": {error.words}" if error.words else ""
        if error.status == 404:
            return NotFoundError(
                f"not in the registry{reason}", path=str(self.where), hint="check the name and the tag"
            )
        if error.status in (401, 403):
            hint = f"docker login {self.where.host}; apr reads auths of $DOCKER_CONFIG/config.json"
            return RefusedError(f"the registry refuses access{reason}", path=str(self.where), hint=hint)
        return StorageError(f"the registry answered {error.status}{reason}", path=str(self.where))

    def _unreachable(self, error: Exception) -> StorageError:
        hint = "run it again: completed parts are kept" if self._has_answered else "check the address and the network"
        return StorageError(f"the registry cannot be reached: {error}", path=str(self.where), hint=hint)


@contextmanager
def _cuts() -> Iterator[None]:
    """Raises what a failing connection raises as _CutConnectionError."""
    try:
        yield
    except urllib.error.HTTPError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, AprError):
            raise
        raise _CutConnectionError(str(getattr(error, "reason", error)) or type(error).__name__) from error


def _read(response: http.client.HTTPResponse) -> bytes:
    """The whole body of a response of the API."""
    found, until = bytearray(), time.monotonic() + _ANSWER_S
    with _cuts():
        while data := response.read1(1 << 16):
            found += data
            if len(found) > MAX_REGISTRY_ANSWER_BYTES:
                raise StorageError(f"the registry's response has more than {MAX_REGISTRY_ANSWER_BYTES} bytes")
            if time.monotonic() > until:
                raise StorageError("the registry timed out during its response", hint="try again later")
    return bytes(found)


def _words(error: urllib.error.HTTPError) -> str:
    """What a registry says of an error."""
    try:
        text = error.read(_SHOWN_BYTES).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return ""
    with suppress(ValueError, KeyError, TypeError, IndexError, RecursionError):
        first = json.loads(text)["errors"][0]
        text = f"{first['code']}: {first.get('message', '')}"
    return one_line(text)


def _received(found: _Answer) -> int:
    """How many bytes of an upload a registry has: the Range header `0-LAST`."""
    last = found.headers.get("Range", "").removeprefix("bytes=").partition("-")[2]
    n = int(last) + 1 if last.isascii() and last.isdecimal() else 0
    return 0 if n == 1 else n  # an empty upload is 0-0 as well as one of a byte


def _with_query(url: str, **query: str) -> str:
    parts = urlsplit(url)
    return parts._replace(query=urlencode([*parse_qsl(parts.query), *query.items()])).geturl()


def _write_record(record: Path, url: str) -> None:
    """Records where an upload continues; without a writable cache a later process begins it again."""
    with suppress(OSError, AprError):
        own_folder(record.parent.parent)
        own_folder(record.parent)
        record.write_text(url, "utf-8")


def _credentials(host: str) -> str | None:
    """User and password of `docker login` in base64; None without them. Raises CorruptError."""
    folder = os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker")
    path = Path(folder) / "config.json"
    try:
        data = path.read_bytes()[: MAX_REGISTRY_ANSWER_BYTES + 1]
    except OSError:
        return None
    try:
        entry = loads(data)["auths"][host]  # type: ignore[index]
        secret = str(entry["auth"])
        base64.b64decode(secret, validate=True)
    except (KeyError, TypeError, ValueError):
        return None
    return secret or None
