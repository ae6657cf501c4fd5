"""Tiny packed weights of every scheme, made bit by bit from its definition, with the values they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from packed_parts import BASE, Array, Packed, halves, named, pack_rows, tensor

from aprfmt.model import Tensor

__all__ = ["BASE", "CASES", "Packed", "named", "tensor"]

F8 = {0x38: 1.0, 0x30: 0.5, 0xB8: -1.0, 0x44: 3.0, 0x7E: 448.0, 0x01: 2.0**-9, 0x80: -0.0, 0xC9: -4.5}
"""Some codes of F8_E4M3 and their values."""


def fp8(kind: str = "block", rows: int = 5, columns: int = 7, seed: int = 0) -> Packed:
    """FP8 with blocks of 2 x 3 that end the matrix early, rows or one scale."""
    rng = np.random.default_rng(seed)
    codes = rng.choice(list(F8), (rows, columns))
    grid = {"block": (-(-rows // 2), -(-columns // 3)), "channel": (rows, 1), "tensor": (1,)}[kind]
    scale = rng.integers(1, 200, grid).astype("<f4") / 32
    values = np.empty((rows, columns), dtype="<f4")
    for r in range(rows):
        for c in range(columns):
            place = {"block": (r // 2, c // 3), "channel": (r, 0), "tensor": (0,)}[kind]
            values[r, c] = np.float32(F8[int(codes[r, c])]) * scale[place]
    ending = "weight_scale_inv" if kind == "block" else "weight_scale"
    settings: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if kind == "block":
        settings["weight_block_size"] = [2, 3]
    tensors = [tensor(f"{BASE}.weight", "F8_E4M3", codes), tensor(f"{BASE}.{ending}", "F32", scale)]
    return Packed(named(tensors), settings, values)


def gptq(
    bits: int = 4, *, desc_act: bool = False, v2: bool = False, g_idx: bool = True, group: int = 32, seed: int = 0
) -> Packed:
    """GPTQ: 64 inputs, 32 outputs."""
    rng = np.random.default_rng(seed)
    n_in, n_out, top = 64, 32, (1 << bits) - 1
    n_groups = -(-n_in // group) if group > 0 else 1
    codes = rng.integers(0, top + 1, (n_in, n_out))
    zeros = rng.integers(0, top + 1, (n_groups, n_out))
    scales = halves(rng, n_groups, n_out)
    order = np.arange(n_in) // (group if group > 0 else n_in)
    if desc_act:
        order = rng.permutation(order)
    values = np.empty((n_out, n_in), dtype="<f4")
    for o in range(n_out):
        for i in range(n_in):
            g = order[i]
            values[o, i] = np.float32(scales[g, o]) * np.float32(int(codes[i, o]) - int(zeros[g, o]))
    stored = zeros if v2 else (zeros - 1) % (top + 1)
    tensors = [
        tensor(f"{BASE}.qweight", "I32", pack_rows(codes.T, bits).T),
        tensor(f"{BASE}.qzeros", "I32", pack_rows(stored, bits)),
        tensor(f"{BASE}.scales", "F16", scales),
    ]
    if g_idx:
        tensors.append(tensor(f"{BASE}.g_idx", "I32", order))
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": desc_act, "sym": False}
    if v2:
        settings["checkpoint_format"] = "gptq_v2"
    return Packed(named(tensors), settings, values, dtype="float16")


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs stands in nibble 0, 1, ... of a word."""


