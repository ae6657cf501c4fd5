"""Write a folder for MLX: mlx_lm's tensor names, affine-quantized weights, and the matching config.json.

GGML blocks that are affine groups of 32 are repacked without rounding; all others are quantized as mlx_lm does.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from aprfmt.arch.converter import language_part
from aprfmt.arch.fields import as_mapping
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.links import find_link
from aprfmt.arch.mlx import mlx_row, network_of, reshaped, why_refused
from aprfmt.arch.mlx_networks import WRAPPERS, MlxNetwork
from aprfmt.arch.names import gguf_name
from aprfmt.canonical import sidecar
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.packed import HF_QUANT, without_packing
from aprfmt.canonical.sides import hf_side, to_link
from aprfmt.canonical.tensor import CanonicalTensor, Losses, is_float, plain_dtype
from aprfmt.codecs.affine import BITS_OF_BLOCKS, BLOCK, PARTS, Affine, check, parse_affine, quantized, regrouped
from aprfmt.codecs.dtypes import DTYPES, n_elements
from aprfmt.codecs.split import SplitStream
from aprfmt.convert.files import dropped_files_loss
from aprfmt.convert.options import Options
from aprfmt.convert.quantization import QuantizedTensor, Recoding
from aprfmt.convert.source_manifest_writer import restorable
from aprfmt.convert.targets import hf
from aprfmt.convert.targets.base import DEFAULT_SHARD_BYTES, Output, Work
from aprfmt.errors import RefusedError, UsageError
from aprfmt.formats import INDEX_SUFFIXES, safetensors
from aprfmt.formats.hf_files import parse_config
from aprfmt.formats.hfdir import INDEX_NAME
from aprfmt.formats.imatrix import COMPUTE, read_imatrix
from aprfmt.formats.out_tensor import OutTensor, group_by_size
from aprfmt.io.pipe import FileLayout, Item, Literal
from aprfmt.text import first_few, plural

RECIPES = {"mixed_2_6": (2, 6), "mixed_3_4": (3, 4), "mixed_3_6": (3, 6), "mixed_4_6": (4, 6)}
"""mlx_lm's recipes: bits of most weights, and of the most sensitive ones."""

_FINER = Affine(8, 64)
_FLOATS = ("F32", "F16", "BF16")


def layouts(c: Canonical, work: Work) -> Output:
    """The files of an MLX folder for `c`, quantized on request or if the source's blocks are affine groups.

    Raises UsageError for bits and group sizes that MLX lacks, RefusedError for an architecture whose tensor names in
    mlx_lm are unknown, and if no weight can be quantized as requested.
    """
    options = work.options
    asked = [value for value in (options.bits, options.group_size, options.recipe) if value is not None]
    asked += options.tensor_type
    if options.imatrix is not None and work.observe is None:
        raise UsageError(
            "an importance matrix does not change the codes of MLX", hint="apr quantize --format mlx --target-bpw X"
        )
    if not asked and (c.packs.weights and not c.packs.decoded):
        return hf.layouts(c, work) if restorable(c, "hf") else hf.folder(c, work, None, "mlx")
    network = network_of(c.arch)
    blocks = options.dtype == "keep" and any(t.dtype in BITS_OF_BLOCKS for t in c.tensors.values())
    if not asked and not (blocks and network is not None):
        return hf.folder(c, work, restorable(c, "hf"), "mlx")
    if options.recipe is not None and options.recipe not in RECIPES:
        raise UsageError(f"unknown recipe {options.recipe!r}", hint="one of: " + ", ".join(RECIPES))
    if options.recipe is not None and options.bits is not None:
        raise UsageError("--recipe and --bits are mutually exclusive", hint="a recipe sets the bits itself")
    default = check(4 if options.bits is None else options.bits, options.group_size or _group_size(c, asked))
    if network is None:
        name = c.hparams.hf_architecture or c.hparams.architecture or "this network"
        raise RefusedError(
            f"{name} cannot be quantized for MLX: its tensor names in mlx_lm are unknown",
            path=c.model.path,
            hint="export without --bits, then quantize with mlx_lm.convert -q",
        )
    patterns = tuple(_pattern(text, default.group_size) for text in options.tensor_type)
    plan = _MlxPlan(network, default, options.recipe, c.hparams, bool(asked), patterns)
    return _quantized(c, work, network, plan)


