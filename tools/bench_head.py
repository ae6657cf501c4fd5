"""The distillation head on one CUDA device.

    PYTHONPATH=src:tests/support python tools/bench_head.py [--quick] [--peers]

Correctness against whole logits in float64, then memory, then time at 32,768 positions for the heads of
Qwen2.5 7B -> 0.5B and 1.5B -> 0.5B: the whole head by chunk and storage of logits, its stages, the kernel by launch
parameters, and peers (Liger's chunked loss where it is installed, torch compiled on dense chunks). Rates count
(2 Dt + 6 Ds) V operations a position, over the device's bf16 rate, which is measured first.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from train_head import Head, Problem, cosine, expected, gap, problem

from aprtrain.kernels import kd_triton
from aprtrain.loss.head import distill_head, head_bytes, logit_weight
from aprtrain.loss.objective import Objective

N = 32_768
N_REAL, STUDENT_ROWS, STUDENT_WIDTH = 151_665, 151_936, 896
PAIRS = {"7B -> 0.5B": (3584, 152_064), "1.5B -> 0.5B": (1536, 151_936)}
KINDS: list[str] = ["forward", "reverse", "jsd"]
GIB = 2**30
Work = Callable[[], object]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one pair, fewer chunks")
    parser.add_argument("--peers", action="store_true", help="measure the peers too")
    options = parser.parse_args()
    torch.manual_seed(0)
    correctness()
    rate = peak_rate()
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16 product {rate / 1e12:.0f} TFLOP/s")
    launches()
    for name in list(PAIRS)[: 1 if options.quick else None]:
        width, rows = PAIRS[name]
        p = problem(N, N_REAL, STUDENT_ROWS, rows, (STUDENT_WIDTH, width), device="cuda", spread=4, ignored=1000)
        flops = (2 * width + 6 * STUDENT_WIDTH) * STUDENT_ROWS * N
        whole(name, p, flops, rate, (2048, 4096) if options.quick else (1024, 2048, 4096, 8192))
        stages(p)
        if options.peers:
            peers(p, flops, rate)
        del p
    memory()


# --- checks ---


def correctness() -> None:
    """Errors at the size of the real vocabulary, 64 positions."""
    print("errors            loss      kl        dx        dw (relative)   1 - cosine of dx, dw")
    p = problem(64, N_REAL, STUDENT_ROWS, 152_064, (128, 192), device="cuda", spread=4)
    for kind in KINDS:
        for logits in ("fp16", "fp32"):
            objective = Objective(0.7, 2.0, kind, 0.3)
            found, wanted = Head(chunk=32)(p, objective, logits=logits), expected(p, objective)
            distances = [gap(getattr(found, x), getattr(wanted, x)) for x in ("loss", "kl", "dx", "dw")]
            angles = [1 - cosine(getattr(found, x), getattr(wanted, x)) for x in ("dx", "dw")]
            print(f"{kind:9}{logits:7}" + "".join(f"{x:10.1e}" for x in (*distances, *angles)))


def memory() -> None:
    """Peak beside inputs and gradients, by number of positions."""
    print("\nmemory beside inputs and gradients, chunk 2048")
    for n in (4096, 16_384, 65_536):
        p = problem(n, N_REAL, STUDENT_ROWS, 152_064, (STUDENT_WIDTH, 256), device="cuda")
        run = ours(p, 2048, "fp16")
        run()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        peak = torch.cuda.max_memory_allocated() - before - p.x.nbytes
        print(f"{n:8} positions {peak / GIB:6.3f} GiB, predicted {head_bytes(p.vocabulary, STUDENT_WIDTH) / GIB:6.3f}")


# --- time ---


def seconds(work: Work, rounds: int = 5) -> float:
    """Median by device events, after two rounds of warm-up."""
    for _ in range(2):
        work()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return float(statistics.median(times))


def peak_rate() -> float:
    """What a large bf16 product reaches, operations a second."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / seconds(lambda: a @ b, 10)


