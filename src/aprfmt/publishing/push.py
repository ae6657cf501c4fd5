"""Publishes a file or a folder on the hub, in one commit, with a model card."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt import formats
from aprfmt.errors import AprError, MissingDependencyError, NotFoundError, RefusedError, StorageError, UsageError
from aprfmt.formats.hf_files import WEIGHT_SUFFIXES
from aprfmt.formats.hub import parse
from aprfmt.formats.hub_errors import HubPath, failure
from aprfmt.formats.hub_files import look_up
from aprfmt.formats.hub_requests import AnswerError
from aprfmt.io.links import check_links
from aprfmt.io.pipe import StartProgress, sha256_of_range
from aprfmt.io.source import Source, is_folder, read_whole
from aprfmt.provenance import provenance
from aprfmt.provenance.model_card import CARD
from aprfmt.publishing.card import ModelRow, license_of, renewed
from aprfmt.publishing.survey import identity_of, publishable, survey
from aprfmt.publishing.transfer import TransferReport
from aprfmt.text import first_few, plural
from aprfmt.types import PathLike

if TYPE_CHECKING:
    from huggingface_hub import HfApi


@dataclass(frozen=True, slots=True)
class PushedFile:
    """A file of a commit, by its name in the repository; `sha256` for weights only."""

    name: str
    size_bytes: int
    sha256: str | None = None


@dataclass(slots=True, kw_only=True)
class PushReport(TransferReport[PushedFile]):
    """The result of `push`; `to_json` is the object of `apr push --json`.

    Attributes:
        source: the path as given.
        repo, revision: the target repository and branch.
        url, commit: of the commit; None for a plan.
        created: whether the repository was (or would be) created.
        private: visibility of a repository created here.
        license: the license in the card.
        card: "made", "renewed" (apr's own section) or "unchanged".
        files: files in the commit, without the card.
        models: rows of the card's table of models.
        card_text: text of the card.
    """

    source: str
    repo: str
    revision: str
    url: str | None = None
    commit: str | None = None
    created: bool
    private: bool | None
    license: str | None
    card: str
    models: list[ModelRow]
    card_text: str
    plan: bool
    warnings: list[str] = field(default_factory=list)


def push(
    source: PathLike,
    repo: str,
    *,
    revision: str = "main",
    message: str | None = None,
    private: bool | None = None,
    create: bool = True,
    license: str | None = None,
    no_license: bool = False,
    follow_links: bool = False,
    card: PathLike | None = None,
    plan: bool = False,
    progress: StartProgress | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> PushReport:
    """Uploads a model file, or all files of a folder, to a repository of the hub in one commit.

    In an existing card only apr's own section changes: it lists the models with their bits per weight, sizes and
    checksums. Without a card in the repository, the folder's README.md is used, or a card is generated from the models'
    metadata. The token comes from HF_TOKEN or `hf auth login`.

    Args:
        source: the file or folder.
        repo: "org/name".
        revision: the branch; created if it does not exist.
        message: commit message.
        private: visibility of a repository created here; None: the organization's default.
        create: create the repository if it does not exist.
        license: license to set if the card has none.
        no_license: upload without a license.
        follow_links: upload files that symlinks refer to outside the folder.
        card: model card to upload instead of the repository's.
        plan: report what would be uploaded, without uploading; needs no network.
        progress: called with the number of bytes to hash; returns a function to call with the bytes of each step.
        log: called with a line before files are uploaded.

    Raises:
        RefusedError: no license, or nothing to upload.
        NotFoundError: no such source or, without `create`, no such repository.
        StorageError: the hub refuses the commit or does not respond; then nothing was committed.
    """
    start = time.monotonic()
    wanted, api = _target(repo, revision), _api(offline=plan)
    paths, refused = publishable(source, follow_links=follow_links)
    if license is not None:
        provenance.from_flags({"license": license})
    models, info, general, warnings = survey(formats.path_text(source, "source"), paths)
    there, unknown = _Repository.look_for_plan(api, wanted) if plan else (_Repository.look(api, wanted), None)
    if not there.exists and not create and unknown is None:
        raise NotFoundError(f"{wanted.repo} is not on the hub", hint="leave out --no-create to create it")
    warnings += [unknown] if unknown else []
    if refused:
        warnings.append(f"not uploaded: {first_few(refused)}")
    old = read_whole(card) if card is not None else there.card
    if old is None and CARD in paths:
        old = read_whole(paths[CARD])
    elif CARD in paths and card is None and read_whole(paths[CARD]) != old:
        warnings.append(
            f"the folder's {CARD} is not uploaded: the repository already has one; replace it with --card FILE"
        )
    paths.pop(CARD, None)
    known = license_of(old) or license or info.get("license")
    if known is None and not no_license:
        raise RefusedError(
            "the license of the model is missing",
            path=source,
            hint="set it with --license apache-2.0, or upload without one: --no-license",
        )
    before = {name: identity_of(path) for name, path in paths.items()}
    sums = _sums(paths, progress)
    info = info | ({"license": known} if known is not None else {})
    text = renewed(old, models, sums, info, general, there.names)
    files = [PushedFile(name, before[name].size, sums.get(name)) for name in paths]
    report = PushReport(
        source=os.fspath(source), repo=wanted.repo, revision=wanted.revision,
        created=not there.exists and unknown is None, private=private, license=known,
        card="made" if old is None else "unchanged" if text == there.card else "renewed", files=files, models=models,
        card_text=text.decode(), plan=plan, warnings=warnings,
    )  # fmt: skip
    if not plan:
        if not follow_links and is_folder(source):
            check_links(source, paths.values())  # again: a link may have come since
        log(f"uploading {plural(len(files), 'file')} to {wanted.repo}")
        if any(identity_of(path) != before[name] for name, path in paths.items()):
            raise RefusedError("a file changed while it was read", path=source, hint="run it again")
        _commit(api, wanted, there, paths, text, message or _message(source, models), private, report)
    report.seconds = time.monotonic() - start
    return report


def _target(repo: str, revision: str) -> HubPath:
    if "/" not in repo:
        raise UsageError(f"{repo!r} has no owner", hint=f"write the repository as org/name: OWNER/{repo}")
    text = repo if repo.startswith(("hf://", "https://", "http://")) else f"hf://{repo}"
    found = parse(text)
    if found.file or found.quant or (found.revision != "main" and revision != "main"):
        raise UsageError(f"{repo!r} is not a repository id", hint="apr push DIR org/name --revision BRANCH")
    return found if revision == "main" else parse(f"hf://{found.repo}@{revision}")


def _api(*, offline: bool) -> HfApi:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        hint = "pip install huggingface_hub"
        raise MissingDependencyError("publishing needs huggingface_hub", hint=hint) from error
    if not offline and _is_offline():
        raise UsageError("HF_HUB_OFFLINE is set", hint="unset HF_HUB_OFFLINE")
    return HfApi(library_name="aprfmt")


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


# --- what is there ---


@dataclass(frozen=True, slots=True)
class _Repository:
    """The repository as it is: its files, its last commit and its card."""

    exists: bool
    has_revision: bool = False
    names: tuple[str, ...] = ()
    commit: str | None = None
    card: bytes | None = None

    @classmethod
    def look_for_plan(cls, api: HfApi, wanted: HubPath) -> tuple[_Repository, str | None]:
        """The same without a network: then nothing is known of the repository, which the sentence says."""
        if _is_offline():
            return cls(exists=False), "HF_HUB_OFFLINE is set: the plan does not know what the repository contains"
        try:
            return cls.look(api, wanted), None
        except StorageError as error:
            return cls(exists=False), f"the plan does not know what the repository contains: {error.message}"

    @classmethod
    def look(cls, api: HfApi, wanted: HubPath) -> _Repository:
        """Asks the hub."""
        try:
            info = look_up(wanted)
        except AnswerError as error:
            if error.kind == "RevisionNotFoundError":
                return cls(exists=True)
            is_missing = error.response.status_code == 404 or api.token or _has_token()
            if error.kind == "RepositoryNotFoundError" and is_missing:
                return cls(exists=False)
            raise _refused(error, wanted) from error
        except AprError:
            raise
        except Exception as error:
            raise _refused(error, wanted) from error
        card = _remote_card(wanted, info.commit) if CARD in info.names else None
        return cls(True, True, info.names, info.commit, card)


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def _remote_card(wanted: HubPath, commit: str) -> bytes:
    path = formats.resolve(f"hf://{wanted.repo}@{commit}/{CARD}")
    return read_whole(path)


def _sums(paths: dict[str, Path], progress: StartProgress | None) -> dict[str, str]:
    """SHA-256 of the files of weights."""
    weights = {name: path for name, path in paths.items() if name.endswith(WEIGHT_SUFFIXES)}
    tell = progress(sum(path.stat().st_size for path in weights.values())) if progress is not None else None
    sums = {}
    for name, path in weights.items():
        with Source.open(path) as source:
            sums[name] = sha256_of_range(source, 0, source.size)
            if tell is not None:
                tell(source.size, name)
    return sums


def _message(source: PathLike, models: Sequence[ModelRow]) -> str:
    names = ", ".join(dict.fromkeys(row.type for row in models))
    return f"Upload {Path(os.fspath(source)).name or 'model'} ({names}) with apr"


# --- what is sent ---


def _commit(
    api: HfApi,
    wanted: HubPath,
    there: _Repository,
    paths: dict[str, Path],
    card: bytes,
    message: str,
    private: bool | None,
    report: PushReport,
) -> None:
    from huggingface_hub import CommitOperationAdd

    operations = [CommitOperationAdd(name, str(path)) for name, path in paths.items()]
    operations.append(CommitOperationAdd(CARD, card))
    try:
        if not there.exists:
            api.create_repo(wanted.repo, private=private, exist_ok=True)
        if not there.has_revision and wanted.revision != "main" and not wanted.revision.startswith("refs/"):
            api.create_branch(wanted.repo, branch=wanted.revision, exist_ok=True)
        made = api.create_commit(
            wanted.repo, operations, commit_message=message, revision=wanted.revision, parent_commit=there.commit
        )
    except Exception as error:  # the library passes on whatever its HTTP client raises
        raise _refused(error, wanted) from error
    report.url, report.commit = made.commit_url, made.oid


def _refused(error: Exception, wanted: HubPath) -> AprError:
    return failure(error, wanted, Path(), wanted.repo, "could not be uploaded")