def _pattern(text: str, group_size: int) -> tuple[re.Pattern[str], Affine]:
    """`REGEX=BITS` or `REGEX=BITSgGROUP`, such as down_proj=6 or down_proj=6g32. Raises UsageError."""
    pattern, _, word = text.rpartition("=")
    try:
        if not pattern:
            raise UsageError("expected REGEX=BITS")
        return re.compile(pattern), parse_affine(word, group_size)
    except (re.error, RecursionError, OverflowError, UsageError) as error:
        hint = "example: --tensor-type down_proj=6, or down_proj=6g32 for groups of 32"
        raise UsageError(f"--tensor-type {text!r} for MLX: {error}", hint=hint) from None


def _group_size(c: Canonical, asked: Sequence[object]) -> int:
    """The default group size: that of the source's blocks if they are kept, else that of mlx_lm."""
    blocks = any(tensor.dtype in BITS_OF_BLOCKS for tensor in c.tensors.values())
    return BLOCK if blocks and not asked else 64


@dataclass(frozen=True, slots=True)
class _MlxPlan:
    """Which modules are quantized, and how; unless `asked` for, only blocks that are affine groups."""

    network: MlxNetwork
    default: Affine
    recipe: str | None
    h: Hyperparams
    asked: bool
    patterns: tuple[tuple[re.Pattern[str], Affine], ...] = ()

    def given(self, name: str) -> Affine | None:
        """What an option of the user sets for the weight."""
        return next((scheme for pattern, scheme in self.patterns if pattern.search(name)), None)

    def of(self, tensor: CanonicalTensor) -> Affine | None:
        """How to quantize the weight; None to keep it in floats."""
        module = tensor.name.removesuffix(".weight")
        is_weight = tensor.name.endswith(".weight") and len(tensor.shape) >= 2 and is_float(tensor.dtype)
        if not is_weight or not self.network.is_quantized(module, self.h):
            return None
        if not self.asked:
            bits = BITS_OF_BLOCKS.get(tensor.dtype)
            return None if bits is None else Affine(bits, BLOCK)
        if (given := self.given(tensor.name)) is not None:
            return given
        if tensor.shape[-1] % self.default.group_size:
            return None
        if self.recipe is not None:
            return replace(self.default, bits=self._recipe_bits(module))
        return _FINER if self.network.is_finer(module) else self.default

    def _recipe_bits(self, module: str) -> int:
        """More bits for the head, and for V and the down projection in the first and last eighth of layers and every
        third one in between.
        """
        low, high = RECIPES[self.recipe or ""]
        layer = next((int(word) for word in module.split(".") if word.isdecimal()), 0)
        n_layers = self.h.num_layers or 0
        eighth = n_layers // 8
        outer = layer < eighth or layer >= 7 * n_layers // 8
        chosen = outer or (layer - eighth) % 3 == 2
        of_kind = any(word in module for word in ("v_proj", "v_a_proj", "v_b_proj", "down_proj"))
        return high if "lm_head" in module or (chosen and of_kind) else low


