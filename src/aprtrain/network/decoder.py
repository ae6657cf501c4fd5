"""The decoder of teacher and student: one lean module for every network that a Shape describes.

Projections of the same input are one matrix: Q, K, V in `qkv`, gate and up in `gate_up`. `hf_tensors` gives their
parts under Hugging Face names.

Shape suffixes: N rows of a batch, T positions, D = d_model, H query heads, K key-value heads, E = head_dim,
R = E / 2 frequencies of a rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from aprtrain.kernels.fp8 import linear
from aprtrain.network.attention import AttentionPlan, Documents, attend, choose, places
from aprtrain.network.shape import Shape

Part = tuple[str, int]
"""A Hugging Face name and the rows that it has of a fused tensor."""


def _layer_parts(s: Shape) -> list[tuple[str, int | None, list[Part]]]:
    """(parameter of Block, columns (None for a vector), its parts in order) of one layer."""
    qkv = [(f"self_attn.{x}_proj", rows) for x, rows in zip("qkv", (s.q_rows, s.kv_rows, s.kv_rows), strict=True)]
    gate_up = [("mlp.gate_proj", s.d_ffn), ("mlp.up_proj", s.d_ffn)]
    out, down = [("self_attn.o_proj", s.d_model)], [("mlp.down_proj", s.d_model)]
    before_mlp = "pre_feedforward_layernorm" if s.post_norms else "post_attention_layernorm"
    norms = [("attn_norm", "input_layernorm", s.d_model), ("mlp_norm", before_mlp, s.d_model)]
    if s.qk_norm:
        norms += [(f"{x}_norm", f"self_attn.{x}_norm", s.head_dim) for x in "qk"]
    if s.post_norms:
        norms += [("attn_post_norm", "post_attention_layernorm", s.d_model)]
        norms += [("mlp_post_norm", "post_feedforward_layernorm", s.d_model)]
    linears = [
        ("qkv", s.d_model, qkv, s.qkv_bias),
        ("out", s.q_rows, out, s.o_bias),
        ("gate_up", s.d_model, gate_up, s.mlp_bias),
        ("down", s.d_ffn, down, s.mlp_bias),
    ]
    table: list[tuple[str, int | None, list[Part]]] = []
    for name, cols, parts, biased in linears:
        table.append((name, cols, [(f"{hf}.weight", rows) for hf, rows in parts]))
        if biased:
            table.append((f"{name}_bias", None, [(f"{hf}.bias", rows) for hf, rows in parts]))
    return table + [(name, None, [(f"{hf}.weight", rows)]) for name, hf, rows in norms]


def _all_parts(s: Shape) -> Iterator[tuple[str, int | None, list[Part]]]:
    """The same for the whole network, in its order, with parameter names of Decoder."""
    yield "embed", s.d_model, [("model.embed_tokens.weight", s.vocab_rows)]
    for n in range(s.n_layers):
        for name, cols, parts in _layer_parts(s):
            yield f"blocks.{n}.{name}", cols, [(f"model.layers.{n}.{hf}", rows) for hf, rows in parts]
    yield "norm", None, [("model.norm.weight", s.d_model)]
    if not s.tied:
        yield "head", s.d_model, [("lm_head.weight", s.vocab_rows)]


@cache
def hf_names(shape: Shape) -> Mapping[str, tuple[str, int, tuple[int, ...]]]:
    """Hugging Face name -> (parameter of Decoder, its first row there, shape), in the order of the network."""
    found: dict[str, tuple[str, int, tuple[int, ...]]] = {}
    for parameter, cols, parts in _all_parts(shape):
        first = 0
        for hf, rows in parts:
            found[hf] = parameter, first, (rows,) if cols is None else (rows, cols)
            first += rows
    return found


@cache
def parts_of(shape: Shape) -> Mapping[str, list[tuple[str, int, int]]]:
    """Parameter of Decoder -> (Hugging Face name, first row, rows) of its parts, in the order of rows."""
    found: dict[str, list[tuple[str, int, int]]] = {}
    for hf, (parameter, first, size) in hf_names(shape).items():
        found.setdefault(parameter, []).append((hf, first, size[0]))
    return found


def hf_parts(shape: Shape, parameter: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors that a parameter of Decoder consists of, as views of its values `whole`."""
    for hf, first, rows in parts_of(shape)[parameter]:
        yield hf, whole.narrow(0, first, rows)


