"""Converters: hyper-parameters whose config.json value and GGUF value are not the same number.

A row's Key names one by `via`. A converter is a pair of small functions and a line in CONVERTERS.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from aprfmt.arch import rope
from aprfmt.arch.fields import as_float, as_int, from_f32, shortest
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.row import Architecture, Key
from aprfmt.errors import CorruptError, RefusedError


@dataclass(frozen=True, slots=True)
class Side:
    """What a converter may look at besides the value.

    Attributes:
        h: the hyper-parameters, filled as far as the keys before this one go.
        row: the family.
        key: the key that names the converter.
        kv: key-value pairs of the GGUF that is read; empty otherwise.
        names: its tensor names; empty where they are unknown.
        defaults: what absent config keys mean for this model type.
    """

    h: Hyperparams
    row: Architecture
    key: Key
    kv: Mapping[str, Any] = field(default_factory=dict)
    names: Collection[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def gguf(self, suffix: str) -> Any:
        """A value of the GGUF by its key after the architecture's prefix; None where it is absent."""
        return self.kv.get(f"{self.row.gguf}.{suffix}")

    def config(self, name: str) -> Any:
        """The value of a config.json key of the row, by any of its spellings; None where it is absent."""
        for key in self.row.keys:
            if name in key.hf and key.field and (value := getattr(self.h, key.field)) is not None:
                return value
            if name in key.hf:
                return self.h.extra.get(key.hf[0])
        return self.h.extra.get(name)


DEFAULT: Any = object()
"""What `from_gguf` gives where the GGUF does not decide: the row's default."""

ToGguf = Callable[[Any, Side], Any]
FromGguf = Callable[[Any, Side], Any]


def same(value: Any, side: Side) -> Any:
    """The value as it is."""
    return value


def given(value: Any, side: Side) -> Any:
    """The value of the GGUF, the default where it has none."""
    return DEFAULT if value is None else value


@dataclass(frozen=True, slots=True)
class Converter:
    """One converter.

    Attributes:
        to_gguf: (config value or None) -> value for the GGUF key; None writes none; a dict
            {suffix: (kind, value)} writes several.
        from_gguf: (GGUF value or None) -> config value; None says that there is none, DEFAULT takes the row's
            default; a dict {config key: value} sets several.
        fill: the value of a config key that is absent and has no default, from the others.
        settle: the value of a config.json as it is held: called for every config.json, also with None, when all keys
            of it are read, before anything is derived from them. Gives back what `from_gguf` may.
    """

    to_gguf: ToGguf = same
    from_gguf: FromGguf = given
    fill: Callable[[Side], Any] | None = None
    settle: Callable[[Any, Side], Any] | None = None


def _rope_to(value: Any, side: Side) -> dict[str, tuple[str, Any]]:
    return rope.to_gguf(side.h, side.row)


def _rope_from(value: Any, side: Side) -> Any:
    rope.from_gguf(side.h, side.row, side.kv, side.defaults)
    return DEFAULT


def _rotary_dim_to(value: Any, side: Side) -> int | None:
    return rope.rotary_dim(side.h)


def _rotary_dim_from(value: Any, side: Side) -> Any:
    rope.set_rotary_dim(side.h, as_int(value, "rope.dimension_count"), side.defaults)
    return DEFAULT


def plain_head_dim(h: Hyperparams) -> int | None:
    """hidden_size / num_heads, what a head has where nothing names its size."""
    return h.hidden_size // h.num_heads if h.hidden_size and h.num_heads else None


def head_dim_is_named(side: Side) -> bool:
    """Whether the size of a head has to be written: the source names it, or it follows from nothing else."""
    h = side.h
    named = h.extra.get("head_dim") or side.defaults.get("head_dim")
    return h.head_dim is not None and bool(named or h.head_dim != plain_head_dim(h))


def _head_dim_settle(value: Any, side: Side) -> Any:
    if side.h.head_dim:
        side.h.extra["head_dim"] = side.h.head_dim
    return DEFAULT


def _head_dim_to(value: Any, side: Side) -> dict[str, tuple[str, Any]] | None:
    if not head_dim_is_named(side):
        return None
    return {f"attention.{name}_length": ("u32", side.h.head_dim) for name in ("key", "value")}


def _head_dim_from(value: Any, side: Side) -> Any:
    side.h.head_dim = as_int(value, "attention.key_length")
    return _head_dim_settle(value, side)


def _switchable(side: Side) -> bool:
    return "use_sliding_window" in side.defaults


def _window_to(value: Any, side: Side) -> int | None:
    window = as_int(value, "sliding_window")
    if side.h.extra.get("use_sliding_window") is False:
        return None
    if _switchable(side) and not side.h.extra.get("use_sliding_window"):
        return None
    return window or None


