"""Conversations: what of them is learned, in shards and windows, and what a run makes of them, against transformers."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tiny_models import write_byte_tokenizer
from torch import Tensor
from torch.nn import functional
from train_corpora import byte_tokenizer, functions
from train_runs import lines

import aprfmt
from aprfmt.errors import AprError, CorruptError, LimitError, RefusedError, UnsupportedError
from aprfmt.running.evaluation import read_part
from aprfmt.texts.corpus import prepare
from aprfmt.texts.encoding import HIDDEN, Encoder, _hide
from aprfmt.texts.records import Chat, Marked, RecordReader
from aprfmt.texts.sequences import IGNORED, Windows, pieces_of
from aprfmt.texts.shards import Corpus, open_corpus, part_of, read_header
from aprfmt.texts.sources import SourceFile
from aprfmt.tokenizer.chat import ChatTemplate, PrefixError
from aprtrain.data.batches import shuffle_index
from aprtrain.evaluate import score

HEAD = (
    "{% if tools %}<|im_start|>tools {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
)
TAIL = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = HEAD + "{{ m.content }}<|im_end|>\n" + TAIL
MARKED = (
    HEAD + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}" + TAIL
)
TOOLS = [{"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}]

Messages = list[dict[str, object]]


def tokenizer(template: str = PLAIN) -> Any:
    return replace(byte_tokenizer(), chat_template=template)


def talks(n: int, seed: int = 0) -> list[Messages]:
    """Conversations of one to four exchanges, of unequal lengths, some with a system message."""
    rng = random.Random(seed)
    words = iter(functions(12 * n, seed))

    def text() -> str:
        return " ".join(next(words)[: rng.randrange(5, 60)] for _ in range(1)).strip() + rng.choice(
            ["", "?", " 你好", "é"]
        )

    found: list[Messages] = []
    for _ in range(n):
        system: Messages = [{"role": "system", "content": text()}] if rng.random() < 0.3 else []
        exchanges: Messages = []
        for _ in range(rng.randrange(1, 5)):
            exchanges += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
        found.append(system + exchanges)
    return found


def write(path: Path, records: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def encoded(encoder: Encoder, messages: Messages, **more: Any) -> tuple[list[int], list[int]]:
    """Ids, and 1 for each that is learned."""
    ids = encoder.encode([encoder.render(Chat(messages, **more))])[0]
    return (ids & ~HIDDEN).tolist(), (ids < HIDDEN).astype(int).tolist()


# --- what is learned ---


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_ids_and_masks_are_those_of_transformers(tmp_path: Path, template: str) -> None:
    transformers = pytest.importorskip("transformers")
    write_byte_tokenizer(tmp_path)
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    encoder = Encoder(tokenizer(template))
    for messages in talks(40):
        for tools in (None, TOOLS):
            wanted = peer.apply_chat_template(
                messages, tools=tools, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
            )
            assert encoded(encoder, messages, tools=tools) == (wanted["input_ids"], wanted["assistant_masks"])


def test_answers_are_what_a_template_with_marks_says() -> None:
    plain, marked = ChatTemplate(PLAIN), ChatTemplate(MARKED)
    for messages in talks(30, seed=1):
        text, spans = plain.render_answers(messages)
        assert (text, spans) == marked.render_answers(messages)
        said = [f"{m['content']}<|im_end|>" for m in messages if m["role"] == "assistant"]
        assert [text[start:end] for start, end in spans] == said
        assert [text[a:b] for a, b in plain.render_answers(messages, first=len(messages) - 1)[1]] == said[-1:]
        assert [text[a:b] for a, b in marked.render_answers(messages, first=len(messages) - 1)[1]] == said[-1:]


def test_marks_of_a_prompt_are_counted_not_measured() -> None:
    """The template writes the prompt shorter where it stands alone."""
    marked = "{% for m in messages %}{% if m.role == 'user' %}({{ m.content }}){% else %}{% generation %}" + (
        "{{ m.content * 3 if messages | length > 3 else m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    messages: Messages = [
        {"role": role, "content": text} for role, text in (("assistant", "hello"), ("assistant", "you"), ("user", "b"))
    ]
    text, spans = ChatTemplate(marked).render_answers([*messages, {"role": "assistant", "content": "end"}], first=2)
    assert [text[a:b] for a, b in spans] == ["endendend"]


def test_a_template_that_rewrites_what_was_said_is_refused_by_name() -> None:
    forgets = (
        "{% for m in messages %}{{ m.role }}: "
        "{{ m.content if loop.last or m.role == 'user' else m.content[:3] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    ChatTemplate(forgets).render_answers(talks(1)[0][-2:])
    with pytest.raises(RefusedError, match="renders earlier messages differently") as caught:
        ChatTemplate(forgets, path="m.gguf").render_answers([*talks(1)[0][-2:], *talks(1)[0][-2:]])
    assert caught.value.exit_code == 5
    assert "{% generation %}" in str(caught.value.hint)
    assert caught.value.path == "m.gguf"


def test_thoughts_before_the_last_answer_alone_do_no_harm() -> None:
    """As Qwen3 writes it; what stands in an earlier answer and is left out is refused."""
    template = PLAIN.replace(
        "{{ m.content }}", "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
        "{{ m.content.split('</think>')[-1] }}",
    )  # fmt: skip
    first, second = talks(1)[0][-2:], talks(1, seed=2)[0][-2:]
    text, spans = ChatTemplate(template).render_answers([*first, *second])
    said = [f"{first[1]['content']}<|im_end|>", f"<think>\n\n</think>\n\n{second[1]['content']}<|im_end|>"]
    assert [text[a:b] for a, b in spans] == said
    with pytest.raises(RefusedError, match="message 2 cannot be located"):
        ChatTemplate(template).render_answers([first[0], {**first[1], "content": "<think>hm</think>so"}, *second])


def test_space_around_an_answer_does_no_harm() -> None:
    """The template writes it as it is, and thoughts before the last answer alone."""
    template = PLAIN.replace(
        "{{ m.content }}",
        "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}",
    )
    for first, last in ((" so", "it"), ("so \n", "it"), ("so", "it\n"), ("\nso", "  it  ")):
        messages: Messages = [
            {"role": role, "content": text}
            for role, text in (("user", "a"), ("assistant", first), ("user", "b"), ("assistant", last))
        ]
        text, spans = ChatTemplate(template).render_answers(messages)
        assert [text[a:b] for a, b in spans] == [f"{first}<|im_end|>", f"<think>\n\n</think>\n\n{last}<|im_end|>"]


def test_a_conversation_that_cannot_be_told_is_left_out_where_others_can(tmp_path: Path) -> None:
    template = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}")
    said: Messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>hm</think>so"}]
    one, two = {"messages": said}, {"messages": [*said, *said]}
    found, reader = read(tmp_path / "a.jsonl", [two] * 3 + [one], template)
    assert len(found) == 1
    assert reader.skipped == {"conversations whose answers cannot be located": 3}
    for records, more in (([two] * 3, {}), ([two] * 300, {}), ([one, two], {"strict": True})):
        with pytest.raises(PrefixError, match="message 2 cannot be located"):
            read(tmp_path / "a.jsonl", records, template, **more)


def test_a_template_that_always_asks_for_an_answer_is_refused() -> None:
    """As Llama 3's first one; else the beginning of another answer would be learned."""
    always = PLAIN.replace("{% if add_generation_prompt %}", "{% if true %}")
    with pytest.raises(RefusedError, match="cannot be located"):
        ChatTemplate(always).render_answers(talks(1)[0][-2:])
    never = "{% for m in messages %}{{ '[' + m.content + ']' if m.role == 'user' else m.content + '</s>' }}{% endfor %}"
    text, spans = ChatTemplate(never).render_answers([*talks(1)[0][-2:], *talks(1)[0][-2:]])
    assert [text[a:b] for a, b in spans] == [f"{talks(1)[0][-1]['content']}</s>"] * 2


