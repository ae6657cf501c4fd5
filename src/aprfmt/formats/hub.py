"""Hub addresses: resolved in the local Hugging Face cache, else read from the hub by ranges (`hub_files`).

hf://org/repo[@revision][/file][:QUANT]   org/repo[:QUANT]   a URL of the hub's pages   https://HOST/.../model.gguf

<cache>/models--org--repo/refs/<revision>      text file that holds a commit
<cache>/models--org--repo/snapshots/<commit>/  the repository's files, links into ../../blobs
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from aprfmt.errors import AprError, MissingDependencyError, NotFoundError, StorageError, UsageError
from aprfmt.formats import hub_files, url_files
from aprfmt.formats.hf_files import WEIGHT_SUFFIXES, belongs, read_text_file, read_weight_map
from aprfmt.formats.hub_errors import HubPath, cache_folder, failure, is_offline
from aprfmt.io import hub_cache
from aprfmt.io.server_url import server_url_of
from aprfmt.text import first_few

_COMMIT = re.compile(r"[A-Za-z0-9._-]+")
_ADDRESS = re.compile(
    r"hf://(?P<repo>[\w][\w.-]*/[\w][\w.-]*)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[\w.-]+|[\w.-]+))?(?:/(?P<file>[\w][\w .+/-]*))?/?"
    r"(?::(?P<quant>[\w.-]+))?",
    re.ASCII,
)
_BARE = re.compile(r"[\w][\w.-]*/[\w][\w.-]*(?::[\w.-]+)?", re.ASCII)
_PAGE = re.compile(
    r"/(?P<repo>[^/]+/[^/]+)(?:/(?:tree|blob|resolve|raw|commit)/(?P<revision>[^/]+)(?:/(?P<file>.+))?)?/?"
)
_NO_MODELS = ("datasets", "spaces", "docs", "collections", "papers", "api", "blog")
_PART = re.compile(r"-(?P<number>\d{5})-of-\d{5}\.gguf")
_QUANT = re.compile(r"(?:^|[-._/])((?:I?Q\d|TQ\d|MXFP\d|BF16|F16|F32)[A-Z0-9_]*)(?=[-./]|$)", re.IGNORECASE)
_WEIGHTS = ("*.safetensors", "*.gguf", "*.apr")


def looks_like_a_repository(text: str) -> bool:
    """Whether a missing path may mean a repository: org/name, not a file name, and its folder does not exist."""
    if not _BARE.fullmatch(text) or os.path.exists(text.partition("/")[0]):
        return False
    return not text.lower().endswith((*WEIGHT_SUFFIXES, ".json", ".txt", ".md", ".tmp"))


_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9]+):/*(?P<rest>.*)", re.DOTALL)
_FETCHES = {
    **dict.fromkeys(("s3", "s3a"), "aws s3 cp --recursive s3://{} FOLDER"),
    **dict.fromkeys(("gs", "gcs"), "gcloud storage cp --recursive gs://{} FOLDER"),
    **dict.fromkeys(("az", "abfs", "abfss", "ftp", "sftp", "ssh", "ollama"), "download the file and pass its path"),
    "oci": "apr pull oci://{} -o FOLDER",
    "file": "write /{}",
    "http": "write http://{}",
    "https": "write https://{}",
    **dict.fromkeys(("hf", "huggingface"), "write hf://{}"),
}


def hint_at_address(text: str) -> str | None:
    """A hint for a mistyped address or an unsupported store; None for other paths."""
    url = server_url_of(text)
    if url is not None and not text.partition(":")[0].endswith(WEIGHT_SUFFIXES):
        return f"did you mean {url}?"
    match = _SCHEME.fullmatch(text)
    hint = _FETCHES.get(match["scheme"].lower()) if match is not None else None
    if match is None or hint is None:
        return None
    name = os.path.basename(match["rest"])
    if name.endswith(WEIGHT_SUFFIXES) and " --recursive " in hint:
        hint = hint.replace(" --recursive", "").replace("FOLDER", f"{name}\nthen pass {name}")
    return hint.format(match["rest"])


def parse(address: str) -> HubPath:
    """Parses an address, `hf://` or a URL. Raises UsageError."""
    if not address.startswith("hf://"):
        return _of_page(address)
    match = _ADDRESS.fullmatch(address)
    # `--` replaces the slash in the cache's folder names, `..` would leave them.
    if match is None or ".." in address or "--" in match["repo"] or (match["file"] and match["quant"]):
        hint = "write hf://org/repo, hf://org/repo@revision, hf://org/repo/file or hf://org/repo:Q4_K_M"
        raise UsageError(f"not a repository address: {address!r}", hint=hint)
    file = (match["file"] or "").rstrip("/")
    return HubPath(match["repo"], match["revision"] or "main", file, match["quant"] or "")


def _of_page(url: str) -> HubPath:
    """Parses a URL of the hub's pages: /org/repo, /org/repo/tree/REV, /org/repo/blob/REV/file, ..."""
    parts, is_own = urlsplit(url), _is_of_the_hub(url)
    match = _PAGE.fullmatch(parts.path)
    if not is_own or match is None or match["repo"].split("/")[0] in _NO_MODELS:
        name = os.path.basename(parts.path) or "FILE"
        hint = f"curl -fL -O '{url}', then pass {name}; models of the hub: hf://org/repo"
        raise UsageError(f"not a model page of the hub: {url!r}", hint=hint)
    revision = f"@{unquote(match['revision'])}" if match["revision"] else ""
    file = f"/{unquote(match['file'])}" if match["file"] else ""
    return parse(f"hf://{match['repo']}{revision}{file}")


