"""Merge recipes: models, layer ranges and method parameters, from options or YAML.

The YAML is that of mergekit: `merge_method`, `models` or `slices`, `base_model`, `parameters` at three levels, each a
number, a list of numbers (a gradient over the layers), or a list of `filter` and `value`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from aprfmt.canonical.merge_methods import (
    DARE_LINEAR,
    DARE_TIES,
    LINEAR,
    METHODS,
    NONE,
    NORM,
    PASSTHROUGH,
    RESCALES,
    SLERP,
    TASK_ARITHMETIC,
    TIES,
    MergeRule,
)
from aprfmt.errors import UsageError
from aprfmt.io.settings import SettingsNode, read_yaml, shown
from aprfmt.io.source import exists
from aprfmt.limits import MAX_LAYERS
from aprfmt.text import first_few
from aprfmt.types import PathLike

WEIGHTED, DARE = "weighted", "dare"

ALIASES = {WEIGHTED: LINEAR, **dict.fromkeys(("average", "mean"), LINEAR), DARE: DARE_LINEAR}

_DELTA = ("weight", "density", "normalize", "rescale", "lambda")

PARAMETERS: Mapping[str, tuple[str, ...]] = {
    LINEAR: ("weight", "normalize"),
    SLERP: ("t",),
    **dict.fromkeys((TIES, DARE_LINEAR, DARE_TIES), _DELTA),
    TASK_ARITHMETIC: ("weight", "normalize", "lambda"),
    PASSTHROUGH: ("scale",),
}
"""Method -> its parameters."""

_OF_INPUT = ("weight", "density", "scale")
_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    LINEAR: {"normalize": True},
    SLERP: {},
    TIES: {"normalize": True, "rescale": NONE, "lambda": 1.0, "density": 1.0},
    DARE_LINEAR: {"normalize": False, "rescale": NORM, "lambda": 1.0, "density": 1.0},
    DARE_TIES: {"normalize": False, "rescale": NORM, "lambda": 1.0, "density": 1.0},
    TASK_ARITHMETIC: {"normalize": False, "lambda": 1.0},
    PASSTHROUGH: {"scale": 1.0},
}
_IGNORED = "int8_mask"
_KNOWN = {*(name for names in PARAMETERS.values() for name in names), _IGNORED}
_WITH_BASE = (SLERP, TIES, DARE_LINEAR, DARE_TIES, TASK_ARITHMETIC)

_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


Parameters = Mapping[str, SettingsNode]


@dataclass(frozen=True, slots=True)
class MergeInput:
    """A model of a slice, its layer range (end exclusive) and its own parameters."""

    path: str
    layers: tuple[int, int] | None = None
    parameters: Parameters = field(default_factory=dict)
    line: int = 0


@dataclass(frozen=True, slots=True)
class MergedLayers:
    """A slice: some layers of the result."""

    sources: tuple[MergeInput, ...]
    base: str | None = None
    parameters: Parameters = field(default_factory=dict)
    line: int = 0


@dataclass(frozen=True, slots=True)
class MergeRecipe:
    """A merge recipe.

    Attributes:
        method: one of METHODS.
        parts: slices in order; a single one of whole models if no layers are given.
        base: the base model.
        parameters: of all slices.
        dtype: `dtype` or `out_dtype`, as a value of --dtype; None without them.
        tokenizer: the model whose tokenizer is used; "base", "union", or None.
        path: the YAML file; None for options.
        notes: warnings on ignored parameters.
    """

    method: str
    parts: tuple[MergedLayers, ...]
    base: str | None = None
    parameters: Parameters = field(default_factory=dict)
    dtype: str | None = None
    tokenizer: str | None = None
    path: PathLike | None = None
    notes: tuple[str, ...] = ()

    @property
    def models(self) -> list[str]:
        """Every model once: the base, then the others in order of appearance."""
        named = [part.base for part in self.parts] + [source.path for part in self.parts for source in part.sources]
        return list(dict.fromkeys(path for path in (self.base, *named) if path is not None))

    def base_of(self, number: int) -> int | None:
        """The base among the inputs of a slice; None for methods without one."""
        part = self.parts[number]
        base = part.base or self.base
        if self.method not in _WITH_BASE:
            return None
        return next(i for i, source in enumerate(part.sources) if source.path == base)

    def rule(self, number: int, name: str, names: Sequence[str], place: float, seed: int) -> MergeRule:
        """The merge rule of the weight `name` in slice `number`; `names` are its names in the inputs.

        `place` is the position of its layer in the slice, from 0 to 1. Raises UsageError for missing parameters and
        impossible values.
        """
        part = self.parts[number]
        common = (part.parameters, self.parameters)
        base = self.base_of(number)
        found: dict[str, object] = {}
        for parameter in PARAMETERS[self.method]:
            if parameter not in _OF_INPUT:
                found[parameter] = self._value(parameter, common, name, place)
                continue
            found[parameter] = tuple(
                0.0 if i == base else self._value(parameter, (source.parameters, *common), own, place, source.path)
                for i, (source, own) in enumerate(zip(part.sources, names, strict=True))
            )
        return _rule(self.method, found, base, seed, len(part.sources), name)

    def _value(
        self, parameter: str, scopes: Sequence[Parameters], name: str, place: float, model: str | None = None
    ) -> object:
        for scope in scopes:
            if parameter in scope and (value := evaluate(parameter, scope[parameter], name, place)) is not None:
                return value
        if parameter in _DEFAULTS[self.method]:
            return _DEFAULTS[self.method][parameter]
        of = f" of {model}" if model is not None else ""
        raise UsageError(
            f"{self.method} needs {parameter}, which is not set for {name}{of}",
            path=self.path,
            hint="end the list with a value without a filter, for all other weights",
        )


def _rule(method: str, found: Mapping[str, object], base: int | None, seed: int, n: int, name: str) -> MergeRule:
    def several(key: str) -> tuple[float, ...]:
        values = found.get(key, ())
        assert isinstance(values, tuple)
        return values

    def one(key: str, default: float) -> float:
        value = found.get(key, default)
        assert isinstance(value, float)
        return value

    weights = several("weight") or (1.0,) * n
    if method == LINEAR and found["normalize"] and abs(math.fsum(weights)) < 1e-12:
        raise UsageError(f"the weights of {name} add up to 0", hint="change the weights, or set normalize: false")
    scales = several("scale")
    return MergeRule(
        method=method, base=base, weights=weights, densities=several("density") or (1.0,) * n, t=one("t", 0.5),
        normalize=bool(found.get("normalize", False)), rescale=str(found.get("rescale", NONE)),
        factor=scales[0] if scales else one("lambda", 1.0), seed=seed,
    )  # fmt: skip


# --- values of parameters ---


def evaluate(parameter: str, node: SettingsNode, name: str, place: float) -> object:
    """The value of a parameter for the weight `name`, at `place` from 0 to 1 of its slice; None if no filter matches.

    A list of numbers is a gradient, interpolated linearly over the layers. Filters are substrings of a weight's name;
    the first match counts.
    """
    value = node.value
    if isinstance(value, dict):
        return _filtered(parameter, node, name, place)
    if not isinstance(value, list):
        return checked(parameter, node)
    if isinstance(value[0].value, dict):
        found = (_filtered(parameter, item, name, place) for item in value)
        return next((number for number in found if number is not None), None)
    numbers = [checked(parameter, item) for item in value]
    if not all(isinstance(number, float) for number in numbers):
        return numbers[int(place * (len(numbers) - 1))]
    scaled = place * (len(numbers) - 1)
    low = int(scaled)
    share = scaled - low
    a, b = (number for number in (numbers[low], numbers[min(len(numbers) - 1, low + 1)]) if isinstance(number, float))
    return (1 - share) * a + share * b


def _filtered(parameter: str, node: SettingsNode, name: str, place: float) -> object:
    entries = node.mapping(parameter)
    text = entries["filter"].value if "filter" in entries else None
    if text is None or text == "*" or str(text) in name:
        return evaluate(parameter, entries["value"], name, place)
    return None


def checked(parameter: str, node: SettingsNode) -> float | bool | str:
    """Checks one value of a parameter. Raises UsageError."""
    value = node.value
    if parameter == "normalize":
        if not isinstance(value, bool):
            raise node.error(f"normalize must be true or false, not {shown(value)}")
        return value
    if parameter == "rescale":
        if isinstance(value, bool):
            return NORM if value else NONE
        if value not in RESCALES:
            raise node.error(f"rescale must be true, false, {', '.join(RESCALES)}, not {shown(value)}")
        return str(value)
    number = value
    if isinstance(value, str):
        try:
            number = float(value)  # YAML 1.1 parses 1e-3 as text
        except ValueError:
            number = None
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise node.error(f"{parameter} must be a number, not {shown(value)}")
    limits = {"density": (0.0, 1.0), "t": (0.0, 1.0)}.get(parameter)
    if limits is not None and not limits[0] <= number <= limits[1]:
        raise node.error(f"{parameter} must be from {limits[0]:g} to {limits[1]:g}, not {number:g}")
    return float(number)


def check_parameters(method: str, parameters: Parameters) -> tuple[dict[str, SettingsNode], list[str]]:
    """The parameters, all values checked, and warnings on ignored ones.

    Raises UsageError for a parameter that the method does not have.
    """
    out, notes = {}, []
    for name, node in parameters.items():
        if name == _IGNORED:
            notes.append(f"{_IGNORED} is ignored: masks are not stored")
            continue
        if name not in PARAMETERS[method]:
            what = f"{method} has no parameter {name}" if name in _KNOWN else f"unknown parameter {name!r}"
            raise node.error(what, f"it has {first_few(list(PARAMETERS[method]), 9)}")
        _check_setting(name, node)
        out[name] = node
    return out, notes


def _check_setting(parameter: str, node: SettingsNode, *, within: bool = False) -> None:
    if isinstance(node.value, dict):
        entries = node.value
        odd = next((key for key in entries if key not in ("filter", "value")), None)
        if odd is not None or "value" not in entries:
            raise node.error(f"{parameter}: a filter takes the keys filter and value only")
        if isinstance(entries.get("filter", SettingsNode(None)).value, dict | list):
            raise node.error(f"{parameter}: filter must be a substring of a weight's name")
        _check_setting(parameter, entries["value"])
    elif isinstance(node.value, list):
        kinds = {isinstance(item.value, dict) for item in node.items(parameter)}
        if len(kinds) > 1 or within:
            raise node.error(f"{parameter} must be a list of numbers or a list of filters, not both")
        for item in node.value:
            _check_setting(parameter, item, within=True)
    else:
        checked(parameter, node)


def find_method(name: str, node: SettingsNode | None = None) -> str:
    """The method of a name, with underscores or hyphens. Raises UsageError for any other."""
    spelled = name.lower().replace("-", "_")
    found = ALIASES.get(spelled, spelled)
    if found not in METHODS:
        known = sorted(method.replace("_", "-") for method in {*METHODS, *ALIASES})
        near = get_close_matches(name.lower(), known, 1)
        hint = (f"did you mean {near[0]}? " if near else "") + f"one of: {', '.join(known)}"
        raise (node or SettingsNode(name)).error(f"unknown merge method {name!r:.60}", hint)
    return found


# --- the whole ---


def check_recipe(recipe: MergeRecipe) -> MergeRecipe:
    """`recipe`, with the base added to the models of its only slice. Raises UsageError if it is not a valid merge."""
    method = recipe.method
    parts = []
    for part in recipe.parts:
        base = part.base or recipe.base
        node = SettingsNode(None, part.line)
        sources = part.sources
        if method in _WITH_BASE:
            if base is None:
                raise node.error(f"{method} needs a base model", "set it with --base FILE, or base_model in the recipe")
            if base not in [source.path for source in sources]:
                if sources[0].layers is not None:
                    raise node.error(
                        f"the base model {base} is not one of the slice's sources", "add it to the sources"
                    )
                sources = (MergeInput(base), *sources)
        elif recipe.base is not None and method == LINEAR and base not in [source.path for source in sources]:
            raise node.error(
                "linear takes no base model, and this base is not one of the models",
                "add it to the models with a weight",
            )
        if method == SLERP and len(sources) != 2:
            raise node.error(f"slerp merges exactly two models, not {len(sources)}")
        if method == PASSTHROUGH and len(sources) != 1:
            raise node.error("passthrough takes exactly one source per slice")
        if method in _WITH_BASE and len(sources) < 2:
            raise node.error(f"{method} needs at least one model besides the base")
        lengths = {source.layers[1] - source.layers[0] for source in sources if source.layers is not None}
        if len(lengths) > 1:
            raise node.error("the sources of a slice must have the same number of layers")
        parts.append(MergedLayers(sources, part.base, part.parameters, part.line))
    return MergeRecipe(
        method, tuple(parts), recipe.base, recipe.parameters, recipe.dtype, recipe.tokenizer, recipe.path, recipe.notes
    )


# --- YAML ---


def read_recipe(path: PathLike) -> MergeRecipe:
    """The recipe in a YAML file. Raises UsageError with the line number."""
    tree = read_yaml(path, "recipe")
    if tree.value is None:
        raise UsageError("the recipe is empty", path=path)
    try:
        return check_recipe(_recipe(tree, path))
    except UsageError as error:
        raise UsageError(error.message, path=path, hint=error.hint) from None


_KEYS = (
    *("merge_method", "models", "slices", "base_model", "parameters", "dtype", "out_dtype", "tokenizer_source"),
    *("tokenizer", "chat_template"),
)


def _entries(node: SettingsNode, what: str, known: Sequence[str]) -> dict[str, SettingsNode]:
    """The entries of a mapping without null values. Raises UsageError for an unknown key, with its line."""
    entries = node.mapping(what)
    for key, value in entries.items():
        if key not in known:
            raise value.error(f"unknown key {key!r:.40} in {what}", f"supported keys: {', '.join(known)}")
    return {key: value for key, value in entries.items() if value.value is not None}


def _recipe(root: SettingsNode, path: PathLike) -> MergeRecipe:
    if isinstance(root.value, dict) and "modules" in root.value:
        raise root.value["modules"].error("modules are not supported", "set models or slices instead")
    entries = _entries(root, "the recipe", _KEYS)
    if "merge_method" not in entries:
        raise root.error("merge_method is missing", f"one of: {', '.join(METHODS)}")
    method = find_method(_text(entries["merge_method"], "merge_method"), entries["merge_method"])
    if ("models" in entries) == ("slices" in entries):
        raise root.error("a recipe has either models or slices")
    notes: list[str] = []
    if "models" in entries:
        sources = tuple(_source(item, method, notes, "a model") for item in entries["models"].items("models"))
        parts: tuple[MergedLayers, ...] = (MergedLayers(sources, line=entries["models"].line),)
    else:
        parts = tuple(_part(item, method, notes) for item in entries["slices"].items("slices"))
    base = _text(entries["base_model"], "base_model") if "base_model" in entries else None
    dtype = next((_dtype(entries[key], key) for key in ("out_dtype", "dtype") if key in entries), None)
    if "chat_template" in entries and entries["chat_template"].value != "auto":
        raise entries["chat_template"].error(
            "chat_template is not supported: the output has that of the first model",
            "set another one afterwards with apr stamp",
        )
    tokenizer = _tokenizer(entries)
    parameters = _parameters(entries, method, notes)
    return MergeRecipe(method, parts, base, parameters, dtype, tokenizer, path, tuple(dict.fromkeys(notes)))


def _tokenizer(entries: Mapping[str, SettingsNode]) -> str | None:
    if "tokenizer_source" in entries and "tokenizer" in entries:
        raise entries["tokenizer"].error("tokenizer and tokenizer_source are mutually exclusive")
    if "tokenizer" in entries:
        found = _entries(entries["tokenizer"], "tokenizer", ("source",))
        return _text(found["source"], "source") if "source" in found else None
    return _text(entries["tokenizer_source"], "tokenizer_source") if "tokenizer_source" in entries else None


def _part(node: SettingsNode, method: str, notes: list[str]) -> MergedLayers:
    entries = _entries(node, "a slice", ("sources", "base_model", "parameters", "residual_weight"))
    if "residual_weight" in entries:
        raise entries["residual_weight"].error("residual_weight is not supported")
    if "sources" not in entries:
        raise node.error("a slice needs sources")
    found = entries["sources"].items("sources")
    sources = tuple(_source(item, method, notes, "a source", layers=True) for item in found)
    base = _text(entries["base_model"], "base_model") if "base_model" in entries else None
    return MergedLayers(sources, base, _parameters(entries, method, notes), node.line)


def _source(node: SettingsNode, method: str, notes: list[str], what: str, *, layers: bool = False) -> MergeInput:
    entries = _entries(node, what, ("model", "parameters", *(("layer_range",) if layers else ())))
    if "model" not in entries:
        raise node.error(f"{what} needs the key model, a path")
    path = _text(entries["model"], "model")
    if "+" in path and not exists(path):
        raise entries["model"].error(
            f"{path:.60} names an adapter", "merge it into its base first: apr merge-adapter BASE ADAPTER -o OUT"
        )
    given: tuple[int, int] | None = None
    if layers:
        if "layer_range" not in entries:
            raise node.error("layer_range is missing: first layer and end layer (exclusive)", "[0, 16]")
        given = _range(entries["layer_range"])
    return MergeInput(path, given, _parameters(entries, method, notes), node.line)


def _range(node: SettingsNode) -> tuple[int, int]:
    numbers = [item.value for item in node.value] if isinstance(node.value, list) else []
    if len(numbers) == 2 and all(type(number) is int for number in numbers):
        first, last = (number for number in numbers if isinstance(number, int))
        if 0 <= first < last <= MAX_LAYERS:
            return first, last
    raise node.error(f"layer_range must be [first, end), not {numbers!r:.40}", "[0, 16]")


def _parameters(entries: Mapping[str, SettingsNode], method: str, notes: list[str]) -> dict[str, SettingsNode]:
    if "parameters" not in entries:
        return {}
    found, remarks = check_parameters(method, entries["parameters"].mapping("parameters"))
    notes += remarks
    return found


def _text(node: SettingsNode, what: str) -> str:
    if not isinstance(node.value, str) or not node.value:
        raise node.error(f"{what} must be a string, not {shown(node.value)}")
    return node.value


def _dtype(node: SettingsNode, key: str) -> str:
    text = _text(node, key)
    if text not in _DTYPES:
        raise node.error(f"{key} must be one of {', '.join(_DTYPES)}, not {text!r:.40}")
    return _DTYPES[text]
