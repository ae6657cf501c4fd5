"""Pre-quantised Hugging Face checkpoints: finds the tensors that make one packed weight, and streams it decoded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aprfmt.canonical.packed_config import (
    UNPACK_HINT,
    left_alone,
    natural_dtype,
    settings_of,
    with_hf_quant,
    without,
)
from aprfmt.codecs import plain
from aprfmt.codecs.dtypes import DTYPES, find_dtype
from aprfmt.codecs.packed import SCHEMES, Scheme
from aprfmt.codecs.packed_pieces import Decoded, Piece
from aprfmt.codecs.recode import OverflowCount, recode
from aprfmt.codecs.stream import STEP
from aprfmt.errors import CorruptError, RefusedError
from aprfmt.io.source import Buffer
from aprfmt.model import Tensor

__all__ = [
    "PackedPiece",
    "PackedTensor",
    "aside",
    "groups",
    "keep_warning",
    "losses",
    "with_hf_quant",
    "without",
]

# Endings that no tensor has but a piece of a packed weight; none may be left when all weights are found.
_MARKS = (
    ".qweight", ".qzeros", ".scales", ".g_idx", ".weight_packed", ".weight_scale", ".weight_scale_inv",
    ".weight_scale_2", ".weight_global_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx",
    ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", "bitsandbytes__nf4", "bitsandbytes__fp4",
    ".SCB", ".weight_format", ".pre_quant_scale", "_proj_scale_inv", "_proj_blocks", "_proj_scales",
)  # fmt: skip

# Scales of activations and of the cache: a decoded model computes these in floats and has no use for them.
_ASIDE = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".input_scale_ub", ".activation_scale",
    "_activation_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".prob_scale",
)  # fmt: skip

_STORED_PACKED = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "I32", "U32")


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A weight of a packed checkpoint, as it will be when it is decoded.

    Attributes:
        name: its Hugging Face name, "model.layers.0.mlp.up_proj.weight".
        shape: row-major, of the decoded weight.
        dtype: F32, F16 or BF16: what it was packed from.
        scheme: for sentences, "FP8".
        pieces: names of the stored tensors it is made of.
        stored_bytes: bytes of those.
        decoded: gives the values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    scheme: str
    pieces: tuple[str, ...]
    stored_bytes: int
    decoded: Decoded

    @property
    def n_bytes(self) -> int:
        """Bytes in `dtype`."""
        return DTYPES[self.dtype].n_bytes(self.shape)

    def chunks(self, dtype: str | None = None, overflow: OverflowCount | None = None) -> Iterator[Buffer]:
        """The bytes as `dtype` (the natural one by default), in pieces; memory does not grow with the weight."""
        target = find_dtype(dtype or self.dtype).name
        return recode("F32", target, self.shape, self._floats, overflow)

    def piece(self, dtype: str | None = None) -> PackedPiece:
        """The weight as something that can be read at any place, as F32, F16 or BF16 (the natural one by default)."""
        return PackedPiece(self, find_dtype(dtype or self.dtype).name)

    def _floats(self) -> Iterator[Buffer]:
        for values in self.decoded.values():
            yield values.view("u1").data


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """A packed weight that decodes what is read of it, in small memory: a Piece of convert.row_map."""

    tensor: PackedTensor
    dtype: str

    @property
    def name(self) -> str:
        """Hugging Face name of the weight."""
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Row-major shape of the weight."""
        return self.tensor.shape

    @property
    def n_bytes(self) -> int:
        """Bytes once decoded."""
        return DTYPES[self.dtype].n_bytes(self.tensor.shape)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `offset` of the decoded weight."""
        size, end = DTYPES[self.dtype].block_bytes, offset + len(buffer)
        done = 0
        for start in range(offset // size, -(-end // size), STEP):
            stop = min(start + STEP, -(-end // size))
            data = plain.encode(self.dtype, self.tensor.decoded.between(start, stop)).view("u1").data
            part = data[max(0, offset - start * size) : end - start * size]
            buffer[done : done + len(part)] = part
            done += len(part)

    def raw(self) -> memoryview:
        """All bytes, decoded anew."""
        return memoryview(b"".join(bytes(chunk) for chunk in self.tensor.chunks(self.dtype)))


def groups(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> list[PackedTensor]:
    """The packed weights among `tensors`, in their order; whatever is in no `pieces` is an ordinary tensor.

    `config` is config.json, see `with_hf_quant` for the file beside it. Shapes, groups and orders are checked here,
    values are read later. Raises RefusedError with scheme, tensor and a way on for a scheme without a decoder, a
    missing piece, or pieces that do not fit each other or the config.
    """
    settings = settings_of(config)
    if settings is None:
        _refuse_undescribed(tensors)
        return []
    schemes = [scheme for scheme in SCHEMES if settings["quant_method"] in scheme.methods]
    found, used = [], set[str]()
    for name, tensor in tensors.items():
        match = _match(name, tensor, tensors, schemes, settings)
        if match is not None:
            packed = _packed(*match, tensors, settings, natural_dtype(config))
            if packed.name in tensors and packed.name not in packed.pieces:
                raise _refused(match[0], name, f"{packed.name} is stored beside its packed form")
            found.append(packed)
            used.update(packed.pieces)
    _refuse_strays(tensors, used, settings)
    return found


def aside(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> list[str]:
    """Tensors that only serve quantised activations or caches: a decoded model has no place for them."""
    if settings_of(config) is None:
        return []
    return [name for name, t in tensors.items() if name.endswith(_ASIDE) and t.n_bytes <= 1 << 20]


def losses(packed: Sequence[PackedTensor]) -> list[str]:
    """One sentence a scheme and dtype for the report of an output that holds these decoded."""
    counts: dict[str, int] = {}
    for tensor in packed:
        counts[tensor.scheme] = counts.get(tensor.scheme, 0) + 1
    return [f"{n} tensors decoded from {scheme}" for scheme, n in sorted(counts.items())]


def keep_warning(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> str | None:
    """The sentence for an output that keeps packed weights as stored; None where there are none. Never refuses."""
    try:
        found = groups(tensors, config)
    except RefusedError as error:
        return f"packed weights are kept as stored, and cannot be decoded here: {error}"
    if not found:
        return None
    schemes = ", ".join(sorted({tensor.scheme for tensor in found}))
    return (
        f"{len(found)} weights are kept packed ({schemes}), as stored; "
        "--dtype bf16, f16 or f32 decodes them, and so does an export to GGUF, MXFP4 excepted"
    )


def _match(
    name: str,
    tensor: Tensor,
    tensors: Mapping[str, Tensor],
    schemes: Sequence[Scheme],
    settings: Mapping[str, Any],
) -> tuple[Scheme, str] | None:
    """The scheme that tensor `name` is the main piece of, and the base name."""
    candidates = [s for s in schemes if name.endswith(s.main) and tensor.dtype in s.dtypes]
    candidates = [s for s in candidates if not (s.main == "" and name.endswith(_MARKS))]
    bases = [(scheme, name[: len(name) - len(scheme.main)]) for scheme in candidates]
    for scheme, base in bases:
        if all(base + ending in tensors for ending in scheme.needs):
            return scheme, base
    if not bases or (len(tensor.shape) < 2 and bases[0][0].main in ("", ".weight")):
        return None
    scheme, base = bases[0]
    module = base.removesuffix(".weight")
    if scheme.main in ("", ".weight") and left_alone(settings, module):
        return None
    missing = next(base + ending for ending in scheme.needs if base + ending not in tensors)
    raise _refused(scheme, name, f"{missing} is missing")


def _packed(
    scheme: Scheme,
    base: str,
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    natural: str | None,
) -> PackedTensor:
    endings = (scheme.main, *scheme.needs, *(e for e in scheme.may if base + e in tensors))
    stored = {ending: tensors[base + ending] for ending in endings}
    decoded = scheme.decode({ending: _piece(t) for ending, t in stored.items()}, settings)
    return PackedTensor(
        name=base + scheme.result,
        shape=decoded.shape,
        dtype=decoded.dtype or natural or _scale_dtype(stored),
        scheme=scheme.label,
        pieces=tuple(t.name for t in stored.values()),
        stored_bytes=sum(t.n_bytes for t in stored.values()),
        decoded=decoded,
    )


def _scale_dtype(stored: Mapping[str, Tensor]) -> str:
    """The dtype of the scales where the config names none: packing tools keep the model's."""
    return next((t.dtype for t in stored.values() if t.dtype in ("F16", "BF16")), "F32")


