"""Write an adapter as GGUF for llama.cpp, as a folder for PEFT or mlx_lm, or as one safetensors file.

The source's own bytes are written if nothing changed. Else the factors are renamed; where the container has a single
scale (GGUF: alpha / rank, MLX: a number), differing scales are folded into B.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from aprfmt.arch import names
from aprfmt.arch.links import RowMapping, find_link
from aprfmt.canonical import lora as factors
from aprfmt.canonical.lora_blocks import is_power_of_two
from aprfmt.canonical.lora_pairs import GGUF_KEY, Adapter, LoraPair, is_embedding
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.tensor import CanonicalTensor, is_float, plain_dtype
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.convert.files import dropped_files_loss
from aprfmt.convert.presets import file_type_of
from aprfmt.convert.source_manifest_writer import restorable
from aprfmt.convert.targets.base import Output, Work
from aprfmt.errors import RefusedError, UsageError
from aprfmt.formats import gguf_write, lora, safetensors
from aprfmt.formats.gguf_fields import GgufType
from aprfmt.formats.gguf_write import KV
from aprfmt.formats.hf_files import read_text_file
from aprfmt.formats.hfdir import HfNative
from aprfmt.formats.lora import CONFIG
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.io.pipe import FileLayout, Literal
from aprfmt.provenance import provenance
from aprfmt.text import first_few, plural

_MERGE = "merge it into the base model instead: apr merge-adapter BASE ADAPTER -o OUT"

Named = list[tuple[str, CanonicalTensor]]


def _adapter(c: Canonical, work: Work) -> Adapter:
    assert c.adapter is not None
    if work.quantization is not None:
        raise UsageError("adapters cannot be quantized", hint="use --dtype f32, f16 or bf16")
    return c.adapter


def _outs(c: Canonical, named: Iterable[tuple[str, CanonicalTensor]], work: Work) -> list[OutTensor]:
    """The tensors in the requested dtype; quantized blocks as F32."""
    wanted = plain_dtype(work.options.dtype)
    if wanted is not None and DTYPES[wanted].kind != "plain":
        raise RefusedError(
            f"adapters cannot be written as {wanted}", path=c.model.path, hint="use --dtype f32, f16 or bf16"
        )
    out = []
    for name, tensor in named:
        target = (wanted or tensor.dtype) if is_float(tensor.dtype) else tensor.dtype
        target = target if DTYPES[target].kind == "plain" else "F32"
        work.losses.note(tensor.original_dtype, target)
        out.append(tensor.out(name, target, work.losses.overflow))
    return out


def _restored(c: Canonical, work: Work, format: str) -> Output | None:
    """The source's own files, if it has the `format` and no dtype was requested."""
    manifest = restorable(c, format) if work.options.dtype == "keep" else None
    if manifest is None or manifest.is_partial:
        return None
    kept = [tensor.out(tensor.name) for tensor in c.all_tensors.values()]
    if format == "hf" and lora.weights_of(manifest.files) is None:
        return None  # an edited manifest
    made = manifest.layouts()
    if format != "hf":
        if len(made) != 1:
            return None
        made = [replace(made[0], name=work.name)]
    return Output(made, kept, lossless=not c.left_out)


def _turned(tensor: CanonicalTensor, name: str) -> CanonicalTensor:
    """The tensor with its last two dimensions swapped."""
    *n, rows, columns = tensor.shape
    after = ((*n, columns, rows),)
    if tensor.mapping is not None and tensor.mapping.transposed and tensor.inverse:
        return CanonicalTensor(name, tensor.sources)  # stored that way
    return CanonicalTensor(name, (tensor.as_source(),), RowMapping((tensor.shape,), after, transposed=True))


# --- GGUF ---


