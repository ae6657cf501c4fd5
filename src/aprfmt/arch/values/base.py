"""Converters: hyper-parameters whose config.json value and GGUF value are not the same number.

A row's Key names one by `via`. A converter is a pair of small functions and a line in CONVERTERS.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from aprfmt.arch import rope
from aprfmt.arch.fields import as_float, as_int, as_mapping, from_f32, shorten
from aprfmt.arch.hyperparams import FIELD, Hyperparams
from aprfmt.arch.row import Architecture, Key
from aprfmt.errors import CorruptError, LimitError, RefusedError
from aprfmt.limits import MAX_LAYERS


@dataclass(frozen=True, slots=True)
class Scope:
    """A key of a row, where its value is held, and what a converter may look at besides.

    Attributes:
        h: the hyper-parameters, filled as far as the keys before this one go.
        row: the family.
        key: the key that names the converter.
        defaults: what absent config keys mean for this model type.
        kv: key-value pairs of the GGUF that is read; empty otherwise.
        names: its tensor names; empty where they are unknown.
    """

    h: Hyperparams
    row: Architecture
    key: Key
    defaults: Mapping[str, object] = field(default_factory=dict)
    kv: Mapping[str, object] = field(default_factory=dict)
    names: Collection[str] = ()

    @property
    def name(self) -> str:
        """What the key is called where its value is held."""
        return self.key.hf[0] if self.key.hf else self.key.field

    @property
    def value(self) -> object:
        """What the hyper-parameters hold for the key."""
        value = getattr(self.h, self.key.field) if self.key.field else None
        return value if value is not None or not self.key.hf else self.h.extra.get(self.key.hf[0])

    def put(self, value: object) -> None:
        """Sets the key's value. A list for a number is kept as it is; the number is what all its items are, if any.

        Raises CorruptError for what is not a number and should be one, LimitError for too many layers.
        """
        key, h = self.key, self.h
        name = self.name
        if not key.field:
            if name and (value is not None or look_up(self.defaults, key.hf)[0] is not None):
                h.extra[name] = value
            return
        number = as_float if FIELD[key.field].kind == "f32" else as_int
        if isinstance(value, list):
            items = [number(item, name) for item in value]
            h.extra[name] = items
            value = items[0] if items and items.count(items[0]) == len(items) else None
        setattr(h, key.field, number(value, name))
        check_layers(h)

    def gguf(self, suffix: str) -> object:
        """A value of the GGUF by its key after the architecture's prefix; None where it is absent."""
        return self.kv.get(f"{self.row.gguf}.{suffix}")

    def config(self, name: str) -> object:
        """The value of a config.json key of the row, by any of its spellings; None where it is absent."""
        for key in self.row.keys:
            if name in key.hf:
                value = getattr(self.h, key.field) if key.field else None
                return value if value is not None else self.h.extra.get(key.hf[0])
        return self.h.extra.get(name)

    def size(self, name: str) -> int | None:
        """The same, as a size. Raises CorruptError for what is not one."""
        return as_int(self.config(name), name)


def look_up(config: Mapping[str, object], names: tuple[str, ...]) -> tuple[object, bool]:
    """(value, whether it is there) of the first spelling that is not null; "a.b" is b of object a."""
    found = False
    for name in names:
        here: object = config
        for part in (name,) if name in config else name.split("."):
            if not isinstance(here, Mapping) or part not in here:
                break
            here = here[part]
        else:
            found = True
            if here is not None:
                return here, True
    return None, found


def check_layers(h: Hyperparams) -> None:
    """Raises LimitError for more layers than lists may be made for."""
    if h.num_layers is not None and h.num_layers > MAX_LAYERS:
        raise LimitError(f"{h.num_layers} layers are more than the {MAX_LAYERS} that a network may have")


DEFAULT: object = object()
"""What `from_gguf` and `settle` give where the source does not decide: the row's default."""


class GgufKeys(dict[str, tuple[str, object]]):
    """Several GGUF keys as the result of one converter: {suffix: (kind, value)}."""


class ConfigKeys(dict[str, object]):
    """Several config.json keys as the result of one converter."""


class Convert(Protocol):
    """A value of one side as the other has it; None for a value that is absent."""

    def __call__(self, value: object, scope: Scope, /) -> object:
        """The value of the other side."""


