"""Decides whether an optional kernel may be used: if it agrees with torch's own kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aprtrain.features import Verdict, reason_of

Tensors = Callable[[], Sequence[Tensor]]

_TOLERANCE = 0.02

# Device errors, after which no other kernel works either; torch 2.11 may lack the second.
_OURS = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError), MemoryError)


def agree(known: Tensors, other: Tensors) -> Verdict:
    """Whether both yield the same tensors, to 2 % of their norms; if not, the reason: an exception of `other`, or the
    deviation.

    Raises what `known` raises, and device errors: out of memory, a fault that ends its context.
    """
    with torch.inference_mode(False), torch.enable_grad():
        wanted = [value.float() for value in known()]
        try:
            found = [value.float() for value in other()]
        except _OURS:
            raise
        except Exception as error:  # an optional package, perhaps a beta, may raise anything
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
