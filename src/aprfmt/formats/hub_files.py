"""Hub repositories that are not on this disk: their file list, and bytes by range requests.

huggingface_hub provides the endpoint, token, proxy and session; nothing here names a host or sees a token. The file
list with its digests is trusted as the hub's own (TLS); every byte of a file is checked against it.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from aprfmt.errors import (
    AprError,
    ChangedError,
    CorruptError,
    LimitError,
    MissingDependencyError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from aprfmt.formats.hf_files import WEIGHT_SUFFIXES
from aprfmt.formats.hub_errors import HubPath, cache_folder, failure
from aprfmt.formats.hub_requests import HubResponse, ask, open_answer, range_of_body
from aprfmt.io import hub_cache, jsonx, remote_file
from aprfmt.io.cache import cache_home, own_folder
from aprfmt.io.chunks import LEAST_STORED_BYTES, Store
from aprfmt.io.hub_cache import is_digest
from aprfmt.io.names import findings
from aprfmt.io.remote import place, prefetch_headers, remove_old
from aprfmt.io.remote_file import Fetch, RemoteFile
from aprfmt.limits import MAX_CARRIED_FILES, MAX_HUB_NESTED, MAX_TEXT_FILE_BYTES
from aprfmt.types import Json

RETRIES = 5
"""How often a request without progress is repeated."""

FIRST_PAUSE_S = 0.5
"""Pause before the second repetition in a row; it doubles each time."""

_MOST_PAUSE_S = 30.0
_AGAIN = (408, 425, 429, 500, 502, 503, 504)
STAYS_S = 300.0
"""Seconds for which a branch is assumed to point to the same commit, and an address to the same file."""

_LEFT_S = 7 * 24 * 3600.0
_PROGRESS_BYTES = 64 << 10  # progress after which a broken connection does not count as a repeated failure
_MOST_FILE_BYTES = 1 << 50
_SHOWN_CHARS = 60


@dataclass(eq=False, slots=True)
class Repository:
    """A revision of a repository.

    Attributes:
        name: "org/name".
        commit: of the revision.
        folder: the placeholders of its files.
        files: by name.
        store: their cached chunks.
    """

    name: str
    commit: str
    folder: Path
    files: dict[str, RemoteFile]
    store: Store
    begun: float = field(default_factory=time.monotonic)

    def fetch_ahead(self, names: list[str]) -> None:
        """Fetches the headers of these files in parallel, since each costs a round trip."""
        prefetch_headers([self.files[name] for name in names if name in self.files], self.store)


_opened: dict[tuple[str, str, str], Repository] = {}
_by_folder: dict[str, Repository] = {}
URL_FOLDERS: dict[str, str] = {}
"""Folder of the placeholder of a file at an address of another server -> that address."""


def repository_of(path: Path | str) -> tuple[Repository, str] | None:
    """The repository that a placeholder belongs to, and the file's name in it; None for any other path."""
    text = os.path.abspath(path)
    for folder, found in _by_folder.items():
        if text == folder or text.startswith(folder + os.sep):
            return found, os.path.relpath(text, folder).replace(os.sep, "/")
    return None


def open_repository(wanted: HubPath) -> Repository:
    """Looks up the revision and creates a placeholder for each of its files on this disk.

    Raises whatever huggingface_hub raises, MissingDependencyError, CorruptError, StorageError.
    """
    try:
        from huggingface_hub import constants
    except ImportError as error:
        raise MissingDependencyError(
            f"hf://{wanted.repo} is not in the local cache, and huggingface_hub is not installed",
            hint="pip install huggingface_hub, or pass the path of a folder",
        ) from error
    key = (str(constants.ENDPOINT), wanted.repo, wanted.revision)
    found = _opened.get(key)
    if found is not None and (time.monotonic() - found.begun < STAYS_S or found.commit == wanted.revision):
        return found
    info = look_up(wanted)
    found = _place(wanted.repo, info.commit, info.rows)
    _opened[key] = found
    _by_folder[os.path.abspath(found.folder)] = found
    return found