def _piece(tensor: Tensor) -> Piece:
    row = DTYPES[tensor.dtype]
    if row.kind == "plain" and row.n_bytes(tensor.shape) != tensor.n_bytes:
        what = f"{tensor.n_bytes} bytes are stored, {row.name} of shape {list(tensor.shape)} takes others"
        raise CorruptError(what, path=tensor.source.path, tensor=tensor.name)

    def read_into(offset: int, buffer: memoryview) -> None:
        tensor.source.read_into(tensor.offset + offset, buffer)

    return Piece(tensor.name, tensor.dtype, tensor.shape, read_into)


def _refuse_strays(tensors: Mapping[str, Tensor], used: set[str], settings: Mapping[str, Any]) -> None:
    """Refuses what looks packed and was not recognised: taken as it is, its values would be wrong."""
    method = settings["quant_method"]
    for name, tensor in tensors.items():
        if name in used or name.endswith(_ASIDE):
            continue
        module = name.removesuffix(".weight")
        codes = name.endswith(".weight") and len(tensor.shape) > 1 and tensor.dtype in _STORED_PACKED
        if name.endswith(_MARKS) or (codes and not left_alone(settings, module)):
            what = f"{method}: the tensor belongs to a packed weight that is not complete or of another kind"
            raise RefusedError(what, tensor=name, hint=UNPACK_HINT)


def _refuse_undescribed(tensors: Mapping[str, Tensor]) -> None:
    """Refuses packed weights that no config describes; a name alone is no proof, its kin must be there too."""
    for name in tensors:
        for scheme in SCHEMES:
            base = name[: len(name) - len(scheme.main)]
            if (
                scheme.main not in ("", ".weight")
                and name.endswith(scheme.main)
                and tensors[name].dtype in scheme.dtypes
                and all(base + ending in tensors for ending in scheme.needs)
            ):
                raise _refused(
                    scheme, name, "the weights are packed, and no quantization_config describes them"
                )
        if name.endswith("_scale_inv") or (name.endswith(".SCB") and name[:-3] + "weight" in tensors):
            what = "the weights are packed, and no quantization_config describes them"
            raise RefusedError(what, tensor=name, hint="put the model's own config.json beside them")


def _refused(scheme: Scheme, tensor: str, what: str) -> RefusedError:
    return RefusedError(f"{scheme.label}: {what}", tensor=tensor, hint=UNPACK_HINT)
