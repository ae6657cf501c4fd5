"""The modules of a network and the keys of its config, read from its source; the rows of ours that are nearest."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MAX_DEPTH = 12
"""Modules inside modules; deeper ones are a circle of classes."""
_LEAF = re.compile(
    r"Linear\w*|\w*Embedding|Conv\dd|\w*Norm\w*|Parameter|\w*Conv1D|\w*LinearBase|QuantizedLinear|SwitchLinear|zeros|ones"
)
_LISTS = ("ModuleList", "Sequential", "ModuleDict", "make_layers")
_BESIDE = ("rotary", "drop", "act_fn", "loss")
"""Modules without weights."""
_ALIASES = {"self_attention": "self_attn", "attn": "self_attn", "attention": "self_attn", "block": "layers"}


@dataclass(frozen=True)
class Network:
    """What a source says of a network.

    Attributes:
        modules: with weights, in a layer without what is before its number: "self_attn.q_proj", "embed_tokens".
        keys: of its config.
    """

    modules: frozenset[str]
    keys: frozenset[str]


@dataclass(frozen=True)
class Near:
    """A row of ours beside a network: what they share, from 0 to 1, and what either has alone."""

    row: str
    score: float
    modules: tuple[str, ...]
    ours: tuple[str, ...]
    keys: tuple[str, ...]


def network_of(source: Path, top: str) -> Network:
    """The network of the class `top` in a file, without importing it."""
    tree = ast.parse(source.read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    names = _modules(top, classes, 0) if top in classes else iter(())
    return Network(frozenset(map(_short, names)), frozenset(_config_keys(source, classes, top)))


def nearest_rows(network: Network, count: int = 3) -> list[Near]:
    """The rows whose tensors and config keys are most like those of a network, the best first."""
    found = []
    for row, (modules, keys) in _our_rows().items():
        tensors = _share(network.modules, modules)
        score = 0.75 * tensors + 0.25 * (len(network.keys & keys) / len(network.keys) if network.keys else tensors)
        extra = sorted(network.keys - keys)
        alone = sorted(network.modules - modules), sorted(modules - network.modules)
        found.append(Near(row, round(score, 3), *map(tuple, (*alone, extra))))
    return sorted(found, key=lambda near: -near.score)[:count]


def draft_of(name: str, model_type: str, near: Near) -> str:
    """A draft of a row that is a variant of the nearest one."""
    stem = re.sub(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel|Model)$", "", name)
    kind = model_type or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", stem).lower()
    lines = [f'variant(ARCHITECTURES["{near.row}"], "{kind}", "{kind}", hf_names("{stem}", "{kind}")),']
    for title, words in (("modules", near.modules), ("row has also", near.ours), ("config", near.keys)):
        if words:
            lines.append(f"# {title}: {', '.join(words)}")
    return "\n".join(lines)


@cache
def _our_rows() -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    from aprfmt.arch.table import ARCHITECTURES

    rows = {}
    for name, row in ARCHITECTURES.items():
        modules = {_short(hf) for tensor in row.tensors for hf in tensor.hf}
        rows[name] = (frozenset(modules), frozenset(_COMMON | {word for key in row.keys for word in key.hf}))
    return rows


_COMMON = {"tie_word_embeddings", "rope_parameters", "rope_scaling", "rope_theta", "initializer_range", "use_cache"}
_COMMON |= {"vocab_size", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "model_type"}
"""Config keys that every row reads, or that change no values."""


def _share(a: frozenset[str], b: frozenset[str]) -> float:
    return len(a & b) / len(a | b) if a | b else 0.0


def _short(name: str) -> str:
    """A module's name without what is before its layer, and without the number of an expert."""
    name = name.removesuffix(".weight").removesuffix(".bias").replace(".{e}", "")
    name = name.partition("{n}.")[2] or name.removeprefix("model.").removeprefix("transformer.")
    first, dot, rest = name.partition(".")
    fused = ("experts.gate_up_proj", "experts.up_proj")
    return (_ALIASES.get(first, first) + dot + rest).replace(*fused).replace("experts.gate_proj", "experts.up_proj")


def _modules(name: str, classes: Mapping[str, ast.ClassDef], depth: int) -> Iterator[str]:
    """Names of modules with weights in a class; layers of the outer list are {n}, members of an inner one {e}."""
    if depth > MAX_DEPTH:
        return
    node = classes[name]
    for base in node.bases:
        word = ast.unparse(base).rpartition(".")[2]
        if word in classes and word != name:
            yield from _modules(word, classes, depth + 1)
    for attribute, value in _assigned(node):
        if any(word in attribute for word in _BESIDE):
            continue
        calls = list(_called(value, classes))
        listed = any(call in _LISTS for call in calls) or isinstance(value, ast.ListComp | ast.List)
        inner = next((call for call in calls if call in classes), None)
        leaf = any(_LEAF.fullmatch(call) for call in calls)
        if inner is not None and inner != name:
            found = list(_modules(inner, classes, depth + 1)) or ([""] if "Norm" in inner else [])
            mark = ".{e}" if listed and "expert" in attribute else ".{n}" if listed else ""
            yield from (f"{attribute}{mark}{'.' if sub else ''}{sub}" for sub in found)
        elif leaf:
            yield f"{attribute}.{{e}}" if listed else attribute


def _assigned(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """What `__init__` assigns to attributes of the object."""
    made = (part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__")
    for part in ast.walk(next(made, ast.Pass())):
        if isinstance(part, ast.Assign | ast.AnnAssign) and part.value is not None:
            for to in part.targets if isinstance(part, ast.Assign) else (part.target,):
                if isinstance(to, ast.Attribute) and isinstance(to.value, ast.Name) and to.value.id == "self":
                    yield to.attr, part.value


def _called(value: ast.expr, classes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    """Names of what an expression calls; of `TABLE[key](...)` any class that the file has for it."""
    for node in ast.walk(value):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func).rpartition(".")[2].partition("[")[0]
        elif isinstance(node, ast.Name) and node.id in classes:
            yield node.id


def _config_keys(source: Path, classes: Mapping[str, ast.ClassDef], top: str) -> Iterator[str]:
    """The fields of a config class: of the file beside a modeling file, or the one in the file."""
    beside = source.with_name(source.name.replace("modeling_", "configuration_"))
    if beside != source and beside.is_file():
        found = [node for node in ast.parse(beside.read_text()).body if isinstance(node, ast.ClassDef)]
        stem = re.sub(r"(For\w+|LMHeadModel|Model)$", "", top)
        wanted = (f"{stem}TextConfig", f"{stem}Config")
        chosen = next((node for name in wanted for node in found if node.name == name), found[0] if found else None)
    else:
        chosen = next((classes[name] for name in ("TextArgs", "ModelArgs") if name in classes), None)
    for part in chosen.body if chosen is not None else ():
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id