class Revision(NamedTuple):
    """The hub's answer about a revision: its commit, and a JSON object per file."""

    commit: str
    rows: list[Json]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the files."""
        names = (row.get("rfilename") for row in self.rows if isinstance(row, dict))
        return tuple(name for name in names if isinstance(name, str))


def look_up(wanted: HubPath) -> Revision:
    """Asks the hub about a revision. Raises as hub_requests.ask, CorruptError, ChangedError, LimitError."""
    from huggingface_hub import constants

    place = f"{constants.ENDPOINT}/api/models/{wanted.repo}/revision/{quote(wanted.revision, safe='')}"
    address = str(wanted)
    try:
        answer = ask(f"{place}?blobs=true")
    except AprError as error:
        error.path = error.path or address
        raise
    if answer.count(b"{") + answer.count(b"[") > MAX_HUB_NESTED:
        raise LimitError(f"the hub's response has more than {MAX_HUB_NESTED} objects", path=address)
    try:
        info = jsonx.loads(answer)
    except AprError as error:
        error.path, error.hint = address, "check HF_ENDPOINT"
        raise
    commit = info.get("sha") if isinstance(info, dict) else None
    if not isinstance(info, dict) or not isinstance(commit, str) or not is_digest(commit):
        raise CorruptError(f"the hub did not return the commit of {wanted.revision} in {wanted.repo}")
    if is_digest(wanted.revision) and commit != wanted.revision:
        raise ChangedError(f"the hub returned commit {commit}", path=address, hint="check HF_ENDPOINT")
    rows = info.get("siblings")
    return Revision(commit, rows if isinstance(rows, list) else [])


def _place(repo: str, commit: str, rows: list[Json]) -> Repository:
    home = cache_home() / "hub"
    root = home / ("models--" + repo.replace("/", "--"))
    files, skipped = {}, list[str]()
    for row in rows[:MAX_CARRIED_FILES]:
        file = _file(repo, commit, row)
        if isinstance(file, RemoteFile):
            files[file.name] = file
        elif file:
            skipped.append(file)
    if len(rows) > MAX_CARRIED_FILES:
        skipped.append(f"{len(rows) - MAX_CARRIED_FILES} files beyond {MAX_CARRIED_FILES}")
    remove_old(home, time.time() - _LEFT_S)
    folder = root / "snapshots" / commit
    own_folder(home)
    largest = max((file.size for file in files.values() if not file.is_text), default=0)
    store = Store(root / "chunks", max(largest, LEAST_STORED_BYTES))
    store.adopt([*files.values()])
    for file, reason in place(folder, [*files.values()], store):
        del files[file.name]
        skipped.append(f"{file.name[:_SHOWN_CHARS]!r} ({reason})")
    remote_file.traffic.origins.append(f"hf://{repo}@{commit}")
    remote_file.traffic.skipped += skipped
    return Repository(repo, commit, folder, files, store)


def _file(repo: str, commit: str, row: Json) -> RemoteFile | str:
    """A file from the hub's list; its name and the reason if it is left out."""
    if not isinstance(row, dict) or not isinstance(name := row.get("rfilename"), str):
        return "a file without a name"
    size, lfs = row.get("size"), row.get("lfs")
    digest = lfs.get("sha256") if isinstance(lfs, dict) else row.get("blobId")
    reason = next((finding.reason for finding in findings([name]) if finding.is_final), "")
    if not reason and (":" in name or not name.isprintable()):
        reason = "contains a colon or control characters"
    if not reason and (type(size) is not int or not 0 <= size <= _MOST_FILE_BYTES or not is_digest(digest)):
        reason = "listed without a valid size or digest"
    if reason:
        return f"{name[:_SHOWN_CHARS]!r} ({reason})"
    assert isinstance(size, int)
    is_text = not name.endswith(WEIGHT_SUFFIXES) and size <= MAX_TEXT_FILE_BYTES
    address = f"hf://{repo}@{commit[:12]}/{name}"
    file = RemoteFile(name, address, size, str(digest), lambda start, end: iter(()), is_text)
    failed = partial(_failure, repo=repo, commit=commit, file=file)
    file.fetch = partial(fetch_ranges, partial(_request, repo, commit, file), failed, file)
    return file


# --- bytes ---


class _CutError(Exception):
    """The response ended early."""


