"""`hf://org/repo[@revision][/file]`: the local Hugging Face cache first, else a download by huggingface_hub.

<cache>/models--org--repo/refs/<revision>      text file that holds a commit
<cache>/models--org--repo/snapshots/<commit>/  the repository's files, links into ../../blobs
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from aprfmt.errors import AprError, MissingDependencyError, NotFoundError, StorageError, UsageError, storage_error
from aprfmt.formats.hf_files import read_text_file
from aprfmt.formats.hfdir import read_weight_map

DOWNLOADED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.md", "*.tiktoken", "LICENSE*"]
"""What is fetched when no file is named; no GGUF, because such repositories hold one model many times."""

_COMMIT = re.compile(r"[A-Za-z0-9._-]+")
_ADDRESS = re.compile(
    r"hf://(?P<repo>[\w][\w.-]*/[\w][\w.-]*)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[\w.-]+|[\w.-]+))?(?:/(?P<file>[\w][\w .+/-]*))?/?",
    re.ASCII,
)
_WEIGHTS = ("*.safetensors", "*.gguf", "*.apr")


@dataclass(frozen=True, slots=True)
class HubPath:
    """A parsed `hf://` address; `file` is relative to the repository, "" for all of it."""

    repo: str
    revision: str = "main"
    file: str = ""


def parse(address: str) -> HubPath:
    """The parts of `hf://org/repo[@revision][/file]`. Raises UsageError."""
    match = _ADDRESS.fullmatch(address)
    # `--` stands for the slash in the cache's folder names, `..` would leave them.
    if match is None or ".." in address or "--" in match["repo"]:
        hint = "write hf://org/repo, hf://org/repo@revision or hf://org/repo@revision/file"
        raise UsageError(f"not a repository address: {address!r}", hint=hint)
    return HubPath(match["repo"], match["revision"] or "main", (match["file"] or "").rstrip("/"))


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Where huggingface_hub keeps repositories: HF_HUB_CACHE, or below HF_HOME, XDG_CACHE_HOME, ~."""
    env = os.environ if environment is None else environment
    for key in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if env.get(key):
            return Path(env[key]).expanduser()
    if env.get("HF_HOME"):
        return Path(env["HF_HOME"]).expanduser() / "hub"
    base = Path(env["XDG_CACHE_HOME"]).expanduser() if env.get("XDG_CACHE_HOME") else Path.home() / ".cache"
    return base / "huggingface" / "hub"


def snapshot(address: str) -> Path:
    """The local folder (or file) of an `hf://` address.

    Nothing is asked of the network when the cache holds it, or when HF_HUB_OFFLINE is set.
    Raises UsageError, NotFoundError, MissingDependencyError (huggingface_hub), StorageError.
    """
    wanted = parse(address)
    cache = cache_folder()
    found = _cached(wanted, cache)
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    # Offline an incomplete snapshot is better than none: its reader names the missing shard.
    if found is not None and (offline or _is_complete(found)):
        return found
    if offline:
        raise NotFoundError(
            f"{address} is not in the local cache, and HF_HUB_OFFLINE is set",
            path=cache,
            hint="unset HF_HUB_OFFLINE, or give a path to a folder",
        )
    return _download(wanted, cache, address)


def _cached(wanted: HubPath, cache: Path) -> Path | None:
    folder = _snapshot_folder(wanted, cache)
    if folder is None:
        return None
    if wanted.file:
        return folder / wanted.file if (folder / wanted.file).is_file() else None
    has_weights = any(path.is_file() for pattern in _WEIGHTS for path in folder.glob(pattern))
    return folder if has_weights else None


def cached_config(repo: str) -> Path | None:
    """The snapshot of `repo` ("org/name") in the local cache that holds its config.json; nothing is fetched."""
    try:
        wanted = parse(f"hf://{repo}")
    except UsageError:
        return None
    folder = _snapshot_folder(wanted, cache_folder())
    return folder if folder is not None and (folder / "config.json").is_file() else None


def _snapshot_folder(wanted: HubPath, cache: Path) -> Path | None:
    repo = cache / ("models--" + wanted.repo.replace("/", "--"))
    commit = wanted.revision
    with suppress(OSError, UnicodeDecodeError):
        commit = (repo / "refs" / wanted.revision).read_text("utf-8").strip()
    return None if not _COMMIT.fullmatch(commit) or commit in (".", "..") else repo / "snapshots" / commit


def _is_complete(found: Path) -> bool:
    """Whether every shard that an index in the folder names is there; its reader judges a damaged one."""
    with suppress(AprError):
        for index in found.glob("*.safetensors.index.json"):
            shards = set(read_weight_map(read_text_file(index), index).values())
            return all((found / name).is_file() for name in shards)
    return True


