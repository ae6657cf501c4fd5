"""Samples of the student's text: bounded, the same at each evaluation, and the training does not know of them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from train_runs import lines, weights

from aprfmt.texts.encoding import Encoder
from aprfmt.texts.sequences import Windows
from aprfmt.texts.shards import open_corpus
from aprfmt.tokenizer.encoding import tokenizer_json
from aprfmt.tokenizer.fast import load
from aprtrain.network.weights import load_decoder, open_network
from aprtrain.samples import sample_texts

Distil = Callable[..., dict[str, Any]]


def test_samples_are_the_greedy_continuations(distil: Distil, tmp_path: Path, teacher_file: Path) -> None:
    distil(steps=2, eval_every=1)
    with open_network(teacher_file) as network:
        student, tokenizer = load_decoder(network), network.tokenizer
    assert tokenizer is not None
    corpus = open_corpus(tmp_path / "run" / "tokens", Encoder(tokenizer).digest)
    held_out = Windows(corpus.held_out, 32, corpus.separator)
    (sample,) = sample_texts(student, held_out, tokenizer, 1)
    ids = load(tokenizer_json(tokenizer)).encode([sample["prompt"]])[0].ids
    assert len(ids) == 12, "a shorter sequence shortens prompt and answer alike"
    for _ in range(20):
        with torch.no_grad():
            ids.append(int(student.logits(student(torch.tensor([ids])))[0, -1].argmax()))
    end = tokenizer.special.get("eos")
    new = ids[12:]
    wanted = load(tokenizer_json(tokenizer)).decode(new[: new.index(end)] if end in new else new)
    assert sample["text"] == wanted != ""
    assert sample_texts(student, held_out, tokenizer, 3)[0] == sample


def test_a_run_records_samples_and_trains_the_same(distil: Distil, tmp_path: Path) -> None:
    stream = io.StringIO()
    distil(to="with", steps=3, eval_every=2, samples=2, stream=stream)
    distil(to="without", steps=3, eval_every=2)
    events = lines(tmp_path / "with", "samples")
    assert [event["step"] for event in events] == [0, 2, 3]
    assert all(len(event["samples"]) == 2 for event in events)
    assert {sample["prompt"] for sample in events[0]["samples"]} == {s["prompt"] for s in events[2]["samples"]}
    assert weights(tmp_path / "with" / "model.apr") == weights(tmp_path / "without" / "model.apr")
    assert lines(tmp_path / "without", "samples") == []
    opening = stream.getvalue()
    assert re.search(r"^  lr +0\.003 +\S+$", opening, re.MULTILINE)
    assert "beta1" not in opening.partition("configuration")[0], "what is at its default is only counted"
    assert np.isfinite(lines(tmp_path / "with")[-1]["loss"])
