"""What a converter is, and what it may look at: the scope of a key."""

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


# Where the config.json of a multimodal model has that of its language model.
_LANGUAGE_PARTS = (
    "text_config", "llm_config", "language_config", "lm_config", "thinker_config.text_config", "lfm", "talker_config"
)  # fmt: skip


def language_part(config: Mapping[str, object]) -> Mapping[str, object]:
    """The language model's own config in that of a multimodal model; empty if missing."""
    found = (look_up(config, (name,))[0] for name in _LANGUAGE_PARTS)
    return next((part for part in found if isinstance(part, Mapping) and part), {})


_NESTED = "transformer_layer_config"


def flattened(config: Mapping[str, object]) -> Mapping[str, object]:
    """A config.json with what it says of its layers in an object of their own, as the speculators library writes it."""
    inner = config.get(_NESTED)
    if not isinstance(inner, Mapping):
        return config
    return {**config, **{key: value for key, value in inner.items() if key != "architectures"}}


def check_layers(h: Hyperparams) -> None:
    """Raises LimitError for more layers than lists may be made for."""
    if h.num_layers is not None and h.num_layers > MAX_LAYERS:
        raise LimitError(f"{h.num_layers} layers exceed the limit of {MAX_LAYERS}")


DEFAULT: object = object()
"""What `from_gguf` and `normalize` give where the source does not decide: the row's default."""


class GgufKeys(dict[str, tuple[str, object]]):
    """Several GGUF keys as the result of one converter: {suffix: (kind, value)}."""


class ConfigKeys(dict[str, object]):
    """Several config.json keys as the result of one converter."""


Convert: TypeAlias = Callable[[object, Scope], object]
"""A value of one side as the other has it; None for a value that is absent."""


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


@light_dataclass(frozen=True, slots=True)
class Converter:
    """One converter.

    Attributes:
        to_gguf: config value -> value for the GGUF key; None writes none; GgufKeys writes several.
        from_gguf: GGUF value -> config value; None says that there is none, DEFAULT takes the row's default;
            ConfigKeys sets several.
        derive: the value of a config key that is absent and has no default, from the others.
        normalize: the value of a config.json as it is held: called for every config.json, also with None, when all keys
            of it are read, before anything is derived from them. Gives what `from_gguf` may give.
        from_target: the value of a key of a draft model, where its own config.json is silent, from the config.json of
            the model that it drafts for.
        role: what other modules recognise the key by; a constant of arch.row.
    """

    to_gguf: Convert = same
    from_gguf: Convert = or_default
    derive: Callable[[Scope], object] | None = None
    normalize: Convert | None = None
    from_target: Callable[[Mapping[str, object], Scope], object] | None = None
    role: str = ""


def refuse_if(wrong: Callable[[object, Scope], object], sentence: str, *, hint: str | None = None) -> Convert:
    """A `to_gguf` that passes a value on, and raises RefusedError where `wrong` is true of it.

    `sentence` is a format of the key's `{name}` and `{value}`, the GGUF architecture `{gguf}` and the
    hyper-parameters `{h.num_layers}`.
    """

    def to_gguf(value: object, scope: Scope) -> object:
        if wrong(value, scope):
            parts = {"name": scope.name, "value": value, "gguf": scope.row.gguf, "h": scope.h}
            raise RefusedError(sentence.format(**parts), hint=hint)
        return value

    return to_gguf


def implied(expected: Callable[[Scope], object], sentence: str, *, normalize: Convert | None = None) -> Converter:
    """A key that no GGUF has, as llama.cpp's network implies its value: any other is refused with the sentence."""
    wrong = refuse_if(lambda value, scope: value is not None and value != expected(scope), sentence)

    def to_gguf(value: object, scope: Scope) -> None:
        wrong(value, scope)

    return Converter(to_gguf, lambda value, scope: expected(scope), normalize=normalize)


if_given = Converter()
"""Equal values; a GGUF without the key stays without it."""


def converter_of(key: Key) -> Converter:
    """The converter of a key; that of equal values where it names none."""
    return key.converter or if_given


def words(table: Mapping[str, int]) -> Converter:
    """A converter between words of a config.json and numbers of a GGUF."""
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
