"""Every row of the architecture table is written as docs/rows.md says; a mistake fails with the row's name."""

from __future__ import annotations

import doctest
import json
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from aprfmt.arch.families import DEFAULTS, INDEX, index_of_rows, listed
from aprfmt.arch.grammar import LAYER_KINDS, LAYER_RULES, LAYER_SIZES, dims_of, parse_condition, parse_order, size_words
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.orders import MIRROR, ORDERS, UNIT_COLUMNS, VALUES
from aprfmt.arch.row import (
    HEAD,
    INT32,
    OPTIONAL,
    OUTPUT,
    PLUS_ROW,
    PRODUCT,
    REQUIRED,
    ROPE_FACTORS,
    Architecture,
    TensorRow,
)
from aprfmt.arch.table import ARCHITECTURES, TOWERS, find, find_gguf


def test_the_index_says_what_rows_are_found_by() -> None:
    assert INDEX.read_text("utf-8") == index_of_rows(), "bring it up to date: python tools/row_index.py"


def test_defaults_are_in_their_file_alone() -> None:
    """Each line is of an architecture or a tower, which has none beside it."""
    lines = [json.loads(line) for line in DEFAULTS.read_text("utf-8").splitlines()]
    assert {line["row"] for line in lines} <= {*ARCHITECTURES, *TOWERS}
    for file in {row.file for row in (*listed().values(), *listed(towers=True).values())}:
        module = import_module(f"aprfmt.arch.families.{file}")
        own = [row.id for row in (*getattr(module, "ROWS", ()), *getattr(module, "TOWERS", ())) if row.defaults]
        assert not own, f"move their defaults to {DEFAULTS.name}"


by_row = pytest.mark.parametrize("row", ARCHITECTURES.values(), ids=lambda row: row.id)

SIZE_WORDS = {
    "vocab", "hidden", "ffn", "heads", "kv_heads", "head_dim", "q", "kv", "experts", "moe_ffn", "positions", "layers",
    "rotary", "experts_used", "ngram_heads", "ngram_rows", "ngram_width",
}  # fmt: skip


class Fact(NamedTuple):
    word: str
    value: str
    negated: bool


def facts(condition: str) -> list[Fact]:
    return [Fact(*fact) for alternative in parse_condition(condition) for fact in alternative]


def config_keys(row: Architecture) -> set[str]:
    """config.json keys that the row knows, as they are held."""
    named = {key.hf[0] for key in row.keys if key.hf}
    return named | {name.rpartition(".")[2] for name in named} | set(row.defaults.get("", {}))


@by_row
def test_names_of_tensors_fit_together(row: Architecture) -> None:
    assert len(set(row.tensors)) == len(row.tensors)
    for t in row.tensors:
        assert all(("{n}" in name) == ("{n}" in t.hf[0]) for name in t.hf), t.hf
        assert not any("{n}" in name for name in t.gguf) or "{n}" in t.hf[0], t.hf
        if t.gguf and "{n}" in t.hf[0] and "{n}" not in t.gguf[0]:  # of one layer, which the rule tells
            assert t.layers, t.hf
        assert not any("{e}" in name for name in t.gguf), t.hf
        assert len(t.dims) in (1, len(t.hf)), t.hf
        assert len(t.gguf_dims) in (0, len(t.gguf)), t.hf
        assert t.gguf_dims or len(t.gguf) <= 1, t.hf
        assert len(t.gguf_transposed) in (0, len(t.gguf)), t.hf
        assert t.value in ("", *VALUES, PLUS_ROW, INT32, PRODUCT) or t.value.partition(":")[0] in (
            MIRROR,
            UNIT_COLUMNS,
        ), t.hf
        for name in t.hf:  # in two rows only where they exclude each other: by layer, shape, or what belongs to them
            same = [r for r in row.tensors if name in r.hf]
            assert len({(r.layers, r.hf, r.need, r.dims) for r in same}) == len(same), name
        assert not set(t.gguf) & set(ROPE_FACTORS), t.hf


def sizes(t: TensorRow) -> list[str]:
    """Every size of a tensor row."""
    orders = [size for order in (*t.order, *t.columns) for size in parse_order(order)[1]]
    shapes = [size for dims in (*t.dims, *t.gguf_dims) for size in dims_of(dims)]
    orders += [rows for run in t.scale if (rows := run.partition(":")[0])]
    return [*shapes, *orders, t.count, t.depth, *filter(None, (t.skip, t.first, t.lead, t.trail))]


@by_row
def test_sizes_are_sizes_of_known_words(row: Architecture) -> None:
    for t in row.tensors:
        for size in sizes(t):
            words = size_words(size)  # raises ValueError for what is not a size
            if t.gguf and t.need != OPTIONAL:
                assert words <= SIZE_WORDS | config_keys(row), f"{row.id}: {t.hf[0]}: {size}"


@by_row
def test_orders_are_known(row: Architecture) -> None:
    for t in row.tensors:
        for order in (*t.order, *t.columns):
            name, args = parse_order(order)
            assert name in ORDERS, f"{row.id}: {t.hf[0]}: {order}"
            assert len(args) in ORDERS[name][1], f"{row.id}: {t.hf[0]}: {order}"


