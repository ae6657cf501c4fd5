"""Packed weights of a source (FP8, GPTQ, AWQ, ...): kept as they are stored, or decoded on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from aprfmt.arch import names
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.row import Architecture
from aprfmt.canonical import packed
from aprfmt.canonical.packed import PackedTensor
from aprfmt.errors import RefusedError
from aprfmt.formats.hf_files import parse_object, read_text_file
from aprfmt.formats.hfdir import HfNative
from aprfmt.model import Model

HF_QUANT = "hf_quant_config.json"


@dataclass(frozen=True, slots=True)
class Decoding:
    """What becomes of packed weights.

    Attributes:
        decode: whether they are decoded at all.
        dtype: to what, before any conversion; None: to what they were packed from.
        keep_blocks: whether those stay packed that a GGUF of this architecture holds as they are.
    """

    decode: bool = False
    dtype: str | None = None
    keep_blocks: bool = False


AS_STORED = Decoding()
AS_VALUES = Decoding(decode=True, dtype="F32")


@dataclass
class Packing:
    """The packed weights of a model.

    Attributes:
        found: each of them, decodable.
        pieces: the stored tensors they are made of, and those that only a packed model needs.
        decoded: whether the output gets the decoded weights.
        dtype: what they are decoded to before any conversion; None: what they were packed from.
        warning: what the user should know, None if nothing.
    """

    found: list[PackedTensor] = field(default_factory=list)
    pieces: set[str] = field(default_factory=set)
    decoded: bool = False
    dtype: str | None = None
    warning: str | None = None

    def base_of(self, piece: str) -> PackedTensor | None:
        """The packed weight whose first piece is the tensor `piece`."""
        return self._by_first.get(piece)

    @cached_property
    def _by_first(self) -> dict[str, PackedTensor]:
        return {tensor.pieces[0]: tensor for tensor in self.found}


def packing(
    model: Model, row: Architecture | None, h: Hyperparams, decoding: Decoding, *, allow_unmapped: bool
) -> Packing:
    """How the packed weights of `model` travel.

    Sets `h`'s quantization_config to what the folder says, and takes it away where the weights are decoded.
    Raises RefusedError for weights that look packed and cannot be decoded, unless they are kept unmapped.
    """
    if model.convention == "gguf":
        return Packing()
    config = _config(model, h)
    try:
        found = packed.groups(model.tensors, config)
    except RefusedError:
        if decoding.decode or not (allow_unmapped or model.convention == "apr"):
            raise
        return Packing(warning=packed.keep_warning(model.tensors, config))
    if row is not None and decoding.keep_blocks:
        found = [tensor for tensor in found if not _has_row(row, tensor)]
    if not found:
        return Packing()
    pieces = {name for tensor in found for name in tensor.pieces} | set(packed.aside(model.tensors, config))
    if decoding.decode:
        h.extra.pop("quantization_config", None)
    return Packing(
        found,
        pieces,
        decoding.decode,
        decoding.dtype,
        None if decoding.decode else packed.keep_warning(model.tensors, config),
    )


def _has_row(row: Architecture, tensor: PackedTensor) -> bool:
    """Whether the family's table moves the pieces to a GGUF as they are."""
    return all(any(match.row.pack for match in names.matches(row, piece)) for piece in tensor.pieces)


def _config(model: Model, h: Hyperparams) -> dict[str, Any]:
    stored = {"quantization_config": h.extra.get("quantization_config"), "dtype": h.extra.get("dtype")}
    config = {key: value for key, value in stored.items() if value is not None}
    native = model.native_as(HfNative)
    if native is not None:
        path = native.folder / HF_QUANT
        said = parse_object(read_text_file(path), str(native.folder), HF_QUANT) if path.is_file() else None
        config = packed.with_hf_quant({**model.metadata, **config}, said)
        if config.get("quantization_config") is not None:
            h.extra["quantization_config"] = config["quantization_config"]
    return config
