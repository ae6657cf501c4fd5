"""Several models into one: a conversion whose weights are computed from those of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from aprfmt import formats
from aprfmt.canonical.combined import LayerSlice, combined
from aprfmt.canonical.merge_methods import LINEAR, PASSTHROUGH, SLERP, MergeRule
from aprfmt.canonical.model import Canonical, canonical, require_config, with_dims_of_tensors
from aprfmt.canonical.packed import Decoding
from aprfmt.canonical.relayered import parse_layers
from aprfmt.convert.api import Report, convert
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
from aprfmt.convert.merging import open_input
from aprfmt.convert.mixes import find_mix
from aprfmt.errors import RefusedError, UsageError
from aprfmt.io.pipe import StartProgress
from aprfmt.io.settings import SettingsNode
from aprfmt.io.system import n_processors
from aprfmt.limits import MAX_LAYERS
from aprfmt.provenance.model_card import entries
from aprfmt.tokenizer.model import without_padding
from aprfmt.types import PathLike

_OWN = (
    *("models", "method", "base", "config", "weight", "density", "t", "normalize", "rescale", "lambda_", "scale"),
    *("layers", "seed", "pad_vocab"),
)

_MOST_THREADS = 8
"""More of them wait for each other, where calls are as short as the arithmetic of merging."""


def merge_models(
    models: PathLike | Sequence[PathLike],
    dst: PathLike,
    *,
    method: str | None = None,
    base: PathLike | None = None,
    config: PathLike | None = None,
    weight: float | Sequence[float] | None = None,
    density: float | Sequence[float] | None = None,
    t: float | Sequence[float] | None = None,
    normalize: bool | None = None,
    rescale: str | bool | None = None,
    lambda_: float | None = None,
    scale: float | Sequence[float] | None = None,
    layers: Sequence[str] = (),
    seed: int = 0,
    pad_vocab: bool = False,
    format: str | None = None,
    dtype: str = "keep",
    arch: str | None = None,
    imatrix: PathLike | None = None,
    tensor_type: str | Sequence[str] = (),
    output_type: str | None = None,
    embedding_type: str | None = None,
    pure: bool = False,
    leave_output: bool = False,
    tokenizer: PathLike | None = None,
    no_tokenizer: bool = False,
    pre: str | None = None,
    shard_size: int | str | None = None,
    bits: int | None = None,
    group_size: int | None = None,
    recipe: str | None = None,
    verify: bool = False,
    follow_links: bool = False,
    plan: bool = False,
    force: bool = False,
    progress: StartProgress | None = None,
    threads: int | None = None,
    max_memory: int | str | None = None,
    max_disk: int | str | None = None,
    fsync: bool = True,
) -> Report:
    """Writes one model merged from several as `dst`, in any form that can be written.

    The models may be of any forms that can be read, but of one architecture and vocabulary. Config, tokenizer, chat
    template and dtype of each weight are those of the base, or of the first model. Everything is computed in float32
    and rounded once. The options that are not listed are those of convert_model.

    Args:
        models: the models; none with `config`.
        dst: what to write.
        method: "linear", "weighted" (linear, with a weight for each), "slerp", "ties", "dare_linear", "dare_ties",
            "task_arithmetic" or "passthrough".
        base: the model that the others are fine-tunes of; for slerp the one with which it begins, by default the first.
        config: a recipe as mergekit has it (YAML), in place of the models, of `method` and of its parameters.
        weight: what each model counts, one number for all or one each; 1 by default.
        density: the part of each delta that stays; 1 by default.
        t: for slerp, from 0 (the base) to 1 (the other); several numbers are a gradient over the layers.
        normalize: divide by the sum of weights; by default for linear and ties.
        rescale: what lost values is rescaled: "norm" (to its sum of magnitudes; by default for dare), "density"
            (by 1 / density), "none" (by default for ties).
        lambda_: what the sum of deltas is multiplied by.
        scale: for passthrough, what the weights of each model are multiplied by.
        layers: for passthrough, the layers of each model, numbered from 0: "0-11"; all of them by default.
        seed: of what dare drops.
        pad_vocab: fill up an embedding that has fewer rows than the base's with the base's, and drop what it has more.
        threads: worker threads; None: one a processor, of which arithmetic alone, without quantizing, takes eight.

    Raises:
        AprError: for models of different networks or vocabularies, for a recipe that cannot be, and as convert_model.
    """
    given = locals()
    own = {name: given.pop(name) for name in _OWN}
    if type(seed) is not int:
        raise UsageError(f"seed must be a number, not {seed!r:.40}")
    made = read_recipe(formats.path_text(config, "config")) if config is not None else _from_options(own)
    if config is not None:
        _refuse_beside_config(own)
    if dtype == "keep" and made.dtype is not None:
        given["dtype"] = made.dtype
    if isinstance(dtype, str) and find_mix(dtype) is not None:
        given["allow_requantize"] = True
    elif threads is None:
        given["threads"] = min(_MOST_THREADS, n_processors())
    paths = made.models
    sizes: list[int] = []
    with ExitStack() as stack:

        def edit(c: Canonical) -> tuple[Canonical, list[str]]:
            found = [c]
            for path in paths[1:]:
                model = open_input(stack, path, dst, follow_links=follow_links)
                require_config(model, False, arch)
                read = canonical(model, arch=arch, decoding=Decoding(decode=True))
                found.append(with_dims_of_tensors(read))
                sizes.append(model.size_bytes)
            return _merged(made, paths, found, seed=seed, keep=given["dtype"] == "keep", pad_vocab=pad_vocab)

        report = convert({**given, "src": paths[0]}, edit, [] if config is None else [config])
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
                f"{where}there is no layer {last - 1}",
                path=paths[number],
                hint=f"its layers have the numbers 0 to {n - 1}",
            )
        if last - first != n_layers:
            raise RefusedError(
                f"this has {last - first} layers, and {paths[inputs[0]]} has {n_layers}",
                path=paths[number],
                hint="slices with layer_range say which layers belong together",
            )
    return LayerSlice(inputs, tuple(first for first, _ in ranges), n_layers)


# --- options ---


def _from_options(own: dict[str, object]) -> MergeRecipe:
    """The recipe that options stand for. Raises UsageError for those that the method does not have."""
    models = _paths(own["models"])
    if own["method"] is None:
        raise UsageError("no method is named", hint="--method linear, slerp, ties, ...; or a recipe: --config FILE")
    word = str(own["method"])
    method = find_method(word)
    if word == WEIGHTED and own["weight"] is None:
        raise UsageError("weighted needs a weight for each model", hint="--weight 0.7 --weight 0.3, or --method linear")
    base = formats.path_text(own["base"], "base") if own["base"] is not None else None
    base = models[0] if base is None and method == SLERP else base
    if base is not None and method in (LINEAR, PASSTHROUGH):
        raise UsageError(f"--base does not apply to {method}", hint="the first model gives config and tokenizer")
    tuned = [*models]
    if base in tuned:  # once it is the base: a model can be merged with itself
        tuned.remove(base)
    ranges = list(own["layers"]) if isinstance(own["layers"], list | tuple) else []
    if ranges and method != PASSTHROUGH:
        raise UsageError(f"--layers does not apply to {method}", hint="a recipe names layers: --config FILE")
    shared = {
        name: _node(own[key])
        for name, key in (("t", "t"), ("normalize", "normalize"), ("rescale", "rescale"), ("lambda", "lambda_"))
        if own[key] is not None
    }
    each = {name: _each(own[name], name, len(tuned)) for name in ("weight", "density", "scale")}
    for name in (*shared, *(name for name, value in each.items() if value)):
        if name not in PARAMETERS[method]:
            raise UsageError(f"--{name} does not apply to {word}", hint=f"it has {', '.join(PARAMETERS[method])}")
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


def _refuse_beside_config(own: dict[str, object]) -> None:
    defaults = {"models": (), "layers": (), "seed": own["seed"], "pad_vocab": own["pad_vocab"], "config": own["config"]}
    for name, value in own.items():
        if value is not None and value != defaults.get(name) and value not in ([], ()):
            what = "models" if name == "models" else f"--{name.rstrip('_').replace('_', '-')}"
            raise UsageError(
                f"{what} and --config cannot be given together", hint="the recipe names models, method and numbers"
            )


def _paths(value: object) -> list[str]:
    found = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not found:
        raise UsageError("no model is named", hint="apr merge A B -o OUT --method linear")
    return [formats.path_text(path, "models") for path in found]


def _node(value: object) -> SettingsNode:
    return SettingsNode([_node(item) for item in value]) if isinstance(value, list | tuple) else SettingsNode(value)


def _each(value: object, name: str, n: int) -> list[object]:
    """One value for each of `n` models; none where none is given."""
    if value is None:
        return []
    found: list[object] = list(value) if isinstance(value, list | tuple) else [value]
    if len(found) == 1:
        found *= n
    if len(found) != n:
        raise UsageError(
            f"{len(found)} of --{name} are given for {n} models beside the base", hint="one for each, or one"
        )
    return found


def _layers(ranges: Sequence[object], i: int, n: int) -> tuple[int, int] | None:
    if not ranges:
        return None
    if len(ranges) != n:
        raise UsageError(f"{len(ranges)} of --layers are given for {n} models", hint="one for each, or none at all")
    found = parse_layers(str(ranges[i]), MAX_LAYERS)
    if found != list(range(found[0], found[-1] + 1)):
        raise UsageError(f"{ranges[i]!r:.40} is not a layer range", hint="name the model again for each range: 0-11")
    return found[0], found[-1] + 1


# --- vocabulary and provenance ---


def _check_vocabularies(found: Sequence[Canonical], *, pad_vocab: bool) -> None:
    """Raises RefusedError for models whose tokens mean different things, with the first that does."""
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
                f"token {changed} is {other[changed]!r:.60}, and in {first.model.path} {mine[changed]!r:.60}: rows of "
                "the embeddings mean different things",
                path=c.model.path,
                hint="only models of one vocabulary can be merged; apr vocab A B shows all that differs",
            )
        if len(mine) != len(other) and not pad_vocab:
            raise RefusedError(
                f"it has {len(other)} tokens, and {first.model.path} has {len(mine)}",
                path=c.model.path,
                hint="--pad-vocab fills up what is missing with rows of the first model, and drops what it lacks",
            )


def _with_tokenizer(c: Canonical, recipe: MergeRecipe, paths: Sequence[str], found: Sequence[Canonical]) -> Canonical:
    """`c` with the tokenizer that the recipe asks for."""
    asked = recipe.tokenizer
    if asked in (None, "base"):
        return c
    if asked == "union":
        counts = {len(without_padding(other.tokenizer)) for other in found if other.tokenizer is not None}
        if len(counts) > 1:
            raise UsageError(
                "tokenizer_source: union is for models of one vocabulary",
                path=recipe.path,
                hint="tokenizer_source: base",
            )
        return c
    chosen = next((other for path, other in zip(paths, found, strict=True) if path == asked), None)
    if chosen is None:
        raise UsageError(
            f"tokenizer_source {asked!r:.60} is none of the models", path=recipe.path, hint="base, or one of the models"
        )
    if chosen.tokenizer is None or chosen is found[0] or c.tokenizer is None:
        return c
    if len(without_padding(chosen.tokenizer)) != len(without_padding(c.tokenizer)):
        raise UsageError("tokenizer_source has another vocabulary than the first model", path=recipe.path)
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
        said = ", ".join(sorted(licenses))
        warnings = (*warnings, f"the models have different licenses ({said}): the output has the first model's")
    info = c.info | {"description": f"{before} {note}" if before else note}
    return replace(c, general=general, info=info, warnings=warnings)
