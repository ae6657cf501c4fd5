"""Triton kernels of the distillation loss. Imported only on CUDA.

One program per row, in two passes (three for the Jensen-Shannon divergence): the first computes normalizers and sums
over the vocabulary, the last writes the gradient. A thread loads VEC neighbouring logits at a time, with its own
running maximum and sums, so threads communicate only at the end of a pass.

Names: s, t student and teacher logits; 1 and T the temperature; z a sum of powers; p, q probabilities of student and
teacher, r those of the student on the shared ids alone; lse the logarithm of such a sum; KIND 0 forward, 1 reverse,
2 Jensen-Shannon. Logits and logarithms are in bits (base 2) until a result is formed. NOTHING stands for minus
infinity, so that its product with probability 0 is 0.
"""

# mypy: ignore-errors
# The branches of a Triton kernel are resolved when it is compiled.
# ruff: noqa: PLR0912, PLR0915

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NOTHING = tl.constexpr(-1e9)
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _bits(x, scale, cap, CAP: tl.constexpr):
    """Stored logits as capped logits in bits."""
    if CAP:
        x = cap * LOG2E * (2 * tl.sigmoid(x * (scale * 2 / cap)) - 1)
    else:
        x = x * (scale * LOG2E)
    return x


@triton.jit
def _load(row_ptr, i, n_cols, n_ids, scale, cap, CAP: tl.constexpr, MASK: tl.constexpr):
    """Logits of some ids, NOTHING from n_ids on. n_cols is a multiple of 64, so that loads stay 16 bytes wide."""
    if MASK:
        x = tl.load(row_ptr + i, mask=i < n_cols, other=0.0).to(tl.float32)
        x = tl.where(i < n_ids, _bits(x, scale, cap, CAP), NOTHING)
    else:
        x = _bits(tl.load(row_ptr + i).to(tl.float32), scale, cap, CAP)
    return x


