"""Any opened model under one set of names: Hugging Face tensor names and row order, one hyper-parameter set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aprfmt.arch import hparams as hp
from aprfmt.arch import names, rope
from aprfmt.arch.hparams import Hyperparams
from aprfmt.arch.table import ARCHITECTURES, Architecture, find
from aprfmt.codecs.dtypes import n_elements
from aprfmt.convert import envelope, provenance
from aprfmt.convert.envelope import Envelope
from aprfmt.convert.transfer import CanonicalTensor, Move
from aprfmt.errors import RefusedError, UnmappedError, UsageError
from aprfmt.model import Model, Tensor
from aprfmt.tokenizer.model import Tokenizer

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(slots=True)
class Canonical:
    """A model ready to be written in any container.

    Attributes:
        model: what was opened.
        arch: its row of the architecture table; None when no row fits (names are then the source's own).
        hparams, tokenizer: as read, with the user's overrides.
        info: descriptive fields under APR's typed names: name, description, author, license, ...
        tensors: by Hugging Face name, in the source's order, without a head that equals the embedding.
        dropped: tensors of the source that are not carried, with the name that holds the same bytes.
        warnings: what the user should know.
        general: descriptive facts without a typed name, see provenance; None when the source cannot tell.
        stated: typed fields that the user gave.
        envelope: what a GGUF tells of the `.apr` that it was made from.
        left_out: files of a source folder that are not carried.
    """

    model: Model
    arch: Architecture | None
    hparams: Hyperparams
    tokenizer: Tokenizer | None
    info: dict[str, Any]
    tensors: dict[str, CanonicalTensor]
    dropped: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    general: dict[str, Any] | None = None
    stated: dict[str, Any] = field(default_factory=dict)
    envelope: Envelope | None = None
    left_out: list[str] = field(default_factory=list)

    @property
    def n_params(self) -> int:
        """Elements of all tensors."""
        return sum(n_elements(t.shape) for t in self.tensors.values())

    @property
    def weight_bytes(self) -> int:
        """Stored bytes of all tensors."""
        return sum(t.n_bytes for t in self.tensors.values())


def canonical(model: Model, *, arch: str | None = None, allow_unmapped: bool = False) -> Canonical:
    """Reads `model` into canonical form; `arch` names a row of the architecture table to use instead of detection.

    Raises UnmappedError for an architecture or tensor without a row, naming the nearest known one.
    """
    row = _find_row(model, arch)
    # An .apr keeps the names it was imported with, and without tensors there is nothing to name.
    if row is None and not (allow_unmapped or model.format.startswith("apr") or not model.tensors):
        raise _unknown_architecture(model)
    hparams = model.hparams
    if row is not None:
        hparams.architecture = row.id
    warnings = list(model.warnings)
    if row is not None and model.format == "gguf":
        warnings += _complete_from_gguf(model, row, hparams)
    tensors = _named(model, row, hparams, allow_unmapped)
    if row is not None and model.format.startswith("apr") and model.metadata.get("head_dim") is None:
        _complete_from_shapes(hparams, tensors)
    dropped = _drop_tied_head(tensors, hparams)
    known = provenance.read(model)
    c = Canonical(
        model,
        row,
        hparams,
        model.tokenizer,
        known.info,
        tensors,
        dropped,
        warnings + known.warnings,
        known.general,
    )
    if model.format == "gguf":
        c.envelope, warning = envelope.opened(model.native.parts[0].kv)
        c.warnings += [warning] if warning else []
    if model.format == "hf":
        c.envelope = envelope.folder_envelope(model.native.folder)
        c.left_out = model.native.left_out()
        if c.left_out:
            more = f" and {len(c.left_out) - 5} more" if len(c.left_out) > 5 else ""
            c.warnings.append(f"not carried: {', '.join(c.left_out[:5])}{more}")
        facts = c.envelope.metadata if c.envelope is not None else {}
        c.info |= {name: value for name, value in facts.items() if name in provenance.INFO_FIELDS}
    if (
        c.general is not None
        and model.format in ("hf", "safetensors")
        and c.n_params
        and not hparams.num_experts
    ):
        c.general.setdefault("size_label", provenance.size_label(c.n_params))
    return c


ROPE_FREQS = "rope_freqs.weight"


def _complete_from_gguf(model: Model, row: Architecture, hparams: Hyperparams) -> list[str]:
    """What a GGUF says elsewhere than in its keys: rope scaling as a tensor, the class by the table."""
    warnings = []
    if ROPE_FREQS in model.tensors and "rope_scaling" not in hparams.extra and hparams.head_dim:
        factors = [float(f) for f in model.tensors[ROPE_FREQS].numpy()]
        scaling = rope.infer_llama3(factors, hparams.rope_theta or 10000.0, hparams.head_dim)
        if scaling is not None:
            hparams.extra["rope_scaling"] = scaling
        else:
            warnings.append(f"{ROPE_FREQS} is of no known form: config.json will not hold this rope scaling")
    embedding = model.tensors.get(names.to_gguf(row, EMBEDDING) or "")
    if hparams.vocab_size is None and embedding is not None and embedding.shape:
        hparams.vocab_size = embedding.shape[0]
    if hparams.hf_architecture is None:
        hparams.hf_architecture, hparams.hf_model_type = hp.hf_identity(hparams, row)
    return warnings


def _complete_from_shapes(hparams: Hyperparams, tensors: dict[str, CanonicalTensor]) -> None:
    """The head size of an `.apr` that does not name it: the reference never stores the one of a GGUF."""
    query = tensors.get("model.layers.0.self_attn.q_proj.weight")
    if "head_dim" in hparams.extra or query is None or not query.shape or not hparams.num_heads:
        return
    head_dim, rest = divmod(query.shape[0], hparams.num_heads)
    if rest == 0 and head_dim != hparams.head_dim:
        hparams.head_dim = hparams.extra["head_dim"] = head_dim


def _find_row(model: Model, arch: str | None) -> Architecture | None:
    if arch is not None and arch != "auto":
        row = ARCHITECTURES.get(arch) or find(hf_class=arch) or find(model_type=arch) or find(gguf=arch)
        if row is None:
            raise UsageError(f"unknown architecture {arch!r}", hint="known: " + ", ".join(ARCHITECTURES))
        return row
    hparams = model.hparams
    if model.format == "gguf":
        return find(gguf=hparams.architecture)
    return find(hf_class=hparams.hf_architecture, model_type=hparams.hf_model_type, gguf=hparams.architecture)


def _unknown_architecture(model: Model) -> UnmappedError:
    hparams = model.hparams
    word = hparams.hf_architecture or hparams.architecture or hparams.hf_model_type
    if word is None:
        return UnmappedError(
            "the file does not say what architecture it is",
            path=model.path,
            hint="name it with --arch, one of: " + ", ".join(ARCHITECTURES),
        )
    return UnmappedError(
        f"architecture {word!r} has no row in the architecture table",
        path=model.path,
        hint=f"known: {', '.join(ARCHITECTURES)}; --allow-unmapped keeps the tensors under their own names",
    )


def _named(
    model: Model, row: Architecture | None, hparams: Hyperparams, allow_unmapped: bool
) -> dict[str, CanonicalTensor]:
    tensors: dict[str, CanonicalTensor] = {}
    gguf_names = row is not None and (model.format == "gguf" or "token_embd.weight" in model.tensors)
    for tensor in model.tensors.entries:
        if row is None:
            item = CanonicalTensor(tensor.name, tensor)
        elif gguf_names:
            item = _from_gguf(tensor, row, hparams, allow_unmapped, model)
        else:
            item = CanonicalTensor(_hf_name(tensor, row, allow_unmapped, model), tensor)
        if item.name in tensors:
            raise RefusedError("two tensors of one name", path=model.path, tensor=tensor.name)
        tensors[item.name] = item
    return tensors


def _from_gguf(
    tensor: Tensor, row: Architecture, hparams: Hyperparams, allow_unmapped: bool, model: Model
) -> CanonicalTensor:
    name = names.to_hf(row, tensor.name)
    if name is None and model.format != "gguf":
        # The reference keeps a llama's GGUF names and adds a copy of the embedding as lm_head.weight.
        return CanonicalTensor(_hf_name(tensor, row, allow_unmapped, model), tensor)
    if name is None:
        if not allow_unmapped and tensor.name not in row.gguf_only:
            raise _unmapped(tensor, row, model, "gguf")
        return CanonicalTensor(tensor.name, tensor)
    move = move_to_gguf(row, hparams, name)
    return CanonicalTensor(name, tensor, move.inverse() if move else None)


def _hf_name(tensor: Tensor, row: Architecture, allow_unmapped: bool, model: Model) -> str:
    if (
        names.to_gguf(row, tensor.name) is not None
        or tensor.name in row.gguf_only
        or names.ignorable(row, tensor.name)
    ):
        return tensor.name
    prefixed = f"model.{tensor.name}"
    if names.to_gguf(row, prefixed) is not None:
        return prefixed
    if allow_unmapped:
        return tensor.name
    raise _unmapped(tensor, row, model, "hf")


def _unmapped(tensor: Tensor, row: Architecture, model: Model, side: str) -> UnmappedError:
    nearest = names.nearest(row, tensor.name, side)
    return UnmappedError(
        f"the tensor has no name in architecture {row.id!r}; the nearest is {nearest!r}",
        path=model.path,
        tensor=tensor.name,
        hint="check --arch, or carry it under its own name with --allow-unmapped",
    )


def move_to_gguf(row: Architecture, hparams: Hyperparams, name: str) -> Move | None:
    """The row move that takes tensor `name` from Hugging Face order to llama.cpp's; None where they agree."""
    spec = names.move_of(row, name)
    if spec is None:
        return None
    move, field_name = spec
    n_heads = getattr(hparams, field_name) or (hparams.num_heads if field_name == "num_kv_heads" else None)
    if not n_heads:
        raise RefusedError(f"{field_name} is unknown, so the rows cannot be brought into order", tensor=name)
    return Move(move, n_heads)


def _drop_tied_head(tensors: dict[str, CanonicalTensor], hparams: Hyperparams) -> dict[str, str]:
    """Drops a head that is declared tied and holds the embedding's bytes; a different one is kept and untied."""
    head, embedding = tensors.get(HEAD), tensors.get(EMBEDDING)
    if head is None:
        if hparams.tied is None and embedding is not None:
            hparams.tied = True
        return {}
    if not hparams.tied or embedding is None:
        return {}
    same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape) and _equal_bytes(head, embedding)
    if not same:
        hparams.tied = False
        return {}
    del tensors[HEAD]
    return {HEAD: EMBEDDING}


def _equal_bytes(a: CanonicalTensor, b: CanonicalTensor) -> bool:
    return (a.source.offset == b.source.offset and a.source.source is b.source.source) or all(
        x == y for x, y in zip(a.chunks(), b.chunks(), strict=True)
    )