def test_a_token_that_reaches_into_an_answer_is_learned() -> None:
    """Characters 4 to 8 and 10 to 12 are learned; a token on their border has some of both."""
    offsets = [(0, 3), (3, 5), (5, 7), (7, 9), (9, 10), (10, 10), (10, 12), (12, 13)]
    found = _hide(cast(Any, SimpleNamespace(ids=[*range(8)], places=offsets)), [(4, 8), (10, 12)])
    assert [int(i) for i in found if i < HIDDEN] == [1, 2, 3, 6]
    assert (found & ~HIDDEN).tolist() == [*range(8)]


def test_a_conversation_has_one_end() -> None:
    messages = talks(1)[0]
    bare = HEAD + "{{ m.content }}\n" + TAIL
    ids, learned = encoded(Encoder(tokenizer()), messages)
    end = byte_tokenizer().special["eos"]
    assert ids.count(end) == len(messages)
    assert ids[-2] == end != ids[-1]
    ids, learned = encoded(Encoder(tokenizer(bare)), messages)
    assert (ids.count(end), ids[-1], learned[-1]) == (1, end, 1)
    text = Encoder(tokenizer()).encode(["fox<|im_end|>", "fox"])
    assert text[0].tolist() == text[1].tolist()


# --- records ---


def read(
    path: Path, records: Sequence[object], template: str = PLAIN, **options: Any
) -> tuple[list[str], RecordReader]:
    encoder = Encoder(tokenizer(template))
    reader = RecordReader(separator=encoder.separator, render=encoder.render, **options)
    file = SourceFile(write(path, records), "a.jsonl", "jsonl")
    texts = []
    for document in reader.documents(file):
        text, spans = document.text, document.learned  # type: ignore[union-attr]
        edges = [0, *(place for span in spans for place in span), len(text)]
        pieces = [text[a:b] for a, b in pairwise(edges)]
        texts.append("".join(f"[{piece}]" if i % 2 else piece for i, piece in enumerate(pieces)))
    return texts, reader