def _download(wanted: HubPath, cache: Path, address: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingDependencyError(
            f"{address} is not in the local cache, and huggingface_hub is not installed",
            hint="pip install 'aprfmt[hub]', or give a path to a folder",
        ) from error
    try:
        folder = Path(
            snapshot_download(
                wanted.repo,
                revision=wanted.revision,
                cache_dir=cache,
                allow_patterns=[wanted.file] if wanted.file else DOWNLOADED,
            )
        )
    except Exception as error:  # the library passes on whatever its HTTP client raises
        raise _failure(error, wanted, cache, address) from error
    if wanted.file and not (folder / wanted.file).is_file():
        raise NotFoundError(f"{address} is not on the hub", hint="check the file's name")
    return folder / wanted.file if wanted.file else folder


# What the library calls an answer of the hub, by the names of its classes; the first that fits counts.
_ANSWERS = {
    "GatedRepoError": (
        StorageError,
        "{address} is gated",
        "accept its terms at https://huggingface.co/{repo}, then set HF_TOKEN",
    ),
    "RepositoryNotFoundError": (
        NotFoundError,
        "{address} is not on the hub",
        "check the name; a private repository needs HF_TOKEN",
    ),
    "RevisionNotFoundError": (NotFoundError, "{repo} has no revision {revision}", "check the name behind the @"),
    "RemoteEntryNotFoundError": (NotFoundError, "{address} is not on the hub", "check the file's name"),
}
_STATUS_HINTS = {
    401: "set HF_TOKEN to a valid token, or unset it: the hub did not take the one it got",
    403: "set HF_TOKEN to a token that may read the repository",
    429: "wait some minutes, or set HF_TOKEN: the hub limits the rate of requests",
}
_LOCAL_HINT = "what the cache holds needs no network; or give a path to a folder"


def _failure(error: BaseException, wanted: HubPath, cache: Path, address: str) -> AprError:
    """Why the download failed: the disk, an answer of the hub, or no answer.

    The library wraps most of them in an error that says only that the cache holds nothing: the causes tell.
    """
    chain = list(_causes(error))
    return _answer(chain, wanted, address) or _local(chain, cache) or _no_answer(chain, address)


def _answer(chain: Sequence[BaseException], wanted: HubPath, address: str) -> AprError | None:
    for kind in (kind.__name__ for cause in chain for kind in type(cause).__mro__):
        if kind in _ANSWERS:
            refused, message, hint = _ANSWERS[kind]
            words = {"address": address, "repo": wanted.repo, "revision": wanted.revision}
            return refused(message.format(**words), hint=hint.format(**words))
    return None


def _local(chain: Sequence[BaseException], cache: Path) -> AprError | None:
    if isinstance(missing := chain[-1], ImportError):
        name = missing.name or str(missing)
        return MissingDependencyError(f"huggingface_hub needs {name} for this", hint=f"pip install {name}")
    for cause in chain:
        if isinstance(cause, OSError) and cause.errno in _DISK:
            found = storage_error(cause, cause.filename or cache)
            if cause.errno in (errno.ENOSPC, errno.EDQUOT):
                found.hint = "free some space, or set HF_HOME to a folder on another disk, and run it again"
            return found
    return None


def _no_answer(chain: Sequence[BaseException], address: str) -> AprError:
    status = next((code for cause in chain if (code := _status(cause))), None)
    if status is not None:
        reason, hint = f"the hub answered {status}", _STATUS_HINTS.get(status, f"try again later; {_LOCAL_HINT}")
    elif any(isinstance(cause, TimeoutError) or "Timeout" in type(cause).__name__ for cause in chain):
        reason, hint = "the hub did not answer in time", _LOCAL_HINT
    elif any(_NETWORK & {kind.__name__ for kind in type(cause).__mro__} for cause in chain):
        reason, hint = f"the hub cannot be reached: {chain[-1]}", f"check the network and its proxies; {_LOCAL_HINT}"
    else:
        reason, hint = str(chain[0]), f"check the network; {_LOCAL_HINT}"
    return StorageError(f"{address} is not in the local cache and could not be fetched: {reason}", hint=hint)


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EFBIG, errno.EMFILE)
_NETWORK = {"ConnectionError", "gaierror", "NetworkError", "ProxyError", "RemoteProtocolError", "SSLError"}


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it came from, innermost last."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    """The HTTP status of the answer that the error is about."""
    code = getattr(getattr(error, "response", None), "status_code", None)
    return code if isinstance(code, int) else None
