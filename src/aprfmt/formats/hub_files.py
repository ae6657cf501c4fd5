"""Repositories of the hub whose files are not on this disk: what is in them, and their bytes by ranges.

huggingface_hub gives the endpoint, the token, the proxy and the session; nothing here names a host or sees a token.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from aprfmt.errors import AprError, ChangedError, CorruptError, MissingDependencyError, StorageError, UnsupportedError
from aprfmt.formats.hf_files import WEIGHT_SUFFIXES
from aprfmt.formats.hub_answers import HubPath, cache_folder, failure
from aprfmt.io import remote_file
from aprfmt.io.cache import cache_home
from aprfmt.io.chunks import LEAST_STORED_BYTES, Store
from aprfmt.io.names import findings
from aprfmt.io.remote import fetch_heads, place, remove_old
from aprfmt.io.remote_file import RemoteFile
from aprfmt.limits import MAX_CARRIED_FILES, MAX_TEXT_FILE_BYTES

RETRIES = 5
"""How often a request that brought nothing is made again."""

FIRST_PAUSE_S = 0.5
"""Before the second repetition in a row; each pause is twice as long as the one before."""

_MOST_PAUSE_S = 30.0
_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_STAYS_S = 300.0  # how long a branch is taken to stay where it is
_LEFT_S = 7 * 24 * 3600.0

_count = threading.Lock()


@dataclass(eq=False, slots=True)
class Repository:
    """A revision of a repository.

    Attributes:
        name: "org/name".
        commit: what the revision is.
        folder: its files' stand-ins.
        files: by name.
        store: what is kept of them.
    """

    name: str
    commit: str
    folder: Path
    files: dict[str, RemoteFile]
    store: Store
    begun: float = field(default_factory=time.monotonic)

    def fetch_ahead(self, names: list[str]) -> None:
        """Fetches the headers of these files at once, since each costs a round trip."""
        fetch_heads([self.files[name] for name in names if name in self.files], self.store)


_opened: dict[tuple[str, str, str], Repository] = {}
_by_folder: dict[str, Repository] = {}


def repository_of(path: Path | str) -> tuple[Repository, str] | None:
    """The repository that a stand-in belongs to, and the file's name in it; None for any other path."""
    text = os.path.abspath(path)
    for folder, found in _by_folder.items():
        if text == folder or text.startswith(folder + os.sep):
            return found, os.path.relpath(text, folder).replace(os.sep, "/")
    return None


def open_repository(wanted: HubPath) -> Repository:
    """What the hub says of the revision, with a stand-in for each of its files on this disk.

    Raises whatever huggingface_hub raises, MissingDependencyError, CorruptError, StorageError.
    """
    try:
        from huggingface_hub import HfApi, constants
    except ImportError as error:
        raise MissingDependencyError(
            f"hf://{wanted.repo} is not in the local cache, and huggingface_hub is not installed",
            hint="pip install huggingface_hub, or give a path to a folder",
        ) from error
    key = (str(constants.ENDPOINT), wanted.repo, wanted.revision)
    found = _opened.get(key)
    if found is not None and (time.monotonic() - found.begun < _STAYS_S or found.commit == wanted.revision):
        return found
    info = HfApi(library_name="aprfmt").model_info(
        wanted.repo, revision=wanted.revision, files_metadata=True, timeout=_timeout()
    )
    if not isinstance(info.sha, str) or not info.sha.isalnum():
        raise CorruptError(f"the hub does not say which commit {wanted.revision} of {wanted.repo} is")
    found = _place(wanted.repo, info.sha, info.siblings or [])
    _opened[key] = found
    _by_folder[os.path.abspath(found.folder)] = found
    return found


def _place(repo: str, commit: str, siblings: list[Any]) -> Repository:
    home = cache_home() / "hub"
    root = home / ("models--" + repo.replace("/", "--"))
    files = {}
    for sibling in siblings[:MAX_CARRIED_FILES]:
        file = _file(repo, commit, sibling)
        if file is not None:
            files[file.name] = file
    remove_old(home, time.time() - _LEFT_S)
    largest = max((file.size for file in files.values() if not file.is_text), default=0)
    store = Store(root / "chunks", max(largest, LEAST_STORED_BYTES))
    made = Repository(repo, commit, root / "snapshots" / commit, files, store)
    store.adopt([*files.values()])
    place(made.folder, [*files.values()], made.store)
    remote_file.traffic.origins.append(f"hf://{repo}@{commit}")
    return made


def _file(repo: str, commit: str, sibling: Any) -> RemoteFile | None:
    """A file of the hub's list; None for one without size or digest, or with a name that leads elsewhere."""
    name, size = sibling.rfilename, sibling.size
    digest = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
    if not (isinstance(name, str) and type(size) is int and size >= 0 and _is_digest(digest)):
        return None
    if any(finding.is_final for finding in findings([name])) or ":" in name:
        return None
    is_text = not name.endswith(WEIGHT_SUFFIXES) and size <= MAX_TEXT_FILE_BYTES
    address = f"hf://{repo}@{commit[:12]}/{name}"
    file = RemoteFile(name, address, size, digest, lambda start, end: iter(()), is_text)
    file.fetch = partial(_fetch, repo, commit, file)
    return file


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) in (40, 64) and not set(value) - set("0123456789abcdef")


