"""One page of every kind, about small things: a model, two models, a run, gates, speeds."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import demo_model

import aprfmt
from aprfmt.convert.presets import PRESETS, usual_bits
from aprfmt.convert.report import Report
from aprfmt.html.file import write_page
from aprfmt.running.bench import BenchedModel, BenchGate, BenchReport, Samples
from aprfmt.running.divergence import QUANTILES
from aprfmt.running.divergence_page import divergence_html, weight_errors
from aprfmt.running.divergence_report import HISTOGRAM_BINS, Divergence
from aprfmt.running.pages import bench_html, qa_html
from aprfmt.running.qa import GateResult, QaReport
from aprfmt.running.quantization_page import quantization_html
from aprfmt.running.quantization_report import FrontPoint, PresetPoint, QuantizationReport, TypedTensor

NAMES = ("model", "diff", "run", "qa", "bench", "quantize", "divergence")
_STEPS = 2400


def write_all(folder: Path, model: Path | None = None, other: Path | None = None) -> dict[str, Path]:
    """Writes the pages into `folder`, of `model` and `other` where they are given; gives them by name."""
    paths = {name: folder / f"{name}.html" for name in NAMES}
    if model is None or other is None:
        model, other = folder / "m.gguf", folder / "q.gguf"
        demo_model.build(model)
        aprfmt.quantize_model(model, other, "q8_0")
    aprfmt.report(model, paths["model"])
    aprfmt.diff(model, other, values=True, output=paths["diff"])
    write_run(folder / "run")
    aprfmt.report(folder / "run", paths["run"])
    write_page(paths["qa"], qa_html(gates()))
    write_page(paths["bench"], bench_html(speeds()))
    write_page(paths["quantize"], quantization_html(types()))
    write_page(paths["divergence"], divergence_html(divergence(), weight_errors(str(other), str(model))))
    return paths


def write_run(folder: Path) -> None:
    """The folder of a distillation that was resumed once and could not save once."""
    folder.mkdir()
    noise = random.Random(1)
    config: dict[str, object] = {
        "teacher": "/models/Qwen3-4B.gguf",
        "student_init": "depth:8",
        "data": "/data/code/train.jsonl",
    }
    config |= {"lr": 3e-4, "steps": _STEPS, "total_steps": _STEPS, "temperature": 2.0, "kd_weight": 0.9}
    events = [_begin(0), {"event": "start", "command": "distill", "config": config, "digest": "9f" * 32, "time": 1e9}]
    events[1]["device"] = "NVIDIA H100 80GB HBM3, bf16"
    events.append(_scores(0))
    for step in range(1, _STEPS + 1):
        events.append(_step(step, noise.gauss(0, 0.05)))
        when = {"step": step, "time": 1e9 + 1.4 * step}
        if step % 300 == 0:
            events.append(_scores(step))
            saved = {"event": "checkpoint", "bytes": 3 << 30, "seconds": 4.1, "best": step == _STEPS}
            events.append(saved | when)
        if step == 900:
            events.append(_begin(step))
        if step == 1500:
            events.append({"event": "failed_save", "error": "no space left on device"} | when)
    events.append({"event": "end", "step": _STEPS, "finished": True, "time": 1e9 + 1.4 * _STEPS})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    of = {"teacher": (4.02e9, "ab"), "student": (1.1e9, "cd")}
    models = {who: {"architecture": "qwen3", "parameters": n, "print": p * 32} for who, (n, p) in of.items()}
    (folder / "distillation_metadata.json").write_text(json.dumps({"status": "done", "failed_saves": 1, **models}))


def _begin(step: int) -> dict[str, Any]:
    return {"event": "begin", "time": 1e9 + 1.4 * step, "step": step, "resumed": step > 0, "environment": {}}


def _scores(step: int) -> dict[str, Any]:
    far = math.exp(-step / 500)
    ce = 2 + 2.2 * far
    values = {"ce": ce, "perplexity": math.exp(ce), "kl": 0.21 + 1.9 * far, "agreement": 0.82 - 0.5 * far}
    return {"event": "evaluation", "step": step, "teacher_ce": 1.93, "accuracy": 0.6 - 0.3 * far, **values}


def _step(step: int, z: float) -> dict[str, Any]:
    far = math.exp(-step / 500)
    values = {"loss": 0.5 + 4 * far * (1 + z) + z / 3, "ce": 2 + 2.2 * far + z, "kl": 0.3 + 2.5 * far * (1 + z)}
    values |= {"kl1": 0.21 + 1.9 * far * (1 + z), "agreement": 0.82 - 0.5 * far + z / 4}
    values |= {"grad_norm": 0.4 + 30 * far * math.exp(4 * z), "memory_bytes": 61.2 * 2**30}
    values |= {"lr": 3e-4 * min(1.0, step / 100) * (0.5 + 0.5 * math.cos(math.pi * step / _STEPS))}
    values |= {"tokens_per_s": 46800 * (1 + z / 5), "mfu": 0.41 + z / 10, "utilisation": 97.0}
    return {"event": "step", "step": step, "tokens": 65536 * step, "time": 1e9 + 1.4 * step, **values}


def gates() -> QaReport:
    """A model that one gate fails."""
    rows = [
        GateResult("loads", "pass", True, "llama.cpp loads the file", "loaded in 412 ms", None, None, 0.41),
        GateResult("vocabulary", "pass", True, "every token id has a text", "49,152 tokens", None, None, 0.02),
        GateResult("finite", "pass", True, "no logit is NaN", "0 of 786,432 logits", 0.0, 0.0, 0.31),
        GateResult("kl", "fail", True, "close to the original", "KL to the original is too large", 0.412, 0.1, 3.2),
        GateResult("template", "skip", False, "the chat template works", "the model has none", None, None, 0.0),
    ]
    return QaReport("/models/m-q2_k.gguf", "/models/m.gguf", False, "xllamacpp 2026.10", 134_515_008, 3.12, rows, 4.1)


def speeds() -> BenchReport:
    """Three files of one model, the last too slow."""
    models: list[BenchedModel] = []
    for name, scale in (("m.gguf", 1.0), ("m-q8_0.gguf", 1.62), ("m-q4_k_m.gguf", 2.1)):
        first = models[0] if models else None

        def samples(base: float, of: str, first: BenchedModel | None = first) -> Samples:
            values = [base * (1 + shift) for shift in (-0.03, -0.01, 0.0, 0.015, 0.02)]
            against: Samples | None = getattr(first, of) if first is not None else None
            return Samples(base, min(values), max(values), values, base / against.median if against else 1.0)

        speed = samples(1450 * scale, "prompt_tok_s"), samples(92 * scale, "tok_s"), samples(640 / scale, "ttft_ms")
        sizes = int(269e6 / scale), 9 << 20, int(420e6 / scale)
        models.append(BenchedModel(f"/models/{name}", "xllamacpp 2026.10", 8, 0.4 / scale, *sizes, *speed))
    limits = [BenchGate(m.file, "tok_s", 100.0, m.tok_s.median, m.tok_s.median >= 100) for m in models]
    return BenchReport(512, 128, 5, models, limits, False, 41.0)


def types() -> QuantizationReport:
    """The types of a model of 28 layers, with V and the last matrix of the MLP in more bits."""
    roles = {"attn_q": 3.4, "attn_k": 3.4, "attn_v": 5.5, "attn_output": 4.25, "ffn_gate": 3.4, "ffn_up": 3.4}
    names = {3.4: "Q3_K", 4.25: "IQ4_XS", 4.5: "Q4_K", 5.5: "Q5_K", 6.5625: "Q6_K"}
    steps = sorted(names)
    rows = [("token_embd.weight", 4.5)]
    for layer in range(28):
        for role, bits in (roles | {"ffn_down": 4.5}).items():
            at = steps.index(bits) + (layer < 3 or layer > 24 or layer % 9 == 0)
            rows.append((f"blk.{layer}.{role}.weight", steps[min(at, len(steps) - 1)]))
    errors = [4 ** (1 - bits) * 0.3 for _, bits in rows]
    tensors = [
        TypedTensor(name, "BF16", names[bits], 16.0, bits, error, error / sum(errors))
        for (name, bits), error in zip(rows, errors, strict=True)
    ]

    def kl(n_bytes: float) -> float:
        return 4.2 * math.pow(4.4, 1 - n_bytes / 75e6)

    shown = [preset for preset in PRESETS.values() if usual_bits(preset) < 10]
    presets = [
        PresetPoint(preset.name, n := int(75e6 * usual_bits(preset)), kl(n) * (1.3 + 0.4 * (i % 3)), kl(n))
        for i, preset in enumerate(shown)
    ]
    size = int(75e6 * 4.0)
    dtypes = {"BF16": {"tensors": 197, "params": 600_000_000, "bytes": size}}
    report = Report(
        source="/models/m.gguf", output="/models/m-small.gguf", format="gguf", label="GGUF", architecture="qwen3",
        tensor_count=310, input_bytes=1_200_000_000, output_bytes=size, dtypes=dtypes, lossless=False,  # type: ignore[arg-type]
    )  # fmt: skip
    report.measured_kl = 1.04 * kl(size)
    front = [FrontPoint(int(75e6 * bits / 8), kl(75e6 * bits / 8)) for bits in range(14, 66)]
    groups = [
        {
            **{"role": role, "layers": f"{7 * i}-{7 * i + 6}", "dtypes": {names[bits]: 6, "Q6_K": 1}},
            **{"size_bytes": int(4e6 * bits), "bits_per_weight": bits, "error": 4 ** (1 - bits) * 0.3, "share": 1 / 24},
        }
        for role, bits in roles.items()
        for i in range(4)
    ]
    return QuantizationReport(report, FrontPoint(size, kl(size)), tensors, groups, front, presets, True)  # type: ignore[arg-type]


def divergence() -> Divergence:
    """A model in about four bits."""
    counts = [int(1e4 * math.exp(-((i - 22) ** 2) / 18)) for i in range(HISTOGRAM_BINS)]
    kl = {f"{q:g}": 0.012 * 10 ** (3 * (q - 0.5) ** 3 * 8) for q in QUANTILES}
    change = {f"{q:g}": 1.6 * (q - 0.5) ** 5 * 8 for q in QUANTILES}
    return Divergence(
        "/models/m-q4_k_m.gguf", "/models/m.gguf", "xllamacpp 2026.10", 512, 160, sum(counts), 2.71, 15.03, 2.69, 14.73,
        0.0321, 0.0006, kl, counts, 0.914, -0.0021, 0.0413, change, 184.0,
    )  # fmt: skip
