"""The types that a target chooses from: those of GGML for a GGUF or `.apr`, MLX's bits and groups for a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from aprfmt.codecs import affine, ggml
from aprfmt.codecs.dtypes import DTYPES, n_elements
from aprfmt.convert.bit_allocation import Allocation
from aprfmt.convert.presets import PRESETS, needs_weights
from aprfmt.convert.quantization import QuantizedTensor
from aprfmt.convert.quantization_error import RowSample, error_of, relative_error
from aprfmt.types import Shape

CANDIDATES = (
    *("Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "IQ4_NL", "IQ4_XS", "Q4_0", "Q3_K", "IQ3_S", "IQ3_XXS"),
    *("Q2_K", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"),
)
"""GGML's types to choose from, besides 16-bit floats: those that every recent llama.cpp computes with everywhere."""

ConversionOptions: TypeAlias = "dict[str, object]"


@dataclass(frozen=True, slots=True)
class TypeSystem:
    """Types, and how a conversion is told about them.

    Attributes:
        planned: options of the first plan, which shows the tensors and all other bytes of the output.
        candidates: the types that a tensor can have.
        n_bytes: (type, shape, dtype of the source) -> size in bytes.
        error: (sample, type, dtype of the source) -> relative squared error of the sample.
        preset: the preset of a recipe with the chosen types.
        options: (preset, REGEX=TYPE words) -> options of a conversion.
        presets: options of the standard choices, by name.
    """

    planned: Mapping[str, object]
    candidates: Callable[[QuantizedTensor], list[str]]
    n_bytes: Callable[[str, Shape, str], int]
    error: Callable[[RowSample, str, str], float]
    preset: Callable[[Allocation], str]
    options: Callable[[str | None, Sequence[str]], ConversionOptions]
    presets: Mapping[str, Mapping[str, object]]


# --- GGML ---

_PLANNED = "q8_0"


def _ggml_candidates(row: QuantizedTensor) -> list[str]:
    tensor, weights = row.tensor, row.target.weights
    found = [
        dtype
        for dtype in CANDIDATES
        if tensor.shape[-1] % DTYPES[dtype].block == 0
        and ggml.encodable(dtype)
        and (weights is not None or not needs_weights(tensor.name, dtype, PRESETS[_PLANNED]))
    ]
    return [*found, "BF16" if tensor.dtype == "BF16" else "F16"]


def preset_of(chosen: Allocation) -> str:
    """The preset for the output's file type: that of the quantized type with the most bytes."""
    totals: dict[str, int] = {}
    for option in chosen.values():
        totals[option.dtype] = totals.get(option.dtype, 0) + option.n_bytes
    presets = {preset.dtype: name for name, preset in reversed(PRESETS.items())}
    return max((n, presets[dtype]) for dtype, n in [("Q8_0", 0), *totals.items()] if dtype in presets)[1]


GGML_TYPES = TypeSystem(
    planned={"dtype": _PLANNED},
    candidates=_ggml_candidates,
    n_bytes=lambda dtype, shape, source: DTYPES[dtype].n_bytes(shape),
    error=lambda sample, dtype, source: error_of(sample, dtype),
    preset=preset_of,
    options=lambda preset, words: {"dtype": preset, "tensor_type": [*words]},
    presets={name: {"dtype": name} for name in PRESETS},
)


# --- MLX ---


def _stored(dtype: str) -> str:
    """Dtype of scales and biases."""
    return dtype if dtype in ("F32", "F16", "BF16") else "F16"


def _mlx_candidates(row: QuantizedTensor) -> list[str]:
    columns = row.tensor.shape[-1]
    schemes = (affine.Affine(bits, group) for bits in affine.BITS for group in affine.GROUP_SIZES)
    return [scheme.word for scheme in schemes if columns % scheme.group_size == 0]


def _mlx_bytes(word: str, shape: Shape, source: str) -> int:
    scheme, size = affine.parse_affine(word), DTYPES[_stored(source)].block_bytes
    return n_elements(shape) // scheme.group_size * (scheme.group_size * scheme.bits // 8 + 2 * size)


def _mlx_error(sample: RowSample, word: str, source: str) -> float:
    return relative_error(sample, affine.round_trip(sample.values, affine.parse_affine(word), _stored(source)))


_MIXES = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")

MLX_TYPES = TypeSystem(
    planned={"bits": 4}, candidates=_mlx_candidates, n_bytes=_mlx_bytes, error=_mlx_error, preset=lambda chosen: "mlx",
    options=lambda preset, words: {"bits": 4, "tensor_type": [*words]},
    presets={f"{bits} bits": {"bits": bits} for bits in affine.BITS} | {name: {"recipe": name} for name in _MIXES},
)  # fmt: skip