def _window_from(value: Any, side: Side) -> Any:
    window = as_int(value, "sliding_window") or None
    if _switchable(side):
        return {side.key.hf[0]: window, "use_sliding_window": window is not None}
    return window


_SLIDING = ("sliding_attention", "chunked_attention")


def _is_sliding(kinds: Any) -> list[bool]:
    if not isinstance(kinds, list):
        raise CorruptError("layer_types is no list")
    return [kind in _SLIDING for kind in kinds]


def _layer_types_to(value: Any, side: Side) -> list[bool] | None:
    """Where a GGUF has no key for the layers, the runtime knows one pattern, and no other may go in."""
    if value is None:
        return None
    sliding = _is_sliding(value)
    expected = _layer_types_fill(side)
    if not side.key.gguf and expected is not None and _is_sliding(expected) != sliding:
        raise RefusedError(
            f"layer_types of this {side.row.id} differ from the only ones that a GGUF of it can mean"
        )
    return sliding


def _layer_types_from(value: Any, side: Side) -> Any:
    n_layers = side.h.num_layers or 0
    if value is None:
        filled = _layer_types_fill(side)
        return DEFAULT if filled is None else filled
    if isinstance(value, bool | int):
        return _periodic(value if int(value) > 0 else 1, n_layers)
    return ["sliding_attention" if item else "full_attention" for item in value]


def _layer_types_fill(side: Side) -> list[str] | None:
    """By `sliding_window_pattern`, of a config or of the row's defaults: a period, or letters (L sliding)."""
    pattern = side.h.extra.get("sliding_window_pattern", side.defaults.get("sliding_window_pattern"))
    n_layers = side.h.num_layers
    if n_layers is None or pattern is None:
        return None
    if isinstance(pattern, str) and pattern:
        letters = [pattern[i % len(pattern)] for i in range(n_layers)]
        return ["sliding_attention" if letter == "L" else "full_attention" for letter in letters]
    period = as_int(pattern, "sliding_window_pattern")
    return _periodic(period, n_layers) if period else None


def _periodic(period: int, n_layers: int) -> list[str]:
    """Every `period`-th layer sees everything, the others a window."""
    return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(n_layers)]


_GATING = {"softmax": 1, "sigmoid": 2, "sqrtsoftplus": 4}
_POOLING = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}


def words(table: Mapping[str, int]) -> Converter:
    """A converter between words of a config.json and numbers of a GGUF."""
    back = {number: word for word, number in table.items()}

    def to_gguf(value: Any, side: Side) -> int | None:
        if value is None:
            return None
        if not isinstance(value, str) or value not in table:
            raise RefusedError(f"{side.key.hf[0]} is {value!r:.40}, for which a GGUF has no number")
        return table[value]

    def from_gguf(value: Any, side: Side) -> Any:
        if value is None:
            return DEFAULT
        if not isinstance(value, int) or value not in back:
            raise CorruptError(f"{side.key.gguf} is {value!r:.40}, an unknown number")
        return back[value]

    return Converter(to_gguf, from_gguf)


def yarn_log(scale: float) -> Converter:
    """`mscale_all_dim` of a yarn dict, times `scale`."""

    def to_gguf(value: Any, side: Side) -> float | None:
        scaling = side.h.extra.get("rope_scaling") or {}
        number = as_float(scaling.get("mscale_all_dim"), "mscale_all_dim")
        return scale * number if number else None

    def from_gguf(value: Any, side: Side) -> Any:
        number = from_f32(value, side.key.gguf)
        scaling = side.h.extra.get("rope_scaling")
        if number and isinstance(scaling, dict):
            scaling["mscale_all_dim"] = shortest(number / scale)
            scaling.setdefault("mscale", scaling["mscale_all_dim"])
        return DEFAULT

    return Converter(to_gguf, from_gguf)


def _four_hidden(side: Side) -> int | None:
    return 4 * side.h.hidden_size if side.h.hidden_size else None


CONVERTERS: dict[str, Converter] = {
    "rope": Converter(_rope_to, _rope_from),
    "rotary_dim": Converter(_rotary_dim_to, _rotary_dim_from),
    "head_dim": Converter(_head_dim_to, _head_dim_from, settle=_head_dim_settle),
    "window": Converter(_window_to, _window_from),
    "layer_types": Converter(_layer_types_to, _layer_types_from, _layer_types_fill),
    "gating": words(_GATING),
    "pooling": words(_POOLING),
    "yarn_log": yarn_log(1.0),
    "yarn_log_tenth": yarn_log(0.1),
    "four_hidden": Converter(fill=_four_hidden),
}
"""What a Key's `via` names."""
