"""Types chosen for a target beside llama.cpp's presets of the same size, for one model from end to end.

    python tools/bench_targets.py MODEL --imatrix-data A --eval-data B [--measure-data C] [--sizes q4_k_m,q3_k_m,iq2_m]
        [--dither] [--without-measure] [--max-kl] [--llama-mix] [--work FOLDER] --json OUT

For each preset: the preset, ours with --target-size at its size and --measure, with the same importance matrix, and the
KL divergence of both from the model on other text, in llama.cpp by `apr eval --against`. A run that was interrupted
continues in --work. Exit 1 unless every cell meets the targets.

    --dither           MODEL is quantized: add random digits below the step of each block, to have floats to quantize
    --without-measure  also ours without --measure
    --max-kl           also --max-kl at the KL that the preset has on --measure-data, and the number of rounds
    --llama-mix        also the choice of llama.cpp #15550: the least sum of squared errors weighted by the matrix
    --mlx-mix          also the choice of mlx-lm's dynamic_quant, in MLX's types
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np

import aprfmt
from aprfmt.running.target_types import TypeChooser
from dynamic_mix import module_bits

if TYPE_CHECKING:
    from aprfmt.types import Array

_LOWER, _PREDICTED, _BELOW, _ROUNDS = 0.25, 0.20, 0.005, 3
"""The targets: KL below the preset's, error of the prediction, unused part of the size, rounds of --max-kl."""
_DEFAULT_SIZES = "q4_k_m,q3_k_m,iq2_m"
_PART = 16
"""Values whose smallest difference is taken for the step of their block."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A quantized file: bytes, KL in nats per token with its standard error, what was predicted, rounds of --max-kl."""

    size: int
    kl: float
    error: float
    predicted: float | None = None
    rounds: int | None = None
    measured: float | None = None


