"""What a config says of packed weights, and the kinds of packing that are refused for what it says."""

from __future__ import annotations

from collections.abc import Mapping

from aprfmt.codecs.packed import METHODS
from aprfmt.codecs.packed_pieces import weight_arguments
from aprfmt.errors import RefusedError

UNPACK_HINT = (
    "unpack it with the tool that packed it and import the result, or keep it packed with --dtype keep"
)
_CONFIG_HINT = "fetch config.json and the weights again, of one revision"

_CT_FORMATS = ("dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision",
               "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized")  # fmt: skip
_MODELOPT_ALGORITHMS = ("FP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION", "FP8_PER_CHANNEL_PER_TOKEN")
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def with_hf_quant(config: Mapping[str, object], hf_quant: Mapping[str, object] | None) -> dict[str, object]:
    """`config` with what hf_quant_config.json, ModelOpt's own file, says where config.json says nothing."""
    merged = dict(config)
    quantization = (hf_quant or {}).get("quantization")
    if isinstance(quantization, dict) and _stored(config) is None:
        producer = (hf_quant or {}).get("producer")
        name = producer.get("name") if isinstance(producer, dict) else None
        merged["quantization_config"] = {"quant_method": str(name or "modelopt").lower()} | quantization
    return merged


def settings_of(config: Mapping[str, object]) -> dict[str, object] | None:
    """The quantization settings of a config, None where it has none. Raises RefusedError for what is not decoded."""
    found = _stored(config)
    if found is None:
        return None
    if not isinstance(found, dict):
        raise RefusedError("quantization_config of config.json is not an object", hint=_CONFIG_HINT)
    method = _method(found)
    if method not in METHODS:
        known = ", ".join(METHODS)
        raise RefusedError(
            f"weights packed by {method} cannot be decoded", hint=f"decoded are: {known}; {UNPACK_HINT}"
        )
    problem = _problem(method, found)
    if problem is not None:
        raise RefusedError(f"{method}: {problem}, which is not decoded", hint=UNPACK_HINT)
    return {**found, "quant_method": method}


def without_packing(config: Mapping[str, object]) -> dict[str, object]:
    """`config` for weights that were decoded: nothing in it says that they are packed."""
    kept = {key: value for key, value in config.items() if key not in _KEYS}
    for key, value in kept.items():
        if isinstance(value, dict) and "quantization_config" in value:
            kept[key] = {k: v for k, v in value.items() if k not in _KEYS}
    return kept


_PARTS = ("text_config", "llm_config", "language_config")
_KEYS = ("quantization_config", "compression_config", "quantization")


def _stored(config: Mapping[str, object]) -> object:
    """The settings, also those of a language model inside a larger one."""
    for holder in (config, *(config.get(part) for part in _PARTS)):
        if isinstance(holder, Mapping):
            for key in _KEYS:
                if holder.get(key):
                    return holder[key]
    return None


def _method(settings: Mapping[str, object]) -> str:
    method = settings.get("quant_method")
    if isinstance(method, str) and method:
        return method.lower().replace("_", "-") if method.lower() != "fbgemm_fp8" else "fbgemm_fp8"
    if "load_in_4bit" in settings or "load_in_8bit" in settings:
        return "bitsandbytes"
    if "config_groups" in settings:
        return "compressed-tensors"
    if "mode" in settings or set(settings) <= {"group_size", "bits"}:
        return "MLX"
    return "a method that config.json does not name"


def _problem(method: str, settings: Mapping[str, object]) -> str | None:
    checks = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "modelopt": _modelopt}
    check = checks.get(method)
    return check(settings) if check is not None else None


def _gptq(settings: Mapping[str, object]) -> str | None:
    stored = settings.get("checkpoint_format", "gptq")
    if stored not in ("gptq", "gptq_v2"):
        return f"checkpoint_format {stored!r}"
    if settings.get("is_marlin_format"):
        return "the layout of the Marlin kernels"
    return (
        f"pack_dtype {settings['pack_dtype']!r}" if settings.get("pack_dtype", "int32") != "int32" else None
    )


def _awq(settings: Mapping[str, object]) -> str | None:
    version = str(settings.get("version", settings.get("checkpoint_format", "gemm"))).lower()
    if version != "gemm":
        return f"version {version!r}"
    return "zero_point false" if settings.get("zero_point") is False else None


def _compressed(settings: Mapping[str, object]) -> str | None:
    groups = settings.get("config_groups")
    entries = (
        [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    )
    for stored in (settings.get("format"), *(group.get("format") for group in entries)):
        if stored is not None and stored not in _CT_FORMATS:
            return f"format {stored!r}"
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        return f"sparsity format {sparsity['format']!r}"
    transform = settings.get("transform_config")
    if isinstance(transform, dict) and transform.get("config_groups"):
        return "a transform of the activations at run time"
    strategies = {weights.get("strategy") for weights in weight_arguments(settings)}
    odd = strategies - {None, "tensor", "channel", "group", "block", "tensor_group"}
    return f"strategy {sorted(map(str, odd))[0]!r}" if odd else None


def _modelopt(settings: Mapping[str, object]) -> str | None:
    algorithm = settings.get("quant_algo")
    if algorithm is not None and algorithm not in _MODELOPT_ALGORITHMS:
        return f"quant_algo {algorithm!r}"
    return None


def natural_dtype(config: Mapping[str, object]) -> str | None:
    """The dtype that the config names for the model's weights."""
    for holder in (config, *(config.get(part) for part in _PARTS)):
        if isinstance(holder, Mapping):
            word = holder.get("dtype") or holder.get("torch_dtype")
            if isinstance(word, str) and word.removeprefix("torch.") in _DTYPES:
                return _DTYPES[word.removeprefix("torch.")]
    return None


def left_alone(settings: Mapping[str, object], module: str) -> bool:
    """Whether the settings name `module`, or one that it lies in, as not packed; patterns are taken literally."""
    for key in (
        "modules_to_not_convert",
        "ignore",
        "ignored_layers",
        "llm_int8_skip_modules",
        "exclude_modules",
    ):
        names = settings.get(key)
        for name in names if isinstance(names, list) else ():
            if isinstance(name, str) and name and f".{name}." in f".{module}.":
                return True
    return False
