"""The loss of teacher and student with their output heads, computed in chunks so that a batch's logits never exist at
once.

For each chunk of positions, two matrix products give the logits of both models; `objective` (or its fused kernel on
CUDA) turns them into loss terms and gradients; two more products compute the gradients of hidden states and head. The
forward pass thus computes all gradients, and the backward pass stores and recomputes nothing. Extra memory depends on
the chunk, not on the batch (`head_bytes`).

On CUDA with bfloat16 models, logits are stored in float16: final hidden states and head weights convert without loss
in the normal range, and float16 logits are 8 times finer than bfloat16 ones. They are stored divided by 16, so that
only logits beyond a million overflow; an overflow makes the loss NaN. The gradient is bfloat16 and reuses the memory
of the student's logits. Everything else runs in plain torch in the dtype of the inputs, at least float32.

Shape suffixes: N positions, C of a chunk, D and E width of student and teacher, V rows of the student's head, R of
the teacher's, S and P columns of their buffers (V and R rounded up to 64).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from aprfmt.errors import UsageError
from aprfmt.tokenizer.alignment import SharedVocabulary
from aprtrain.features import Verdict, current, importable
from aprtrain.kernels.context import GradientContext
from aprtrain.loss.objective import Objective, dense
from aprtrain.loss.spans import Spans, aligned, unaligned
from aprtrain.loss.topk import CELLS, TopK, sparse
from aprtrain.network.decoder import soft_cap

Logits = Literal["fp16", "fp32"]
_SHRINK = 1 / 16


class Softcaps(NamedTuple):
    """Logit softcap of each model: logits are c tanh(z / c); 0: none."""

    student: float = 0.0
    teacher: float = 0.0


class HeadOut(NamedTuple):
    """Scalars on the device, float32 (float64 for float64 inputs); sums are over the labelled positions of this batch.

    Attributes:
        loss: this batch's share of the objective's mean over n_valid positions; carries the gradient.
        ce_sum: cross entropies in nats.
        kl_sum: the objective's divergence at its temperature, without T^2.
        kl1_sum: KL(teacher, student) at temperature 1.
        agree: positions at which both models have the same top-1 token (or share one of equally likely ones).
        teacher_entropy_sum: the teacher's entropy at temperature 1.
    """

    loss: Tensor
    ce_sum: Tensor
    kl_sum: Tensor
    kl1_sum: Tensor
    agree: Tensor
    teacher_entropy_sum: Tensor


@dataclass(frozen=True)
class _Job:
    """The arguments of `distill_head` that do not depend on the chunk and that autograd does not track."""

    t_NE: Tensor | None
    wt_RE: Tensor | None
    labels_N: Tensor
    objective: Objective
    vocabulary: SharedVocabulary | None
    top: TopK | None
    spans: Spans | None
    n_valid: int
    chunk: int
    logits: Logits
    caps: Softcaps
    grad_w: Tensor | None
    with_grad: bool


_Terms = Callable[[slice], Tensor]
"""Fills the terms [5, N] of the given rows; returns the gradient of the mean loss with respect to their logits."""


def distill_head(
    x_ND: Tensor,
    w_VD: Tensor,
    t_NE: Tensor | None,
    wt_RE: Tensor | None,
    labels_N: Tensor,
    objective: Objective,
    vocabulary: SharedVocabulary | None,
    *,
    n_valid: int,
    chunk: int = 2048,
    logits: Logits = "fp16",
    softcaps: Softcaps = Softcaps(),  # noqa: B008 - immutable
    grad_w: Tensor | None = None,
    top: TopK | None = None,
    spans: Spans | None = None,
) -> HeadOut:
    """Computes the distillation loss of a batch, its parts and its gradient; never waits for the device.

    Args:
        x_ND: the student's final hidden states.
        w_VD: the student's head, in the dtype of x_ND. No gradient is computed unless it requires one.
        t_NE: the teacher's final hidden states; None with a KD weight of 0.
        wt_RE: the teacher's head, at least its first n_real rows; later rows are ignored. On CUDA pass the result of
            `logit_weight`, or it is copied.
        labels_N: int64 ids; IGNORED (-100) excludes a position.
        objective: the loss to minimise.
        vocabulary: the ids that both models share; None without a teacher.
        n_valid: number of labelled positions of the global batch, over all micro-batches and ranks.
        chunk: maximum number of positions per chunk.
        logits: dtype of the logits in the CUDA kernel.
        softcaps: logit softcaps of the models.
        grad_w: [V, D] float32 (float64 for float64 inputs) to which the gradient of w_VD is added directly; autograd
            then gives w_VD none. The incoming gradient of the loss must be 1, or the gradient of x_ND is NaN: scale
            with n_valid and the objective instead.
        top: saved top-k log-probabilities that replace t_NE, wt_RE and the vocabulary; see `topk`. Logits are then
            float32, at most topk.CELLS per chunk.
        spans: the spans that t_NE, then of its own positions, and the labels share with another tokenizer; they give
            the chunks. Only plain torch computes them.

    Returns:
        The loss and the sums, see HeadOut. With gradients disabled, only values are computed.

    Raises:
        UsageError: mismatched shapes, dtypes or devices; n_valid or chunk below 1; a missing teacher; a label beyond
            the student's rows (on CUDA such a label makes the loss NaN).
    """
    learns = x_ND.requires_grad or w_VD.requires_grad or grad_w is not None
    with_grad = torch.is_grad_enabled() and learns
    chunk = top_chunk(chunk, len(w_VD)) if top is not None else chunk
    job = _Job(
        t_NE, wt_RE, labels_N, objective, vocabulary, top, spans, n_valid, chunk, logits, softcaps, grad_w, with_grad
    )
    _check(x_ND, w_VD, job)
    run = cast(Callable[..., tuple[Tensor, ...]], _Head.apply)
    return HeadOut(*run(x_ND, w_VD, job))


def note_kernel(kind: str, device: torch.device, *, has_files: bool) -> bool:
    """Whether the fused kernel computes the loss of bfloat16 models on `device`; records the choice."""
    record = current()
    known = Verdict(False, f"it does not compute the loss {kind!r}") if kind not in _KINDS else importable("triton")
    fused = device.type == "cuda" and not has_files and record.check("triton", known)
    record.use("loss", "Triton" if fused else "torch")
    return fused


def logit_weight(weight: Tensor, logits: Logits = "fp16") -> Tensor:
    """A frozen head in the dtype of the kernel's products: float16 for float16 logits, else unchanged."""
    return weight.half() if logits == "fp16" and weight.is_cuda and weight.dtype == torch.bfloat16 else weight