def awq(group: int = 16, n_in: int = 48, seed: int = 0) -> Packed:
    """AWQ: 24 outputs."""
    rng = np.random.default_rng(seed)
    n_out = 24
    n_groups = n_in // group if group > 0 else 1
    codes = rng.integers(0, 16, (n_in, n_out))
    zeros = rng.integers(0, 16, (n_groups, n_out))
    scales = halves(rng, n_groups, n_out)
    values = np.empty((n_out, n_in), dtype="<f4")
    for o in range(n_out):
        for i in range(n_in):
            g = i // group if group > 0 else 0
            values[o, i] = np.float32(scales[g, o]) * np.float32(int(codes[i, o]) - int(zeros[g, o]))

    def packed(rows: Array) -> Array:
        eights = rows.reshape(len(rows), -1, 8)[:, :, list(AWQ_ORDER)]
        return pack_rows(eights.reshape(len(rows), -1), 4)

    tensors = [
        tensor(f"{BASE}.qweight", "I32", packed(codes)),
        tensor(f"{BASE}.qzeros", "I32", packed(zeros)),
        tensor(f"{BASE}.scales", "F16", scales),
    ]
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Packed(named(tensors), settings, values, dtype="float16")


def ct(weights: Mapping[str, Any], stored: str) -> dict[str, Any]:
    """A compressed-tensors config of one group."""
    group = {"targets": ["Linear"], "weights": dict(weights)}
    return {"quant_method": "compressed-tensors", "format": stored, "config_groups": {"group_0": group}}


def pack_quantized(
    bits: int = 4,
    *,
    zero: str = "",
    order: bool = False,
    channel: bool = False,
    seed: int = 0,
    columns: int = 40,
    group: int = 8,
) -> Packed:
    """compressed-tensors: ten rows; zero points "packed", "plain" or none; codes end within a word."""
    rng = np.random.default_rng(seed)
    rows = 10
    group = columns if channel else group
    n_groups = columns // group
    low = -(1 << bits - 1)
    codes = rng.integers(low, -low, (rows, columns))
    zeros = rng.integers(low, -low, (rows, n_groups)) if zero else np.zeros((rows, n_groups), dtype=int)
    scales = rng.integers(1, 127, (rows, n_groups)).astype("<f4") / 128
    place = np.arange(columns) // group
    if order:
        place = rng.permutation(place)
    values = np.empty((rows, columns), dtype="<f4")
    for r in range(rows):
        for c in range(columns):
            values[r, c] = scales[r, place[c]] * np.float32(int(codes[r, c]) - int(zeros[r, place[c]]))
    tensors = [
        tensor(f"{BASE}.weight_packed", "I32", pack_rows(codes - low, bits)),
        tensor(f"{BASE}.weight_scale", "BF16", scales.view("<u4") >> 16),
        tensor(f"{BASE}.weight_shape", "I64", [rows, columns]),
    ]
    if zero == "packed":
        tensors.append(tensor(f"{BASE}.weight_zero_point", "I32", pack_rows((zeros - low).T, bits).T))
    if zero == "plain":
        tensors.append(tensor(f"{BASE}.weight_zero_point", "I8", zeros))
    if order:
        tensors.append(tensor(f"{BASE}.weight_g_idx", "I32", place))
    weights = {"num_bits": bits, "type": "int", "symmetric": not zero, "strategy": "channel" if channel else "group",
               "group_size": None if channel else group}  # fmt: skip
    return Packed(named(tensors), ct(weights, "pack-quantized"), values)


def ct_int8(*, zero: bool = False, seed: int = 0, columns: int = 9) -> Packed:
    """compressed-tensors: signed bytes with a scale a row."""
    rng = np.random.default_rng(seed)
    codes, scales = rng.integers(-128, 128, (6, columns)), rng.integers(1, 99, (6, 1)).astype("<f4") / 64
    zeros = rng.integers(-128, 128, (6, 1)) if zero else np.zeros((6, 1), dtype=int)
    tensors = [tensor(f"{BASE}.weight", "I8", codes), tensor(f"{BASE}.weight_scale", "F32", scales)]
    if zero:
        tensors.append(tensor(f"{BASE}.weight_zero_point", "I8", zeros))
    weights = {"num_bits": 8, "type": "int", "symmetric": not zero, "strategy": "channel"}
    return Packed(named(tensors), ct(weights, "int-quantized"), (codes - zeros).astype("<f4") * scales)


