"""Teachers on one CUDA GPU, random weights: python tools/bench_teacher.py [--models tiny 7b 1.5b] [--json FILE]

First what must hold: the block kernels bit by bit against aprfmt's codecs, e4m3 against its emulation on the CPU,
hidden states of a q4k teacher bit by bit against those of a bf16 one. Then times (medians): decoding as GB/s beside
a copy on the device, products in e4m3 beside bf16, and passes of 16,384 tokens with Qwen2.5's dims in each
residency, with the bytes that they hold. Exit 1 where a check fails.

The comparison of e4m3 with bf16 says nothing about quality here, since random weights have no outliers and no clear
first choice: its limits are lifted, and what it measured is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from train_blocks import BYTES, edge_blocks, random_blocks, resident_bytes

from aprfmt.arch.hparams import from_hf_config
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.recode import decode as decode_values
from aprfmt.tokenizer.alignment import SharedVocabulary
from aprtrain.kernels import fp8
from aprtrain.kernels.blocks import BLOCK_TYPES, Blocks, decode, pick_rows, some_rows
from aprtrain.network.attention import Documents
from aprtrain.network.decoder import Decoder
from aprtrain.network.names import hf_names
from aprtrain.network.shape import Shape, shape_of
from aprtrain.network.weights import NetworkSource
from aprtrain.teacher import teacher as teacher_module
from aprtrain.teacher.teacher import BlocksDecoder, Teacher, estimate_bytes

N, T = 8, 2048
SIZES = {"Q4_K": 1e-4, "Q6_K": 2.5e-5, "Q8_0": 4e-4}
"""Scales of random blocks whose values are then about 0.03."""

MODELS = {
    "7b": (3584, 28, 28, 4, 18944, 152064, False),
    "1.5b": (1536, 28, 12, 2, 8960, 151936, True),
    "tiny": (256, 4, 4, 2, 512, 1024, True),
}
N_REAL = 151665

CUDA = torch.device("cuda")


@dataclass(frozen=True)
class RandomTensor:
    """What the loader asks a stored tensor for."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pool: np.ndarray[Any, Any]

    @property
    def n_bytes(self) -> int:
        """Stored bytes."""
        return DTYPES[self.dtype].n_bytes(self.shape)

    @property
    def produced(self) -> RandomTensor:
        """As a tensor whose rows are in order already."""
        return self

    def items(self, unit: int) -> Iterator[bytes]:
        """Its bytes."""
        yield from self.chunks()

    def chunks(self) -> Iterator[bytes]:
        """Its bytes, the pool again and again."""
        left = self.n_bytes
        while left:
            part = self.pool[:left]
            left -= part.size
            yield part.tobytes()


def qwen(name: str) -> Shape:
    """The dims of a Qwen2.5."""
    d, layers, heads, kv_heads, ffn, vocab, tied = MODELS[name]
    h = from_hf_config(
        {
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": d, "rms_norm_eps": 1e-6,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "intermediate_size": ffn, "vocab_size": vocab, "tie_word_embeddings": tied, "rope_theta": 1e6,
            "max_position_embeddings": 32768,
        }
    )  # fmt: skip
    return shape_of(h, ARCHITECTURES["qwen2"])


def teacher_bytes(decoder: Decoder) -> int:
    """What a teacher's weights take on its device."""
    return resident_bytes(decoder)