def same(value: object, scope: Scope) -> object:
    """The value as it is."""
    return value


def or_default(value: object, scope: Scope) -> object:
    """The value of the GGUF, the default where it has none."""
    return DEFAULT if value is None else value


def nothing(value: object, scope: Scope) -> None:
    """No value."""


def default(value: object, scope: Scope) -> object:
    """The row's default."""
    return DEFAULT


@dataclass(frozen=True, slots=True)
class Converter:
    """One converter.

    Attributes:
        to_gguf: config value -> value for the GGUF key; None writes none; GgufKeys writes several.
        from_gguf: GGUF value -> config value; None says that there is none, DEFAULT takes the row's default;
            ConfigKeys sets several.
        fill: the value of a config key that is absent and has no default, from the others.
        settle: the value of a config.json as it is held: called for every config.json, also with None, when all keys
            of it are read, before anything is derived from them. Gives what `from_gguf` may give.
    """

    to_gguf: Convert = same
    from_gguf: Convert = or_default
    fill: Callable[[Scope], object] | None = None
    settle: Convert | None = None


def _rope_from(value: object, scope: Scope) -> object:
    rope.from_gguf(scope.h, scope.row, scope.kv, scope.defaults)
    return DEFAULT


def _rotary_dim_from(value: object, scope: Scope) -> object:
    rope.set_rotary_dim(scope.h, as_int(value, "rope.dimension_count"), scope.defaults)
    return DEFAULT


def head_dim_is_named(scope: Scope) -> bool:
    """Whether the size of a head has to be written: the source names it, or it follows from nothing else."""
    h = scope.h
    named = h.extra.get("head_dim") or scope.defaults.get("head_dim")
    return h.head_dim is not None and bool(named or h.head_dim != h.plain_head_dim)


def _head_dim_settle(value: object, scope: Scope) -> object:
    if scope.h.head_dim:
        scope.h.extra["head_dim"] = scope.h.head_dim
    return DEFAULT


def _head_dim_to(value: object, scope: Scope) -> GgufKeys | None:
    if not head_dim_is_named(scope):
        return None
    return GgufKeys({f"attention.{name}_length": ("u32", scope.h.head_dim) for name in ("key", "value")})


def _head_dim_from(value: object, scope: Scope) -> object:
    scope.h.head_dim = as_int(value, "attention.key_length")
    return _head_dim_settle(value, scope)


def _has_switch(scope: Scope) -> bool:
    """Whether the family has a switch beside the window, `use_sliding_window`."""
    return "use_sliding_window" in scope.defaults


def window_to(value: object, scope: Scope) -> int | None:
    """The window, None where the network does not use one."""
    window, used = as_int(value, "sliding_window"), scope.h.extra.get("use_sliding_window")
    return None if used is False or (_has_switch(scope) and not used) else window or None


def _window_from(value: object, scope: Scope) -> object:
    window = as_int(value, "sliding_window") or None
    if _has_switch(scope):
        return ConfigKeys({scope.name: window, "use_sliding_window": window is not None})
    return window


SLIDING, FULL = "sliding_attention", "full_attention"


def kinds_of(slides: list[bool]) -> list[str]:
    """Kinds of layers: those with a window, and those that see everything."""
    return [SLIDING if one else FULL for one in slides]


def _slides(kinds: object) -> list[bool]:
    if not isinstance(kinds, list):
        raise CorruptError("layer_types is not a list")
    return [kind in (SLIDING, "chunked_attention") for kind in kinds]


def layer_types_to(value: object, scope: Scope) -> list[bool] | None:
    """Which layers slide. Where a GGUF has no key for it, the runtime knows one pattern, and others are refused."""
    if value is None:
        return None
    slides = _slides(value)
    expected = layer_types_fill(scope)
    if not scope.key.gguf and expected is not None and _slides(expected) != slides:
        raise RefusedError(
            f"a GGUF of {scope.row.id} always means one pattern of layer_types, and this model has another"
        )
    return slides


def layer_types_from(value: object, scope: Scope) -> object:
    """By a list of flags, or by a period; by the row's pattern where there is neither."""
    if isinstance(value, int):
        return kinds_of(periodic(max(1, int(value)), scope.h.num_layers or 0))
    if isinstance(value, list):
        return kinds_of([bool(item) for item in value])
    filled = layer_types_fill(scope)
    return DEFAULT if filled is None else filled