def test_the_forms_of_conversations(tmp_path: Path) -> None:
    user, assistant = "<|im_start|>user\n", "<|im_start|>assistant\n"
    usual = f"{user}hi<|im_end|>\n{assistant}[you<|im_end|>]\n"
    asked, said = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}
    records: list[object] = [
        {"messages": [asked, said]},
        {"prompt": "hi", "completion": "you"},
        {"prompt": [asked], "completion": [said]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "you"}]},
        {"messages": [asked, {**said, "content": [{"type": "text", "text": "you"}], "tool_calls": None}]},
    ]
    found, reader = read(tmp_path / "a.jsonl", records)
    assert found == [usual] * len(records)
    assert not +reader.skipped
    found, _ = read(tmp_path / "a.jsonl", [{"prompt": [asked, said, asked], "completion": "you"}])
    assert found == [usual.replace("[", "").replace("]", "") + usual]
    for tools in (TOOLS, json.dumps(TOOLS)):
        found, _ = read(tmp_path / "a.jsonl", [{"messages": [asked, said], "tools": tools}])
        assert found == [f"<|im_start|>tools {json.dumps(TOOLS)}<|im_end|>\n{usual}"]
    found, _ = read(tmp_path / "a.jsonl", [{"talk": [asked, said]}], text_field="talk")
    assert found == [usual]


def test_bad_conversations_are_counted_and_a_template_says_no(tmp_path: Path) -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + PLAIN
    good = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]}
    records: list[object] = [
        good,
        {"messages": [{"role": "system", "content": "s"}, *good["messages"]]},
        {"messages": good["messages"][:1]},
        {"messages": "hi"},
        {"messages": [{"content": "no role"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}, {"text": "see"}]}, good["messages"][1]]},
        {**good, "tools": "{"},
        {**good, "tools": "[" * 100_000},
        good,
    ]
    told: list[str] = []
    found, reader = read(tmp_path / "a.jsonl", records, template, log=told.append)
    assert len(found) == 2
    assert reader.skipped == {
        "conversations that the chat template rejects": 1,
        "conversations without an answer": 1,
        "records without 'text'": 1,
        "conversations in an unknown format": 5,
    }
    assert any("line 2" in line and "user first" in line for line in told)
    with pytest.raises(CorruptError, match=r"line 2 .*user first"):
        read(tmp_path / "a.jsonl", records, template, strict=True)


def test_a_conversation_too_long_to_render_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[object] = [
        {"prompt": "x" * n, "completion": "y"} for n in (10, 3000, 20)
    ]  # fmt: skip
    monkeypatch.setattr("aprfmt.texts.records.MAX_CHAT_CHARS", 4000)
    found, reader = read(tmp_path / "a.jsonl", records)
    assert len(found) == 2
    assert reader.skipped == {"conversations too long to render": 1}
    endless = PLAIN + "{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}"
    with pytest.raises(LimitError, match=r"line 1: .*more than") as caught:
        read(tmp_path / "a.jsonl", records, endless)
    assert caught.value.path == str(tmp_path / "a.jsonl")


