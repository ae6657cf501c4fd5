"""Token mixers other than attention, within documents: short convolutions.

Shape suffixes: N rows of a batch, T positions, C channels, W taps of a convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from aprtrain.network.attention import AttentionPlan


def causal_conv(x_NTC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, plan: AttentionPlan) -> Tensor:
    """Convolves each channel over the last W positions of the document, in float32; the last tap is of the position."""
    assert plan.positions_NT is not None
    t, taps, places_T, seen = x_NTC.shape[1], weight_CW.shape[1], plan.places_T, x_NTC
    wide, weight_WC = torch.promote_types(x_NTC.dtype, torch.float32), weight_CW.t()
    if plan.cache is not None and places_T is not None:
        seen = plan.cache.extend(places_T, x_NTC)[0]
    y_NTC = x_NTC.to(wide) * weight_WC[-1] + (0 if bias_C is None else bias_C)
    for back in range(1, taps):
        if places_T is None:
            earlier_NTC = functional.pad(seen, (0, 0, back, 0))[:, :t]
        else:
            earlier_NTC = seen[:, (places_T - back).clamp(min=0)]
        tap_NTC = weight_WC[-1 - back] * (plan.positions_NT >= back)[..., None]
        y_NTC = y_NTC + earlier_NTC.to(wide) * tap_NTC
    return y_NTC.to(x_NTC.dtype)
