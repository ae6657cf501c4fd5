"""What a plan tells, without a device and without writing anything."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from train_corpora import shape_of_config, student_alone

from aprfmt.errors import NotFoundError, RefusedError
from aprfmt.texts.corpus import prepare
from aprfmt.texts.summary import DataJson
from aprfmt.tokenizer.alignment import SharedVocabulary
from aprtrain import budget
from aprtrain.budget import choose_pass, plan
from aprtrain.config import Config, digest_of
from aprtrain.loss.head import plain_bytes
from aprtrain.memory import memory_plan, total
from aprtrain.network.weights import open_network
from aprtrain.run import run


def test_the_plan_touches_no_device_and_names_what_it_is_made_of(
    corpus_file: Path, teacher_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden() -> bool:
        raise AssertionError("the plan asked for a GPU")

    monkeypatch.setattr(torch.cuda, "is_available", forbidden)
    config = train_runs.options(
        "distill",
        corpus_file,
        tmp_path / "o",
        teacher=str(teacher_file),
        student_init="layers:1",
        steps=10,
        device="cuda",
    )
    body = plan("distill", config)
    assert body["teacher"] is not None
    assert body["vocabulary"] is not None
    with open_network(teacher_file) as network:
        assert body["teacher"]["parameters"] == network.shape.n_params
    assert body["memory_bytes"] == sum(row["bytes"] for row in body["memory"])
    assert body["vocabulary"]["n_real"] == 300
    assert body["tokens"] == 10 * 128
    assert body["digest"] == digest_of(body["config"])
    assert not (tmp_path / "o").exists()


def test_the_plan_on_the_cpu_has_the_digest_of_the_run(corpus_file: Path, teacher_file: Path, tmp_path: Path) -> None:
    models = {"teacher": str(teacher_file), "student_init": "layers:1"}
    config = train_runs.options("distill", corpus_file, tmp_path / "o", steps=2, micro_tokens=0, **models)
    planned = plan("distill", config)
    done = run("distill", config, stream=None)
    assert (planned["config"], planned["digest"]) == (done["config"], done["digest"])


def test_the_plan_counts_the_teachers_head_where_the_loss_takes_a_copy(
    corpus_file: Path, teacher_file: Path, tmp_path: Path
) -> None:
    """In float16 always; a head that is decoded by every use is a copy even in bf16."""
    given: dict[str, Any] = {"teacher": str(teacher_file), "student_init": "layers:0,", "steps": 1}
    found = {}
    for residency in ("bf16", "q4k"):
        for logits in ("fp16", "fp32"):
            how = {**given, "teacher_residency": residency, "logits": logits, "device": "cuda"}
            body = plan("distill", train_runs.options("distill", corpus_file, tmp_path / "o", **how))
            rows = {row["name"]: row["bytes"] for row in body["memory"]}
            found[residency, logits] = rows["teacher: head for the loss"]
    copy = 2 * 300 * 64
    assert list(found.values()) == [copy, 0, copy, copy]


def test_the_plan_on_the_cpu_counts_libraries_the_copy_of_a_checkpoint_and_the_buffers_of_the_loss(
    corpus_file: Path, teacher_file: Path, tmp_path: Path
) -> None:
    models: dict[str, Any] = {"teacher": str(teacher_file), "student_init": "layers:0,", "steps": 1, "micro_tokens": 64}

    def rows(output: Path | None = tmp_path / "o", **given: Any) -> dict[str, int]:
        body = plan("distill", train_runs.options("distill", corpus_file, output, **{**models, **given}))
        found = {row["name"]: row["bytes"] for row in body["memory"]}
        found["parameters"] = body["student"]["parameters"]
        return found

    wide, half, smoke = rows(), rows(save_dtype="bf16"), rows(None, smoke=1)
    assert wide["checkpoint being written"] == 16 * wide["parameters"]
    assert half["checkpoint being written"] == 14 * wide["parameters"]
    assert smoke["checkpoint being written"] == 0
    assert wide["Python and libraries"] >= 400 << 20
    vocabulary = SharedVocabulary(300, 300, 300)
    assert wide["loss head"] == plain_bytes(vocabulary, 64, "forward") + 2 * 64 * 64 * 4


def test_a_pass_takes_what_the_device_has_memory_for() -> None:
    shape = shape_of_config(
        model_type="qwen2", num_hidden_layers=24, hidden_size=896, num_attention_heads=14, num_key_value_heads=2,
        intermediate_size=4864, vocab_size=151_936, rms_norm_eps=1e-6, tie_word_embeddings=True,
    )  # fmt: skip
    pair, gpu = student_alone(shape), torch.device("cuda")

    def chosen(gib: int | None, processes: int = 1, saved: int = 0, **given: Any) -> int:
        n_bytes = None if gib is None else gib << 30
        return choose_pass(Config(**given), pair, gpu, n_bytes, processes=processes, saved=saved).micro_tokens

    assert [chosen(gib) for gib in (141, 32, 24, 1, None)] == [32768, 16384, 8192, 2048, 16384]
    assert chosen(141, processes=4) == 8192  # no more than a process has of an update
    assert chosen(1, seq_len=4096) == 4096
    assert chosen(141, seq_len=3000, tokens_per_step=300_000) == 30_000
    assert chosen(141, micro_tokens=2048) == chosen(141, saved=2048) == 2048
    need = total(memory_plan(Config(micro_tokens=32768), pair, gpu))
    assert [choose_pass(Config(), pair, gpu, int(need / share)).micro_tokens for share in (0.84, 0.86)] == [
        32768,
        16384,
    ]
    for tokens, gib in ((32768, 141), (16384, 32), (8192, 24)):
        rows = memory_plan(Config(micro_tokens=tokens), pair, gpu)
        assert total(rows) <= 0.85 * (gib << 30)


def test_flops_of_a_known_network() -> None:
    """2 x 494 M - embedding for Qwen2.5-0.5B: 2.15 GFLOP forward and backward in the backbone, 0.82 in the head."""
    shape = shape_of_config(
        model_type="qwen2", num_hidden_layers=24, hidden_size=896, num_attention_heads=14, num_key_value_heads=2,
        intermediate_size=4864, vocab_size=151_936, rms_norm_eps=1e-6, tie_word_embeddings=True,
    )  # fmt: skip
    assert shape.n_params == 494_032_768
    work = budget.flops_of(Config(seq_len=2048), student_alone(shape))
    assert work.teacher == 0
    assert work.student / 1e9 == pytest.approx(2.15 + 0.82 + 0.26, rel=0.02)


def test_the_plan_says_what_the_data_are(corpus_file: Path, teacher_file: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"teacher": str(teacher_file), "student_init": "layers:1", "steps": 2}

    def data(path: Path) -> DataJson:
        return plan("distill", train_runs.options("distill", path, None, smoke=1, **given))["data"]

    size = corpus_file.stat().st_size
    found = data(corpus_file)
    (source,) = found["sources"]
    assert (source["files"], source["bytes"], source["documents"], found["left_out"]) == (1, size, 160, {})
    assert source["tokens"] == found["tokens"] == found["learned"] > 10_000
    assert found["passes"] == pytest.approx(2 * 128 / found["tokens"])
    assert found["lasts"]
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "b.py").write_text("x = 2")
    (tmp_path / "a.so").touch()
    assert data(tmp_path)["left_out"] == {"files that are not source code": 1}
    with open_network(teacher_file) as network:
        corpus = prepare([corpus_file], network.tokenizer, tmp_path / "tokens")
    assert data(tmp_path / "tokens")["tokens"] == len(corpus.train.tokens)
    with pytest.raises(NotFoundError):
        data(tmp_path / "nowhere")


def test_the_plan_refuses_what_the_run_would(corpus_file: Path, teacher_file: Path, tmp_path: Path) -> None:
    def refusal(data: Path, output: Path | None = None, **given: Any) -> str:
        models = {"teacher": str(teacher_file), "student_init": "layers:1"}
        how = {"smoke": 1} if output is None else {"steps": 2}
        sources = given.pop("mixed", (str(data),))
        config = replace(train_runs.options("distill", data, output, **{**models, **how, **given}), data=sources)
        with pytest.raises(RefusedError) as caught:
            plan("distill", config)
        return caught.value.message

    few, one, none = (train_runs.write_corpus(tmp_path / f"{n}.jsonl", documents=n, words=3) for n in (2, 1, 0))
    assert refusal(none) == "no training documents: 0 read"
    assert refusal(one) == "no training documents: 1 read"
    mixed = refusal(corpus_file, mixed=(f"{corpus_file}:1", f"{few}:1"), seq_len=64)
    assert mixed.startswith("2.jsonl has ")
    assert mixed.endswith("fewer than a sequence of 64")
    mixed = refusal(corpus_file, tmp_path / "o", mixed=(f"{corpus_file}:3", f"{few}:1"), seq_len=4, repeat=False)
    assert re.fullmatch(r"2 steps need 64 tokens of 2\.jsonl, but the data has \d+: \d\.\d epochs", mixed)
    assert "no checkpoint to resume from" in refusal(corpus_file, tmp_path / "absent", resume=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ckpt-step-000004.state").touch()
    assert "no checkpoint of step 3" in refusal(corpus_file, tmp_path / "run", resume=3)
    again = {"teacher": str(teacher_file), "student_init": "layers:1", "steps": 2, "resume": "auto"}
    assert plan("distill", train_runs.options("distill", corpus_file, tmp_path / "absent", **again))["data"]["tokens"]
