"""Converters of hyper-parameters, and their scope: what they may look at."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import field
from typing import TypeAlias

from aprfmt.arch.fields import as_float, as_int
from aprfmt.arch.hyperparams import FIELD, Hyperparams
from aprfmt.arch.row import Architecture, Key
from aprfmt.errors import CorruptError, LimitError, RefusedError
from aprfmt.light_dataclass import light_dataclass
from aprfmt.limits import MAX_LAYERS


@light_dataclass(frozen=True, slots=True)
class Scope:
    """A key of a row, where its value is stored, and what a converter may look at.

    Attributes:
        h: the hyper-parameters, filled up to the keys before this one.
        row: the family.
        key: the key with the converter.
        defaults: the meaning of absent config keys for this model type.
        kv: key-value pairs of the GGUF that is read; empty otherwise.
        names: its tensor names; empty if unknown.
    """

    h: Hyperparams
    row: Architecture
    key: Key
    defaults: Mapping[str, object] = field(default_factory=dict)
    kv: Mapping[str, object] = field(default_factory=dict)
    names: Collection[str] = ()

    @property
    def name(self) -> str:
        """The name under which the key's value is stored."""
        return self.key.hf[0] if self.key.hf else self.key.field

    @property
    def value(self) -> object:
        """The hyper-parameters' value of the key."""
        value = getattr(self.h, self.key.field) if self.key.field else None
        return value if value is not None or not self.key.hf else self.h.extra.get(self.key.hf[0])

    def put(self, value: object) -> None:
        """Sets the key's value. A list for a number is kept; the number is the common value of its items, if any.

        Raises CorruptError for anything but a number where one is required, LimitError for too many layers.
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
        """A value of the GGUF by its key without the architecture prefix; None if absent."""
        return self.kv.get(f"{self.row.gguf}.{suffix}")

    def config(self, name: str) -> object:
        """The value of a config.json key of the row, by any of its spellings; None if absent."""
        for key in self.row.keys:
            if name in key.hf:
                value = getattr(self.h, key.field) if key.field else None
                return value if value is not None else self.h.extra.get(key.hf[0])
        return self.h.extra.get(name)

    def size(self, name: str) -> int | None:
        """The same, as a size. Raises CorruptError for anything else."""
        return as_int(self.config(name), name)


def look_up(config: Mapping[str, object], names: tuple[str, ...]) -> tuple[object, bool]:
    """(value, whether it is present) of the first spelling that is not null; "a.b" is b of object a."""
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


# Where a multimodal model's config.json has that of its language model.
_LANGUAGE_PARTS = (
    "text_config", "llm_config", "language_config", "lm_config", "thinker_config.text_config", "lfm", "talker_config"
)  # fmt: skip


def language_part(config: Mapping[str, object]) -> Mapping[str, object]:
    """The language model's own config in that of a multimodal model; empty if missing."""
    found = (look_up(config, (name,))[0] for name in _LANGUAGE_PARTS)
    return next((part for part in found if isinstance(part, Mapping) and part), {})


_NESTED = "transformer_layer_config"


def flattened(config: Mapping[str, object]) -> Mapping[str, object]:
    """A config.json whose layer settings are in an object of their own, as the speculators library writes it."""
    inner = config.get(_NESTED)
    if not isinstance(inner, Mapping):
        return config
    return {**config, **{key: value for key, value in inner.items() if key != "architectures"}}


def check_layers(h: Hyperparams) -> None:
    """Raises LimitError for more layers than lists may be created for."""
    if h.num_layers is not None and h.num_layers > MAX_LAYERS:
        raise LimitError(f"{h.num_layers} layers exceed the limit of {MAX_LAYERS}")


DEFAULT: object = object()
"""Returned by `from_gguf` and `normalize` if the source does not decide: use the row's default."""


class GgufKeys(dict[str, tuple[str, object]]):
    """Several GGUF keys as the result of one converter: {suffix: (kind, value)}."""


class ConfigKeys(dict[str, object]):
    """Several config.json keys as the result of one converter."""


Convert: TypeAlias = Callable[[object, Scope], object]
"""Converts a value to the other side; None for absent."""


def same(value: object, scope: Scope) -> object:
    """The value unchanged."""
    return value


def or_default(value: object, scope: Scope) -> object:
    """The GGUF's value, the default if absent."""
    return DEFAULT if value is None else value


def nothing(value: object, scope: Scope) -> None:
    """No value."""


def default(value: object, scope: Scope) -> object:
    """The row's default."""
    return DEFAULT


@light_dataclass(frozen=True, slots=True)
class Converter:
    """One converter.

    Attributes:
        to_gguf: config value -> value of the GGUF key; None writes none; GgufKeys writes several.
        from_gguf: GGUF value -> config value; None: absent, DEFAULT: the row's default; ConfigKeys sets several.
        derive: computes an absent config key without a default from the others.
        normalize: the stored form of a config.json value: called for every config.json, also with None, when all its
            keys are read and before anything is derived from them. Returns what `from_gguf` may return.
        from_target: the value of a draft model's key from the config.json of its target model, if its own lacks it.
        role: identifies the key to other modules; a constant of arch.row.
    """

    to_gguf: Convert = same
    from_gguf: Convert = or_default
    derive: Callable[[Scope], object] | None = None
    normalize: Convert | None = None
    from_target: Callable[[Mapping[str, object], Scope], object] | None = None
    role: str = ""


def refuse_if(wrong: Callable[[object, Scope], object], sentence: str, *, hint: str | None = None) -> Convert:
    """A `to_gguf` that passes a value through, and raises RefusedError if `wrong` holds for it.

    `sentence` is a format of the key's `{name}` and `{value}`, the GGUF architecture `{gguf}` and the hyper-parameters
    `{h.num_layers}`.
    """

    def to_gguf(value: object, scope: Scope) -> object:
        if wrong(value, scope):
            parts = {"name": scope.name, "value": value, "gguf": scope.row.gguf, "h": scope.h}
            raise RefusedError(sentence.format(**parts), hint=hint)
        return value

    return to_gguf


def implied(expected: Callable[[Scope], object], sentence: str, *, normalize: Convert | None = None) -> Converter:
    """A key without a GGUF counterpart because llama.cpp's network implies its value: any other is refused."""
    wrong = refuse_if(lambda value, scope: value is not None and value != expected(scope), sentence)

    def to_gguf(value: object, scope: Scope) -> None:
        wrong(value, scope)

    return Converter(to_gguf, lambda value, scope: expected(scope), normalize=normalize)


if_given = Converter()
"""Equal values; a GGUF without the key stays without it."""


def converter_of(key: Key) -> Converter:
    """The converter of a key; identity if it has none."""
    return key.converter or if_given


def words(table: Mapping[str, int]) -> Converter:
    """A converter between words of a config.json and GGUF enum values."""
    back = {number: word for word, number in table.items()}

    def to_gguf(value: object, scope: Scope) -> int | None:
        if value is None:
            return None
        if not isinstance(value, str) or value not in table:
            raise RefusedError(f"{scope.name} is {value!r:.40}, which GGUF has no enum value for")
        return table[value]

    def from_gguf(value: object, scope: Scope) -> object:
        if value is None:
            return DEFAULT
        if not isinstance(value, int) or value not in back:
            raise CorruptError(f"{scope.key.gguf} is {value!r:.40}, an unknown enum value")
        return back[value]

    return Converter(to_gguf, from_gguf)
