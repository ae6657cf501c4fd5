"""Weights that a checkpoint holds packed, one row a scheme: which tensors belong together, and what decodes them.

The decoders are pure: they check the pieces against each other and against the settings, and give float32 tile by
tile. Figures are those of the schemes' own definitions; where their kernels differ, the exact product is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aprfmt.codecs import packed_bnb, packed_floats, packed_words
from aprfmt.codecs.packed_pieces import Decoded, Pieces, Settings

Decoder = Callable[[Pieces, Settings], Decoded]


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to pack a weight.

    Attributes:
        id: short name, `fp8`.
        label: for sentences, `FP8`.
        methods: `quant_method` of the configs that use it.
        main: ending of the tensor that tells; what stands before it is the base name.
        dtypes: what that tensor is stored as.
        needs: endings of the other pieces, beside the base name.
        may: endings of pieces that some weights have.
        result: ending of the decoded weight's name.
        decode: checks the pieces and gives the weight.
    """

    id: str
    label: str
    methods: tuple[str, ...]
    main: str
    dtypes: tuple[str, ...]
    needs: tuple[str, ...]
    may: tuple[str, ...]
    result: str
    decode: Decoder


_F8 = ("F8_E4M3", "F8_E5M2")
_FP8_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt")
_CT = ("compressed-tensors",)
_BNB = ("bitsandbytes",)
_STATE = ".weight.quant_state.bitsandbytes__"
_BNB_NEEDS = (".weight", ".weight.absmax", ".weight.quant_map")
_BNB_MAY = (".weight.nested_absmax", ".weight.nested_quant_map")
_QUANTS = (".qzeros", ".scales")

SCHEMES: tuple[Scheme, ...] = (
    Scheme("fp8", "FP8", _FP8_METHODS, "", _F8, ("_scale_inv",), (), "", packed_floats.fp8),
    Scheme("fp8", "FP8", _FP8_METHODS, "", _F8, ("_scale",), (), "", packed_floats.fp8),
    Scheme("gptq", "GPTQ", ("gptq",), ".qweight", ("I32",), _QUANTS, (".g_idx",), ".weight", packed_words.gptq),
    Scheme("awq", "AWQ", ("awq",), ".qweight", ("I32",), _QUANTS, (), ".weight", packed_words.awq),
    Scheme("pack-quantized", "packed integers", _CT, ".weight_packed", ("I32",), (".weight_scale", ".weight_shape"),
           (".weight_zero_point", ".weight_g_idx"), ".weight", packed_words.pack_quantized),
    Scheme("nvfp4", "NVFP4", _CT, ".weight_packed", ("U8",), (".weight_scale", ".weight_global_scale"), (),
           ".weight", packed_floats.nvfp4),
    Scheme("nvfp4", "NVFP4", ("modelopt",), ".weight", ("U8",), (".weight_scale", ".weight_scale_2"), (),
           ".weight", packed_floats.nvfp4),
    Scheme("mxfp4", "MXFP4", _CT, ".weight_packed", ("U8",), (".weight_scale",), (), ".weight",
           packed_floats.mxfp4_matrix),
    Scheme("int8", "INT8", _CT, ".weight", ("I8",), (".weight_scale",), (".weight_zero_point", ".weight_g_idx"),
           ".weight", packed_floats.int8),
    Scheme("mxfp4", "MXFP4", ("mxfp4",), "_blocks", ("U8",), ("_scales",), (), "", packed_floats.mxfp4_experts),
    Scheme("bnb-nf4", "NF4", _BNB, _STATE + "nf4", ("U8",), _BNB_NEEDS, _BNB_MAY, ".weight", packed_bnb.nf4),
    Scheme("bnb-fp4", "FP4", _BNB, _STATE + "fp4", ("U8",), _BNB_NEEDS, _BNB_MAY, ".weight", packed_bnb.fp4),
    Scheme("bnb-int8", "LLM.int8", _BNB, ".weight", ("I8",), (".SCB",), (".weight_format",), ".weight",
           packed_bnb.int8),
)  # fmt: skip

METHODS = tuple(dict.fromkeys(method for scheme in SCHEMES for method in scheme.methods))
"""Every `quant_method` that has a row."""
