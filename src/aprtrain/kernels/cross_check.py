"""Whether an optional kernel may be used: where it gives what torch's own kernel gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aprtrain.features import Verdict, reason_of

Tensors = Callable[[], Sequence[Tensor]]

_TOLERANCE = 0.02

# Errors of the device, after which no other kernel works either; torch 2.11 may lack the second.
_OURS = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError), MemoryError)


def agree(known: Tensors, other: Tensors) -> Verdict:
    """Whether both give the same tensors, to 2 % of their norms; if not, why: an exception of `other`, or how far off.

    Raises what `known` raises, and errors of the device: running out of memory, a fault that ends its context.
    """
    with torch.inference_mode(False), torch.enable_grad():
        wanted = [value.float() for value in known()]
        try:
            found = [value.float() for value in other()]
        except _OURS:
            raise
        except Exception as error:  # a package that is optional, perhaps a beta, may raise anything
            return Verdict(False, reason_of(error))
        if [value.shape for value in found] != [value.shape for value in wanted]:
            return Verdict(False, f"its outputs have shape {_shapes(found)}, torch's {_shapes(wanted)}")
        errors = [float((a - b).norm() / a.norm().clamp(min=1e-30)) for a, b in zip(wanted, found, strict=True)]
    worst = next((error for error in errors if not error <= _TOLERANCE), None)  # NaN is not at most anything
    if worst is not None:
        return Verdict(False, f"its relative error against torch is {worst:.2%}; the limit is {_TOLERANCE:.0%}")
    return Verdict(True)


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in tensors)
