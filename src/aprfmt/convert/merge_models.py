"""Merge several models into one, as an edit during a conversion."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from aprfmt import formats
from aprfmt.canonical.checks import require_config, with_dims_of_tensors
from aprfmt.canonical.depth_pruning import parse_layers
from aprfmt.canonical.merge_methods import LINEAR, PASSTHROUGH, SLERP, MergeRule
from aprfmt.canonical.merged_models import LayerSlice, combined
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.model_kinds import is_adapter
from aprfmt.canonical.packed import Decoding
from aprfmt.canonical.read import canonical
from aprfmt.convert.api import convert
from aprfmt.convert.merge_adapters import given_paths, open_input
from aprfmt.convert.merge_recipe import (
    PARAMETERS,
    WEIGHTED,
    MergedLayers,
    MergeInput,
    MergeRecipe,
    check_parameters,
    check_recipe,
    find_method,
    read_recipe,
)
from aprfmt.convert.options import MergeCall, Options, options_of
from aprfmt.convert.presets import find_preset
from aprfmt.convert.report import Report
from aprfmt.errors import RefusedError, UsageError
from aprfmt.io.settings import SettingsNode
from aprfmt.io.system import n_processors
from aprfmt.limits import MAX_LAYERS
from aprfmt.provenance.model_card import entries
from aprfmt.schema import takes
from aprfmt.text import plural
from aprfmt.tokenizer.data import without_padding
from aprfmt.types import PathLike

_MOST_THREADS = 8
"""More threads would wait for each other, since calls are as short as the arithmetic of merging."""


@takes(MergeCall)
def merge_models(call: MergeCall) -> Report:
    """Merges several models and writes `dst` in any output format.

    The models may be in any readable format, but must share architecture and vocabulary. Config, tokenizer, chat
    template and dtype of each weight come from the base, or from the first model. Merging computes in float32 and
    rounds once. Arithmetic without quantization uses at most eight threads.

    Args:
        models: the models; none with `config`.
        dst: the output file or folder.

    Raises:
        AprError: for models of different architectures or vocabularies, an invalid recipe, and as convert_model.
    """
    given, seed = options_of(call, base=None), call.seed
    if type(seed) is not int:
        raise UsageError(f"seed must be a number, not {seed!r:.40}")
    config, dtype = call.config, call.dtype
    made = read_recipe(formats.path_text(config, "config")) if config is not None else _from_options(call)
    if config is not None:
        _refuse_beside_config(call)
    if dtype == "keep" and made.dtype is not None:
        given["dtype"] = made.dtype
    if isinstance(dtype, str) and find_preset(dtype) is not None:
        given["allow_requantize"] = True
    elif call.threads is None:
        given["threads"] = min(_MOST_THREADS, n_processors())
    paths = made.models
    sizes: list[int] = []
    with ExitStack() as stack:

        def edit(c: Canonical) -> tuple[Canonical, list[str]]:
            found = [c]
            for path in paths[1:]:
                model = open_input(stack, path, call.dst, follow_links=call.follow_links)
                require_config(model, False, call.arch)
                read = canonical(model, arch=call.arch, decoding=Decoding(decode=True))
                found.append(with_dims_of_tensors(read))
                sizes.append(model.size_bytes)
            keep = given["dtype"] == "keep"
            return _merged(made, paths, found, seed=seed, keep=keep, pad_vocab=call.pad_vocab)

        report = convert(paths[0], call.dst, given, edit, [] if config is None else [config])
    report.input_bytes += sum(sizes)
    return report


def _merged(
    recipe: MergeRecipe, paths: Sequence[str], found: Sequence[Canonical], *, seed: int, keep: bool, pad_vocab: bool
) -> tuple[Canonical, list[str]]:
    if recipe.method != PASSTHROUGH or len(found) > 1:
        _check_vocabularies(found, pad_vocab=pad_vocab)
    slices = [_slice(part, paths, found) for part in recipe.parts]

    def ruling(number: int, name: str, names: Sequence[str], place: float) -> MergeRule:
        return recipe.rule(number, name, names, place, seed)

    c, notes = combined(found, slices, ruling, keep=keep, pad_vocab=pad_vocab)
    c = _with_tokenizer(c, recipe, paths, found)
    return _with_provenance(c, recipe, found), [*notes, *recipe.notes]


def _slice(part: MergedLayers, paths: Sequence[str], found: Sequence[Canonical]) -> LayerSlice:
    inputs = tuple(paths.index(source.path) for source in part.sources)
    lengths = [found[number].hparams.num_layers or 0 for number in inputs]
    ranges = [source.layers or (0, n) for source, n in zip(part.sources, lengths, strict=True)]
    n_layers = ranges[0][1] - ranges[0][0]
    for (first, last), number, source, n in zip(ranges, inputs, part.sources, lengths, strict=True):
        if last > n:
            where = f"line {source.line}: " if source.line else ""
            raise UsageError(
                f"{where}unknown layer {last - 1}", path=paths[number], hint=f"the model has layers 0 to {n - 1}"
            )
        if last - first != n_layers:
            raise RefusedError(
                f"the model has {last - first} layers, but {paths[inputs[0]]} has {n_layers}",
                path=paths[number],
                hint="match the layers with slices and layer_range in a merge recipe",
            )
    return LayerSlice(inputs, tuple(first for first, _ in ranges), n_layers)


# --- options ---


def _from_options(call: MergeCall) -> MergeRecipe:
    """The recipe for the options. Raises UsageError for options that the method lacks."""
    models = given_paths(call.models, "models", "apr merge A B -o OUT --method linear")
    _refuse_adapters(models, call.dst)
    if call.method is None:
        line = shlex.join(["apr", "merge", *map(str, models), "-o", str(call.dst), "--method", "linear"])
        raise UsageError(
            "no merge method given", hint=f"{line}\nother methods: slerp, ties, ...; a recipe: --config FILE"
        )
    word = str(call.method)
    method = find_method(word)
    if word == WEIGHTED and call.weight is None:
        raise UsageError(
            "the method weighted needs a weight for each model",
            hint="add --weight 0.7 --weight 0.3, or use --method linear",
        )
    base = formats.path_text(call.base, "base") if call.base is not None else None
    base = models[0] if base is None and method == SLERP else base
    if base is not None and method in (LINEAR, PASSTHROUGH):
        raise UsageError(f"--base does not apply to {method}", hint="config and tokenizer come from the first model")
    tuned = [*models]
    if base in tuned:  # once it is the base: a model can be merged with itself
        tuned.remove(base)
    ranges = list(call.layers) if isinstance(call.layers, list | tuple) else []
    if ranges and method != PASSTHROUGH:
        raise UsageError(f"--layers does not apply to {method}", hint="set layers in a recipe: --config FILE")
    shared = {
        name: _node(getattr(call, key))
        for name, key in (("t", "t"), ("normalize", "normalize"), ("rescale", "rescale"), ("lambda", "lambda_"))
        if getattr(call, key) is not None
    }
    each = {name: _each(getattr(call, name), name, len(tuned)) for name in ("weight", "density", "scale")}
    for name in (*shared, *(name for name, value in each.items() if value)):
        if name not in PARAMETERS[method]:
            raise UsageError(
                f"--{name} does not apply to {word}", hint=f"its parameters: {', '.join(PARAMETERS[method])}"
            )
    if method == SLERP:
        shared.setdefault("t", SettingsNode(0.5))
    if "weight" in PARAMETERS[method] and not each["weight"]:
        each["weight"] = [1.0] * len(tuned)
    sources = [
        MergeInput(path, _layers(ranges, i, len(tuned)), check_parameters(method, {
            name: _node(values[i]) for name, values in each.items() if values
        })[0])
        for i, path in enumerate(tuned)
    ]  # fmt: skip
    parameters, _ = check_parameters(method, shared)
    if base is not None:
        sources.insert(0, MergeInput(base))
    if method == PASSTHROUGH:
        return check_recipe(MergeRecipe(method, tuple(MergedLayers((source,)) for source in sources), None, parameters))
    if len(sources) < 2:
        raise UsageError("a merge takes at least two models", hint="apr merge A B -o OUT --method linear")
    return check_recipe(MergeRecipe(method, (MergedLayers(tuple(sources)),), base, parameters))


def _refuse_adapters(paths: Sequence[str], dst: PathLike) -> None:
    """Raises UsageError for LoRA adapters, with the command that merges them into their base."""
    adapters = []
    for path in paths:
        with formats.open(path) as model:
            adapters += [path] if is_adapter(model) else []
    if adapters:
        bases = [path for path in paths if path not in adapters] or ["BASE"]
        hint = shlex.join(["apr", "merge-adapter", bases[0], *adapters, "-o", os.fspath(dst)])
        raise UsageError("this is a LoRA adapter, not a model", path=adapters[0], hint=hint)


def _refuse_beside_config(call: MergeCall) -> None:
    own = [
        name for name in vars(call) if not hasattr(Options, name) and name not in ("dst", "config", "seed", "pad_vocab")
    ]
    for name in ("base", *own):
        value = getattr(call, name)
        if value is not None and value not in ([], ()):
            what = "models" if name == "models" else f"--{name.rstrip('_').replace('_', '-')}"
            raise UsageError(
                f"{what} and --config are mutually exclusive", hint="set models, method and parameters in the recipe"
            )


def _node(value: object) -> SettingsNode:
    return SettingsNode([_node(item) for item in value]) if isinstance(value, list | tuple) else SettingsNode(value)


def _each(value: object, name: str, n: int) -> list[object]:
    """One value for each of `n` models; [] if none is given."""
    if value is None:
        return []
    found: list[object] = list(value) if isinstance(value, list | tuple) else [value]
    if len(found) == 1:
        found *= n
    if len(found) != n:
        raise UsageError(
            f"{plural(len(found), 'value')} of --{name} given for {n} models (without the base)",
            hint="use one for each model, or one for all",
        )
    return found


def _layers(ranges: Sequence[object], i: int, n: int) -> tuple[int, int] | None:
    if not ranges:
        return None
    if len(ranges) != n:
        raise UsageError(
            f"{plural(len(ranges), 'value')} of --layers given for {n} models", hint="use one for each model, or none"
        )
    found = parse_layers(str(ranges[i]), MAX_LAYERS)
    if found != list(range(found[0], found[-1] + 1)):
        raise UsageError(
            f"{ranges[i]!r:.40} is not a layer range", hint="repeat the model for each range, such as 0-11"
        )
    return found[0], found[-1] + 1


# --- vocabulary and provenance ---


def _check_vocabularies(found: Sequence[Canonical], *, pad_vocab: bool) -> None:
    """Raises RefusedError for models with different vocabularies, naming the first token that differs."""
    first = found[0]
    if first.tokenizer is None:
        return
    mine = without_padding(first.tokenizer)
    for c in found[1:]:
        if c.tokenizer is None:
            continue
        other = without_padding(c.tokenizer)
        changed = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), None)
        if changed is not None:
            raise RefusedError(
                f"different vocabularies: token {changed} is {other[changed]!r:.60}, but {mine[changed]!r:.60} in "
                f"{first.model.path}",
                path=c.model.path,
                hint="merge models that share a vocabulary; compare them with apr vocab A B",
            )
        if len(mine) != len(other) and not pad_vocab:
            raise RefusedError(
                f"the vocabulary has {len(other)} tokens, but that of {first.model.path} has {len(mine)}",
                path=c.model.path,
                hint="add --pad-vocab to fill missing rows from the first model and drop extra ones",
            )


def _with_tokenizer(c: Canonical, recipe: MergeRecipe, paths: Sequence[str], found: Sequence[Canonical]) -> Canonical:
    """`c` with the tokenizer of the recipe's tokenizer_source."""
    asked = recipe.tokenizer
    if asked in (None, "base"):
        return c
    if asked == "union":
        counts = {len(without_padding(other.tokenizer)) for other in found if other.tokenizer is not None}
        if len(counts) > 1:
            raise UsageError(
                "tokenizer_source: union needs models with the same vocabulary",
                path=recipe.path,
                hint="use tokenizer_source: base",
            )
        return c
    chosen = next((other for path, other in zip(paths, found, strict=True) if path == asked), None)
    if chosen is None:
        raise UsageError(
            f"tokenizer_source {asked!r:.60} is not one of the models",
            path=recipe.path,
            hint="use base, or one of the models",
        )
    if chosen.tokenizer is None or chosen is found[0] or c.tokenizer is None:
        return c
    if len(without_padding(chosen.tokenizer)) != len(without_padding(c.tokenizer)):
        raise UsageError("the vocabulary of tokenizer_source differs from that of the first model", path=recipe.path)
    return replace(c, tokenizer=chosen.tokenizer)


def _with_provenance(c: Canonical, recipe: MergeRecipe, found: Sequence[Canonical]) -> Canonical:
    """`c` with all models as its base models, and how they were merged."""
    general = dict(c.general or {})
    bases = []
    for other in found:
        own = other.general or {}
        base = {name: value for name in ("author", "version", "organization", "repo_url") if (value := own.get(name))}
        named = {"name": other.info["name"]} if other.info.get("name") else {}
        if named or base:
            bases.append({**named, **base})
    if bases:
        general["base_models"] = entries([one for i, one in enumerate(bases) if one not in bases[:i]])
    tags = general.get("tags")
    general["tags"] = list(dict.fromkeys([*(tags if isinstance(tags, list) else []), "merge"]))
    note = f"Merged from {len(found)} models by {recipe.method}."
    before = c.info.get("description")
    licenses = {name for other in found if (name := other.info.get("license"))}
    warnings = c.warnings
    if len(licenses) > 1:
        words = ", ".join(sorted(licenses))
        warnings = (*warnings, f"the models have different licenses ({words}): the output gets that of the first model")
    info = c.info | {"description": f"{before} {note}" if before else note}
    return replace(c, general=general, info=info, warnings=warnings)