def fetch_ranges(
    request: Fetch, failure: Callable[[Exception], AprError], file: RemoteFile, start: int, end: int
) -> Iterator[bytes]:
    """The bytes [start, end) of a file by `request`; reconnects after a cut connection.

    Raises AprError; `failure` describes what the HTTP client raises.
    """
    failures = 0
    while start < end:
        begun = start
        try:
            for data in request(start, end):
                start += len(data)
                yield data
            if start < end:
                raise _CutError(f"connection closed {end - start} bytes early")
        except AprError as error:
            error.path = error.path or file.address
            raise
        except Exception as error:  # anything the HTTP client raises
            failures = 1 if start - begun >= _PROGRESS_BYTES else failures + 1
            pause = _pause(error, failures)
            if pause is None or failures > RETRIES:
                raise failure(error) from error
            time.sleep(pause)


def _pause(error: Exception, failures: int) -> float | None:
    """Seconds until the request is retried; None if a retry would not help."""
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

    url = hf_hub_url(repo, file.name, revision=commit, endpoint=constants.ENDPOINT)
    remote_file.traffic.count_request()
    with open_answer(url, {"Range": f"bytes={start}-{end - 1}"}) as (response, redirects):
        _check((*redirects, response), file, start, end)
        yield from range_of_body(response, end - start)


def _check(answers: Sequence[HubResponse], file: RemoteFile, start: int, end: int) -> None:
    """Checks that the final response is the requested range of the file that the hub listed."""
    for answer in answers:
        stated = _tag(answer.headers)
        if stated is not None and stated != file.digest:
            raise _changed(file, "its ETag changed")
    response = answers[-1]
    if response.status_code == 416:
        raise _changed(file, f"it is shorter than {end} bytes")
    if response.status_code == 206:
        expected = f"bytes {start}-{end - 1}/{file.size}"
        if (found := response.headers.get("Content-Range", "")) != expected:
            raise _changed(file, f"got {found[:80]!r} instead of {expected!r}")
        return
    if start == 0 and response.headers.get("Content-Length") == str(file.size) and end == file.size:
        return
    raise UnsupportedError(
        f"the hub returned {response.status_code} for a range request: it serves whole files only",
        path=file.address,
        hint="download the repository with hf download, then pass its folder",
    )


def _tag(headers: Mapping[str, str]) -> str | None:
    """The digest of the file in a response. Servers behind a redirect use tags of their own."""
    value = headers.get("X-Linked-ETag") or (headers.get("ETag") if "X-Repo-Commit" in headers else None)
    value = (value or "").removeprefix("W/").strip('"')
    return value if is_digest(value) else None


def _changed(file: RemoteFile, how: str) -> ChangedError:
    return ChangedError(f"the file changed on the hub while it was read: {how}", path=file.address, hint="run it again")


def _failure(error: Exception, repo: str, commit: str, file: RemoteFile) -> AprError:
    if isinstance(error, _CutError) or type(error).__name__ == "RemoteProtocolError":
        hint = "run it again: it resumes from what was downloaded"
        return StorageError(
            f"the hub closed the connection: {error}, {RETRIES + 1} times", path=file.address, hint=hint
        )
    return failure(error, HubPath(repo, commit, file.name), cache_home(), file.address)


def download(path: str) -> str:
    """Downloads the file of a placeholder, verified, into huggingface_hub's cache; returns any other path unchanged.

    A file of that cache is verified too. Raises AprError.
    """
    found = repository_of(path)
    if (url := URL_FOLDERS.get(os.path.dirname(os.path.abspath(path)))) is not None:
        line = shlex.join(["apr", "convert", url, "-o", os.path.basename(path)])
        raise UsageError("llama.cpp reads local files only", path=url, hint=line)
    if found is None:
        hub_cache.verify(path)
        return path
    repository, name = found
    with _bar(name) as progress:
        return str(
            hub_cache.fetch(repository.files[name], cache_folder(), repository.name, repository.commit, progress)
        )


@contextmanager
def _bar(name: str) -> Iterator[Callable[[int, int], hub_cache.Progress]]:
    """The library's progress bar, which its own environment variables disable."""
    from huggingface_hub.utils import tqdm

    with ExitStack() as stack:

        def begin(total: int, done: int) -> hub_cache.Progress:
            bar = stack.enter_context(tqdm(desc=name, total=total, initial=done, unit="B", unit_scale=True))
            update: hub_cache.Progress = bar.update
            return update

        yield begin