def ours(p: Problem, chunk: int, logits: str, objective: Objective = Objective()) -> Work:  # noqa: B008
    """One forward and backward pass of the head, the head's gradient going into a buffer."""
    x, buffer, n_valid = p.x.clone().requires_grad_(), torch.zeros_like(p.w, dtype=torch.float32), p.n_valid
    teacher = logit_weight(p.wt[: p.vocabulary.teacher_width], "fp16" if logits == "fp16" else "fp32")

    def run() -> None:
        x.grad = None
        out = distill_head(
            x, p.w, p.t, teacher, p.labels, objective, p.vocabulary,
            n_valid=n_valid, chunk=chunk, logits=logits, grad_w=buffer,  # type: ignore[arg-type]
        )  # fmt: skip
        out.loss.backward()  # type: ignore[no-untyped-call]

    return run


def whole(name: str, p: Problem, flops: int, rate: float, chunks: tuple[int, ...]) -> None:
    """The head by chunk and storage of logits, then other objectives."""
    print(f"\n{name}, {N} positions, {flops / 1e12:.1f} TFLOP\nchunk  logits      ms  TFLOP/s  of peak  head GiB")
    for logits in ("fp16", "fp32"):
        for chunk in chunks:
            time = seconds(ours(p, chunk, logits))
            size = head_bytes(p.vocabulary, STUDENT_WIDTH, chunk, logits) / GIB
            speed = f"{time * 1e3:9.2f} {flops / time / 1e12:8.0f} {flops / time / rate:8.2f}"
            print(f"{chunk:5}  {logits} {speed} {size:8.2f}")
    for label, objective in (("w=0", Objective(0.0)), ("w=1", Objective(1.0)), ("T=1", Objective(0.7, 1.0)),
                             ("reverse", Objective(kind="reverse")), ("jsd", Objective(kind="jsd"))):  # fmt: skip
        print(f" 2048  fp16 {seconds(ours(p, 2048, 'fp16', objective), 3) * 1e3:9.2f}  ({label})")


def stages(p: Problem) -> None:
    """The products and the kernel on their own, in ms for all chunks."""
    print("stages in ms: chunk teacher student kernel    dx  dx(f32 out)  dx(transposed)  dw")
    w16, wt16 = p.w.half(), p.wt[: p.vocabulary.teacher_width].half()
    dw = torch.zeros_like(p.w, dtype=torch.float32)
    for chunk in (1024, 2048, 4096, 8192):
        x, t, labels = p.x[:chunk], p.t[:chunk], p.labels[:chunk]
        x16, t16 = (x / 16).half(), (t / 16).half()
        s_logits, t_logits = x16 @ w16.t(), t16 @ wt16.t()
        grad = torch.randn_like(s_logits, dtype=torch.bfloat16)
        terms = torch.zeros(5, chunk, device="cuda")
        works: list[Work] = [
            partial(torch.mm, t16, wt16.t(), out=t_logits),
            partial(torch.mm, x16, w16.t(), out=s_logits),
            partial(kernel, 8, 1, s_logits, t_logits, labels, terms, grad),
            lambda grad=grad: grad @ p.w,  # type: ignore[misc]
            lambda grad=grad: torch.mm(grad, p.w, out_dtype=torch.float32),  # type: ignore[misc]
            lambda grad=grad: (p.w.t() @ grad.t()).t(),  # type: ignore[misc]
            lambda grad=grad, x=x: torch.addmm(dw, grad.t(), x, out_dtype=torch.float32, out=dw),  # type: ignore[misc]
        ]
        print(f"{chunk:19}" + "".join(f"{seconds(work) * 1e3 * N / chunk:9.2f}" for work in works))


def kernel(warps: int, loads: int, s: Tensor, t: Tensor, labels: Tensor, terms: Tensor, grad: Tensor) -> None:
    """One launch at the default objective, with so many 16-byte loads per thread and iteration."""
    objective = Objective()
    ce_weight, kd_weight = objective.weights()
    inverse = 1 / objective.temperature
    kd_triton.kd_rows[(len(s),)](
        s, t, grad, labels, terms, s.stride(0), t.stride(0), grad.stride(0), terms.stride(0), STUDENT_ROWS, N_REAL,
        16.0, 0.0, 0.0, inverse, ce_weight / N, kd_weight * inverse / N, objective.beta,
        KIND=0, TEACHER=True, ONE=False, CE=True, KD=True, GRAD=True, S_CAP=False, T_CAP=False,
        LANES=32 * warps * loads, VEC=8, num_warps=warps,
    )  # fmt: skip


