"""What llama.cpp's loader of each architecture reads; tools/loaders.py extracts it from llama.cpp's source."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from aprfmt.light_dataclass import light_dataclass
from aprfmt.types import Shape

OUTPUT_HEAD = "output.weight"
EPSILONS = ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon")
_LAYER = re.compile(r"\.\d+(?=\.)")


@light_dataclass(frozen=True, slots=True)
class Loader:
    """What llama.cpp reads of the GGUFs of one architecture.

    Attributes:
        required, optional: keys after the architecture's prefix; `required` are those of every model.
        own: those of them that its own loader reads; the others are read for every architecture. needed, known: tensors
        without their layer ("blk.attn_q.weight"); `needed` are those of every model, `known`
            are all.
        rope_factors: tensors of rope factors that the loader and the graph read.
        window_factor: whether sliding-window layers are not stretched, and are scaled by `rope.scaling.attn_factor`.
        period: default period of the sliding-window layers, 0 for none.
        full_first: whether the first layer of a period has full attention, not the last.
        square: tensors whose two sides are the hidden size.
        first_rotation: whether full-attention layers rotate as many dimensions of a head as the first layer.
        scales_scores: whether the graph scales attention scores under YaRN (see arch.yarn).
        scales: scales of weights ("blk.ffn_down.scale") that the graph multiplies by; it ignores others.
        memory: "hybrid" (attention and recurrent layers), "recurrent", "windowed" (two caches of attention), or "".
        asserts: what the code asserts, in its own words.
    """

    required: frozenset[str]
    optional: frozenset[str]
    own: frozenset[str]
    needed: frozenset[str]
    known: frozenset[str]
    rope_factors: frozenset[str]
    window_factor: bool
    period: int
    full_first: bool
    square: frozenset[str]
    first_rotation: bool
    scales_scores: bool
    scales: frozenset[str]
    memory: str
    asserts: frozenset[str]

    def multiplies(self, scale: str) -> bool:
        """Whether the graph multiplies the product with a weight by the scale of that name."""
        return _LAYER.sub("", scale, count=1) in self.scales

    @property
    def reads_epsilon(self) -> bool:
        """Whether norms add the file's epsilon; the others add 0."""
        return not (self.required | self.optional).isdisjoint(EPSILONS)

    def misshapen(self, shapes: Mapping[str, Shape], hidden: int) -> Iterator[str]:
        """Those of the tensors that should be hidden-size squares and are not."""
        for name, shape in shapes.items():
            if _LAYER.sub("", name, count=1) in self.square and shape != (hidden, hidden):
                yield name

    def unknown(self, names: Iterable[str]) -> Iterator[str]:
        """Those of the tensors that the loader does not read: it then refuses the file."""
        return (name for name in names if _LAYER.sub("", name, count=1) not in self.known)


@cache
def loader_of(gguf: str) -> Loader | None:
    """The loader of a `general.architecture`; None if llama.cpp does not know it."""
    common, own = _lines().get(""), _lines().get(gguf)
    if common is None or own is None or not gguf:
        return None
    base, line = json.loads(common), json.loads(own)
    tensors = line["tensors"]
    return Loader(
        required=frozenset(line["keys"]["required"]),
        optional=frozenset((*line["keys"]["optional"], *base["keys"]["optional"])),
        own=frozenset((*line["keys"]["required"], *line["keys"]["optional"])), needed=frozenset(tensors["required"]),
        known=frozenset((*tensors["required"], *tensors["optional"], *base["tensors"]["optional"])),
        rope_factors=frozenset(line["rope_factors"]), window_factor=line["window_factor"], period=line["period"],
        full_first=line["full_first"], square=frozenset(line["square"]), first_rotation=line["first_rotation"],
        scales_scores=line["scores"], scales=frozenset(line["scales"]), memory=line["memory"],
        asserts=frozenset(line["asserts"]),
    )  # fmt: skip


def needs_head(gguf: str) -> bool:
    """Whether llama.cpp requires `output.weight` even if the head is tied."""
    loader = loader_of(gguf)
    return loader is not None and OUTPUT_HEAD in loader.needed


def supports_untied_head(gguf: str) -> bool:
    """Whether llama.cpp's network of the architecture can have an untied head."""
    loader = loader_of(gguf)
    return loader is None or OUTPUT_HEAD in loader.known


@cache
def _lines() -> Mapping[str, str]:
    """Architecture -> its line of loaders.jsonl."""
    text = Path(__file__).with_name("loaders.jsonl").read_text("utf-8")
    return {line.split('"', 4)[3]: line for line in text.splitlines()}