def logit_weight_bytes(vocabulary: SharedVocabulary, d_teacher: int, logits: Logits, decoded: bool) -> int:
    """Bytes of the copy that `logit_weight` makes of a bf16 teacher's head on CUDA, in addition to the resident head.

    Float16 logits need a float16 copy; a head that is `decoded` on every use is a copy even in bf16.
    """
    return 2 * vocabulary.teacher_width * d_teacher if logits == "fp16" or decoded else 0


def head_bytes(
    vocabulary: SharedVocabulary,
    d_student: int,
    chunk: int = 2048,
    logits: Logits = "fp16",
    teacher: bool = True,
    top: bool = False,
) -> int:
    """Bytes that `distill_head` allocates on CUDA besides its inputs and their gradients, for any batch size.

    Args:
        vocabulary: rows of both heads.
        d_student: width of the student.
        chunk, logits: as in `distill_head`.
        teacher: whether there is a teacher; its head is assumed to be the result of `logit_weight`.
        top: whether teacher files are used instead.
    """
    if top:  # logits, two buffers beside them, the gradient in bfloat16
        return 14 * top_chunk(chunk, vocabulary.student_rows) * vocabulary.student_rows
    size = 2 if logits == "fp16" else 4
    student = chunk * _padded(vocabulary.student_rows)
    gradient = 0 if logits == "fp16" else 2 * student
    copy = 2 * vocabulary.student_rows * d_student if logits == "fp16" else 0
    return size * (student + teacher * chunk * _padded(vocabulary.teacher_width)) + gradient + copy


_KINDS: dict[str, int] = {"forward": 0, "reverse": 1, "jsd": 2}
"""Losses of the kernel, and their numbers there."""