@triton.jit
def _update_online_softmax(
    s, t, i, n_real, inverse_T,
    s_top, s_z1, s_zT, r_zT, r_gap, t_top, t_z1, t_zT, gap1, gapT, t_mean, s_there,
    KIND: tl.constexpr, TEACHER: tl.constexpr, ONE: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Updates the running maxima and sums of each lane with a tile of logits, in bits (base 2).

    s_top, t_top are maxima; s_z1, t_z1 sums of exp2 at temperature 1, s_zT, t_zT at T. gap1, gapT are sums of
    teacher weight times t - s; r_zT, r_gap those of the student over the teacher's ids (reverse KL). t_mean is the
    sum of teacher weight times t, for the entropy; s_there the student's logit at the teacher's maximum, for the
    agreement. TEACHER: t is a tile of teacher logits. ONE: T is 1. MASK: the tile may extend past n_real.
    """
    top = tl.maximum(s_top, tl.max(s, 1))
    e1, keep1 = tl.exp2(s - top[:, None]), tl.exp2(s_top - top)
    s_z1 = s_z1 * keep1 + tl.sum(e1, 1)
    if TEACHER:
        if ONE:
            eT, keepT = e1, keep1
        else:
            eT, keepT = tl.exp2((s - top[:, None]) * inverse_T), tl.exp2((s_top - top) * inverse_T)
        s_zT = s_zT * keepT + tl.sum(eT, 1)
        t = tl.maximum(t, NOTHING)
        gap = t - s
        if KIND == 1:
            if MASK:
                eT = tl.where(i < n_real, eT, 0.0)
            r_zT = r_zT * keepT + tl.sum(eT, 1)
            r_gap = r_gap * keepT - tl.sum(eT * gap, 1)
        high = tl.maximum(t_top, tl.max(t, 1))
        there = tl.max(tl.where(t == high[:, None], s, LOWEST), 1)
        s_there = tl.where(high > t_top, there, tl.maximum(s_there, there))
        e1, keep1 = tl.exp2(t - high[:, None]), tl.exp2(t_top - high)
        t_z1 = t_z1 * keep1 + tl.sum(e1, 1)
        gap1 = gap1 * keep1 + tl.sum(e1 * gap, 1)
        t_mean = t_mean * keep1 + tl.sum(e1 * t, 1)
        if ONE:
            eT, keepT = e1, keep1
        else:
            eT, keepT = tl.exp2((t - high[:, None]) * inverse_T), tl.exp2((t_top - high) * inverse_T)
        t_zT = t_zT * keepT + tl.sum(eT, 1)
        if KIND == 0:
            gapT = gapT * keepT + tl.sum(eT * gap, 1)
        t_top = high
    return top, s_z1, s_zT, r_zT, r_gap, t_top, t_z1, t_zT, gap1, gapT, t_mean, s_there


@triton.jit
def _mixture(logp, logq, beta):
    """log2(beta q + (1 - beta) p)."""
    a, b = logp + tl.log2(1 - beta), logq + tl.log2(beta)
    high, low = tl.maximum(a, b), tl.minimum(a, b)
    return high + tl.log2(1 + tl.exp2(low - high))


@triton.jit
def _slope(
    s, t, i, label, n_real, inverse_T, ce_grad, kd_grad, beta, s_cap, s_lse1, s_lseT, t_lseT, r_lseT, mean_log,
    KIND: tl.constexpr, CE: tl.constexpr, KD: tl.constexpr, S_CAP: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile. mean_log is the mean of the logarithm in reverse and Jensen-Shannon divergences."""
    grad = tl.zeros_like(s)
    if CE:
        grad += ce_grad * (tl.exp2(s - s_lse1) - tl.where(i == label, 1.0, 0.0))
    if KD:
        logp, logq = s * inverse_T - s_lseT, t * inverse_T - t_lseT
        p = tl.exp2(logp)
        if KIND == 0:
            grad += kd_grad * (p - tl.exp2(logq))
        if KIND == 1:
            logr = s * inverse_T - r_lseT
            tilt = tl.exp2(logr) * ((logr - logq - mean_log) * LN2 - 1)
            if MASK:
                tilt = tl.where(i < n_real, tilt, 0.0)
            grad += kd_grad * (p + tilt)
        if KIND == 2:
            grad += kd_grad * (1 - beta) * LN2 * p * (logp - _mixture(logp, logq, beta) - mean_log)
    if S_CAP:
        part = s * (LN2 / s_cap)
        grad *= 1 - part * part
    return grad


@triton.jit
def kd_rows(
    s_ptr, t_ptr, grad_ptr, labels_ptr, out_ptr, s_stride, t_stride, grad_stride, out_stride, n_student, n_real,
    scale, s_cap, t_cap, inverse_T, ce_grad, kd_grad, beta,
    KIND: tl.constexpr, TEACHER: tl.constexpr, ONE: tl.constexpr, CE: tl.constexpr, KD: tl.constexpr,
    GRAD: tl.constexpr, S_CAP: tl.constexpr, T_CAP: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Terms of a row (cross entropy, divergence, KL at 1, agreement, entropy) and its gradient in bf16.

    Strides count elements; those of s and t are also how many columns may be read. n_real <= n_student. scale
    multiplies both stored logits. ce_grad and kd_grad are the weights in the gradient, (1 - w) / n and w T / n. CE
    and KD say whether they are not 0; GRAD whether a gradient is asked for at all. grad may be the memory of s where
    elements have one size.
    """
    BLOCK: tl.constexpr = LANES * VEC
    row = tl.program_id(0).to(tl.int64)
    s_row, t_row = s_ptr + row * s_stride, t_ptr + row * t_stride
    ids = tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    whole = n_student // BLOCK * BLOCK
    if TEACHER:
        whole = n_real // BLOCK * BLOCK  # no masking needed up to here
    label = tl.load(labels_ptr + row)
    valid = label >= 0
    # Read before the gradient may overwrite it. A label beyond the head yields NaN, which stops a run.
    known = valid & (label < n_student)
    s_label = tl.load(s_row + label, mask=known, other=float("nan")).to(tl.float32)
    s_label = _bits(s_label, scale, s_cap, S_CAP)

    zero = tl.zeros([LANES], tl.float32)
    s_top, s_z1, s_zT, r_zT, r_gap = zero + LOWEST, zero, zero, zero, zero
    t_top, t_z1, t_zT, s_there = zero + LOWEST, zero, zero, zero + LOWEST
    gap1, gapT, t_mean = zero, zero, zero
    for MASK in tl.static_range(2):
        for start in range(whole if MASK else 0, n_student if MASK else whole, BLOCK):
            i = start + ids
            s = _load(s_row, i, s_stride, n_student, scale, s_cap, S_CAP, MASK)
            t = s
            if TEACHER:
                t = _load(t_row, i, t_stride, n_real, scale, t_cap, T_CAP, MASK)
            s_top, s_z1, s_zT, r_zT, r_gap, t_top, t_z1, t_zT, gap1, gapT, t_mean, s_there = _update_online_softmax(
                s, t, i, n_real, inverse_T,
                s_top, s_z1, s_zT, r_zT, r_gap, t_top, t_z1, t_zT, gap1, gapT, t_mean, s_there,
                KIND, TEACHER, ONE, MASK,
            )  # fmt: skip

    out = out_ptr + row
    s_max = tl.max(s_top, 0)
    s_lse1 = s_max + tl.log2(tl.sum(s_z1 * tl.exp2(s_top - s_max), 0))
    tl.store(out, tl.where(valid, (s_lse1 - s_label) * LN2, 0.0))
    s_lseT, t_lseT, r_lseT, mean_log = s_lse1, s_lse1, s_lse1, s_lse1
    if TEACHER:
        t_max = tl.max(t_top, 0)
        there = tl.max(tl.where(t_top == t_max, s_there, LOWEST), 0)
        factor = tl.exp2(t_top - t_max)
        z = tl.sum(t_z1 * factor, 0)
        t_lse1 = t_max + tl.log2(z)
        kl1 = tl.sum(gap1 * factor, 0) / z + (s_lse1 - t_lse1)
        entropy = t_lse1 - tl.sum(t_mean * factor, 0) / z
        factor = tl.exp2((t_top - t_max) * inverse_T)
        z = tl.sum(t_zT * factor, 0)
        t_lseT = t_max * inverse_T + tl.log2(z)
        s_factor = tl.exp2((s_top - s_max) * inverse_T)
        s_lseT = s_max * inverse_T + tl.log2(tl.sum(s_zT * s_factor, 0))
        if KIND == 0:
            kl = tl.sum(gapT * factor, 0) / z * inverse_T + (s_lseT - t_lseT)
        if KIND == 1:
            z = tl.sum(r_zT * s_factor, 0)
            r_lseT = s_max * inverse_T + tl.log2(z)
            mean_log = tl.sum(r_gap * s_factor, 0) / z * inverse_T - (r_lseT - t_lseT)
            kl = mean_log + (s_lseT - r_lseT)
        if KIND == 2:
            total, mean = zero, zero
            for start in range(0, n_student, BLOCK):
                i = start + ids
                s = _load(s_row, i, s_stride, n_student, scale, s_cap, S_CAP, True)
                t = _load(t_row, i, t_stride, n_real, scale, t_cap, T_CAP, True)
                logp, logq = s * inverse_T - s_lseT, tl.maximum(t, NOTHING) * inverse_T - t_lseT
                logm = _mixture(logp, logq, beta)
                p_log, q_log = tl.exp2(logp) * (logp - logm), tl.exp2(logq) * (logq - logm)
                total += tl.sum(tl.maximum((1 - beta) * p_log + beta * q_log, 0.0), 1)
                mean += tl.sum(p_log, 1)
            kl, mean_log = tl.sum(total, 0), tl.sum(mean, 0)
        tl.store(out + out_stride, tl.where(valid, kl * LN2, 0.0))
        tl.store(out + 2 * out_stride, tl.where(valid, kl1 * LN2, 0.0))
        tl.store(out + 3 * out_stride, tl.where(valid & (there == s_max), 1.0, 0.0))
        tl.store(out + 4 * out_stride, tl.where(valid, entropy * LN2, 0.0))

    if GRAD:
        grad_row = grad_ptr + row * grad_stride
        if valid:
            for MASK in tl.static_range(2):
                for start in range(whole if MASK else 0, n_student if MASK else whole, BLOCK):
                    i = start + ids
                    s = _load(s_row, i, s_stride, n_student, scale, s_cap, S_CAP, MASK)
                    t = s
                    if KD:
                        t = tl.maximum(_load(t_row, i, t_stride, n_real, scale, t_cap, T_CAP, MASK), NOTHING)
                    grad = _slope(
                        s, t, i, label, n_real, inverse_T, ce_grad, kd_grad, beta, s_cap, s_lse1, s_lseT, t_lseT,
                        r_lseT, mean_log, KIND, CE, KD, S_CAP, MASK,
                    )  # fmt: skip
                    if MASK:
                        grad = tl.where(i < n_student, grad, 0.0)
                    tl.store(grad_row + i, grad.to(tl.bfloat16), mask=(i < s_stride) if MASK else None)
        else:
            for start in range(0, n_student, BLOCK):
                nothing = tl.zeros([LANES, VEC], tl.bfloat16)
                tl.store(grad_row + start + ids, nothing, mask=start + ids < s_stride)