def layer_types_fill(scope: Scope) -> list[str] | None:
    """By `sliding_window_pattern`, of a config or of the row's defaults: a period, or letters (L sliding)."""
    pattern = scope.h.extra.get("sliding_window_pattern", scope.defaults.get("sliding_window_pattern"))
    n_layers = scope.h.num_layers
    if n_layers is None or pattern is None:
        return None
    if isinstance(pattern, str) and pattern:
        return kinds_of([pattern[i % len(pattern)] == "L" for i in range(n_layers)])
    period = as_int(pattern, "sliding_window_pattern")
    return kinds_of(periodic(period, n_layers)) if period else None


def periodic(period: int, n_layers: int, first: int = 1) -> list[bool]:
    """Which layers have a window: all but every `period`-th, where the first layer is number `first`."""
    return [bool((i + first) % period) for i in range(n_layers)]


def words(table: Mapping[str, int]) -> Converter:
    """A converter between words of a config.json and numbers of a GGUF."""
    back = {number: word for word, number in table.items()}

    def to_gguf(value: object, scope: Scope) -> int | None:
        if value is None:
            return None
        if not isinstance(value, str) or value not in table:
            raise RefusedError(f"{scope.name} is {value!r:.40}, which has no number in a GGUF")
        return table[value]

    def from_gguf(value: object, scope: Scope) -> object:
        if value is None:
            return DEFAULT
        if not isinstance(value, int) or value not in back:
            raise CorruptError(f"{scope.key.gguf} is {value!r:.40}, an unknown number")
        return back[value]

    return Converter(to_gguf, from_gguf)


def yarn_log(scale: float) -> Converter:
    """`mscale_all_dim` of a yarn dict, times `scale`."""

    def to_gguf(value: object, scope: Scope) -> float | None:
        scaling = as_mapping(scope.h.extra.get("rope_scaling"))
        number = as_float(scaling.get("mscale_all_dim"), "mscale_all_dim")
        return scale * number if number else None

    def from_gguf(value: object, scope: Scope) -> object:
        number = from_f32(value, scope.key.gguf)
        scaling = scope.h.extra.get("rope_scaling")
        if number and isinstance(scaling, dict):
            scaling["mscale_all_dim"] = shorten(number / scale)
            scaling.setdefault("mscale", scaling["mscale_all_dim"])
        return DEFAULT

    return Converter(to_gguf, from_gguf)


def unless_named(otherwise: object) -> Converter:
    """The same on both sides; a GGUF without the key means `otherwise`."""
    return Converter(from_gguf=lambda value, scope: otherwise if value is None else value)


def times_hidden(factor: object, scope: Scope) -> int | None:
    """A factor of the hidden size as a width."""
    number, hidden = as_float(factor, scope.name), scope.h.hidden_size
    return None if number is None or hidden is None else int(number * hidden)


def over_hidden(width: int | None, scope: Scope) -> object:
    """A width as a factor of the hidden size, a whole one where it can be."""
    hidden = scope.h.hidden_size
    if not width or not hidden:
        return DEFAULT
    return width // hidden if width % hidden == 0 else width / hidden


WINDOW = Converter(window_to, _window_from)
LAYER_TYPES = Converter(layer_types_to, layer_types_from, layer_types_fill)
YARN_LOG = yarn_log(1.0)

CONVERTERS: dict[str, Converter] = {
    "": Converter(),
    "rope": Converter(lambda value, scope: GgufKeys(rope.to_gguf(scope.h, scope.row)), _rope_from),
    "rotary_dim": Converter(lambda value, scope: rope.rotary_dim(scope.h), _rotary_dim_from),
    "head_dim": Converter(_head_dim_to, _head_dim_from, settle=_head_dim_settle),
    "window": WINDOW,
    "layer_types": LAYER_TYPES,
    "gating": words({"softmax": 1, "sigmoid": 2, "sqrtsoftplus": 4}),
    "pooling": words({"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}),
    "yarn_log": YARN_LOG,
    "yarn_log_tenth": yarn_log(0.1),
    "four_hidden": Converter(fill=lambda scope: times_hidden(4, scope)),
}
