"""Extra tensors: which tensors of a checkpoint are not part of its language model, and what they belong to.

A checkpoint may contain more than the network of its row: vision or audio towers, projectors, MTP layers, poolers,
training heads. What is extra follows from the names of the row, not from a list of other parts: a module that contains
none of the row's names is another part. Inside the network the rules are stricter: an unknown tensor in one of its
modules or layers, or next to them, does not mean another part but the wrong row.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache, lru_cache

from aprfmt.arch import names
from aprfmt.arch.grammar import is_unwanted
from aprfmt.arch.heads import MODULE, head_of
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.row import Architecture
from aprfmt.arch.scopes import drafts_key
from aprfmt.arch.table import wrapper_of
from aprfmt.light_dataclass import light_dataclass
from aprfmt.text import first_few, format_bytes, plural
from aprfmt.types import Shape

DRAFT_LAYERS = "MTP layers"
ADAPTER = "adapter"
HEAD = "head of another task"

# Name of a part by a component of its tensors' names; for messages only, except for single tensors (see
# _is_own). Names of a GGUF's towers are too short to be searched for anywhere but at the beginning.
_KINDS = (
    (
        "vision tower",
        r"v|vision|visual|vit|vision_(tower|model|encoder|backbone|embed_tokens|embedder)|image_(encoder|tower)"
        r"|sam_model|qwen2_model",
    ),
    ("audio tower", r"a|audio|audio_(tower|model|encoder)|speech_encoder"),
    (
        "projector",
        r"mm|mlp1|\w*projector|\w*connector|aligner|perceiver|resampler|image_(newline|start|end|pad)|view_seperator"
        r"|embed_(vision|audio)|\w*(vision|image|audio|modality)_proj\w*",
    ),
    (DRAFT_LAYERS, r"mtp\w*|nextn\w*"),
    (ADAPTER, r"base_model|lora_\w+|prompt_embeddings|adapters?"),
    ("pooler", r"pooler"),
    (
        HEAD,
        r"score|cls|(pre_)?classifier|classification_head|qa_outputs|seq_relationship|v_head|value_head|reward_head"
        r"|logits_proj|rm_head|regression_layer|gating|reward_transform_matrix|multiple_choice_head",
    ),
    ("module of sentence-transformers", r"\d+_\w+"),
)
_SHORT = ("v", "a", "mm")

# llama.cpp's layers after pooling: GGUF names, whatever modules of a checkpoint are called so.
_GGUF_HEAD = re.compile(r"(cls|cls\.output|cls\.norm|dense_[23])\.(weight|bias)")

# A layer after the last is an MTP layer if the config counts it, or if it contains one of these.
_DRAFT_MARK = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head|nextn)\.")


def outside(arch: Architecture, h: Hyperparams, all_names: Collection[str]) -> set[str]:
    """Those of a checkpoint's or a GGUF's tensor names that are not part of the network."""
    wrapper = wrapper_of(h.hf_architecture)
    beside = {name for name in all_names if wrapper is not None and name.startswith(wrapper.beside)}
    layers = {name: n for name in all_names if name not in beside and (n := layer_of(arch, name)) is not None}
    # A further layer under the usual names does not belong to a family that names its MTP layers differently.
    drafts = _draft_layers(h, layers, 0 if arch.drafts else n_drafts(arch, h))
    modules = {name for name in all_names if MODULE.match(name) and _is_left_out(arch, h, name)}
    in_drafts = {name for name, layer in layers.items() if layer in drafts}
    elsewhere = {name for name in all_names if name not in layers and _is_elsewhere(arch, name)}
    return beside | modules | in_drafts | elsewhere


def unknown_empty(arch: Architecture, shapes: Mapping[str, Shape]) -> set[str]:
    """Those of the tensors without values that the network does not have, whatever their name."""
    empty = {name for name, shape in shapes.items() if 0 in shape and not names.ignorable(arch, name)}
    return {name for name in empty if not names.canonical_name(arch, name) and not names.matches(arch, name, "gguf")}


def holds_adapter(all_names: Collection[str]) -> bool:
    """Whether a file contains only tensors of an adapter."""
    return bool(all_names) and all(_part_of(None, name)[0] == ADAPTER for name in all_names)


def n_drafts(arch: Architecture | None, h: Hyperparams) -> int:
    """The number of MTP layers in the config."""
    counted = next((h.extra[name] for name in drafts_key(arch).hf if name in h.extra), 0)
    return counted if type(counted) is int else 0


def is_draft(arch: Architecture | None, name: str) -> bool:
    """Whether `name`, an extra tensor, belongs to an MTP layer."""
    return _part_of(arch, name)[0] == DRAFT_LAYERS


def names_drafts(arch: Architecture) -> bool:
    """Whether the row names the tensors of MTP layers, on both sides."""
    return any(row.layers == "draft" for row in arch.tensors)


# `general.type` or `general.architecture` of a GGUF without a network -> its content.
_NO_NETWORK = {
    "adapter": "an adapter",
    "mmproj": "towers and projectors",
    "clip": "towers and projectors",
    "imatrix": "an importance matrix",
    "controlvector": "a control vector",
}


def part_of(arch: Architecture | None, kv: Mapping[str, object], h: Hyperparams, all_names: Collection[str]) -> str:
    """What a GGUF contains that is not a network ("an adapter"); "" for a network, or a vocabulary only."""
    stated = (_NO_NETWORK.get(str(kv.get(f"general.{key}"))) for key in ("type", "architecture"))
    if (found := next(filter(None, stated), None)) is not None:
        return found
    if arch is None or not h.num_layers or not n_drafts(arch, h):
        return ""
    layers = {layer for name in all_names if (layer := layer_of(arch, name)) is not None}
    return "" if not layers or min(layers) < h.num_layers else f"{DRAFT_LAYERS} only"


@light_dataclass(frozen=True, slots=True)
class ExtraTensors:
    """Extra tensors that belong together: what they are, their name prefix, count and bytes."""

    kind: str
    prefixes: tuple[str, ...]
    n_tensors: int
    n_bytes: int

    def __str__(self) -> str:
        """`27 tensors of the vision tower (vision_tower.*, 12.3 MiB)`."""
        beginnings = first_few(self.prefixes)
        return f"{plural(self.n_tensors, 'tensor')} of the {self.kind} ({beginnings}, {format_bytes(self.n_bytes)})"


def parts(arch: Architecture | None, sizes: Mapping[str, int], hf_class: str | None = None) -> list[ExtraTensors]:
    """Groups the extra tensors by what they belong to, the largest part first.

    A head is named by the class of the whole model.
    """
    found: dict[str, dict[str, list[int]]] = {}
    head = head_of(hf_class)
    for name, n_bytes in sorted(sizes.items()):
        kind, prefix = _part_of(arch, name)
        kind = str(head) if kind == HEAD and head is not None else kind
        found.setdefault(kind, {}).setdefault(prefix, []).append(n_bytes)
    made = [
        ExtraTensors(kind, tuple(by_prefix), sum(map(len, by_prefix.values())), sum(map(sum, by_prefix.values())))
        for kind, by_prefix in found.items()
    ]
    return sorted(made, key=lambda part: (-part.n_bytes, part.kind))


_IN_LAYER = re.compile(r"(?:layers?|blocks?|h)\.\d+\.")


def unsupported_parts(all_names: Collection[str], hf_class: str | None) -> Iterator[str]:
    """What a GGUF of the family cannot store of a network's tensors, a sentence per part."""
    head = head_of(hf_class)
    found: dict[str, list[str]] = {}
    for name in sorted(all_names):
        words = name.split(".")
        kind = "pooler" if "pooler" in words else str(head or HEAD)
        found.setdefault("network" if _IN_LAYER.search(name) else kind, []).append(name)
    for kind, own in found.items():
        yield f"a GGUF cannot hold {plural(len(own), 'tensor')} of the {kind}: {first_few(own)}"


