"""Quantization-aware training: the network computes with weights rounded as the export's codecs would store them.

The float32 master weights are not rounded; the gradient of a rounded weight is applied to its master weight
(straight-through estimator; Bengio et al. 2013, arXiv:1308.3432). The preset decides the type of each tensor, as in
`apr quantize`. How scales are found:

* Q4_0: the codes of a block are those nearest on a step that the initial weights fix, and the scale decodes them with
  the least squared error. If the largest value decided, as in the codec, each of its updates would shift all codes.
* Q8_0, NVFP4, MXFP4: at every step, by the codec's own rule (`kernels.encode`).
* The others, mainly K-quants, whose search only libggml has: every `--qat-every` steps and before each evaluation and
  checkpoint. In between, codes are computed with the last scales.

After each update the master weights are pulled toward their rounded values, by a fraction that rises over the run.
Without it, weights near the border of two codes change sides at every learning rate above 0, and where they stop is
chance (oscillation dampening; Nagel et al. 2022, arXiv:2203.11086, there as a term of the loss).

Checkpoints contain the blocks themselves, so an export changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from aprfmt.canonical.row_mapping import BufferedTensor
from aprfmt.canonical.sides import gguf_side
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.codecs import affine, ggml
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.convert.presets import QuantizationPreset, QuantizeOverrides, choose, find_preset, uniform_preset, unknown
from aprfmt.convert.quantization import Recoding, context_of, targets_in_hf_order
from aprfmt.errors import RefusedError, UnsupportedError, UsageError
from aprfmt.text import plural
from aprfmt.types import Array
from aprtrain.kernels import encode as kernels
from aprtrain.network.names import hf_names
from aprtrain.network.weights import NetworkSource

UNIFORM = ("nvfp4", "mxfp4")
"""Types without a preset of their own: every matrix gets this type, as with `apr quantize --pure`."""

_GRIDS = {"Q4_1": (32, 15), "Q5_0": (32, 31), "Q5_1": (32, 31), "Q4_K": (32, 15), "Q5_K": (32, 31), "Q6_K": (16, 63)}
"""Type -> group size and largest code, of values stored as scale * code + bias."""

SEARCHED = tuple(_GRIDS)
"""Types that only the host's codec encodes."""

_PRESETS = "q4_0, q8_0, q4_k_m, q5_k_m, q6_k, nvfp4 or mxfp4"
_PULLED = 1 << 24
"""Values that are pulled at a time."""


def qat_preset(name: str) -> tuple[QuantizationPreset, QuantizeOverrides]:
    """The preset `name` and its options. Raises UsageError for an unknown one."""
    if name.lower() in UNIFORM and (uniform := uniform_preset(name.upper())) is not None:
        return uniform, QuantizeOverrides(pure=True)
    found = find_preset(name)
    if found is None:
        raise unknown(name, *UNIFORM)
    return found, QuantizeOverrides()


def types_of(network: NetworkSource, name: str) -> dict[str, str]:
    """The GGML type of each tensor that the preset `name` quantizes, by Hugging Face name.

    Raises UsageError for a preset that is unknown or has types without training support, RefusedError for rows that
    blocks do not divide, UnsupportedError for tensors whose rows are not those of the GGUF.
    """
    preset, overrides = qat_preset(name)
    names = hf_names(network.shape)
    floats = {hf: CanonicalTensor(hf, (BufferedTensor(hf, "F32", size, list),)) for hf, (_, _, size) in names.items()}
    side = gguf_side(network.arch, network.hparams, floats)
    chosen = choose({t.name: t.shape for t in side}, preset, context_of(network.arch, network.hparams), overrides)
    shapes = {tensor.name: tensor.shape for tensor in side}
    for tensor, dtype in chosen.items():
        if dtype == "F16":
            block = DTYPES[preset.dtype].block
            raise RefusedError(
                f"--qat {name}: rows of {shapes[tensor][-1]} values are not a multiple of {min(block, 32)}",
                path=network.path, tensor=tensor, hint="apr quantize would store the tensor as F16",
            )  # fmt: skip
        if dtype not in (*kernels.ENCODED, *SEARCHED):
            raise UsageError(f"--qat cannot train into {dtype}", tensor=tensor, hint=f"use {_PRESETS}")
    if not chosen:
        raise RefusedError(f"--qat {name}: no tensor of the model is quantized", path=network.path)
    targets = {tensor: Recoding(dtype) for tensor, dtype in chosen.items()}
    found, moved = targets_in_hf_order(network.arch, network.hparams, floats, side, targets)
    if moved:
        raise UnsupportedError(
            f"--qat does not support {network.shape.architecture}: a GGUF stores blocks across the rows of a tensor",
            path=network.path, tensor=next(iter(moved)),
        )  # fmt: skip
    return {hf: target.dtype for hf, target in found.items()}


