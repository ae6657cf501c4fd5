"""A teacher whose inner layers multiply in e4m3, and the comparison with bf16 that it has to pass.

Shape suffixes: N rows of a batch, T positions, S = N T, D = d_model, V rows of the head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aprfmt.errors import RefusedError
from aprtrain.kernels.fp8 import Fp8Weight, fits, quantize_weight
from aprtrain.network.decoder import Decoder, soft_cap
from aprtrain.network.shape import Shape

MOST_KL = 0.01
"""Nats by which the distributions may differ, mean over positions."""

LEAST_AGREEMENT = 0.98
"""Share of positions that must keep their first choice."""

MATRICES = ("qkv", "out", "gate_up", "down")
_TRIES: tuple[tuple[str, ...], ...] = ((), ("qkv",), ("qkv", "out"), ("qkv", "out", "down"))
"""Which matrices stay bf16, the fastest first. By arithmetic Q, K and V are a fifteenth of a layer, but they can
cause as much of the difference as gate and up, which are more than half."""

_CHUNK = 256
"""Positions whose logits are held at a time."""


@dataclass(frozen=True, slots=True)
class Gate:
    """How a network in e4m3 compares with itself in bf16.

    Attributes:
        kl: KL(bf16 || e4m3) in nats, mean over positions.
        agreement: share of positions with the same first choice.
        tokens: positions compared.
        kept: matrices of every layer that stay bf16; the first and the last layer always do.
    """

    kl: float
    agreement: float
    tokens: int
    kept: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether it may be used. NaN does not pass."""
        return self.kl <= MOST_KL and self.agreement >= LEAST_AGREEMENT


@torch.no_grad()
def convert_to_fp8(decoder: Decoder, sample_NT: Tensor, n_real: int) -> Gate:
    """Turns the inner layers of a loaded network to e4m3, in place; returns how it compares.

    Args:
        decoder: in bf16.
        sample_NT: held-out tokens on its device.
        n_real: ids that count.

    Raises:
        RefusedError: its distributions change too much, or no matrix has a size for it.
    """
    before = decoder(sample_NT).flatten(0, 1)
    blocks = list(enumerate(decoder.blocks))
    weights = {
        name: {
            n: quantize_weight(getattr(block, name))
            for n, block in blocks
            if becomes_fp8(decoder.shape, f"blocks.{n}.{name}", *getattr(block, name).shape)
        }
        for name in MATRICES
    }
    if not any(weights.values()):
        raise RefusedError(
            "no matrix of the teacher can be 8-bit floats: only layers between the first and the last are, and "
            "only matrices whose dims are multiples of 16",
            hint="leave --teacher-residency at bf16",
        )
    bf16 = {name: {n: getattr(decoder.blocks[n], name) for n in found} for name, found in weights.items()}
    for kept in _TRIES:
        for name in MATRICES:
            _put(decoder, name, bf16[name] if name in kept else weights[name])
        gate = compare(decoder, before, decoder(sample_NT).flatten(0, 1), n_real, kept)
        if gate.passed:
            return gate
    raise RefusedError(
        f"the teacher in 8-bit floats differs too much: KL {gate.kl:.4f} nats (at most {MOST_KL}) and the same "
        f"first choice at {gate.agreement:.1%} of {gate.tokens} positions (at least {LEAST_AGREEMENT:.0%})",
        hint="use --teacher-residency bf16 or q4k",
    )


def compare(
    decoder: Decoder, before_SD: Tensor, after_SD: Tensor, n_real: int, kept: tuple[str, ...]
) -> Gate:
    """The Gate of two sets of hidden states under the decoder's head, a chunk of positions at a time."""
    # Logits in bf16 would tie and flip first choices, and add a difference of their own.
    head_VD = decoder.head_weight[:n_real].to(torch.float16 if before_SD.is_cuda else torch.float32)
    cap = decoder.shape.logit_softcap
    kl = torch.zeros((), dtype=torch.float64, device=before_SD.device)
    same = torch.zeros_like(kl)
    for x, y in zip(torch.split(before_SD, _CHUNK), torch.split(after_SD, _CHUNK), strict=True):
        p, q = (soft_cap((h.to(head_VD.dtype) @ head_VD.t()).float(), cap).log_softmax(-1) for h in (x, y))
        kl += (p.exp() * (p - q)).sum(dtype=torch.float64)
        same += (p.argmax(-1) == q.argmax(-1)).sum()
    tokens = len(before_SD)
    return Gate(float(kl) / tokens, float(same) / tokens, tokens, kept)


def becomes_fp8(shape: Shape, parameter: str, rows: int, cols: int) -> bool:
    """Whether a parameter of a Decoder becomes e4m3: matrices that fit, of all layers but the first and the last."""
    _, _, place = parameter.partition("blocks.")
    layer, _, name = place.partition(".")
    return name in MATRICES and 0 < int(layer) < shape.n_layers - 1 and fits(rows, cols)


def _put(decoder: Decoder, name: str, weights: dict[int, Fp8Weight] | dict[int, Tensor]) -> None:
    """An Fp8Weight takes the place of the parameter, as a plain attribute."""
    for n, weight in weights.items():
        block = decoder.blocks[n]
        delattr(block, name)
        setattr(block, name, weight)