def test_a_template_that_cannot_be_parsed_is_refused_at_the_first_conversation(tmp_path: Path) -> None:
    talk, text = {"prompt": "hi", "completion": "you"}, {"text": "plain"}
    told: list[str] = []
    with pytest.raises(UnsupportedError, match=r"the chat template cannot be rendered: .* at line 5") as caught:
        read(tmp_path / "a.jsonl", [talk] * 3, PLAIN + "{% if %}", log=told.append)
    assert not told
    assert "--raw" not in str(caught.value.hint)
    reader = RecordReader(separator=0, render=Encoder(tokenizer("{% if %}")).render)
    assert [*reader.documents(SourceFile(write(tmp_path / "b.jsonl", [text]), "b.jsonl", "jsonl"))] == ["plain"]


def test_a_model_without_a_template_reads_no_conversations(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"messages": messages} for messages in talks(5)])
    with pytest.raises(RefusedError, match="no chat template") as caught:
        prepare([path], replace(byte_tokenizer(), chat_template=None), tmp_path / "data")
    assert "--text-field" in str(caught.value.hint)


# --- shards and windows ---


def make(tmp_path: Path, template: str = PLAIN, **options: Any) -> Corpus:
    records: list[object] = [{"messages": messages} for messages in talks(60, seed=3)]
    records[20:20] = [{"text": text} for text in functions(10)]
    return prepare([write(tmp_path / "a.jsonl", records)], tokenizer(template), tmp_path / "data", **options)


@pytest.mark.parametrize("seq_len", [7, 16, 64, 300])
def test_labels_are_those_of_the_answers_and_counted_so(tmp_path: Path, seq_len: int) -> None:
    """A conversation's labels are those among its first tokens, a text's are all; each piece is of one document."""
    encoder = Encoder(tokenizer())
    corpus = make(tmp_path, held_out_paths=[write(tmp_path / "b.jsonl", [{"text": "held out"}])])
    documents: list[Any] = [encoder.render(Chat(messages)) for messages in talks(60, seed=3)]
    documents[20:20] = functions(10)
    wanted, dropped = Counter[tuple[int, ...]](), 0
    for document, ids in zip(documents, encoder.encode(documents), strict=True):
        labels = [IGNORED if i >= HIDDEN else int(i) for i in ids[1:]]
        is_chat = isinstance(document, Marked)
        dropped += sum(label != IGNORED for label in labels[seq_len:]) if is_chat else 0
        pieces = range(0, len(labels), seq_len)[: 1 if is_chat else None]
        wanted.update(tuple(label for label in labels[i : i + seq_len] if label != IGNORED) for i in pieces)
    windows = Windows(corpus.train, seq_len, corpus.separator)
    counts = windows.label_counts(np.arange(len(windows)))
    found: Counter[tuple[int, ...]] = Counter()
    for i in range(len(windows)):
        rows = windows.rows([i])
        assert counts[i] == windows.n_labels([i]) == np.count_nonzero(rows.labels_NT != IGNORED)
        found.update(tuple(piece.labels_P.tolist()) for piece in pieces_of(rows, 0))
    del wanted[()]
    assert found == wanted
    assert windows.n_dropped == dropped


def test_prompts_end_with_the_last_label_of_a_piece(tmp_path: Path) -> None:
    corpus = make(tmp_path)
    windows, n_labels = Windows(corpus.train, 64, corpus.separator), 0
    for i in range(len(windows)):
        rows = windows.rows([i])
        for piece in pieces_of(rows, 0):
            n_labels += len(piece.places_P)
            assert len(piece.prompt) == piece.places_P[-1] - piece.start + 2
            assert [piece.prompt[p - piece.start + 1] for p in piece.places_P] == rows.labels_NT[
                0, piece.places_P
            ].tolist()
    assert n_labels == windows.n_labels(range(len(windows)))


def test_masks_are_in_the_shards_and_checked(tmp_path: Path) -> None:
    corpus = make(tmp_path)
    encoder = Encoder(tokenizer())
    again = open_corpus(tmp_path / "data", encoder.digest).train
    assert len(again.masks) > 60
    assert again.n_masked == corpus.train.n_masked == corpus.header["parts"]["train"]["masked"]
    file = tmp_path / "data/train.masks"
    data = bytearray(file.read_bytes())
    data[9] ^= 1
    file.write_bytes(data)
    with pytest.raises(AprError, match=r"train\.masks"):
        open_corpus(tmp_path / "data", encoder.digest)
    told: list[str] = []
    assert make(tmp_path, log=told.append).train.n_masked == again.n_masked
    assert "damaged" in told[0]
    told.clear()
    make(tmp_path, log=told.append)
    assert "up to date" in told[0]
    make(tmp_path, MARKED, log=told.append)
    assert "tokenizing" in told[-2]  # another template: other texts