@by_row
def test_conditions_are_conditions_of_known_words(row: Architecture) -> None:
    for t in row.tensors:
        for fact in facts(t.need):
            assert fact.word in {REQUIRED, OPTIONAL, HEAD, OUTPUT} | config_keys(row), (
                f"{row.id}: {t.hf[0]} needs {t.need}"
            )
        for fact in facts(t.layers) if t.layers else ():
            known = fact.value in LAYER_KINDS if fact.word == "kind" else not fact.value
            assert known, f"{row.id}: {t.hf[0]}: {t.layers}"
            assert fact.word in {"kind", *LAYER_RULES} | LAYER_KINDS | LAYER_SIZES, f"{row.id}: {t.hf[0]}: {t.layers}"
    for fact in facts(row.hf_when) if row.hf_when else ():
        assert fact.word in {"layer_types"} | config_keys(row), f"{row.id}: {row.hf_when}"
        assert not fact.value or fact.value in LAYER_KINDS, f"{row.id}: {row.hf_when}"
    named = {key.gguf for other in ARCHITECTURES.values() if other.gguf == row.gguf for key in other.keys}
    for fact in facts(row.when) if row.when else ():
        known = (
            fact.word.startswith(("general.", "tokenizer.", "rope."))
            or fact.word in {"tensors", "uneven_heads"} | named
        )
        assert known, f"{row.id}: {row.when}"


@by_row
def test_keys_name_known_fields(row: Architecture) -> None:
    for key in row.keys:
        assert key.gguf or key.hf or key.converter, key
        assert key.kind.removesuffix("[]") in ("u32", "u64", "i32", "f32", "bool", "str"), key
        assert not key.field or key.field in Hyperparams.__slots__, key
    fields = [key.field for key in row.keys if key.field and key.hf]
    assert {"num_layers", "hidden_size"} <= set(fields)


@by_row
def test_rows_are_found(row: Architecture) -> None:
    """By class, by model type, and by a GGUF that has just what the first alternative of `when` asks for."""
    wanted = [fact.value for fact in facts(row.hf_when) if not fact.negated] if row.hf_when else []
    told = {fact.word: 1 for fact in facts(row.hf_when) if not fact.negated} if row.hf_when else {}
    config = {**told, "layer_types": [*filter(None, wanted), "attention"]} if row.hf_when else None
    for hf_class in row.hf_classes:
        assert find(hf_class=hf_class, config=config) is row
    for model_type in row.model_types:
        assert find(model_type=model_type, config=config) is row
    kv: dict[str, object] = {"general.architecture": row.gguf}
    tensors = ["token_embd.weight", "token_types.weight"]
    for fact in facts(row.when.partition("|")[0]) if row.when else ():
        if fact.negated:
            tensors = [name for name in tensors if name != fact.value]
        elif fact.word == "tensors":
            tensors += [f"blk.0.{fact.value}"] if fact.value else []
        elif fact.word.startswith("tokenizer."):
            kv[fact.word] = fact.value
        else:
            number = fact.value == "" or fact.value.isdigit()
            kv[f"{row.gguf}.{fact.word}"] = int(fact.value or 1) if number else fact.value != "False" and fact.value
    found = find_gguf(kv, tensors)
    plain = (
        next(other for other in ARCHITECTURES.values() if other.gguf == row.gguf and not other.when)
        if not row.when
        else row
    )
    assert found is plain  # a GGUF of the same network under other names comes back as the first of them
    assert row.hf_class in row.hf_classes or find(hf_class=row.hf_class) is not None
    assert set(row.bare_classes) <= set(row.hf_classes)


MISTAKES = {
    "a size": TensorRow(("x",), ("y",), ("2hidden",)),
    "a size word": TensorRow(("x",), ("y",), ("hiden",)),
    "an order": TensorRow(("x",), ("y",), ("hidden",), order=("swap:heads,2",)),
    "a need": TensorRow(("x",), ("y",), ("hidden",), "has:bias"),
    "a need's word": TensorRow(("x",), ("y",), ("hidden",), "atention_bias"),
    "layers": TensorRow(("x",), ("y",), ("hidden",), layers="=moe"),
    "layers' word": TensorRow(("x",), ("y",), ("hidden",), layers="full_atention"),
    "a kind": TensorRow(("x",), ("y",), ("hidden",), layers="kind=mo"),
}
CHECKS = (test_sizes_are_sizes_of_known_words, test_orders_are_known, test_conditions_are_conditions_of_known_words)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake: str) -> None:
    llama = ARCHITECTURES["llama"]
    row = Architecture("toy", "toy", "T", "t", ("T",), ("t",), (MISTAKES[mistake],), llama.keys)
    noticed = 0
    for check in CHECKS:
        try:
            check(row)
        except (AssertionError, ValueError):
            noticed += 1
    assert noticed == 1


def test_examples_of_the_page() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "rows.md"
    assert doctest.testfile(str(page), module_relative=False) == (0, page.read_text().count(">>> "))