def _quantized(c: Canonical, work: Work, network: MlxNetwork, plan: _MlxPlan) -> Output:
    losses, recipe = work.losses, restorable(c, "hf")
    wanted = plain_dtype(work.options.dtype)
    if wanted not in (None, *_FLOATS):
        raise UsageError(
            f"MLX computes in f32, f16 or bf16, not in {wanted}", hint="set the bits of stored weights with --bits"
        )
    source = hf.source_texts(c, recipe)
    told = parse_config(source[hf.CONFIG], c.model.path) if hf.CONFIG in source else {}
    begin, wrapped = _beginning(c, told), bool(language_part(told))
    if c.arch is not None and (why := why_refused(c.arch, c.hparams, c.tensors, wrapped=wrapped)):
        name = c.hparams.hf_architecture or c.arch.id
        raise RefusedError(
            f"{name} cannot be quantized for MLX: {why}", path=c.model.path, hint="export it to GGUF or .apr"
        )
    for part in c.extra_parts():
        losses.add(f"{part} dropped: mlx_lm does not support them")
    planned = _Planned()
    for tensor in _mlx_side(c, begin):
        if network.is_dropped(tensor.name, c.hparams):
            losses.add(f"{tensor.name} dropped: mlx_lm does not use it")
            continue
        _plan_tensor(c, tensor, wanted, plan, planned, losses)
    for name, count in network.cut_values(c.hparams):
        losses.add(f"{name}: {count} trailing values dropped: mlx_lm does not use them")
    _check_groups(c, planned, plan, losses)
    if work.observe is not None:
        work.observe(c.arch.gguf if c.arch is not None else None, [*_observed(c, begin, work.options, plan, planned)])
    texts = sidecar.with_folder_fields(c.model, c.info, hf.with_card(c, hf.with_edits(c, source), losses))
    texts.pop(HF_QUANT, None)
    kept = wanted is None and not c.packs.decoded and hf.CONFIG in source
    config, _ = hf.config_json(c, texts, None, planned.plain, kept)
    settings = _settings(planned.schemes, plan)
    files = {hf.CONFIG: _config(c, config or b"{}", texts.get(hf.GENERATION), settings), **hf.tokenizer_files(c, texts)}
    files |= {n: data for n, data in texts.items() if n not in files and not n.endswith(INDEX_SUFFIXES)}
    n_params = sum(n_elements(tensor.shape) for tensor in planned.plain)
    shards = _shards(planned.outs, work.options.shard_bytes or DEFAULT_SHARD_BYTES, n_params)
    others = recipe.other_layouts() if recipe is not None else []
    if recipe is None:
        losses.others += dropped_files_loss(c, "the source manifest does not match the model")
    layouts = [*(FileLayout(n, [Literal(data)]) for n, data in files.items()), *others, *shards]
    return Output(layouts, planned.outs, n_params=n_params)


@dataclass(slots=True)
class _Planned:
    """The planned tensors.

    Attributes:
        plain: all of them, before any is quantized.
        outs: what is written.
        schemes: how modules are quantized, by name.
        quantized: the weights of those modules.
        uneven: matrices whose rows the groups do not divide.
    """

    plain: list[OutTensor] = field(default_factory=list)
    outs: list[OutTensor] = field(default_factory=list)
    schemes: dict[str, Affine] = field(default_factory=dict)
    quantized: list[tuple[CanonicalTensor, Affine]] = field(default_factory=list)
    uneven: list[str] = field(default_factory=list)


def _observed(
    c: Canonical, begin: str, options: Options, plan: _MlxPlan, planned: _Planned
) -> Iterator[QuantizedTensor]:
    """The weights that are quantized, with the importance of their columns. Raises RefusedError."""
    imatrix = read_imatrix(options.imatrix) if options.imatrix is not None else None
    entries = {} if imatrix is None else imatrix.entries
    used = 0
    for tensor, scheme in planned.quantized:
        name = gguf_name(c.arch, tensor.name.removeprefix(begin), c.hparams) if c.arch is not None else None
        weights = entries.get(name or "") if len(tensor.shape) == 2 else None
        if weights is not None and weights.size != tensor.shape[-1]:
            what = (
                f"the importance matrix belongs to another model: {weights.size} values instead of {tensor.shape[-1]}"
            )
            raise RefusedError(what, path=options.imatrix, tensor=name, hint=COMPUTE)
        used += weights is not None
        yield QuantizedTensor(tensor, Recoding(scheme.word, weights), plan.given(tensor.name) is not None)
    if entries and not used:
        what = f"the importance matrix belongs to another model: it has an entry for {next(iter(entries))}"
        raise RefusedError(what, path=options.imatrix, hint=COMPUTE)


