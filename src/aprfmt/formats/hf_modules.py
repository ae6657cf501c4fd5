"""sentence-transformers repositories: modules.json lists the modules after the network, one folder each.

The network yields a hidden state per token; Pooling reduces them to one vector, Dense layers project it, Normalize
scales it to unit length. Settings are in the config.json of a module's folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from aprfmt.light_dataclass import light_dataclass
from aprfmt.types import Json, JsonObject, Shape

MODULES_NAME = "modules.json"

TextFile: TypeAlias = Callable[[str], bytes | None]
"""Returns a file of the folder by name, or None."""

_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
_WORDS = {"lasttoken": "last"}
_TYPE = "sentence_transformers.models."
_IDENTITY = "torch.nn.modules.linear.Identity"

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_NETWORKS = ("Transformer", "MLMTransformer", "CLIPModel")
_WITHOUT_CONFIG = ("Normalize",)


@light_dataclass(frozen=True, slots=True)
class Module:
    """An entry of modules.json.

    Attributes:
        kind: the class without its package, "Pooling".
        path: the folder, "" for the model's own.
        config: the folder's config.json; None if missing, or not a JSON object.
    """

    kind: str
    path: str
    config: JsonObject | None

    @property
    def number(self) -> int | None:
        """The number at the start of the folder's name."""
        head = self.path.partition("_")[0]
        return int(head) if len(head) == 1 and head.isdecimal() and head.isascii() else None

    @property
    def is_linear(self) -> bool:
        """Whether it is a Dense layer without an activation."""
        named = (self.config or {}).get("activation_function", _IDENTITY)
        return self.kind == "Dense" and str(named).rpartition(".")[2] == "Identity"

    def width(self, side: str) -> int | None:
        """Input ("in") or output ("out") width of a Dense; None if not stated."""
        found = (self.config or {}).get(f"{side}_features")
        return found if type(found) is int and found > 0 else None


def modules_of(text_file: TextFile) -> list[Module]:
    """The modules of a folder in order; [] if it has none. Invalid JSON counts as none."""
    found = _json(text_file(MODULES_NAME))
    return list(_modules(found, text_file)) if isinstance(found, list) else []


def _modules(lines: list[Json], text_file: TextFile) -> Iterator[Module]:
    for line in lines:
        if isinstance(line, dict) and isinstance(line.get("type"), str):
            kind, path = str(line["type"]).rpartition(".")[2], line.get("path")
            config = _json(text_file(f"{path}/config.json")) if path and isinstance(path, str) else None
            yield Module(kind, path if isinstance(path, str) else "", config if isinstance(config, dict) else None)


def read_modules(text_file: TextFile) -> dict[str, object]:
    """Settings of a folder's modules, under the names of arch.heads.MODULE_KEYS.

    `pooling` is "mean", "cls", "last", another word, several joined by "+"; `dense_2_in`, `dense_2_out`, `dense_2_bias`
    describe the linear layer in the folder 2_Dense; `other_modules` are the remaining classes.
    """
    found: dict[str, object] = {}
    others: list[str] = []
    for module in modules_of(text_file):
        if module.kind.endswith("Pooling") and "pooling" not in found and (word := _word(module.config or {})):
            found["pooling"] = word
        elif module.is_linear and module.number and module.width("in") and module.width("out"):
            name = f"dense_{module.number}"
            found |= {f"{name}_{side}": module.width(side) for side in ("in", "out")}
            found[f"{name}_bias"] = (module.config or {}).get("bias", True) is not False
        elif module.kind not in (*_NETWORKS, "Pooling", *_WITHOUT_CONFIG):
            others.append(module.kind)
    return found | ({"other_modules": others} if others else {})


Problem: TypeAlias = tuple[str, str, str | None]
"""(file, what is wrong with it, the tensor concerned)."""


def module_problems(
    text_file: TextFile, shapes: Mapping[str, Shape], has_file: Callable[[str], bool], hidden: int | None
) -> Iterator[Problem]:
    """What is missing in the modules of a folder, or contradictory.

    `shapes` are those of the folder's tensors, row-major, a module's prefixed with its folder; `has_file` tells whether
    a file exists, `hidden` is the width of the network.
    """
    raw = text_file(MODULES_NAME)
    if raw is not None and _json(raw) is None:
        yield MODULES_NAME, "is not JSON", None
    width = hidden
    for module in modules_of(text_file):
        if module.kind in ("Pooling", "Dense") and module.config is None:
            yield (
                f"{module.path}/config.json",
                f"is missing or not a JSON object, but {MODULES_NAME} lists the module",
                None,
            )
        elif module.kind == "Dense":
            yield from _dense_problems(module, shapes, has_file, width)
            width = module.width("out")


def _dense_problems(
    module: Module, shapes: Mapping[str, Shape], has_file: Callable[[str], bool], width: int | None
) -> Iterator[Problem]:
    """`width` is the input width; None if unknown."""
    sizes, path = (module.width("in"), module.width("out")), f"{module.path}/config.json"
    if None in sizes:
        yield path, "lacks valid in_features and out_features", None
        return
    if width is not None and sizes[0] != width:
        yield path, f"takes {sizes[0]} values, but the previous module outputs {width}", None
    name = f"{module.path}.linear.weight"
    if name in shapes and shapes[name] != (sizes[1], sizes[0]):
        yield path, f"needs a weight of {[sizes[1], sizes[0]]}, found {list(shapes[name])}", name
    if name not in shapes and not any(has_file(f"{module.path}/{file}") for file in _WEIGHTS):
        yield f"{module.path}/{_WEIGHTS[0]}", "is missing; it contains the weights of the module", None


def _json(raw: bytes | None) -> Json:
    try:
        found: Json = None if raw is None else json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return found


def _word(config: Mapping[str, object]) -> str | None:
    words = [word for key, word in _MODES.items() if config.get(key) is True]
    mode = config.get("pooling_mode")
    if not words and isinstance(mode, str):
        words = [_WORDS.get(mode, mode)]
    return "+".join(words) or None


def module_files(stated: Mapping[str, object], width: int) -> dict[str, bytes]:
    """The files that describe the modules `stated` (see read_modules) of a network `width` values wide.

    {} without both a pooling that sentence-transformers can name and a linear layer.
    """
    word = stated.get("pooling")
    numbers = [n for n in range(1, 10) if stated.get(f"dense_{n}_out")]
    if word not in _MODES.values() and not numbers:
        return {}
    paths = {"": "Transformer"}
    files: dict[str, bytes] = {}
    if word in _MODES.values():
        paths["1_Pooling"] = "Pooling"
        modes = {key: mode == word for key, mode in _MODES.items()}
        files["1_Pooling/config.json"] = _text({"word_embedding_dimension": width, **modes})
    for n in numbers:
        sides = {f"{side}_features": stated.get(f"dense_{n}_{side}") for side in ("in", "out")}
        config = {**sides, "bias": bool(stated.get(f"dense_{n}_bias")), "activation_function": _IDENTITY}
        paths[f"{n}_Dense"] = "Dense"
        files[f"{n}_Dense/config.json"] = _text(config)
    lines = [
        {"idx": i, "name": str(i), "path": path, "type": f"{_TYPE}{kind}"}
        for i, (path, kind) in enumerate(paths.items())
    ]
    return {MODULES_NAME: _text(lines), **files}


def _text(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