class QatSummary(TypedDict):
    """Preset of a run, and number of tensors and parameters of each type; JSON data."""

    preset: str
    types: dict[str, dict[str, int]]


def summarize(network: NetworkSource, preset: str, types: Mapping[str, str]) -> QatSummary:
    """The summary for --plan and the log."""
    found: dict[str, dict[str, int]] = {}
    for hf, dtype in types.items():
        row = found.setdefault(dtype, {"tensors": 0, "parameters": 0})
        row["tensors"] += 1
        row["parameters"] += prod(hf_names(network.shape)[hf][2])
    return {"preset": preset, "types": found}


def grid_bytes(network: NetworkSource, types: Mapping[str, str]) -> int:
    """Bytes of the scales and steps that are kept."""
    sizes = {hf: prod(size) for hf, (_, _, size) in hf_names(network.shape).items()}
    each = {kernels.STEPPED: 4 / 32, **{dtype: 8 / _GRIDS[dtype][0] for dtype in SEARCHED}}
    return sum(int(each.get(dtype, 0) * sizes[hf]) for hf, dtype in types.items())


# --- scales that are kept ---


class ScaleGrid(NamedTuple):
    """Scale and bias of each group of a stretch, float32 [groups, 1], and the largest code."""

    scale_B1: Tensor
    bias_B1: Tensor
    top: int

    def round(self, values_P: Tensor, out_P: Tensor) -> None:
        """Rounds `values_P` to the nearest values with these scales, into `out_P`; ties go to the even code."""
        x_BE = values_P.view(len(self.scale_B1), -1)
        inverse_B1 = torch.where(self.scale_B1 == 0, 0, 1 / self.scale_B1)
        code_BE = ((x_BE - self.bias_B1) * inverse_B1).round_().clamp_(0, self.top)
        out_P.copy_((code_BE * self.scale_B1 + self.bias_B1).view(-1))


def grid_of(dtype: str, stored: Array, device: torch.device) -> ScaleGrid:
    """Scale and bias of each group from uint8 blocks of one of SEARCHED."""
    if dtype in affine.BITS_OF_BLOCKS:
        _, scale, bias = affine.read_blocks(dtype, stored.data)
    elif dtype == "Q6_K":
        blocks = stored.reshape(-1, DTYPES[dtype].block_bytes)
        d = blocks[:, 208:].copy().view("<f2").astype("f4")
        scale = d * blocks[:, 192:208].view("i1").astype("f4")
        bias = scale * np.float32(-32)
    else:
        blocks = stored.reshape(-1, DTYPES[dtype].block_bytes)
        halves = blocks[:, :4].copy().view("<f2").astype("f4")
        scale, least = (part.astype("f4") for part in _six_bits(blocks[:, 4:16]))
        scale, bias = scale * halves[:, :1], least * -halves[:, 1:]

    def upload(part: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(part).reshape(-1, 1)).to(device)

    return ScaleGrid(upload(scale), upload(bias), _GRIDS[dtype][1])


