"""Adapter folders: adapter_config.json and tensor names.

    PEFT  adapter_config.json {"peft_type": "LORA", "r", "lora_alpha", ...}, adapter_model.safetensors
          base_model.model.MODULE.lora_A.weight [rank, in], .lora_B.weight [out, rank]
          base_model.model.MODULE.lora_embedding_A [rank, vocabulary], .lora_embedding_B [hidden, rank]
          a stack of E matrices: lora_A [E * rank, in], expert by expert; lora_B [out, rank * E], rank by rank
    MLX   adapter_config.json {"lora_parameters": {"rank", "scale", ...}, ...}, adapters.safetensors
          MODULE.lora_a [in, rank], MODULE.lora_b [rank, out]; of a stack [E, rank, in] and [E, out, rank]

What an adapter adds to a weight [out, in] is scale * B A, with A [rank, in] and B [out, rank].
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from aprfmt.errors import CorruptError, RefusedError
from aprfmt.light_dataclass import light_dataclass
from aprfmt.types import PathLike

CONFIG = "adapter_config.json"
PEFT_WEIGHTS, PEFT_PICKLE, MLX_WEIGHTS = "adapter_model.safetensors", "adapter_model.bin", "adapters.safetensors"
PEFT_PREFIX = "base_model.model."

A, B = ".lora_a", ".lora_b"
"""Suffixes of the two factors in a GGUF, an `.apr` and MLX."""

Number = TypeVar("Number", int, float)

Role: TypeAlias = Literal["a", "b", "embedding_a", "embedding_b", "whole"]

_MAX_PATTERNS = 4096
_MAX_PATTERN_CHARS = 1024

# Adapter types by `peft_type`, with their usual names.
_KINDS = {
    "ADALORA": "AdaLoRA", "IA3": "IA3", "LOHA": "LoHa", "LOKR": "LoKr", "OFT": "OFT", "BOFT": "BOFT", "VERA": "VeRA",
    "PREFIX_TUNING": "prefix tuning", "PROMPT_TUNING": "prompt tuning", "P_TUNING": "p-tuning", "POLY": "Poly",
    "MULTITASK_PROMPT_TUNING": "multitask prompt tuning", "ADAPTION_PROMPT": "adaption prompt", "CPT": "CPT",
    "FOURIERFT": "FourierFT", "XLORA": "X-LoRA", "HRA": "HRA", "VBLORA": "VB-LoRA", "LN_TUNING": "LN tuning",
    "BONE": "Bone", "RANDLORA": "RandLoRA", "SHIRA": "SHiRA", "TRAINABLE_TOKENS": "trainable tokens",
}  # fmt: skip

# LoRA variants whose product is not scale * B A, by the config key that enables them.
_VARIANTS = {
    "use_dora": "DoRA", "use_qalora": "QALoRA", "use_bdlora": "BD-LoRA", "velora_config": "VeLoRA",
    "kasa_config": "KaSA", "arrow_config": "Arrow", "monteclora_config": "MonteCLoRA",
    "layer_replication": "replicated layers", "trainable_token_indices": "trainable tokens",
    "megatron_config": "Megatron layers", "lora_bias": "biases of lora_B",
}  # fmt: skip

# Initializations that change the base model; the adapter alone does not contain the change.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")

# Adapter types by a part of their tensor names, for folders without a config.
_NAMES = (
    ("lora_magnitude_vector", "DoRA"), ("hada_", "LoHa"), ("lokr_", "LoKr"), ("ia3_", "IA3"), ("oft_", "OFT"),
    ("boft_", "BOFT"), ("vera_", "VeRA"), ("prompt_embeddings", "prompt tuning"), ("lora_E", "AdaLoRA"),
    ("trainable_tokens", "trainable tokens"),
)  # fmt: skip


@light_dataclass(frozen=True, slots=True)
class LoraConfig:
    """Ranks and scales from adapter_config.json.

    Attributes:
        rank, alpha: of modules that no pattern names.
        rslora: whether the scale is alpha / sqrt(rank) instead of alpha / rank.
        ranks, alphas: regular expression for the end of a module's name -> its own value.
        parameters: name suffixes of parameters without a module of their own (expert stacks), in the order of their
            module.
        scale: of all modules, if the config states it (MLX); None: from alpha.
        base: name or path of the base model.
        body: the whole object.
    """

    rank: int
    alpha: float
    rslora: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    parameters: Sequence[str] = ()
    scale: float | None = None
    base: str | None = None
    body: Mapping[str, object] = field(default_factory=dict)

    def rank_of(self, module: str) -> int:
        """The rank of a module."""
        return _by_pattern(self.ranks, module, self.rank)

    def scale_of(self, module: str, rank: int) -> float:
        """The factor of B A for a module of that rank."""
        if self.scale is not None:
            return self.scale
        alpha = _by_pattern(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _by_pattern(patterns: Mapping[str, Number], module: str, otherwise: Number) -> Number:
    found = (value for pattern, value in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", module))
    return next(found, otherwise)


def read_config(body: Mapping[str, object], path: PathLike) -> LoraConfig:
    """Parses the config. Raises RefusedError for another type than plain LoRA, by its name, CorruptError."""
    if is_mlx(body):
        return _mlx_config(body, path)
    kind = body.get("peft_type", "LORA")
    if kind != "LORA":
        raise other_kind(_KINDS.get(str(kind), repr(kind)), path)
    for key, name in _VARIANTS.items():
        if body.get(key):
            raise other_kind(f"LoRA with {name} ({key})", path)
    begin = body.get("init_lora_weights")
    if isinstance(begin, str) and begin.startswith(_CHANGED_BASE):
        raise RefusedError(
            f"the adapter needs a base model that training initialization changed ({begin})",
            path=path,
            hint="save it again with PEFT's path_initial_model_for_weight_conversion, which makes it a plain LoRA",
        )
    ranks = {key: _rank(value, "rank_pattern", path) for key, value in _patterns(body, "rank_pattern", path).items()}
    alphas = {
        key: _number(value, "alpha_pattern", path) for key, value in _patterns(body, "alpha_pattern", path).items()
    }
    parameters = body.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        raise CorruptError("target_parameters is not a list of names", path=path)
    base = body.get("base_model_name_or_path")
    return LoraConfig(
        rank=_rank(body.get("r"), "r", path), alpha=_number(body.get("lora_alpha"), "lora_alpha", path),
        rslora=body.get("use_rslora") is True, ranks=ranks, alphas=alphas,
        parameters=sorted((str(name) for name in parameters), key=parameter_order),
        base=base if isinstance(base, str) and base else None, body=body,
    )  # fmt: skip


def is_mlx(body: Mapping[str, object]) -> bool:
    """Whether adapter_config.json is one of mlx_lm's."""
    return "peft_type" not in body and ("lora_parameters" in body or "fine_tune_type" in body)


