"""Attention of one new position per row over a cache of keys and values, which reads only what the row sees.

Rows of a batch are padded in front up to the longest prompt; kernels that take a mask read the padding too.

Shape suffixes: N rows, L positions of the cache, H query heads, K key-value heads; values of a head: E of Q and K, V
of V.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("aprtrain::attend_one", mutates_args=())
def attend_one(
    q_N1HE: Tensor, k_NLKE: Tensor, v_NLKV: Tensor, first_N: Tensor, place_1: Tensor, scale: float
) -> Tensor:
    """Attention output [N, 1, H, V] over positions `first_N` to `place_1` of the cache, both included; on CUDA.

    Scores and sums are float32.
    """
    from aprtrain.kernels.decode_triton import launch

    out = q_N1HE.new_empty(*q_N1HE.shape[:3], v_NLKV.shape[-1])
    launch(q_N1HE.contiguous(), k_NLKE, v_NLKV, out, first_N, place_1, scale)
    return out


@attend_one.register_fake
def _(q_N1HE: Tensor, k_NLKE: Tensor, v_NLKV: Tensor, first_N: Tensor, place_1: Tensor, scale: float) -> Tensor:
    return q_N1HE.new_empty(*q_N1HE.shape[:3], v_NLKV.shape[-1])
