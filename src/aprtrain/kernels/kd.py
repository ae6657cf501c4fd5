"""Launch of the distillation loss's kernel: terms and gradient of a chunk of rows of logits, on CUDA.

Shape suffixes: C rows of a chunk, S and R columns of the student's and the teacher's buffer (multiples of 64, ids
first), N rows in all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from aprtrain.loss.objective import Kind, Objective

_KINDS: dict[Kind, int] = {"forward": 0, "reverse": 1, "jsd": 2}


class Widths(NamedTuple):
    """How many columns of the buffers are ids, and what bounds the logits (0: nothing)."""

    student: int
    shared: int
    student_cap: float = 0.0
    teacher_cap: float = 0.0


class Launch(NamedTuple):
    """Warps of the program that takes a row, and how many 16-byte loads each thread makes at a time."""

    warps: int = 8
    loads: int = 1


def kd_rows(
    objective: Objective,
    s_CS: Tensor,
    t_CR: Tensor | None,
    labels_C: Tensor,
    terms_5C: Tensor,
    grad_CS: Tensor | None,
    widths: Widths,
    *,
    n_valid: int,
    scale: float,
    launch: Launch = Launch(),  # noqa: B008 - immutable
) -> None:
    """Writes the five terms of `objective.Rows` and, where asked for, the gradient of the mean loss.

    Args:
        objective: what is minimised.
        s_CS: student logits before their bound, float16 or float32; all columns readable.
        t_CR: teacher logits likewise; None leaves all terms but the first untouched.
        labels_C: int64 ids or IGNORED; an id beyond the student's rows gives NaN.
        terms_5C: float32, a view of [5, N] with unit stride along rows.
        grad_CS: bfloat16; may be the memory of s_CS when that is float16. None for values only.
        widths: see there.
        n_valid: positions that count, in the whole global batch; the gradient is divided by it.
        scale: what the stored logits, both, are multiplied with first.
    """
    from aprtrain.kernels import kd_triton

    ce_weight, kd_weight = objective.weights()
    inverse = 1.0 / objective.temperature
    grad, teacher = grad_CS if grad_CS is not None else s_CS, t_CR if t_CR is not None else s_CS
    with torch.cuda.device(s_CS.device):
        kd_triton.kd_rows[(len(s_CS),)](
            s_CS, teacher, grad, labels_C, terms_5C,
            s_CS.stride(0), teacher.stride(0), grad.stride(0), terms_5C.stride(0), widths.student, widths.shared,
            float(scale), float(widths.student_cap), float(widths.teacher_cap), inverse,
            ce_weight / n_valid, kd_weight * inverse / n_valid, float(objective.beta),
            KIND=_KINDS[objective.kind], TEACHER=t_CR is not None, ONE=objective.temperature == 1,
            CE=ce_weight != 0, KD=kd_weight != 0, GRAD=grad_CS is not None,
            S_CAP=widths.student_cap != 0, T_CAP=widths.teacher_cap != 0,
            LANES=32 * launch.warps * launch.loads, VEC=16 // s_CS.element_size(), num_warps=launch.warps,
        )  # fmt: skip