def _plan_tensor(
    c: Canonical, tensor: CanonicalTensor, wanted: str | None, plan: _MlxPlan, planned: _Planned, losses: Losses
) -> None:
    """Adds `tensor`, in floats or as the parts of a quantized module. Raises RefusedError."""
    stored = tensor.sources[0].dtype  # norms with 1 added, which are computed in F32
    dtype = wanted or (stored if stored in _FLOATS else "F16")
    dtype = dtype if is_float(tensor.dtype) else tensor.dtype
    if not is_float(tensor.dtype) and tensor.name.endswith(".weight"):
        raise RefusedError(
            f"mlx_lm would read this {tensor.dtype} weight as a quantized one",
            path=c.model.path,
            tensor=tensor.name,
            hint="export to .apr or GGUF, which keep it unchanged",
        )
    module, scheme = tensor.name.removesuffix(".weight"), plan.of(tensor)
    out = tensor.out(tensor.name, dtype, overflow=losses.overflow)
    planned.plain.append(out)
    if scheme is None:
        losses.note(tensor.original_dtype if tensor.mapping is None else stored, dtype)
        planned.outs.append(out)
        if plan.asked and len(tensor.shape) == 2 and tensor.shape[-1] % plan.default.group_size:
            planned.uneven.append(tensor.name)
        return
    if tensor.shape[-1] % scheme.group_size:
        what = f"mlx_lm uses groups of {scheme.group_size} here, which do not divide rows of {tensor.shape[-1]}"
        raise RefusedError(what, path=c.model.path, tensor=tensor.name, hint="export without --bits")
    planned.schemes[module] = scheme
    planned.quantized.append((tensor, scheme))
    if BITS_OF_BLOCKS.get(tensor.dtype) == scheme.bits and scheme.group_size == BLOCK and wanted is None:
        blocks = regrouped(tensor.name, tensor.dtype, tensor.items)
        planned.outs += _parts(module, tensor.shape, "F16", scheme, blocks)
        return
    losses.changed[tensor.original_dtype, f"MLX's {scheme.bits} bits in groups of {scheme.group_size}"] += 1
    values = quantized(tensor.name, dtype, scheme, partial(_values, out))
    planned.outs += _parts(module, tensor.shape, dtype, scheme, values)


def _check_groups(c: Canonical, planned: _Planned, plan: _MlxPlan, losses: Losses) -> None:
    """Warns about matrices that stay floats. Raises RefusedError if all do."""
    uneven, size = planned.uneven, plan.default.group_size
    if not planned.schemes:
        what, name = f"no weight has rows that groups of {size} divide", uneven[0] if uneven else None
        raise RefusedError(what, path=c.model.path, tensor=name, hint="use a smaller --group-size")
    if uneven:
        losses.warnings.append(
            f"{plural(len(uneven), 'weight')} not quantized, as groups of {size} do not divide the rows: "
            f"{first_few(uneven)}"
        )


def _beginning(c: Canonical, told: Mapping[str, object]) -> str:
    """The prefix of mlx_lm's tensor names in a wrapper with this config.json, else ""."""
    if not language_part(told):
        return ""
    if (begin := WRAPPERS.get(str(told.get("model_type")))) is not None:
        return begin
    name = c.hparams.hf_architecture or str(told.get("model_type"))
    raise RefusedError(
        f"{name} cannot be quantized for MLX: the prefix of its language model in mlx_lm is unknown",
        path=c.model.path,
        hint="export without --bits, then quantize with mlx_lm.convert -q",
    )


def _mlx_side(c: Canonical, begin: str) -> Iterator[CanonicalTensor]:
    """The tensors under mlx_lm's names and in its shapes."""
    for tensor in _in_mlx_shapes(c):
        yield replace(tensor, name=begin + tensor.name) if begin else tensor


def _in_mlx_shapes(c: Canonical) -> Iterator[CanonicalTensor]:
    assert c.arch is not None
    row, tensors = mlx_row(c.arch), {t.name: t for t in hf_side(c.arch, c.tensors)}
    shapes = {name: t.shape for name, t in tensors.items()}
    done: set[str] = set()
    for name, tensor in tensors.items():
        if name in done:
            continue
        link = find_link(row, c.hparams, name, shapes, "hf")
        if link is None or name not in link.hf:
            mapping = reshaped(c.arch, c.hparams, name, tensor.shape)
            yield tensor if mapping is None else CanonicalTensor(name, (tensor.as_source(),), mapping)
            continue
        done |= set(link.hf)
        yield from to_link(link, tensors)


def _values(out: OutTensor, unit: int) -> Iterator[Item]:
    return iter(out.chunks())


