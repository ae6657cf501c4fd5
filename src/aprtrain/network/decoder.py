"""The decoder of teacher and student: one module for every network that a Shape describes.

Projections of the same input are fused into one matrix: Q, K, V in `qkv`, gate and up in `gate_up`. `hf_tensors` gives
views of their parts by Hugging Face name.

Shape suffixes: N rows of a batch, T positions, S = N T, D = d_model, H query heads, K key-value heads, E = head_dim,
R frequencies of a rotation; with experts, E all of them, U those that a token uses.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from aprtrain.features import current, label_of, reason_of
from aprtrain.kernels.fp8 import gated_linear, linear
from aprtrain.kernels.gated import add_product, feed_forward, gated_product, products_agree, silu_gated
from aprtrain.lora_spec import LoraSpec
from aprtrain.network.attention import LABELS, AttentionPlan, Documents, attend, choose, places
from aprtrain.network.experts import Experts, choose_experts
from aprtrain.network.layout import FLOAT32, WEIGHTS, Layout
from aprtrain.network.names import head_name, hf_parts, parts_of
from aprtrain.network.recurrence import DeltaNet, causal_conv, delta_rule
from aprtrain.network.rotation import CosSin, cos_sin_of, inverse_frequencies, rotate
from aprtrain.network.shape import NO_ATTENTION, Latent, Shape


def _register(owner: nn.Module, layout: Layout, dtype: torch.dtype, device: torch.device | str) -> None:
    """Registers the parameters of `layout`, filled with NaN so that a missing tensor shows up."""
    for name, parts in layout:
        size = sum(part.rows for part in parts), *parts[0].size[1:][-1:]
        kept = torch.float32 if name in FLOAT32 else dtype
        owner.register_parameter(name, nn.Parameter(torch.full(size, math.nan, dtype=kept, device=device)))


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """c tanh(x / c); `x` itself if the cap is 0."""
    return cap * torch.tanh(x / cap) if cap else x


def _unit(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps), in float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, s: Shape) -> Tensor:
    """RMSNorm (arXiv 1910.07467) or LayerNorm in float32, times the weight."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    unit = _unit(wide - wide.mean(-1, keepdim=True) if s.norm_centred else wide, eps)
    if not s.norm_plus_one and not s.norm_centred:
        return weight * unit.to(x.dtype)
    scaled = unit * (weight.to(wide.dtype) + float(s.norm_plus_one))
    return (scaled if bias is None else scaled + bias.to(wide.dtype)).to(x.dtype)


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * scale


BlockOutput = Tensor | tuple[Tensor, Tensor, Tensor]
"""The output of a layer [N, T, D]; with its keys and values [N, T, K, E] if later layers use them."""


