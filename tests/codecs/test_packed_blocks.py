"""GGML blocks that hold the codes of quantized checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import packed_models as pm
import pytest
from packed_parts import BASE, Packed, tensor

from aprfmt.canonical.packed import PackedTensor, packed_weights
from aprfmt.codecs import ggml
from aprfmt.codecs.dtypes import DTYPES, n_elements
from aprfmt.errors import RefusedError

CASES: dict[str, tuple[Callable[[], Packed], str | None]] = {
    "gptq": (pm.gptq, "Q4_1"),
    "gptq-2": (lambda: pm.gptq(2), "Q4_1"),
    "gptq-one-group": (lambda: pm.gptq(group=-1), "Q4_1"),
    "gptq-order": (lambda: pm.gptq(desc_act=True), None),
    "gptq-8": (lambda: pm.gptq(8), None),
    "awq-32": (lambda: pm.awq(32, n_in=64), "Q4_1"),
    "awq-16": (lambda: pm.awq(16), None),
    "ct-4-32": (lambda: pm.pack_quantized(columns=64, group=32), "Q4_0"),
    "ct-4-64": (lambda: pm.pack_quantized(columns=128, group=64), "Q4_0"),
    "ct-4-128": (lambda: pm.pack_quantized(columns=256, group=128), "Q4_0"),
    "ct-4-channel": (lambda: pm.pack_quantized(columns=96, channel=True), "Q4_0"),
    "ct-4-zero": (lambda: pm.pack_quantized(zero="packed", columns=64, group=32), "Q4_1"),
    "ct-4-plain-zero": (lambda: pm.pack_quantized(zero="plain", columns=64, group=32), "Q4_1"),
    "ct-8": (lambda: pm.pack_quantized(8, columns=64, group=32), "Q8_0"),
    "ct-8-zero": (lambda: pm.pack_quantized(8, zero="packed", columns=64, group=32), None),
    "ct-4-order": (lambda: pm.pack_quantized(order=True, columns=64, group=32), None),
    "ct-int8": (lambda: pm.ct_int8(columns=64), "Q8_0"),
    "ct-int8-zero": (lambda: pm.ct_int8(zero=True, columns=64), None),
    "ct-int8-narrow": (pm.ct_int8, None),
}


def weight_of(case: Packed) -> PackedTensor:
    (found,) = packed_weights(case.tensors, case.config)
    return found


@pytest.mark.parametrize("name", CASES)
def test_blocks_hold_the_codes(name: str) -> None:
    """All of these scales are numbers of F16, and so is every product of one and a zero point."""
    make, dtype = CASES[name]
    case = make()
    blocks = weight_of(case).decoded.blocks()
    assert (blocks.dtype if blocks else None) == dtype
    if blocks is None:
        return
    assert blocks.change == 0
    n_blocks = n_elements(case.values.shape) // 32
    data = bytes(blocks.between(0, n_blocks))
    np.testing.assert_array_equal(ggml.decode(blocks.dtype, data).reshape(case.values.shape), case.values)
    size = DTYPES[blocks.dtype].block_bytes
    for start, stop in ((0, 1), (1, 3), (2, n_blocks - 1)):
        assert bytes(blocks.between(start, stop)) == data[start * size : stop * size]


def test_a_scale_that_f16_rounds_changes_values_by_no_more_than_said() -> None:
    case = pm.gptq()
    rng = np.random.default_rng(3)
    scales = (rng.random((2, 32)) + 0.01).astype("<f4")
    weight = weight_of(replace(case, tensors=case.changed("scales", tensor(f"{BASE}.scales", "F32", scales))))
    blocks = weight.decoded.blocks()
    assert blocks is not None
    assert 0 < blocks.change < 2**-10
    wanted = weight.decoded.between(0, n_elements(case.values.shape)).reshape(-1, 32)
    found = ggml.decode(blocks.dtype, bytes(blocks.between(0, len(wanted)))).reshape(-1, 32)
    largest = 15 * scales.T.reshape(-1)  # of each group: a row has two
    worst = np.abs(found - wanted).max(axis=1) / largest
    assert 0 < worst.max() <= blocks.change * 1.001


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_scale_that_is_not_finite_is_refused(value: float) -> None:
    case = pm.gptq()
    scales = np.full((2, 32), 0.5, "<f2")
    scales[1, 5] = value
    weight = weight_of(replace(case, tensors=case.changed("scales", tensor(f"{BASE}.scales", "F16", scales))))
    with pytest.raises(RefusedError, match="NaN or infinite"):
        weight.decoded.blocks()


@pytest.mark.parametrize("value", [1e-7, 1e6])
def test_a_scale_far_from_f16_has_no_blocks(value: float) -> None:
    case = pm.gptq()
    scales = np.full((2, 32), value / 3, "<f4")
    weight = weight_of(replace(case, tensors=case.changed("scales", tensor(f"{BASE}.scales", "F32", scales))))
    assert weight.decoded.blocks() is None