def _parts(module: str, shape: tuple[int, ...], dtype: str, scheme: Affine, stream: SplitStream) -> list[OutTensor]:
    """The tensors of a quantized module; of its three the codes are written first."""
    parts = []
    for i, part in enumerate(PARTS):
        own, stored = scheme.part_shape(shape, part), "U32" if part == "weight" else dtype
        n_bytes = DTYPES[stored].n_bytes(own)
        parts.append(OutTensor(f"{module}.{part}", stored, own, n_bytes, partial(stream.items, i), n_bytes))
    return [replace(parts[0], held_bytes=parts[1].n_bytes + parts[2].n_bytes), *parts[1:]]


def _settings(schemes: Mapping[str, Affine], plan: _MlxPlan) -> dict[str, object]:
    """The `quantization` object of config.json: the default, and the modules that differ (under a recipe: all)."""
    default = plan.default if plan.asked else Counter(schemes.values()).most_common(1)[0][0]
    settings: dict[str, object] = _entry(default)
    finer = {m for m in schemes if plan.asked and plan.recipe is None and plan.network.is_finer(m)}
    named = {m: s for m, s in schemes.items() if s != default or plan.recipe or m in finer}
    eight = {m for m in finer if plan.network.eight and m.endswith(plan.network.eight)}
    entries = {m: _entry(s, with_mode=m not in finer) for m, s in named.items()}
    return settings | entries | {m: {"bits": named[m].bits} for m in eight}


def _entry(scheme: Affine, *, with_mode: bool = True) -> dict[str, object]:
    numbers: dict[str, object] = {"group_size": scheme.group_size, "bits": scheme.bits}
    return numbers | ({"mode": "affine"} if with_mode else {})  # mlx_lm omits it if the network requires 8 bits


def _config(c: Canonical, config: bytes, generation: bytes | None, settings: Mapping[str, object]) -> bytes:
    """config.json as mlx_lm writes it: sorted, with the end tokens of the generation config.

    Most networks of mlx_lm read rope parameters and expert counts only under the keys of transformers 4.
    """
    told = without_packing(parse_config(config, c.model.path))
    ends = parse_config(generation, c.model.path).get("eos_token_id") if generation is not None else None
    told |= {"eos_token_id": ends} if ends else {}
    told |= {"quantization": settings, "quantization_config": settings}
    for key in ("_name_or_path", "vision_config"):
        told.pop(key, None)
    told |= {key: value for key, value in older_keys(told).items() if key not in told}
    return _json(dict(sorted(told.items())))


def older_keys(config: Mapping[str, object]) -> dict[str, object]:
    """The values of transformers 5 keys in config.json, under the keys of transformers 4."""
    told = as_mapping(config.get("rope_parameters"))
    rope, local = (as_mapping(told.get(kind)) for kind in ("full_attention", "sliding_attention"))
    rope = rope or told
    found: dict[str, object] = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if rope:
        is_scaled = rope.get("rope_type", "default") != "default"
        found["rope_scaling"] = {k: v for k, v in rope.items() if k not in found} if is_scaled else None
    if "rope_theta" in local:
        found["rope_local_base_freq"] = local["rope_theta"]
    if "num_local_experts" in config:
        found["num_experts"] = config["num_local_experts"]
    return found


def _json(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, indent=4).encode()  # ASCII and no newline at the end, as mlx_lm writes it


def _shards(tensors: list[OutTensor], shard_bytes: int, n_params: int) -> list[FileLayout]:
    """The weights and their index, which mlx_lm writes for a single file too."""
    groups = group_by_size(tensors, shard_bytes, lambda tensor: tensor.n_bytes)
    names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    names = ["model.safetensors"] if len(groups) == 1 else names
    weight_map = {t.name: name for name, group in zip(names, groups, strict=True) for t in group}
    total = {"total_size": sum(t.n_bytes for t in tensors), "total_parameters": n_params}
    index = {"metadata": total, "weight_map": dict(sorted(weight_map.items()))}
    written = [
        FileLayout(name, safetensors.layout(group, {"format": "mlx"}))
        for name, group in zip(names, groups, strict=True)
    ]
    return [*written, FileLayout(INDEX_NAME, [Literal(_json(index))])]
