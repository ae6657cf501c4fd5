"""The losses of a run, step by step, against a plain dense loop that shares only the network and the data's order."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from train_runs import lines

from aprfmt.texts.encoding import Encoder
from aprfmt.texts.sequences import Windows
from aprfmt.texts.shards import open_corpus
from aprtrain.data.batches import Batches
from aprtrain.models import make_student
from aprtrain.network.decoder import Decoder
from aprtrain.network.weights import load_decoder, open_network

STEPS, PEAK, WEIGHT, HEAT, WARM = 20, 3e-3, 0.7, 3.0, 2


def plain_loop(student: Decoder, teacher: Decoder, batches: Batches) -> list[float]:
    """Losses of (1 - w) CE + w T^2 KL, mean over the labels of a step; torch's AdamW and clipping, cosine."""
    matrices = [p for p in student.parameters() if p.dim() > 1]
    vectors = [p for p in student.parameters() if p.dim() <= 1]
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    losses = []
    for step in range(STEPS):
        rows = next(batches)
        loss = torch.zeros(())
        for batch in rows:
            loss = loss + batch_loss(student, teacher, batch)
        adamw.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        done = (step - WARM) / (STEPS - 1 - WARM)
        rate = PEAK * (step + 1) / WARM if step < WARM else PEAK * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
        losses.append(loss.item())
    return losses


def batch_loss(student: Decoder, teacher: Decoder, batch: Any) -> Tensor:
    keep = batch.labels_NT != -100
    s = student.logits(student(batch.tokens_NT, batch.documents))[keep]
    with torch.no_grad():
        t = teacher.logits(teacher(batch.tokens_NT, batch.documents))[keep]
    ce = functional.cross_entropy(s, batch.labels_NT[keep], reduction="sum")
    kl = functional.kl_div((s / HEAT).log_softmax(-1), (t / HEAT).log_softmax(-1), reduction="sum", log_target=True)
    loss: Tensor = ((1 - WEIGHT) * ce + WEIGHT * HEAT**2 * kl) / batch.n_valid
    return loss


def test_the_curve_is_that_of_a_plain_loop(
    distil: Callable[..., dict[str, Any]], teacher_file: Path, tmp_path: Path
) -> None:
    distil(steps=STEPS, lr=PEAK, kd_weight=WEIGHT, temperature=HEAT, warmup_steps=WARM)
    with open_network(teacher_file) as network:
        teacher, student = load_decoder(network), load_decoder(make_student(network, "layers:0,"))
        assert network.tokenizer is not None
        corpus = open_corpus(tmp_path / "run/tokens", Encoder(network.tokenizer).digest)
    windows = Windows(corpus.train, 32, corpus.separator)
    order = Batches(windows, sequences_per_step=4, windows_per_micro=4, seed=42, epochs=None)
    ours = [line["loss"] for line in lines(tmp_path / "run")]
    assert ours == pytest.approx(plain_loop(student, teacher, order), rel=1e-3)