def ct_fp8(seed: int = 0) -> Packed:
    """compressed-tensors: FP8 with a scale a row."""
    made = fp8("channel", seed=seed)
    return Packed(
        made.tensors, ct({"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized"), made.values
    )


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def pairs(codes: Array) -> Array:
    """Two codes a byte, the first in the low half."""
    out: Array = codes[..., 0::2] | codes[..., 1::2] << 4
    return out


def nvfp4(*, modelopt: bool = False, seed: int = 0) -> Packed:
    """NVFP4 of 3 x 48: F8_E4M3 scales for 16 values, one overall."""
    rng = np.random.default_rng(seed)
    codes, scales = rng.integers(0, 16, (3, 48)), rng.choice([0x38, 0x30, 0x44, 0x7E], (3, 3))
    overall = np.float32(0.0078125 if modelopt else 96.0)
    values = np.empty((3, 48), dtype="<f4")
    for r in range(3):
        for c in range(48):
            local = np.float32(F8[int(scales[r, c // 16])])
            values[r, c] = np.float32(FP4[codes[r, c]]) * (local * overall if modelopt else local / overall)
    names = ("weight", "weight_scale", "weight_scale_2") if modelopt else (
        "weight_packed", "weight_scale", "weight_global_scale")  # fmt: skip
    tensors = [
        tensor(f"{BASE}.{names[0]}", "U8", pairs(codes)),
        tensor(f"{BASE}.{names[1]}", "F8_E4M3", scales),
        tensor(f"{BASE}.{names[2]}", "F32", overall if modelopt else [overall]),
        tensor(f"{BASE}.input_scale" if modelopt else f"{BASE}.input_global_scale", "F32", [0.25]),
    ]
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4"} if modelopt else ct(weights, "nvfp4-pack-quantized")
    return Packed(named(tensors), settings, values)


def ct_mxfp4(seed: int = 0) -> Packed:
    """compressed-tensors: MXFP4 of 3 x 64."""
    rng = np.random.default_rng(seed)
    codes, exponents = rng.integers(0, 16, (3, 64)), rng.integers(120, 134, (3, 2))
    values = np.array(FP4, dtype="<f4")[codes] * np.exp2(np.repeat(exponents, 32, axis=1) - 127.0).astype("<f4")
    tensors = [tensor(f"{BASE}.weight_packed", "U8", pairs(codes)), tensor(f"{BASE}.weight_scale", "U8", exponents)]
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    return Packed(named(tensors), ct(weights, "mxfp4-pack-quantized"), values)


def mxfp4(seed: int = 0) -> Packed:
    """gpt-oss: 2 experts, 6 outputs, 64 inputs; decoded [experts, in, out]."""
    rng = np.random.default_rng(seed)
    codes, exponents = rng.integers(0, 16, (2, 6, 64)), rng.integers(120, 134, (2, 6, 2))
    values = np.empty((2, 64, 6), dtype="<f4")
    for e in range(2):
        for o in range(6):
            for i in range(64):
                values[e, i, o] = FP4[codes[e, o, i]] * 2.0 ** (int(exponents[e, o, i // 32]) - 127)
    base = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = [
        tensor(f"{base}_blocks", "U8", pairs(codes).reshape(2, 6, 2, 16)),
        tensor(f"{base}_scales", "U8", exponents),
        tensor(f"{base}_bias", "BF16", np.zeros((2, 6))),
    ]
    return Packed(named(tensors), {"quant_method": "mxfp4"}, values, base)


# From the quantiles of the normal distribution, as the NF4 paper gives them.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
BNB_FP4 = tuple(s * v / 12 for s in (1, -1) for v in (0, 0.0625, 8, 12, 4, 6, 2, 3))


def bnb4(kind: str = "nf4", *, nested: bool = False, rows: int = 5, columns: int = 13, seed: int = 0) -> Packed:
    """bitsandbytes: flat blocks of 8 values over the ends of rows; 5 x 13 leaves half a byte and part of a block."""
    rng = np.random.default_rng(seed)
    n, code = rows * columns, np.array(NF4 if kind == "nf4" else BNB_FP4, dtype="<f4")
    n_blocks = -(-n // 8)
    codes = rng.integers(0, 16, n + n % 2)
    largest = rng.integers(1, 99, n_blocks).astype("<f4") / 32
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 8, "dtype": "bfloat16", "shape": [rows, columns]}
    name = f"{BASE}.weight"
    extra: list[Tensor] = []
    if nested:
        index, table = rng.integers(0, 256, n_blocks), np.linspace(-1, 1, 256).astype("<f4")
        outer, offset = rng.integers(1, 99, -(-n_blocks // 4)).astype("<f4") / 16, 1.625
        largest = np.array([table[index[b]] * outer[b // 4] + np.float32(offset) for b in range(n_blocks)], dtype="<f4")
        state |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": offset}
        extra = [
            tensor(f"{name}.absmax", "U8", index),
            tensor(f"{name}.nested_absmax", "F32", outer),
            tensor(f"{name}.nested_quant_map", "F32", table),
        ]
    values = np.array([code[codes[i]] * largest[i // 8] for i in range(n)], dtype="<f4").reshape(rows, columns)
    tensors = [
        tensor(name, "U8", (codes[0::2] << 4 | codes[1::2]).reshape(-1, 1)),
        *(extra or [tensor(f"{name}.absmax", "F32", largest)]),
        tensor(f"{name}.quant_map", "F32", code),
        tensor(f"{name}.quant_state.bitsandbytes__{kind}", "U8", list(json.dumps(state).encode())),
    ]
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return Packed(named(tensors), settings, values)


def bnb8(seed: int = 0) -> Packed:
    """LLM.int8: rows of signed bytes, 127 being the largest magnitude of the row."""
    rng = np.random.default_rng(seed)
    codes, largest = rng.integers(-127, 128, (4, 6)), rng.integers(1, 99, 4).astype("<f4") / 32
    values = codes.astype("<f4") * largest[:, None] * np.float32(1 / 127)
    tensors = [
        tensor(f"{BASE}.weight", "I8", codes),
        tensor(f"{BASE}.SCB", "F32", largest),
        tensor(f"{BASE}.weight_format", "U8", np.array(0), ()),
    ]
    return Packed(named(tensors), {"quant_method": "bitsandbytes", "load_in_8bit": True}, values, dtype="float16")


def mlx(seed: int = 0) -> Packed:
    """MLX's affine mode, 5 x 64 in groups of 32, with scales that the dtype of the sum holds."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (5, 64))
    scales, biases = rng.choice([0.5, 0.25, -1.0], (5, 2)), rng.choice([-2.0, 0.0, 8.0], (5, 2))
    values = codes * np.repeat(scales, 32, axis=1) + np.repeat(biases, 32, axis=1)
    words = _nibbles(codes)
    tensors = [
        tensor(f"{BASE}.weight", "U32", words),
        tensor(f"{BASE}.scales", "F16", scales.astype("<f2")),
        tensor(f"{BASE}.biases", "F16", biases.astype("<f2")),
    ]
    return Packed(
        named(tensors), {"group_size": 32, "bits": 4, "mode": "affine"}, values.astype("<f4"), dtype="float16"
    )


def mlx_mxfp4(seed: int = 0) -> Packed:
    """MLX's MXFP4 of 3 x 64: exponents for 32 values, and no biases."""
    rng = np.random.default_rng(seed)
    codes, exponents = rng.integers(0, 16, (3, 64)), rng.integers(120, 134, (3, 2))
    values = np.array(FP4, dtype="<f4")[codes] * np.exp2(np.repeat(exponents, 32, axis=1) - 127.0).astype("<f4")
    tensors = [tensor(f"{BASE}.weight", "U32", _nibbles(codes)), tensor(f"{BASE}.scales", "U8", exponents)]
    return Packed(named(tensors), {"group_size": 32, "bits": 4, "mode": "mxfp4"}, values)


def _nibbles(codes: Array) -> Array:
    eights = codes.reshape(*codes.shape[:-1], -1, 8).astype("<u4")
    words: Array = (eights << np.arange(0, 32, 4, dtype="<u4")).sum(axis=-1).astype("<u4")
    return words


def bitnet(*, auto: bool = False, seed: int = 0) -> Packed:
    """BitNet: ternary values plus one, row 0, 3, 6 and 9 of twelve in the two-bit fields of a byte."""
    codes = np.random.default_rng(seed).integers(0, 3, (12, 5))
    octets = sum(codes[3 * part : 3 * part + 3] << 2 * part for part in range(4))
    scale = np.array([4.0], dtype="<f4")
    tensors = [tensor(f"{BASE}.weight", "U8", octets), tensor(f"{BASE}.weight_scale", "F32", scale)]
    settings = {"quant_method": "bitnet", "linear_class": "autobitlinear" if auto else "bitlinear"}
    return Packed(named(tensors), settings, (codes - 1).astype("<f4") * np.float32(4.0 if auto else 0.25))


def auto_round(stored: str, made: Packed) -> Packed:
    """The same under AutoRound's own name."""
    settings = {**made.quantization, "quant_method": "auto-round", "packing_format": f"auto_round:{stored}"}
    return Packed(made.tensors, settings, made.values)


CASES: dict[str, Callable[[], Packed]] = {
    "bitnet": bitnet,
    "bitnet-auto": lambda: bitnet(auto=True),
    "auto-round-gptq": lambda: auto_round("auto_gptq", gptq()),
    "auto-round-awq": lambda: auto_round("auto_awq", awq()),
    "mlx-affine": mlx,
    "mlx-mxfp4": mlx_mxfp4,
    "fp8-block": fp8,
    "fp8-channel": lambda: fp8("channel"),
    "fp8-tensor": lambda: fp8("tensor"),
    "gptq-2": lambda: gptq(2),
    "gptq-3": lambda: gptq(3),
    "gptq-4": gptq,
    "gptq-8": lambda: gptq(8),
    "gptq-3-order": lambda: gptq(3, desc_act=True),
    "gptq-4-order": lambda: gptq(desc_act=True),
    "gptq-v2": lambda: gptq(v2=True),
    "gptq-without-order": lambda: gptq(g_idx=False),
    "gptq-one-group": lambda: gptq(group=-1),
    "awq": awq,
    "awq-one-group": lambda: awq(-1),
    "ct-pack-4": pack_quantized,
    "ct-pack-2": lambda: pack_quantized(2),
    "ct-pack-8": lambda: pack_quantized(8),
    "ct-pack-channel": lambda: pack_quantized(channel=True),
    "ct-pack-zero": lambda: pack_quantized(zero="packed"),
    "ct-pack-8-zero": lambda: pack_quantized(8, zero="packed"),
    "ct-pack-plain-zero": lambda: pack_quantized(zero="plain"),
    "ct-pack-channel-zero": lambda: pack_quantized(zero="packed", channel=True),
    "ct-pack-order": lambda: pack_quantized(order=True),
    "ct-pack-order-zero": lambda: pack_quantized(zero="packed", order=True),
    "ct-int8": ct_int8,
    "ct-int8-zero": lambda: ct_int8(zero=True),
    "ct-fp8": ct_fp8,
    "ct-nvfp4": nvfp4,
    "modelopt-nvfp4": lambda: nvfp4(modelopt=True),
    "ct-mxfp4": ct_mxfp4,
    "mxfp4": mxfp4,
    "bnb-nf4": bnb4,
    "bnb-fp4": lambda: bnb4("fp4"),
    "bnb-nf4-nested": lambda: bnb4(nested=True),
    "bnb-int8": bnb8,
}
"""Every scheme in its variants."""
