"""What keeps an optional kernel from being used, by injected failures; no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from aprtrain.features import Verdict
from aprtrain.kernels.cross_check import agree


def right() -> list[Tensor]:
    return [torch.tensor([3.0, 4.0]), torch.ones(2, 2)]


def raises(error: BaseException) -> Callable[[], Sequence[Tensor]]:
    def run() -> Sequence[Tensor]:
        raise error

    return run


def test_equal_tensors_agree() -> None:
    assert agree(right, right) == Verdict(True)
    assert agree(right, lambda: [1.019 * value for value in right()])


def test_values_beyond_the_tolerance_do_not_agree_and_say_by_how_much() -> None:
    found = agree(right, lambda: [right()[0], 1.03 * right()[1]])
    assert not found
    assert found.reason == "its relative error against torch is 3.00%; the limit is 2%"
    assert not agree(right, lambda: [torch.full((2,), torch.nan), right()[1]])


def test_tensors_of_other_shapes_do_not_agree() -> None:
    assert "shape [2]" in agree(right, lambda: right()[:1]).reason


@pytest.mark.parametrize(
    "error", [ImportError("cannot import name 'gemm_gated'"), RuntimeError("no kernel\n image"), AssertionError("tile")]
)
def test_an_exception_of_the_kernel_is_kept(error: Exception) -> None:
    found = agree(right, raises(error))
    assert not found
    assert found.reason.startswith(f"{type(error).__name__}: {str(error)[:9]}")
    assert "\n" not in found.reason


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), MemoryError(), KeyboardInterrupt(), SystemExit(0)])
def test_errors_that_are_not_the_kernels_end_the_run(error: BaseException) -> None:
    with pytest.raises(type(error)):
        agree(right, raises(error))


def test_an_error_of_torchs_own_kernel_is_raised() -> None:
    with pytest.raises(RuntimeError, match="torch's"):
        agree(raises(RuntimeError("torch's")), right)
