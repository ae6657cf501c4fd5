"""Students: taken from a teacher by leaving out layers or width, or new from a config.json.

    layers:0,2,4       these layers of the teacher
    layers:12          twelve of them, evenly spaced, the first and the last among them
    width:hidden=512,ffn=1408,heads=8,kv_heads=2      what matters most of each width; what is not named stays
    PATH               a config.json, or a folder with one: random weights

`layers` and `width` are joined by `+`. What matters most is judged by the size of the weights alone: channels of the
hidden state by their embedding, neurons of an MLP by the product of the norms of their three vectors, heads by the
norm of their part of the output projection times that of their values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from aprfmt.arch.hparams import from_hf_config
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.errors import NotFoundError, RefusedError, UsageError
from aprfmt.formats.hf_files import read_config
from aprfmt.tokenizer.model import Tokenizer
from aprfmt.types import PathLike
from aprtrain.network.decoder import Decoder
from aprtrain.network.shape import Shape, shape_of, to_hparams
from aprtrain.network.weights import Network, fill, whole

_UNIT = 32
"""Widths of matrices are multiples of it, so that quantized blocks divide their rows."""


def make_student(teacher: Network, how: str, *, seed: int = 42) -> tuple[Decoder, Network]:
    """A student with its weights, float32 on the CPU, and what is known of it; it gets the teacher's tokenizer.

    `seed` is for random weights only. Raises UsageError for what `how` does not say, RefusedError for a network that
    cannot be made from this teacher.
    """
    words = how.split("+")
    if not _is_taken(how):
        return fresh_student(how, teacher.tokenizer, seed=seed)
    kinds = [word.partition(":")[0] for word in words]
    if len(set(kinds)) < len(kinds):
        raise UsageError(f"{how!r} says the same thing twice")
    layers, widths = tuple(range(teacher.shape.n_layers)), dict[str, int]()
    for word in words:
        kind, _, text = word.partition(":")
        if kind == "layers":
            layers = _layers(text, teacher.shape.n_layers)
        else:
            widths = _widths(text, teacher.shape)
    hparams = to_hparams(teacher.hparams, layers, widths)
    student = replace(teacher, model=None, tensors={}, hparams=hparams, shape=shape_of(hparams, teacher.arch))
    decoder = Decoder(student.shape)
    _take(teacher, decoder, layers)
    return decoder, student


def _is_taken(how: str) -> bool:
    return all(word.startswith(("layers:", "width:")) for word in how.split("+"))


def without_folders(how: str | None) -> str | None:
    """`how` a student is made, as a file that goes elsewhere may tell it: of a config.json its name."""
    return how if how is None or _is_taken(how) else Path(how).name


def _layers(text: str, n_layers: int) -> tuple[int, ...]:
    try:
        numbers = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        numbers = []
    if numbers and "," not in text:
        count = numbers[0]
        if not 1 <= count <= n_layers:
            raise UsageError(f"{count} layers cannot be taken from {n_layers}")
        step = (n_layers - 1) / max(1, count - 1)
        return tuple(round(i * step) for i in range(count))
    if not numbers or sorted(set(numbers)) != numbers or numbers[0] < 0 or numbers[-1] >= n_layers:
        raise UsageError(
            f"layers:{text} does not name layers of a network of {n_layers}",
            hint=f"give a number of layers, or ascending numbers from 0 to {n_layers - 1}: layers:0,2,4",
        )
    return tuple(numbers)


def _widths(text: str, s: Shape) -> dict[str, int]:
    usual = {"hidden": s.d_model, "ffn": s.d_ffn, "heads": s.n_heads, "kv_heads": s.n_kv_heads}
    found: dict[str, int] = {}
    for word in text.split(","):
        name, _, number = word.partition("=")
        if name not in usual or not number.isdecimal() or name in found:
            raise UsageError(
                f"width:{text} has a mistake at {word!r}",
                hint=f"name some of {', '.join(usual)}: width:hidden=512,heads=8",
            )
        found[name] = int(number)
        if not 1 <= found[name] <= usual[name]:
            raise UsageError(
                f"{name}={number}: the teacher has {usual[name]}, a student can have 1 to that many"
            )
        if name in ("hidden", "ffn") and found[name] % _UNIT:
            raise UsageError(f"{name}={number} is not a multiple of {_UNIT}")
    heads, kv_heads = found.get("heads", s.n_heads), found.get("kv_heads", s.n_kv_heads)
    if heads % kv_heads or heads // kv_heads > s.n_heads // s.n_kv_heads:
        group = s.n_heads // s.n_kv_heads
        raise UsageError(
            f"{heads} heads cannot share {kv_heads} key-value heads: each has 1 to {group} of the teacher's"
        )
    return found


@dataclass(frozen=True, slots=True)
class _Kept:
    """Indices that are kept of each axis; None for all."""

    hidden: Tensor | None = None
    ffn: Tensor | None = None
    q: Tensor | None = None
    kv: Tensor | None = None


# Hugging Face name behind `model.layers.N.`, without its ending -> (axis of its rows, axis of its columns).
_AXES = {
    "self_attn.q_proj": ("q", "hidden"),
    "self_attn.k_proj": ("kv", "hidden"),
    "self_attn.v_proj": ("kv", "hidden"),
    "self_attn.o_proj": ("hidden", "q"),
    "self_attn.q_norm": ("", ""),
    "self_attn.k_norm": ("", ""),
    "mlp.gate_proj": ("ffn", "hidden"),
    "mlp.up_proj": ("ffn", "hidden"),
    "mlp.down_proj": ("hidden", "ffn"),
}
_OTHER_AXES = {"model.embed_tokens.weight": ("", "hidden"), "lm_head.weight": ("", "hidden")}
_NORM_AXES = ("hidden", "")


def _take(teacher: Network, student: Decoder, layers: tuple[int, ...]) -> None:
    """Writes what is kept of the teacher's tensors over the student's, a tensor at a time."""
    s, targets = student.shape, student.hf_tensors()
    hidden = _largest(whole(teacher, "model.embed_tokens.weight").square().sum(0), s.d_model)
    outside = _Kept(hidden)
    for name, target in targets.items():
        if not name.startswith("model.layers."):
            _copy(teacher, name, target, _OTHER_AXES.get(name, _NORM_AXES), outside)
    for new, old in enumerate(layers):
        kept = _kept_of_layer(teacher, f"model.layers.{old}.", s, hidden)
        prefix = f"model.layers.{new}."
        for name, target in targets.items():
            if name.startswith(prefix):
                part = name.removeprefix(prefix)
                axes = _AXES.get(part.rpartition(".")[0], _NORM_AXES)
                _copy(teacher, f"model.layers.{old}.{part}", target, axes, kept)


def _copy(teacher: Network, name: str, target: Tensor, axes: tuple[str, str], kept: _Kept) -> None:
    rows, cols = (getattr(kept, axis) if axis else None for axis in axes)
    if rows is None and cols is None:
        fill(teacher, name, target)
        return
    values = whole(teacher, name)
    values = values if rows is None else values[rows]
    target.copy_(values if cols is None or values.ndim < 2 else values[:, cols])


def _largest(scores: Tensor, count: int) -> Tensor | None:
    """Indices of the `count` largest scores, rising; None for all of them."""
    if count == len(scores):
        return None
    return torch.topk(scores, count).indices.sort().values


def _kept_of_layer(teacher: Network, prefix: str, s: Shape, hidden: Tensor | None) -> _Kept:
    t = teacher.shape
    ffn = q = kv = None
    if s.d_ffn != t.d_ffn:
        gate, up = (whole(teacher, f"{prefix}mlp.{x}_proj.weight").norm(dim=1) for x in ("gate", "up"))
        ffn = _largest(gate * up * whole(teacher, f"{prefix}mlp.down_proj.weight").norm(dim=0), s.d_ffn)
    if (s.n_heads, s.n_kv_heads) != (t.n_heads, t.n_kv_heads):
        values = whole(teacher, f"{prefix}self_attn.v_proj.weight").view(t.n_kv_heads, -1)
        out = whole(teacher, f"{prefix}self_attn.o_proj.weight").view(t.d_model, t.n_heads, t.head_dim)
        heads = out.square().sum((0, 2)).sqrt().view(t.n_kv_heads, -1)
        groups = _largest(heads.sum(1) * values.norm(dim=1), s.n_kv_heads)
        groups = torch.arange(t.n_kv_heads) if groups is None else groups
        q, kv = _head_rows(heads, groups, s)
    return _Kept(hidden, ffn, q, kv)


def _head_rows(heads_KG: Tensor, groups: Tensor, s: Shape) -> tuple[Tensor, Tensor]:
    """Rows of Q and of K and V: of each kept group the heads with the largest scores."""
    size = heads_KG.shape[1]
    chosen: list[Tensor] = []
    for group in groups.tolist():
        inside = _largest(heads_KG[group], s.n_heads // s.n_kv_heads)
        chosen.append(group * size + (torch.arange(size) if inside is None else inside))
    within = torch.arange(s.head_dim)
    q = torch.cat(chosen)[:, None] * s.head_dim + within
    return q.reshape(-1), (groups[:, None] * s.head_dim + within).reshape(-1)


def fresh_student(
    source: PathLike, tokenizer: Tokenizer | None, *, seed: int = 42
) -> tuple[Decoder, Network]:
    """A network with random weights of the dimensions of a config.json (or of the folder that holds it).

    Raises NotFoundError without the file, UnsupportedError for what cannot be trained, RefusedError for a vocabulary
    that is smaller than the tokenizer's.
    """
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise NotFoundError(
            "no such config.json",
            path=path,
            hint="a student is made by layers:N, width:hidden=N,... or a config",
        )
    config = read_config(path)
    hparams = from_hf_config(config)
    row = ARCHITECTURES.get(hparams.architecture or "")
    shape = shape_of(hparams, row)
    assert row is not None
    hparams.tied = shape.tied
    if tokenizer is not None and len(tokenizer.tokens) > shape.vocab_rows:
        raise RefusedError(
            f"the tokenizer has {len(tokenizer.tokens)} tokens, the config's vocab_size is {shape.vocab_rows}",
            path=path,
            hint=f"set vocab_size to at least {len(tokenizer.tokens)}",
        )
    decoder = Decoder(shape)
    spread = config.get("initializer_range")
    initialise(decoder, seed, spread if isinstance(spread, float) and spread > 0 else 0.02)
    return decoder, Network(path, None, row, shape, hparams, tokenizer)


def initialise(decoder: Decoder, seed: int, spread: float = 0.02) -> None:
    """Random weights, the same on every device.

    Matrices are normal with deviation `spread`, those that write to the residual stream by sqrt(2 n_layers) smaller
    (Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.3); norms scale by 1.
    """
    s, generator = decoder.shape, torch.Generator().manual_seed(seed)
    for name, tensor in decoder.hf_tensors().items():
        if tensor.ndim > 1:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            deviation = spread / math.sqrt(2 * s.n_layers) if residual else spread
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * deviation)
        else:
            is_norm = name.endswith("norm.weight")
            tensor.fill_(1.0 if is_norm and not s.norm_plus_one else 0.0)