class Block(nn.Module):
    """One layer. Its parameters are those of its layout, those that it does not have are None.

    Matrices of experts lie one below the other.
    """

    def __init__(self, shape: Shape, layer: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.shape = shape
        self.heads = shape.layer_heads[layer]
        self.gives_kv = layer in shape.kv_layers[layer + 1 :]
        # A plain function that takes the block: a bound method would be a reference cycle, and outlive the run.
        self.function: Callable[..., BlockOutput] = Block.compute
        self.fuses = False
        self.balance = 0.0
        self.ratings: Tensor | None = None
        self.lora: dict[str, tuple[tuple[int, ...], float]] = {}  # matrix -> rows of its parts, scale
        for name in WEIGHTS:
            self.register_parameter(name, None)
            self.register_parameter(f"{name}_bias", None)
        _register(self, shape.kinds[shape.layer_kinds[layer]], dtype, device)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def can_fuse(self) -> bool:
        """Whether a fused kernel can compute silu(gate) * up within the product; compiles and tests it."""
        weight, s = self.gate_up, self.shape
        if self.lora or not isinstance(weight, Tensor) or not weight.is_cuda or not s.gated or s.act != "silu":
            return False
        has_bias = self.gate_up_bias is not None or self.down_bias is not None
        fits = not has_bias and len(weight) % 16 == 0 and weight.shape[1] % 8 == 0
        return fits and current().check("quack", products_agree(learns=weight.requires_grad))

    def forward(self, *inputs: object) -> BlockOutput:
        """Runs `compute`, possibly compiled."""
        return self.function(self, *inputs)

    def compute(
        self,
        x_NTD: Tensor,
        cos_sin: CosSin | None,
        plan: AttentionPlan,
        per_layer_NTP: Tensor | None = None,
        kv: tuple[Tensor, Tensor] | None = None,
    ) -> BlockOutput:
        """Computes the layer.

        Args:
            x_NTD: its input.
            cos_sin: None for a layer without RoPE.
            plan: its attention kernel.
            per_layer_NTP: per-layer embeddings of the tokens, for a network that has them.
            kv: the keys and values of an earlier layer, if it uses those.
        """
        s = self.shape
        y = self._normed(x_NTD, "attn_norm")
        if self.conv is None:
            mixed, kv = self._attended(y, cos_sin, plan, kv)
        else:
            mixed = self._convolved(y, plan) if s.delta is None else self._recurrent(y, plan, s.delta)
        mixed = self._linear(mixed, "out")
        if self.mlp_norm is None and self.mlp_post_norm is None:
            return x_NTD + mixed + self._mlp(y)
        x_NTD = x_NTD + _scaled(self._normed(mixed, "attn_post_norm"), s.residual_scale)
        y = self._normed(x_NTD, "mlp_norm")
        if self._adds(y):
            add_product(x_NTD, gated_product(y, self.gate_up), self.down)
            return x_NTD
        y = self._mlp(y) if self.experts_norm is None else self._two_mlps(x_NTD, y)
        x_NTD = x_NTD + _scaled(self._normed(y, "mlp_post_norm"), s.residual_scale)
        if per_layer_NTP is not None:
            gated = self._act(self._linear(x_NTD, "ple_gate")) * per_layer_NTP
            x_NTD = x_NTD + self._normed(self._linear(gated, "ple_out"), "ple_norm")
        x_NTD = x_NTD if self.layer_scale is None else x_NTD * self.layer_scale
        return (x_NTD, *kv) if self.gives_kv and kv is not None else x_NTD

    def _adds(self, y: Tensor) -> bool:
        """Whether the last product may add to the residual stream in place."""
        is_last = self.mlp_post_norm is None and self.shape.residual_scale == 1.0
        fits = self.fuses and y.dtype == torch.bfloat16 and isinstance(self.down, Tensor)
        return fits and is_last and not torch.is_grad_enabled()

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = linear(x, getattr(self, name), getattr(self, f"{name}_bias"))
        if name not in self.lora:
            return y
        sizes, scale = self.lora[name]
        few = functional.linear(x, getattr(self, f"{name}_lora_a")).chunk(len(sizes), -1)
        parts = getattr(self, f"{name}_lora_b").split(sizes)
        return y + scale * torch.cat([functional.linear(h, b) for h, b in zip(few, parts, strict=True)], -1)

    def _normed(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        """Normalizes `x` per head, or all heads at once if the weight is that long; returns `x` without such a norm."""
        weight, s = getattr(self, name), self.shape
        if weight is None:
            return x
        if weight.shape[-1] != x.shape[-1]:
            return self._normed(x.flatten(2), name, eps).view_as(x)
        return _norm(x, weight, getattr(self, f"{name}_bias"), s.norm_eps if eps is None else eps, s)

    def _convolved(self, y_NTD: Tensor, plan: AttentionPlan) -> Tensor:
        """The gated short convolution of LFM2."""
        before, after, x = self._linear(y_NTD, "conv_in").chunk(3, dim=-1)
        return after * causal_conv(before * x, self.conv, self.conv_bias, plan)

    def _recurrent(self, y_NTD: Tensor, plan: AttentionPlan, at: DeltaNet) -> Tensor:
        """A gated delta network: the delta rule of convolved heads, normalized and gated."""
        qkv, z, beta, a = at.split(self._linear(y_NTD, "qkv"))
        wide = torch.promote_types(y_NTD.dtype, torch.float32)
        qkv = functional.silu(causal_conv(qkv, self.conv, self.conv_bias, plan)).to(wide)
        q, k, v = torch.split(qkv, [*[at.k_heads * at.k_dim] * 2, at.v_heads * at.v_dim], -1)
        # Unit vectors, queries scaled by 1 / sqrt(k_dim): x / |x| is x / rms(x) / sqrt(k_dim).
        q, k = (_unit(x.view(*x.shape[:2], at.k_heads, -1), 1e-6 / at.k_dim) for x in (q, k))
        q, k = (x.repeat_interleave(at.v_heads // at.k_heads, 2) for x in (q / at.k_dim, k * at.k_dim**-0.5))
        v = v.view(*v.shape[:2], at.v_heads, -1)
        decay = -self.decay.to(wide).exp() * functional.softplus(a.to(wide) + self.dt_bias)
        mixed = delta_rule(q, k, v, decay, beta.sigmoid().to(wide), plan)
        unit: Tensor = _unit(mixed, self.shape.norm_eps).to(y_NTD.dtype)
        scaled: Tensor = self.delta_norm * unit
        return scaled.flatten(2) * functional.silu(z)

    def _attended(
        self, y_NTD: Tensor, cos_sin: CosSin | None, plan: AttentionPlan, kv: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The heads' outputs [N, T, H E], and the keys and values that they used."""
        s, gate = self.shape, None
        if s.latent is not None:
            q, k, v = self._latent_heads(y_NTD, cos_sin, s.latent)
        else:
            q, k, v, gate = self._heads(y_NTD, cos_sin, kv)
        mixed = attend(q, k, v, plan, scale=s.attn_scale, softcap=s.attn_softcap, sinks=self.sinks)
        return (mixed if gate is None else mixed * torch.sigmoid(gate)).flatten(2), (k, v)

    def _heads(
        self, y_NTD: Tensor, cos_sin: CosSin | None, kv: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Q [N, T, H, E], K and V [N, T, K, E], which are `kv` if that is given; the gate of each head of Q."""
        h, fused, gate = self.heads, self._linear(y_NTD, "qkv"), None
        heads = fused.view(*fused.shape[:2], -1, h.size)
        n = h.n * (1 + self.shape.attn_gated)
        q, *own = torch.split(heads, [n, *[h.n_kv] * ((heads.shape[2] - n) // h.n_kv)], dim=2)
        if self.shape.attn_gated:
            q, gate = q.view(*q.shape[:2], h.n, 2, h.size).unbind(3)
        q = self._placed(q, "q_norm", cos_sin)
        if cos_sin is not None and cos_sin[2] is not None:
            q = q * cos_sin[2].to(q.dtype)
        if kv is not None:
            return q, *kv, gate
        v = own[-1]  # without a projection of their own, values are the keys
        return (
            q,
            self._placed(own[0], "k_norm", cos_sin),
            _unit(v, self.shape.norm_eps).to(v.dtype) if self.shape.value_norm else v,
            gate,
        )

    def _placed(self, x: Tensor, norm: str, cos_sin: CosSin | None) -> Tensor:
        """Normalizes and rotates heads of Q or K."""
        late = self.shape.qk_norm_after_rope
        x = x if late else self._normed(x, norm)
        x = x if cos_sin is None else rotate(x, cos_sin, self.shape.adjacent)
        return self._normed(x, norm) if late else x

    def _latent_heads(self, y_NTD: Tensor, cos_sin: CosSin | None, at: Latent) -> tuple[Tensor, Tensor, Tensor]:
        """Q and K [N, T, H, E], V [N, T, H, values of a head]."""
        assert cos_sin is not None
        s, few = self.shape, y_NTD
        if self.q_a is not None:
            few = self._normed(self._linear(y_NTD, "q_a"), "q_a_norm", at.eps)
        q_heads = self._linear(few, "q_b").view(*y_NTD.shape[:2], s.n_heads, -1)
        q_nope, q_rope = torch.split(q_heads, [at.nope_dim, at.rope_dim], -1)
        few, k_rope = torch.split(self._linear(y_NTD, "kv_a"), [at.rank, at.rope_dim], -1)
        kv_heads = self._linear(self._normed(few, "kv_a_norm", at.eps), "kv_b").view(*y_NTD.shape[:2], s.n_heads, -1)
        k_nope, v = torch.split(kv_heads, [at.nope_dim, at.values], -1)
        k_rope = rotate(k_rope[:, :, None], cos_sin, s.adjacent).expand(*k_nope.shape[:-1], -1)
        q = torch.cat((q_nope, rotate(q_rope, cos_sin, s.adjacent)), -1)
        return q, torch.cat((k_nope, k_rope), -1), v

    def _mlp(self, y_NTD: Tensor) -> Tensor:
        if self.router is None:
            return self._dense(y_NTD)
        y = self._routed(y_NTD, y_NTD)
        if self.shared_down is None:
            return y
        shared = self._down(self._linear(y_NTD, "shared_gate_up"), "shared_down")
        return y + (shared if self.shared_gate is None else shared * self._linear(y_NTD, "shared_gate").sigmoid())

    def _dense(self, y_NTD: Tensor) -> Tensor:
        if self.fuses and y_NTD.dtype == torch.bfloat16:
            if torch.is_grad_enabled():
                return feed_forward(y_NTD, self.gate_up, self.down)
            return self._linear(gated_product(y_NTD, self.gate_up), "down")
        return self._down(self._linear(y_NTD, "gate_up"), "down")

    def _two_mlps(self, x_NTD: Tensor, y_NTD: Tensor) -> Tensor:
        """The sum of a dense MLP of `y_NTD` and of experts, each with norms of its own."""
        scores_NTD = _unit(x_NTD, self.shape.norm_eps).to(x_NTD.dtype) * self.router_scale * x_NTD.shape[-1] ** -0.5
        routed = self._routed(self._normed(x_NTD, "experts_norm"), scores_NTD)
        return self._normed(self._dense(y_NTD), "mlp_own_norm") + self._normed(routed, "experts_post_norm")

    def _down(self, up: Tensor, name: str) -> Tensor:
        if self.shape.gated and self.shape.act == "silu" and name not in self.lora:
            return gated_linear(up, getattr(self, name), getattr(self, f"{name}_bias"))
        return self._linear(self._activated(up), name)

    def _activated(self, up: Tensor) -> Tensor:
        if not self.shape.gated:
            return self._act(up)
        if self.shape.act == "silu":
            return silu_gated(up)
        gate, up = up.chunk(2, dim=-1)
        return self._act(gate) * up

    def _act(self, x: Tensor) -> Tensor:
        if self.shape.act == "silu":
            return functional.silu(x)
        return functional.relu(x).square() if self.shape.act == "relu2" else functional.gelu(x, approximate="tanh")

    def _routed(self, y_NTD: Tensor, router_NTD: Tensor) -> Tensor:
        """The sum of each token's experts, by one grouped product; `router_NTD` is the router's input."""
        e, y_SD = self.shape.experts, y_NTD.flatten(0, 1)
        assert e is not None
        weights_SU, chosen_SU = choose_experts(
            router_NTD.flatten(0, 1), self.router, self.router_bias, self.choice_bias, e, self.balance
        )
        if self.expert_scale is not None:
            weights_SU = weights_SU * self.expert_scale[chosen_SU]
        order = chosen_SU.flatten().argsort(stable=True)
        expert, token = chosen_SU.flatten()[order], order // e.used
        numbers = torch.arange(e.n, device=y_SD.device)
        ends = torch.searchsorted(expert, numbers, right=True).int()
        up = self._grouped(y_SD[token], "experts_gate_up", expert, ends, e)
        if e.limit:
            gate, up = up[:, ::2].clamp(max=e.limit), up[:, 1::2].clamp(-e.limit, e.limit)
            up = (up + 1) * gate * torch.sigmoid(gate * e.slope)
        else:
            up = self._activated(up)
        down = self._grouped(up, "experts_down", expert, ends, e)
        of_token = torch.empty_like(down).index_copy_(0, order, down).view(*chosen_SU.shape, -1)
        if self.ratings is not None:
            values_SU = weights_SU.abs() * of_token.float().norm(dim=-1)
            both = torch.stack((values_SU, torch.ones_like(values_SU))).flatten(1).to(self.ratings)
            self.ratings.index_add_(1, chosen_SU.flatten(), both)
        return torch.bmm(weights_SU[:, None].to(down.dtype), of_token)[:, 0].view_as(y_NTD)

    def _grouped(self, x_SI: Tensor, name: str, expert_S: Tensor, ends: Tensor, e: Experts) -> Tensor:
        """Multiplies each row by the matrix of its expert; rows are sorted by expert and end at `ends`."""
        matrices, bias = getattr(self, name).unflatten(0, (e.n, -1)), getattr(self, f"{name}_bias")
        y = functional.grouped_mm(x_SI, matrices if e.transposed else matrices.transpose(1, 2), offs=ends)
        return y if bias is None else y + bias.view(e.n, -1)[expert_S]


class _Compiled:
    """`Block.compute`, compiled; uncompiled from the compiler's first failure on."""

    def __init__(self, compiled: Callable[..., BlockOutput]) -> None:
        self._run = compiled

    def __call__(self, block: Block, *inputs: Any) -> BlockOutput:
        try:
            return self._run(block, *inputs)
        except torch._dynamo.exc.TorchDynamoException:
            pass
        try:  # if warnings are errors, the compiler's own warnings would fail it
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return self._run(block, *inputs)
        except torch._dynamo.exc.TorchDynamoException as error:
            current().miss("compile", reason_of(error), "install a C compiler, or use --compile off")
            current().use("compile", "off (failed)")
            self._run = Block.compute
            return self._run(block, *inputs)


class Decoder(nn.Module):
    """The network up to the final norm; the loss applies the head.

    Attributes:
        shape: the dimensions of the network.
        lora: the adapters beside its frozen matrices, see `network.lora`; None: all weights are trained.
        recompute: "none", or "block": activation checkpointing of each block.
        decode_block: `Block.compute` for one new position per row; compiled if the blocks are.
    """

    embed: Tensor
    norm: Tensor
    norm_bias: Tensor | None
    head: Tensor
    ple_embed: Tensor
    ple_proj: Tensor
    ple_proj_norm: Tensor

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        """Parameters are NaN until they are loaded."""
        super().__init__()
        self.shape = shape
        self.lora: LoraSpec | None = None
        self.recompute = "none"
        self.blocks = nn.ModuleList(Block(shape, layer, dtype, device) for layer in range(shape.n_layers))
        for name in ("norm_bias", "ple_embed", "ple_proj", "ple_proj_norm"):
            self.register_parameter(name, None)
        _register(self, shape.outer, dtype, device)
        self.decode_block: Callable[..., BlockOutput] = Block.compute
        self._on_device: list[Tensor] = []
        self._wanted: Collection[int] = ()
        self._outputs: dict[int, Tensor] = {}
        # Multiplied in the network's dtype, by a scale rounded to that dtype.
        self._embed_scale = float(torch.tensor(shape.embed_scale, dtype=dtype))

    @property
    def layers(self) -> list[Block]:
        """The blocks, in a list that types them."""
        return [block for block in self.blocks if isinstance(block, Block)]

    @property
    def head_weight(self) -> Tensor:
        """The output head [vocab_rows, D]; the embedding if they are tied."""
        return self.embed if self.shape.tied else self.head

    def whole(self, parameter: str) -> Tensor:
        """The values of a parameter, detached."""
        return self.get_parameter(parameter).detach()

    def head_rows(self, n: int) -> Tensor:
        """The first `n` rows of the head [n, D], detached."""
        return self.get_parameter(head_name(self.shape))[:n].detach()

    def forward(self, tokens_NT: Tensor, documents: Documents | None = None) -> Tensor:
        """Hidden states [N, T, D] after the final norm.

        Without `documents` every row is one document; with them no token sees another document.
        """
        s = self.shape
        x_NTD = self.embed_tokens(tokens_NT)
        positions_NT, lengths_NT, number_NT = places(tokens_NT, documents)
        frequencies = self.frequencies(tokens_NT.device)
        tables = [cos_sin_of(*each, positions_NT, lengths_NT) for each in zip(s.ropes, frequencies, strict=True)]
        plans = self.plan_attention(tokens_NT, documents, number_NT, x_NTD.dtype)
        plans[NO_ATTENTION] = AttentionPlan("none", positions_NT=positions_NT)
        return self.final_norm(self.run_blocks(x_NTD, tokens_NT, tables, [plans[window] for window in s.windows]))

    def run_blocks(
        self, x_NTD: Tensor, tokens_NT: Tensor, tables: Sequence[CosSin], plans: Sequence[AttentionPlan]
    ) -> Tensor:
        """The last layer's output for the first one's input, with a table for each of `shape.ropes`."""
        s, given = self.shape, dict[int, tuple[Tensor, Tensor]]()
        per_layer_NTLP = self._per_layer(x_NTD, tokens_NT) if s.per_layer_width else None
        for n, (block, rope, plan) in enumerate(zip(self.blocks, s.layer_ropes, plans, strict=True)):
            extra = None if per_layer_NTLP is None else per_layer_NTLP[:, :, n]
            kv = given.get(s.kv_layers[n])
            out = self.run_block(block, x_NTD, tables[rope] if rope >= 0 else None, plan, extra, kv)
            if isinstance(out, tuple):
                x_NTD, k, v = out
                given[n] = k, v
            else:
                x_NTD = out
            if n in self._wanted:
                self._outputs[n] = x_NTD
        return x_NTD

    def _per_layer(self, x_NTD: Tensor, tokens_NT: Tensor) -> Tensor:
        """The per-layer embeddings of the tokens and of the first layer's input [N, T, L, P]."""
        s, rows = self.shape, len(self.ple_embed)
        known_NT = tokens_NT if rows >= s.vocab_rows else tokens_NT.where(tokens_NT < rows, 0)
        size = s.per_layer_width
        own = self.look_up(known_NT, "ple_embed") * float(torch.tensor(size**0.5, dtype=x_NTD.dtype))
        of_input = functional.linear(x_NTD, self.ple_proj) * s.d_model**-0.5
        of_input = _norm(of_input.unflatten(-1, (s.n_layers, size)), self.ple_proj_norm, None, s.norm_eps, s)
        return (of_input + own.view_as(of_input)) * 2**-0.5

    def embed_tokens(self, tokens_NT: Tensor) -> Tensor:
        """Input of the first layer [N, T, D]."""
        return _scaled(self.look_up(tokens_NT), self._embed_scale)

    def final_norm(self, x_NTD: Tensor) -> Tensor:
        """The final norm of the last layer's output."""
        s = self.shape
        # The logit scale is applied to the hidden states, so that the loss does not need it.
        return _scaled(_norm(x_NTD, self.norm, self.norm_bias, s.norm_eps, s), s.logit_scale)

    def plan_attention(
        self, tokens_NT: Tensor, documents: Documents | None, number_NT: Tensor | None, dtype: torch.dtype
    ) -> dict[int, AttentionPlan]:
        """The attention plan of each window, with or without gradients; records the kernels. See `choose`."""
        s = self.shape
        plans = {
            window: choose(
                tokens_NT, documents, number_NT,
                window=window, softcap=s.attn_softcap, sinks=s.has("sinks"), heads=heads, dtype=dtype,
            )
            for window, heads in dict(zip(s.windows, s.layer_heads, strict=True)).items() if window != NO_ATTENTION
        }  # fmt: skip
        if torch.is_grad_enabled() or not self.trains:  # a student's evaluation uses other kernels
            kinds = dict.fromkeys(plan.kind for plan in plans.values())
            labels = (label_of("flash4") if kind == "flash4" else LABELS[kind] for kind in kinds)
            current().use("attention", " + ".join(labels), self.role)
        return plans

    @property
    def trains(self) -> bool:
        """Whether its weights, or adapters beside them, are trained."""
        return self.norm.requires_grad or self.lora is not None

    @property
    def role(self) -> str:
        """Its role in a run: student or teacher."""
        return "student" if self.trains else "teacher"

    def note_gated(self) -> None:
        """Records what computes its gated feed-forward layers."""
        if self.shape.gated:
            fuses = any(block.fuses for block in self.layers)
            current().use("gated", label_of("quack") if fuses else "torch", self.role)

    def look_up(self, tokens_NT: Tensor, name: str = "embed") -> Tensor:
        """Rows of an embedding [N, T, its width]."""
        return functional.embedding(tokens_NT, self.get_parameter(name))

    def frequencies(self, device: torch.device) -> list[Tensor]:
        """The inverse frequencies of each RoPE, cached on the device: a copy per call would wait for the GPU."""
        if not self._on_device or self._on_device[0].device != device:
            self._on_device = [inverse_frequencies(kind, device) for kind in self.shape.ropes]
        return self._on_device

    def run_block(self, block: nn.Module, *inputs: object) -> BlockOutput:
        """The output of a block for the `inputs` of `Block.compute`."""
        again = self.recompute == "block" and torch.is_grad_enabled()
        out: BlockOutput = checkpoint(block, *inputs, use_reentrant=False) if again else block(*inputs)
        return out

    def logits(self, hidden_NTD: Tensor) -> Tensor:
        """Logits [N, T, vocab_rows] of hidden states; materializes all of them."""
        return soft_cap(functional.linear(hidden_NTD, self.head_weight), self.shape.logit_softcap)

    def compile_blocks(self, backend: str | Callable[..., object] = "inductor") -> None:
        """Compiles each block by a backend of torch.compile; blocks with the same layout share the code.

        Hooks are not compiled. If a block cannot be compiled it runs uncompiled, which is recorded.
        """
        if getattr(torch._dynamo.config, "disable", False):
            current().miss("compile", "disabled by the environment")
            return
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        compiled = _Compiled(torch.compile(Block.compute, fullgraph=True, dynamic=False, backend=backend))
        self.decode_block = _Compiled(torch.compile(Block.compute, fullgraph=True, dynamic=True, backend=backend))
        for block in self.layers:
            block.fuses = block.can_fuse()
            # A grouped product in another dtype runs, but does not compile.
            if block.router is None or block.router.dtype == torch.bfloat16:
                block.function = compiled

    def balance_experts(self, weight: float, tokens_per_step: int) -> None:
        """Adds a load-balancing loss to the routers' gradient: `weight` times its mean over layers and tokens."""
        routed = [block for block in self.layers if block.router is not None]
        for block in routed:
            block.balance = weight / (len(routed) * tokens_per_step)

    @contextmanager
    def layer_outputs(self, layers: Collection[int]) -> Iterator[Mapping[int, Tensor]]:
        """Within it, a pass stores the outputs [N, T, D] of these layers, before the final norm, in what it yields."""
        self._wanted, self._outputs = layers, {}
        try:
            yield self._outputs
        finally:
            self._wanted, self._outputs = (), {}

    @contextmanager
    def rating_experts(self) -> Iterator[list[Tensor | None]]:
        """Within it, each layer sums router weight times norm of the output over its experts' tokens, and counts those.

        Yields [2, E] in float64 of each layer, None for one without experts; blocks must be uncompiled.
        """
        blocks = self.layers
        for block in blocks:
            if block.router is not None and self.shape.experts is not None:
                block.ratings = block.router.new_zeros(2, self.shape.experts.n, dtype=torch.float64)
        try:
            yield [block.ratings for block in blocks]
        finally:
            for block in blocks:
                block.ratings = None

    @contextmanager
    def running(self, function: Callable[..., BlockOutput] = Block.compute) -> Iterator[None]:
        """Within it, blocks run uncompiled, or by `function` if they are compiled, and without fused kernels.

        For shapes that training does not have.
        """
        blocks = self.layers
        before = [(block.function, block.fuses) for block in blocks]
        for block in blocks:
            block.function = Block.compute if block.function is Block.compute else function
            block.fuses = False
        try:
            yield
        finally:
            for block, (own, fuses) in zip(blocks, before, strict=True):
                block.function, block.fuses = own, fuses

    def hf_tensors(self) -> dict[str, Tensor]:
        """Views of the parameters by Hugging Face name, in HF row order; writing to them changes the network."""
        return {
            hf: part
            for name in parts_of(self.shape)
            for hf, part in hf_parts(self.shape, name, self.get_parameter(name).detach())
        }
