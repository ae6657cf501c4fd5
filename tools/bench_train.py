"""Training steps on one CUDA GPU, random weights: python tools/bench_train.py [--quick] [--peers] [--json FILE]

With --memory: what each of six runs in one process leaves behind, which should be nothing.

Models have the dims of Qwen2.5, T = 2048, 32,768 tokens an update. Our rows are updates of aprtrain.loop's Trainer
with the classes of a real run (Batches, Teacher, Decoder, FlatOptimizer, the loss head), only that models are random
instead of read. A row tells tokens a second (median of the updates after warm-up), the peak of memory beside the
plan, and, from updates of their own, the milliseconds of each stage between device events. The floor is the useful
arithmetic of budget.flops_of at 790 TFLOP/s, the bf16 product of an H200 on random data; the teacher's head counts.

Peers are transformers models under torch.compile with bf16 weights and AdamW in bf16, on the same batches: with
Liger's chunked loss where it is installed, and with the loss on chunks of whole logits.

e4m3 is compared with bf16 as in a run, but random weights say nothing about quality: the limits are lifted.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from aprfmt.arch.hparams import from_hf_config
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.texts.sequences import IGNORED, WindowRows, Windows
from aprfmt.texts.shards import CorpusSplit
from aprfmt.tokenizer.alignment import SharedVocabulary
from aprtrain import budget
from aprtrain.config import Config
from aprtrain.data.batches import Batches
from aprtrain.features import recording
from aprtrain.loop import Progress, Trainer
from aprtrain.loss.head import distill_head
from aprtrain.loss.objective import Objective
from aprtrain.memory import memory_plan, total
from aprtrain.models import TrainingPair, load_student, load_teacher, tensors_of
from aprtrain.network.decoder import Decoder
from aprtrain.network.shape import Shape, shape_of
from aprtrain.network.weights import NetworkSource
from aprtrain.report.metrics import Recorder
from aprtrain.teacher import teacher as teacher_module
from aprtrain.teacher.teacher import RESIDENCIES
from aprtrain.world import World
from bench_teacher import N_REAL, random_network, teacher_bytes

CUDA = torch.device("cuda", 0)
ALONE = World(CUDA)
T, TOKENS = 2048, 32_768
PEAK = 790e12
SIZES = {
    "0.5b": (896, 24, 14, 2, 4864, 151936, True),
    "1.5b": (1536, 28, 12, 2, 8960, 151936, True),
    "7b": (3584, 28, 28, 4, 18944, 152064, False),
}
STAGES = ("teacher backbone", "student forward", "head", "backward", "optimizer")
WARM, MEASURED, TIMED = 4, 10, 4
GIB = 2**30
LEFT = 256 << 20
"""Bytes that may stay after a run: libraries' workspaces."""
NO_LIMITS = mock.patch.multiple(teacher_module, MOST_KL=float("inf"), LEAST_AGREEMENT=0.0)


def hf_config(size: str) -> dict[str, Any]:
    """The config.json of a Qwen2.5."""
    d, layers, heads, kv_heads, ffn, vocab, tied = SIZES[size]
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": d, "rms_norm_eps": 1e-6,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "intermediate_size": ffn, "vocab_size": vocab, "tie_word_embeddings": tied, "rope_theta": 1e6,
        "max_position_embeddings": 32768,
    }  # fmt: skip


def qwen(size: str) -> Shape:
    """Its Shape."""
    return shape_of(from_hf_config(hf_config(size)), ARCHITECTURES["qwen2"])


def random_decoder(shape: Shape, device: torch.device) -> Decoder:
    """A fresh student in float32."""
    decoder, generator = Decoder(shape, torch.float32, device), torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
    return decoder