def snapshot(address: str) -> Path:
    """The folder (or file) of an address: in the local cache, or placeholders for the hub's files, or for one file
    of another server.

    No network request is made if the cache has it, or if HF_HUB_OFFLINE is set. Raises UsageError, NotFoundError,
    MissingDependencyError (huggingface_hub), StorageError.
    """
    if not address.startswith("hf://") and not _is_of_the_hub(address) and url_files.is_file_address(address):
        return url_files.open_url(address)
    return locate(parse(address), address)


def _is_of_the_hub(url: str) -> bool:
    """Whether the host of a URL is the hub's. Raises MissingDependencyError without huggingface_hub."""
    try:
        from huggingface_hub import constants
    except ImportError as error:
        hint = "pip install huggingface_hub, or write hf://org/repo"
        raise MissingDependencyError("a URL needs huggingface_hub", path=url, hint=hint) from error
    parts = urlsplit(url)
    return parts.netloc == urlsplit(constants.ENDPOINT).netloc or parts.hostname in getattr(
        constants, "HF_URL_HOSTS", ()
    )


def of_bare(text: str) -> Path:
    """`snapshot` of `org/repo[:QUANT]`, unless a local path has that name."""
    try:
        return locate(parse(f"hf://{text}"), text)
    except (NotFoundError, StorageError, MissingDependencyError) as error:
        hint = f"check the path; for a repository of the hub: {error.hint}"
        raise NotFoundError(
            f"no such file or folder, and as a repository of the hub: {error.message}", path=text, hint=hint
        ) from error


def locate(wanted: HubPath, address: str) -> Path:
    """`snapshot` of a parsed address, which messages call `address`."""
    cache = cache_folder()
    found = _cached(wanted, cache)
    offline = is_offline()
    # Offline, an incomplete snapshot is better than none: its reader names the missing shard.
    if found is not None and (offline or _is_complete(found)):
        hub_cache.register(_snapshot_folder(wanted, cache) or found, _is_text)
        return found
    if offline:
        raise NotFoundError(
            f"{address} is not in the local cache, and HF_HUB_OFFLINE is set",
            path=cache,
            hint="unset HF_HUB_OFFLINE, or pass the path of a folder",
        )
    try:
        repository = hub_files.open_repository(wanted)
    except AprError:
        raise
    except Exception as error:  # the library passes through exceptions of its HTTP client
        raise failure(error, wanted, cache, address) from error
    name = wanted.file or _model_of([*repository.files], wanted, address)
    if name and name not in repository.files and not any(file.startswith(f"{name}/") for file in repository.files):
        raise NotFoundError(f"{address} is not on the hub", hint="check the file's name")
    below = f"{name}/" if name and name not in repository.files else ""
    heads = [file for file in repository.files if _is_wanted(file, name if not below else "", below)]
    repository.fetch_ahead(heads)
    return repository.folder / name if name else repository.folder