def gguf_layouts(c: Canonical, work: Work) -> Output:
    """The GGUF for llama.cpp's `--lora`. Raises RefusedError if it cannot store a part of the adapter."""
    adapter = _adapter(c, work)
    if (output := _restored(c, work, "gguf")) is not None:
        return output
    path = c.model.path
    pairs, blocks = factors.to_gguf(adapter, path)
    base = adapter.of
    assert base is not None
    _check_gguf(c, pairs)
    alpha = _common_alpha(pairs.values(), adapter)
    named: Named = []
    rounded = 0
    for name in sorted(pairs, key=_layer_order):
        pair, is_exact = factors.scaled_by_alpha(pairs[name], alpha)
        rounded += not is_exact
        is_lookup = name == "token_embd.weight"
        a, b = f"{name}{lora.A}", f"{name}{lora.B}"
        named += [(a, _turned(pair.a, a) if is_lookup else pair.a), (b, pair.b)]
    if rounded:
        work.losses.add(f"the scales of {plural(rounded, 'weight')} were folded into lora_b, with rounding")
    whole = _gguf_norms(c, adapter, work)
    work.losses.others += dropped_files_loss(c, "a GGUF cannot hold files")
    tensors = _outs(c, (*named, *((tensor.name, tensor) for tensor in whole)), work)
    keys: list[KV] = [
        ("general.architecture", GgufType.STRING, base.row.gguf),
        ("general.type", GgufType.STRING, "adapter"),
        ("adapter.type", GgufType.STRING, "lora"),
        *provenance.to_gguf(c.info, c.general),
        ("adapter.lora.alpha", GgufType.FLOAT32, alpha),
    ]
    if adapter.invocation:
        kind = (GgufType.ARRAY, GgufType.UINT32)
        keys.append(("adapter.alora.invocation_tokens", kind, adapter.invocation))
    most = Counter(tensor.dtype for tensor in tensors).most_common(1)
    keys.append(("general.file_type", GgufType.UINT32, file_type_of(most[0][0] if most else "F32")))
    stored = {"config": adapter.config, "blocks": blocks}
    if found := {key: value for key, value in stored.items() if value}:
        text = json.dumps(found, sort_keys=True, separators=(",", ":"))
        keys.append((GGUF_KEY, GgufType.STRING, text))
    keys.append(("general.quantization_version", GgufType.UINT32, 2))
    return Output([FileLayout(work.name, gguf_write.layout(keys, tensors))], tensors)


def _layer_order(name: str) -> tuple[int, int, str]:
    found = re.match(r"blk\.(\d+)\.", name)
    return (1, int(found[1]), name) if found else (0 if name.startswith("token_embd") else 2, 0, name)


def _check_gguf(c: Canonical, pairs: Mapping[str, LoraPair]) -> None:
    """Raises RefusedError for adapters that llama.cpp cannot load, or applies differently."""
    assert c.adapter is not None
    base = c.adapter.of
    zero = next((pair.weight for pair in pairs.values() if pair.scale == 0), None)
    if zero is not None:
        raise RefusedError(
            "the adapter has alpha 0 and adds nothing, but llama.cpp reads alpha 0 as a scale of 1",
            path=c.model.path,
            tensor=zero,
        )
    tied = base is not None and base.hparams.tied is True
    shared = next((name for name in ("output.weight", "token_embd.weight") if tied and name in pairs), None)
    if shared is not None:
        raise RefusedError(
            "the base ties its output head to the embedding, and llama.cpp cannot adapt only one of them",
            path=c.model.path,
            tensor=shared,
            hint=_MERGE,
        )
    for pair in pairs.values():
        if len(pair.shape) == 3 and not pair.weight.endswith("_exps.weight"):
            raise RefusedError(
                "llama.cpp cannot adapt this weight, which it splits into one matrix per head",
                path=c.model.path,
                tensor=pair.weight,
                hint=_MERGE,
            )


def _common_alpha(pairs: Iterable[LoraPair], adapter: Adapter) -> float:
    """The alpha of a GGUF: the adapter's if it yields any of the scales, else that of most pairs."""
    found = Counter(pair.scale * pair.rank for pair in pairs)
    if not found or any(pair_alpha == adapter.alpha for pair_alpha in found):
        return adapter.alpha
    return found.most_common(1)[0][0]


def _gguf_norms(c: Canonical, adapter: Adapter, work: Work) -> list[CanonicalTensor]:
    """The whole weights that an adapter GGUF may contain: norms, which llama.cpp ignores. Others are refused."""
    base = adapter.of
    out: list[CanonicalTensor] = []
    for name, tensor in adapter.whole.items():
        if ".base_layer." in name:
            work.losses.add(f"base weight {name} dropped: an adapter GGUF cannot hold it")
            continue
        known = (names.canonical_name(base.row, name) if base is not None else None) or name
        link = find_link(base.row, base.hparams, known, {known: tensor.shape}, "hf") if base is not None else None
        if name.endswith("_norm.weight") and link is None:
            out.append(tensor)
        elif link is None or len(link.gguf) != 1 or not link.gguf[0].endswith("_norm.weight"):
            raise RefusedError(
                "the adapter replaces this weight (modules_to_save), and an adapter GGUF can hold norms only",
                path=c.model.path,
                tensor=name,
                hint=_MERGE,
            )
        else:
            out.append(CanonicalTensor(link.gguf[0], (tensor.as_source(),), link.mapping))
    if out:
        work.losses.add(f"llama.cpp ignores {plural(len(out), 'norm')} that the adapter replaces")
    return out


