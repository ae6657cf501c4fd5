"""The decoder's backbone on one GPU: what it computes against float32, then tokens a second and the floor.

    python tools/bench_decoder.py              needs CUDA; about a minute
    python tools/bench_decoder.py --profile    the kernels of one pass of the 0.5B network both ways

The floor counts the multiplications of matrices and of attention (half of T^2), at 790 TFLOP/s of dense bf16.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from aprfmt.arch.hparams import from_hf_config
from aprfmt.arch.table import ARCHITECTURES
from aprtrain.network.attention import Documents
from aprtrain.network.decoder import Decoder
from aprtrain.network.shape import Shape, shape_of

PEAK = 790e12
T = 2048
NETWORKS = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
}
"""Sizes of Qwen2.5."""


def shape(name: str, model_type: str = "qwen2", **more: Any) -> Shape:
    """The Shape of a network of that size."""
    kv = 4 if name == "7B" else 2
    config = {"model_type": model_type, "vocab_size": 4096, "num_key_value_heads": kv, **NETWORKS[name], **more}
    h = from_hf_config(config)
    return shape_of(h, ARCHITECTURES[h.architecture or ""])


def network(s: Shape, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Decoder:
    """Random weights, the same for every dtype but for rounding."""
    decoder, generator = Decoder(s, dtype, "cuda"), torch.Generator("cuda").manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            values = torch.randn(parameter.shape, device="cuda", generator=generator)
            scale = 0.02 if parameter.ndim > 1 else 0.1
            parameter.copy_(values * scale + (0 if parameter.ndim > 1 or s.norm_plus_one else 1))
    return decoder


def tokens(n: int, t: int = T) -> Tensor:
    """Random ids [n, t]."""
    return torch.randint(0, 4096, (n, t), device="cuda", generator=torch.Generator("cuda").manual_seed(1))


def some_documents(n: int, t: int = T) -> Documents:
    """Four documents of unequal lengths a row."""
    lengths = [t // 8, t // 4 - 3, t // 2 - 5, t - t // 8 - t // 4 - t // 2 + 8]
    found = Documents.of(lengths * n, max_len=t, capacity=16 * n)
    return replace(found, cu_seqlens=found.cu_seqlens.to("cuda"))


def relative(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over the norm of `b`."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def step(decoder: Decoder, ids: Tensor, documents: Documents | None, g: Tensor) -> Tensor:
    """Forward and backward under the gradient `g` of the hidden states."""
    hidden: Tensor = decoder(ids, documents)
    torch.autograd.backward(hidden, g.to(hidden.dtype))
    return hidden.detach()


def check() -> None:
    """Hidden states and gradients in bf16 against float32, packed and not, with and without windows."""
    print(f"torch {torch.__version__}")
    cases = {
        "qwen2": shape("0.5B", num_hidden_layers=2),
        "mistral, window 100": shape("1.5B", "mistral", num_hidden_layers=2, sliding_window=100),
        "gemma2": shape(
            "0.5B", "gemma2", num_hidden_layers=2, head_dim=64, sliding_window=100, query_pre_attn_scalar=64
        ),
    }
    ids = tokens(2, 512)
    for name, s in cases.items():
        g = torch.randn(2, 512, s.d_model, device="cuda")
        wide, narrow = network(s, torch.float32), network(s)
        for kind, documents in {"rows": None, "packed": some_documents(2, 512)}.items():
            wide.zero_grad()
            narrow.zero_grad()
            expected, got = step(wide, ids, documents, g), step(narrow, ids, documents, g)
            found = dict(narrow.named_parameters())
            worst = max(
                (relative(found[n].grad, p.grad), n)  # type: ignore[arg-type]
                for n, p in wide.named_parameters()
                if p.grad is not None
            )
            print(f"{name:20s} {kind:7s} hidden {relative(got, expected):.4f} worst gradient {worst}")


def time_ms(run: Callable[[], object], repeats: int = 5) -> float:
    """Median milliseconds of a run, after two to warm up."""
    for _ in range(2):
        run()
    found: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found)


def flops(s: Shape, passes: int) -> float:
    """Of a token of the backbone."""
    return passes * (2.0 * s.n_layers * s.n_layer_params + 4.0 * s.n_layers * s.q_rows * T / 2)


def attention_rates() -> None:
    """Forward and backward of attention alone, by kernel."""
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    for n, heads, kv, size in ((16, 14, 2, 64), (8, 12, 2, 128)):
        q = torch.randn(n, heads, T, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        k = torch.randn(n, kv, T, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            for both in (False, True):

                def run(backend: Any = backend, both: bool = both, q: Tensor = q, k: Tensor = k) -> None:
                    with torch.set_grad_enabled(both), sdpa_kernel(backend):
                        out = sdpa(q, k, k, is_causal=True, enable_gqa=True)
                    if both:
                        torch.autograd.grad(out, (q, k), torch.ones_like(out))

                try:
                    ms = time_ms(run)
                except RuntimeError as error:
                    print(f"attention {size} {backend}: {str(error)[:80]}")
                    continue
                work = n * heads * 4.0 * T * T / 2 * size * (3.5 if both else 1)
                name = f"{backend.name.lower()} {'both ways' if both else 'forward'}"
                print(f"attention of {size:3d}, {name:28s} {ms:7.2f} ms {work / ms / 1e9:6.0f} TFLOP/s")


def trunk_rates() -> None:
    """Tokens a second of compiled backbones."""
    rows: tuple[tuple[str, int, bool, bool], ...] = (
        ("0.5B", 8, True, False),
        ("0.5B", 16, True, False),
        ("0.5B", 16, True, True),
        ("1.5B", 8, False, False),
        ("1.5B", 8, False, True),
        ("7B", 8, False, False),
    )
    for size, n, both, packed in rows:
        torch._dynamo.reset()
        s, ids = shape(size), tokens(n)
        decoder = network(s)
        decoder.requires_grad_(both)
        decoder.compile_blocks()
        documents = some_documents(n) if packed else None
        g = torch.randn(n, T, s.d_model, device="cuda", dtype=torch.bfloat16)

        def run(
            both: bool = both, decoder: Decoder = decoder, ids: Tensor = ids,
            documents: Documents | None = documents, g: Tensor = g,
        ) -> None:  # fmt: skip
            with torch.set_grad_enabled(both):
                hidden = decoder(ids, documents)
            if both:
                torch.autograd.backward(hidden, g)

        begun = time.perf_counter()
        run()
        torch.cuda.synchronize()
        first = time.perf_counter() - begun
        torch.cuda.reset_peak_memory_stats()
        ms = time_ms(run)
        rate, floor = n * T / ms * 1e3, PEAK / flops(s, 3 if both else 1)
        what = f"{size} {'both ways' if both else 'forward'}, {n} x {T}{', packed' if packed else ''}"
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(
            f"{what:36s} {ms:7.1f} ms {rate / 1e3:7.1f}k tok/s, {rate / floor:.2f} of the floor, "
            f"peak {peak:.1f} GiB, first {first:.0f} s",
            flush=True,
        )
        del decoder, run


def profile() -> None:
    """Milliseconds of each kernel of a pass of 16 rows, the longest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    s, ids = shape("0.5B"), tokens(16)
    decoder = network(s)
    decoder.compile_blocks()
    g = torch.randn(16, T, s.d_model, device="cuda", dtype=torch.bfloat16)
    time_ms(lambda: step(decoder, ids, None, g))
    with recorded(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        step(decoder, ids, None, g)
        torch.cuda.synchronize()
    print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70))


if __name__ == "__main__":
    if "--profile" in sys.argv[1:]:
        profile()
    else:
        check()
        attention_rates()
        trunk_rates()