def random_network(shape: Shape) -> NetworkSource:
    """Random blocks in the types of a Q4_K_M: half of the layers have attn_v and ffn_down in Q6_K, as the head."""
    pools = {
        dtype: random_blocks(dtype, (1 << 24) // BYTES[dtype], 1, size).reshape(-1) for dtype, size in SIZES.items()
    }
    pools["F32"] = np.random.default_rng(2).uniform(0.5, 1.0, 1 << 16).astype("<f4").view("u1")
    tensors = {}
    for name, (_, _, size) in hf_names(shape).items():
        finer = name == "lm_head.weight" or (shape.tied and "embed" in name)
        if "v_proj" in name or "down_proj" in name:
            finer = int(name.split(".")[2]) % 2 == 0
        dtype = "F32" if len(size) == 1 else "Q6_K" if finer else "Q4_K"
        tensors[name] = RandomTensor(name, dtype, size, pools[dtype])
    return NetworkSource(
        Path("random"), cast("Any", None), ARCHITECTURES["qwen2"], shape, cast("Any", None), None, cast("Any", tensors)
    )


def median(work: Callable[[int], object], rounds: int = 9, warm: int = 3) -> float:
    """Seconds of `work`(round) on the device."""
    times: list[float] = []
    for n in range(warm + rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work(n)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times[warm:])[rounds // 2]


def on_device(dtype: str, stored: np.ndarray[Any, Any], rows: int = 1) -> Blocks:
    """Blocks on the GPU."""
    shape = rows, stored.size // BYTES[dtype] * DTYPES[dtype].block // rows
    return Blocks(dtype, shape, torch.from_numpy(stored.reshape(-1)).to(CUDA))


def check_blocks() -> Iterator[tuple[str, bool]]:
    """Every kernel against the codec, bit by bit."""
    for dtype in BLOCK_TYPES:
        for label, stored in (
            ("edges", edge_blocks(dtype)),
            ("1 block", random_blocks(dtype, 1, 5)),
            ("99,991 blocks", random_blocks(dtype, 99_991, 6)),
        ):
            n = len(stored) * DTYPES[dtype].block
            with np.errstate(all="ignore"):
                want = torch.from_numpy(decode_values(dtype, stored.tobytes(), (n,)).copy()).to(torch.bfloat16)
            target = torch.full((1, n), float("nan"), dtype=torch.bfloat16, device=CUDA)
            got = decode(on_device(dtype, stored), target).cpu()[0]
            same = torch.equal(got.view(torch.int16), want.view(torch.int16))
            if not same:
                at = (got.view(torch.int16) != want.view(torch.int16)).nonzero().flatten()
                print(f"  {dtype} {label}: {len(at)} of {n} differ, first {int(at[0])}: {got[at[:8]]} {want[at[:8]]}")
            yield f"{dtype} {label}", same
        blocks = on_device(dtype, random_blocks(dtype, 40 * 12, 7), rows=40)
        whole = decode(blocks)
        rows = torch.randint(0, 40, (333,), device=CUDA)
        cut = decode(some_rows(blocks, 3, 7))
        yield (f"{dtype} rows", torch.equal(pick_rows(blocks, rows), whole[rows]) and torch.equal(cut, whole[3:10]))


def check_fp8() -> Iterator[tuple[str, bool]]:
    """e4m3 on the GPU against the same on the CPU, and rows that must not become finite."""
    generator = torch.Generator().manual_seed(3)
    x, w = (torch.randn(n, 4112, generator=generator).to(torch.bfloat16) for n in (96, 48))
    q, scale = fp8.quantize_rows(x.to(CUDA))
    q_cpu, scale_cpu = fp8.quantize_rows(x)
    agree = float((q.cpu().float() == q_cpu.float()).double().mean())
    off = float((scale.cpu() / scale_cpu - 1).abs().max())
    yield f"e4m3 rows: {agree:.4%} of the codes, scales within {off:.1g}", agree > 0.9999 and off < 1e-6
    got = fp8.linear(x.to(CUDA), fp8.quantize_weight(w.to(CUDA))).cpu().double()
    emulated = fp8.linear(x.float(), fp8.quantize_weight(w)).double()
    exact = x.double() @ w.double().t()
    a, b = (float((got - y).norm() / y.norm()) for y in (emulated, exact))
    yield f"e4m3 product: {a:.2g} from the emulation, {b:.2g} from the exact one", a < 5e-3 and b < 0.06
    bad = torch.ones(3, 4112, dtype=torch.bfloat16, device=CUDA)
    bad[0, 5], bad[2, 7] = float("nan"), float("inf")
    y = fp8.linear(bad, fp8.quantize_weight(w.to(CUDA)))
    finite = torch.isfinite(y).sum(1).tolist()
    yield f"NaN and infinity: {finite} finite values", finite[0] == finite[2] == 0 and finite[1] == len(w)


def time_decoding() -> Iterator[tuple[str, float]]:
    """GB/s of bytes read and written, of a matrix as large as any of a 7B's."""
    a, b = (torch.empty(1 << 30, dtype=torch.uint8, device=CUDA).random_() for _ in range(2))
    yield "copy", 2 * a.numel() / median(lambda n: a.copy_(b)) / 1e9
    for dtype in BLOCK_TYPES:
        n = 18944 * 3584
        pool = random_blocks(dtype, n // DTYPES[dtype].block, 8, SIZES[dtype])
        sets = [on_device(dtype, pool, rows=18944) for _ in range(4)]
        targets = [torch.empty(sets[0].shape, dtype=torch.bfloat16, device=CUDA) for _ in range(2)]
        seconds = median(lambda n, s=sets, t=targets: decode(s[n % 4], t[n % 2]))  # type: ignore[misc]
        yield dtype, (sets[0].n_bytes + 2 * n) / seconds / 1e9


def time_products() -> Iterator[tuple[str, dict[str, float]]]:
    """Each product of a 7B's layer at 16k tokens in bf16 and e4m3, and the quantization before it."""
    d, _, _, _, ffn, _, _ = MODELS["7b"]
    for name, rows, cols in (("qkv", 4608, d), ("out", d, d), ("gate_up", 2 * ffn, d), ("down", d, ffn)):
        x = torch.randn(N * T, cols, device=CUDA, dtype=torch.bfloat16)
        w = torch.randn(rows, cols, device=CUDA, dtype=torch.bfloat16) * 0.03
        quantized = fp8.quantize_weight(w)
        whole = median(lambda n, x=x, q=quantized: fp8.linear(x, q))  # type: ignore[misc]
        alone = median(lambda n, x=x: fp8.quantize_rows(x))  # type: ignore[misc]
        plain = median(lambda n, x=x, w=w: fp8.linear(x, w))  # type: ignore[misc]
        rate = 2 * N * T * rows * cols / 1e12
        yield name, {
            "bf16_ms": plain * 1e3, "fp8_ms": whole * 1e3, "quantize_ms": alone * 1e3,
            "bf16_tflops": rate / plain, "fp8_tflops": rate / (whole - alone),
        }  # fmt: skip


def time_passes(name: str, results: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Teachers of one size in each residency; yields checks."""
    shape = qwen(name)
    network = random_network(shape)
    vocabulary = SharedVocabulary(min(N_REAL, shape.vocab_rows), shape.vocab_rows, shape.vocab_rows)
    tokens = torch.randint(0, vocabulary.n_real, (N, T), device=CUDA)
    stored = sum(tensor.n_bytes for tensor in network.tensors.values())
    documents = Documents.of([T, 700, 1, T - 701], T, capacity=9)
    documents = replace(documents, cu_seqlens=documents.cu_seqlens.to(CUDA))
    want = want_packed = torch.empty(0)
    for residency in ("bf16", "q4k", "fp8"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        began, start = torch.cuda.memory_allocated(), time.perf_counter()
        teacher = Teacher(
            network, vocabulary, residency, CUDA, compiled=name != "tiny",
            sample_NT=tokens[:2] if residency == "fp8" else None,
        )  # fmt: skip
        torch.cuda.synchronize()
        row: dict[str, Any] = {"load_s": time.perf_counter() - start, "notes": teacher.notes}
        row["resident_gb"] = (torch.cuda.memory_allocated() - began) / 1e9
        row["planned_gb"] = estimate_bytes(network, residency) / 1e9
        exact = estimate_bytes(network, residency) == teacher_bytes(teacher.decoder)
        row["load_peak_gb"] = (torch.cuda.max_memory_allocated() - began) / 1e9
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        hidden = teacher.hidden(tokens)
        torch.cuda.synchronize()
        row["first_s"] = time.perf_counter() - start
        seconds = median(lambda n, t=teacher: t.hidden(tokens), rounds=7, warm=2)  # type: ignore[misc]
        row |= {"ms": seconds * 1e3, "tok_s": N * T / seconds}
        row["peak_gb"] = (torch.cuda.max_memory_allocated() - began) / 1e9
        row["head_ms"] = median(lambda n, t=teacher: t.head_weight) * 1e3  # type: ignore[misc]
        packed = teacher.hidden(tokens[:2], documents)
        yield f"{name} {residency}: finite", all(bool(torch.isfinite(h).all()) for h in (hidden, packed))
        if residency == "bf16":
            want, want_packed = hidden.cpu(), packed.cpu()
        elif residency == "q4k":
            same = torch.equal(hidden.cpu(), want) and torch.equal(packed.cpu(), want_packed)
            yield f"{name} q4k: hidden states bit by bit those of bf16", same
            assert isinstance(teacher.decoder, BlocksDecoder)
            todo = [pair for pairs in teacher.decoder._targets.values() for pair in pairs]
            row["decode_ms"] = median(lambda n, todo=todo: [decode(*pair) for pair in todo]) * 1e3  # type: ignore[misc]
            row["of_file"] = row["resident_gb"] * 1e9 / stored
            yield (f"{name} q4k: resident {row['of_file']:.3f} of the file", row["of_file"] <= 1.15 or name == "tiny")
        else:
            near = torch.nn.functional.cosine_similarity(hidden.cpu().float(), want.float(), dim=-1)
            row["cosine"] = float(near.mean())
        yield f"{name} {residency}: holds what was planned", exact
        results[f"{name} {residency}"] = row
        print(f"{name:5} {residency:5} " + json.dumps(row), flush=True)
        del teacher, hidden, packed


def main() -> int:
    """Checks, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="*", default=["tiny", "7b", "1.5b"], choices=MODELS)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this needs a CUDA device", file=sys.stderr)
        return 6
    teacher_module.MOST_KL, teacher_module.LEAST_AGREEMENT = float("inf"), 0.0
    print(torch.cuda.get_device_name(), torch.__version__)
    results: dict[str, Any] = {"checks": {}}

    def checked(found: Iterator[tuple[str, bool]]) -> None:
        for name, passed in found:
            results["checks"][name] = passed
            print(f"{'ok  ' if passed else 'FAIL'} {name}", flush=True)

    checked(check_blocks())
    checked(check_fp8())
    results["decode_gb_s"] = dict(time_decoding())
    copy = results["decode_gb_s"]["copy"]
    for name, rate in results["decode_gb_s"].items():
        print(f"decode {name:5} {rate:7.0f} GB/s {rate / copy:6.1%} of a copy", flush=True)
    results["products"] = dict(time_products())
    for name, row in results["products"].items():
        print(f"{name:8}" + "".join(f" {key} {value:.3f}" for key, value in row.items()), flush=True)
    for name in options.models:
        checked(time_passes(name, results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0 if all(results["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