# --- names ---


def _is_left_out(arch: Architecture, h: Hyperparams, name: str) -> bool:
    """Whether a module's tensor is one that the row does not have, or only in other networks."""
    found = names.matches(arch, name)
    return all(is_unwanted(arch, match.row.need, h) for match in found)


def _is_elsewhere(arch: Architecture, name: str) -> bool:
    """Whether a name outside the layers is not part of the network, and not a possible variant."""
    if names.is_gguf_only(arch, name) or names.ignorable(arch, name):
        return False
    if names.canonical_name(arch, name) is not None or names.matches(arch, name, "gguf"):
        return False
    if _GGUF_HEAD.fullmatch(name):
        return True
    return not any(_is_own(arch, spelled) for spelled in names.possible_spellings(arch, name))


def _is_own(arch: Architecture, name: str) -> bool:
    """Whether an unknown name is inside a module of the network, or is a single tensor next to them."""
    modules = _modules(arch)
    container = max((c for c in modules if name.startswith(c)), key=len)
    first, *rest = name[len(container) :].split(".")
    if first in modules[container] or len(rest) > 1:
        return first in modules[container]
    return _kind_of(first, not container) is None and all(_kind_of(part, False) is None for part in rest)


@cache
def _modules(arch: Architecture) -> dict[str, set[str]]:
    """The network's modules ("model.", "") -> their names inside ("layers", "norm"; "lm_head")."""
    found: dict[str, set[str]] = {"": set()}
    for row in arch.tensors:
        for template in (*row.hf, *row.gguf):
            path = template.partition(".{")[0].removesuffix(".weight").removesuffix(".bias")
            container, dot, module = path.rpartition(".")
            found.setdefault(container + dot, set()).add(module)
    return found