def _is_wanted(file: str, name: str, below: str) -> bool:
    """Whether opening the model reads the beginning of this file."""
    if name.endswith(".gguf"):
        return file == name
    return file.startswith(below) and belongs(file.removeprefix(below))


def _model_of(names: Iterable[str], wanted: HubPath, address: str) -> str:
    """The file of a repository that is meant: "" for the folder, or the GGUF of the quant."""
    names = [*names]
    models: dict[str, str] = {}
    for name in sorted(names):
        part = _PART.search(name)
        is_model = name.endswith(".gguf") and not re.search("mmproj|imatrix", name, re.IGNORECASE)
        if is_model and (part is None or int(part["number"]) == 1):
            models[name] = quant_of(name)
    if wanted.quant:
        found = [name for name, quant in models.items() if quant == wanted.quant.upper()]
        if len(found) == 1:
            return found[0]
        what = "none of" if not found else "several of"
        shown = first_few([f"{quant or '?'} ({name})" for name, quant in models.items()]) or "none"
        raise UsageError(
            f"{what} the GGUFs of {wanted.repo} are {wanted.quant}: {shown}", hint="name the file: hf://org/repo/file"
        )
    if not models or any(name.endswith((".safetensors", ".bin", ".pth", ".apr")) for name in names):
        return ""
    if len(models) == 1:
        return next(iter(models))
    shown = first_few([quant or name for name, quant in models.items()])
    raise UsageError(
        f"{wanted.repo} contains {len(models)} GGUFs: {shown}",
        hint=f"choose one: hf://{wanted.repo}:{next(filter(None, models.values()), 'Q4_K_M')}",
    )


def quant_of(name: str) -> str:
    """The quantization at the end of a GGUF's name, in capitals: "Q4_K_M"; "" if absent."""
    stem = _PART.sub("", name).removesuffix(".gguf")
    found = _QUANT.findall(stem)
    return str(found[-1]).upper() if found else ""


def _cached(wanted: HubPath, cache: Path) -> Path | None:
    folder = _snapshot_folder(wanted, cache)
    if folder is None:
        return None
    if wanted.file:
        return folder / wanted.file if (folder / wanted.file).is_file() else None
    if wanted.quant:
        with suppress(UsageError):
            return folder / _model_of([path.name for path in folder.glob("*.gguf")], wanted, str(wanted))
        return None
    has_weights = any(path.is_file() for pattern in _WEIGHTS for path in folder.glob(pattern))
    return folder if has_weights else None


def cached_config(repo: str) -> Path | None:
    """The snapshot of `repo` ("org/name") in the local cache with its config.json; downloads nothing."""
    try:
        wanted = parse(f"hf://{repo}")
    except UsageError:
        return None
    folder = _snapshot_folder(wanted, cache_folder())
    if folder is None or not (folder / "config.json").is_file():
        return None
    hub_cache.register(folder, _is_text)
    return folder


def _is_text(name: str) -> bool:
    return not name.endswith(WEIGHT_SUFFIXES)


def _snapshot_folder(wanted: HubPath, cache: Path) -> Path | None:
    repo = cache / ("models--" + wanted.repo.replace("/", "--"))
    commit = wanted.revision
    with suppress(OSError, UnicodeDecodeError):
        commit = (repo / "refs" / wanted.revision).read_text("utf-8").strip()
    return None if not _COMMIT.fullmatch(commit) or commit in (".", "..") else repo / "snapshots" / commit


def _is_complete(found: Path) -> bool:
    """Whether every shard of the folder's index exists; its reader judges a damaged one."""
    with suppress(AprError):
        for index in found.glob("*.safetensors.index.json"):
            shards = set(read_weight_map(read_text_file(index), index).values())
            return all((found / name).is_file() for name in shards)
    return True
