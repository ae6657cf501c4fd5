"""On-policy distillation: continuations are those of the whole network and of the student as it is, and are learned."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import train_runs
from train_models import Maker, load
from train_runs import lines, weights

from aprfmt.errors import NotFoundError, RefusedError, UsageError
from aprfmt.texts.encoding import HIDDEN, Encoder
from aprfmt.texts.records import Chat
from aprtrain import sampler as sampler_module
from aprtrain.config_sources import build
from aprtrain.network.decoder import Decoder, soft_cap
from aprtrain.network.weights import open_network
from aprtrain.sampler import Continuations, Sampler, continue_prompts, read_prompts

Distil = Callable[..., dict[str, Any]]
CASES = [
    "llama/biases",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "mistral/window",
    "smollm3",
    "phi3/longrope",
    "cohere2",
    "lfm2",
    "gemma4_text/sharing",
    "qwen3_5_text/heads",
    "qwen3_next",
]


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    return Maker(tmp_path_factory.mktemp("sampled"))


def greedy(decoder: Decoder, prompt: list[int], n: int, end: int) -> list[int]:
    """Without a cache: the whole text again for each token, as a document of its final length."""
    found: list[int] = []
    with torch.no_grad():
        while len(found) < n and end not in found:
            ids = torch.tensor([prompt + found + [end] * (n - len(found))])
            hidden = decoder(ids)[0, len(prompt) + len(found) - 1]
            logits = soft_cap(decoder.head_weight.float() @ hidden.float(), decoder.shape.logit_softcap)
            found.append(int(logits.argmax()))
    return found


@pytest.mark.parametrize("case", CASES)
def test_continuations_are_those_of_the_whole_network(maker: Maker, case: str) -> None:
    """Prompts of several lengths in one batch: nothing of another row or of the padding is seen."""
    decoder = load(maker(case).folder)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(5, 900, n).astype(np.uint32) for n in (1, 9, 4, 17)]
    found = continue_prompts(decoder, prompts, 12, 2, torch.Generator(), temperature=0)
    for prompt, new in zip(prompts, found, strict=True):
        assert new == greedy(decoder, prompt.tolist(), 12, 2)


def test_sampling_gives_compiled_blocks_back(maker: Maker) -> None:
    """A block compiled for the shapes of training is not called with those of sampling."""
    decoder = load(maker("llama/biases").folder)

    def compiled(*_: Any) -> Any:
        raise AssertionError("called with the shapes of sampling")

    for block in decoder.layers:
        block.function = compiled
    continue_prompts(decoder, [np.array([7, 8], np.uint32)], 3, 2, torch.Generator())
    assert all(block.function is compiled for block in decoder.layers)


def test_the_last_pass_has_the_rows_of_the_others(teacher_file: Path, prompts: Path) -> None:
    """Compiled blocks get one shape; a step of several processes has the same number of passes in each."""
    with open_network(teacher_file) as network:
        encoder = Encoder(network.tokenizer)
    given = read_prompts(prompts, encoder, "text", 20, lambda line: None)
    for world, passes in ((1, None), (2, 3)):
        sampler = Sampler(load(teacher_file), given, 64, 6, 2, 12, encoder.separator, encoder.begin, 1, 0, world)
        batches = sampler.batches(0)
        assert {len(batch.windows) for batch in batches} == {2}
        assert passes is None or len(batches) == passes
        assert sum(int((batch.labels_NT >= 0).sum()) for batch in batches) == batches[0].n_valid


def test_prompts_are_batched_by_length_within_the_memory_of_the_cache(
    teacher_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps its own continuation, in the order of the prompts."""
    student, sizes = load(teacher_file), list[list[int]]()

    def continued(_: object, some: list[Any], *more: object) -> list[list[int]]:
        sizes.append([len(ids) for ids in some])
        return [[int(ids[0])] * 2 for ids in some]

    monkeypatch.setattr(sampler_module, "continue_prompts", continued)
    s = student.shape
    position = s.cached_values * 4 * len(student.blocks)
    monkeypatch.setattr(sampler_module, "_CACHE_BYTES", 3 * position * 12)
    given = [np.full(n, 10 + n, np.uint32) for n in (2, 10, 4, 1, 10)]
    batches = Sampler(student, given, 60, 1, 1, 2, 2, None, seed=1).batches(0)
    assert sizes == [[10, 10, 10], [4, 2, 1, 1]]
    runs = [(key, len(list(run))) for key, run in itertools.groupby(batches[0].tokens_NT[0].tolist())]
    made = [(key, n) for key, n in runs if key > 10]
    inputs = sorted((10 + n, n + 1) for part in sizes for n in part)  # the last token of each is a label only
    assert sorted(made) == inputs != made


