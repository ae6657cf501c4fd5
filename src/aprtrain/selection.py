"""Selects the kernels of a run: tried before its first step, or predicted by --plan from the installed packages."""

from __future__ import annotations

import torch

from aprfmt.io.system import n_processors
from aprtrain.config import Config
from aprtrain.data.batches import Batch
from aprtrain.features import current, importable, label_of, note_checksums
from aprtrain.kernels.gated import products_agree
from aprtrain.loss.head import note_kernel
from aprtrain.models import TrainingPair
from aprtrain.network.attention import places
from aprtrain.network.decoder import Decoder
from aprtrain.network.shape import Shape
from aprtrain.optim.rules import note_adamw
from aprtrain.teacher.teacher import Teacher

_UNTRIED = "if it agrees with torch's on the GPU"


def note_kernels(config: Config, batch: Batch, student: Decoder, teacher: Teacher | None, device: torch.device) -> None:
    """Tries and notes the kernels of a run; `batch` is one of its batches, on the device."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    number_NT = places(batch.tokens_NT, batch.documents)[2]
    decoders = [student] if teacher is None else [student, teacher.decoder]
    for decoder in decoders:
        own = dtype if decoder.trains else next(p.dtype for p in decoder.parameters())
        with torch.set_grad_enabled(decoder.trains):
            decoder.plan_attention(batch.tokens_NT, batch.documents, number_NT, own)
        decoder.note_gated()
    _note_others(config, device, None if teacher is None or teacher.gate is None else teacher.gate.share)


def expect_kernels(config: Config, pair: TrainingPair, device: torch.device) -> None:
    """Notes the expected kernels from the installed packages; touches no device."""
    record, s = current(), pair.student.shape
    on_gpu = device.type == "cuda"
    if on_gpu and config.deterministic:
        record.miss("flash4", "it is not deterministic (--deterministic)", "leave out --deterministic")
        record.use("attention", "torch")
    elif on_gpu and record.check("flash4", importable("flash4")):
        record.use("attention", f"{label_of('flash4')} {_UNTRIED}")
    else:
        record.use("attention", "torch" if s.attn_softcap or not on_gpu else "cuDNN or torch")
    if s.gated:
        fuses = can_fuse(config, s, device) and record.check("quack", importable("quack"))
        record.use("gated", f"{label_of('quack')} {_UNTRIED}" if fuses else "torch")
    _note_others(config, device, None)


def _note_others(config: Config, device: torch.device, share: float | None) -> None:
    """Records the kernels of loss and optimizer, and torch.compile, fp8, dtype, threads and checksums.

    `share` is the fraction of the teacher's products in e4m3, None if unknown.
    """
    record = current()
    note_kernel(config.loss, device, has_files=config.teacher_logprobs is not None)
    note_adamw(device)
    if config.is_compiled(device.type):
        is_off = any(miss.feature == "compile" for miss in record.missed)
        record.use("compile", "off (see below)" if is_off else "inductor")
    else:
        record.use("compile", "off (not requested)")
    if config.teacher_residency != "fp8":
        record.use("fp8", "off (not requested)")
    else:
        amount = "all matmuls that pass the comparison" if share is None else f"{share:.0%} of the teacher's layers"
        record.use("fp8", amount if device.type == "cuda" else f"{amount}, multiplied in float32")
    record.use("dtype", "bf16" if device.type == "cuda" else "f32")
    if device.type == "cpu":
        record.miss("bf16", "bf16 is for GPUs")
        threads, processors = torch.get_num_threads(), n_processors()
        record.use("threads", str(threads))
        if threads < processors:
            record.miss("threads", f"torch computes with {threads} of {processors} threads")
    note_checksums()


def can_fuse(config: Config, s: Shape, device: torch.device) -> bool:
    """Whether products of a student on `device` may write silu(gate) * up; see `Block.can_fuse`."""
    fits = s.gated and s.act == "silu" and 2 * s.d_ffn % 16 == 0 and s.d_model % 8 == 0
    has_bias = s.has("gate_up_bias") or s.has("down_bias")
    return device.type == "cuda" and config.is_compiled("cuda") and fits and not has_bias


def fuses(config: Config, s: Shape, device: torch.device, *, tried: bool) -> bool:
    """Whether they do: `tried` on the device, else judging by the installed packages."""
    if not can_fuse(config, s, device):
        return False
    return bool(products_agree(learns=True)) if tried else bool(importable("quack"))
