"""`hf://org/repo[@revision][/file]`: the local Hugging Face cache first, else a download by huggingface_hub.

<cache>/models--org--repo/refs/<revision>      text file that holds a commit
<cache>/models--org--repo/snapshots/<commit>/  the repository's files, links into ../../blobs
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from aprfmt.errors import AprError, MissingDependencyError, NotFoundError, StorageError, UsageError
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
    repo = cache / ("models--" + wanted.repo.replace("/", "--"))
    commit = wanted.revision
    with suppress(OSError, UnicodeDecodeError):
        commit = (repo / "refs" / wanted.revision).read_text("utf-8").strip()
    if not _COMMIT.fullmatch(commit) or commit in (".", ".."):
        return None
    folder = repo / "snapshots" / commit
    if wanted.file:
        return folder / wanted.file if (folder / wanted.file).is_file() else None
    has_weights = any(path.is_file() for pattern in _WEIGHTS for path in folder.glob(pattern))
    return folder if has_weights else None


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
        from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
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
    except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError) as error:
        hint = "check the name; a private or gated repository needs HF_TOKEN"
        raise NotFoundError(f"{address} is not on the hub", hint=hint) from error
    except Exception as error:  # the library passes on whatever its HTTP client raises
        raise StorageError(
            f"{address} could not be fetched: {error}", hint="check the network, or give a path to a folder"
        ) from error
    if wanted.file and not (folder / wanted.file).is_file():
        raise NotFoundError(f"{address} is not on the hub", hint="check the file's name")
    return folder / wanted.file if wanted.file else folder