def test_tokens_are_drawn_by_their_probabilities(maker: Maker) -> None:
    decoder = load(maker("llama/biases").folder)
    prompt = np.array([7, 8, 9], np.uint32)
    generator = torch.Generator().manual_seed(1)
    drawn = [row[0] for row in continue_prompts(decoder, [prompt] * 4000, 1, 2, generator)]
    with torch.no_grad():
        p = (decoder(torch.tensor([[7, 8, 9]]))[0, -1] @ decoder.head_weight.T).softmax(0)
    counts = torch.bincount(torch.tensor(drawn), minlength=len(p)) / 4000
    assert float((counts - p).abs().sum()) < 2.5 * float((p * (1 - p) / 4000).sqrt().sum())


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    words = [["the", "cat"], ["a", "dog", "ran"], ["her", "hand"], ["the", "mat"]]
    path.write_text("".join(json.dumps({"text": " ".join(some)}) + "\n" for some in words))
    return path


def on_policy(distil: Distil, prompts: Path, to: str, **given: Any) -> dict[str, Any]:
    how = {"on_policy": 0.5, "prompts": str(prompts), "new_tokens": 12, "loss": "reverse", "steps": 6}
    return distil(to, **{**how, **given})


@pytest.mark.parametrize(("every", "ages"), [(1, [0, 0, 0]), (2, [0, 2, 0])])
def test_half_of_the_steps_learn_from_the_students_own_words(
    distil: Distil, prompts: Path, tmp_path: Path, every: int, ages: list[int]
) -> None:
    """A run that is resumed between a sampling and the last step that learns from it learns the same."""
    summary = on_policy(distil, prompts, "run", sample_every=every)
    assert summary["last"]["kl"] < summary["first"]["kl"]
    steps = lines(tmp_path / "run")
    own = [step for step in steps if "sampled_tokens" in step]
    assert [step["step"] for step in own] == [2, 4, 6]
    assert [step["sampler_age"] for step in own] == ages
    for step in own:
        assert 0 < step["labels"] <= step["sampled_tokens"]
        assert ("sampler_seconds" in step) == (step["sampler_age"] == 0)
    group = own[: ages.index(0, 1)]
    assert 0 < group[0]["sampler_share"] <= 1
    drawn = group[0]["sampler_tokens_per_s"] * group[0]["sampler_seconds"]
    assert sum(step["sampled_tokens"] for step in group) == pytest.approx(drawn)
    on_policy(distil, prompts, "part", steps=3, total_steps=6, sample_every=every)
    on_policy(distil, prompts, "part", steps=6, total_steps=6, sample_every=every, resume=True)
    assert weights(tmp_path / "run/model.apr") == weights(tmp_path / "part/model.apr")


def test_steps_that_are_sampled_together_learn_from_prompts_of_their_own(teacher_file: Path, prompts: Path) -> None:
    with open_network(teacher_file) as network:
        encoder = Encoder(network.tokenizer)
    given = read_prompts(prompts, encoder, "text", 20, lambda line: None)
    student = load(teacher_file)

    def starts(sampler: Sampler, steps: list[int]) -> list[list[int]]:
        """The hidden tokens, prompts, of each step's rows."""
        return [batch.tokens_NT[:, 0].tolist() for step in steps for batch in sampler.batches(step)]

    ahead, alone = (
        Sampler(student, given, 32, 4, 2, 12, encoder.separator, encoder.begin, 1, 0, 1, 0.75, every, end)
        for every, end in ((3, 6), (1, 1 << 62))
    )
    due = [step for step in range(8) if ahead.is_due(step)]
    assert due == [1, 2, 3, 5, 6, 7]
    assert starts(ahead, [1]) == starts(alone, [1])
    assert [*ahead.drawn.of_step] == [1, 2, 3]
    assert starts(ahead, [2, 3]) == starts(alone, [2, 3])
    assert ahead.drawn.at == 1
    ahead.batches(5)
    assert [*ahead.drawn.of_step] == [5]