# --- folders ---


def peft_layouts(c: Canonical, work: Work) -> Output:
    """The folder for PEFT: adapter_config.json, adapter_model.safetensors, the source's other files."""
    adapter = _adapter(c, work)
    if not lora.is_mlx(adapter.config) and (output := _restored(c, work, "hf")) is not None:
        return output
    named, config = peft_contents(c, adapter)
    return _folder(c, work, named, config, lora.PEFT_WEIGHTS, "pt")


_AS_STORED = ("llama4_text",)
"""Architectures that store stacks as [n, in, out] without a flag, so PEFT reads them as [n, out, in]."""


def _folder(c: Canonical, work: Work, named: Named, config: dict[str, object], weights: str, framework: str) -> Output:
    tensors = _outs(c, named, work)
    # As PEFT writes it, so that a folder's config is byte-identical after a GGUF round trip.
    files = {CONFIG: json.dumps(config, indent=2, sort_keys=True).encode()} | _other_texts(c)
    layouts = [FileLayout(name, [Literal(data)]) for name, data in files.items()]
    segments = safetensors.layout(tensors, {"format": framework})
    return Output([*layouts, FileLayout(weights, segments)], tensors)


def _other_texts(c: Canonical) -> dict[str, bytes]:
    """The text files of the source's folder without adapter_config.json."""
    if (folder := c.model.native_as(HfNative)) is not None:
        found = {path.as_posix(): read_text_file(folder.folder / path) for path in folder.other_files}
    else:
        manifest = restorable(c, "hf")
        found = manifest.text_files() if manifest is not None else {}
    return {name: data for name, data in found.items() if name != CONFIG}


def peft_contents(c: Canonical, adapter: Adapter) -> tuple[Named, dict[str, object]]:
    """The tensors of a PEFT folder by name, and its config."""
    pairs = _with_stated_scales(adapter, _as_parameters(c, adapter, factors.to_hf(adapter, c.model.path)))
    row = adapter.of.row if adapter.of is not None else None
    stacks = sorted(name for name, pair in pairs.items() if len(pair.shape) == 3)
    parameters = sorted({_relative(name) for name in stacks})
    named: Named = []
    for name, pair in pairs.items():
        module, _, last = name.rpartition(".")
        stem = lora.PEFT_PREFIX + module
        if len(pair.shape) == 3:
            if last == "weight":
                raise RefusedError(
                    "PEFT has no name for this stacked weight",
                    path=c.model.path,
                    tensor=name,
                    hint="set the base model with --base, which has the Hugging Face names",
                )
            siblings = sorted(
                (other for other in stacks if other.rpartition(".")[0] == module), key=lora.parameter_order
            )
            if row is not None and row.id in _AS_STORED:
                pair = factors.swapped(pair)
            stem += ".base_layer" * (len(siblings) - 1 - siblings.index(name))
            named += [
                (f"{stem}.lora_A.weight", _side_by_side(pair.a, True)),
                (f"{stem}.lora_B.weight", _side_by_side(pair.b, False)),
            ]
        elif is_embedding(row, name):
            named += [(f"{stem}.lora_embedding_A", pair.a), (f"{stem}.lora_embedding_B", pair.b)]
        else:
            named += [(f"{stem}.lora_A.weight", pair.a), (f"{stem}.lora_B.weight", pair.b)]
    named += [(lora.PEFT_PREFIX + name, tensor) for name, tensor in adapter.whole.items()]
    return named, _peft_config(adapter, pairs, parameters)


def _with_stated_scales(adapter: Adapter, pairs: Mapping[str, LoraPair]) -> dict[str, LoraPair]:
    """The pairs with the ranks and scales of the source config, if the factors allow it."""
    if lora.is_mlx(adapter.config) or "r" not in adapter.config:
        return dict(pairs)
    config = lora.read_config(adapter.config, "")
    out = {}
    for name, pair in pairs.items():
        module = name.rpartition(".")[0]
        rank = config.rank_of(module)
        one = factors.without_zeros(pair, rank)
        scale = config.scale_of(module, rank)
        out[name] = factors.with_scale(one, scale) if one.rank == rank and scale else one
    return out


