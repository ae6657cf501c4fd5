"""What is published: the files of a model, and what it says of itself."""

from __future__ import annotations

import os
import re
from pathlib import Path

from aprfmt import formats
from aprfmt.canonical.model_kinds import is_clip
from aprfmt.convert.presets import PRESETS
from aprfmt.errors import AprError, CorruptError, RefusedError
from aprfmt.formats.hf_files import WEIGHT_SUFFIXES
from aprfmt.formats.hfdir import OF_TOOLS
from aprfmt.formats.signatures import check_required
from aprfmt.inspection.describe import inspect
from aprfmt.io import names
from aprfmt.io.links import check_links
from aprfmt.io.names import NameFinding
from aprfmt.io.source import FileIdentity, Source, is_folder
from aprfmt.model import Model
from aprfmt.provenance import provenance
from aprfmt.publishing.card import ModelRow
from aprfmt.trust.signature import UNREADABLE
from aprfmt.types import PathLike

_LEFT_OUT = re.compile(r"(^|/)__pycache__/|(^|/)[^/]*\.(tmp|lock|incomplete)$")


def publishable(source: PathLike, *, follow_links: bool) -> tuple[dict[str, Path], list[NameFinding]]:
    """The files of a model or folder by their published names, and those whose names are not published.

    If a signature is required, one must cover all files of a folder.

    Raises RefusedError for a folder without a model, or with links out of it unless `follow_links`.
    """
    if is_folder(source):
        check_required(Path(source), UNREADABLE)
    paths = _files(formats.path_text(source, "source"))
    if not follow_links and is_folder(source):
        check_links(source, paths.values())
    refused = names.findings(paths)
    for finding in refused:
        del paths[finding.name]
    return paths, refused


def _files(source: str) -> dict[str, Path]:
    path = Path(source)
    if not is_folder(path):
        with formats.open(path) as model:
            return {Path(part.path).name: Path(part.path) for part in model.sources}
    found: dict[str, Path] = {}
    for where, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if name not in OF_TOOLS)
        for name in sorted(files):
            place = Path(where, name).relative_to(path).as_posix()
            if not _LEFT_OUT.search(place):
                found[place] = path / place
    if not any(name.endswith(WEIGHT_SUFFIXES) for name in found):
        raise RefusedError("no model found in the folder", path=path, hint="apr push takes a model file or its folder")
    return found


def identity_of(path: Path) -> FileIdentity:
    """Which file it is, in which state. Raises NotFoundError, StorageError."""
    with Source.open(path) as source:
        assert source.identity is not None
        return source.identity


def survey(source: str, paths: dict[str, Path]) -> tuple[list[ModelRow], dict[str, str], dict[str, object], list[str]]:
    """The models, what the first of them says of itself, and a sentence for each that cannot be read."""
    single = [name for name in paths if formats.is_single_file(name)]
    places = {name: str(paths[name]) for name in single}
    weights = [name for name in paths if name.endswith((".safetensors", ".bin", ".pt", ".pth")) and "/" not in name]
    if weights and is_folder(source):
        index = next((name for name in paths if name.endswith(".index.json") and "/" not in name), weights[0])
        places = {index: source} | places
    rows, warnings = [], []
    info: dict[str, str] = {}
    general: dict[str, object] = {}
    for name, place in places.items():
        try:
            with formats.open(place) as model:
                model.check_intact()
                rows.append(_row(name, place, model))
                known = provenance.read(model)
                info, general = known.info | info, (known.general or {}) | general
        except CorruptError:
            raise
        except AprError as error:
            warnings.append(f"{name} is uploaded, but cannot be read as a model: {error.message}")
    if not rows:
        raise RefusedError(
            "no file of the folder can be read as a model", path=source, hint=warnings[0] if warnings else None
        )
    return rows, info, general, warnings


def _row(name: str, place: str, model: Model) -> ModelRow:
    found = inspect(place)
    n_bits = 8 * sum(row["bytes"] for row in found.dtypes.values())
    bits = n_bits / found.param_count if found.param_count else None
    stored = model.metadata.get("general.file_type") if model.convention == "gguf" else None
    presets = {preset.file_type: preset.name.upper() for preset in PRESETS.values()}
    type = presets.get(stored) if isinstance(stored, int) else None
    if is_clip(model):
        type = f"towers, {next(iter(found.dtypes), '')}"
    kind = type or next(iter(found.dtypes), "")
    return ModelRow(name, found.format, kind, found.architecture, found.param_count, bits, found.size_bytes)
