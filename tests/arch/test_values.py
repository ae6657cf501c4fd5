"""The engine behind keys, on rows made for it: spellings, lists, kinds, converters."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from aprfmt import limits
from aprfmt.arch import fields
from aprfmt.arch.converter import Converter
from aprfmt.arch.converters.common import gating
from aprfmt.arch.converters.heads import pooling
from aprfmt.arch.converters.layers import layer_types
from aprfmt.arch.hparams import from_apr, from_gguf, from_hf_config, to_gguf, to_hf_config
from aprfmt.arch.row import Architecture, Key
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.errors import AprError, CorruptError, LimitError, RefusedError


def toy(*more: Key, **fields: Any) -> Architecture:
    """A row with keys of its own."""
    return replace(ARCHITECTURES["llama"], keys=more, defaults={"": fields.pop("defaults", {})}, **fields)


def test_nested_keys_and_old_spellings() -> None:
    row = toy(Key("clamp", ("attn_config.clip", "clip"), "f32"), defaults={"attn_config.clip": 3.0})
    assert from_hf_config({"attn_config": {"clip": 2.0}}, row).extra["attn_config.clip"] == 2.0
    assert from_hf_config({"clip": 4.0}, row).extra["attn_config.clip"] == 4.0
    assert from_hf_config({}, row).extra["attn_config.clip"] == 3.0
    h = from_hf_config({"attn_config": {"clip": None}, "vocab_size": 9}, row)
    assert h.extra == {"attn_config.clip": None}
    assert to_hf_config(h, row)["attn_config"] == {"clip": None}
    assert to_gguf(h, row) == []


def test_lists_for_a_number() -> None:
    row = toy(Key("feed_forward_length", ("intermediate_size",), field="intermediate_size"))
    h = from_hf_config({"intermediate_size": [8, 8]}, row)
    assert (h.intermediate_size, h.extra["intermediate_size"]) == (8, [8, 8])
    h = from_hf_config({"intermediate_size": [8, 9], "vocab_size": 9}, row)
    assert h.intermediate_size is None
    assert to_hf_config(h, row)["intermediate_size"] == [8, 9]
    assert to_gguf(h, row) == [("llama.feed_forward_length", ("ARRAY", "INT32"), [8, 9])]
    with pytest.raises(CorruptError, match="intermediate_size"):
        from_hf_config({"intermediate_size": [8, "x"]}, row)


def test_constants_and_keys_of_the_tokenizer() -> None:
    row = toy(Key("pooling", constant=2), Key("tokenizer.ggml.types", ("types",)), Key("s", ("s",), "str"))
    h = from_hf_config({"types": 2, "s": "x"}, row)
    assert to_gguf(h, row, file_type=7) == [
        ("llama.pooling", "UINT32", 2), ("tokenizer.ggml.types", "UINT32", 2), ("llama.s", "STRING", "x"),
        ("general.file_type", "UINT32", 7),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "value", "error"),
    [("bool", 1, CorruptError), ("str", 1, CorruptError), ("i32", 1 << 31, RefusedError),
     ("i32", 1.5, CorruptError), ("u32", -1, CorruptError), ("u32", 1 << 32, RefusedError),
     ("f32", "x", CorruptError), ("bool[]", [0], CorruptError)],
)  # fmt: skip
def test_values_of_another_kind(kind: str, value: Any, error: type[AprError]) -> None:
    row = toy(Key("a", ("a",), kind))
    with pytest.raises(error, match=r"llama\.a"):
        to_gguf(from_hf_config({"a": value}, row), row)


@pytest.mark.parametrize(("converter", "word", "number"), [(gating, "sigmoid", 2), (pooling, "cls", 2)])
def test_words_and_numbers(converter: Converter, word: str, number: int) -> None:
    row = toy(Key("a", ("a",), converter=converter))
    pairs = to_gguf(from_hf_config({"a": word}, row), row)
    assert pairs == [("llama.a", "UINT32", number)]
    h = from_gguf({key: item for key, _, item in pairs}, row=row)
    assert h.extra["a"] == word
    with pytest.raises(RefusedError, match="a is 'odd'"):
        to_gguf(from_hf_config({"a": "odd"}, row), row)
    with pytest.raises(CorruptError, match="a is 77"):
        from_gguf({"llama.a": 77}, row=row)


@pytest.mark.parametrize(
    ("kind", "raw", "value"),
    [("u32", [4, 4], 4), ("u32", 4.0, 4), ("u32[]", 4, 4), ("bool[]", [True], [True]), ("f32", 1, 1.0)],
)
def test_what_converters_of_a_gguf_get(kind: str, raw: Any, value: Any) -> None:
    assert fields.converter_value("a", kind, raw) == value


@pytest.mark.parametrize(
    ("kind", "raw"), [("u32", [4, 5]), ("u32", "x"), ("f32", "x"), ("str", 1), ("str[]", "x"), ("u32", {})]
)
def test_what_converters_of_a_gguf_do_not_get(kind: str, raw: Any) -> None:
    with pytest.raises(CorruptError, match="a "):
        fields.converter_value("a", kind, raw)


def test_more_layers_than_lists_are_made_for() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512}
    for count, fits in ((limits.MAX_LAYERS, True), (limits.MAX_LAYERS + 1, False)):
        for source, values in (
            (from_hf_config, {"model_type": "llama", **sizes, "num_hidden_layers": count}),
            (from_gguf, {"general.architecture": "llama", "llama.block_count": count}),
            (from_apr, {"architecture": "llama", "num_layers": count}),
        ):
            with nullcontext() if fits else pytest.raises(LimitError, match="layers"):
                source(values)


LAYER_TYPES = Key("attention.sliding_window_pattern", ("layer_types",), "bool[]", converter=layer_types)
S, F = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("config", "want"),
    [({}, [S, S, F, S]), ({"sliding_window_pattern": 2}, [S, F, S, F]),
     ({"sliding_window_pattern": "LG"}, [S, F, S, F]), ({"layer_types": [F, S, F, S]}, [F, S, F, S])],
)  # fmt: skip
def test_layer_types(config: dict[str, Any], want: list[str]) -> None:
    layers = Key("block_count", ("num_hidden_layers",), field="num_layers")
    row = toy(layers, LAYER_TYPES, defaults={"sliding_window_pattern": 3})
    h = from_hf_config({"num_hidden_layers": 4, **config}, row)
    assert h.extra["layer_types"] == want
    pairs = to_gguf(h, row)
    assert pairs[1][1:] == (("ARRAY", "BOOL"), [kind == S for kind in want])
    again = from_gguf({key: value for key, _, value in pairs}, row=row)
    assert again.extra["layer_types"] == want
    for period, kinds in ((2, [S, F, S, F]), (None, [S, S, F, S])):
        kv = {"llama.block_count": 4, f"llama.{LAYER_TYPES.gguf}": period}
        assert from_gguf(kv, row=row).extra["layer_types"] == kinds


def test_a_pattern_that_a_runtime_does_not_know_is_refused() -> None:
    layers = Key("block_count", ("num_hidden_layers",), field="num_layers")
    row = toy(layers, replace(LAYER_TYPES, gguf=""), defaults={"sliding_window_pattern": 2})
    to_gguf(from_hf_config({"num_hidden_layers": 2}, row), row)
    odd = from_hf_config({"num_hidden_layers": 2, "layer_types": [F, F]}, row)
    with pytest.raises(RefusedError, match="layer_types"):
        to_gguf(odd, row)
