"""LoRA: low-rank adapters beside the frozen matrices of a Decoder (Hu et al., 2021, arXiv 2106.09685).

    y = W x + alpha / r B A x

A [r, in] is initialized at random, B [out, r] with zeros. A fused matrix (Q, K and V; gate and up) has a pair per part,
as in PEFT; the A of all parts are concatenated by rows, and so are the B.

Shape suffixes: N positions, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from aprfmt.errors import UsageError
from aprtrain.lora_spec import TARGETS, LoraSpec
from aprtrain.network.decoder import Block, Decoder
from aprtrain.network.names import hf_parts, parts_of
from aprtrain.network.shape import Shape


def adapted(shape: Shape, spec: LoraSpec) -> list[tuple[str, int, int, int]]:
    """(parameter of Decoder, number of parts, rows, columns) of each matrix that gets an adapter."""
    found = []
    for name, parts in parts_of(shape).items():
        if name.startswith("blocks.") and name.rpartition(".")[2] in TARGETS[spec.targets]:
            found.append((name, len(parts), sum(size[0] for _, _, size in parts), parts[0][2][-1]))
    return found


def lora_params(shape: Shape, spec: LoraSpec) -> int:
    """Number of trained parameters."""
    return sum(spec.rank * (parts * cols + rows) for _, parts, rows, cols in adapted(shape, spec))


def add_lora(decoder: Decoder, spec: LoraSpec, seed: int) -> None:
    """Freezes a decoder and adds adapters, in its dtype and with the same values on every device.

    Raises UsageError if the rank exceeds the smaller dimension of a matrix.
    """
    decoder.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    like = decoder.norm
    for name, parts, rows, cols in adapted(decoder.shape, spec):
        if spec.rank > min(rows, cols):
            most = min(rows, cols)
            raise UsageError(
                f"--lora r={spec.rank} exceeds {most}, the smaller side of {name}", hint=f"--lora r={most} or less"
            )
        a = torch.empty(parts * spec.rank, cols).uniform_(-1, 1, generator=generator) / math.sqrt(cols)
        owner, _, parameter = name.rpartition(".")
        block = decoder.get_submodule(owner)
        assert isinstance(block, Block)
        block.register_parameter(f"{parameter}_lora_a", nn.Parameter(a.to(like)))
        block.register_parameter(f"{parameter}_lora_b", nn.Parameter(torch.zeros(rows, spec.rank).to(like)))
        sizes = tuple(size[0] for _, _, size in parts_of(decoder.shape)[name])
        block.lora = {**block.lora, parameter: (sizes, spec.scale)}
    decoder.lora = spec


def pairs(shape: Shape, spec: LoraSpec, masters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(Hugging Face name of the weight, A [R, I], B [O, R]) of each part, from pairs by parameter name."""
    for name, parts, _, _ in adapted(shape, spec):
        a, b = masters[f"{name}_lora_a"], masters[f"{name}_lora_b"]
        for (hf, first, size), part_a in zip(parts_of(shape)[name], a.chunk(parts), strict=True):
            yield hf, part_a, b.narrow(0, first, size[0])


@torch.no_grad()
def merged(decoder: Decoder, masters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face tensors of the decoder with its adapters merged (in float32), in the network's order.

    `masters` are the float32 pairs by parameter name. Each tensor is valid until the next one.
    """
    spec = decoder.lora
    assert spec is not None
    changes = {hf: (a, b) for hf, a, b in pairs(decoder.shape, spec, masters)}
    for parameter in parts_of(decoder.shape):
        for hf, part in hf_parts(decoder.shape, parameter, decoder.whole(parameter)):
            if hf in changes:
                a, b = (each.to(part.device) for each in changes[hf])
                part = part.float() + spec.scale * (b.float() @ a.float())
            yield hf, part