class HalfMasked(Windows):
    """Windows of whose labels every other run of 256 counts, as answers between questions do."""

    def rows(self, ids: Sequence[int]) -> WindowRows:
        """See Windows."""
        rows = super().rows(ids)
        rows.labels_NT[:, np.arange(T) // 256 % 2 == 0] = IGNORED
        return rows

    def n_labels(self, ids: Sequence[int]) -> int:
        """See Windows."""
        return int((self.rows(ids).labels_NT != IGNORED).sum())


def windows(document: int, kind: type[Windows] = Windows) -> Windows:
    """Random ids in documents of that many tokens; 0: one document."""
    n = 64 * TOKENS
    tokens = np.random.default_rng(0).integers(0, N_REAL, n, dtype=np.uint32)
    ends = np.unique(np.append(np.arange(document, n, document), n)) if document else np.array([n])
    return kind(CorpusSplit(tokens, ends.astype(np.int64), np.zeros(len(ends), np.uint64)), T, 0)


def free() -> None:
    """Lets go of the compiled code of the row before, and of what torch keeps of its memory."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def memory(teacher: str, micro: int) -> int:
    """Runs each kind of teacher twice and prints what is allocated after each; 1 where anything stays.

    Nothing is collected or reset between them: a run's memory is to go with the run.
    """
    gc.collect()
    torch.cuda.empty_cache()
    gc.disable()
    failed = 0
    first = torch.cuda.memory_allocated()
    for residency in ("bf16", "q4k", "fp8") * 2:
        config = row_config(residency, micro)
        torch.cuda.reset_peak_memory_stats()
        fresh = trainer_of(config, teacher, windows(0))
        updates(fresh, 3)
        peak, plan = torch.cuda.max_memory_allocated(), total(fresh.plan)
        del fresh
        left = torch.cuda.memory_allocated() - first
        failed |= left > LEFT
        print(
            f"{teacher} -> 0.5b, {residency:4}: peak {peak / GIB:6.2f} GiB, plan {plan / GIB:6.2f} GiB, "
            f"{left / 2**20:8.1f} MiB left, {torch.cuda.memory_reserved() / GIB:6.2f} GiB reserved by torch",
            flush=True,
        )
    gc.enable()
    print("memory is freed with each run" if not failed else "MEMORY STAYS BEHIND")
    return int(failed)


def product_rate(seconds: float) -> float:
    """FLOP/s of bf16 products on random data for that long: under load the clock sinks."""
    a, b = (torch.randn(8192, 8192, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        out = a @ b
    n = max(1, round(seconds / 1.4e-3))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(n):
        torch.mm(a, b, out=out)
    end.record()
    end.synchronize()
    return float(2 * 8192**3 * n / start.elapsed_time(end) * 1e3)


# --- ours ---


def trainer_of(config: Config, teacher: str, data: Windows, world: World = ALONE) -> Trainer:
    """What a run has when it begins."""
    shape, student = qwen(teacher), qwen("0.5b")
    network = random_network(shape)
    vocabulary = SharedVocabulary(N_REAL, shape.vocab_rows, student.vocab_rows)
    bare: Any = None
    weights = tensors_of(random_decoder(student, world.device))
    made = NetworkSource(Path("student"), None, ARCHITECTURES["qwen2"], student, bare, None, weights)
    pair = TrainingPair(network, made, bare, vocabulary)
    plan = memory_plan(config, pair, world.device, processes=world.size, tried=True)
    decoder, optimizer, _ = load_student(config, pair, world)
    return Trainer(
        config,
        world,
        student=decoder,
        optimizer=optimizer,
        teacher=load_teacher(config, pair, data, world.device),
        vocabulary=vocabulary,
        batches=Batches(
            data, sequences_per_step=config.sequences_per_step, windows_per_micro=config.sequences_per_pass,
            seed=0, epochs=None, rank=world.rank, world=world.size,
        ),
        objective=Objective(config.kd_weight, config.temperature),
        evaluate_student=lambda is_stopped: {},
        saver=None,
        recorder=Recorder(None, None),
        plan=plan,
        flops=budget.flops_of(config, pair),
        origin=bare,
        on_stall=lambda error: print(error, flush=True),
    )  # fmt: skip


def updates(fresh: Trainer, n: int) -> Trainer:
    """The loop after `n` updates."""
    trainer = replace(fresh, config=replace(fresh.config, steps=n, total_steps=n), progress=Progress())
    trainer.run()
    if trainer.latest is None or not trainer.latest["loss"] < float("inf"):
        raise SystemExit(f"the loss is not finite: {trainer.latest}")
    return trainer


def row_config(residency: str, micro: int, chunk: int = Config.chunk) -> Config:
    """The configuration of a row."""
    return Config(
        teacher_residency=residency, micro_tokens=micro, seq_len=T, tokens_per_step=TOKENS, warmup_steps=0,
        lr=1e-6, save_every=0, save_minutes=0.0, eval_every=0, repeat=True, chunk=chunk,
    )  # fmt: skip


def ours(name: str, teacher: str, config: Config, data: Windows) -> dict[str, Any]:
    """One row."""
    with recording() as record:
        return {**_ours(name, teacher, config, data), "kernels": record.line(), **record.to_json()}


def _ours(name: str, teacher: str, config: Config, data: Windows) -> dict[str, Any]:
    free()
    began = time.perf_counter()
    fresh = trainer_of(config, teacher, data)
    assert fresh.teacher is not None
    fresh.student.note_gated()
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    loaded = time.perf_counter() - began
    torch.cuda.reset_peak_memory_stats()
    seconds = updates(fresh, WARM + MEASURED).step_seconds
    typical = statistics.median(seconds[WARM:])
    peak, plan = torch.cuda.max_memory_allocated(), total(fresh.plan)
    row: dict[str, Any] = {
        "name": name, "tok_s": TOKENS / typical, "ms": typical * 1e3,
        "of_floor": fresh.flops.total * TOKENS / PEAK / typical,
        "tflops": fresh.flops.total * TOKENS / typical / 1e12,
        "peak_gib": peak / GIB, "plan_gib": plan / GIB, "peak_of_plan": peak / plan, "held_gib": held / GIB,
        "teacher_gib": teacher_bytes(fresh.teacher.decoder) / GIB, "first_s": seconds[0], "load_s": loaded,
        "spread": [min(seconds[WARM:]), max(seconds[WARM:])], "notes": fresh.teacher.notes,
        "plan": {r.name: round(r.n_bytes / GIB, 2) for r in fresh.plan},
    }  # fmt: skip
    row["stages_ms"] = stages(fresh)
    return row


def stages(fresh: Trainer) -> dict[str, float]:
    """Milliseconds of an update's stages on the device; "gap" is what lies between them."""
    found: list[tuple[str, Any, Any]] = []

    def timed(stage: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            result = work(*args, **kwargs)
            end.record()
            found.append((stage, start, end))
            return result

        return run

    assert fresh.teacher is not None
    with (
        mock.patch.object(fresh.teacher, "hidden", timed("teacher backbone", fresh.teacher.hidden)),
        mock.patch.object(fresh.student, "forward", timed("student forward", fresh.student.forward)),
        mock.patch("aprtrain.loop.distill_head", timed("head", distill_head)),
        mock.patch.object(torch.autograd, "backward", timed("backward", torch.autograd.backward)),
        mock.patch.object(fresh.optimizer, "step", timed("optimizer", fresh.optimizer.step)),
    ):
        seconds = updates(fresh, 2 + TIMED).step_seconds
    torch.cuda.synchronize()
    kept = found[len(found) // (2 + TIMED) * 2 :]
    table = {stage: sum(start.elapsed_time(end) for s, start, end in kept if s == stage) / TIMED for stage in STAGES}
    return table | {"gap": statistics.median(seconds[2:]) * 1e3 - sum(table.values())}


def profile(teacher: str, config: Config) -> None:
    """The kernels of an update, the longest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    free()
    with NO_LIMITS:
        fresh = trainer_of(config, teacher, windows(0))
    updates(fresh, 3)
    with recorded(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        updates(fresh, 2)
        torch.cuda.synchronize()
    averages = found.key_averages()
    print(averages.table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=80))


# --- peers ---


def peer_models(teacher: str) -> tuple[Any, Any]:
    """transformers' teacher and student, backbones compiled."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = []
    for size in (teacher, "0.5b"):
        values = hf_config(size)
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        with torch.device(CUDA):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        made.append(model.to(CUDA))
    made[0].requires_grad_(False).eval()
    for model in made:
        model.config.use_cache = False
        model.model.compile(dynamic=False)
    return made[0], made[1]


def dense_chunk(x: Tensor, w: Tensor, t: Tensor, wt: Tensor, labels: Tensor) -> Tensor:
    """The loss on the logits of one chunk, as one writes it in torch."""
    s, q = (x @ w.t()).float(), (t @ wt.t()).float()[:, :N_REAL]
    ce = functional.cross_entropy(s, labels, ignore_index=-100, reduction="sum")
    logp, logq = (s / 3).log_softmax(1)[:, :N_REAL], (q / 3).log_softmax(1)
    kl = (logq.exp() * (logq - logp)).sum()
    return (0.3 * ce + 0.7 * 9 * kl) / TOKENS


def dense(chunk: int, x: Tensor, w: Tensor, t: Tensor, wt: Tensor, labels: Tensor) -> None:
    """Backward of `dense_chunk`, chunk after chunk, then of the backbone."""
    step = torch.compile(dense_chunk, dynamic=False)
    leaf = x.detach().requires_grad_()
    for start in range(0, len(x), chunk):
        rows = slice(start, start + chunk)
        step(leaf[rows], w, t[rows], wt, labels[rows]).backward()  # type: ignore[no-untyped-call]
    torch.autograd.backward(x, leaf.grad)


def liger(chunk: int, x: Tensor, w: Tensor, t: Tensor, wt: Tensor, labels: Tensor) -> None:
    """Liger's chunked loss with the same weights; it has no T^2 and pads the student with zero logits."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss  # type: ignore[import-not-found]

    loss = LigerFusedLinearJSDLoss(0.3, 0.7, beta=0.0, temperature=3.0, chunk_size=chunk)
    (loss(x, w, t, wt, labels) / 2).backward()


def peer(name: str, teacher: str, micro: int, loss: Callable[..., None], batch: list[Any]) -> dict[str, Any]:
    """One row of a peer."""
    free()
    big, small = peer_models(teacher)
    adamw = torch.optim.AdamW(small.parameters(), lr=1e-6, fused=True)
    rows = [(b.tokens_NT.to(CUDA), b.labels_NT.to(CUDA).flatten()) for b in batch]
    seconds: list[float] = []
    for n in range(WARM + MEASURED):
        if n == WARM - 1:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for tokens, labels in rows:
            with torch.no_grad():
                t = big.model(tokens, use_cache=False).last_hidden_state.flatten(0, 1)
            x = small.model(tokens, use_cache=False).last_hidden_state.flatten(0, 1)
            loss(x, small.lm_head.weight, t, big.lm_head.weight, labels)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    typical = statistics.median(seconds[WARM:])
    return {
        "name": name, "tok_s": TOKENS / typical, "ms": typical * 1e3, "first_s": seconds[0],
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
    }  # fmt: skip


def peers(teacher: str, micro: int) -> Iterator[dict[str, Any]]:
    """Each peer that is there."""
    batch = next(Batches(windows(0), sequences_per_step=TOKENS // T, windows_per_micro=micro // T, seed=0))
    for label, loss in (("Liger", partial(liger, 1024)), ("dense chunks", partial(dense, 2048))):
        name = f"{teacher} -> 0.5b, transformers + compile, {label}"
        try:
            yield peer(name, teacher, micro, loss, batch)
        except Exception as error:  # a peer that is absent or fails is a row of the table
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)


# --- the table ---


def show(row: dict[str, Any]) -> None:
    """A row, at once."""
    print(f"{row['name']:48} {row['tok_s'] / 1e3:7.1f}k tok/s {row['ms']:7.1f} ms", end="")
    if "stages_ms" not in row:
        print(f"  peak {row['peak_gib']:.1f} GiB", flush=True)
        return
    print(
        f"  {row['of_floor']:.2f} of the floor  peak {row['peak_gib']:.2f} GiB, plan {row['plan_gib']:.2f} "
        f"({row['peak_of_plan']:.2f})  teacher {row['teacher_gib']:.2f} GiB  first {row['first_s']:.0f} s"
    )
    print("    " + "  ".join(f"{k} {v:.1f}" for k, v in row["stages_ms"].items()), *row["notes"])
    print("    " + ", ".join(f"{part} {n}" for part, n in row["plan"].items() if n), "(GiB planned)")
    print("    " + row["kernels"])
    for miss in row["not_used"]:
        print(f"    not used: {miss['feature']}: {miss['reason']}")
    sys.stdout.flush()


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="1.5b -> 0.5b with a bf16 teacher only")
    parser.add_argument("--teachers", nargs="*", choices=list(SIZES)[1:], default=list(SIZES)[1:])
    parser.add_argument("--residencies", nargs="*", choices=RESIDENCIES, default=list(RESIDENCIES))
    parser.add_argument("--peers", nargs="*", choices=list(SIZES)[1:], help="teachers of peers")
    parser.add_argument("--only-peers", action="store_true", help="nothing of ours")
    parser.add_argument("--micro", type=int, nargs="*", default=[16_384], help="tokens of a pass")
    parser.add_argument("--chunk", type=int, default=Config.chunk, help="positions whose logits are held at a time")
    parser.add_argument("--documents", type=int, nargs="*", default=[700, 1500, 3000], help="lengths of packed ones")
    parser.add_argument("--memory", action="store_true", help="what is allocated after each run, instead")
    parser.add_argument("--profile", choices=list(SIZES)[1:], help="the kernels of an update, instead")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this needs a CUDA device", file=sys.stderr)
        return 6
    if options.memory:
        with NO_LIMITS:
            return memory("1.5b", options.micro[0])
    short, long = product_rate(0.02), product_rate(3.0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16 products of 8192: ", end="")
    print(f"{short / 1e12:.0f} TFLOP/s over 20 ms, {long / 1e12:.0f} over 3 s", flush=True)
    if options.profile:
        profile(options.profile, row_config(options.residencies[0], options.micro[0]))
        return 0
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        show(row)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))

    for teacher in () if options.only_peers else ("1.5b",) if options.quick else options.teachers:
        for micro in options.micro:
            for residency in ("bf16",) if options.quick else options.residencies:
                with NO_LIMITS:
                    config = row_config(residency, micro, options.chunk)
                    add(ours(f"{teacher} -> 0.5b, {residency}, {micro} a pass", teacher, config, windows(0)))
        if teacher == "1.5b" and options.documents:
            config = row_config("bf16", options.micro[0], options.chunk)
            for length in options.documents:
                add(ours(f"1.5b -> 0.5b, bf16, documents of {length}", teacher, config, windows(length)))
            add(ours("1.5b -> 0.5b, bf16, half of the labels", teacher, config, windows(0, HalfMasked)))
    for teacher in options.peers or ():
        for row in peers(teacher, options.micro[0]):
            add(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
