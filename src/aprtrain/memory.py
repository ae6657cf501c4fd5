"""Peak memory of a run, from shapes alone: persistent memory, plus the largest of a step's phases.

Bytes per parameter: compute copy 2 (on the CPU, which computes with the masters, none, but 4 with --qat), master 4,
moments 4 + 4 (with Muon 4 for matrices of layers), gradient 4; with several processes each has its part of masters and
moments, with --shard weights of all four, plus the blocks in use and the head with its gradient.

On the CPU, host memory also contains libraries, and in the process that saves, the copy from which a checkpoint is
written.

The phases follow each other and share memory: the teacher's pass; the student's forward pass and the loss, which holds
the activations that autograd saves; the backward pass, which holds them and the gradients of one layer; the comparison
of an fp8 teacher with bf16 before the first step.

Activations per token and layer of width D, MLP width F and key-value width K that autograd saves for the backward pass:
7 D + 3 F + 2 K elements; F fewer if products write silu(gate) up directly and recompute it; 6 D + F + 2 K more without
compiled blocks, which then save intermediates of norms and activations; with recomputed blocks D, plus one whole block
at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from aprfmt.tokenizer.alignment import SharedVocabulary
from aprtrain.config import Config
from aprtrain.features import importable
from aprtrain.lora_spec import parse_lora
from aprtrain.loss.head import Logits, head_bytes, logit_weight_bytes, plain_bytes, span_bytes
from aprtrain.models import GATE_TOKENS, TrainingPair, is_lora_in_blocks, match_layers
from aprtrain.network.attention import SCORED
from aprtrain.network.lora import lora_params
from aprtrain.network.shape import Shape
from aprtrain.network.weights import NetworkSource
from aprtrain.optim.rules import rule_of
from aprtrain.qat import grid_bytes
from aprtrain.sampler import sampling_bytes
from aprtrain.selection import fuses
from aprtrain.teacher.teacher import COMPARED, compared_bytes, estimate_bytes, teacher_dtype

USUAL_PASS = 16384
"""Default tokens of a pass without a device, and in a plan."""

_OTHER_TOKENS = 2
"""Positions of a teacher with another tokenizer for one of the student's, at most: its tokens, and padding."""

_WORKSPACES = 512 << 20  # of libraries, on a GPU
_LIBRARIES = 400 << 20  # resident memory of a process before it trains on a CPU: Python, torch, the tokenizer


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """A row of the plan, and its bytes."""

    name: str
    n_bytes: int


def total(rows: list[MemoryRow]) -> int:
    """Their sum in bytes."""
    return sum(row.n_bytes for row in rows)


