"""Width pruning: fewer channels, neurons or heads, keeping the most important ones with unchanged values.

Importance is judged by weight magnitudes: channels of the hidden state by their embedding, neurons of an MLP by the
product of the norms of their vectors, heads by the norm of their part of the output projection; groups of heads that
share keys and values by the sum of that times the norm of their values. The head size is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial

from aprfmt.arch.grammar import FIELD_OF_SIZE, dims_of, evaluate, sizes_of
from aprfmt.arch.names import is_gguf_only, matches
from aprfmt.arch.row import Architecture
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.row_mapping import BufferedTensor
from aprfmt.canonical.sides import hf_side
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.recode import recode_jobs
from aprfmt.codecs.stream import regroup
from aprfmt.errors import RefusedError, UsageError
from aprfmt.io.pipe import run_jobs
from aprfmt.text import plural
from aprfmt.types import Array

UNIT = 32
"""Numbers of channels and neurons are multiples of it, so that blocks of a quantized type divide the rows."""

WIDTHS = ("hidden", "ffn", "heads", "kv_heads")
"""What can be pruned, by the size words of table rows."""

_FIELDS = tuple(FIELD_OF_SIZE[name] for name in WIDTHS)

_DIMS: Mapping[str, tuple[str, ...]] = {
    "token_embd": ("vocab,hidden",), "output": ("vocab,hidden",), "output_norm": ("hidden",),
    "attn_norm": ("hidden",), "ffn_norm": ("hidden",),
    "attn_q": ("q,hidden", "q"), "attn_k": ("kv,hidden", "kv"), "attn_v": ("kv,hidden", "kv"),
    "attn_qkv": ("q+2*kv,hidden", "q+2*kv"), "attn_output": ("hidden,q", "hidden"),
    "attn_q_norm": ("head_dim", "q", "heads,head_dim"), "attn_k_norm": ("head_dim", "kv", "kv_heads,head_dim"),
    "post_attention_norm": ("hidden",), "post_ffw_norm": ("hidden",),
    "ffn_gate": ("ffn,hidden", "ffn"), "ffn_up": ("ffn,hidden", "2*ffn,hidden", "ffn"),
    "ffn_down": ("hidden,ffn", "hidden"),
}  # fmt: skip
"""Tensors of networks that can be pruned, by their GGUF names without layer and suffix, and their shapes."""

_Kept = Mapping[str, Array]
"""Axis -> indices to keep, ascending."""

_PIECE = 4 << 20


def parse_widths(text: str) -> dict[str, int]:
    """Parses widths: "hidden=512,heads=8". Raises UsageError."""
    found: dict[str, int] = {}
    for word in text.split(","):
        name, _, number = word.partition("=")
        if name not in WIDTHS or not (number.isascii() and number.isdecimal()) or name in found:
            raise UsageError(
                f"invalid width {word!r:.40} in {text!r:.80}",
                hint=f"choose from {', '.join(WIDTHS)}: hidden=512,heads=8",
            )
        found[name] = int(number)
    return found


def narrowed(c: Canonical, widths: Mapping[str, int]) -> tuple[Canonical, list[str]]:
    """`c` with `widths` of WIDTHS, everything else unchanged; and warnings.

    Kept bytes of stored floats are unchanged; partially kept blocks become F32. Weights are read only when the result
    is.

    Raises:
        UsageError: more than the model has; heads that cannot share the key-value heads; channels or neurons that are
            not a multiple of UNIT.
        RefusedError: a network with other tensors than _DIMS, with layers of different widths, or with extra parts
            (towers,
            MTP layers); a head size that its config.json could not express.
    """
    row = _check(c, widths)
    h = deepcopy(c.hparams)
    for name, number in widths.items():
        setattr(h, FIELD_OF_SIZE[name], number)
    tensors = {tensor.name: tensor for tensor in hf_side(row, c.tensors)}
    chosen, decoded = _Choice(c, tensors, sizes_of(h)), 0
    if h.head_dim:
        h.extra["head_dim"] = h.head_dim
        if h.head_dim != h.plain_head_dim and not any("head_dim" in key.hf for key in row.keys):
            raise RefusedError(
                f"a {row.id} needs a head dim of hidden / heads, but this model has {h.head_dim}",
                path=c.model.path,
                hint=f"set both: heads=N,hidden=M with M = {h.head_dim} N",
            )
    out = {name: tensor for name, tensor in c.tensors.items() if is_gguf_only(row, name)}
    for name, tensor in tensors.items():
        out[name] = chosen.narrow(tensor)
        decoded += out[name].dtype != tensor.dtype
    blocks = (
        [f"{plural(decoded, 'tensor')} stored as F32: the new rows do not end at a quantized block"] if decoded else []
    )
    return replace(c, hparams=h, tensors=out, is_whole=False, sidecar=None), blocks


def _check(c: Canonical, widths: Mapping[str, int]) -> Architecture:
    row, path = c.arch, c.model.path
    if row is None or not c.tensors:
        raise RefusedError("the architecture is unknown, so widths cannot be changed", path=path)
    sizes, lists = sizes_of(c.hparams), [name for key in row.keys for name in key.hf if key.field in _FIELDS]
    if not all(sizes.get(name) for name in (*WIDTHS, "head_dim")):
        raise RefusedError(f"widths of {row.id} cannot be changed: it lacks one of {', '.join(WIDTHS)}", path=path)
    for name, number in widths.items():
        if not 1 <= number <= sizes.get(name, 0):
            raise UsageError(f"{name}={number} is not from 1 to the model's {sizes.get(name, 0)}")
        if name in ("hidden", "ffn") and number % UNIT:
            below = number // UNIT * UNIT or UNIT
            raise UsageError(f"{name}={number} is not a multiple of {UNIT}", hint=f"for example {name}={below}")
    heads, groups = (widths.get(name, sizes[name]) for name in ("heads", "kv_heads"))
    most = sizes["heads"] // sizes["kv_heads"]
    if heads % groups or heads // groups > most:
        raise UsageError(
            f"{heads} heads cannot share {groups} key-value heads: "
            f"each must serve the same number of heads, at most {most}",
            hint=f"set both: heads={most},kv_heads=1, or {2 * most} and 2",
        )
    if c.extras:
        raise RefusedError(
            "width pruning does not support extra tensors (towers, MTP layers)",
            path=path,
            tensor=next(iter(c.extras)),
            hint="drop MTP layers with --no-mtp; towers cannot be kept",
        )
    if any(isinstance(c.hparams.extra.get(name), list) for name in lists):
        raise RefusedError(
            "width pruning needs layers of equal width", path=path, hint="drop layers instead: --drop-layers"
        )
    return row


class _Choice:
    """What to keep of each tensor."""

    def __init__(self, c: Canonical, tensors: Mapping[str, CanonicalTensor], new: Mapping[str, int]) -> None:
        """Raises RefusedError for a tensor of another kind."""
        self._old, self._new = sizes_of(c.hparams), new
        self._axes: dict[str, tuple[int | None, list[str]]] = {}
        self._of: dict[tuple[int | None, str], CanonicalTensor] = {}
        for name, tensor in tensors.items():
            match = next(iter(matches(c.arch, name)), None) if c.arch is not None else None
            stem, _, ending = match.row.gguf[0].removeprefix("blk.{n}.").rpartition(".") if match else ("", "", "")
            dims = match.row.dims[min(match.position, len(match.row.dims) - 1)] if match else ""
            if match is None or dims not in _DIMS.get(stem, ()) or (match.row.order and stem == "attn_qkv"):
                raise RefusedError(
                    f"width pruning does not support this tensor of a {c.hparams.architecture}",
                    path=c.model.path,
                    tensor=name,
                    hint="drop layers instead: --drop-layers",
                )
            self._axes[name] = match.layer, dims_of(dims)
            if ending == "weight":
                self._of[match.layer, stem] = tensor
        self._kept = cache(self._choose)  # by whoever reads first; another thread finds the same

    def narrow(self, tensor: CanonicalTensor) -> CanonicalTensor:
        """What to keep of a tensor."""
        layer, axes = self._axes[tensor.name]
        shape = tuple(evaluate(axis, self._new) or 0 for axis in axes)
        if shape == tensor.shape:
            return tensor
        dtype = tensor.dtype if DTYPES[tensor.dtype].kind == "plain" else "F32"
        made = BufferedTensor(tensor.name, dtype, shape, partial(self._chunks, tensor, dtype, layer, axes))
        return CanonicalTensor(tensor.name, (made,))

    def _chunks(self, tensor: CanonicalTensor, dtype: str, layer: int | None, axes: list[str]) -> Iterator[bytes]:
        """The kept bytes, read a few rows at a time; a vector is a column."""
        import numpy as np

        made, width = tensor.produced, tensor.shape[1] if len(axes) > 1 else 1
        rows, columns = [self._indices(axis, layer) for axis in axes] + [None] * (2 - len(axes))
        jobs = made.items(1) if dtype == made.dtype else recode_jobs(made.dtype, dtype, made.shape, made.items)
        size = DTYPES[dtype].n_bytes((1,))
        first, unit = 0, size * width
        for chunk in regroup(run_jobs(jobs), unit, max(1, _PIECE // unit) * unit):
            part: Array = np.frombuffer(chunk, f"<u{size}").reshape(-1, width)
            last = first + len(part)
            if rows is not None:
                part = part[rows[slice(*np.searchsorted(rows, (first, last)))] - first]
            yield (part if columns is None else part[:, columns]).tobytes()
            first = last

    def _indices(self, axis: str, layer: int | None) -> Array | None:
        """Indices to keep of an axis ("q", "2*ffn", "q+2*kv"), None for all."""
        import numpy as np

        if evaluate(axis, self._old) == evaluate(axis, self._new):
            return None
        terms = (term.rpartition("*") for term in axis.split("+"))
        runs = [word for count, _, word in terms for _ in range(int(count or 1))]
        found, first = [], 0
        for word in runs:
            kept = self._kept(layer if word != "hidden" else None)
            found.append(first + kept.get(word, np.arange(self._old[word])))
            first += self._old[word]
        return np.concatenate(found)

    def _choose(self, layer: int | None) -> _Kept:
        """Indices to keep of the pruned axes: of a layer, or of the hidden state if None."""
        old, new = self._old, self._new
        found: dict[str, Array] = {}
        if layer is None:
            return {"hidden": _largest(_squares(self._of[None, "token_embd"], 0), new["hidden"])}
        if new["ffn"] != old["ffn"]:
            found["ffn"] = self._neurons(layer)
        if (new["heads"], new["kv_heads"]) != (old["heads"], old["kv_heads"]):
            found |= self._heads(layer)
        return found

    def _neurons(self, layer: int) -> Array:
        import numpy as np

        into = [_squares(self._of[layer, stem], 1) for stem in ("ffn_gate", "ffn_up") if (layer, stem) in self._of]
        both = np.concatenate(into).reshape(-1, self._old["ffn"]).prod(axis=0)
        return _largest(both * _squares(self._of[layer, "ffn_down"], 0), self._new["ffn"])

    def _heads(self, layer: int) -> _Kept:
        import numpy as np

        old, new, size = self._old, self._new, self._old["head_dim"]
        stem = "attn_v" if (layer, "attn_v") in self._of else "attn_qkv"
        values = _squares(self._of[layer, stem], 1)[-old["kv"] :].reshape(old["kv_heads"], -1).sum(axis=1)
        out = _squares(self._of[layer, "attn_output"], 0).reshape(old["heads"], size).sum(axis=1)
        heads_KG = np.sqrt(out).reshape(old["kv_heads"], -1)
        groups = _largest(heads_KG.sum(axis=1) * np.sqrt(values), new["kv_heads"])
        of_group = new["heads"] // new["kv_heads"]
        chosen = [group * heads_KG.shape[1] + _largest(heads_KG[group], of_group) for group in groups]
        kept = {"heads": np.concatenate(chosen), "kv_heads": groups}
        for axis, numbers in (("q", kept["heads"]), ("kv", groups)):
            kept[axis] = (numbers[:, None] * size + np.arange(size)).reshape(-1)
        return kept


def _squares(tensor: CanonicalTensor, axis: int) -> Array:
    """The sum of the squares of each column (axis 0) or row (axis 1) in float64, read a few rows at a time."""
    import numpy as np

    made, width = tensor.produced, tensor.shape[1]
    chunks = regroup(run_jobs(recode_jobs(made.dtype, "F32", made.shape, made.items)), 4 * width, 4 * width * 64)
    parts = (np.square(np.frombuffer(chunk, "<f4").reshape(-1, width), dtype=np.float64).sum(axis) for chunk in chunks)
    total: Array = np.concatenate([*parts]) if axis else sum(parts, np.zeros(width))
    return total


def _largest(scores: Array, count: int) -> Array:
    """Indices of the `count` largest scores, ascending."""
    import numpy as np

    found: Array = np.sort(np.argsort(-scores, kind="stable")[:count])
    return found