def test_another_template_makes_other_data_of_conversations(tmp_path: Path) -> None:
    corpus = make(tmp_path)
    assert make(tmp_path, wanted=corpus.key).key == corpus.key
    with pytest.raises(RefusedError, match="differs from that of the run to resume"):
        make(tmp_path, PLAIN.replace("<|im_end|>", "<|im_end|> "), wanted=corpus.key)
    (tmp_path / "again").mkdir()
    assert make(tmp_path / "again", MARKED).key != corpus.key
    told: list[str] = []
    for template in (PLAIN, MARKED):
        prepare([tmp_path / "data"], tokenizer(template), tmp_path / "other", log=told.append)
    assert len(told) == 1
    assert "a different chat template" in told[0]
    path = write(tmp_path / "text.jsonl", [{"text": text} for text in functions(10)])
    plain, marked = (
        prepare([path], tokenizer(template), tmp_path / name)
        for name, template in (("plain", PLAIN), ("marked", MARKED))
    )
    assert plain.key == marked.key


def test_a_text_is_in_one_part_whatever_is_learned_of_it(tmp_path: Path) -> None:
    records: list[object] = []
    for i in range(60):
        first, last = {"role": "user", "content": f"{i}"}, {"role": "assistant", "content": f"so {i}"}
        records += [{"messages": [first, last] * 2}, {"prompt": [first, last, first], "completion": [last]}]
    path = write(tmp_path / "a.jsonl", records + records[:7])
    corpus = prepare([path], tokenizer(), tmp_path / "data", held_out=0.3)
    parts = [Counter(part.hashes.tolist()) for part in (corpus.train, corpus.held_out)]
    assert all(set(part.values()) == {2} for part in parts)
    assert sum(map(len, parts)) == 60
    assert corpus.header["documents"]["duplicate"] == 7
    other = write(tmp_path / "b.jsonl", records[1:2])
    with pytest.raises(RefusedError, match="held-out documents are also in the training data"):
        prepare([path], tokenizer(), tmp_path / "more", held_out_paths=[other])


def test_text_alone_is_kept_as_ever(tmp_path: Path) -> None:
    prepare([write(tmp_path / "a.jsonl", [{"text": t} for t in functions(9)])], tokenizer(), tmp_path / "data")
    names = {"tokens.json", *(f"{part}.{what}" for part in ("train", "held_out") for what in ("bin", "docs"))}
    assert {path.name for path in (tmp_path / "data").iterdir()} == names


def test_a_part_in_memory_is_that_of_the_shards(tmp_path: Path) -> None:
    corpus = make(tmp_path, held_out_paths=[write(tmp_path / "b.jsonl", [{"text": "held out"}])])
    part = read_part(tmp_path / "a.jsonl", Encoder(tokenizer()), Counter(), lambda line: None)
    assert np.array_equal(part.masks, corpus.train.masks)
    assert np.array_equal(part.tokens[:], corpus.train.tokens[:])
    assert len(part_of([]).tokens) == 0


# --- a run ---

STEPS, T, WEIGHT, HEAT, PEAK, WARM = 14, 96, 0.6, 2.0, 3e-3, 2