def _mlx_config(body: Mapping[str, object], path: PathLike) -> LoraConfig:
    kind = body.get("fine_tune_type", "lora")
    if kind != "lora":
        name = {"dora": "DoRA", "full": "a full fine-tune"}.get(str(kind), repr(kind))
        raise other_kind(name, path)
    numbers = body.get("lora_parameters")
    if not isinstance(numbers, dict):
        raise CorruptError("the adapter's config lacks lora_parameters", path=path)
    rank, scale = _rank(numbers.get("rank"), "rank", path), _number(numbers.get("scale"), "scale", path)
    base = body.get("model")
    return LoraConfig(rank, scale * rank, scale=scale, base=base if isinstance(base, str) and base else None, body=body)


def other_kind(name: str, path: PathLike, tensor: str | None = None) -> RefusedError:
    """The error for an adapter that is not a plain LoRA."""
    return RefusedError(
        f"the adapter is {name}, but only plain LoRA can be converted",
        path=path,
        tensor=tensor,
        hint="merge it into its base with the program that made it and convert the result; apr import "
        "--allow-unmapped keeps the folder unchanged",
    )


def _patterns(body: Mapping[str, object], key: str, path: PathLike) -> Mapping[str, object]:
    found = body.get(key) or {}
    if not isinstance(found, dict) or len(found) > _MAX_PATTERNS:
        raise CorruptError(f"{key} is not an object of names to numbers", path=path)
    for pattern in found:
        # A pattern is matched against every name: one that a crafted file could make slow is refused.
        nested = re.search(r"[*+}]\)*[*+{]|\)[*+{]", pattern)
        try:
            if nested is not None or len(pattern) > _MAX_PATTERN_CHARS:
                raise re.error("nested repetitions")
            re.compile(pattern)
        except re.error as error:
            raise CorruptError(
                f"{key} has {pattern[:80]!r}, an invalid regular expression: {error}", path=path
            ) from error
    return found


