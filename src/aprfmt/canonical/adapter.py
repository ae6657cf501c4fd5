"""Recognizes and reads adapters of any container into the form of `canonical.lora_pairs`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from aprfmt.arch.fields import as_mapping
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.links import Link, RowMapping, link_of
from aprfmt.arch.names import canonical_name, matches
from aprfmt.arch.orders import Order
from aprfmt.arch.row import Architecture, TensorRow
from aprfmt.arch.table import find_gguf
from aprfmt.canonical.lora import check_shapes
from aprfmt.canonical.lora_pairs import APR_KEY, GGUF_KEY, INVOCATION, Adapter, Base, LoraPair, stacked_name
from aprfmt.canonical.model_kinds import adapter_config
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.errors import AprError, CorruptError, RefusedError
from aprfmt.formats import lora
from aprfmt.formats.gguf import GgufNative
from aprfmt.formats.hf_files import parse_object
from aprfmt.formats.lora import LoraConfig, PartName
from aprfmt.model import Model, Tensor
from aprfmt.text import first_few
from aprfmt.types import Shape

# --- reading ---


def read_adapter(model: Model, base: Base | None = None) -> Adapter:
    """Reads the adapter `model`, for its `base` if known.

    Raises RefusedError for another type than plain LoRA, for incomplete pairs and for tensors that do not match the
    base;
    CorruptError for an invalid config.
    """
    readers = {"gguf": _from_gguf, "apr": _from_apr}
    adapter = readers.get(model.convention, _from_folder)(model, base)
    if not adapter.pairs and not adapter.whole:
        raise RefusedError("the adapter contains no tensors", path=model.path)
    for pair in adapter.pairs.values():
        _check_pair(pair, model)
    return adapter


def _rank_of(a: CanonicalTensor | None) -> int:
    """Number of rows of A; 1 if A is not a matrix, which _check_pair refuses."""
    return max(1, a.shape[-2]) if a is not None and len(a.shape) > 1 else 1


def _check_pair(pair: LoraPair, model: Model) -> None:
    a, b = pair.a.shape, pair.b.shape
    if len(a) != len(b) or len(a) not in (2, 3) or 0 in (*a, *b) or a[:-2] != b[:-2]:
        raise RefusedError(
            f"lora_a {list(a)} and lora_b {list(b)} cannot be multiplied", path=model.path, tensor=pair.weight
        )
    if a[-2] != b[-1]:
        raise RefusedError(
            f"rank mismatch: lora_a is {list(a)}, rank {a[-2]}, but lora_b {list(b)}, rank {b[-1]}",
            path=model.path,
            tensor=pair.weight,
            hint="the tensors are from different adapters; download the adapter again",
        )


def _pairs(
    model: Model, found: Mapping[str, Mapping[str, CanonicalTensor]], scale_of: Mapping[str, float]
) -> dict[str, LoraPair]:
    """Pairs the factors `found`, given by weight and "a" or "b". Raises RefusedError for half a pair."""
    out = {}
    for weight, factors in found.items():
        missing = [which for which in ("a", "b") if which not in factors]
        if missing:
            raise RefusedError(
                f"lora_{missing[0]} of the weight is missing",
                path=model.path,
                tensor=weight,
                hint="download the adapter again",
            )
        out[weight] = LoraPair(weight, factors["a"], factors["b"], scale_of[weight])
    return out


def _twice(model: Model, weight: str, first: str, second: str) -> RefusedError:
    return RefusedError(
        f"this weight has two pairs of LoRA factors: {first} and {second}",
        path=model.path,
        tensor=weight,
        hint="an adapter has one pair of factors per weight; merge several adapters with apr merge-adapter",
    )


def _from_folder(model: Model, base: Base | None) -> Adapter:
    body = adapter_config(model)
    if body is None:
        raise RefusedError(
            "no adapter_config.json found next to the adapter, so its scale is unknown",
            path=model.path,
            hint="copy it from the training output into the folder",
        )
    config = lora.read_config(body, model.path)
    is_mlx = lora.is_mlx(body)
    factors: dict[str, dict[str, CanonicalTensor]] = {}
    whole: dict[str, CanonicalTensor] = {}
    scales: dict[str, float] = {}
    for tensor in model.tensors.values():
        part = lora.mlx_part(tensor.name) if is_mlx else lora.peft_part(tensor.name, config.parameters)
        if part is None:
            kind = lora.kind_by_names([tensor.name]) or ("DoRA" if is_mlx and tensor.name.endswith(".m") else None)
            raise lora.other_kind(kind or "of an unknown type", model.path, tensor.name)
        if part.role == "whole":
            if part.weight in whole:
                raise _twice(model, part.weight, whole[part.weight].sources[0].name, tensor.name)
            whole[part.weight] = _plain(part.weight, tensor)
            continue
        which = part.role[-1]
        own = factors.setdefault(part.weight, {})
        if which in own:
            raise _twice(model, part.weight, own[which].sources[0].name, tensor.name)
        made = _of_mlx(tensor, part) if is_mlx else _of_peft(tensor, part, config, model)
        own[which] = made
        if which == "a":
            scales[part.weight] = config.scale_of(part.module, _rank_of(made))
    pairs = _pairs(model, factors, {**dict.fromkeys(factors, 1.0), **scales})
    adapter = Adapter(pairs, whole, config.rank, config.alpha, config.base, config.body, base)
    _check_ranks(model, pairs, config)
    if config.rslora and pairs:  # alpha / rank is the scale of an adapter in any container
        adapter = Adapter(pairs, whole, config.rank, config.alpha * math.sqrt(config.rank), config.base, body, base)
    _check_base(adapter, model)
    return adapter


def _check_ranks(model: Model, pairs: Mapping[str, LoraPair], config: LoraConfig) -> None:
    for pair in pairs.values():
        module = pair.weight.rpartition(".")[0]
        if min(len(pair.a.shape), len(pair.b.shape)) < 2:
            raise CorruptError("a factor of the adapter is not a matrix", path=model.path, tensor=pair.weight)
        ranks = {pair.a.shape[-2], pair.b.shape[-1]}
        if ranks != {config.rank_of(module)} and len(ranks) == 1:
            raise RefusedError(
                f"rank mismatch: {config.rank_of(module)} in the config, {ranks.pop()} in the tensors",
                path=model.path,
                tensor=pair.weight,
                hint="set r and rank_pattern in adapter_config.json to the values used for training",
            )


def _plain(name: str, tensor: Tensor) -> CanonicalTensor:
    return CanonicalTensor(name, (tensor,))


def _mapped(name: str, tensor: Tensor, mapping: RowMapping) -> CanonicalTensor:
    """The tensor `name` that `mapping` turns into the stored `tensor`."""
    row = TensorRow((name,), (tensor.name,), ("",))
    link = Link(row, (name,), (tensor.name,), mapping)
    return CanonicalTensor(name, (tensor,), mapping, 0, inverse=True, link=link)


def _turned(name: str, tensor: Tensor) -> CanonicalTensor:
    rows, columns = tensor.shape
    return _mapped(name, tensor, RowMapping(((columns, rows),), (tensor.shape,), transposed=True))


def _of_mlx(tensor: Tensor, part: PartName) -> CanonicalTensor:
    name = part.weight + (lora.A if part.role == "a" else lora.B)
    return _turned(name, tensor) if len(tensor.shape) == 2 else _plain(name, tensor)


def _of_peft(tensor: Tensor, part: PartName, config: LoraConfig, model: Model) -> CanonicalTensor:
    """A factor of a PEFT folder; one of a bare parameter contains several matrices side by side."""
    is_a = part.role.endswith("a")
    name = part.weight + (lora.A if is_a else lora.B)
    is_parameter = part.weight != f"{part.module}.weight"
    if not is_parameter or len(tensor.shape) != 2:
        return _plain(name, tensor)
    rank = config.rank_of(part.module)
    n, rest = divmod(tensor.shape[0 if is_a else 1], rank)
    if rest:
        raise RefusedError(
            f"rank mismatch: {list(tensor.shape)} is not a stack of matrices of rank {rank}",
            path=model.path,
            tensor=tensor.name,
        )
    if n < 2:
        return _plain(name, tensor)
    if is_a:
        return _mapped(name, tensor, RowMapping(((n, rank, tensor.shape[1]),), (tensor.shape,)))
    out = tensor.shape[0]
    order: tuple[Order, ...] = (("swap", (1, n, out * rank)),)
    return _mapped(name, tensor, RowMapping(((n, out, rank),), (tensor.shape,), order, flat=True))


def _from_apr(model: Model, base: Base | None) -> Adapter:
    metadata = model.metadata
    more = as_mapping(metadata.get(APR_KEY))
    rank, alpha = metadata.get("lora_rank"), metadata.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise CorruptError(f"lora_rank is {rank!r:.40}, not a positive integer", path=model.path)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CorruptError(f"lora_alpha is {alpha!r:.40}, not a number", path=model.path)
    stated = as_mapping(more.get("scales"))
    factors, whole = _by_ending(model, {name: _plain(name, tensor) for name, tensor in model.tensors.items()})
    scales: dict[str, float] = {}
    for weight, own in factors.items():
        value = stated.get(weight, float(alpha) / _rank_of(own.get("a")))
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CorruptError(f"the scale of the adapter is {value!r:.40}", path=model.path, tensor=weight)
        scales[weight] = float(value)
    name, config = more.get("base"), more.get("config")
    return Adapter(
        _pairs(model, factors, scales), whole, rank, float(alpha), name if isinstance(name, str) else None,
        dict(config) if isinstance(config, Mapping) else {}, base or _own_base(model), _read_blocks(more.get("blocks")),
    )  # fmt: skip


def _own_base(model: Model) -> Base | None:
    """The base model described in the metadata of an adapter's `.apr`."""
    from aprfmt.arch.table import row_of

    row = row_of(model.hparams, kv=None, tensor_names=())
    return Base(row, model.hparams) if row is not None and model.hparams.hidden_size is not None else None