def test_continuations_of_a_checkpoint_are_checked() -> None:
    drawn = Continuations(3, {4: [[1, 2], []], 6: [[5]]})
    assert Continuations.from_json(json.loads(json.dumps(drawn.to_json()))) == drawn
    for value in (None, 3, {}, {"at": 1}, {"at": 1, "of_step": 3}, {"at": 1, "of_step": {"a": []}}):
        with pytest.raises(ValueError, match=r"."):
            Continuations.from_json(value)


def test_the_student_samples_as_it_is_and_only_its_tokens_are_labels(teacher_file: Path, prompts: Path) -> None:
    with open_network(teacher_file) as network:
        encoder = Encoder(network.tokenizer)
    given = read_prompts(prompts, encoder, "text", 20, lambda line: None)
    student = load(teacher_file)
    sampler = Sampler(student, given, 32, 4, 2, 12, encoder.separator, encoder.begin, seed=1)
    batches = sampler.batches(0)
    assert [len(batch.windows) for batch in batches] in ([2, 1], [2, 2])
    n = sum(int((batch.labels_NT >= 0).sum()) for batch in batches)
    assert n == batches[0].n_valid <= sampler.n_tokens
    again = sampler.batches(0)
    assert all(torch.equal(a.tokens_NT, b.tokens_NT) for a, b in zip(batches, again, strict=True))
    assert not torch.equal(sampler.batches(1)[0].tokens_NT, batches[0].tokens_NT)
    with torch.no_grad():
        student.embed.zero_()
    assert not torch.equal(sampler.batches(0)[0].tokens_NT, batches[0].tokens_NT)


def test_prompts_are_read_before_the_data(distil: Distil, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        distil(on_policy=0.5, prompts=str(tmp_path / "absent.jsonl"), new_tokens=8)
    assert not (tmp_path / "run/tokens").exists()


def test_prompts_beyond_the_sequence_are_left_out_and_counted(teacher_file: Path, tmp_path: Path) -> None:
    with open_network(teacher_file) as network:
        encoder = Encoder(network.tokenizer)
    talk: list[dict[str, object]] = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    path, said = tmp_path / "p.jsonl", list[str]()
    path.write_text(json.dumps({"messages": talk}) + "\n" + json.dumps({"text": "the cat " * 50}) + "\n")
    found = read_prompts(path, encoder, "text", 60, said.append)
    assert len(found) == 1
    whole = encoder.encode([encoder.render(Chat(talk))])[0] & ~HIDDEN
    assert whole[: len(found[0])].tolist() == found[0].tolist()
    assert len(encoder.plain("the cat")) < len(found[0]) < len(whole)
    assert any("1 of 2 prompts" in line for line in said)
    with pytest.raises(RefusedError, match="none of 2 prompts"):
        read_prompts(path, encoder, "text", 2, said.append)
    path.write_text('{"text": " "}\n')
    with pytest.raises(RefusedError, match="no prompts in it") as caught:
        read_prompts(path, encoder, "text", 60, said.append)
    assert "conversations" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"on_policy": 0.5}, "given together"),
        ({"prompts": "p"}, "given together"),
        ({"on_policy": 0.5, "prompts": "p", "new_tokens": 5000}, "--new-tokens 5000 is not less than --seq-len"),
        ({"on_policy": 0.5, "prompts": "p", "shard": "weights"}, "mutually exclusive"),
        ({"on_policy": 0.5, "prompts": "p", "teacher": None, "teacher_logprobs": "x"}, "needs a loaded teacher"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, Any], words: str) -> None:
    base = {"teacher": "t", "student": "s", "data": "d", "output": "o", "steps": 1}
    with pytest.raises(UsageError, match=words):
        build("distill", base | change)
    assert train_runs.SIZES["device"] == "cpu"