def pieces(run: Path, records: Sequence[dict[str, Any]], peer: Any) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The windows of each step: (ids, labels) of each conversation in them, by transformers alone."""
    known = {}
    for record in records:
        found = peer.apply_chat_template(
            record["messages"], chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True,
        )  # fmt: skip
        mask = [0, *found["assistant_masks"][1:]]
        labels = [i if keep else IGNORED for i, keep in zip(found["input_ids"], mask, strict=True)]
        last = max((i for i, label in enumerate(labels[: T + 1]) if label != IGNORED), default=0)
        known[tuple(found["input_ids"][:last])] = torch.tensor(labels[1 : last + 1])
    header = read_header(run / "tokens")
    assert header is not None
    corpus = open_corpus(run / "tokens", header["tokenizer"])
    windows = Windows(corpus.train, T, corpus.separator)
    n = len(windows)
    for step in range(STEPS):
        out = []
        for place in range(4 * step, 4 * step + 4):
            rows = windows.rows([shuffle_index(place % n, n, 42, place // n)])
            for ids in np.split(rows.tokens_NT[0], np.cumsum(rows.lengths[0])[:-1]):
                if (ids != corpus.separator).any():
                    out.append((torch.from_numpy(ids)[None], known[tuple(ids.tolist())]))
        yield out
    assert 2 * n < STEPS * 4  # several passes


def test_a_run_learns_answers_alone(distil: Callable[..., dict[str, Any]], teacher_file: Path, tmp_path: Path) -> None:
    """Its losses, rebuilt in float64 by transformers: tokenizer, template, masks, networks, AdamW."""
    transformers = pytest.importorskip("transformers")
    records: list[dict[str, Any]] = [{"messages": messages} for messages in talks(7, seed=9)]
    held: list[object] = [{"messages": messages} for messages in talks(3, seed=10)]
    data, other = write(tmp_path / "a.jsonl", records), write(tmp_path / "b.jsonl", held)
    summary = distil(
        data=data, eval_data=str(other), held_out=None, steps=STEPS, lr=PEAK, kd_weight=WEIGHT, temperature=HEAT,
        warmup_steps=WARM, seq_len=T, tokens_per_step=4 * T, micro_tokens=2 * T, allow_weaker_teacher=True,
        eval_tokens=4800,
    )  # fmt: skip
    aprfmt.export_model(teacher_file, tmp_path / "hf", format="hf")
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    teacher = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    student = copy.deepcopy(teacher)
    student.model.layers = student.model.layers[:1]
    matrices = [p for p in student.parameters() if p.dim() > 1]
    vectors = [p for p in student.parameters() if p.dim() <= 1]
    adamw = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
                              betas=(0.9, 0.95))  # fmt: skip
    wanted, counts = [], []
    for step, rows in enumerate(pieces(tmp_path / "run", records, peer)):
        n_valid = sum(int((labels != IGNORED).sum()) for _, labels in rows)
        counts.append(n_valid)
        loss = torch.zeros((), dtype=torch.float64)
        for ids, labels in rows:
            keep = labels != IGNORED
            s = student(ids).logits[0][keep]
            with torch.no_grad():
                t = teacher(ids).logits[0][keep]
            ce = functional.cross_entropy(s, labels[keep], reduction="sum")
            kl = functional.kl_div(
                (s / HEAT).log_softmax(-1), (t / HEAT).log_softmax(-1), reduction="sum", log_target=True
            )
            loss = loss + ((1 - WEIGHT) * ce + WEIGHT * HEAT**2 * kl) / n_valid
        adamw.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        done = (step - WARM) / (STEPS - 1 - WARM)
        rate = PEAK * (step + 1) / WARM if step < WARM else PEAK * (0.1 + 0.9 * (1 + np.cos(np.pi * done)) / 2)
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
        wanted.append(loss.item())
    found = lines(tmp_path / "run")
    assert found[0]["loss"] == pytest.approx(wanted[0], rel=2e-6)
    assert [line["loss"] for line in found] == pytest.approx(wanted, rel=1e-3)
    assert [line["tokens"] for line in found] == np.cumsum(counts).tolist()
    assert summary["tokens"] == sum(counts)
    # What a held-out score is of: answers too.
    n_held = 0
    for record in held:
        marks = peer.apply_chat_template(
            record["messages"], chat_template=MARKED, return_dict=True,  # type: ignore[index]
            return_assistant_tokens_mask=True,
        )["assistant_masks"]  # fmt: skip
        n_held += sum(marks[1 : T + 1])
    assert summary["last"]["tokens"] == n_held
    scored = score(str(tmp_path / "run/model.apr"), other, device="cpu", seq_len=T)
    assert scored.tokens == n_held
    assert scored.ce == pytest.approx(summary["last"]["ce"], rel=1e-5)


def test_a_prompt_longer_than_the_window_has_nothing_to_learn() -> None:
    talk: Messages = [{"role": "user", "content": "x" * 400}, {"role": "assistant", "content": "y"}]
    short: Messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    encoder = Encoder(tokenizer())
    part = part_of(encoder.encode([encoder.render(Chat(messages)) for messages in (talk, short, talk)]))
    windows = Windows(part, 32, encoder.separator)
    assert (len(windows), windows.n_labels([0]), windows.n_dropped) == (1, 2, 4)