@dataclass(slots=True)
class Bench:
    """One model.

    Attributes:
        model: a GGUF with float weights.
        work: the folder of what is made of it.
        measure_data: text of --measure and --max-kl.
        eval_data: text that only the final KL sees.
        tokens: of `measure_data`, and of `eval_data`.
        cells: what is known, by "SIZE WAY".
    """

    model: Path
    work: Path
    imatrix_data: Path
    measure_data: Path
    eval_data: Path
    tokens: tuple[int, int]
    chunks: int
    cells: dict[str, Cell] = field(default_factory=dict)

    @property
    def matrix(self) -> Path:
        """The importance matrix, of all files."""
        return self.work / "imatrix" / "model.imatrix.gguf"  # apart, as the model is

    def prepare(self) -> None:
        """Computes the importance matrix; reads the cells of an interrupted run."""
        if not self.matrix.exists():
            self.matrix.parent.mkdir(exist_ok=True)
            text = ("--data", self.imatrix_data, "--chunks", self.chunks)
            apr("imatrix", self.model, *text, "-o", self.matrix, "--resume")
        known = self.work / "cells.json"
        if known.exists():
            self.cells = {name: Cell(**cell) for name, cell in json.loads(known.read_text()).items()}

    def cell(self, name: str, make: Callable[[Path], Mapping[str, object]]) -> Cell:
        """What `make(path)` writes, measured; `make` returns the report of a conversion."""
        if name not in self.cells:
            path = self.work / f"{name.replace(' ', '-')}.gguf"
            report = make(path)
            size = int(str(report.get("weights_of", path.stat().st_size)))
            kl, error = self.divergence(path, "eval")
            given = {key: report.get(f"{key}_kl") for key in ("predicted", "measured")}
            predicted, measured = (float(str(value)) if value is not None else None for value in given.values())
            rounds = int(str(report.get("rounds", 0))) or None
            self.cells[name] = Cell(size, kl, error, predicted, rounds, measured)
            path.unlink()
            cells = {label: asdict(cell) for label, cell in self.cells.items()}
            (self.work / "cells.json").write_text(json.dumps(cells, indent=1))
            print(f"  {name}: {self.cells[name]}", file=sys.stderr, flush=True)
        return self.cells[name]

    def divergence(self, path: Path, text: str) -> tuple[float, float]:
        """Mean KL from the model and its standard error, on "eval" or "measure" text."""
        logits = self.work / f"{text}.kld"
        reference: tuple[str | Path, ...] = ("--against", logits)
        if not logits.exists():
            data = self.eval_data if text == "eval" else self.measure_data
            n_tokens = self.tokens[text == "eval"]
            reference = ("--against", self.model, "--data", data, "--limit", str(n_tokens), "--save-logits", logits)
        found = apr("eval", path, *reference)
        return float(str(found["kl"])), float(str(found["kl_error"]))

    # --- ways ---

    def preset(self, name: str, path: Path) -> Mapping[str, object]:
        """A preset of llama.cpp."""
        return apr("quantize", self.model, name, "-o", path, "--imatrix", self.matrix)

    def target(self, path: Path, option: str, value: float, *, measure: bool) -> Mapping[str, object]:
        """Ours for a target."""
        how = ["--measure"] if measure else []
        if measure or option == "--max-kl":
            how += ["--eval-data", str(self.measure_data), "--eval-tokens", str(self.tokens[0])]
        return apr("quantize", self.model, option, str(value), "-o", path, "--imatrix", self.matrix, *how)

    def llama_mix(self, path: Path, size: int) -> Mapping[str, object]:
        """The choice of llama.cpp #15550."""
        with (
            aprfmt.open(self.model) as model,
            mock.patch.object(TypeChooser, "default_costs", lambda chooser: absolute_costs(chooser, model)),
        ):
            aprfmt.quantize_model(self.model, path, target_size=size, imatrix=self.matrix)
        return {}

    def mlx_mix(self, path: Path, size: int) -> Mapping[str, object]:
        """The choice of mlx-lm's dynamic_quant, as F16 for llama.cpp; `size` counts its weights."""
        folder, made = self.work / "hf", self.work / "mlx"
        if not folder.exists():
            aprfmt.convert_model(self.model, folder, format="hf", dtype="f16")
        with aprfmt.open(self.model) as model:
            others = sum(tensor.n_bytes // 2 for tensor in model.tensors.entries if len(tensor.shape) < 2)
        bits, low = module_bits(folder, self.imatrix_data.read_text(), size - others)
        types = [f"{re.escape(name)}={n}" for name, n in bits.items() if n != low]
        aprfmt.export_model(folder, made, format="mlx", bits=low, tensor_type=types, force=True)
        aprfmt.convert_model(made, path, dtype="f16")
        return {"weights_of": sum(file.stat().st_size for file in made.glob("*.safetensors"))}


def absolute_costs(chooser: TypeChooser, model: aprfmt.Model) -> None:
    """Makes the predicted loss the sum over all weights of importance times squared error, as llama.cpp #15550 has it.

    Each relative error is multiplied by the tensor's sum of importance times squares.
    """
    chooser.tensors = [
        replace(tensor, cost=energy(model.tensors[tensor.name].numpy(), chooser.weights.get(tensor.name)))
        for tensor in chooser.tensors
    ]


def energy(values: Array, weights: Array | None) -> float:
    """The sum of w x² over a tensor; `weights` [matrices * columns]."""
    squares = values.astype("f4") ** 2
    columns: Array = squares.sum(axis=-2, dtype="f8").reshape(-1)
    return float(columns.sum() if weights is None else (columns * np.resize(weights, columns.shape)).sum())


def apr(*arguments: str | Path | int) -> dict[str, object]:
    """The report of a command. Raises SystemExit when it fails."""
    command = [sys.executable, "-m", "aprfmt", *map(str, arguments), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}")
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


# --- models ---


def float_gguf(source: Path, work: Path, *, dither: bool) -> Path:
    """The GGUF with float weights to quantize, made once."""
    if source.suffix == ".gguf" and not dither:
        return source
    path = (
        work / "model" / "model.gguf"
    )  # other files beside a model count as its own: measurements would not be reused
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        made = path.with_name("unfinished.gguf")
        aprfmt.convert_model(source, made, force=True, dtype="f16" if dither else "keep")
        if dither:
            add_digits(source, made)
        made.rename(path)
    return path


def add_digits(source: Path, path: Path) -> None:
    """Adds to each F16 matrix of a GGUF a random part of the step of each block that `source` quantizes it with."""
    from gguf import GGUFReader

    rng = np.random.default_rng(0)
    reader = GGUFReader(path, "r+")
    with aprfmt.open(source) as model:
        for tensor in reader.tensors:
            stored = model.tensors[tensor.name]
            if stored.dtype in ("F32", "F16", "BF16"):
                continue
            values = tensor.data.reshape(-1, _PART)
            for first in range(0, len(values), 1 << 16):
                part = values[first : first + (1 << 16)].astype("f4")
                gaps = np.diff(np.sort(part, axis=-1), axis=-1)
                largest = np.abs(part).max(axis=-1, keepdims=True)
                steps = np.where(gaps > largest / 512, gaps, np.inf).min(axis=-1, keepdims=True)
                noise = rng.uniform(-0.5, 0.5, part.shape).astype("f4") * np.where(np.isfinite(steps), steps, 0)
                values[first : first + (1 << 16)] = part + noise
    del reader  # which writes


# --- the table ---


def rows(bench: Bench, sizes: Sequence[str]) -> list[str]:
    """The lines of the table."""
    lines = ["| size of | | bytes | KL | | predicted | |", "|---|---|--:|--:|--:|--:|--:|"]
    for size in sizes:
        base = bench.cells[f"{size} preset"]
        for name, cell in bench.cells.items():
            if not name.startswith(f"{size} "):
                continue
            way = name.partition(" ")[2]
            change = "" if cell is base else f"{100 * (cell.kl / base.kl - 1):+.0f} %"
            off = "" if cell.predicted is None else f"{100 * (cell.predicted / cell.kl - 1):+.0f} %"
            predicted = "" if cell.predicted is None else f"{cell.predicted:.4f}"
            way += f" ({cell.rounds} rounds: {cell.measured:.4f})" if cell.rounds else ""
            columns = size, way, f"{cell.size:,}", f"{cell.kl:.4f} ± {cell.error:.4f}", change, predicted, off
            lines.append("| " + " | ".join(columns) + " |")
    return lines


def misses(bench: Bench, sizes: Sequence[str]) -> list[str]:
    """What misses a target, a sentence each."""
    found = []
    for size in sizes:
        base, own = bench.cells[f"{size} preset"], bench.cells[f"{size} --measure"]
        if own.kl > (1 - _LOWER) * base.kl:
            found.append(f"{size}: KL {own.kl:.4f} is not {_LOWER:.0%} below the preset's {base.kl:.4f}")
        if own.predicted is None or abs(own.predicted / own.kl - 1) > _PREDICTED:
            found.append(f"{size}: the predicted KL is {own.predicted}, the measured one {own.kl:.4f}")
        if not (1 - _BELOW) * base.size <= own.size <= base.size:
            found.append(f"{size}: {own.size:,} bytes for a target of {base.size:,}")
        limited = bench.cells.get(f"{size} --max-kl")
        if limited is not None and (limited.rounds or _ROUNDS + 1) > _ROUNDS:
            found.append(f"{size}: --max-kl took {limited.rounds} rounds")
    return found


def main() -> int:
    """Measures, writes the JSON file and prints a table; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="a GGUF, an .apr or a folder")
    parser.add_argument("--imatrix-data", type=Path, required=True, help="text of the importance matrix")
    parser.add_argument("--eval-data", type=Path, required=True, help="held-out text of the final KL")
    parser.add_argument("--measure-data", type=Path, help="text of --measure and --max-kl; default: --imatrix-data")
    parser.add_argument("--sizes", default=_DEFAULT_SIZES, help="presets, separated by commas")
    parser.add_argument("--chunks", type=int, default=24, help="chunks of 512 tokens of --imatrix-data")
    parser.add_argument("--measure-tokens", type=int, default=2048)
    parser.add_argument("--eval-tokens", type=int, default=4096)
    parser.add_argument("--work", type=Path, help="folder to keep and to continue in; default: a temporary one")
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    for flag in ("--dither", "--without-measure", "--max-kl", "--llama-mix", "--mlx-mix"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    sizes = options.sizes.split(",")
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        model = float_gguf(options.model, work, dither=options.dither)
        data = (options.imatrix_data, options.measure_data or options.imatrix_data, options.eval_data)
        bench = Bench(model, work, *data, (options.measure_tokens, options.eval_tokens), options.chunks)
        bench.prepare()
        for size in sizes:
            measure(bench, size, options)
    missed = misses(bench, sizes)
    table = rows(bench, sizes)
    found = {"model": str(options.model.name), "cells": {name: asdict(cell) for name, cell in bench.cells.items()}}
    options.json.write_text(json.dumps({**found, "missed": missed, "table": table}, indent=1))
    print("\n".join([*table, "", *missed]))
    return int(bool(missed))


def measure(bench: Bench, size: str, options: argparse.Namespace) -> None:
    """Measures the cells at the size of one preset."""
    base = bench.cell(f"{size} preset", lambda path: bench.preset(size, path))
    n_bytes = base.size
    bench.cell(f"{size} --measure", lambda path: bench.target(path, "--target-size", n_bytes, measure=True))
    if options.without_measure:
        name = f"{size} without --measure"
        bench.cell(name, lambda path: bench.target(path, "--target-size", n_bytes, measure=False))
    if options.llama_mix:
        bench.cell(f"{size} llama.cpp #15550", lambda path: bench.llama_mix(path, n_bytes))
    if options.mlx_mix:
        bench.cell(f"{size} mlx-lm dynamic_quant", lambda path: bench.mlx_mix(path, n_bytes))
    if options.max_kl:
        most = round(base.kl, 4)
        bench.cell(f"{size} --max-kl", lambda path: bench.target(path, "--max-kl", most, measure=True))


if __name__ == "__main__":
    sys.exit(main())
