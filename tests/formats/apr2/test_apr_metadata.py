from __future__ import annotations

import json
from typing import Any

import pytest

from aprfmt.errors import CorruptError, UsageError
from aprfmt.formats import apr_metadata
from aprfmt.formats.apr_metadata import GENERATIONS, TYPED_FIELDS, canonicalize_aliases, dump, parse

MINIMAL = b'{"model_type":"","license":null,"data_source":null,"data_license":null,"total_size":0,"param_count":0}'


def test_typed_fields_are_those_of_the_format() -> None:
    assert len(TYPED_FIELDS) == 35
    assert TYPED_FIELDS[:3] == ("model_type", "name", "description")
    assert TYPED_FIELDS[-1] == "moe_intermediate_size"


def test_empty_metadata_has_102_bytes() -> None:
    assert dump({}) == MINIMAL
    assert len(MINIMAL) == 102


@pytest.mark.parametrize("generation", GENERATIONS)
def test_generations_write_their_fields_and_are_recognised(generation: str) -> None:
    raw = dump({"model_type": "m", "rope_theta" if generation != "Gen0" else "name": None}, generation)
    fields = [name for name in GENERATIONS[generation] if generation != "Current" or name in json.loads(MINIMAL)]
    assert list(json.loads(raw)) == fields + (
        ["rope_theta"] if generation == "Gen0" and "rope_theta" in raw.decode() else []
    )
    assert parse(raw).generation == generation
    assert dump(parse(raw)) == raw


def test_generation_b_lacks_only_the_hf_fields() -> None:
    assert set(TYPED_FIELDS) - set(GENERATIONS["GenB"]) == {"hf_architecture", "hf_model_type"}
    assert GENERATIONS["Gen0"][-1] == "sharding"


def test_typed_names_an_old_generation_lacks_become_custom() -> None:
    raw = dump({"model_type": "m", "hidden_size": 4, "a": 1}, "Gen0")
    assert raw.endswith(b'"sharding":null,"a":1,"hidden_size":4}')


def test_custom_keys_are_sorted_and_true_dtypes_come_last() -> None:
    raw = dump({"z": 1, "aprfmt.tensors": {"t": {"shape": [1], "dtype": "Q4_1"}}, "b": {"y": 1, "x": 1e-6}})
    assert raw.endswith(b'"b":{"x":1e-6,"y":1},"z":1,"aprfmt.tensors":{"t":{"dtype":"Q4_1","shape":[1]}}}')


def test_typed_floats_are_f32_and_custom_ones_f64() -> None:
    raw = dump({"rms_norm_eps": 9.999999974752427e-07, "x": 9.999999974752427e-07, "rope_theta": 10000})
    assert b'"rope_theta":10000.0,"rms_norm_eps":0.000001,"x":9.999999974752427e-7' in raw


def test_sub_objects_have_all_their_fields_and_no_others() -> None:
    raw = dump({"sharding": {"shard_index": 1, "shard_count": 4, "total_size": 0, "other": 1}, "special_tokens": {}})
    assert b'"sharding":{"shard_count":4,"shard_index":1,"total_size":0,"pattern":null}' in raw
    assert b'"special_tokens":{"bos_token":null,"eos_token":null' in raw


BAD = [
    {"model_type": None}, {"model_type": 1}, {"total_size": None}, {"param_count": -1}, {"hidden_size": 64.0},
    {"hidden_size": True}, {"hidden_size": "64"}, {"rope_type": 1 << 32}, {"rope_theta": "x"},
    {"rope_theta": True},
    {"name": 5}, {"license": ["MIT"]}, {"quantization": []}, {"quantization": {}},
    {"special_tokens": {"bos_token": 1}},
    {"quantization": {"quant_type": "q", "bits": 256, "symmetric": True}},
    {"quantization": {"quant_type": "q", "bits": 4}},
    {"quantization": {"quant_type": "q", "bits": 4, "symmetric": 1}}, {"sharding": {"shard_count": 1,
    "shard_index": 0}},
    {"num_layers": 1 << 64},
]  # fmt: skip


@pytest.mark.parametrize("values", BAD, ids=str)
def test_values_of_the_wrong_type_are_refused_both_ways(values: dict[str, Any]) -> None:
    with pytest.raises(CorruptError):
        parse(json.dumps(values).encode())
    with pytest.raises(UsageError):
        dump(values)


@pytest.mark.parametrize("values", [
    {}, {"rope_theta": 10000}, {"rms_norm_eps": 1e39}, {"hidden_size": None, "special_tokens": {}},
    {"quantization": {"quant_type": "q", "bits": 4, "symmetric": True, "more": 1}}, {"x": {"y": None}},
])  # fmt: skip
def test_what_the_reference_reads(values: dict[str, Any]) -> None:
    parsed = parse(json.dumps(values).encode())
    assert dict(parsed) == values
    assert parse(dump(dict(parsed)))["total_size"] == 0


def test_unchanged_metadata_is_written_as_it_was() -> None:
    raw = b' { "b" : 1,\n"a":2, "rope_theta": 1E4 } '
    parsed = parse(raw)
    assert dump(parsed) == raw
    assert dump(dict(parsed)).endswith(b'"rope_theta":10000.0,"a":2,"b":1}')


def test_lone_surrogates_and_odd_keys_are_refused() -> None:
    for values in ({"a": "\ud800"}, {"\udc00": 1}, {1: 2}, {"a": 1 << 70}):
        with pytest.raises(UsageError):
            dump(values)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        dump({}, "GenX")


def test_metadata_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apr_metadata, "MAX_METADATA_BYTES", 101)
    with pytest.raises(ValueError, match="102 bytes"):
        dump({})


def test_aliases_fill_unset_fields_in_order_and_go_away() -> None:
    values = {"d_model": 64, "hidden_dim": 32, "n_layers": "3", "n_layer": 2, "num_heads": 4, "n_head": 8,
    "norm_eps": 1,
              "n_vocab": 10.0, "x": 1}  # fmt: skip
    assert canonicalize_aliases(values) == {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "rms_norm_eps": 1,
        "x": 1,
    }
