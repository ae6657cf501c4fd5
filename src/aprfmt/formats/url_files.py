"""Model files at https addresses, read by ranges like files of the hub (`hub_files`).

Nothing of the hub is sent to other servers, above all no token. A server states no digest of a file, so it cannot be
compared with one: each response must have the size and the ETag (or date) of the first.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from aprfmt.errors import AprError, ChangedError, MissingDependencyError, NotFoundError, StorageError, UnsupportedError
from aprfmt.formats import hub_files
from aprfmt.formats.hub_errors import is_offline
from aprfmt.formats.hub_requests import AnswerError, HubResponse, open_answer, range_of_body
from aprfmt.io import remote_file
from aprfmt.io.cache import cache_home, own_folder
from aprfmt.io.chunks import LEAST_STORED_BYTES, Store
from aprfmt.io.names import findings
from aprfmt.io.registry_path import is_this_machine
from aprfmt.io.remote import place
from aprfmt.io.remote_file import RemoteFile

SUFFIXES = (".gguf", ".safetensors", ".apr")
"""Suffixes of addresses of files that are read by ranges."""

_TOTAL = re.compile(r"bytes 0-0/(\d{1,16})")


@dataclass(frozen=True, slots=True)
class _Stated:
    """What a server says about a file; `tag` is empty if it has neither an ETag nor a date."""

    size: int
    tag: str


_opened: dict[str, tuple[float, Path]] = {}


def is_file_address(url: str) -> bool:
    """Whether a URL names a model file."""
    return urlsplit(url).path.lower().endswith(SUFFIXES)


def open_url(url: str) -> Path:
    """A placeholder for the file at `url`, whose bytes are fetched when they are read.

    Raises UnsupportedError for http beyond this machine and for a server without ranges, NotFoundError, StorageError,
    MissingDependencyError (huggingface_hub, whose HTTP client is used).
    """
    begun, path = _opened.get(url, (0.0, Path()))
    if begun and time.monotonic() - begun < hub_files.STAYS_S:
        return path
    parts = urlsplit(url)
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"  # without a signature or a password
    if parts.scheme != "https" and not is_this_machine(parts.netloc.rpartition("@")[2]):
        raise UnsupportedError("unencrypted http is allowed on this machine only", path=address, hint=f"https{url[4:]}")
    if is_offline():
        raise NotFoundError(
            "the file is on a server, and HF_HUB_OFFLINE is set", path=address, hint="unset HF_HUB_OFFLINE"
        )
    name = os.path.basename(unquote(parts.path))
    if any(finding.is_final for finding in findings([name])) or not name.isprintable() or ":" in name:
        name = f"model{os.path.splitext(name)[1].lower()}"
    stated = _look_up(url, address)
    mark = stated.tag or secrets.token_hex(16)  # without a tag nothing is kept for the next run
    key = hashlib.sha256(f"{url}\n{stated.size}\n{mark}".encode()).hexdigest()
    file = RemoteFile(
        name, address, stated.size, key, lambda start, end: iter(()), server=parts.netloc.rpartition("@")[2],
        is_stated=False,
    )  # fmt: skip
    file.fetch = partial(
        hub_files.fetch_ranges, partial(_request, url, stated, file), partial(_failure, address, url), file
    )
    home = cache_home() / "hub"
    own_folder(home)
    root = home / f"models--url--{key[:32]}"
    store = Store(root / "chunks", max(file.size, LEAST_STORED_BYTES))
    store.adopt([file])
    folder = root / "snapshots" / key
    if place(folder, [file], store):
        raise StorageError("the file system does not allow this file name", path=address)
    hub_files.URL_FOLDERS[str(folder)] = url
    remote_file.traffic.origins.append(address)
    remote_file.traffic.unstated[address] = None
    _opened[url] = time.monotonic(), folder / name
    return folder / name


def _look_up(url: str, address: str) -> _Stated:
    try:
        with open_answer(url, {"Range": "bytes=0-0"}, with_token=False) as (response, _):
            found = _TOTAL.fullmatch(response.headers.get("Content-Range", ""))
            if response.status_code != 206 or found is None:
                raise _without_ranges(address, url)
            return _Stated(int(found[1]), _tag(response))
    except ImportError as error:
        hint = f"pip install huggingface_hub, or {_download(url)}"
        raise MissingDependencyError("a URL needs huggingface_hub's HTTP client", path=address, hint=hint) from error
    except AprError as error:
        raise _of_server(error, address) from error
    except Exception as error:  # anything the HTTP client raises
        raise _failure(address, url, error) from error


def _request(url: str, stated: _Stated, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
    remote_file.traffic.count_request()
    try:
        with open_answer(url, {"Range": f"bytes={start}-{end - 1}"}, with_token=False) as (response, _):
            _check(response, stated, file, start, end)
            yield from range_of_body(response, end - start)
    except AprError as error:
        raise _of_server(error, file.address) from error


def _check(response: HubResponse, stated: _Stated, file: RemoteFile, start: int, end: int) -> None:
    expected = f"bytes {start}-{end - 1}/{file.size}"
    how = ""
    if response.status_code == 206 and (found := response.headers.get("Content-Range", "")) != expected:
        how = f"got {found[:80]!r} instead of {expected!r}"
    elif response.status_code == 416:
        how = f"it is shorter than {end} bytes"
    elif _tag(response) != stated.tag:
        how = "its ETag or date changed"
    if how:
        raise ChangedError(f"the file changed while it was read: {how}", path=file.address, hint="run it again")
    if response.status_code != 206:
        raise _without_ranges(file.address, file.address)


def _tag(response: HubResponse) -> str:
    return response.headers.get("ETag") or response.headers.get("Last-Modified") or ""


def _download(url: str) -> str:
    return f"curl -fL -O '{url}'"


def _without_ranges(address: str, url: str) -> UnsupportedError:
    return UnsupportedError("the server does not support range requests", path=address, hint=_download(url))


def _of_server(error: AprError, address: str) -> AprError:
    """An error about the hub, of this server."""
    error.path = error.path or address
    error.message = error.message.replace("the hub", "the server")
    error.hint = "check the address" if error.hint and "HF_ENDPOINT" in error.hint else error.hint
    return error


def _failure(address: str, url: str, error: Exception) -> AprError:
    if isinstance(error, AnswerError):
        status = error.response.status_code
        if status in (404, 410):
            return NotFoundError(f"the server returned {status}: no such file", path=address, hint="check the address")
        return StorageError(f"the server returned {status}", path=address, hint=_download(url))
    words = str(error) or type(error).__name__
    return StorageError(
        f"the server cannot be read: {words}", path=address, hint="check the address, the network and its proxies"
    )
