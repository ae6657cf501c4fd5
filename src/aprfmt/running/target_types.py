"""Types of tensors for a target: a file size, bits per weight, or a KL divergence that llama.cpp measures.

The error of every type is measured on a sample of each tensor (convert/quantization_error.py), its cost in llama.cpp
(running/sensitivity.py) or taken from the role of the tensor; convert/bit_allocation.py chooses. Measurements are kept
in the cache line by line, so that an interrupted run resumes.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from aprfmt.codecs.dtypes import DTYPES
from aprfmt.convert.bit_allocation import (
    AllocatedTensor,
    Allocation,
    TypeOption,
    fit_bytes,
    fit_loss,
    smallest,
    total_bytes,
    total_loss,
)
from aprfmt.convert.memory import flow_for
from aprfmt.convert.quantization import Observer, QuantizedTensor
from aprfmt.convert.quantization_error import sample_rows
from aprfmt.convert.report import QuantizedGroup, Report
from aprfmt.convert.type_recipe import RecipeRow, TypeRecipe, exact
from aprfmt.errors import RefusedError, storage_errors
from aprfmt.io.cache import cache_home, own_folder, storing_in
from aprfmt.io.source import exists
from aprfmt.running.sensitivity import PerturbedModel, groups_of, role_of
from aprfmt.running.type_systems import GGML_TYPES, TypeSystem
from aprfmt.text import format_bytes, plural
from aprfmt.types import Array

_MEASURED_BITS = (4.5, 2.6)
"""Bits per weight at which sensitivities are measured: for targets from 4 bits on, and below."""

ROUNDED = "q8_0"
"""The preset whose errors of weights are so small that its KL is that of rounded activations."""

_LEAST_KL = 1e-12

_COSTS = {
    **{"token_embd": 6.2, "output": 6.2, "attn_q": 1.9, "attn_k": 3.1, "attn_v": 4.5, "attn_output": 2.7},
    **{"ffn_gate": 4.0, "ffn_up": 5.7, "ffn_down": 5.3},
}
"""KL in nats per unit of mean relative error of a role, as `--measure` finds it for SmolLM2-135M."""
_ROLES = {
    **{"embed_tokens": "token_embd", "lm_head": "output", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v"},
    **{"o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"},
}
"""Roles by the last word of names of Hugging Face and MLX."""
_COST, _UNTIED_COST = 4.0, 1.0
"""Costs of errors in roles that are not listed, and in the token embedding of a model with an output head of its own.
"""


class ConversionPlanner(Protocol):
    """Plans the conversion with some options changed."""

    def __call__(self, changes: Mapping[str, object], observe: Observer | None = None) -> Report:
        """`observe` is called with the tensors that are quantized."""


class SourceType(NamedTuple):
    """How a tensor is stored in the source."""

    dtype: str
    n_bytes: int


@dataclass(slots=True)
class TypeChooser:
    """Chooses types for a model.

    Attributes:
        log: called with lines of progress.
        store: path of the measurements.
        threads: that measure errors; None: one per CPU.
        types: what to choose from.
        tensors: the quantized tensors, with their options and costs.
        other_bytes: of the output, besides those tensors.
        other_weights: bytes of the output's other tensors.
        n_params: parameters of the output.
        scale: measured over predicted KL of the errors of weights.
        rounding: KL of a file whose weights hardly change: llama.cpp rounds what it multiplies with quantized weights.
        sizes: number of values by tensor.
        sources: how the source stores each tensor.
        known: measurements by key.
    """

    log: Callable[[str], None]
    store: Path
    threads: int | None = None
    types: TypeSystem = GGML_TYPES
    tensors: list[AllocatedTensor] = field(default_factory=list)
    weights: dict[str, Array] = field(default_factory=dict)
    architecture: str | None = None
    other_bytes: int = 0
    other_weights: int = 0
    n_params: int = 0
    scale: float = 1.0
    rounding: float = 0.0
    sizes: dict[str, int] = field(default_factory=dict)
    sources: dict[str, SourceType] = field(default_factory=dict)
    known: dict[str, float] = field(default_factory=dict)
    _measured_kl: dict[float, float] = field(default_factory=dict)  # by total loss, of files

    def measure_errors(self, plan: ConversionPlanner, also: Mapping[str, str] | None = None) -> None:
        """Measures the error of each type of each tensor that `plan(options, observe)` plans to quantize.

        `also` are types by tensor to measure besides the candidates.
        """
        self.known = _read(self.store)
        also = also or {}
        planned = 0

        def observe(architecture: str | None, found: Sequence[QuantizedTensor]) -> None:
            nonlocal planned
            self.architecture = architecture
            planned = sum(self.types.n_bytes(row.target.dtype, row.tensor.shape, row.tensor.dtype) for row in found)
            self.log(f"measuring the errors of all types on {plural(len(found), 'tensor')}")
            with ThreadPoolExecutor(flow_for(self.threads, None, ()).n_workers) as pool:
                self.tensors = [*pool.map(self._measured, found, (also.get(row.tensor.name) for row in found))]
            self.weights = {row.tensor.name: row.target.weights for row in found if row.target.weights is not None}

        report = plan(self.types.planned, observe)
        if not self.tensors:
            raise RefusedError("the model has no matrix to quantize", path=report.source)
        self.other_bytes = report.output_bytes - planned
        self.other_weights = sum(row["bytes"] for row in report.dtypes.values()) - planned
        self.n_params = report.param_count or 1

    def _measured(self, row: QuantizedTensor, also: str | None = None) -> AllocatedTensor:
        tensor, weights = row.tensor, row.target.weights
        dtypes = [row.target.dtype] if row.is_fixed else self.types.candidates(row)
        dtypes += [also] if also is not None and also not in dtypes else []
        keys = {dtype: f"error {dtype} {tensor.name}" for dtype in dtypes}
        if missing := [dtype for dtype in dtypes if keys[dtype] not in self.known]:
            sample = sample_rows(tensor, weights, row.counts)
            for dtype in missing:
                try:
                    self._note(keys[dtype], self.types.error(sample, dtype, tensor.dtype))
                except RefusedError:  # values beyond the range of the type
                    self._note(keys[dtype], -1.0)
        found = [(dtype, self.known[keys[dtype]]) for dtype in dtypes]
        options = tuple(
            TypeOption(dtype, self.types.n_bytes(dtype, tensor.shape, tensor.dtype), error)
            for dtype, error in found
            if error >= 0
        )
        if not options:
            raise RefusedError(
                "NaN, infinite or too large values: no type can store them", tensor=tensor.name,
                hint="apr tensors FILE --stats shows them",
            )  # fmt: skip
        self.sizes[tensor.name] = math.prod(tensor.shape)
        stored = tensor.original_dtype
        n_bytes = DTYPES[stored].n_bytes(tensor.shape) if stored in DTYPES else tensor.n_bytes
        self.sources[tensor.name] = SourceType(stored, n_bytes)
        return AllocatedTensor(tensor.name, options, 1.0)

    def _note(self, key: str, value: float) -> None:
        self.known[key] = value
        with storing_in(self.store.parent), storage_errors(self.store), open(self.store, "a", encoding="utf-8") as file:
            file.write(json.dumps([key, value]) + "\n")

    # --- costs ---

    def default_costs(self) -> None:
        """Sets default costs from the roles of the tensors."""
        names = [role_of(tensor.name) for tensor in self.tensors]
        roles = [_ROLES.get(name.rpartition(".")[2], name) for name in names]
        counts = Counter(roles)
        costs = _COSTS | ({"token_embd": _UNTIED_COST} if "output" in counts else {})
        self.tensors = [
            replace(tensor, cost=costs.get(role, _COST) / counts[role])
            for tensor, role in zip(self.tensors, roles, strict=True)
        ]

    def measure_costs(self, model: Callable[[], PerturbedModel], bits: float | None) -> None:
        """Measures the cost of each group of tensors for a target of `bits` per weight; None: unknown."""
        at = _MEASURED_BITS[bits is not None and bits < 4]
        types = {t.name: _near(t, at / 8 * self.sizes[t.name]) for t in self.tensors}
        groups = groups_of(types)
        keys = {label: _digest("cost", {name: types[name].dtype for name in names}) for label, names in groups.items()}
        missing = [label for label in groups if keys[label] not in self.known]
        for done, label in enumerate(missing, 1):
            self._note(keys[label], model().divergence({name: types[name].dtype for name in groups[label]}))
            self.log(f"measured the sensitivity of {label} ({done} of {len(missing)})")
        costs: dict[str, float] = {}
        for label, names in groups.items():
            error, divergence = sum(types[name].error for name in names), self.known[keys[label]]
            if error > 0 and divergence > 0:  # otherwise llama.cpp does not use them: MTP layers
                costs |= dict.fromkeys(names, divergence / error)
        self.tensors = [replace(tensor, cost=costs.get(tensor.name, tensor.cost)) for tensor in self.tensors]

    def measure_rounding(self, measure: Callable[[], float]) -> None:
        """Measures the KL of a file in ROUNDED, where it is not known."""
        key = f"rounding {ROUNDED}"
        if key not in self.known:
            self.log("measuring the rounding of activations")
            self._note(key, measure())
        self.rounding = max(0.0, self.known[key])

    def calibrate(self, chosen: Allocation, measure: Callable[[], float], times: int) -> None:
        """Scales the prediction to the KL of a file with the types `chosen`, which `measure` writes and measures on
        `times` as much text as the costs.
        """
        key = _digest(f"file {times}", {name: option.dtype for name, option in chosen.items()})
        if key not in self.known:
            self.log("measuring all chosen types together")
            self._note(key, measure())
        self.correct(chosen, self.known[key])

    # --- choice ---

    def predicted(self, chosen: Allocation) -> float:
        """The predicted KL in nats."""
        rounds = any(option.dtype in DTYPES and DTYPES[option.dtype].is_quantized for option in chosen.values())
        loss = total_loss(self.tensors, chosen)
        between = _between(loss, self._points())
        return (self.scale * loss if between is None else between) + rounds * self.rounding

    def correct(self, chosen: Allocation, measured: float) -> None:
        """Scales the prediction to the measured KL of an output with the types `chosen`; it follows a power of the
        predicted loss between two measured outputs, since errors that are not small cost more than in proportion.
        """
        self.rounding = min(self.rounding, measured / 2)  # what is left is never negative
        if (predicted := total_loss(self.tensors, chosen)) > 0:
            self._measured_kl[predicted] = measured
            self.scale = max(measured - self.rounding, _LEAST_KL) / predicted

    def _points(self) -> list[tuple[float, float]]:
        """Total loss and KL of the weights of each measured output."""
        return [(loss, max(kl - self.rounding, _LEAST_KL)) for loss, kl in self._measured_kl.items()]

    def within_bytes(self, budget: int, plan: ConversionPlanner) -> Allocation:
        """The best types for an output of at most `budget` bytes. Raises RefusedError with the smallest size."""
        room = budget - self.other_bytes
        while True:
            if (chosen := fit_bytes(self.tensors, room)) is None:
                least = self.other_bytes + total_bytes(smallest(self.tensors))
                raise RefusedError(
                    f"--target-size {format_bytes(budget)} cannot be reached: the smallest possible file has "
                    f"{least:,} bytes",
                    hint=f"--target-size {least + (1 << 14)}B",
                )
            excess = plan(self.options(chosen)).output_bytes - budget
            if excess <= 0:
                return chosen
            room -= excess  # the padding between tensors, which depends on their types

    def within_bits(self, bits: float) -> Allocation:
        """The best types with at most so many bits per weight. Raises RefusedError with the nearest value."""
        chosen = fit_bytes(self.tensors, int(bits * self.n_params / 8) - self.other_weights)
        if chosen is None:
            least = 8 * (self.other_weights + total_bytes(smallest(self.tensors))) / self.n_params
            raise RefusedError(
                f"--target-bpw {bits:g} cannot be reached: the smallest types take {least:.4f} bits per weight",
                hint=f"--target-bpw {least + 0.005:.2f}",
            )
        return chosen

    def within_loss(self, most: float) -> Allocation:
        """The smallest types with at most that much predicted KL. Raises RefusedError with the least KL."""
        wanted = most - self.rounding
        between = _between(wanted, [(kl, loss) for loss, kl in self._points()])
        chosen = fit_loss(self.tensors, wanted / self.scale if between is None else between)
        if chosen is None:
            best = {t.name: min(t.options, key=lambda option: option.error) for t in self.tensors}
            if self.predicted(best) <= most:
                return best
            raise RefusedError(
                f"--max-kl {most:g} cannot be reached: the most precise types have a predicted KL of "
                f"{self.predicted(best):.3g}",
                hint=f"--max-kl {self.predicted(best) * 1.1:.2g}",
            )
        return chosen

    def options(self, chosen: Allocation) -> dict[str, object]:
        """The options of a conversion with these types."""
        recipe = self.recipe(chosen)
        return self.types.options(recipe.preset, recipe.tensor_type)

    def recipe(self, chosen: Allocation) -> TypeRecipe:
        """The types as a recipe."""
        loss = total_loss(self.tensors, chosen) or 1.0
        rows = [
            RecipeRow(exact(t.name), chosen[t.name].dtype, chosen[t.name].error, t.loss(chosen[t.name]) / loss)
            for t in self.tensors
        ]
        bits = 8 * (self.other_weights + total_bytes(chosen)) / self.n_params
        facts = (("bits_per_weight", bits), ("predicted_kl", self.predicted(chosen)))
        return TypeRecipe(rows, self.architecture, self.types.preset(chosen), facts)

    def groups(self, chosen: Allocation) -> list[QuantizedGroup]:
        """Size, bits and error by role and layers."""
        tensors = {tensor.name: tensor for tensor in self.tensors}
        loss = total_loss(self.tensors, chosen) or 1.0
        rows = []
        for label, names in groups_of(tensors).items():
            role, _, layers = label.partition(" ")
            options = [chosen[name] for name in names]
            n_bytes, n_params = sum(option.n_bytes for option in options), sum(self.sizes[name] for name in names)
            rows.append(
                QuantizedGroup(
                    role=role,
                    layers=layers,
                    dtypes=dict(Counter(option.dtype for option in options)),
                    size_bytes=n_bytes,
                    bits_per_weight=round(8 * n_bytes / n_params, 3),
                    error=sum(option.error for option in options) / len(options),
                    share=sum(tensors[name].loss(chosen[name]) for name in names) / loss,
                )
            )
        return rows


def _between(x: float, points: Sequence[tuple[float, float]]) -> float | None:
    """The value at `x` of the power law through the nearest points (x, y) on both sides; None without these."""
    below = max((point for point in points if point[0] <= x), default=None)
    above = min((point for point in points if point[0] > x), default=None)
    if below is None or above is None:
        return None
    part = math.log(x / below[0]) / math.log(above[0] / below[0])
    return float(below[1] * (above[1] / below[1]) ** part)


def _near(tensor: AllocatedTensor, n_bytes: float) -> TypeOption:
    """The largest lossy type of about that many bytes."""
    lossy = sorted((o for o in tensor.options if o.error > 0), key=lambda o: o.n_bytes) or [*tensor.options]
    return next((o for o in reversed(lossy) if o.n_bytes <= n_bytes * 1.02), lossy[0])


def _digest(kind: str, types: Mapping[str, str]) -> str:
    return f"{kind} {zlib.crc32(json.dumps(sorted(types.items())).encode()):08x} {len(types)}"


def measurements(key: str) -> Path:
    """The file of measurements for a key of prepared.key."""
    folder = cache_home() / "quantization"
    own_folder(folder)
    return folder / f"{key}.jsonl"


def _read(path: Path) -> dict[str, float]:
    """The complete lines of a file of measurements."""
    found: dict[str, float] = {}
    if not exists(path):
        return found
    with storage_errors(path):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        try:
            key, value = json.loads(line)
            found[str(key)] = float(value)
        except (ValueError, TypeError):  # cut short when a run was killed
            continue
    return found
