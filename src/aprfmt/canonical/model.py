"""An opened model under one set of names: Hugging Face tensor names and row order, one hyper-parameter set."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from aprfmt.arch import hparams as hp
from aprfmt.arch import mlx, names, rope
from aprfmt.arch.converter import check_layers
from aprfmt.arch.fields import as_mapping
from aprfmt.arch.flat_norms import flat_norms, read_flat_norms
from aprfmt.arch.grammar import FIELD_OF_SIZE, factor_names, has_layer, is_unwanted
from aprfmt.arch.heads import MODULE_KEYS, has_no_output
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.links import Link, find_link, link_of
from aprfmt.arch.names import Match
from aprfmt.arch.outside import ExtraTensors, is_draft, names_drafts, outside, part_of, parts
from aprfmt.arch.row import OF_TENSOR, Architecture
from aprfmt.arch.table import ARCHITECTURES, lookup, nearest, row_of
from aprfmt.canonical import envelope
from aprfmt.canonical.adapter import read_adapter
from aprfmt.canonical.envelope import Envelope
from aprfmt.canonical.kinds import is_adapter, looks_like_adapter
from aprfmt.canonical.packed import AS_STORED, Decoding, PackedTensor, Packing, packing
from aprfmt.canonical.pairs import Adapter, Base
from aprfmt.canonical.rowmap import BufferedPiece, keeps_dtype
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.canonical.tower import TowerPart, read_tower
from aprfmt.codecs.dtypes import DTYPES, n_elements
from aprfmt.codecs.stream import TensorSource
from aprfmt.errors import AprError, RefusedError, UnmappedError, UsageError
from aprfmt.formats import hf_files, hf_modules, hfdir, safetensors
from aprfmt.formats.apr_metadata import FILES_PREFIX
from aprfmt.formats.gguf import GgufNative
from aprfmt.formats.hfdir import HfNative
from aprfmt.formats.out import OutTensor
from aprfmt.formats.safetensors import SafetensorsNative
from aprfmt.io.source import is_file, is_folder
from aprfmt.model import Model, Tensor
from aprfmt.provenance import provenance
from aprfmt.text import first_few, plural
from aprfmt.tokenizer import apr as tokenizer_apr
from aprfmt.tokenizer import hf as tokenizer_hf
from aprfmt.tokenizer.model import Tokenizer

_NUMBER = re.compile(r"\d+")

ADAPTER = "an adapter"


@dataclass(frozen=True, slots=True, repr=False)
class Canonical:
    """A model ready to be written in any container. Nothing changes one: an edit is `dataclasses.replace`.

    Attributes:
        model: what was opened.
        arch: its row of the architecture table; None when no row fits (names are then the source's own).
        hparams: a copy of the model's, completed by what its tensors tell.
        tokenizer: the model's, or the one that the user gave.
        info: descriptive fields under APR's typed names: name, description, author, license, ...
        tensors: the network's by Hugging Face name, in the source's order, without a head that equals the embedding.
        outside: the source's tensors that are not part of the network (see arch.outside), under their own names; those
            of draft layers that the row names as if these were further layers.
        part: what the source holds where it is not a network ("an adapter"); "" for a network.
        dropped: tensors of the source, by its names, that are not carried, with the name that holds the same bytes.
        warnings: what the user should know of the source; targets collect theirs in Losses.
        general: descriptive facts without a typed name, see provenance; None when the source cannot tell.
        stated: typed fields that the user gave.
        envelope: what a GGUF tells of the `.apr` that it was made from.
        files: what else the source's folder holds, by path, as tensors of bytes named as an `.apr` names them.
        left_out: files of the source's folder that are not carried, and why, one sentence each.
        packs: packed weights of the source.
        is_whole: whether none of the source's tensors was left out on request.
        adapter: what the source is, where that is an adapter; its tensors are then those `outside`.
        tower: the towers that came from a GGUF of their own; their tensors are among those `outside`, by the names of
            a checkpoint. None where there are none, or where the source's own config.json says what they are.
        layers: where the network has other layers than the source (see relayered): the number that each has there,
            None for one of another model.
    """

    model: Model
    arch: Architecture | None
    hparams: Hyperparams
    tokenizer: Tokenizer | None
    info: dict[str, str]
    tensors: dict[str, CanonicalTensor]
    dropped: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    general: dict[str, object] | None = None
    stated: dict[str, str] = field(default_factory=dict)
    envelope: Envelope | None = None
    files: dict[str, CanonicalTensor] = field(default_factory=dict)
    left_out: Sequence[str] = ()
    outside: dict[str, CanonicalTensor] = field(default_factory=dict)
    part: str = ""
    packs: Packing = field(default_factory=Packing)
    is_whole: bool = True
    adapter: Adapter | None = None
    tower: TowerPart | None = None
    layers: Sequence[int | None] | None = None

    def __repr__(self) -> str:
        arch = self.arch.id if self.arch is not None else None
        return f"Canonical({str(self.model.path)!r}, {arch}, {plural(len(self.tensors), 'tensor')})"

    @property
    def embedding(self) -> str:
        """Name of the token embedding."""
        return names.embedding(self.arch)

    @property
    def head(self) -> str:
        """Name of the output head."""
        return names.head(self.arch)

    @property
    def all_tensors(self) -> dict[str, CanonicalTensor]:
        """The tensors of the network, then those outside it."""
        return {**self.tensors, **self.outside}

    @property
    def stored(self) -> dict[str, CanonicalTensor]:
        """All that an `.apr` holds as tensors: every tensor, and the files."""
        return {**self.all_tensors, **{file.name: file for file in self.files.values()}}

    @property
    def n_params(self) -> int:
        """Elements of all tensors, of packed ones of what they stand for."""
        return _count(self.all_tensors.values(), self.packs)

    def outside_parts(self) -> list[ExtraTensors]:
        """What the tensors outside the network are of, by the names that a checkpoint has them under."""
        own = self.model.convention == "hf"
        sizes = {t.pieces[0].name if own else t.name: t.n_bytes for t in self.outside.values()}
        return parts(self.arch, sizes, self.hparams.hf_architecture)


def _count(tensors: Collection[CanonicalTensor], packs: Packing) -> int:
    """Elements of the tensors, of packed ones of what they stand for."""
    if packs.decoded:
        return sum(n_elements(t.shape) for t in tensors)
    stored = {t.pieces[0].name for t in tensors} & packs.parts
    own = (t.shape for t in tensors if t.pieces[0].name not in stored)
    return sum(map(n_elements, (*own, *(weight.shape for weight in packs.weights if weight.pieces[0].name in stored))))


def canonical(
    model: Model,
    *,
    arch: str | None = None,
    allow_unmapped: bool = False,
    decoding: Decoding = AS_STORED,
    base: Base | None = None,
) -> Canonical:
    """Reads `model` into canonical form; `arch` names a row of the architecture table to use instead of detection.

    `decoding` says what becomes of packed weights, `base` what an adapter is for.
    Raises UnmappedError for an architecture or tensor without a row, naming the nearest known one, and for adapters
    what canonical.adapter.read_adapter raises.
    """
    if is_adapter(model) and (found := _adapter(model, base, allow_unmapped)) is not None:
        return found
    row = find_row(model, arch)
    if part := _part(model, row):
        row = None
    # An .apr keeps the names it was imported with, and without tensors there is nothing to name.
    elif row is None and not (allow_unmapped or model.convention == "apr" or not model.tensors):
        raise _unknown_architecture(model)
    hparams = hparams_as(model, row)
    warnings = list(model.warnings)
    if row is not None:
        hparams.architecture = row.id
        if model.convention == "gguf":
            warnings += _complete_from_gguf(model, row, hparams)
        elif model.convention == "apr":
            _complete_from_apr(model, row, hparams)
    kept: Envelope | None = None
    if (gguf := model.native_as(GgufNative)) is not None:
        kept, warning = envelope.read_envelope(gguf.parts[0].kv)
        warnings += [warning] if warning else []
        if kept is not None and row is not None:
            _take_factors(hparams, row, kept)
    elsewhere = outside(row, hparams, model.tensors) if row is not None else set[str]()
    packs = packing(model, row, hparams, decoding, elsewhere, allow_unmapped=allow_unmapped)
    tensors, others, copies = name_tensors(model, row, hparams, allow_unmapped, packs, elsewhere)
    tensors = _from_mlx(row, hparams, tensors) if decoding.decode and model.convention != "gguf" else tensors
    if row is not None:
        _complete_from_tensors(row, hparams, tensors, model.convention == "gguf")
    dropped = copies | _drop_tied_head(row, tensors, hparams, model.convention == "gguf")
    known = provenance.read(model)
    warnings += [*known.warnings, *([packs.warning] if packs.warning else [])]
    if gguf is not None and kept is not None:
        _restore(tensors, kept)
    if (folder := model.native_as(HfNative)) is not None:
        kept = envelope.read_folder(folder.folder)
        facts = kept.metadata if kept is not None else {}
        known.info |= {name: str(facts[name]) for name in provenance.INFO_FIELDS if name in facts}
    n_params = _count(tensors.values(), packs)
    if known.general is not None and model.convention == "hf" and n_params and not hparams.num_experts:
        known.general.setdefault("size_label", provenance.size_label(n_params))
    return Canonical(
        model,
        row,
        hparams,
        model.tokenizer,
        known.info,
        tensors,
        dropped,
        tuple(warnings),
        known.general,
        envelope=kept,
        files={t.name.removeprefix(FILES_PREFIX): CanonicalTensor(t.name, (t,)) for t in model.files},
        outside=others,
        part=part,
        packs=packs,
        tower=read_tower(model.metadata) if model.convention == "apr" else None,
    )


def _adapter(model: Model, base: Base | None, allow_unmapped: bool) -> Canonical | None:
    """The adapter that `model` is; None for one of another kind that is to be carried as it is."""
    try:
        adapter = read_adapter(model, base)
    except RefusedError:
        if allow_unmapped:
            return None
        raise
    known = provenance.read(model)
    return Canonical(
        model,
        None,
        deepcopy(adapter.of.hparams if adapter.of is not None else model.hparams),
        model.tokenizer,
        known.info,
        {},
        warnings=(*model.warnings, *known.warnings),
        general=known.general,
        files={t.name.removeprefix(FILES_PREFIX): CanonicalTensor(t.name, (t,)) for t in model.files},
        outside=adapter.tensors,
        part=ADAPTER,
        adapter=adapter,
    )


def _complete_from_apr(model: Model, row: Architecture, hparams: Hyperparams) -> None:
    """Sizes that the metadata leave out, by the shapes of the tensors."""
    if model.metadata.get("head_dim") is None:
        complete_from_shapes(hparams, model.tensors)
    if hparams.num_experts is None and "experts" in names.dimension_words(row):
        shapes = {tensor.name: tensor.shape for tensor in model.tensors.entries}
        hparams.num_experts = names.sizes_of_tensors(row, shapes).get("experts")


def _complete_from_tensors(
    row: Architecture, hparams: Hyperparams, tensors: dict[str, CanonicalTensor], from_gguf: bool
) -> None:
    """What the hyper-parameters have from the tensors, and the tensors from them."""
    _join_numbers(row, hparams, tensors, from_gguf)
    if any(t.link is not None and t.link.row.pack for t in tensors.values()):
        hparams.extra.setdefault("quantization_config", dict(row.packed_config))
    hp.set_by_tensors(hparams, row, tensors)


def _join_numbers(
    row: Architecture, hparams: Hyperparams, tensors: dict[str, CanonicalTensor], from_gguf: bool
) -> None:
    """Numbers that a checkpoint holds as tensors of one value and a GGUF as keys: each becomes the other too."""
    import numpy as np

    for key in row.keys:
        if key.role != OF_TENSOR:
            continue
        name = key.hf[0]
        if key.kind == "u64[]":
            _join_integers(row, hparams, tensors, name)
            continue
        if "{n}" in name:
            _join_list(row, hparams, tensors, name)
            continue
        number, tensor = hparams.extra.get(name), tensors.get(name)
        if from_gguf and tensor is None and isinstance(number, int | float):
            data = np.float32(number).tobytes()
            tensors[name] = CanonicalTensor(name, (BufferedPiece(name, "F32", (1,), partial(list, (data,))),))
        elif tensor is not None and n_elements(tensor.shape) == 1:
            hparams.extra[name] = float(tensor.produced.values().reshape(-1)[0])


def _join_integers(row: Architecture, h: Hyperparams, tensors: dict[str, CanonicalTensor], template: str) -> None:
    """The same of whole numbers of 64 bits, a tensor in one layer and a list in a GGUF."""
    import numpy as np

    of = next(one for one in row.tensors if one.hf[0] == template)
    layer = next((n for n in range(h.num_layers or 0) if has_layer(of.layers, h, n)), None)
    name, numbers = names.spell(template, layer), h.extra.get(template)
    if (tensor := tensors.get(name)) is not None:
        if tensor.dtype == "I64":
            h.extra[template] = np.frombuffer(tensor.produced.data(), "<i8").tolist()
    elif layer is not None and isinstance(numbers, list):
        data = np.array(numbers, "<i8").tobytes()
        tensors[name] = CanonicalTensor(name, (BufferedPiece(name, "I64", (len(numbers),), partial(list, (data,))),))


def _join_list(row: Architecture, h: Hyperparams, tensors: dict[str, CanonicalTensor], template: str) -> None:
    """The same of a number a layer: a list in a GGUF."""
    import numpy as np

    spelled = [names.spell(template, layer) for layer in range(h.num_layers or 0)]
    found = [tensors[name] for name in spelled if name in tensors]
    numbers = h.extra.get(template)
    if found and len(found) == len(spelled) and all(n_elements(tensor.shape) == 1 for tensor in found):
        h.extra[template] = [float(tensor.produced.values().reshape(-1)[0]) for tensor in found]
    elif not found and isinstance(numbers, list) and len(numbers) == len(spelled):
        dims = next(one.dims[0] for one in row.tensors if one.hf[0] == template)
        for name, number in zip(spelled, numbers, strict=True):
            data = np.float32(number).tobytes()
            shape = (1,) if dims else ()
            tensors[name] = CanonicalTensor(name, (BufferedPiece(name, "F32", shape, partial(list, (data,))),))


def _take_factors(hparams: Hyperparams, row: Architecture, kept: Envelope) -> None:
    """What the weights of a GGUF were multiplied by, as the envelope tells; without one it counts as part of them."""
    told = as_mapping(kept.metadata.get(hp.EXTRA_KEY))
    hparams.extra |= {name: told[name] for name in factor_names(row) if name in told}


def _restore(tensors: dict[str, CanonicalTensor], kept: Envelope) -> None:
    """Brings mapped tensors of a GGUF back to the bits that the envelope tells."""
    for name in kept.exact:
        tensor = tensors.get(name)
        if tensor is not None and tensor.link is not None and tensor.inverse:
            pieces = envelope.restore(tensor.link, tensor.pieces, kept.exact) or ()
            for own, piece in zip(tensor.link.hf, pieces, strict=False):
                tensors[own] = CanonicalTensor(own, (piece,), link=tensor.link)


def _complete_from_gguf(model: Model, row: Architecture, hparams: Hyperparams) -> list[str]:
    """What a GGUF says elsewhere than in its keys: rope scaling as tensors, the class by the table."""
    stored = [name for name in (*row.gguf_only, *flat_norms(row, 0)) if name in model.tensors]
    divisors = {name: model.tensors[name].numpy().reshape(-1).tolist() for name in stored}
    warnings = rope.read_factor_tensors(hparams, divisors)
    read_flat_norms(hparams, row, divisors)
    embedding = model.tensors.get("token_embd.weight")
    if hparams.vocab_size is None and embedding is not None and embedding.shape:
        hparams.vocab_size = embedding.shape[0]
    hparams.extra |= names.told_by_shapes(row, hparams, {name: tensor.shape for name, tensor in model.tensors.items()})
    if hparams.hf_architecture is None:
        hparams.hf_architecture, hparams.hf_model_type = hp.hf_identity(hparams, row)
    return warnings


def complete_from_shapes(hparams: Hyperparams, tensors: Mapping[str, Tensor | CanonicalTensor]) -> None:
    """The head size of an `.apr` that does not name it: the reference never stores the one of a GGUF."""
    found = (tensors.get(n) for n in ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight"))
    query = next((tensor for tensor in found if tensor is not None), None)
    if "head_dim" in hparams.extra or query is None or not query.shape or not hparams.num_heads:
        return
    head_dim, rest = divmod(query.shape[0], hparams.num_heads)
    if rest == 0 and head_dim != hparams.head_dim:
        hparams.head_dim = hparams.extra["head_dim"] = head_dim


def find_row(model: Model, arch: str | None = None) -> Architecture | None:
    """The row of the architecture table that `arch` names, else the one that the model itself tells."""
    if arch is not None and arch != "auto":
        row = lookup(arch)
        if row is None:
            raise UsageError(f"unknown architecture {arch!r}", hint=_nearest(arch))
        return row
    if model.convention == "apr" and model.metadata.get(UNMAPPED_KEY) is True:
        return None
    kv = model.metadata if model.convention == "gguf" else None
    return row_of(model.hparams, kv=kv, tensor_names=model.tensors)


def hparams_as(model: Model, row: Architecture | None) -> Hyperparams:
    """A copy of the model's hyper-parameters; those of a checkpoint read as the `row`, whatever its config names."""
    told = deepcopy(model.hparams)
    if row is None or model.convention != "hf" or told.architecture == row.id:
        return told
    folder, single = model.native_as(HfNative), model.native_as(SafetensorsNative)
    config = hfdir.config_of(folder) if folder else safetensors.config_of(single) if single else None
    if config is None:
        return told
    found = hp.from_hf_config(config, row)
    found.extra |= {key: value for key, value in told.extra.items() if MODULE_KEYS.fullmatch(key)}
    return found


def _part(model: Model, row: Architecture | None) -> str:
    """What the source holds, where that is not a network: its tensors keep their names, whatever they are."""
    if looks_like_adapter(model):
        return ADAPTER
    if model.convention == "gguf":
        return part_of(row, model.metadata, model.hparams, model.tensors)
    told = model.metadata.get(PART_KEY) if model.convention == "apr" else None
    return told if isinstance(told, str) else ""


def _unknown_architecture(model: Model) -> UnmappedError:
    hparams = model.hparams
    word = hparams.hf_architecture or hparams.architecture or hparams.hf_model_type
    if word is None:
        return UnmappedError(
            "the file does not name its architecture",
            path=model.path,
            hint="set it with --arch; list the names with apr architectures",
        )
    # Of some networks the file of llama.cpp holds products that nothing takes apart.
    known = model.convention == "gguf" and any(row.gguf == word for row in ARCHITECTURES.values())
    fitting = [row.id for row in fitting_rows(model)]
    if fitting:
        others = f" (and of {first_few(fitting[1:])})" if fitting[1:] else ""
        hint = f"its tensors match {fitting[0]}{others}: try --arch {fitting[0]}"
    else:
        hint = "use the original checkpoint" if known else _nearest(word)
    return UnmappedError(
        f"architecture {word!r} is not supported"
        + (" for a GGUF with these keys and tensors: it cannot be converted back to a checkpoint" if known else ""),
        path=model.path,
        hint=f"{hint}; or add --allow-unmapped to keep the tensor names as they are",
    )


def fitting_rows(model: Model) -> list[Architecture]:
    """The rows whose networks have just the tensors of a checkpoint, by its config.json; [] where none has.

    The rows of the class whose name looks most like the model's come first.
    """
    if model.convention != "hf" or not model.tensors:
        return []
    samples = list({_NUMBER.sub("0", name): name for name in model.tensors}.values())
    near = nearest(model.hparams.hf_architecture or "")
    first = lookup(near) if near else None
    found = []
    for row in sorted(ARCHITECTURES.values(), key=lambda row: row is not first):
        if row.hf_when or not all(names.canonical_name(row, name) or names.ignorable(row, name) for name in samples):
            continue
        try:
            c = canonical(model, arch=row.id)
            _check_network(c, row)
        except AprError:
            continue
        if not c.outside:
            found.append(row)
    return found


def _nearest(word: str) -> str:
    """What the user may have meant, and where all names stand."""
    near = nearest(word)
    return (f"the nearest is {near!r}; " if near else "") + "apr architectures lists all of them"


def _drop_tied_head(
    row: Architecture | None, tensors: dict[str, CanonicalTensor], hparams: Hyperparams, from_gguf: bool
) -> dict[str, str]:
    """Drops a head that is declared tied and holds the embedding's bytes; a different one is kept and untied."""
    head_name, embedding_name = names.head(row), names.embedding(row)
    head, embedding = tensors.get(head_name), tensors.get(embedding_name)
    if head is None:
        if hparams.tied is None and embedding is not None:
            hparams.tied = True
        return {}
    copied = row is not None and row.head_always and not hparams.tied and from_gguf
    if embedding is None or not (hparams.tied or copied):
        return {}
    hparams.tied = same = _is_copy(head, embedding)
    if not same:
        return {}
    del tensors[head_name]
    return {head.pieces[0].name: embedding_name}


def _is_copy(a: CanonicalTensor, b: CanonicalTensor) -> bool:
    """Whether two tensors hold the same bytes."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    x, y = a.source, b.source
    if x is not None and y is not None and x.source is y.source and x.offset == y.offset:
        return True
    return all(p == q for p, q in zip(a.chunks(), b.chunks(), strict=True))


def embedding_rows(c: Canonical) -> int | None:
    """Rows of the token embedding, the length that the token list must have; vocab_size where there is none."""
    tensor = c.tensors.get(c.embedding)
    return tensor.shape[0] if tensor is not None else c.hparams.vocab_size


def from_gguf(c: Canonical) -> bool:
    """Whether the model is a GGUF, or an `.apr` that was imported from one: what is outside has names of a GGUF."""
    return c.model.convention == "gguf" or (
        c.model.convention == "apr" and c.model.metadata.get("original_format") == _ORIGINAL["gguf"]
    )


def named_drafts(c: Canonical) -> dict[str, CanonicalTensor]:
    """The tensors of draft layers whose names the row has on both sides."""
    if c.arch is None or not names_drafts(c.arch):
        return {}
    return {n: t for n, t in c.outside.items() if t.link is not None or names.matches(c.arch, n)}


def with_drafts_counted(c: Canonical) -> Canonical:
    """`c` for a container made anew: with the number of draft layers that have names there."""
    if c.arch is None:
        return c
    found = (names.matches(c.arch, n, side) for n in named_drafts(c) for side in ("hf", "gguf"))
    n_drafts = len({match.layer for matches in found for match in matches})
    known = hp.drafts_key(c.arch).hf
    extra = {name: value for name, value in c.hparams.extra.items() if name not in known}
    if (n_drafts and known) or (names_drafts(c.arch) and len(extra) < len(c.hparams.extra)):
        extra[known[0]] = n_drafts
    return replace(c, hparams=replace(c.hparams, extra=extra))


def without_drafts(c: Canonical) -> tuple[Canonical, list[ExtraTensors]]:
    """`c` without its draft layers, and what they were."""
    drafts = {name: t for name, t in c.outside.items() if is_draft(c.arch, name)}
    others = {name: t for name, t in c.outside.items() if name not in drafts}
    known = hp.drafts_key(c.arch).hf
    extra = {name: 0 if name in known else value for name, value in c.hparams.extra.items()}
    left = replace(c, outside=others, hparams=replace(c.hparams, extra=extra), is_whole=not drafts)
    return left, replace(c, outside=drafts).outside_parts()


_SHARED = ("token_embd.weight", "output_norm.weight", "output.weight")
"""What draft layers share with the network, by GGUF names."""


def drafts_alone(c: Canonical) -> tuple[Canonical, int]:
    """`c` with its draft layers and what they share with the network alone, and how many tensors of it are left out.

    Raises RefusedError where there are no draft layers that the row names.
    """
    drafts = named_drafts(c)
    if c.arch is None or not drafts:
        raise RefusedError(
            "the model has no MTP layers that a GGUF can hold",
            path=c.model.path,
            hint="leave out --mtp-only to write the model itself",
        )
    shared = {names.special(c.arch, name) for name in _SHARED}
    kept = {name: t for name, t in c.tensors.items() if name in shared}
    n_left = len(c.tensors) - len(kept)
    for beginning, instead in c.arch.drafts_apart:
        own = (t for name, t in c.outside.items() if name.startswith(beginning))
        kept |= {name: replace(t, name=name) for t in own for name in (instead + t.name.removeprefix(beginning),)}
    return replace(c, tensors=kept, outside=drafts, is_whole=False), n_left


# Convention of the source -> APR's `original_format`.
_ORIGINAL = {"gguf": "gguf", "hf": "safetensors"}

PART_KEY = "aprfmt.part"
"""APR metadata key that tells what a file holds which is not a network."""

UNMAPPED_KEY = "aprfmt.unmapped"
"""APR metadata key of a network without a row, though its architecture has the name of one: a GGUF may say "mixtral",
which llama.cpp calls "llama"."""


def _is_unmapped(c: Canonical) -> bool:
    named = c.tensors and c.adapter is None and not c.part and c.arch is None
    return bool(named) and lookup(c.hparams.architecture or "") is not None


def apr_metadata_of(c: Canonical, tensors: list[OutTensor]) -> dict[str, object]:
    """The metadata of an `.apr` for `c`, without the record of its source files."""
    further = {
        PART_KEY: c.part or None,
        UNMAPPED_KEY: _is_unmapped(c) or None,
        **(c.adapter.to_metadata() if c.adapter is not None else {}),
        **(c.tower.to_metadata() if c.tower is not None else {}),
    }
    origin, n_bytes = provenance.Provenance(c.info, c.general), sum(t.n_bytes for t in tensors)
    kind = _ORIGINAL.get(c.model.convention)
    return apr_metadata_with(c.hparams, c.tokenizer, origin, further, kind=kind, n_bytes=n_bytes, n_params=c.n_params)


def apr_metadata_with(
    h: Hyperparams,
    tokenizer: Tokenizer | None,
    origin: provenance.Provenance,
    further: Mapping[str, object],
    *,
    kind: str | None,
    n_bytes: int,
    n_params: int,
) -> dict[str, object]:
    """The metadata of an `.apr` whose tensors have so many bytes and elements.

    `kind` is what its weights were read from. What is None in `further` is left out.
    """
    metadata = {
        "model_type": h.hf_model_type or h.architecture or "",
        **origin.info,
        "original_format": kind,
        "total_size": n_bytes,
        "param_count": n_params,
        **hp.to_apr(h),
        **provenance.to_metadata(origin.general),
        **further,
        **(tokenizer_apr.to_metadata(tokenizer) if tokenizer is not None else {}),
    }
    return {key: value for key, value in metadata.items() if value is not None}


# --- checks ---


def require_config(model: Model, allow_no_config: bool, arch: str | None = None) -> None:
    """Refuses weights without a config.json, unless the user says that they go without."""
    if allow_no_config or model.convention != "hf" or model.hparams.hidden_size is not None:
        return
    if hparams_as(model, find_row(model, arch)).hidden_size is not None:
        return
    if looks_like_adapter(model):
        return  # its config describes the base model's
    raise RefusedError(
        "no config.json found next to the weights: dimensions and architecture are unknown",
        path=model.path,
        hint="put the model's config.json there, or import with --allow-no-config --arch NAME",
    )


def with_dims_of_tensors(c: Canonical) -> Canonical:
    """`c` with the dimensions that its tensor shapes tell, where there is no config.json."""
    if not c.tensors or c.model.convention != "hf" or c.hparams.hidden_size is not None:
        return c
    row = c.arch or ARCHITECTURES["llama"]
    sizes = names.sizes_of_tensors(row, network_shapes(c))
    if "q" in sizes and sizes.get("heads"):
        sizes.setdefault("head_dim", sizes["q"] // sizes["heads"])
    if head_dim := sizes.get("head_dim"):
        heads = {"heads": sizes.get("q"), "kv_heads": sizes.get("kv")}
        sizes |= {word: rows // head_dim for word, rows in heads.items() if rows is not None}
    h = replace(c.hparams, extra=dict(c.hparams.extra))
    for word, field_name in FIELD_OF_SIZE.items():
        setattr(h, field_name, sizes.get(word))
    # None is unknown, which is not what transformers would assume.
    own = names.dimension_words(row) - {*FIELD_OF_SIZE, "q", "kv"}
    h.extra |= {word: sizes.get(word) for word in own}
    check_layers(h)
    warning = "no config.json: dimensions are inferred from tensor shapes, rope and norm constants are unknown"
    return replace(c, hparams=h, warnings=(*c.warnings, warning))


def check_before_writing(c: Canonical, allow_unmapped: bool) -> list[str]:
    """Warnings about the tokenizer. Raises RefusedError, UnmappedError for a model that could not be loaded again."""
    if c.all_tensors and c.arch is not None:
        _check_network(c, c.arch, allow_unmapped=allow_unmapped)
    for file, problem, tensor in hfdir.modules_problems(c.model):
        raise RefusedError(
            f"{file} {problem}",
            path=c.model.path,
            tensor=tensor,
            hint=f"fetch the repository again, or take {hf_modules.MODULES_NAME} out of the folder",
        )
    return check_vocabulary(c)


def _check_network(c: Canonical, row: Architecture, *, allow_unmapped: bool = False) -> None:
    """Raises RefusedError, UnmappedError where the tensors are not those of the network, by name and shape."""
    shapes = network_shapes(c)
    if not allow_unmapped:
        names.check_tensors(row, c.hparams, [n for n in shapes if not names.is_gguf_only(row, n)])
    names.check_shapes(row, c.hparams, shapes | shapes_after_links(c.tensors))


def shapes_after_links(tensors: Mapping[str, CanonicalTensor]) -> dict[str, tuple[int, ...]]:
    """Shapes that tensors kept under GGUF names will have in a checkpoint, by Hugging Face name."""
    found = {id(t.link): t.link for t in tensors.values() if t.link is not None and t.name not in t.link.hf}
    return {
        name: shape
        for link in found.values()
        if not link.row.pack  # a checkpoint has these as packed parts
        for name, shape in zip(link.hf, link.row_map.before, strict=True)
    }


def network_shapes(c: Canonical) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the network's tensors, packed weights as they are when decoded."""
    shapes = {t.name: t.shape for t in c.tensors.values()}
    if c.packs.decoded or c.arch is None:
        return shapes
    kept = {name: shape for name, shape in shapes.items() if name not in c.packs.parts}
    own = (p for p in c.packs.weights if p.pieces[0].name not in c.outside)
    found = kept | {names.canonical_name(c.arch, p.name) or p.name: p.shape for p in own}
    return mlx.checkpoint_shapes(c.arch, c.hparams, found) if c.model.convention != "gguf" else found


def check_vocabulary(c: Canonical) -> list[str]:
    """Warnings about the tokenizer of `c`.

    Its token list may be shorter than the embedding (it is padded on export); RefusedError where it is longer.
    """
    if c.tokenizer is None:
        missing = "no tokenizer: the output is not self-contained; add one with --tokenizer DIR"
        needed = c.tensors and not c.part and not (c.arch is not None and c.arch.no_vocabulary)
        return [missing] if needed else []
    warnings = list(c.tokenizer.notes)
    if c.tokenizer.model == "gpt2" and c.tokenizer.pre is None and c.tokenizer.pre_note:
        warnings.append(f"pre-tokenizer unknown: {c.tokenizer.pre_note}; an export to GGUF needs --pre NAME")
    embedding, size = c.tensors.get(c.embedding), c.hparams.vocab_size
    limit = f"but config.json a vocab_size of {size}"
    if embedding is not None:
        size = embedding.shape[0]
        limit = f"but the embedding {size} rows"
    if size is not None and len(c.tokenizer.tokens) > size and not c.part:  # an adapter may come with new tokens
        raise RefusedError(
            f"the tokenizer has {len(c.tokenizer.tokens)} tokens, {limit}",
            path=c.model.path,
            tensor=c.embedding if embedding is not None else None,
            hint="the tokenizer belongs to another model: set the right one with --tokenizer DIR",
        )
    return warnings


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a folder (or of one tokenizer.json). Raises NotFoundError, RefusedError, CorruptError."""
    if is_folder(path):
        config = path / "config.json"
        tokenizer = hf_files.load_tokenizer(path, hf_files.read_config(config) if is_file(config) else None)
    else:
        tokenizer = tokenizer_hf.read_files({"tokenizer.json": hf_files.read_text_file(path)}, None)
    if tokenizer is None:
        raise RefusedError(
            "no tokenizer found in the folder",
            path=path,
            hint="it must hold tokenizer.json, tokenizer.model, tekken.json, a .tiktoken file, vocab.txt, "
            "or vocab.json with merges.txt",
        )
    return tokenizer


# --- names ---


def name_tensors(
    model: Model,
    row: Architecture | None,
    h: Hyperparams,
    allow_unmapped: bool,
    packs: Packing,
    elsewhere: Collection[str],
) -> tuple[dict[str, CanonicalTensor], dict[str, CanonicalTensor], dict[str, str]]:
    """The network's tensors in the order of `model`, by Hugging Face name (their own without a `row`); the others,
    those `elsewhere`; names of the source that hold the bytes of another one again, and that one's name.

    Raises UnmappedError for a name that the family does not have, RefusedError for two tensors of one name and for
    dimensions that contradict the tensors.
    """
    if row is None and _part(model, row) == ADAPTER:
        elsewhere = {*model.tensors}
    elsewhere = {*elsewhere, *(weight.name for weight in packs.weights if weight.pieces[0].name in elsewhere)}
    tensors: dict[str, CanonicalTensor] = {}
    others: dict[str, CanonicalTensor] = {}
    copies: dict[str, str] = {}
    for tensor in _named(model, row, h, allow_unmapped, packs, elsewhere):
        found = others if tensor.name in elsewhere or tensor.pieces[0].name in elsewhere else tensors
        first = found.setdefault(tensor.name, tensor)
        if first is tensor:
            continue
        if not _is_copy(tensor, first):
            raise RefusedError("two tensors have this name", path=model.path, tensor=tensor.name)
        copies[tensor.pieces[0].name] = tensor.name
    return tensors, others, copies


def _named(
    model: Model,
    row: Architecture | None,
    h: Hyperparams,
    allow_unmapped: bool,
    packs: Packing,
    elsewhere: Collection[str],
) -> Iterator[CanonicalTensor]:
    def hf_name(name: str) -> str | None:
        if row is None or model.convention == "gguf":
            return None
        if name in elsewhere:
            return names.draft_name(row, h, name) if names_drafts(row) else None
        return names.canonical_name(row, name)

    def is_linked(name: str) -> bool:
        if row is None or name in decoded or found[name] is not None or names.is_gguf_only(row, name):
            return False
        if not names.matches(row, name, "gguf"):
            return False
        return name not in elsewhere or (names_drafts(row) and not names.matches(row, name))

    # An `.apr` may hold tensors under GGUF names too: blocks that had to keep their order.
    entries = model.tensors.entries
    decoded = packs.parts if packs.decoded else frozenset()
    found = {t.name: hf_name(t.name) for t in entries if t.name not in decoded}
    from_gguf = {t.name: t for t in entries if is_linked(t.name)}
    shapes = {name: t.shape for name, t in from_gguf.items()}
    done: set[str] = set()
    for tensor in entries:
        name = found.get(tensor.name)
        if tensor.name in decoded:
            # The weight comes in place of the first of its parts.
            if (weight := packs.by_first_part.get(tensor.name)) is not None:
                yield from _decoded(row, h, weight, hf_name(weight.name))
        elif row is None or tensor.name in packs.parts:
            yield CanonicalTensor(tensor.name, (tensor,))
        elif name is not None:
            yield CanonicalTensor(name, (tensor,))
        elif tensor.name in elsewhere and tensor.name not in from_gguf:
            yield CanonicalTensor(tensor.name, (tensor,))
        elif tensor.name in from_gguf:
            if tensor.name not in done:  # a link comes in place of the first of its tensors
                match = _matching(row, names.in_stacks(names.matches(row, tensor.name, "gguf"), h), tensor, h, shapes)
                link = link_of(h, match, shapes)
                done |= set(link.gguf)
                yield from _from_gguf(from_gguf, link)
        elif (
            allow_unmapped
            or names.is_gguf_only(row, tensor.name)
            or names.ignorable(row, tensor.name)
            or mlx.link_from(row, h, tensor.name, {tensor.name: tensor.shape}) is not None
        ):
            yield CanonicalTensor(tensor.name, (tensor,))
        else:
            nearest = names.nearest(row, tensor.name, "gguf" if model.convention == "gguf" else "hf")
            raise UnmappedError(
                f"unknown tensor for architecture {row.id!r}; the closest name is {nearest!r}",
                path=model.path,
                tensor=tensor.name,
                hint="check --arch, or keep the name with --allow-unmapped",
            )


def _from_mlx(
    row: Architecture | None, h: Hyperparams, tensors: dict[str, CanonicalTensor]
) -> dict[str, CanonicalTensor]:
    """The tensors under the names and in the shapes of a checkpoint, those that mlx_lm has otherwise among them."""
    if row is None or mlx.network_of(row) is None:
        return tensors
    shapes = {name: t.shape for name, t in tensors.items()}
    links = {name: mlx.link_from(row, h, name, shapes) for name in tensors}
    turned = {name: mlx.turned(row, name, shape) if shape[-1:] == (1,) else None for name, shape in shapes.items()}
    if not any(links.values()) and not any(turned.values()):
        return tensors
    out: dict[str, CanonicalTensor] = {}
    for name, tensor in tensors.items():
        link, row_map = links[name] or mlx.values_from(row, h, name, shapes), turned[name]
        if link is not None and name == link.gguf[0]:
            _check_whole(link.gguf, tensors)
            pieces = tuple(tensors[part].pieces[0] for part in link.gguf)
            out |= {
                made: CanonicalTensor(made, pieces, link.row_map, position, inverse=True)
                for position, made in enumerate(link.hf)
            }
        elif row_map is not None:
            out[name] = CanonicalTensor(name, tensor.pieces, row_map)
        elif link is None:
            out[name] = tensor
    return out


def _decoded(row: Architecture | None, h: Hyperparams, weight: PackedTensor, name: str | None) -> list[CanonicalTensor]:
    """A decoded weight under its Hugging Face name, in whose row order it comes where it has that of a GGUF."""
    found = names.matches(row, weight.name, "gguf") if row is not None and name is None else []
    if not found:
        return [CanonicalTensor(name or weight.name, (weight,))]
    return _to_hf(link_of(h, found[0], {weight.name: weight.shape}), (weight,))


def _check_whole(link_names: Sequence[str], there: Collection[str]) -> None:
    """Raises RefusedError where some of the tensors of a link are there and others are not."""
    absent = [name for name in link_names if name not in there]
    if absent:
        present = next(name for name in link_names if name in there)
        raise RefusedError(f"{absent[0]} is missing, and this tensor needs it", tensor=present)


def _to_hf(link: Link, pieces: tuple[TensorSource, ...]) -> list[CanonicalTensor]:
    """The Hugging Face tensors of a link, made of those of the GGUF."""
    return [
        CanonicalTensor(name, pieces, link.row_map, position, inverse=True, link=link)
        for position, name in enumerate(link.hf)
    ]


def _from_gguf(tensors: Mapping[str, Tensor], link: Link) -> list[CanonicalTensor]:
    """The Hugging Face tensors that the GGUF tensors of a link hold.

    Blocks that cannot come into Hugging Face order without being decoded keep the GGUF name.
    """
    _check_whole(link.gguf, tensors)
    pieces = tuple(tensors[name] for name in link.gguf)
    if not keeps_dtype(pieces, link.row_map) and any(DTYPES[p.dtype].kind != "plain" for p in pieces):
        return [CanonicalTensor(p.name, (p,), link=link) for p in pieces]
    return _to_hf(link, pieces)


def _matching(arch: Architecture, found: list[Match], tensor: Tensor, h: Hyperparams, there: Collection[str]) -> Match:
    """The row for the tensor's layer, its dtype (packed rows take what they pack), what is beside it, the config."""
    return min(
        found,
        key=lambda m: (
            m.layer is not None and not has_layer(m.row.layers, h, m.layer),
            bool(m.row.pack) != (tensor.dtype == "MXFP4"),
            any(name not in there for name in names.gguf_names(m.row, m.layer, h)),
            is_unwanted(arch, m.row.need, h),
        ),
    )


def _walk(
    row: Architecture, h: Hyperparams, tensors: Mapping[str, CanonicalTensor]
) -> Iterator[tuple[str, Link | None]]:
    """The tensors with a place in a GGUF, in the network's order: the first name of each link, or a name without."""
    # A name may belong to several rows of the table (stacked or single experts, fused or split projections): which
    # one holds follows from the names that are there, so links are found with all of them in sight.
    shapes = {name: t.shape for name, t in tensors.items()}
    done: set[str] = set()
    for name in sorted(tensors, key=lambda n: names.order(row, n)):
        if name in done or names.ignorable(row, name) or names.is_hf_only(row, name, h):
            continue
        link = tensors[name].link or find_link(row, h, name, shapes, "hf")
        if link is not None and name in link.hf:
            done |= set(link.hf)
            yield name, link
        else:
            yield name, None


def links(row: Architecture, h: Hyperparams, tensors: Mapping[str, CanonicalTensor]) -> list[Link]:
    """Every link that the Hugging Face `tensors` go through on their way to a GGUF."""
    return [link for _, link in _walk(row, h, tensors) if link is not None]


def gguf_side(row: Architecture, h: Hyperparams, tensors: Mapping[str, CanonicalTensor]) -> list[CanonicalTensor]:
    """The tensors of a GGUF for the Hugging Face `tensors`, in the network's order; unknown names stay.

    Raises RefusedError where a tensor's partners are missing or the hyper-parameters contradict the shapes.
    """
    out: list[CanonicalTensor] = []
    for name, link in _walk(row, h, tensors):
        out += [tensors[name]] if link is None else to_link(link, tensors)
    head, embedding = names.head(row), tensors.get(names.embedding(row))
    if row.head_never and head in tensors:
        raise RefusedError(
            f"llama.cpp's {row.gguf} network has no separate output head, and this one differs from the embedding",
            tensor=head,
        )
    # Where llama.cpp's loader insists on a head, a tied one is the embedding once more.
    if row.head_always and head not in tensors and embedding is not None:
        link = find_link(row, h, head, {head: embedding.shape}, "hf") if embedding.link is None else None
        out.append(CanonicalTensor("output.weight", embedding.pieces, link.row_map if link else embedding.row_map))
        if has_no_output(h.hf_architecture) and names.matches(row, "output.bias", "gguf"):
            data = bytes(4 * embedding.shape[0])
            zeros = BufferedPiece("output.bias", "F32", embedding.shape[:1], partial(list, (data,)))
            out.append(CanonicalTensor("output.bias", (zeros,)))
    made = {tensor.name: tensor for tensor in out}
    out += [
        replace(made[original], name=name)
        for name, original in row.copies.items()
        if name not in made and original in made
    ]
    found: dict[str, CanonicalTensor] = {}
    for tensor in out:
        first = found.setdefault(tensor.name, tensor)
        if first is not tensor:
            raise RefusedError(
                f"two source tensors map to it: {first.pieces[0].name} and {tensor.pieces[0].name}",
                tensor=tensor.name,
                hint="the checkpoint holds the same weights under two names; remove one of them",
            )
    return out


def to_link(link: Link, tensors: Mapping[str, CanonicalTensor]) -> list[CanonicalTensor]:
    """The tensors on the GGUF side of a link, made of those of the checkpoint. Raises RefusedError where one lacks."""
    _check_whole(link.hf, tensors)
    parts = [tensors[name] for name in link.hf]
    if all(part.link is link and part.inverse for part in parts):  # made of these very tensors
        return [CanonicalTensor(name, (piece,)) for name, piece in zip(link.gguf, parts[0].pieces, strict=True)]
    if link.row_map.is_plain:
        return [replace(parts[0], name=name, link=None) for name in link.gguf]
    pieces = tuple(part.piece() for part in parts)
    return [CanonicalTensor(name, pieces, link.row_map, position) for position, name in enumerate(link.gguf)]


def hf_side(row: Architecture | None, tensors: Mapping[str, CanonicalTensor]) -> list[CanonicalTensor]:
    """The tensors of a Hugging Face checkpoint: those under GGUF names decoded and brought into order."""
    if row is None:
        return list(tensors.values())
    out: list[CanonicalTensor] = []
    done: set[str] = set()
    for name, tensor in tensors.items():
        if names.is_gguf_only(row, name) or name in done:
            continue  # derived from config.json by every Hugging Face reader
        if tensor.link is None or name in tensor.link.hf:
            out.append(tensor)
            continue
        done |= set(tensor.link.gguf)
        out += _to_hf(tensor.link, tuple(tensors[gguf].pieces[0] for gguf in tensor.link.gguf))
    return sorted(out, key=lambda t: names.order(row, t.name))