def _as_parameters(c: Canonical, adapter: Adapter, pairs: Mapping[str, LoraPair]) -> dict[str, LoraPair]:
    """The pairs with experts stacked as in transformers' modules, if the source config has such `target_parameters`.

    Checkpoints of some families, and the names of the table, have each expert separately.
    """
    told = adapter.config.get("target_parameters")
    ends = [end for end in told if isinstance(end, str)] if isinstance(told, list) else []
    single = {name: pair for name, pair in pairs.items() if re.search(r"\.experts\.\d+\.", name)}
    if not ends or not single:
        return dict(pairs)
    stacks, _ = factors.to_gguf(replace(adapter, pairs=single), c.model.path)
    beginnings = {m[1]: m[0] for name in single if (m := re.match(r".*?layers\.(\d+)\.", name))}
    out = {name: pair for name, pair in pairs.items() if name not in single}
    for layer, beginning in beginnings.items():
        for end in ends:
            words = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.get(end.rpartition(".")[2], ())
            parts = [stacks.pop(f"blk.{layer}.ffn_{word}_exps.weight", None) for word in words]
            found = [part for part in parts if part is not None]
            joined = factors.on_top(beginning + end, found) if found and len(found) == len(parts) else None
            if joined is not None:
                out[joined.weight] = joined
            elif found:
                return dict(pairs)
    return dict(pairs) if stacks else out


def _relative(name: str) -> str:
    """The end of a name after its layer."""
    found = re.fullmatch(r".*?\.\d+\.(.+)", name)
    return found[1] if found else name


def _side_by_side(tensor: CanonicalTensor, is_a: bool) -> CanonicalTensor:
    """A stack of factors as PEFT stores it, see formats.lora."""
    n, rows, columns = tensor.shape
    if is_a:
        mapping = RowMapping((tensor.shape,), ((n * rows, columns),))
    else:
        mapping = RowMapping((tensor.shape,), ((rows, columns * n),), (("swap", (1, n, rows * columns)),), flat=True)
    return CanonicalTensor(tensor.name, (tensor.as_source(),), mapping)


def _peft_config(adapter: Adapter, pairs: Mapping[str, LoraPair], parameters: Sequence[str]) -> dict[str, object]:
    """adapter_config.json: that of the source, if it still matches."""
    own: dict[str, object] = {} if lora.is_mlx(adapter.config) else dict(adapter.config)
    if "r" in own and _yields_scales(own, pairs):
        return own
    ranks = Counter(pair.rank for pair in pairs.values())
    rank = ranks.most_common(1)[0][0] if ranks else adapter.rank
    alphas = Counter(pair.scale * pair.rank for pair in pairs.values())
    alpha = alphas.most_common(1)[0][0] if alphas else adapter.alpha
    modules = {name.rpartition(".")[0]: pair for name, pair in pairs.items()}
    made: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "inference_mode": True,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }
    matrices = [name for name, pair in pairs.items() if len(pair.shape) == 2]
    told: dict[str, object] = {
        "r": rank,
        "lora_alpha": _number(alpha),
        "use_rslora": False,
        "rank_pattern": {m: p.rank for m, p in modules.items() if p.rank != rank},
        "alpha_pattern": {m: _number(p.scale * p.rank) for m, p in modules.items() if p.scale * p.rank != alpha},
        "target_modules": _targets(matrices),
        "target_parameters": list(parameters) or None,
        "modules_to_save": sorted({name.rpartition(".")[0].rpartition(".")[2] for name in adapter.whole}) or None,
    }
    return {**made, **own, **told}


def _yields_scales(body: Mapping[str, object], pairs: Mapping[str, LoraPair]) -> bool:
    """Whether a config yields the rank and scale of every pair."""
    config = lora.read_config(body, "")
    for name, pair in pairs.items():
        module = name.rpartition(".")[0]
        scale = config.scale_of(module, pair.rank)
        if config.rank_of(module) != pair.rank or abs(scale - pair.scale) > 1e-6 * abs(scale):
            return False
    return True