# --- bytes ---


class _CutError(Exception):
    """The answer ended before its bytes did."""


def _fetch(repo: str, commit: str, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
    """The bytes [start, end) of a file; goes on where a connection was cut. Raises AprError."""
    failures = 0
    while start < end:
        try:
            for data in _request(repo, commit, file, start, end):
                start, failures = start + len(data), 0
                yield data
            if start < end:
                raise _CutError(f"the connection ended {end - start} bytes early")
        except AprError:
            raise
        except Exception as error:  # whatever the HTTP client raises
            failures += 1
            pause = _pause(error, failures)
            if pause is None or failures > RETRIES:
                raise _failure(error, repo, commit, file) from error
            time.sleep(pause)


def _pause(error: Exception, failures: int) -> float | None:
    """Seconds to wait before the request is made again; None where that would not help."""
    pause = min(FIRST_PAUSE_S * 2 ** (failures - 2), _MOST_PAUSE_S) if failures > 1 else FIRST_PAUSE_S / 10
    response = getattr(error, "response", None)
    if response is None:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        return pause if isinstance(error, _CutError) or kinds & {"TransportError", "OSError", "StreamError"} else None
    if response.status_code not in _AGAIN:
        return None
    stated = response.headers.get("Retry-After", "")
    return min(float(stated), _MOST_PAUSE_S) if stated.isdecimal() else pause


def _request(repo: str, commit: str, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    url = hf_hub_url(repo, file.name, revision=commit, endpoint=constants.ENDPOINT)
    headers = build_hf_headers(library_name="aprfmt")
    headers |= {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    with _count:
        remote_file.traffic.requests += 1
    with get_session().stream("GET", url, headers=headers, timeout=_timeout(), follow_redirects=True) as response:
        if response.status_code >= 400 and response.status_code != 416:
            response.read()
            hf_raise_for_status(response)
        _check(response, file, start, end)
        left = end - start
        for data in response.iter_raw():
            with _count:
                remote_file.traffic.n_bytes += len(data)
            yield data[:left]
            left -= len(data)
            if left <= 0:
                return


def _check(response: Any, file: RemoteFile, start: int, end: int) -> None:
    """Whether the answer is the part that was asked for, of the file that the hub has listed."""
    for answer in (*response.history, response):
        stated = _tag(answer.headers)
        if stated is not None and stated != file.digest:
            raise _changed(file, "its ETag is another one")
    if response.status_code == 416:
        raise _changed(file, f"it is shorter than {end} bytes")
    if response.status_code == 206:
        expected = f"bytes {start}-{end - 1}/{file.size}"
        if (found := response.headers.get("Content-Range", "")) != expected:
            raise _changed(file, f"{found!r} came where {expected!r} was asked for")
        return
    if start == 0 and response.headers.get("Content-Length") == str(file.size) and end == file.size:
        return
    raise UnsupportedError(
        f"the hub answered {response.status_code} to a request for a part of the file: it serves whole files only",
        path=file.address,
        hint="hf download fetches the repository; then give its folder",
    )


def _tag(headers: Mapping[str, str]) -> str | None:
    """The digest of the file that an answer names. Servers behind a redirect have tags of their own."""
    value = headers.get("X-Linked-ETag") or (headers.get("ETag") if "X-Repo-Commit" in headers else None)
    value = (value or "").removeprefix("W/").strip('"')
    return value if _is_digest(value) else None


def _changed(file: RemoteFile, how: str) -> ChangedError:
    return ChangedError(f"the file changed on the hub while it was read: {how}", path=file.address, hint="run it again")


def _failure(error: Exception, repo: str, commit: str, file: RemoteFile) -> AprError:
    if isinstance(error, _CutError) or type(error).__name__ == "RemoteProtocolError":
        hint = "run it again: what came is kept, and goes on from there"
        return StorageError(
            f"the hub broke off the connection: {error}, {RETRIES + 1} times", path=file.address, hint=hint
        )
    return failure(error, HubPath(repo, commit, file.name), cache_home(), file.address)


def _timeout() -> float:
    from huggingface_hub import constants

    return float(constants.HF_HUB_DOWNLOAD_TIMEOUT)


def download(path: str) -> str:
    """The file on this disk that a stand-in is for, in the cache of huggingface_hub; any other path as it is."""
    found = repository_of(path)
    if found is None:
        return path
    repository, name = found
    from huggingface_hub import hf_hub_download

    try:
        return str(hf_hub_download(repository.name, name, revision=repository.commit, cache_dir=cache_folder()))
    except Exception as error:  # the library passes on whatever its HTTP client raises
        wanted = HubPath(repository.name, repository.commit, name)
        raise failure(error, wanted, cache_folder(), f"hf://{repository.name}/{name}") from error
