"""Causal attention within documents and sliding windows: the kernel for each case chosen in one function.

Shape suffixes: N rows of a batch, T positions, S = N T, H query heads, K key-value heads, E values of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from aprfmt.errors import UsageError
from aprtrain.features import Verdict, current, importable
from aprtrain.kernels.cross_check import agree
from aprtrain.kernels.decode import attend_one
from aprtrain.kernels.flash4 import flash4

_FLASH_HEAD = 256
"""Largest head of the flash kernels."""


@dataclass(frozen=True, slots=True)
class Documents:
    """The document boundaries of a packed batch. Every row of the batch starts a document.

    Attributes:
        cu_seqlens: first token of each document in the flattened batch, followed by N T; int32 on the batch's device.
            The end may be repeated (empty documents), so that the tensor has the same shape for every batch and nothing
            is recompiled.
        max_len: upper bound of document lengths (T is one; a constant value compiles once).
    """

    cu_seqlens: Tensor
    max_len: int

    @classmethod
    def of(cls, lengths: Sequence[int], max_len: int, *, capacity: int = 0) -> Documents:
        """Documents of these lengths, in order; room for `capacity` of them. Raises UsageError."""
        if not lengths or min(lengths) < 1 or max(lengths) > max_len:
            raise UsageError(f"documents must have 1 to {max_len} tokens, not {list(lengths)[:8]}")
        ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
        padding = ends[-1:].expand(max(0, capacity - len(lengths)))
        return cls(torch.cat((ends, padding)).int(), max_len)


LABELS = {
    "causal": "torch", "cudnn": "cuDNN", "varlen": "torch flash", "mask": "masked torch", "eager": "eager",
}  # fmt: skip
"""Names of AttentionPlan's kinds in a log, except flash4, which has a version."""