_WARPS = 8
"""Warps of the kernel's program of a row (tools/bench_head.py)."""

_PLAIN: dict[str, tuple[tuple[float, float], ...]] = {
    "": ((5, 0),),
    "forward": ((6, 7.25),),
    "reverse": ((6, 9.25),),
    "skew": ((7, 9.25),),
    "tv": ((10, 3),),
    "jsd": ((11, 4), (9, 7.25)),
}
"""Loss ("": cross entropy only) -> float32 values per position of a chunk at each moment of peak memory: (per row of
the student's head, per shared id). The test of `plain_bytes` counts them.
"""


def plain_bytes(vocabulary: SharedVocabulary, chunk: int, kind: str = "", d_teacher: int = 0, top: bool = False) -> int:
    """Bytes that `distill_head` allocates in plain torch with float32 logits, besides its inputs and their gradients.

    Args:
        vocabulary: rows of both heads.
        chunk: as in `distill_head`.
        kind: of the objective; "" without a teacher.
        d_teacher: width of a teacher whose head is not float32, which is copied; else 0.
        top: whether teacher files are used.
    """
    rows, shared = vocabulary.student_rows, vocabulary.n_real
    if top:
        return 16 * top_chunk(chunk, rows) * rows
    most = max(own * rows + both * shared for own, both in _PLAIN.get(kind, _PLAIN["jsd"]))
    return int(4 * (chunk * most + shared * d_teacher))


def span_bytes(vocabulary: SharedVocabulary, chunk: int, n_outcomes: int, d_teacher: int = 0) -> int:
    """Upper bound of what `plain_bytes` counts, for spans: float32 values per row of each head and per outcome."""
    each = 9 * vocabulary.student_rows + 7 * vocabulary.n_real + 10 * n_outcomes
    widest = max(vocabulary.student_rows, vocabulary.n_real)
    return 4 * (top_chunk(chunk, widest) * each + vocabulary.n_real * d_teacher)


