"""Modules of sentence-transformers folders: pooling in both spellings, layers, files that say nothing, and back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aprfmt.arch.heads import MODULE_KEYS
from aprfmt.formats.hf_modules import module_files, module_problems, read_modules

_KEYS = ("in_features", "out_features", "bias", "activation_function", "pooling_mode", "pooling_mode_cls_token")
_KINDS = st.sampled_from(
    [f"sentence_transformers.models.{kind}" for kind in ("Pooling", "Dense", "Normalize", "Router")]
)
_MODULES = json.dumps(
    [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
).encode()


def _read(config: bytes | None, modules: bytes | None = _MODULES) -> object:
    return read_modules({"modules.json": modules, "1_Pooling/config.json": config}.get).get("pooling")


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, "cls+max"),
        ({"word_embedding_dimension": 384}, None),
    ],
)
def test_reads_the_word(config: dict[str, object], word: str | None) -> None:
    assert _read(json.dumps(config).encode()) == word


@pytest.mark.parametrize("config", [None, b"", b"[]", b"\xff", b"[" * 100_000])
def test_what_is_no_object_says_nothing(config: bytes | None) -> None:
    assert _read(config) is None


@pytest.mark.parametrize("modules", [None, b"{}", b"[1, {}]", b'[{"type": 3, "path": null}]'])
def test_a_folder_without_a_pooling_module_says_nothing(modules: bytes | None) -> None:
    assert _read(b'{"pooling_mode": "mean"}', modules) is None


@pytest.mark.parametrize("word", ["mean", "cls", "last"])
def test_files_are_read_back(word: str) -> None:
    made = module_files({"pooling": word}, 384)
    assert read_modules(made.get) == {"pooling": word}
    assert json.loads(made["1_Pooling/config.json"])["word_embedding_dimension"] == 384


@pytest.mark.parametrize("word", ["rank", "none", "cls+max"])
def test_no_files_for_what_has_no_word(word: str) -> None:
    assert module_files({"pooling": word}, 384) == {}


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=4),
    max_leaves=8,
)
_LINES = st.fixed_dictionaries(
    {},
    optional={"path": st.sampled_from(["", "1_Pooling", "2_Dense", "x", "../y"]) | _VALUES, "type": _KINDS | _VALUES},
)


@given(st.lists(_LINES | _VALUES, max_size=4), _VALUES, _VALUES)
def test_whatever_the_files_hold_is_read(lines: object, pooling: object, dense: object) -> None:
    files = {"modules.json": lines, "1_Pooling/config.json": pooling, "2_Dense/config.json": dense}
    texts = {name: json.dumps(value).encode() for name, value in files.items()}
    told = read_modules(texts.get)
    assert all(MODULE_KEYS.fullmatch(name) for name in told)
    assert all(type(told[name]) is int for name in told if name.endswith(("_in", "_out")))
    assert isinstance(told.get("pooling", ""), str)
    list(module_problems(texts.get, {"2_Dense.linear.weight": (3, 4)}, lambda name: False, 4))
    module_files(told, 64)
