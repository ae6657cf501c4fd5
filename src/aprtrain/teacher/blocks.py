"""Weights that arrive as GGML blocks: decoded on the device while a network loads, or kept as blocks.

Shape suffixes: N rows of a batch, T positions, D = d_model, V rows of the head, R rows and C columns of a matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.errors import RefusedError
from aprtrain.kernels.blocks import BLOCK_TYPES, Blocks, decode, pick_rows, some_rows
from aprtrain.network.attention import AttentionPlan
from aprtrain.network.decoder import Decoder, head_name, hf_parts, parts_of
from aprtrain.network.weights import Network, check_values, fill, stays_blocks, upload_blocks

_CHECKED = 1 << 24
"""Values that are looked at in one go."""


def load_head(network: Network, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The network with its head alone: the other weights take no memory and cannot be used."""
    decoder, name = Decoder(network.shape, dtype, "meta"), head_name(network.shape)
    weight = torch.empty_like(decoder.get_parameter(name), device=device, requires_grad=False)
    fill(network, parts_of(network.shape)[name][0][0], weight)
    decoder.register_parameter(name, nn.Parameter(weight, requires_grad=False))
    return decoder


def _decode_rows(blocks: Blocks) -> Iterator[Tensor]:
    """The matrix in pieces of whole rows, bf16."""
    rows, cols = blocks.shape
    step = max(1, _CHECKED // cols)
    for first in range(0, rows, step):
        piece = some_rows(blocks, first, min(step, rows - first))
        yield decode(piece, torch.empty(piece.shape, dtype=torch.bfloat16, device=blocks.stored_B.device))


class BlocksDecoder(Decoder):
    """A frozen Decoder in bf16 that keeps Q4_K, Q6_K and Q8_0 matrices as blocks.

    The matrices of all layers share one scratch of a layer's size: parameters are views of it, and before a layer
    runs its blocks are decoded into them, on the same stream. So a layer sees the very values of a bf16 network.
    A fused matrix stays blocks only if all its parts can.

    Attributes:
        stored: blocks by parameter, one a part.
        notes: which matrices are bf16 all the time, and why.
    """

    def __init__(self, network: Network, device: torch.device, only: str | None = None) -> None:
        """Loads it, or the parameter `only` alone. Raises RefusedError where no matrix can stay, else as `fill`."""
        super().__init__(network.shape, torch.bfloat16, "meta")
        self.stored: dict[str, tuple[Blocks, ...]] = {}
        self.notes: list[str] = []
        self._targets: dict[nn.Module, list[tuple[Blocks, Tensor]]] = {block: [] for block in self.blocks}
        others: Counter[str] = Counter()
        for parameter, parts in parts_of(network.shape).items():
            if only not in (None, parameter):
                continue
            tensors = [network.tensors[name] for name, _, _ in parts]
            if all(map(stays_blocks, tensors)):
                self.stored[parameter] = tuple(self._upload(network, tensor, device) for tensor in tensors)
                continue
            if len(tensors[0].shape) > 1:
                others[" + ".join(dict.fromkeys(tensor.dtype for tensor in tensors))] += 1
            whole = torch.empty_like(self.get_parameter(parameter), device=device, requires_grad=False)
            for name, target in hf_parts(network.shape, parameter, whole):
                fill(network, name, target)
            self._put(parameter, whole)
        if not self.stored and only is None:
            raise RefusedError(
                f"the teacher has no {', '.join(BLOCK_TYPES)} matrix to keep as blocks",
                path=network.path,
                hint="leave --teacher-residency at bf16, or apr quantize the teacher first",
            )
        self.notes += [f"{n} matrices are {dtype} and become bf16" for dtype, n in others.items()]
        self._share_scratch(device)

    def _upload(self, network: Network, tensor: CanonicalTensor, device: torch.device) -> Blocks:
        blocks = upload_blocks(tensor, device)
        check_values(network, tensor.name, _decode_rows(blocks))
        return blocks

    def _put(self, parameter: str, value: Tensor) -> None:
        owner, _, name = parameter.rpartition(".")
        self.get_submodule(owner).register_parameter(name, nn.Parameter(value, requires_grad=False))

    def _share_scratch(self, device: torch.device) -> None:
        scratch: dict[str, Tensor] = {}
        for parameter, parts in self.stored.items():
            if not parameter.startswith("blocks."):
                continue
            owner, _, name = parameter.rpartition(".")
            if name not in scratch:
                scratch[name] = torch.empty_like(self.get_parameter(parameter), device=device)
            target = scratch[name].detach()
            self._put(parameter, target)
            first = 0
            for part in parts:
                self._targets[self.get_submodule(owner)].append(
                    (part, target.narrow(0, first, part.shape[0]))
                )
                first += part.shape[0]

    @property
    def head_weight(self) -> Tensor:
        """The head [V, D], decoded by every use."""
        return self.head_rows(self.shape.vocab_rows)

    def head_rows(self, n: int) -> Tensor:
        """The first `n` rows of the head [n, D], decoded by every use."""
        parts = self.stored.get(head_name(self.shape))
        if parts is None:
            return super().head_weight[:n].detach()
        blocks = some_rows(parts[0], 0, n)
        return decode(blocks, torch.empty(blocks.shape, dtype=torch.bfloat16, device=blocks.stored_B.device))

    def look_up(self, tokens_NT: Tensor) -> Tensor:
        """Rows of the embedding [N, T, D], decoded one by one where it stays blocks."""
        parts = self.stored.get("embed")
        if parts is None:
            return super().look_up(tokens_NT)
        return pick_rows(parts[0], tokens_NT.reshape(-1)).view(*tokens_NT.shape, -1)

    def _run(
        self, block: nn.Module, x: Tensor, cos: Tensor | None, sin: Tensor | None, plan: AttentionPlan
    ) -> Tensor:
        for blocks, target in self._targets[block]:
            decode(blocks, target)
        return super()._run(block, x, cos, sin, plan)
