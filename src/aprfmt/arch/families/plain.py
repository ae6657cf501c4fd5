"""Networks of transformers that llama.cpp does not run.

plain.jsonl has a line for each: names and shapes of its tensors, and the keys of its config.json. tools/plain_rows.py
writes it from the classes of transformers. These rows serve `.apr` files, inspect, validate and merges; an export to
GGUF is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypedDict

from aprfmt.arch.blocks.decoder import HEAD_DIM, ROPE, number
from aprfmt.arch.converter import Converter
from aprfmt.arch.converters.common import times_hidden
from aprfmt.arch.row import HEAD, Architecture, Key, TensorRow


LINES = Path(__file__).with_name("plain.jsonl")
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"


class PlainLine(TypedDict):
    """A line of plain.jsonl.

    Attributes:
        id: of the row: the model type, or that of a decoder beside another row.
        classes: that have the network, the one with a head first, the one without any ("OPTModel") last.
        prefix: what the last one's checkpoints lack before the names of its tensors.
        model_type: as in config.json.
        shared: whether other networks have the same model type, so that only the class tells this one.
        sizes: field of Hyperparams -> config.json key.
        rope: whether its config.json has rope parameters.
        config: other config.json keys -> kind.
        tensors: name -> shape, and the condition under which it must be there; "3,hidden|hidden" for shapes of two
            kinds of layers.
        depth: what `{n}` counts, by the part of the name before it.
        embedding, head: names of the input and output embeddings.
    """

    id: str
    classes: list[str]
    prefix: str
    model_type: str
    shared: bool
    sizes: dict[str, str]
    rope: bool
    config: dict[str, str]
    tensors: dict[str, tuple[str, str]]
    depth: dict[str, str]
    embedding: str
    head: str


def _row(line: PlainLine) -> Architecture:
    return Architecture(
        id=line["id"], gguf=line["id"], hf_class=line["classes"][0], model_type=line["model_type"],
        hf_classes=tuple(line["classes"]), model_types=() if line["shared"] else (line["model_type"],),
        bare_classes=tuple(name for name in line["classes"][1:] if name.endswith("Model")),
        prefixes=(("", line["prefix"]),) if line["prefix"] else (),
        tensors=tuple(_tensors(line)),
        keys=(
            *_sizes(line["sizes"]), *((ROPE,) if line["rope"] else ()),
            *(
                HEAD_DIM if name == "head_dim" else Key("", (name,), kind)
                for name, kind in line["config"].items()
            ),
        ),
    )


_INNER = Converter(derive=lambda scope: times_hidden(4, scope))
"""GPT-J and CodeGen are four times as wide inside if their config.json has no `n_inner`."""


def _sizes(sizes: Mapping[str, str]) -> Iterator[Key]:
    for field, name in sizes.items():
        key = number(field)
        yield Key(key.gguf, (name,), key.kind, field, converter=_INNER if name == "n_inner" else None)


def _tensors(line: PlainLine) -> Iterator[TensorRow]:
    places = {line["embedding"]: (EMBEDDING,), line["head"]: (OUTPUT,)}
    for name, (dims, need) in line["tensors"].items():
        is_head = name == line["head"] and name != line["embedding"]
        for shape in dims.split("|"):
            yield TensorRow(
                (name,), places.get(name, ()), (shape,), HEAD if is_head else need,
                depth=line["depth"][name.partition("{n}")[0]] if "{n}" in name else "layers",
            )


ROWS: tuple[Architecture, ...] = tuple(map(_row, map(json.loads, LINES.read_text("utf-8").splitlines())))
