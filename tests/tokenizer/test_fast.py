"""A stranger's tokenizer.json runs in a process with limits; one whose steps are known runs here, with the same ids."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aprfmt.errors import AprError, CorruptError, LimitError
from aprfmt.tokenizer import fast, known, pre
from aprfmt.tokenizer.rules import RULES

LETTERS = {chr(97 + i): i for i in range(26)} | {"!": 26, "ab": 27, "Ġ": 28}
BPE: dict[str, Any] = {"type": "BPE", "vocab": LETTERS, "merges": [["a", "b"]]}


def tokenizer(**parts: Any) -> bytes:
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return json.dumps({"version": "1.0", "added_tokens": [], "model": BPE, **empty, **parts}).encode()


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def sequence(*steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [*steps]}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "!", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {"!": {"id": "!", "ids": [26], "tokens": ["!"]}},
}
SLOW = tokenizer(pre_tokenizer=split("a*$"))
LINE = "a" * 60_000 + "!"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little time, and no process of another test."""
    monkeypatch.setattr(fast, "MAX_TOKENIZER_SECONDS", 0.4)
    monkeypatch.setattr(fast, "_processes", {})


def test_a_regex_ends_its_process_once(capfd: pytest.CaptureFixture[str]) -> None:
    running = fast.load(SLOW)
    with pytest.raises(LimitError, match="running the tokenizer takes more than"):
        running.encode([LINE])
    for again in (lambda: running.encode(["a"]), lambda: fast.load(SLOW)):
        with pytest.raises(LimitError, match="running the tokenizer takes more than"):
            again()
    assert fast._process_of(SLOW).service.child is None  # it is not started anew
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_passes_through_the_library_unchanged(kind: type[BaseException]) -> None:
    class Library:
        def encode_batch_fast(self, *_: object, **__: object) -> None:
            raise kind

        def decode(self, *_: object, **__: object) -> None:
            raise kind

    running = fast.load(tokenizer())
    assert isinstance(running, fast._Local)
    running._library = Library()  # type: ignore[assignment]
    for call in (lambda: running.encode(["a"]), lambda: running.decode([1])):
        with pytest.raises(kind) as caught:
            call()
        assert caught.value.__cause__ is None


PANICS = {
    "a regex without end": ({"pre_tokenizer": split("(a+)+$")}, "retry-limit"),
    "a charsmap of nothing": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "charsmap"),
    "a charsmap that lies": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}}, "index out of bounds"
    ),
    "a short tail": ({"model": BPE | {"continuing_subword_prefix": "##"}}, "slice index"),
    "a template without its token": ({"post_processor": TEMPLATE | {"special_tokens": {}}}, "cannot be"),
}  # fmt: skip


@pytest.mark.parametrize("name", PANICS)
def test_a_panic_is_an_error_and_stderr_stays_clean(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    parts, why = PANICS[name]
    with pytest.raises(CorruptError, match=why):
        fast.load(tokenizer(**parts)).encode(["a" * 40 + "!"], special=True)
    assert capfd.readouterr() == ("", "")


def test_a_decoder_that_panics(capfd: pytest.CaptureFixture[str]) -> None:
    strips = {"type": "Strip", "content": "a", "start": 5, "stop": 9}
    with pytest.raises(CorruptError, match="index out of bounds"):
        fast.load(tokenizer(decoder=strips)).decode([0, 0])
    assert capfd.readouterr() == ("", "")


def test_both_ways_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A regex of the user's own costs a process and nothing else."""
    own = tokenizer(
        pre_tokenizer=sequence(split("[a-c]+|[d-z]+"), BYTES), post_processor=TEMPLATE, decoder=BYTES
    )  # fmt: skip
    remote, local = fast.load(own), fast._Local(own)
    assert isinstance(remote, fast._Remote)
    texts = ["abcab xyz!", "", "ab" * 20_000]
    monkeypatch.setattr(fast, "_REQUEST_CHARS", 100)
    for special in (True, False):
        for places in (True, False):
            got = remote.encode(texts, special=special, places=places)
            assert got == local.encode(texts, special=special, places=places)
    assert remote.decode([0, 27, 28, 1]) == local.decode([0, 27, 28, 1])
    assert remote.added() == local.added() == []
    for one in (remote, local):
        one.drop_post_processor()
    assert remote.encode(["ab"], special=True) == local.encode(["ab"], special=True) == [([27], [])]
    assert fast.load(own).encode(["ab"], special=True)[0].ids == [26, 27]  # of the same process


def test_many_slow_texts_end_it_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "_REQUEST_CHARS", 100)
    with pytest.raises(LimitError, match="running the tokenizer takes more than"):
        fast.load(SLOW).encode(["a" * 9_000 + "!"] * 200)


@pytest.mark.parametrize("name", RULES)
def test_known_rules_run_here(name: str) -> None:
    steps = [{"type": "Digits", "individual_digits": True} if s == "digits" else split(s) for s in RULES[name].splits]
    slow = known._SLOW.intersection(RULES[name].splits)
    assert known.is_known(json.loads(tokenizer(pre_tokenizer=sequence(*steps, BYTES)))) != bool(slow)


UNKNOWN: dict[str, dict[str, Any]] = {
    "a regex": {"pre_tokenizer": split("a+b")},
    "a regex inside": {"pre_tokenizer": sequence(sequence(BYTES, split("a+b")))},
    "a regex to replace": {"normalizer": {"type": "Replace", "pattern": {"Regex": "a+b"}, "content": ""}},
    "a regex to decode": {"decoder": {"type": "Replace", "pattern": {"Regex": "a+b"}, "content": ""}},
    "two patterns": {"pre_tokenizer": split("a") | {"pattern": {"String": "a", "Regex": "a+b"}}},
    "many steps": {"pre_tokenizer": sequence(*[{"type": "Digits", "individual_digits": True}] * 40)},
    "much text": {"normalizer": {"type": "Prepend", "prepend": "a" * 2000}},
    "another step": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "long words": {"model": {"type": "WordPiece", "vocab": {"a": 0}, "max_input_chars_per_word": 10**9}},
    "long pieces": {"model": {"type": "Unigram", "vocab": [["a" * 9000, 0.0]]}},
    "a model of no type": {"model": {"vocab": {"a": 0}, "max_input_chars_per_word": 10**9}},
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_to_be_quick(name: str) -> None:
    assert not known.is_known(json.loads(tokenizer(**UNKNOWN[name])))
    assert known.is_known(json.loads(tokenizer()))


def test_a_key_that_stands_twice() -> None:
    """Which of two the library takes is its own affair."""
    text = tokenizer().replace(b'"pre_tokenizer": null', b'"pre_tokenizer": %s, "pre_tokenizer": null' % b"null")
    assert isinstance(fast.load(text), fast._Remote)
    assert isinstance(fast.load(tokenizer()), fast._Local)


def test_the_probe_runs_within_limits(capfd: pytest.CaptureFixture[str]) -> None:
    for regex in ("(a+)+$", r"(?:.|\n)*?(?:.|\n)*?(?:.|\n)*?\x00"):
        data = tokenizer(pre_tokenizer=sequence(split(regex), BYTES))
        assert pre.hash_name(data, json.loads(data)) is None
    assert capfd.readouterr() == ("", "")


def test_it_takes_no_more_memory_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "TOKENIZER_MEMORY_BYTES", 96 << 20)
    monkeypatch.setattr(fast, "MAX_TOKENIZER_SECONDS", 5.0)
    grows = tokenizer(normalizer={"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 200})
    with pytest.raises(AprError, match=r"memory|process"):
        fast.load(grows).encode(["a" * 500_000])
