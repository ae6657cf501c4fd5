"""The tokenizer explorer of a page: its ids are the library's on hard texts; what it cannot do, it says."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from arch_models import CACHE
from demo_model import build

import aprfmt
from aprfmt.formats.hf_files import read_tokenizer
from aprfmt.inspection import token_explorer as module
from aprfmt.inspection.token_explorer import javascript_regex, token_explorer
from aprfmt.tokenizer.encoding import hard_texts, tokenizer_json
from aprfmt.tokenizer.fast import load
from aprfmt.tokenizer.model import Tokenizer

SCRIPT = Path(__file__).resolve().parents[2] / "src" / "aprfmt" / "html" / "viewer.js"
CODE = """
globalThis.document = {querySelectorAll: () => []};
const [spec, texts] = JSON.parse(require("fs").readFileSync(0));
(0, eval)(require("fs").readFileSync(FILE, "utf8") + ";globalThis.read = readTokenizer;");
read(spec).then(t => console.log(JSON.stringify(texts.map(text => t.encode(text)))));
"""
MORE = [
    "",
    " ",
    "  a",
    "a<|im_end|> b",
    "1234567",
    "can't CAN'T \u017f",
    "\u00e9\u0301 \u0085\ufeffx",
    "\U0001f600\u200d",
]


def tiny(folder: Path) -> Tokenizer:
    build(folder / "m.gguf")
    with aprfmt.open(folder / "m.gguf") as model:
        assert model.tokenizer is not None
        return model.tokenizer


def document(**changed: Any) -> Tokenizer:
    """A tokenizer with a tokenizer.json of its own."""
    vocab = {c: i for i, c in enumerate(["<unk>", *"abc \u2581", "ab", "\u2581a", "<0xC3>", "<0xA9>", "abc"])}
    model: dict[str, Any] = {
        "type": "BPE",
        "vocab": vocab,
        "merges": [["a", "b"], ["ab", "c"], ["\u2581", "a"]],
        "unk_token": "<unk>",
    }
    model |= changed.pop("model", {})
    body: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
    }
    body |= {"decoder": None, "truncation": None, "padding": None, "model": model, **changed}
    return Tokenizer("gpt2", list(vocab), files={"tokenizer.json": json.dumps(body).encode()})


def added(text: str, i: int, **flags: bool) -> dict[str, Any]:
    usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": text, "special": True, **usual, **flags}


META = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
CASES: dict[str, dict[str, Any]] = {
    "merges": {},
    "fused unknowns": {"model": {"fuse_unk": True}},
    "bytes": {"model": {"byte_fallback": True}},
    "whole words": {"model": {"ignore_merges": True, "merges": [["a", "b"]]}},
    "metaspace": {"pre_tokenizer": META},
    "metaspace first": {"pre_tokenizer": {**META, "prepend_scheme": "first"}, "added_tokens": [added("b", 2)]},
    "prepended": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, SPACE]}},
    "strips": {"added_tokens": [added("c", 3, lstrip=True, rstrip=True)]},
    "longest added": {"added_tokens": [added("a", 1), added("abc", 10)]},
    **{
        f"split {behavior}{' inverted' if invert else ''}": {
            "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[ab]"}, "behavior": behavior, "invert": invert}
        }
        for behavior in ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous")
        for invert in (False, True)
    },
    "digits": {"pre_tokenizer": {"type": "Digits", "individual_digits": False}},
}
NAMES = ["tiny", "llama3", "qwen3", "gpt4o", "gemma3"]
TEXTS = ["abc ab  a cab", "aab\u00e9\u00e9x abc", "c  a c", " a", "", "ca bbaab", "12 a3"]


def ids_in_the_page(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    found = token_explorer(tokenizer)
    assert found.reason == ""
    code = CODE.replace("FILE", json.dumps(str(SCRIPT)))
    request = json.dumps([json.loads(found.data), texts])
    done = subprocess.run(["node", "-e", code], input=request, capture_output=True, text=True, check=True)
    ids: list[list[int]] = json.loads(done.stdout)
    return ids


def real(name: str) -> Tokenizer:
    place = CACHE / "tokenizers" / name
    if not place.is_dir():
        pytest.skip(f"the real tokenizer {name} is not in the material cache")
    return read_tokenizer(place)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.turns(of=8)
@pytest.mark.parametrize("name", NAMES)
def test_the_page_finds_the_ids_of_the_library(name: str, tmp_path: Path) -> None:
    tokenizer = tiny(tmp_path) if name == "tiny" else real(name)
    texts = [*hard_texts(), *MORE]
    wanted = [found.ids for found in load(tokenizer_json(tokenizer)).encode(texts)]
    found = ids_in_the_page(tokenizer, texts)
    assert [(t, a) for t, a, b in zip(texts, found, wanted, strict=True) if a != b] == []


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_each_step_of_a_tokenizer_is_reproduced() -> None:
    for name, changed in CASES.items():
        tokenizer = document(**json.loads(json.dumps(changed)))
        wanted = [found.ids for found in load(tokenizer_json(tokenizer)).encode(TEXTS)]
        assert ids_in_the_page(tokenizer, TEXTS) == wanted, name


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model": {"type": "WordPiece"}}, "this one is WordPiece"),
        ({"model": {"dropout": 0.1}}, "has a dropout"),
        ({"normalizer": {"type": "Lowercase"}}, "normalizer has the step Lowercase"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre-tokenizer has the step Whitespace"),
        ({"added_tokens": [added("a", 1, single_word=True)]}, "whole word"),
        ({"added_tokens": [added("a", 1 << 30)]}, "damaged"),
        ({"model": {"merges": [["x", "y"]]}}, "damaged"),
        ({"normalizer": 7}, "damaged"),
    ],
)
def test_what_the_page_cannot_reproduce_is_said(changed: dict[str, Any], reason: str) -> None:
    found = token_explorer(document(**changed))
    assert found.data == ""
    assert reason in found.reason


def test_a_vocabulary_too_large_for_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny(tmp_path)
    size = len(token_explorer(tokenizer).data)
    assert size < 8000, "300 tokens"
    monkeypatch.setattr(module, "MAX_EXPLORER_CHARS", 100)
    assert (
        token_explorer(tokenizer).reason == f"its vocabulary of {len(tokenizer.tokens)} tokens is too large for a page"
    )
    assert "BPE" in token_explorer(replace(tokenizer, model="bert", merges=[], files={})).reason


def test_regexes_are_written_for_javascript() -> None:
    assert javascript_regex(r"(?i:'s|'K)|\s+(?!\S)") == (
        "(?:'[sS\u017f]|'[kK\u212a])|\\p{White_Space}+(?!\\P{White_Space})"
    )
    assert javascript_regex(r"(\p{Han}+)[^\r\n\p{L}]?\d{1,3}") == r"(?:\p{Script=Han}+)[^\r\n\p{L}]?\p{Nd}{1,3}"
    for pattern in (r"a++", r"a{2}+", r"(?>a)", "^a", r"\w", r"[a&&b]", "[a[b]]", "(?i:[a-z])", r"\p{Foo}", r"(?i)a"):
        with pytest.raises(module._CannotReproduceError):
            javascript_regex(pattern)
