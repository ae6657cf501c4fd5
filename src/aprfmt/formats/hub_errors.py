"""Parsed hub addresses, the location of huggingface_hub's cache, and explanations of failed requests."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aprfmt.errors import AprError, MissingDependencyError, NotFoundError, StorageError, causes, storage_error
from aprfmt.io.cache import expand_home


@dataclass(frozen=True, slots=True)
class HubPath:
    """A parsed address.

    Attributes:
        repo: "org/name".
        revision: a branch, a tag, a commit or "refs/pr/N".
        file: relative to the repository, "" for all of it.
        quant: which of the repository's GGUFs, "Q4_K_M"; "" for none.
    """

    repo: str
    revision: str = "main"
    file: str = ""
    quant: str = ""

    def __str__(self) -> str:
        revision = "" if self.revision == "main" else f"@{self.revision}"
        file, quant = (f"{mark}{text}" if text else "" for mark, text in (("/", self.file), (":", self.quant)))
        return f"hf://{self.repo}{revision}{file}{quant}"


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """huggingface_hub's cache folder: HF_HUB_CACHE, or below HF_HOME, XDG_CACHE_HOME, ~.

    Raises UsageError if ~ names an unknown user.
    """
    env = os.environ if environment is None else environment
    own = next((env[key] for key in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE") if env.get(key)), "")
    home = env.get("HF_HOME") or (env.get("XDG_CACHE_HOME") or "~/.cache") + "/huggingface"
    return expand_home(own or home + "/hub", "the hub cache", "HF_HOME")


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids requests."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


# huggingface_hub's exception classes by name; the first match counts.
_ANSWERS = {
    "GatedRepoError": (
        StorageError,
        "{address} is gated",
        "accept its terms at {page}, then hf auth login, or set HF_TOKEN",
    ),
    "RepositoryNotFoundError": (
        NotFoundError,
        "{address} is not on the hub",
        "check the name; a private repository needs hf auth login, or HF_TOKEN",
    ),
    "RevisionNotFoundError": (NotFoundError, "{repo} has no revision {revision}", "check the name after the @"),
    "RemoteEntryNotFoundError": (NotFoundError, "{address} is not on the hub", "check the file's name"),
}
_STATUS_HINTS = {
    401: "hf auth login, or set HF_TOKEN to a valid token or unset it: the hub rejected the current one",
    403: "use a token with read access to the repository: hf auth login or HF_TOKEN",
    429: "wait a few minutes, or set HF_TOKEN: the hub limits the rate of requests",
}
_NOT_FETCHED = "is not in the local cache and could not be fetched"
_SECRET = re.compile(r"hf_\w+|(?<=Bearer )\S+")
_ELSEWHERE = "; cached files need no network; or pass the path of a folder"


def failure(error: BaseException, wanted: HubPath, cache: Path, address: str, what: str = _NOT_FETCHED) -> AprError:
    """Why a request failed: the disk, a response of the hub, or no response; `what` describes the consequence.

    The library wraps most causes in an error about a missing cache entry, so the chain of causes is searched.
    """
    chain = list(causes(error))
    return _answer(chain, wanted, address) or _local(chain, cache) or _no_answer(chain, address, what)


def _answer(chain: Sequence[BaseException], wanted: HubPath, address: str) -> AprError | None:
    names = [
        name for cause in chain for name in (getattr(cause, "kind", ""), *(k.__name__ for k in type(cause).__mro__))
    ]
    for kind in names:
        if kind in _ANSWERS:
            refused, message, hint = _ANSWERS[kind]
            from huggingface_hub import constants

            page = f"{constants.ENDPOINT}/{wanted.repo}"
            words = {"address": address, "repo": wanted.repo, "revision": wanted.revision, "page": page}
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


def _no_answer(chain: Sequence[BaseException], address: str, what: str) -> AprError:
    elsewhere = _ELSEWHERE if what == _NOT_FETCHED else ""
    status = next((code for cause in chain if (code := _status(cause))), None)
    if status is not None:
        reason, hint = f"the hub returned {status}", _STATUS_HINTS.get(status, f"try again later{elsewhere}")
    elif any(isinstance(cause, TimeoutError) or "Timeout" in type(cause).__name__ for cause in chain):
        reason, hint = "the hub timed out", f"try again later{elsewhere}"
    elif any(_NETWORK & {kind.__name__ for kind in type(cause).__mro__} for cause in chain):
        reason, hint = f"the hub cannot be reached: {chain[-1]}", f"check the network and its proxies{elsewhere}"
    else:
        reason, hint = str(chain[0]), f"check the network{elsewhere}"
    return StorageError(f"{address} {what}: {_SECRET.sub('…', reason)}", hint=hint)


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EFBIG, errno.EMFILE)
_NETWORK = {"ConnectionError", "gaierror", "NetworkError", "ProxyError", "RemoteProtocolError", "SSLError"}


def _status(error: BaseException) -> int | None:
    """The HTTP status of the response behind the error."""
    code = getattr(getattr(error, "response", None), "status_code", None)
    return code if isinstance(code, int) else None
