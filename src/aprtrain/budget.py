"""Memory and arithmetic of a run, from shapes alone: what --plan prints and what the running program is held against.

Bytes of a parameter of P: compute copy (2; none on the CPU, which computes in the masters), master 4, moments 4 + 4,
gradient 4; of several processes each has its share of masters and moments, with --shard weights of all four, beside
the blocks in use and the head with its gradient. Activations of a token and a layer of width D, MLP width F and
key-value width K, that autograd keeps for the backward pass: 7 D + 3 F + 2 K elements; 6 D + F + 2 K more where
blocks are not compiled, which then keep the norms' and the activation's parts; with recomputed blocks D, and one
whole block at a time.

FLOPs of a token: 2 a matrix element forward and 4 backward; causal attention 2 T Q forward for QK and PV together
(T/2 positions on average, 2 products, 2 FLOPs) and twice that backward. Only useful work counts, nothing recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from aprfmt.errors import RefusedError, RunError
from aprtrain.config import Config
from aprtrain.network.shape import Shape

SLACK = 1.15
"""Measured peak over planned bytes beyond which a run is stopped."""

_OVERHEAD = 512 << 20  # libraries' workspaces


@dataclass(frozen=True, slots=True)
class Row:
    """What takes memory, and how many bytes."""

    name: str
    n_bytes: int


def memory(
    config: Config,
    student: Shape,
    teacher: Shape | None,
    *,
    resident: int,
    head: int,
    on_gpu: bool,
    compiled: bool,
    teacher_head: int = 0,
    backbone: bool = True,
    processes: int = 1,
) -> list[Row]:
    """What each of several processes holds on its device at the peak of a step.

    `resident` are the bytes of the teacher's weights, `head` those of the loss head and `teacher_head` those of the
    teacher's head made ready for it, as their modules tell. Without `backbone` the teacher's states are read.
    """
    width = 2 if on_gpu else 4
    tokens = config.micro_tokens
    rows = [
        *_weights(config, student, width, processes),
        Row("student: activations", tokens * _activation_elements(config, student, compiled) * width),
        Row("student: embedding's gradient", student.vocab_rows * student.d_model * width),
        Row("student: attention scores", _score_bytes(config, student)),
        Row("loss head", head + 2 * tokens * student.d_model * width),
    ]
    if teacher is not None:
        wide = 6 * teacher.d_model + 3 * teacher.d_ffn
        rows += [
            Row(f"teacher: weights, {config.teacher_residency}", resident),
            Row("teacher: head for the loss", teacher_head),
            Row("teacher: hidden states", tokens * teacher.d_model * width),
            Row(
                "teacher: a pass",
                tokens * wide * width + _scores_of_layer(config, teacher) if backbone else 0,
            ),
        ]
    return [*rows, Row("workspaces", _OVERHEAD if on_gpu else 0)]


def _weights(config: Config, s: Shape, width: int, processes: int) -> list[Row]:
    """The student without its activations; `width` are the bytes of a value that it computes with."""
    p, head, block = s.n_params, s.vocab_rows * s.d_model, s.n_layer_params
    rest = p - s.n_layers * block
    states = Row("student: masters, moments", 12 * p // processes)
    if config.shard == "weights":
        # A block and the next, as gathered and as used; the gradient of one, and that of two on its way in float32.
        return [
            states,
            Row("student: gradient", 4 * p // processes + 4 * head),
            Row("student: weights in use", width * rest + (5 * width + 8) * block),
        ]
    copies = width < 4 or processes > 1
    return [states, Row("student: gradient", 4 * p), Row("student: compute copy", width * p if copies else 0)]


def _activation_elements(config: Config, s: Shape, compiled: bool) -> int:
    kv, block = s.kv_rows, 7 * s.d_model + 3 * s.d_ffn + 2 * s.kv_rows
    block += 0 if compiled else 6 * s.d_model + s.d_ffn + 2 * s.kv_rows
    if config.recompute == "block":
        return s.n_layers * s.d_model + block
    return s.n_layers * (block + (2 * (s.q_rows + kv) if s.qk_norm else 0))


def _score_bytes(config: Config, s: Shape) -> int:
    return _scores_of_layer(config, s) * (1 if config.recompute == "block" else s.n_layers)


def _scores_of_layer(config: Config, s: Shape) -> int:
    """Scores are written out where they have a softcap: bounded and as weights in bf16, in float32 between."""
    return 8 * config.micro_tokens * s.n_heads * config.seq_len if s.attn_softcap else 0


def total(rows: list[Row]) -> int:
    """Their sum in bytes."""
    return sum(row.n_bytes for row in rows)


def check_fits(rows: list[Row], device_bytes: int) -> None:
    """Refuses a run whose plan is larger than the device."""
    if (need := total(rows)) > device_bytes:
        largest = max(rows, key=lambda row: row.n_bytes)
        raise RefusedError(
            f"the run needs {need / 2**30:.1f} GiB, the device has {device_bytes / 2**30:.1f} GiB",
            hint=f"the largest part is {largest.name}; smaller --micro-tokens, --recompute block or another "
            "--teacher-residency take less, so do several GPUs with --shard weights",
        )


def check_peak(rows: list[Row], peak_bytes: int) -> None:
    """Stops a run that takes more memory than planned: something is held that should not be."""
    if peak_bytes > SLACK * total(rows):
        raise RunError(
            f"the run takes {peak_bytes / 2**30:.2f} GiB where {total(rows) / 2**30:.2f} GiB were planned",
            hint="that is a defect: please report it with the table of --plan",
        )


@dataclass(frozen=True, slots=True)
class Flops:
    """Useful FLOPs of a token; `teacher_head` are those of the teacher's that are its head's."""

    teacher: float
    student: float
    teacher_head: float = 0.0

    @property
    def without_backbone(self) -> Flops:
        """Where the teacher's hidden states are read."""
        return replace(self, teacher=self.teacher_head)

    @property
    def total(self) -> float:
        """Of both."""
        return self.teacher + self.student


def flops(config: Config, student: Shape, teacher: Shape | None) -> Flops:
    """The arithmetic of a token of a run."""
    return Flops(
        teacher=_forward(teacher, config.seq_len) if teacher is not None else 0.0,
        student=3 * _forward(student, config.seq_len),
        teacher_head=_head(teacher) if teacher is not None else 0.0,
    )


def _forward(s: Shape, seq_len: int) -> float:
    seen = sum(min(window, seq_len) if window else seq_len / 2 for window in s.windows)
    return 2.0 * s.n_layers * s.n_layer_params + _head(s) + 4.0 * s.q_rows * seen


def _head(s: Shape) -> float:
    return 2.0 * s.vocab_rows * s.d_model


# Published dense bf16 rates, FLOP/s, by a part of the device's name.
_PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12, "4090": 165e12}


def peak_flops(device_name: str) -> float | None:
    """The published dense bf16 rate of a device, None where it is not known here."""
    return next((rate for part, rate in _PEAKS.items() if part in device_name), None)
