"""Unusual configurations, drawn from the fields that a config class of transformers has.

A change is one field, or one group of fields that belong together (heads and their sizes). What a field is given
depends on its name (_BY_NAME), else on its type and on what it has: each boolean the other way, zero, one, odd
numbers, null where the class takes it, lists with all layers of one kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import cached_property
from random import Random
from typing import Any

from arch_models import ArchCase, all_cases, config_arguments, make_config, quiet_transformers

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "relu", "relu2", "swish",
               "tanh", "sigmoid", "leaky_relu", "mish", "laplace", "xielu")  # fmt: skip
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_THETAS = (10000.0, 12345.5, 500000.0, 1000000.0, 100.0)
_SIZES = (32, 40, 48, 60, 64, 72, 80, 96, 100, 128, 144)
_HEADS = (1, 2, 3, 4, 5, 6, 8)
_WIDTHS = (8, 10, 12, 16, 18, 20, 24, 32, 48)
_WORDS = {
    "feed_forward_proj": ("relu", "gelu", "gated-gelu", "gated-silu", "gated-relu", "silu"),
    "position_embedding_type": ("absolute", "rope", "alibi", "nope", "relative_key"),
    "scoring_func": ("softmax", "sigmoid", "sqrtsoftplus"),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "norm_type": ("layer_norm", "rms_norm", "layernorm"),
    "classifier_pooling": ("cls", "mean"),
}
_BY_NAME: tuple[tuple[str, tuple[Any, ...]], ...] = (
    (r"eps(ilon)?$", (1e-12, 1e-6, 1e-5, 1e-3, 0.0137)),
    (r"softcap|clip_qkv|swiglu_limit", (None, 0.0, 0.5, 5.0, 30.0, 50.0)),
    (r"theta$", _THETAS),
    (r"partial_rotary_factor|embedding_fraction|rotary_pct", (0.25, 0.5, 0.75, 1.0)),
    (r"sliding_window$|local_attention|attention_chunk_size", (None, 0, 1, 2, 5, 16, 17, 33, 1000)),
    (r"max_position_embeddings|n_positions|max_seq_len", (64, 100, 300, 512, 777, 2048, 131072)),
    (r"(num|n)_(hidden_|decoder_)?layers?$", (1, 2, 3, 4, 5)),
    (r"head_dim$|^d_kv$|d_head$", _WIDTHS),
    (r"(key_value|kv)_heads$", (None, *_HEADS)),
    (r"heads?$", _HEADS),
    (r"^(hidden_size|d_model|n_embd|dim)$", _SIZES),
    (r"intermediate_size|^d_ff$|^n_inner$|ffn_hidden|^hidden_dim$", (8, 24, 33, 56, 72, 96, 100, 112, 160, 200)),
    (r"lora_rank$|_dim$|_rank$", (None, 4, 8, 12, 16, 20, 24, 32)),
    (r"experts_per_tok|top_?k|^moe_k$", (1, 2, 3, 4)),
    (r"experts?$", (None, 0, 1, 2, 3, 4, 5, 8)),
    (r"n_group$|topk_group$|groups$", (None, 1, 2, 4)),
    (r"max_window_layers|first_k_dense|dense_layers|layer_(offset|period|interval|step)|every_n|_pattern$|shared_layers",
     (0, 1, 2, 3, 4)),
)  # fmt: skip
_INDEXERS = (16, 24, 32, 48)
"""Heads of indexers that add what is positive of their scores: with few heads many positions tie at zero."""
_UNINTERESTING = re.compile(
    r"drop|initializer|init|use_cache|^output_|loss|jitter|_token_(id|index)$|_i[dn]\b|num_logits_to_keep|pretraining_tp|"
    r"image|video|vision|audio|summary|kernels|mambapy|flow_|lsd_|latent_|seed|time_step_(min|max|floor)|scan|exact|"
    r"deterministic|upcast|fp32|parallel_size|cache_dtype|sparse_pred"
)
"""Fields that change no logits of a text: drawn now and then, to see that nothing is made of them."""

_NEVER = re.compile(r"_config$|^vocabulary_map$|^rope_scaling$|^(is|add)_.*(decoder|cross)|quantiz")
"""Other parts of the model, and what makes another class of it."""


def fields_of(config_class: Any) -> dict[str, str]:
    """Name -> annotation of the fields that this class has beside those of all configs."""
    common = {f.name for f in fields(quiet_transformers().PretrainedConfig)}
    own = [f for f in fields(config_class) if f.name not in common and not _NEVER.search(f.name)]
    return {f.name: str(f.type) for f in own}


@dataclass
class Draws:
    """What can be drawn for the variations of one case.

    Attributes:
        case: the known case.
        arguments: what its config class is given.
        vocabulary: tokens of its tokenizer.
    """

    case: ArchCase
    vocabulary: int

    def __post_init__(self) -> None:
        transformers = quiet_transformers()
        self.arguments = config_arguments(self.case, self.vocabulary)
        self.made = getattr(transformers, self.case.config_class)(**deepcopy(self.arguments))
        self.path = next((key for key, value in self.arguments.items() if _is_network(value)), "")
        if self.path:
            self.made = getattr(self.made, self.path)
        inner = self.arguments[self.path] if self.path else self.arguments
        for other, name in type(self.made).attribute_map.items():
            if other in inner and name not in inner:  # one name for one field, since a change names the field
                inner[name] = inner.pop(other)
        self.fields = fields_of(type(self.made))
        self.made_type = getattr(transformers, self.case.config_class).model_type

    @cached_property
    def others(self) -> list[dict[str, Any]]:
        """What the config class is given in all cases of the row."""
        return [
            config_arguments(other, self.vocabulary)
            for other in all_cases()
            if other.row == self.case.row and other.config_class == self.case.config_class
        ]

    @property
    def parameters(self) -> int:
        """Of the known case."""
        return n_parameters(replace(self.case, config=self.arguments, wrapped=True))

    def change(self, rng: Random) -> dict[str, Any]:
        """New values by key; more than one where they belong together."""
        if rng.random() < 0.12 and (found := self._attention(rng)):
            return self._named(found)
        names = list(self.fields)
        weights = [self._weight(name) for name in names]
        for name in rng.choices(names, weights, k=20):
            values = [value for value in self._values(name, rng) if value != self._given(name)]
            if values:
                return self._named({name: rng.choice(values)})
        return {}

    def _named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{self.path}.{name}" if self.path else name: value for name, value in values.items()}

    def _weight(self, name: str) -> float:
        if _UNINTERESTING.search(name):
            return 0.05
        if name == "rope_parameters":
            return 5.0
        return 2.0 if "list" in self.fields[name] or "bool" in self.fields[name] else 1.0

    def _attention(self, rng: Random) -> dict[str, Any]:
        """Heads, and sizes that fit them or are independent of them."""
        heads_key = self._known("num_attention_heads", "num_heads", "n_head", "n_heads")
        hidden_key = self._known("hidden_size", "d_model", "n_embd", "dim")
        if not heads_key or not hidden_key:
            return {}
        heads, width = rng.choice(_HEADS), rng.choice(_WIDTHS)
        found: dict[str, Any] = {heads_key: heads, hidden_key: heads * width}
        if kv_key := self._known("num_key_value_heads", "num_kv_heads", "n_kv_heads"):
            found[kv_key] = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
        if head_key := self._known("head_dim", "d_kv"):
            found[head_key] = width
            found[hidden_key] = rng.choice(_SIZES)
        return found

    def _given(self, name: str) -> Any:
        """The value of a field; None where it differs by layer."""
        try:
            return getattr(self.made, name, None)
        except RuntimeError:  # heads and sizes of Gemma 4, for example
            return None

    def _known(self, *names: str) -> str:
        return next((name for name in names if name in self.fields), "")

    def _values(self, name: str, rng: Random) -> list[Any]:
        value, kind = self._given(name), self.fields[name]
        null = [None] if "None" in kind and rng.random() < 0.3 else []
        if name == "rope_parameters":
            return [self._rope(value, rng)]
        if name in _WORDS:
            return [*_WORDS[name], *null]
        if re.search(r"hidden_act|activation(_function)?$", name) and "str" in kind:
            return [*ACTIVATIONS]
        if name == "index_n_heads" and isinstance(value, int) and value >= _INDEXERS[0]:
            return [*_INDEXERS]
        if name == "vocab_size":
            return [self.vocabulary + more for more in (0, 1, 20, 77)]
        if name.endswith(("_token_id", "_token_index")):
            return [0, 1, 2, *null]
        if isinstance(value, bool) or kind.removesuffix(" | None") in ("bool", "<class 'bool'>"):
            return [True, False, *null]
        if isinstance(value, list | tuple) or "list" in kind:
            return [*self._lists(name, value, rng), *null]
        if "Literal" in kind:
            return [*re.findall(r"'([^']*)'", kind), *null]
        for pattern, values in _BY_NAME:
            if re.search(pattern, name):
                return [*(v for v in values if v is not None or "None" in kind), *null]
        if isinstance(value, int) or (value is None and "int" in kind):
            near = (value - 1, value + 1, 2 * value, value // 2) if isinstance(value, int) else ()
            return [n for n in (0, 1, 2, 3, 5, 7, *near, *null) if n is None or 0 <= n <= 600]
        if isinstance(value, float) or "float" in kind:
            return [0.0, 0.33, 1.0, 1.7, 3.5, *([value * 1.5] if value else []), *null]
        if isinstance(value, str) or "str" in kind:
            return [*self._elsewhere(name), *null]
        if isinstance(value, dict):
            return [self._one_of(value, rng)]
        return null

    def _elsewhere(self, name: str) -> list[Any]:
        """What the other cases of the row give a field."""
        inner = [other.get(self.path, {}) if self.path else other for other in self.others]
        return [other[name] for other in inner if name in other]

    def _one_of(self, value: Mapping[str, Any], rng: Random) -> dict[str, Any]:
        changed = dict(value)
        numbers = [key for key, v in value.items() if isinstance(v, bool | int | float)]
        if numbers:
            key = rng.choice(numbers)
            old = value[key]
            changed[key] = not old if isinstance(old, bool) else rng.choice([0, 1, 2, old * 2, old / 2 + 0.1])
            if isinstance(old, int):
                changed[key] = int(changed[key])
        return changed

    def _lists(self, name: str, value: Sequence[Any] | None, rng: Random) -> list[Any]:
        layers = getattr(self.made, "num_hidden_layers", 2)
        known = [v for v in (value, *self._elsewhere(name)) if isinstance(v, list | tuple)]
        elements = list(dict.fromkeys(repr(x) for v in known for x in v if isinstance(x, str | int | float)))
        kinds: list[Any] = [next(x for v in known for x in v if repr(x) == text) for text in elements]
        value = value if isinstance(value, list | tuple) else None  # some fields are one number or a list of them
        n = len(value) if value else layers
        if kinds and isinstance(kinds[0], str):
            uniform = [[kind] * n for kind in kinds]
            mixed = [[rng.choice(kinds) for _ in range(n)] for _ in range(4)]
            return [*uniform, *mixed, *([[*reversed(value)]] if value else [])]
        if kinds and isinstance(kinds[0], float):
            return [[rng.choice((0.33, 1.0, 1.7, *kinds)) for _ in range(n)] for _ in range(3)]
        if value and len(value) == layers and all(isinstance(x, int) for x in value):
            return [[rng.choice([*kinds, 0, 1]) for _ in range(n)] for _ in range(4)]
        if "int" in self.fields[name]:
            return [[], [0], [layers - 1], [i for i in range(layers) if rng.random() < 0.5]]
        return []

    def _rope(self, value: Any, rng: Random) -> Any:
        if isinstance(value, dict) and value and all(isinstance(v, dict) for v in value.values()):
            chosen = rng.choice(list(value))
            return {key: self._rope(v, rng) if key == chosen else v for key, v in value.items()}
        old = value if isinstance(value, dict) else {}
        kind = rng.choice(ROPE_TYPES)
        found: dict[str, Any] = {"rope_type": kind, "rope_theta": rng.choice((old.get("rope_theta", 1e4), *_THETAS))}
        if "partial_rotary_factor" in old or rng.random() < 0.15:
            usual = old.get("partial_rotary_factor", 0.5)
            found["partial_rotary_factor"] = rng.choice((usual, usual, 0.25, 0.5, 0.75, 1.0))
        found |= {key: old[key] for key in old if key.startswith(("mrope", "llama_4"))}
        if kind != "default":
            found["factor"] = rng.choice((1.0, 2.0, 3.0, 4.0, 5.3, 8.0))
        if kind in ("yarn", "longrope", "llama3"):
            found["original_max_position_embeddings"] = rng.choice((16, 32, 64, 100, 128, 8192))
        return found | {key: v for key, v in self._rope_extras(kind, found, rng).items() if v is not None}

    def _rope_extras(self, kind: str, rope: Mapping[str, Any], rng: Random) -> dict[str, Any]:
        if kind == "llama3":
            return {"low_freq_factor": rng.choice((1.0, 1.1)), "high_freq_factor": rng.choice((4.0, 3.9))}
        if kind == "yarn":
            return {
                "beta_fast": rng.choice((None, None, 32.0, 16.5)),
                "beta_slow": rng.choice((None, None, 1.0, 2.0)),
                "attention_factor": rng.choice((None, None, None, 1.0, 1.3)),
                "mscale": rng.choice((None, None, 1.0, 0.707)),
                "mscale_all_dim": rng.choice((None, None, 1.0, 0.707)),
                "truncate": rng.choice((None, None, None, True, False)),
            }
        if kind == "longrope":
            n = self._rotary(rope) // 2
            return {
                "short_factor": [round(rng.uniform(1, 3), 2) for _ in range(n)],
                "long_factor": [round(rng.uniform(1, 6), 2) for _ in range(n)],
                "attention_factor": rng.choice((None, None, 1.0, 1.3)),
            }
        return {}

    def _rotary(self, rope: Mapping[str, Any]) -> int:
        made = self.made
        head = self._given("qk_rope_head_dim") or self._given("head_dim")
        if not isinstance(head, int):
            head = made.hidden_size // (self._given("num_attention_heads") or 1)
        part = 1.0 if self._given("qk_rope_head_dim") else rope.get("partial_rotary_factor", 1.0)
        return int(head * part)


def _is_network(value: object) -> bool:
    return isinstance(value, Mapping) and not {"num_hidden_layers", "n_layer", "num_layers"}.isdisjoint(value)


def n_parameters(case: ArchCase) -> int:
    """Parameters of the model of a case, which is not made."""
    import torch

    model_class = getattr(quiet_transformers(), case.model_class)
    with torch.device("meta"):
        model = model_class(make_config(case, 0), **case.model_options)
    return sum(parameter.numel() for parameter in model.parameters())


def with_changes(arguments: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a config class with other values; lists by layer get as many entries as there are layers."""
    made = deepcopy(dict(arguments))
    for key, value in changes.items():
        path, _, name = key.rpartition(".")
        inner = made[path] if path else made
        if name in ("num_hidden_layers", "n_layer", "num_layers") and isinstance(inner.get(name), int):
            for other, old in list(inner.items()):
                if isinstance(old, list) and len(old) == inner[name] and _key(path, other) not in changes:
                    inner[other] = [old[i % len(old)] for i in range(value)]
        inner[name] = deepcopy(value)
    return made


def _key(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def draw(draws: Draws, rng: Random, n: int, builds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """`n` changes one upon the other, each of which `builds` accepts; fewer where it accepts too few."""
    changes: dict[str, Any] = {}
    for _ in range(n):
        for _attempt in range(12):
            more = {**changes, **draws.change(rng)}
            if more != changes and builds(with_changes(draws.arguments, more)):
                changes = more
                break
    return changes