# --- layers ---


@cache
def _layer_pattern(arch: Architecture) -> re.Pattern[str]:
    heads = {name.partition("{n}")[0] for row in arch.tensors for name in (*row.hf, *row.gguf) if "{n}" in name}
    return re.compile(f"({'|'.join(map(re.escape, sorted(heads)))})(0|[1-9][0-9]{{0,5}})\\.")


def layer_of(arch: Architecture, name: str) -> int | None:
    """The network layer that contains `name`, whether the row knows it or not; None for other names."""
    look = _layer_pattern(arch).match
    found = look(name) or next(filter(None, map(look, names.possible_spellings(arch, name))), None)
    return int(found[2]) if found is not None else None


def _draft_layers(h: Hyperparams, layers: Mapping[str, int], counted: int) -> set[int]:
    """MTP layers: they follow the network's own; the config or markers identify them."""
    marked = {layer for name, layer in layers.items() if _DRAFT_MARK.search(name)}
    if h.num_layers is None:
        return marked
    end = h.num_layers + counted
    return {n for n in layers.values() if n >= h.num_layers and (n < end or n in marked)}


# --- kinds ---


@lru_cache(1 << 12)
def _kind_of(component: str, is_first: bool) -> str | None:
    if component in _SHORT and not is_first:
        return None
    return next((kind for kind, pattern in _KINDS if re.fullmatch(pattern, component)), None)


def _part_of(arch: Architecture | None, name: str) -> tuple[str, str]:
    """The part that `name` belongs to, and the name prefix of that part."""
    if arch is not None and layer_of(arch, name) is not None:
        head = re.match(r"(.*?\.\d+)\.", name)
        return DRAFT_LAYERS, f"{head[1]}.*" if head else name
    components = name.split(".")
    for i, component in enumerate(components):
        kind = _kind_of(component, i == 0)
        if kind is not None:
            whole = i == len(components) - 1 or (i == len(components) - 2 and components[-1] in ("weight", "bias"))
            return kind, name if whole else ".".join((*components[: i + 1], "*"))
    n = 2 if components[0] in ("model", "transformer", "language_model") and len(components) > 2 else 1
    return "other parts", ".".join((*components[:n], "*"))