_LARGEST = 1e30
"""Above any real scale of an adapter; times a rank it still fits a float32."""


def _rank(value: object, key: str, path: PathLike) -> int:
    if type(value) is not int or not 0 < value < 1 << 31:
        raise CorruptError(f"{key} of the adapter is {value!r:.40}, not a valid rank", path=path)
    return value


def _number(value: object, key: str, path: PathLike) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST:
        return float(value)
    raise CorruptError(f"{key} of the adapter is {value!r:.40}, not a number", path=path)


# --- names ---


@light_dataclass(frozen=True, slots=True)
class PartName:
    """The role of an adapter tensor: a factor of the update of `weight`, or a replacement of that weight."""

    weight: str
    role: Role
    module: str


_FACTOR = re.compile(
    r"(?P<module>.+?)(?P<nested>(\.base_layer)*)\.lora_(?P<embedding>embedding_)?(?P<which>[AB])(\.default)?(?P<end>\.weight)?"
)


_ORDER = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")


def parameter_order(name: str) -> tuple[str, int, str]:
    """Sort key of parameters: the order in which transformers' modules declare theirs and PEFT wraps them."""
    module, _, last = name.rpartition(".")
    return module, _ORDER.index(last) if last in _ORDER else -1, last


def peft_part(name: str, parameters: Sequence[str]) -> PartName | None:
    """Parses the tensor `name` of a PEFT folder; None if it is not part of a plain LoRA.

    `parameters` are the config's target_parameters in order: of several in one module the first is the innermost.
    """
    inside = name.removeprefix(PEFT_PREFIX)
    found = _FACTOR.fullmatch(inside)
    if found is None:
        if ".lora_" in inside or any(piece in inside for piece, _ in _NAMES):
            return None
        whole = re.sub(r"\.modules_to_save(\.default)?(?=\.)", "", inside)
        return PartName(whole, "whole", whole.rpartition(".")[0])
    module, depth = found["module"], found["nested"].count(".")
    which: Literal["a", "b"] = "a" if found["which"] == "A" else "b"
    if found["embedding"]:
        return PartName(f"{module}.weight", "embedding_a" if which == "a" else "embedding_b", module)
    own = [p.rpartition(".")[2] for p in parameters if f".{module}.".endswith(f".{p.rpartition('.')[0]}.") and "." in p]
    if own and depth < len(own):
        return PartName(f"{module}.{own[len(own) - 1 - depth]}", which, module)
    return PartName(f"{module}.weight", which, module) if depth == 0 else None


def mlx_part(name: str) -> PartName | None:
    """Parses the tensor `name` of an MLX adapter; None if it is not part of a plain LoRA."""
    module, _, last = name.rpartition(".")
    if last in ("lora_a", "lora_b"):
        return PartName(f"{module}.weight", "a" if last == "lora_a" else "b", module)
    return None


def kind_by_names(names: Collection[str]) -> str | None:
    """The type of an adapter that is not a plain LoRA, inferred from tensor names; None if unknown."""
    return next((kind for piece, kind in _NAMES if any(piece in name for name in names)), None)


def weights_of(names: Collection[str]) -> str | None:
    """The weight file of an adapter folder, from its file names; None if it is not one."""
    if CONFIG not in names:
        return None
    return next((name for name in (PEFT_WEIGHTS, MLX_WEIGHTS, PEFT_PICKLE) if name in names), None)


def config_path(folder: Path) -> Path:
    """Path of the adapter's config."""
    return folder / CONFIG
