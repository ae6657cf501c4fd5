"""The table of quantization schemes of checkpoints."""

from __future__ import annotations

from functools import partial

from aprfmt.codecs.packed import Scheme
from aprfmt.codecs.packed_bnb import bnb4, llm_int8
from aprfmt.codecs.packed_floats import FLOATS_OF_8_BITS, fp8, int8, mxfp4_experts, mxfp4_matrix, nvfp4
from aprfmt.codecs.packed_ints import awq, bitnet, gptq, pack_quantized
from aprfmt.codecs.packed_mlx import mlx_affine, mlx_floats

_FP8_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt")


_CT = ("compressed-tensors",)


_BNB = ("bitsandbytes",)


_STATE = ".weight.quant_state.bitsandbytes__"


_BNB_NEEDS = (".weight", ".weight.absmax", ".weight.quant_map")


_BNB_MAY = (".weight.nested_absmax", ".weight.nested_quant_map")


_QUANTS = (".qzeros", ".scales")


SCHEMES: tuple[Scheme, ...] = (
    Scheme("fp8", "FP8", _FP8_METHODS, "", FLOATS_OF_8_BITS, ("_scale_inv",), (), "", fp8, by_form=True),
    Scheme("fp8", "FP8", _FP8_METHODS, "", FLOATS_OF_8_BITS, ("_scale",), (), "", fp8, by_form=True),
    Scheme("fp8", "FP8", ("fp8",), ".weight", FLOATS_OF_8_BITS, (".scale",), (), ".weight", fp8, by_form=True),
    Scheme("mxfp4", "MXFP4", ("fp8",), ".weight", ("I8",), (".scale",), (), ".weight", mxfp4_matrix),
    Scheme("gptq", "GPTQ", ("gptq",), ".qweight", ("I32",), _QUANTS, (".g_idx",), ".weight", gptq),
    Scheme("awq", "AWQ", ("awq",), ".qweight", ("I32",), _QUANTS, (), ".weight", awq),
    Scheme("pack-quantized", "packed integers", _CT, ".weight_packed", ("I32",), (".weight_scale", ".weight_shape"),
           (".weight_zero_point", ".weight_g_idx"), ".weight", pack_quantized),
    Scheme("nvfp4", "NVFP4", _CT, ".weight_packed", ("U8",), (".weight_scale", ".weight_global_scale"),
           (".input_global_scale",), ".weight", nvfp4),
    Scheme("nvfp4", "NVFP4", ("modelopt",), ".weight", ("U8",), (".weight_scale", ".weight_scale_2"),
           (".input_scale",), ".weight", nvfp4),
    Scheme("mxfp4", "MXFP4", _CT, ".weight_packed", ("U8",), (".weight_scale",), (), ".weight",
           mxfp4_matrix),
    Scheme("int8", "INT8", _CT, ".weight", ("I8",), (".weight_scale",), (".weight_zero_point", ".weight_g_idx"),
           ".weight", int8),
    Scheme("bitnet", "BitNet", ("bitnet",), ".weight", ("U8",), (".weight_scale",), (), ".weight", bitnet),
    Scheme("mxfp4", "MXFP4", ("mxfp4",), "_blocks", ("U8",), ("_scales",), (), "", mxfp4_experts),
    Scheme("bnb-nf4", "NF4", _BNB, _STATE + "nf4", ("U8",), _BNB_NEEDS, _BNB_MAY, ".weight",
           partial(bnb4, "nf4")),
    Scheme("bnb-fp4", "FP4", _BNB, _STATE + "fp4", ("U8",), _BNB_NEEDS, _BNB_MAY, ".weight",
           partial(bnb4, "fp4")),
    Scheme("mlx-affine", "MLX affine", ("mlx",), ".weight", ("U32",), (".scales", ".biases"), (), ".weight",
           mlx_affine),
    Scheme("mlx-floats", "MLX floats", ("mlx",), ".weight", ("U32",), (".scales",), (".global_scale",), ".weight",
           mlx_floats),
    Scheme("bnb-int8", "LLM.int8", _BNB, ".weight", ("I8",), (".SCB",), (".weight_format",), ".weight", llm_int8),
)  # fmt: skip


METHODS = tuple(dict.fromkeys(method for scheme in SCHEMES for method in scheme.methods))
"""Every `quant_method` with a row."""