def _number(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value


def _targets(weights: Sequence[str]) -> list[str]:
    """The modules of `weights`: by suffix if all layers have them, else by full name."""
    layers: dict[str, set[str]] = {}
    others = []
    for name in weights:
        found = re.fullmatch(r"(.*?\.\d+)\.(.+)\.weight", name)
        if found is None:
            others.append(name.removesuffix(".weight"))
        else:
            layers.setdefault(found[2], set()).add(found[1])
    every = set().union(*layers.values()) if layers else set()
    numbers = sorted(int(name.rpartition(".")[2]) for name in every)
    if all(found == every for found in layers.values()) and numbers == list(range(len(numbers))):
        return [*sorted(layers), *others]
    return sorted(name.removesuffix(".weight") for name in weights)


# --- MLX ---


def mlx_layouts(c: Canonical, work: Work) -> Output:
    """The folder for mlx_lm: adapters.safetensors and adapter_config.json."""
    adapter = _adapter(c, work)
    if lora.is_mlx(adapter.config) and (output := _restored(c, work, "hf")) is not None:
        return output
    own = [name for name in adapter.whole if ".base_layer." in name]
    for name in own:
        work.losses.add(f"base weight {name} dropped: mlx_lm does not support it")
    if len(own) < len(adapter.whole):
        raise RefusedError(
            f"the adapter replaces {first_few(adapter.whole)} (modules_to_save), which mlx_lm does not support",
            path=c.model.path,
            hint=_MERGE,
        )
    pairs = mlx_pairs(c, adapter)
    rank = max(pair.rank for pair in pairs.values())
    scales = Counter(pair.scale for pair in pairs.values())
    # A scale of 0 applies to all: no factor of the others' yields it.
    scale = max((each for each in scales if each), key=scales.__getitem__, default=0.0)
    named: Named = []
    rounded = 0
    for name, pair in pairs.items():
        rounded += not is_power_of_two(pair.scale / scale if scale else 1.0)
        one = factors.with_scale(pair if scale else replace(pair, scale=1.0), scale or 1.0, rank)
        a, b = (name.removesuffix(".weight") + ending for ending in (lora.A, lora.B))
        if len(pair.shape) == 2:
            named += [(a, _turned(one.a, a)), (b, _turned(one.b, b))]
        else:
            named += [(a, one.a), (b, one.b)]
    if rounded:
        work.losses.add(f"the scales of {plural(rounded, 'weight')} were folded into lora_b, with rounding")
    if lora.is_mlx(adapter.config):
        config = dict(adapter.config)
    else:
        layers = adapter.of.hparams.num_layers if adapter.of is not None else None
        numbers = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": _targets(list(pairs))}
        config = {"fine_tune_type": "lora", "num_layers": layers or -1, "lora_parameters": numbers}
        config |= {"model": adapter.base} if adapter.base else {}
    return _folder(c, work, named, config, lora.MLX_WEIGHTS, "mlx")


def mlx_pairs(c: Canonical, adapter: Adapter) -> dict[str, LoraPair]:
    """The pairs under mlx_lm's weight names: each projection has one stack of experts."""
    found = factors.to_hf(adapter, c.model.path)
    experts = {name: re.match(r"(.*)\.experts\.", name) for name in found}
    prefixes = {re.sub(r".*?layers\.(\d+)\..*", r"\1", name): m[1] for name, m in experts.items() if m is not None}
    if not prefixes:
        return found
    base = adapter.of
    single = {name: found[name] for name, match in experts.items() if match is not None}
    stacks, _ = factors.to_gguf(replace(adapter, pairs=single), c.model.path)
    stem = "experts" if base is not None and base.row.id in _MLX_EXPERTS else "switch_mlp"
    out = {name: pair for name, pair in found.items() if name not in single}
    for name, pair in stacks.items():
        match = re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight", name)
        if match is None:
            raise RefusedError("mlx_lm has no name for this weight", path=c.model.path, tensor=name, hint=_MERGE)
        mlx = f"{prefixes[match[1]]}.{stem}.{match[2]}_proj.weight"
        out[mlx] = replace(pair, weight=mlx)
    return out


_MLX_EXPERTS = ("gpt_oss", "llama4_text", "dots1", "afmoe")
"""Architectures whose stacked experts mlx_lm calls "experts" instead of "switch_mlp"."""


def safetensors_layouts(c: Canonical, work: Work) -> Output:
    """One safetensors file with PEFT's names, or the imported file itself; adapter_config.json is dropped."""
    adapter = _adapter(c, work)
    if (output := _restored(c, work, "safetensors")) is not None:
        return output
    named, config = peft_contents(c, adapter)
    scale = f"r {config.get('r')}, lora_alpha {config.get('lora_alpha')}"
    work.losses.add(f"{CONFIG} ({scale}) dropped: a single safetensors file cannot hold it; use --format hf")
    tensors = _outs(c, named, work)
    return Output([FileLayout(work.name, safetensors.layout(tensors, {"format": "pt"}))], tensors)