def top_chunk(chunk: int, rows: int) -> int:
    """Positions per chunk with teacher files or spans, for a head of `rows` rows."""
    return max(1, min(chunk, CELLS // rows))


def _check(x: Tensor, w: Tensor, job: _Job) -> None:
    t, wt, labels, vocabulary, grad_w = job.t_NE, job.wt_RE, job.labels_N, job.vocabulary, job.grad_w
    wide = torch.promote_types(x.dtype, torch.float32)
    tensors = [a for a in (x, w, t, wt, labels, grad_w) if a is not None]
    faults = {
        "n_valid and chunk must be at least 1": job.n_valid < 1 or job.chunk < 1,
        "hidden states and head do not fit": x.ndim != 2 or w.shape[1:] != x.shape[1:] or w.dtype != x.dtype,
        "labels must be int64, one per position": labels.shape != x.shape[:1] or labels.dtype != torch.int64,
        "all tensors must be on one device": len({a.device for a in tensors}) > 1,
        "a KD weight above 0 needs a teacher": job.objective.kd_weight > 0 and t is None and job.top is None,
        "pass a loaded teacher or teacher files, not both": t is not None and job.top is not None,
        "the teacher's ids are missing for some positions": job.top is not None and len(job.top.ids_NK) != len(x),
        "a teacher needs hidden states, head and vocabulary": len({t is None, wt is None, vocabulary is None}) > 1,
        f"grad_w must be {wide} and have the head's shape": grad_w is not None
        and (grad_w.shape != w.shape or grad_w.dtype != wide or not grad_w.is_contiguous()),
    }  # fmt: skip
    if t is not None and wt is not None and vocabulary is not None:
        n_teacher, n_least = (len(x), len(w)) if job.spans is None else (len(job.spans.next_E), len(wt))
        faults["the teacher's hidden states and head do not fit"] = t.shape != (n_teacher, wt.shape[1])
        faults["a head has fewer rows than the vocabulary has ids"] = vocabulary.n_real > min(n_least, len(wt))
    faults["a label exceeds the student's rows"] = not labels.is_cuda and bool((labels >= len(w)).any())
    for message, found in faults.items():
        if found:
            raise UsageError(message)


def _padded(n: int) -> int:
    return -(-n // 64) * 64


def _plain_terms(x_ND: Tensor, w_VD: Tensor, job: _Job, terms_5N: Tensor) -> _Terms:
    """For any device and dtype, by `dense`, `sparse` or `aligned`; bfloat16 products accumulate in float32."""
    wide, top, spans, shared_RE = terms_5N.dtype, job.top, job.spans, None
    parts = {} if spans is None else {rows.start: others for rows, *others in spans.chunks}
    if job.wt_RE is not None and job.vocabulary is not None:
        shared_RE = job.wt_RE[: job.vocabulary.n_real].to(wide)

    def terms(rows: slice) -> Tensor:
        x_CD, t_CR = x_ND[rows], None
        s_CV = x_CD @ w_VD.t() if x_CD.dtype == wide else torch.mm(x_CD, w_VD.t(), out_dtype=wide)
        s_CV = soft_cap(s_CV, job.caps.student)
        rows_t, some_spans = parts.get(rows.start, (rows, rows))
        if job.t_NE is not None and shared_RE is not None and rows_t.start < rows_t.stop:
            t_CR = soft_cap(job.t_NE[rows_t].to(shared_RE.dtype) @ shared_RE.t(), job.caps.teacher)
        if top is not None:
            some = TopK(top.ids_NK[rows], *(values[rows].to(wide) for values in top[1:]))
            found, grad_CV = sparse(job.objective, s_CV, some, job.labels_N[rows])
        elif spans is not None and t_CR is not None:
            part = spans.chunk(rows_t, some_spans)
            found, grad_CV, _ = aligned(job.objective, s_CV, t_CR, job.labels_N[rows], part, spans.ids)
        elif spans is not None:
            found, grad_CV = unaligned(job.objective, s_CV, job.labels_N[rows])
        else:
            found, grad_CV = dense(job.objective, s_CV, t_CR, job.labels_N[rows])
        terms_5N[:, rows] = torch.stack(found)
        if job.caps.student:
            grad_CV = grad_CV * (1 - (s_CV / job.caps.student) ** 2)
        return (grad_CV / job.n_valid).to(x_CD.dtype)

    return terms


def _fused_terms(x_ND: Tensor, w_VD: Tensor, job: _Job, terms_5N: Tensor) -> _Terms:
    """For bfloat16 on CUDA, by the kernel; the buffers for one chunk of logits are reused.

    The gradient is bfloat16, and shares the memory of float16 logits.
    """
    from aprtrain.kernels.kd_triton import kd_rows

    half = job.logits == "fp16"
    dtype = torch.float16 if half else torch.float32
    n_rows, n_student = min(job.chunk, len(x_ND)), len(w_VD)
    n_shared = job.vocabulary.n_real if job.vocabulary is not None else 0
    student = logit_weight(w_VD, job.logits)
    s_CS = x_ND.new_empty(n_rows, _padded(n_student), dtype=dtype)
    teacher, t_CP, grad_CS = None, s_CS, s_CS  # the kernel reads and writes only what there is
    if job.wt_RE is not None and job.vocabulary is not None:
        teacher = logit_weight(job.wt_RE[: job.vocabulary.teacher_width], job.logits)
        t_CP = x_ND.new_empty(n_rows, _padded(len(teacher)), dtype=dtype)
    if job.with_grad:
        grad_CS = s_CS.view(torch.bfloat16) if half else torch.empty_like(s_CS, dtype=torch.bfloat16)
    ce_weight, kd_weight = job.objective.weights()
    inverse = 1.0 / job.objective.temperature

    def terms(rows: slice) -> Tensor:
        labels_C, terms_5C = job.labels_N[rows], terms_5N[:, rows]
        n = len(labels_C)
        _project(x_ND[rows], student, s_CS[:n, :n_student])
        if job.t_NE is not None and teacher is not None:
            _project(job.t_NE[rows], teacher, t_CP[:n, : len(teacher)])
        with torch.cuda.device(s_CS.device):
            kd_rows[(n,)](
                s_CS, t_CP, grad_CS, labels_C, terms_5C,
                s_CS.stride(0), t_CP.stride(0), grad_CS.stride(0), terms_5C.stride(0), n_student, n_shared,
                1 / _SHRINK if half else 1.0, float(job.caps.student), float(job.caps.teacher), inverse,
                ce_weight / job.n_valid, kd_weight * inverse / job.n_valid, float(job.objective.beta),
                KIND=_KINDS[job.objective.kind], TEACHER=teacher is not None, ONE=job.objective.temperature == 1,
                CE=ce_weight != 0, KD=kd_weight != 0, GRAD=job.with_grad,
                S_CAP=job.caps.student != 0, T_CAP=job.caps.teacher != 0,
                LANES=32 * _WARPS, VEC=16 // s_CS.element_size(), num_warps=_WARPS,
            )  # fmt: skip
        return grad_CS[:n, :n_student]

    return terms


def _project(x_CD: Tensor, w_VD: Tensor, out_CV: Tensor) -> None:
    """Logits in float16 (divided by 16) or float32; both accumulate in float32."""
    if out_CV.dtype == torch.float16:
        torch.mm((x_CD * _SHRINK).half(), w_VD.t(), out=out_CV)
    else:
        torch.mm(x_CD, w_VD.t().to(x_CD.dtype), out_dtype=torch.float32, out=out_CV)


def _add_product(sum_VD: Tensor, grad_CV: Tensor, x_CD: Tensor) -> None:
    """sum += grad^T x, accumulated in the dtype of the sum; bfloat16 factors use tensor cores."""
    if grad_CV.dtype == sum_VD.dtype:
        sum_VD.addmm_(grad_CV.t(), x_CD)
    else:
        torch.addmm(sum_VD, grad_CV.t(), x_CD, out_dtype=sum_VD.dtype, out=sum_VD)


class _HeadContext(GradientContext, Protocol):
    buffered: bool


class _Head(torch.autograd.Function):
    """Gradients come from the forward pass; the backward one multiplies them with what arrives."""

    @staticmethod
    def forward(ctx: _HeadContext, x_ND: Tensor, w_VD: Tensor, job: _Job) -> tuple[Tensor, ...]:
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        need_x, need_w = (job.with_grad and need for need in ctx.needs_input_grad[:2])
        grad_ND = torch.empty_like(x_ND) if need_x else None
        grad_VD = job.grad_w if job.with_grad else None
        if grad_VD is None and need_w:
            grad_VD = torch.zeros_like(w_VD, dtype=wide, memory_format=torch.contiguous_format)
        on_cores = x_ND.is_cuda and x_ND.dtype == torch.bfloat16
        x, w = (x_ND, w_VD) if on_cores else (x_ND.to(wide), w_VD.to(wide))
        terms_5N = torch.zeros(5, len(x), dtype=wide, device=x.device)
        fused = on_cores and note_kernel(
            job.objective.kind, x.device, has_files=job.top is not None or job.spans is not None
        )
        terms = (_fused_terms if fused else _plain_terms)(x, w, job, terms_5N)
        whole = (slice(start, start + job.chunk) for start in range(0, len(x), job.chunk))
        for rows in whole if job.spans is None else [rows for rows, *_ in job.spans.chunks]:
            grad_CV = terms(rows)
            if grad_ND is not None:
                grad_ND[rows] = (w.t() @ grad_CV.t()).t()  # faster so for narrow students than grad @ w
            if grad_VD is not None:
                _add_product(grad_VD, grad_CV, x[rows])
        ctx.buffered = job.grad_w is not None
        ctx.save_for_backward(grad_ND, None if ctx.buffered else grad_VD)
        sums = terms_5N.sum(1)
        ce_weight, kd_weight = job.objective.weights()
        loss = (ce_weight * sums[0] + kd_weight * sums[1]) / job.n_valid
        outputs = (loss, *(value.clone() for value in sums))
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: _HeadContext, *arrived: Tensor) -> tuple[Tensor | None, ...]:
        grad_ND, grad_VD = ctx.saved_tensors
        factor = arrived[0]
        if ctx.buffered:
            factor = torch.where(factor == 1, factor, torch.nan)
        grads = [None if grad is None else grad * factor.to(grad.dtype) for grad in (grad_ND, grad_VD)]
        return (*grads, None)
