"""Reads an opened model into canonical form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy

from aprfmt.arch import names
from aprfmt.arch.extra_tensors import outside, unknown_empty
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.mlx import is_mlx_name
from aprfmt.arch.row import Architecture
from aprfmt.arch.similar import AUTO_SIMILAR, SIMILAR, differing_keys
from aprfmt.arch.table import ARCHITECTURES, lookup, nearest
from aprfmt.canonical import sidecar
from aprfmt.canonical.adapter import read_adapter
from aprfmt.canonical.checks import check_network
from aprfmt.canonical.completion import (
    complete_from_apr,
    complete_from_gguf,
    complete_from_tensors,
    drop_tied_head,
    restore_checkpoint,
    take_factors,
)
from aprfmt.canonical.detection import config_of, find_part, find_row, hparams_as, name_hint
from aprfmt.canonical.lora_pairs import Base
from aprfmt.canonical.model import Canonical, count_elements
from aprfmt.canonical.model_kinds import ADAPTER, is_adapter
from aprfmt.canonical.naming import name_tensors, names_from_mlx
from aprfmt.canonical.packed import AS_STORED, Decoding, packing
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.canonical.tower import read_tower
from aprfmt.errors import AprError, RefusedError, UnmappedError
from aprfmt.formats.apr_metadata import FILES_PREFIX
from aprfmt.formats.gguf import GgufNative
from aprfmt.formats.hfdir import HfNative
from aprfmt.model import Model
from aprfmt.provenance import provenance
from aprfmt.text import first_few

_NUMBER = re.compile(r"\d+")


def canonical(
    model: Model,
    *,
    arch: str | None = None,
    allow_unmapped: bool = False,
    decoding: Decoding = AS_STORED,
    base: Base | None = None,
) -> Canonical:
    """Reads `model` into canonical form; `arch` names a row of the architecture table to use instead of detection.

    For "auto-similar" an unknown class is read as the row that it is in all but name, see similar_row.

    `decoding` controls quantized weights, `base` is the base model of an adapter. Raises UnmappedError for an
    architecture or tensor without a row, naming the nearest known one, and for adapters what
    canonical.adapter.read_adapter raises.
    """
    if is_adapter(model) and (found := _adapter(model, base, allow_unmapped)) is not None:
        return found
    row = find_row(model, arch)
    warnings = list(model.warnings)
    if arch == AUTO_SIMILAR and row is None and model.tensors:
        row = similar_row(model)
        warnings.append(
            f"unknown class {_class_of(model)}: read as {row.id}, which has the same tensors and config keys"
        )
    if part := find_part(model, row):
        row = None
    # An .apr keeps the names it was imported with, and without tensors nothing needs a name.
    elif row is None and not (allow_unmapped or model.convention == "apr" or not model.tensors):
        raise _unknown_architecture(model)
    hparams = hparams_as(model, row)
    if row is not None:
        hparams.architecture = row.id
        if model.convention == "gguf":
            warnings += complete_from_gguf(model, row, hparams)
        elif model.convention == "apr":
            complete_from_apr(model, row, hparams)
    gguf = model.native_as(GgufNative)
    kept, warning = sidecar.read_sidecar(gguf.parts[0].kv) if gguf is not None else (None, None)
    warnings += [warning] if warning else []
    if kept is not None and row is not None:
        take_factors(hparams, row, kept)
    extra_names = _extra_names(model, row, hparams) if row is not None else set[str]()
    packs = packing(model, row, hparams, decoding, extra_names, allow_unmapped=allow_unmapped)
    tensors, others, copies = name_tensors(model, row, hparams, allow_unmapped, packs, extra_names, decoding)
    tensors = names_from_mlx(row, hparams, tensors) if decoding.decode and model.convention != "gguf" else tensors
    if row is not None:
        complete_from_tensors(row, hparams, tensors, model.convention == "gguf")
    dropped = copies | drop_tied_head(row, tensors, hparams, model.convention == "gguf")
    known = provenance.read(model)
    warnings += [*known.warnings, *([packs.warning] if packs.warning else [])]
    if gguf is not None:
        restore_checkpoint(tensors, row, hparams, gguf.parts[0].kv, kept)
    if (folder := model.native_as(HfNative)) is not None:
        kept = sidecar.read_folder(folder.folder)
        facts = kept.metadata if kept is not None else {}
        known.info |= {name: str(facts[name]) for name in provenance.INFO_FIELDS if name in facts}
    n_params = count_elements(tensors.values(), packs)
    if known.general is not None and model.convention == "hf" and n_params and not hparams.num_experts:
        known.general.setdefault("size_label", provenance.size_label(n_params))
    return Canonical(
        model, row, hparams, model.tokenizer, known.info, tensors, dropped, tuple(warnings), known.general,
        sidecar=kept, files={t.name.removeprefix(FILES_PREFIX): CanonicalTensor(t.name, (t,)) for t in model.files},
        extras=others, part=part, packs=packs, tower=read_tower(model.metadata) if model.convention == "apr" else None,
    )  # fmt: skip


def _extra_names(model: Model, row: Architecture, h: Hyperparams) -> set[str]:
    """The names of the extra tensors."""
    extra = {name for name in outside(row, h, model.tensors) if not is_mlx_name(row, name)}
    return extra | unknown_empty(row, {t.name: t.shape for t in model.tensors.values()})


def _adapter(model: Model, base: Base | None, allow_unmapped: bool) -> Canonical | None:
    """The adapter `model`; None for another type, which is stored unchanged."""
    try:
        adapter = read_adapter(model, base)
    except RefusedError:
        if allow_unmapped:
            return None
        raise
    known = provenance.read(model)
    return Canonical(
        model, None, deepcopy(adapter.of.hparams if adapter.of is not None else model.hparams), model.tokenizer,
        known.info, {}, warnings=(*model.warnings, *known.warnings), general=known.general,
        files={t.name.removeprefix(FILES_PREFIX): CanonicalTensor(t.name, (t,)) for t in model.files},
        extras=adapter.tensors, part=ADAPTER, adapter=adapter,
    )  # fmt: skip


def _class_of(model: Model) -> str | None:
    hparams = model.hparams
    return hparams.hf_architecture or hparams.architecture or hparams.hf_model_type


def _unknown_architecture(model: Model) -> UnmappedError:
    word = _class_of(model)
    if word is None:
        return UnmappedError(
            "the file does not name its architecture",
            path=model.path,
            hint="set it with --arch; list the names with apr architectures",
        )
    # For some networks llama.cpp's file has fused tensors that cannot be split again.
    known = model.convention == "gguf" and any(row.gguf == word for row in ARCHITECTURES.values())
    fitting = fitting_rows(model)
    config = config_of(model) or {} if fitting else {}
    if same := _same_rows(fitting, config):
        hint = f"its tensors and config keys are those of {same[0].id}: try --arch {AUTO_SIMILAR}"
    elif fitting:
        row, *rest = [row.id for row in fitting]
        others = f" (and of {first_few(rest)})" if rest else ""
        apart = first_few(differing_keys(fitting[0], config))
        hint = f"its tensors match {row}{others}, except for {apart} in config.json: try --arch {row}"
    else:
        hint = "use the original checkpoint" if known else name_hint(word)
    return UnmappedError(
        f"architecture {word!r} is not supported"
        + (" with these GGUF keys and tensors: this GGUF cannot be converted back to a checkpoint" if known else ""),
        path=model.path,
        hint=f"{hint}; or add --allow-unmapped to keep the tensor names",
    )


def similar_row(model: Model) -> Architecture:
    """The row of which a checkpoint of an unknown class has all tensors and config keys, and no others.

    Raises UnmappedError if it has none, with what is different from the nearest one.
    """
    rows, config = [ARCHITECTURES[name] for name in SIMILAR], config_of(model) or {}
    fitting = fitting_rows(model, rows)
    if same := _same_rows(fitting, config):
        return same[0]
    what, hint = _nearest_tensors(model, rows), "apr architectures lists all architectures"
    if fitting:
        near = min(fitting, key=lambda row: len(differing_keys(row, config)))
        what = f"config.json has {first_few(differing_keys(near, config))}, unlike {near.id}"
        hint = f"if these keys do not change the computation, use --arch {near.id}"
    raise UnmappedError(f"{_class_of(model)} does not match a known network: {what}", path=model.path, hint=hint)


def _same_rows(fitting: Sequence[Architecture], config: Mapping[str, object]) -> list[Architecture]:
    """Those of the rows that have all config keys too, in the order of SIMILAR."""
    same = (row for row in fitting if row.id in SIMILAR and not differing_keys(row, config))
    return sorted(same, key=lambda row: SIMILAR.index(row.id))


def _nearest_tensors(model: Model, rows: Sequence[Architecture]) -> str:
    """The tensors that the row with most of a checkpoint's tensors does not have."""
    samples = list({_NUMBER.sub("0", name): name for name in model.tensors}.values())
    unknown = {row.id: [name for name in samples if not _is_named(row, name)] for row in rows}
    row, apart = min(unknown.items(), key=lambda found: len(found[1]))
    if not apart:
        return f"some tensors of {row} are missing or have other shapes"
    return (
        f"{row} has no tensor {first_few(apart)}"
        if len(apart) < len(samples)
        else "no architecture has tensors of these names"
    )


def _is_named(row: Architecture, name: str) -> bool:
    return names.canonical_name(row, name) is not None or names.ignorable(row, name)


def fitting_rows(model: Model, rows: Sequence[Architecture] = ()) -> list[Architecture]:
    """Rows whose networks have exactly the tensors of a checkpoint, by its config.json; [] if none does.

    The rows whose class name is most similar to the model's come first. `rows` are those to try, () for all.
    """
    if model.convention != "hf" or not model.tensors:
        return []
    samples = list({_NUMBER.sub("0", name): name for name in model.tensors}.values())
    near = nearest(model.hparams.hf_architecture or "")
    first = lookup(near) if near else None
    found = []
    for row in sorted(rows or ARCHITECTURES.values(), key=lambda row: row is not first):
        if row.hf_when or not all(_is_named(row, name) for name in samples):
            continue
        try:
            c = canonical(model, arch=row.id)
            check_network(c, row)
        except AprError:
            continue
        if not c.extras:
            found.append(row)
    return found