def launches() -> None:
    """The kernel by launch parameters, on random logits; 10 bytes an id are read or written."""
    chunk = 2048
    s, t = (torch.randn(chunk, n, device="cuda").mul_(0.25).half() for n in (STUDENT_ROWS, 151_680))
    labels = torch.randint(0, N_REAL, (chunk,), device="cuda")
    terms, grad = torch.zeros(5, chunk, device="cuda"), torch.empty_like(s, dtype=torch.bfloat16)
    print("kernel: warps loads, us for 2048 rows, GB/s")
    for warps, loads in ((w, n) for w in (4, 8, 16, 32) for n in (1, 2, 4) if w * n <= 32):
        try:
            time = seconds(partial(kernel, warps, loads, s, t, labels, terms, grad))
        except Exception as error:  # a launch that the device refuses is a row of the table
            print(f"{warps:8}{loads:6} {type(error).__name__}")
            continue
        size = 2 * chunk * (3 * STUDENT_ROWS + 2 * 151_680)
        print(f"{warps:8}{loads:6}{time * 1e6:9.0f}{size / time / 1e9:8.0f}")


# --- peers ---


def dense_chunk(x: Tensor, w: Tensor, t: Tensor, wt: Tensor, labels: Tensor, n_valid: int) -> Tensor:
    """The same loss on the logits of one chunk, as one writes it in torch."""
    s, q = (x @ w.t()).float(), (t @ wt.t()).float()[:, :N_REAL]
    ce = functional.cross_entropy(s, labels, ignore_index=-100, reduction="sum")
    logp, logq = (s / 3).log_softmax(1)[:, :N_REAL], (q / 3).log_softmax(1)
    kl = ((logq.exp() * (logq - logp)).sum(1) * (labels >= 0)).sum()
    return (0.3 * ce + 0.7 * 9 * kl) / n_valid


def compiled_dense(p: Problem, chunk: int) -> Work:
    """`dense_chunk` compiled, chunk after chunk, gradients by autograd."""
    x, w, n_valid = p.x.clone().requires_grad_(), p.w.clone().requires_grad_(), p.n_valid
    step = torch.compile(dense_chunk, dynamic=False)

    def run() -> None:
        x.grad = w.grad = None
        for start in range(0, N, chunk):
            rows = slice(start, start + chunk)
            step(x[rows], w, p.t[rows], p.wt, p.labels[rows], n_valid).backward()  # type: ignore[no-untyped-call]

    return run


def liger(p: Problem, chunk: int) -> Work:
    """Liger's chunked loss with the same weights; it has no T^2 and pads the student with zero logits."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss  # type: ignore[import-not-found]

    x, w = p.x.clone().requires_grad_(), p.w.clone().requires_grad_()
    loss = LigerFusedLinearJSDLoss(0.3, 0.7, beta=0.0, temperature=3.0, chunk_size=chunk)

    def run() -> None:
        x.grad = w.grad = None
        loss(x, w, p.t, p.wt, p.labels).backward()

    return run


def peers(p: Problem, flops: int, rate: float) -> None:
    """Each peer at its chunk sizes."""
    for name, make, chunks in (("torch.compile", compiled_dense, (1024, 2048)), ("liger", liger, (1024, 2048))):
        for chunk in chunks:
            try:
                torch.cuda.empty_cache()
                work = make(p, chunk)
                time = seconds(work, 3)
            except Exception as error:  # a peer that is absent or fails is a row of the table
                print(f"peer {name} {chunk}: {type(error).__name__}: {str(error)[:200]}")
                break
            speed = f"{time * 1e3:9.2f} ms {flops / time / 1e12:6.0f} TFLOP/s {flops / time / rate:5.2f}"
            print(f"peer {name:14} chunk {chunk:5} {speed}")


if __name__ == "__main__":
    main()
