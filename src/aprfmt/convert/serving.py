"""Quantized weights of a Hugging Face folder, as serving engines load them, and what config.json says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from aprfmt.canonical.tensor import CanonicalTensor, scale_outs
from aprfmt.codecs import nvfp4
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.packed import INPUT_SCALE, SCALE
from aprfmt.codecs.split import SplitStream
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.types import Shape


@dataclass(slots=True)
class PackedModules:
    """The modules of a folder whose weights are NVFP4, under ModelOpt's names.

    Attributes:
        packed: names of their weights.
        left: names of matrices that stay floats.
        inputs: whether their inputs have scales, too.
    """

    packed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    inputs: bool = False

    def outs(self, tensor: CanonicalTensor, name: str) -> list[OutTensor]:
        """The tensors that hold `tensor`, whose name in the folder is `name`, as it is quantized; [] where none do."""
        is_matrix = len(tensor.shape) == 2 and name.endswith(".weight")
        if not is_matrix or tensor.dtype != "NVFP4":
            if is_matrix:
                self.left.append(name)
            return []
        self.packed.append(name)
        self.inputs = self.inputs or INPUT_SCALE in tensor.scales
        scales = tensor.scales if SCALE in tensor.scales else {SCALE: (1.0,), **tensor.scales}
        return [*_nvfp4(tensor, name), *scale_outs(scales, name, gguf=False)]

    def settings(self) -> dict[str, object]:
        """The `quantization_config`."""
        numbers = {"num_bits": 4, "type": "float", "group_size": nvfp4.GROUP, "dynamic": False}
        group = {"weights": numbers, "targets": ["Linear"]} | ({"input_activations": numbers} if self.inputs else {})
        return {
            "config_groups": {"group_0": group},
            "ignore": [name.removesuffix(".weight") for name in self.left],
            "quant_algo": "NVFP4" if self.inputs else "W4A16_NVFP4",
            "quant_method": "modelopt",
        }


def _nvfp4(tensor: CanonicalTensor, name: str) -> list[OutTensor]:
    unit, (rows, columns) = nvfp4.BLOCK_BYTES, tensor.shape
    stream = SplitStream(
        unit,
        tensor.items,
        lambda n_bytes: (n_bytes // unit * nvfp4.CODES, n_bytes // unit * nvfp4.SCALES),
        nvfp4.unpack,
    )
    parts = ((name, "U8", (rows, columns // 2)), (f"{name}_scale", "F8_E4M3", (rows, columns // nvfp4.GROUP)))
    return split_outs(stream, parts)


def split_outs(stream: SplitStream, parts: Sequence[tuple[str, str, Shape]]) -> list[OutTensor]:
    """The parts of a stream (name, dtype, shape) as tensors of a file."""
    outs = [
        OutTensor(name, dtype, shape, DTYPES[dtype].n_bytes(shape), partial(stream.items, i))
        for i, (name, dtype, shape) in enumerate(parts)
    ]
    kept = sum(out.n_bytes for out in outs[1:])
    return [
        OutTensor(out.name, out.dtype, out.shape, out.n_bytes, out.chunks, kept if i == 0 else out.n_bytes)
        for i, out in enumerate(outs)
    ]