def head_name(shape: Shape) -> str:
    """The parameter of Decoder that is the head."""
    return "embed" if shape.tied else "head"


def _empty(cols: int | None, parts: list[Part], dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """NaN until it is loaded, so that a tensor that never was cannot go unseen."""
    rows = sum(rows for _, rows in parts)
    size = (rows,) if cols is None else (rows, cols)
    return nn.Parameter(torch.full(size, float("nan"), dtype=dtype, device=device))


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """c tanh(x / c); `x` itself where the cap is 0."""
    return cap * torch.tanh(x / cap) if cap else x


def _rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    """x / sqrt(mean(x^2) + eps) in float32 (arXiv 1910.07467), times weight or 1 + weight."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if plus_one:
        return (unit * (1.0 + weight.to(wide.dtype))).to(x.dtype)
    return weight * unit.to(x.dtype)


def _tables(rope: tuple[Tensor, float], positions_NT: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [N, T, 1, R] of positions, float32, by the frequencies [R] and the factor of a Rope."""
    inv_freq_R, factor = rope
    angles = positions_NT[..., None, None].float() * inv_freq_R
    return angles.cos() * factor, angles.sin() * factor


def _rotate(x_NTHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each half of a head against the other, in float32, as Hugging Face orders the rows of Q and K."""
    wide = x_NTHE.to(torch.promote_types(x_NTHE.dtype, torch.float32))
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x_NTHE.dtype)


class Block(nn.Module):
    """One layer. Its parameters are those of `_layer_parts`; absent ones are None."""

    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    attn_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor
    k_norm: Tensor
    attn_post_norm: Tensor
    mlp_post_norm: Tensor

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.shape = shape
        # A function that takes the block, and no method of it: a block that owned itself would outlive its run.
        self.function: Callable[..., Tensor] = Block.compute
        for name in ("qkv_bias", "out_bias", "gate_up_bias", "down_bias"):
            self.register_parameter(name, None)
        for name, cols, parts in _layer_parts(shape):
            self.register_parameter(name, _empty(cols, parts, dtype, device))

    def forward(self, *inputs: Any) -> Tensor:
        """See `compute`, which may have been compiled."""
        return self.function(self, *inputs)

    def compute(self, x_NTD: Tensor, turn: tuple[Tensor, Tensor] | None, plan: AttentionPlan) -> Tensor:
        """The layer's output [N, T, D]; `turn` is cosines and sines, None where it does not rotate."""
        s = self.shape
        y = self._norm(x_NTD, self.attn_norm)
        q, k, v = self._heads(y)
        if turn is not None:
            q, k = _rotate(q, *turn), _rotate(k, *turn)
        y = attend(q, k, v, plan, scale=s.attn_scale, softcap=s.attn_softcap)
        y = linear(y.flatten(2), self.out, self.out_bias)
        x_NTD = x_NTD + (self._norm(y, self.attn_post_norm) if s.post_norms else y)
        y = self._mlp(self._norm(x_NTD, self.mlp_norm))
        return x_NTD + (self._norm(y, self.mlp_post_norm) if s.post_norms else y)

    def _heads(self, y_NTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q [N, T, H, E], K and V [N, T, K, E]."""
        s = self.shape
        fused = linear(y_NTD, self.qkv, self.qkv_bias)
        heads = fused.view(*fused.shape[:2], -1, s.head_dim)
        q, k, v = torch.split(heads, [s.n_heads, s.n_kv_heads, s.n_kv_heads], dim=2)
        if s.qk_norm:
            q, k = self._norm(q, self.q_norm), self._norm(k, self.k_norm)
        return q, k, v

    def _mlp(self, y_NTD: Tensor) -> Tensor:
        gate, up = linear(y_NTD, self.gate_up, self.gate_up_bias).chunk(2, dim=-1)
        acted = functional.silu(gate) if self.shape.act == "silu" else functional.gelu(gate, approximate="tanh")
        return linear(acted * up, self.down, self.down_bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return _rms_norm(x, weight, self.shape.norm_eps, self.shape.norm_plus_one)


class Decoder(nn.Module):
    """A whole network up to its final norm; the head is left to who computes the loss.

    Attributes:
        shape: what it is.
        recompute: "none", or "block": blocks keep only their input for the backward pass.
    """

    embed: Tensor
    norm: Tensor
    head: Tensor

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        """A network whose parameters are NaN until their values are written."""
        super().__init__()
        self.shape = shape
        self.recompute = "none"
        self.blocks = nn.ModuleList(Block(shape, dtype, device) for _ in range(shape.n_layers))
        for name, cols, parts in _all_parts(shape):
            if "." not in name:
                self.register_parameter(name, _empty(cols, parts, dtype, device))
        self._on_device: list[tuple[Tensor, float]] = []
        # The product is taken in the network's dtype, by a scale of that dtype.
        self._embed_scale = float(torch.tensor(shape.embed_scale, dtype=dtype))

    @property
    def head_weight(self) -> Tensor:
        """The output head [vocab_rows, D]; the embedding where it is tied."""
        return self.embed if self.shape.tied else self.head

    def head_rows(self, n: int) -> Tensor:
        """The first `n` rows of the head [n, D], of which no gradient is formed."""
        return self.get_parameter(head_name(self.shape))[:n].detach()

    def forward(self, tokens_NT: Tensor, documents: Documents | None = None) -> Tensor:
        """Hidden states [N, T, D] after the final norm.

        Without `documents` every row is one document; with them no token sees another document.
        """
        s = self.shape
        x_NTD = self.look_up(tokens_NT)
        if self._embed_scale != 1.0:
            x_NTD = x_NTD * self._embed_scale
        positions_NT, number_NT = places(tokens_NT, documents)
        turns = [_tables(rope, positions_NT) for rope in self._ropes(tokens_NT.device)]
        plans = {
            window: choose(
                tokens_NT, documents, number_NT,
                window=window, softcap=s.attn_softcap, heads=(s.n_heads, s.n_kv_heads, s.head_dim), dtype=x_NTD.dtype,
            )
            for window in dict.fromkeys(s.windows)
        }  # fmt: skip
        for block, window, rope in zip(self.blocks, s.windows, s.layer_ropes, strict=True):
            x_NTD = self._run(block, x_NTD, turns[rope] if rope >= 0 else None, plans[window])
        return _rms_norm(x_NTD, self.norm, s.norm_eps, s.norm_plus_one)

    def look_up(self, tokens_NT: Tensor) -> Tensor:
        """Rows of the embedding [N, T, D]."""
        return functional.embedding(tokens_NT, self.embed)

    def _ropes(self, device: torch.device) -> list[tuple[Tensor, float]]:
        """(frequencies [R], factor) of each kind, kept on the device: a copy at every call would wait for the GPU."""
        if not self._on_device or self._on_device[0][0].device != device:
            self._on_device = [
                (torch.tensor(rope.inv_freq, dtype=torch.float32, device=device), rope.factor)
                for rope in self.shape.ropes
            ]
        return self._on_device

    def _run(self, block: nn.Module, *inputs: object) -> Tensor:
        """The block's output, for the `inputs` of `Block.compute`."""
        again = self.recompute == "block" and torch.is_grad_enabled()
        out = checkpoint(block, *inputs, use_reentrant=False) if again else block(*inputs)
        assert isinstance(out, Tensor)
        return out

    def logits(self, hidden_NTD: Tensor) -> Tensor:
        """All logits [N, T, vocab_rows] of hidden states, for evaluation of few tokens."""
        return soft_cap(functional.linear(hidden_NTD, self.head_weight), self.shape.logit_softcap)

    def compile_blocks(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compiles every block on its own, by a backend of torch.compile; blocks of one kind share the code.

        What hooks of a block do is not compiled.
        """
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        compiled = torch.compile(Block.compute, fullgraph=True, dynamic=False, backend=backend)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.function = compiled

    def hf_tensors(self) -> dict[str, Tensor]:
        """Views of the parameters under Hugging Face names, in HF row order; writing to them changes the network."""
        return {
            hf: part
            for name in parts_of(self.shape)
            for hf, part in hf_parts(self.shape, name, self.get_parameter(name).detach())
        }