def memory_plan(
    config: Config,
    pair: TrainingPair,
    device: torch.device,
    *,
    processes: int = 1,
    tried: bool = False,
    teacher_bytes: int | None = None,
) -> list[MemoryRow]:
    """Peak memory of one process on `device` during a step.

    Args:
        config, pair, device, processes: of the run.
        tried: whether kernels may be tried on the device; otherwise installed ones count as usable.
        teacher_bytes: actual size of a loaded teacher; otherwise fp8 counts as if all parts pass.
    """
    student, teacher = pair.student.shape, pair.teacher
    tokens = min(config.micro_tokens or USUAL_PASS, max(config.seq_len, config.tokens_per_step // processes))
    on_gpu = device.type == "cuda"
    width, compiled = 2 if on_gpu else 4, config.is_compiled(device.type)
    fused = fuses(config, student, device, tried=tried)
    vocabulary = pair.vocabulary or SharedVocabulary(student.vocab_rows, student.vocab_rows, student.vocab_rows)
    logits: Logits = "fp16" if config.logits == "fp16" and on_gpu else "fp32"
    chunk, has_files = min(config.chunk, tokens), pair.files is not None
    is_wide = teacher is None or teacher_dtype(config.teacher_residency, device) == torch.float32
    copied = 0 if teacher is None or is_wide else teacher.shape.d_model
    if pair.outcomes is not None:
        head = span_bytes(vocabulary, chunk, pair.outcomes.n, copied)
    elif on_gpu and (importable("triton") or not tried):
        head = head_bytes(vocabulary, student.d_model, chunk, logits, teacher is not None, has_files)
    else:
        head = plain_bytes(vocabulary, chunk, config.loss if teacher is not None else "", copied, has_files)
    if config.lora is not None and is_lora_in_blocks(config, pair.student):
        config = replace(config, recompute="block")  # blocks are decoded again in the backward pass
    kept = [
        MemoryRow("student: activations", tokens * _activation_elements(config, student, compiled, fused) * width),
        MemoryRow("student: attention scores", _score_bytes(config, student, tokens)),
    ]
    held = _weights(config, pair, width, processes)
    held.append(MemoryRow("student: scales of blocks", grid_bytes(pair.student, pair.qat_types)))
    if not on_gpu:
        held += [
            MemoryRow("Python and libraries", _LIBRARIES),
            MemoryRow("checkpoint being written", 0 if config.smoke is not None else checkpoint_bytes(config, student)),
        ]
    phases = [
        [*kept, MemoryRow("loss head", head + 2 * tokens * student.d_model * width)],
        [*kept, MemoryRow("student: layer gradients", tokens * (4 * student.d_model + 3 * student.d_ffn) * width)],
        [MemoryRow("student: embedding gradient", student.n_embed_params * width)],
    ]
    if config.on_policy:
        phases.append([MemoryRow("student: sampling", sampling_bytes(student))])
    if teacher is not None:
        s, residency = teacher.shape, config.teacher_residency
        dtype = teacher_dtype(residency, device)
        resident = teacher_bytes or estimate_bytes(teacher, residency) * (dtype.itemsize // 2)
        held += [
            MemoryRow(
                f"teacher: weights, {_residency_words(residency, dtype, known=teacher_bytes is not None)}", resident
            ),
            MemoryRow(
                "teacher: head for the loss", logit_weight_bytes(vocabulary, s.d_model, logits, residency == "q4k")
            ),
        ]
        tokens *= 1 if pair.outcomes is None else _OTHER_TOKENS
        matched = len(match_layers(config, student, s)) if config.hidden_weight else 0
        # In float32 for the loss, with gradients.
        matching = matched * tokens * (s.d_model * width + 16 * s.d_model)
        hidden = MemoryRow("teacher: hidden states", tokens * s.d_model * width + matching)
        phases = [[*phase, hidden] for phase in phases]
        phases.append([MemoryRow("teacher: forward pass", _pass_bytes(config, s, tokens, width)), hidden])
        if residency == "fp8":
            phases.append(
                [MemoryRow("teacher: comparison with bf16", _comparison_bytes(config, teacher, vocabulary, width))]
            )
    return [*held, *max(phases, key=total), MemoryRow("workspaces", _WORKSPACES if on_gpu else 0)]


def _residency_words(residency: str, dtype: torch.dtype, *, known: bool) -> str:
    if residency == "fp8" and not known:
        return "fp8 if all parts pass the comparison"
    return "f32" if dtype.itemsize == 4 else residency


def checkpoint_bytes(config: Config, s: Shape) -> int:
    """Host memory of the copy of the student and its optimizer states from which a checkpoint is written."""
    trained = s.n_params if config.lora is None else lora_params(s, parse_lora(config.lora))
    return s.n_params * (4 if config.save_dtype == "f32" else 2) + _state_bytes(config, s, trained)


def _state_bytes(config: Config, s: Shape, trained: int) -> int:
    """Masters and the optimizer's states of `trained` parameters, where layers count as if they were matrices only."""
    of_layer, of_outer = (len(rule_of(config.optimizer).kinds(name, (2, 2))) for name in ("qkv", "embed"))
    outer = 0 if config.lora is not None else s.n_params - s.n_layers * s.n_layer_params
    return 4 * (of_layer * (trained - outer) + of_outer * outer)


def _weights(config: Config, pair: TrainingPair, width: int, processes: int) -> list[MemoryRow]:
    """The student without its activations; `width` is the byte size of its compute dtype."""
    s = pair.student.shape
    if config.lora is not None:
        return _lora_weights(config, config.lora, pair, width, processes)
    p, head, block = s.n_params, s.vocab_rows * s.d_model, s.n_layer_params
    rest = p - s.n_layers * block
    states = MemoryRow("student: master weights, moments", _state_bytes(config, s, p) // processes)
    if config.shard == "weights":
        # A block and the next, as gathered and as used; the gradient of one, and those of two in float32 in transit.
        return [
            states,
            MemoryRow("student: gradient", 4 * p // processes + 4 * head),
            MemoryRow("student: gathered weights", width * rest + (5 * width + 8) * block),
        ]
    copies = width < 4 or processes > 1 or config.qat is not None
    return [
        states,
        MemoryRow("student: gradient", 4 * p),
        MemoryRow("student: compute copy", width * p if copies else 0),
    ]


def _lora_weights(config: Config, lora: str, pair: TrainingPair, width: int, processes: int) -> list[MemoryRow]:
    """Frozen weights, which may stay blocks, and the pairs beside them, which alone have states and a gradient."""
    s, in_blocks = pair.student.shape, is_lora_in_blocks(config, pair.student)
    pairs = lora_params(s, parse_lora(lora))
    frozen = estimate_bytes(pair.student, "q4k") if in_blocks else width * s.n_params
    return [
        MemoryRow(f"student: frozen weights, {'q4k' if in_blocks else 'f32' if width == 4 else 'bf16'}", frozen),
        MemoryRow(
            "student: adapters, moments, gradient", _state_bytes(config, s, pairs) // processes + (4 + width) * pairs
        ),
    ]


def _activation_elements(config: Config, s: Shape, compiled: bool, fused: bool) -> int:
    mlp = (2 if fused else 3) * s.d_ffn if s.experts is None else s.mlp_values
    kv, block = s.kv_rows, 7 * s.d_model + mlp + max(2 * s.kv_rows, s.recurrent_values)
    block += 4 * (s.d_model + s.per_layer_width) if s.per_layer_width else 0
    block += 0 if compiled else 6 * s.d_model + s.d_ffn + 2 * s.kv_rows
    if config.recompute == "block":
        return s.n_layers * s.d_model + block
    return s.n_layers * (block + (2 * (s.q_rows + kv) if s.has("q_norm") else 0))


def _score_bytes(config: Config, s: Shape, tokens: int) -> int:
    """Scores of SCORED queries of each row, for a softcap: capped, as weights, and their gradients."""
    return 24 * tokens * s.n_heads * min(config.seq_len, SCORED) if s.attn_softcap else 0


def _pass_bytes(config: Config, s: Shape, tokens: int, width: int) -> int:
    """A pass without gradients, at its widest layer."""
    return tokens * (6 * max(s.d_model, s.q_rows) + s.mlp_values) * width + _score_bytes(config, s, tokens)


def _comparison_bytes(config: Config, teacher: NetworkSource, vocabulary: SharedVocabulary, width: int) -> int:
    """Besides the weights in e4m3: those in bf16, the hidden states of both, a copy of the head, logits of a chunk."""
    s, tokens = teacher.shape, max(config.seq_len, GATE_TOKENS)
    logits = vocabulary.n_real * (6 * 4 * COMPARED + width * s.d_model)
    return compared_bytes(teacher) + max(_pass_bytes(config, s, tokens, 2), logits) + 4 * tokens * s.d_model