def _by_ending(
    model: Model, tensors: Mapping[str, CanonicalTensor]
) -> tuple[dict[str, dict[str, CanonicalTensor]], dict[str, CanonicalTensor]]:
    """The factors by weight, and the remaining tensors."""
    factors: dict[str, dict[str, CanonicalTensor]] = {}
    whole: dict[str, CanonicalTensor] = {}
    for name, tensor in tensors.items():
        ending = next((ending for ending in (lora.A, lora.B) if name.endswith(ending)), None)
        if ending is None:
            whole[name] = tensor
            continue
        own = factors.setdefault(name.removesuffix(ending), {})
        if ending[-1] in own:
            raise _twice(model, name.removesuffix(ending), own[ending[-1]].sources[0].name, tensor.sources[0].name)
        own[ending[-1]] = tensor
    return factors, whole


# --- GGUF ---


def _from_gguf(model: Model, base: Base | None) -> Adapter:
    kv = model.metadata
    kind = kv.get("adapter.type")
    if kind != "lora":
        raise lora.other_kind(f"of type {kind!r:.40}", model.path)
    alpha = kv.get("adapter.lora.alpha", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CorruptError(f"adapter.lora.alpha is {alpha!r:.40}, not a number", path=model.path)
    name = kv.get("general.architecture")
    if base is not None and base.row.gguf != name:
        raise RefusedError(
            f"the adapter is for a base model of architecture {name!r}, not {base.row.gguf!r}",
            path=model.path,
            hint="set its base model with --base",
        )
    gguf = model.native_as(GgufNative)
    if gguf is not None:
        seen: dict[str, str] = {}
        for tensor in model.tensors.entries:
            if tensor.name in seen:
                raise _twice(model, tensor.name, tensor.name, tensor.name)
            seen[tensor.name] = tensor.name
    row = base.row if base is not None else find_gguf(kv)
    factors, whole = _by_ending(model, dict(_gguf_tensors(model, row, base)))
    ranks = {weight: _rank_of(own.get("a")) for weight, own in factors.items()}
    # llama.cpp treats an alpha of 0 as none: the factors are then used without a scale.
    scales = {weight: float(alpha) / rank if alpha else 1.0 for weight, rank in ranks.items()}
    rank = max(ranks.values(), key=list(ranks.values()).count, default=1)
    stored = _stored(kv.get(GGUF_KEY))
    body = dict(as_mapping(stored.get("config")))
    listed = kv.get("adapter.alora.invocation_tokens")
    if isinstance(listed, list) and listed:
        body = {**body, INVOCATION: listed}
    pairs = _pairs(model, factors, scales)
    stated = kv.get("general.base_model.0.repo_url") or kv.get("general.base_model.0.name")
    named = body.get("base_model_name_or_path") or stated
    adapter = Adapter(
        pairs, whole, rank, float(alpha) if alpha else float(rank), named if isinstance(named, str) else None, body,
        base, _read_blocks(stored.get("blocks")),
    )  # fmt: skip
    if row is not None:
        _check_names(adapter, model, row)
    _check_base(adapter, model)
    return adapter


def stored_config(kv: Mapping[str, object]) -> Mapping[str, object]:
    """The adapter config stored in the keys of a GGUF; {} if it has none."""
    return as_mapping(_stored(kv.get(GGUF_KEY)).get("config"))


def _stored(value: object) -> Mapping[str, object]:
    if not isinstance(value, str):
        return {}
    try:
        return parse_object(value.encode(errors="surrogateescape"), "", GGUF_KEY)
    except AprError:
        return {}


def _read_blocks(value: object) -> dict[str, list[tuple[str, int]]]:
    """Parses the output of `to_metadata`; {} for anything else."""
    out: dict[str, list[tuple[str, int]]] = {}
    for weight, parts in as_mapping(value).items():
        if not isinstance(parts, list):
            return {}
        for part in parts:
            if not isinstance(part, list) or len(part) != 2 or not isinstance(part[0], str) or type(part[1]) is not int:
                return {}
            if part[1] < 1:
                return {}
        out[weight] = [(str(name), rank) for name, rank in parts]
    return out


def _gguf_tensors(model: Model, row: Architecture | None, base: Base | None) -> Iterator[tuple[str, CanonicalTensor]]:
    """The tensors by Hugging Face name if the weight is a single tensor in a checkpoint too, else by GGUF name."""
    shapes = _shapes(model)
    done: dict[str, tuple[str, Link | None]] = {}
    for tensor in model.tensors.values():
        ending = next((ending for ending in (lora.A, lora.B) if tensor.name.endswith(ending)), "")
        weight = tensor.name.removesuffix(ending)
        if weight not in done:
            done[weight] = _hf_weight(weight, shapes, row, base)
        name, link = done[weight]
        made = _plain(name + ending, tensor)
        if weight == "token_embd.weight" and ending == lora.A and len(tensor.shape) == 2:
            made = _turned(name + ending, tensor)
        elif link is not None and ending == lora.B and link.mapping.orders and len(tensor.shape) == 2:
            made = _mapped(name + ending, tensor, RowMapping((tensor.shape,), (tensor.shape,), link.mapping.orders))
        yield made.name, made


def _shapes(model: Model) -> dict[str, Shape]:
    """Weight shapes of a GGUF's network, as far as the adapter determines them."""
    out: dict[str, Shape] = {}
    for name, a in model.tensors.items():
        weight = name.removesuffix(lora.A)
        b = model.tensors.get(weight + lora.B)
        if weight == name or b is None or len(a.shape) < 2 or len(b.shape) < 2:
            continue
        turned = weight == "token_embd.weight"
        out[weight] = (a.shape[0], b.shape[0]) if turned else (*b.shape[:-1], a.shape[-1])
    return out


def _hf_weight(
    weight: str, shapes: Mapping[str, Shape], row: Architecture | None, base: Base | None
) -> tuple[str, Link | None]:
    """Hugging Face name and weight mapping of a GGUF weight, if it is a single weight with permuted rows."""
    found = matches(row, weight, "gguf") if row is not None else []
    if len({match.row.hf for match in found}) != 1 or weight not in shapes:
        return weight, None
    try:
        link = link_of(base.hparams if base is not None else Hyperparams(), found[0], shapes)
    except RefusedError:
        return weight, None  # the base determines the head counts
    m = link.mapping
    is_simple = len(link.hf) == len(link.gguf) == 1 and not (m.columns or m.maps_values or m.pack or m.flat or m.skip)
    if not is_simple or any(m.after_transposed):
        return weight, None
    return link.hf[0], link


# --- the base ---


def _check_names(adapter: Adapter, model: Model, row: Architecture) -> None:
    """Raises RefusedError for a weight that networks of the row do not have."""
    for weight in (*adapter.pairs, *adapter.whole):
        if not is_of(row, weight.replace(".base_layer.", ".")):
            others = first_few([row.id])
            raise RefusedError(
                f"the adapter changes a weight that networks of architecture {others} do not have",
                path=model.path,
                tensor=weight,
                hint="it was trained on a different base model: set it with --base",
            )


def is_of(row: Architecture, weight: str) -> bool:
    """Whether a network of the row has the `weight`, by either name; MLX stacks count by their contents."""
    if canonical_name(row, weight) or matches(row, weight, "gguf") or matches(row, stacked_name(weight), "gguf"):
        return True
    fused = re.fullmatch(r"(?:.*\.)?layers\.(\d+)\..*experts\.(gate_up|down)_proj", weight)
    which = ("down",) if fused is not None and fused[2] == "down" else ("gate", "up")
    return fused is not None and all(matches(row, f"blk.{fused[1]}.ffn_{x}_exps.weight", "gguf") for x in which)


def _check_base(adapter: Adapter, model: Model) -> None:
    """Raises RefusedError if the adapter's names or shapes do not match its base."""
    if adapter.of is None:
        return
    _check_names(adapter, model, adapter.of.row)
    check_shapes(adapter, model.path)
