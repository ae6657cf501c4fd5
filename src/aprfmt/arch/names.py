"""Tensor names: Hugging Face to GGUF and back, and whether a set of tensors is the whole network."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import cache

from aprfmt.arch.hparams import Hyperparams
from aprfmt.arch.table import HEAD, OPTIONAL, REQUIRED, Architecture, TensorRow
from aprfmt.errors import RefusedError, UnmappedError

_LAYER = re.compile(r"(?<=\.)(0|[1-9][0-9]{0,5})(?=\.)")


@cache
def _index(arch: Architecture, side: str) -> dict[str, TensorRow]:
    return {getattr(row, side): row for row in arch.tensors}


def _template(name: str) -> tuple[str, str | None]:
    """(`name` with its layer number as `{n}`, the number): ("blk.{n}.attn_q.weight", "3")."""
    if "{n}" in name:
        return "", None
    match = _LAYER.search(name)
    if match is None:
        return name, None
    return f"{name[: match.start()]}{{n}}{name[match.end() :]}", match[1]


def _look_up(arch: Architecture, name: str, side: str) -> tuple[TensorRow, str | None] | None:
    template, layer = _template(name)
    row = _index(arch, side).get(template)
    return None if row is None else (row, layer)


def to_gguf(arch: Architecture, name: str) -> str | None:
    """GGUF name of the Hugging Face tensor `name`; None if the family has no such tensor."""
    found = _look_up(arch, name, "hf")
    return None if found is None else found[0].gguf.replace("{n}", found[1] or "")


def to_hf(arch: Architecture, gguf_name: str) -> str | None:
    """Hugging Face name of the GGUF tensor `gguf_name`; None if the family has no such tensor."""
    found = _look_up(arch, gguf_name, "gguf")
    return None if found is None else found[0].hf.replace("{n}", found[1] or "")


def move_of(arch: Architecture, name: str) -> tuple[str, str] | None:
    """(move, field of Hyperparams that counts its heads) from Hugging Face to GGUF row order, or None."""
    found = _look_up(arch, name, "hf")
    if found is None or found[0].move is None or found[0].heads is None:
        return None
    return found[0].move, found[0].heads


def ignorable(arch: Architecture, name: str) -> bool:
    """Whether the Hugging Face tensor `name` is a buffer that no converter carries."""
    return name.endswith(arch.ignored)


def nearest(arch: Architecture, name: str, side: str = "hf") -> str:
    """The name of the family, on that side ("hf" or "gguf"), that looks most like `name`."""
    template, layer = _template(name)
    known = list(_index(arch, side))
    best = get_close_matches(template or name, known, n=1, cutoff=0.0)
    return (best[0] if best else known[0]).replace("{n}", layer or "0")


def check_tensors(arch: Architecture, hparams: Hyperparams, names: Collection[str]) -> None:
    """Holds the Hugging Face `names` against what the network needs.

    Raises UnmappedError for a name that the family has not (with the nearest it has), RefusedError for
    missing tensors and for layers beyond `num_layers`. Free to be there or not: a tied head, biases without
    their config flag, buffers.
    """
    present = set(names)
    layers = hparams.num_layers if hparams.num_layers is not None else _n_layers(present)
    for name in names:
        _check_name(arch, name, layers)
    _check_missing(arch, hparams, present, layers)


def _check_name(arch: Architecture, name: str, layers: int) -> None:
    if name in arch.gguf_only or ignorable(arch, name):
        return
    found = _look_up(arch, name, "hf")
    if found is None:
        raise UnmappedError(
            f"the tensor has no name in architecture {arch.id!r}; the nearest is {nearest(arch, name)!r}",
            tensor=name,
            hint="check --arch, or carry it under its own name with --allow-unmapped",
        )
    if found[1] is not None and int(found[1]) >= layers:
        raise RefusedError(f"the tensor is of layer {found[1]}, the network has {layers} layers", tensor=name)


def _check_missing(arch: Architecture, hparams: Hyperparams, present: set[str], layers: int) -> None:
    missing: list[str] = []
    n_missing = 0
    for row in arch.tensors:
        if not _needed(arch, row, hparams):
            continue
        # A crafted layer count must cost no more than the tensors that are there.
        for name in _expand(row, min(layers, len(present) + 1)):
            if name not in present:
                n_missing += 1
                missing += [name] if len(missing) < 3 else []
    if n_missing:
        more = f" and {n_missing - len(missing)} more" if n_missing > len(missing) else ""
        raise RefusedError(
            f"{n_missing} tensors of the {arch.id} network are missing: {', '.join(missing)}{more}",
            tensor=missing[0],
            hint="a sharded model needs all its shards; check num_layers and --arch",
        )


def _needed(arch: Architecture, row: TensorRow, hparams: Hyperparams) -> bool:
    if row.need == HEAD:
        return not hparams.tied and hparams.hf_architecture not in arch.bare_classes
    if row.need in (REQUIRED, OPTIONAL):
        return row.need == REQUIRED
    return hparams.extra.get(row.need) is True


def _expand(row: TensorRow, layers: int) -> Iterable[str]:
    return (row.hf.replace("{n}", str(n)) for n in range(layers)) if "{n}" in row.hf else (row.hf,)


def _n_layers(names: Iterable[str]) -> int:
    return max((int(layer) + 1 for _, layer in map(_template, names) if layer is not None), default=0)


def check_shapes(arch: Architecture, hparams: Hyperparams, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Holds shapes (row-major, by Hugging Face name) against the hyper-parameters.

    What the hyper-parameters do not give is not checked. Raises RefusedError naming tensor, shape and rule.
    """
    sizes = dim_sizes(hparams)
    for name, shape in shapes.items():
        found = _look_up(arch, name, "hf")
        if found is None:
            continue
        dims = found[0].dims
        known = [sizes[dim] for dim in dims]
        fits = len(shape) == len(dims) and all(
            want is None or have == want for have, want in zip(shape, known, strict=True)
        )
        if not fits:
            want = ", ".join(
                f"{dim} {size}" if size is not None else dim for dim, size in zip(dims, known, strict=True)
            )
            raise RefusedError(
                f"the shape is {list(shape)}, the hyper-parameters ask for [{want}]",
                tensor=name,
                hint="the config or metadata belongs to another model, or the tensor is damaged",
            )


def dim_sizes(hparams: Hyperparams) -> dict[str, int | None]:
    """Sizes of the words that TensorRow.dims uses; None where the hyper-parameters do not say."""
    head_dim, kv_heads = hparams.head_dim, hparams.num_kv_heads or hparams.num_heads
    return {
        "vocab": hparams.vocab_size,
        "hidden": hparams.hidden_size,
        "ffn": hparams.intermediate_size,
        "head_dim": head_dim,
        "q": hparams.num_heads * head_dim if hparams.num_heads and head_dim else None,
        "kv": kv_heads * head_dim if kv_heads and head_dim else None,
    }


def order(arch: Architecture, name: str) -> tuple[int, int, int, str]:
    """Sort key that lays tensors out as the network runs: embedding, layers, final norm, head, the rest."""
    found = _look_up(arch, name, "hf")
    if found is None:
        return 3, 0, 0, name
    row, layer = found
    position = arch.tensors.index(row)
    if layer is not None:
        return 1, int(layer), position, name
    return (0 if position == 0 else 2), 0, position, name