def places(tokens_NT: Tensor, documents: Documents | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Position of each token in its document, its length and index, [N, T]; no index for one document per row."""
    n, t = tokens_NT.shape
    if documents is None:
        position = torch.arange(t, device=tokens_NT.device).expand(n, t)
        return position, torch.full_like(position, t), None
    flat_S, ends = torch.arange(n * t, device=tokens_NT.device, dtype=torch.int32), documents.cu_seqlens
    number_S = torch.searchsorted(ends, flat_S, right=True) - 1
    position_S, length_S = flat_S - ends[number_S], ends.diff()[number_S]
    return position_S.view(n, t), length_S.view(n, t), number_S.view(n, t)


_NAMES_GROUPS = torch.__version__ >= "2.12"
"""Whether torch's kernel for packed documents must be told that query heads share key-value heads."""


class KeyValueCache:
    """Keys and values of a layer for `total` positions, zero until they are known.

    All shapes are constant, so that a CUDA graph can replay a step.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._kept: list[Tensor] = []
        self._states: dict[str, Tensor] = {}

    def extend(self, places_T: Tensor, *new_NTKE: Tensor) -> list[Tensor]:
        """Stores keys and values of the positions `places_T`; returns those of all positions, [N, total, K, E]."""
        self._kept = self._kept or [x.new_zeros(len(x), self._total, *x.shape[2:]) for x in new_NTKE]
        for kept, new in zip(self._kept, new_NTKE, strict=True):
            kept.index_copy_(1, places_T, new)
        return self._kept

    def state(self, name: str, like: Tensor, *sizes: int) -> Tensor:
        """What a layer without attention keeps from position to position: zeros at first, to be changed in place."""
        if name not in self._states:
            self._states[name] = like.new_zeros(sizes)
        return self._states[name]


class AttentionPlan(NamedTuple):
    """The attention kernel for the layers with one window size in one batch.

    Attributes:
        kind: "causal" (SDPA of whole rows), "cudnn" (the same by cuDNN), "varlen" (flash kernel over `cu_seqlens`),
            "flash4" (by FlashAttention-4, either way), "mask" (SDPA under a mask), "eager" (scores of
            SCORED queries at a time, for a softcap or sinks) or "none" (of layers without attention).
        mask: attention mask, bool [N or 1, 1, T, T], for "mask".
        cu_seqlens, max_len: see Documents, for "varlen" and "flash4"; None for whole rows.
        window: window size, likewise and for "eager"; 0 for none.
        number_NT: the document of each token, for "eager"; None for one document per row.
        cache: of the layer, while text is generated; "mask" and "eager" then have a mask [N, 1, T, positions of the
            cache].
        places_T: positions of the T tokens in the cache, int64.
        positions_NT: position of each token in its document, for layers without attention.
        first_N: first position of the cache that each row's new token sees, for "decode" (one token per row, our own
            kernel), int64.
    """

    kind: str
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_len: int = 0
    window: int = 0
    number_NT: Tensor | None = None
    cache: KeyValueCache | None = None
    places_T: Tensor | None = None
    positions_NT: Tensor | None = None
    first_N: Tensor | None = None


def choose(
    tokens_NT: Tensor,
    documents: Documents | None,
    number_NT: Tensor | None,
    *,
    window: int,
    softcap: float = 0.0,
    sinks: bool = False,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
) -> AttentionPlan:
    """The fastest exact kernel for these documents and this window (0: none).

    `softcap` is that of the scores (0: none); `sinks` says whether there are sinks; `heads` are the number of query
    heads, key-value heads and the size of each.
    """
    n, t = tokens_NT.shape
    window = 0 if window >= t else window
    fits = tokens_NT.is_cuda and dtype in (torch.bfloat16, torch.float16) and heads[2] <= _FLASH_HEAD
    learns = torch.is_grad_enabled()
    if tokens_NT.is_cuda and not fits:
        wide = f"heads of {heads[2]} values are wider than {_FLASH_HEAD}" if heads[2] > _FLASH_HEAD else f"{dtype}"
        current().miss("flash", wide)
    if documents is None and not window and not sinks and not softcap:
        # Without a gradient cuDNN is as fast, and needs no compilation.
        if fits and learns and _takes("flash4", heads, dtype, "causal", windowed=False, learns=True):
            return AttentionPlan("flash4")
        return AttentionPlan("cudnn" if fits and _takes("cudnn", heads, dtype) else "causal")
    if fits:
        if documents is None:
            rows = torch.arange(0, (n + 1) * t, t, device=tokens_NT.device, dtype=torch.int32)
            documents = Documents(rows, t)
        known = "eager" if softcap else "varlen"
        fits4 = not sinks and _takes(
            "flash4", heads, dtype, known, windowed=bool(window), learns=learns, softcap=softcap
        )
        if fits4 or not softcap:
            kind = "flash4" if fits4 else known
            return AttentionPlan(kind, None, documents.cu_seqlens, documents.max_len, window)
    if sinks or softcap:
        return AttentionPlan("eager", window=window, number_NT=number_NT)
    return AttentionPlan("mask", _mask(number_NT, window, range(t), range(t), tokens_NT.device))


def _takes(feature: str, heads: tuple[int, int, int], dtype: torch.dtype, *how: str, **flags: float) -> bool:
    """Whether an optional kernel is used; notes it if not."""
    record = current()
    if torch.are_deterministic_algorithms_enabled():
        record.miss(feature, "it is not deterministic (--deterministic)", "leave out --deterministic")
        return False
    agrees = _flash4_agrees if feature == "flash4" else _cudnn_agrees
    return record.check(feature, agrees(heads, dtype, *how, **flags))


@cache
def _cudnn_agrees(heads: tuple[int, int, int], dtype: torch.dtype) -> Verdict:
    """Whether cuDNN's attention agrees with the flash kernel on this GPU, values and gradients.

    On Hopper it is 1.4 to 1.7 times as fast (tools/bench_decoder.py); older GPUs use the flash kernel.
    """

    def run(backend: SDPBackend) -> list[Tensor]:
        q, k, v = _random(heads, dtype, learns=True)
        with sdpa_kernel(backend):
            out = functional.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True,
                enable_gqa=heads[0] != heads[1],
            )  # fmt: skip
            return [out.detach(), *torch.autograd.grad(out, (q, k, v), q.detach().transpose(1, 2))]

    if not (recent := _is_recent()):
        return recent
    return agree(partial(run, SDPBackend.FLASH_ATTENTION), partial(run, SDPBackend.CUDNN_ATTENTION))


def _is_recent() -> Verdict:
    major, minor = torch.cuda.get_device_capability()
    return Verdict(major >= 9, "" if major >= 9 else f"it needs compute capability 9.0, this GPU has {major}.{minor}")


@cache
def _flash4_agrees(
    heads: tuple[int, int, int], dtype: torch.dtype, kind: str, windowed: bool, learns: bool, softcap: float = 0.0
) -> Verdict:
    """Whether FlashAttention-4 is installed and agrees with torch's kernel `kind`, gradients too if one `learns`.

    It compiles its kernels on the first call, which takes seconds each.
    """
    documents = None if kind == "causal" else Documents.of([100, 1, 27, 128, 250, 6], 256, capacity=8)

    def run(kind: str) -> list[Tensor]:
        q, k, v = _random(heads, dtype, learns=learns)
        number_NT = places(torch.zeros(2, 256), documents)[2]
        number_NT = None if number_NT is None else number_NT.to("cuda")
        ends = None if documents is None else documents.cu_seqlens.to("cuda")
        plan = AttentionPlan(kind, None, ends, 256, 64 * windowed, number_NT)
        with torch.set_grad_enabled(learns):
            out = attend(q, k, v, plan, scale=heads[2] ** -0.5, softcap=softcap)
        return [out.detach(), *(torch.autograd.grad(out, (q, k, v), q.detach()) if learns else ())]

    if not (usable := _is_recent()) or not (usable := importable("flash4")):
        return usable
    return agree(partial(run, kind), partial(run, "flash4"))


def _random(heads: tuple[int, int, int], dtype: torch.dtype, *, learns: bool) -> list[Tensor]:
    """Random Q, K and V of two rows."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, 256, n, heads[2]) for n in (heads[0], heads[1], heads[1])]
    some = (torch.randn(s, generator=generator, device="cuda", dtype=dtype) for s in shapes)
    return [x.requires_grad_(learns) for x in some]


_CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


SCORED = 512
"""Queries whose scores are held at a time by the kind "eager"."""


def _mask(number_NT: Tensor | None, window: int, queries: range, keys: range, device: torch.device) -> Tensor:
    """Which keys each query sees, bool [N or 1, 1, queries, keys]."""
    places_Q, places_K = (torch.arange(r.start, r.stop, device=device) for r in (queries, keys))
    back = places_Q[:, None] - places_K
    allowed = (back >= 0)[None] if not window else ((back >= 0) & (back < window))[None]
    if number_NT is not None:
        of_query, of_key = (number_NT[:, r.start : r.stop] for r in (queries, keys))
        allowed = allowed & (of_query[:, :, None] == of_key[:, None])
    return allowed[:, None]


def attend(
    q_NTHE: Tensor,
    k_NTKE: Tensor,
    v_NTKE: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention output [N, T, H, E] with the kernel that `choose` returned; `sinks` [H] are scores of a position
    without a value.

    Heads of V may be smaller than those of Q and K; the output has their size.
    """
    kind, mask = plan.kind, plan.mask
    if plan.cache is not None and plan.places_T is not None:
        k_NTKE, v_NTKE = plan.cache.extend(plan.places_T, k_NTKE, v_NTKE)
        if plan.first_N is not None:
            mixed: Tensor = attend_one(q_NTHE, k_NTKE, v_NTKE, plan.first_N, plan.places_T, scale)
            return mixed
        plan = plan._replace(cache=None)
    if v_NTKE.shape[-1] < q_NTHE.shape[-1]:
        wide = functional.pad(v_NTKE, (0, q_NTHE.shape[-1] - v_NTKE.shape[-1]))
        found = attend(q_NTHE, k_NTKE, wide, plan, scale=scale, softcap=softcap, sinks=sinks)
        return found[..., : v_NTKE.shape[-1]]
    if kind == "flash4":
        heads = [x if plan.cu_seqlens is None else x.flatten(0, 1) for x in (q_NTHE, k_NTKE, v_NTKE)]
        values: Tensor = flash4(*heads, plan.cu_seqlens, plan.max_len, plan.window, scale, softcap)[0]
        return values.view(q_NTHE.shape)
    if kind == "varlen":
        return _varlen(q_NTHE, k_NTKE, v_NTKE, plan, scale, sinks)
    q, k, v = (x.transpose(1, 2) for x in (q_NTHE, k_NTKE, v_NTKE))
    shared = q.shape[1] != k.shape[1]
    if kind == "eager" and mask is None:
        out = _in_blocks(q, k, v, plan, scale, softcap, sinks)
    elif kind == "eager" and mask is not None:
        out = _eager(q, k, v, mask, scale, softcap, sinks)
    elif kind == "cudnn":
        with sdpa_kernel(_CUDNN_FIRST, set_priority=True):
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=shared)
    elif shared and mask is not None and q.shape[2] == 1:
        # A group's heads as positions: kernels that take masks know no groups, and torch would repeat K and V.
        grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
        return functional.scaled_dot_product_attention(grouped, k, v, mask, scale=scale).reshape(q_NTHE.shape)
    else:
        out = functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=shared
        )
    return out.transpose(1, 2)


def _varlen(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float, sinks: Tensor | None) -> Tensor:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn  # it loads torch's compiler

    options: dict[str, Any] = {"enable_gqa": q.shape[2] != k.shape[2]} if _NAMES_GROUPS else {}
    flat_q, flat_k, flat_v = (x.reshape(-1, x.shape[2], x.shape[3]) for x in (q, k, v))
    assert plan.cu_seqlens is not None
    ends = plan.cu_seqlens
    found = varlen_attn(
        flat_q, flat_k, flat_v, ends, ends, plan.max_len, plan.max_len, scale=scale,
        window_size=(plan.window - 1, 0),  # -1: no window
        return_aux=AuxRequest(lse=sinks is not None), **options,
    )  # fmt: skip
    if sinks is None:
        assert isinstance(found, Tensor)
        return found.view(q.shape)
    # exp(a) of exp(a) + exp(sink), where a is the log-sum-exp of the scores.
    out, sums_HS = found
    return (out * torch.sigmoid(sums_HS.t() - sinks)[..., None].to(out.dtype)).view(q.shape)


def _in_blocks(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """`_eager` for SCORED queries at a time and the keys that they see; the backward pass computes scores again."""
    parts: list[Tensor] = []
    t = q.shape[2]

    def some(q: Tensor, k: Tensor, v: Tensor, number_NT: Tensor | None, start: int, first: int) -> Tensor:
        queries, keys = range(start, start + q.shape[2]), range(first, first + k.shape[2])
        mask = _mask(number_NT, plan.window, queries, keys, q.device)  # in here, or autograd would keep it
        return _eager(q, k, v, mask, scale, softcap, sinks)

    for start in range(0, t, SCORED):
        stop = min(t, start + SCORED)
        first = max(0, start - plan.window + 1) if plan.window else 0
        given = q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop], plan.number_NT, start, first
        if torch.is_grad_enabled():
            part: Tensor = checkpoint(some, *given, use_reentrant=False, preserve_rng_state=False)
        else:
            part = some(*given)
        parts.append(part)
    return torch.cat(parts, 2)


def _eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float, sinks: Tensor | None) -> Tensor:
    """Softmax in float32 over scores that are capped before the mask, as in Gemma 2's training, and over sinks."""
    n, heads, t, size = q.shape
    grouped = q.reshape(n, k.shape[1], -1, t, size)
    scores = grouped @ k[:, :, None].transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask[:, :, None], float("-inf"))
    wide = torch.promote_types(scores.dtype, torch.float32)
    if sinks is not None:
        column = sinks.view(1, k.shape[1], -1, 1, 1).to(scores.dtype)
        scores = torch.cat((scores, column.expand(*scores.shape[:-1], 1)), -1)
    weights = torch.softmax(scores, -1, dtype=wide)[..., : k.shape[2]].to(q.dtype)
    return (weights @ v[:, :, None]).reshape(n, heads, t, size)