def _six_bits(packed: Array) -> tuple[Array, Array]:
    """Eight scales and eight minima of 6 bits from the 12 bytes of a Q4_K or Q5_K block, each uint8 [blocks, 8]."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=1)
    return scale, np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=1)


# --- the weights of a run ---


@dataclass(frozen=True, slots=True)
class Stretch:
    """A range of the flat buffers whose values are blocks of one type: from `start` to before `stop`."""

    start: int
    stop: int
    dtype: str


@dataclass
class Quantizer:
    """Rounds the weights that a student computes with, and encodes them for checkpoints.

    Attributes:
        network: the student.
        types: the GGML type of each quantized tensor, by Hugging Face name.
        every: updates between two searches for scales.
        pull: the fraction of the way to their rounded values that an update moves the master weights.
    """

    network: NetworkSource
    types: Mapping[str, str]
    every: int
    pull: float = 0.0
    _stretches: list[Stretch] = field(default_factory=list)
    _starts: dict[str, int] = field(default_factory=dict)
    _grids: dict[int, ScaleGrid] = field(default_factory=dict)
    _steps: dict[Stretch, Tensor] = field(default_factory=dict)
    _age: int = 0
    _searches: bool = True
    _is_forced: bool = True

    @property
    def alignment(self) -> int:
        """Values of the largest block: every part of a buffer begins at a multiple of it."""
        return max(DTYPES[dtype].block for dtype in self.types.values())

    @property
    def is_searched(self) -> bool:
        """Whether some types have scales that are searched only every few updates."""
        return any(dtype in SEARCHED for dtype in self.types.values())

    def lay_out(self, starts: Mapping[str, int]) -> None:
        """Receives the first elements of the parameters in the flat buffers, whose padding is zero."""
        places = []
        for hf, (parameter, first, size) in hf_names(self.network.shape).items():
            if hf in self.types:
                start = starts[parameter] + first * (size[-1] if len(size) > 1 else 1)
                self._starts[hf] = start
                places.append(Stretch(start, start + prod(size), self.types[hf]))
        self._stretches = []
        for place in sorted(places, key=lambda place: place.start):
            last = self._stretches[-1] if self._stretches else None
            if last is not None and last.dtype == place.dtype and place.start - last.stop < self.alignment:
                self._stretches[-1] = Stretch(last.start, place.stop, last.dtype)
            else:
                self._stretches.append(place)

    def fix_steps(self, flat_P: Tensor) -> None:
        """Receives all weights, float32, in the layout of the flat buffers; those of the first call decide."""
        if not self._steps:
            some = [stretch for stretch in self._stretches if stretch.dtype == kernels.STEPPED]
            self._steps = {stretch: kernels.fit_steps(flat_P[stretch.start : stretch.stop]) for stretch in some}

    def _steps_of(self, start: int, stop: int) -> Tensor | None:
        """The steps of a range of the flat buffers; None if its type has none."""
        for stretch, steps_B1 in self._steps.items():
            if stretch.start <= start < stretch.stop:
                return steps_B1[(start - stretch.start) // 32 : (stop - stretch.start) // 32]
        return None

    def begin(self, *, searches: bool = False) -> None:
        """Called before all weights are rounded again; `searches` forces a search for the best scales."""
        self._is_forced = searches
        self._searches = searches or self._age % self.every == 0
        self._age = 1 if self._searches else self._age + 1

    def round(self, start: int, master_P: Tensor, compute_P: Tensor) -> None:
        """Rounds a part of the flat buffers, which begins at `start`: from `master_P`, float32, to `compute_P`.

        Pulls `master_P`, except in a search for scales.
        """
        for stretch in self._stretches:
            first, last = max(stretch.start, start), min(stretch.stop, start + len(master_P))
            if first >= last:
                continue
            values_P, out_P = (whole[first - start : last - start] for whole in (master_P, compute_P))
            if stretch.dtype in SEARCHED and self._searches:
                stored = kernels.encode_on_host(stretch.dtype, values_P)
                self._grids[first] = grid_of(stretch.dtype, stored, values_P.device)
                out_P.copy_(torch.from_numpy(ggml.decode(stretch.dtype, stored)))
                continue
            self._round_on_device(stretch.dtype, first, values_P, out_P)
            if self.pull and not self._is_forced:
                for some_P, to_P in zip(torch.split(values_P, _PULLED), torch.split(out_P, _PULLED), strict=True):
                    some_P.lerp_(to_P.float(), self.pull)
                self._round_on_device(stretch.dtype, first, values_P, out_P)

    def _round_on_device(self, dtype: str, start: int, values_P: Tensor, out_P: Tensor) -> None:
        if dtype in kernels.ENCODED:
            kernels.round_trip(dtype, values_P, out_P, self._steps_of(start, start + len(values_P)))
        else:
            self._grids[start].round(values_P, out_P)

    def encode(self, hf: str, values: Tensor) -> Tensor:
        """The blocks of a tensor, uint8, on its device or in main memory. Raises RefusedError for NaN and infinity."""
        values_P, start = values.reshape(-1), self._starts[hf]
        return kernels.encode(self.types[hf], values_P, self._steps_of(start, start + values_P.numel()))

    def describe(self) -> str:
        """One line of the log."""
        counts = Counter(self.types.values())
        return ", ".join(f"{plural(n, 'tensor')} as {dtype}" for dtype, n in counts.items())
