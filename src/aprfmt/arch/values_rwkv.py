"""Converters of RWKV: ranks and widths that go with the hidden size, heads that share it."""

from __future__ import annotations

from aprfmt.arch.converter import DEFAULT, Converter, GgufKeys, Scope
from aprfmt.arch.fields import as_float, as_int

_LARGE = 4096
"""Of this hidden size RWKV 6 has projections of twice the rank."""
_GATE_RANK = 128


def _rank(rank: int) -> Converter:
    return Converter(fill=lambda scope: 2 * rank if scope.h.hidden_size == _LARGE else rank)


def _rank_from(rank: int) -> Converter:
    """The same in Qwen 2, where larger ones have it too."""
    return Converter(fill=lambda scope: 2 * rank if (scope.h.hidden_size or 0) >= _LARGE else rank)


def _width_6(scope: Scope) -> int | None:
    return int(scope.h.hidden_size * 3.5) // 32 * 32 if scope.h.hidden_size else None


def _rank_by(exponent: float, factor: float) -> Converter:
    """The rank of a product in RWKV 7, in whole 32s."""

    def fill(scope: Scope) -> int | None:
        hidden = scope.h.hidden_size
        return 32 * max(1, round(hidden**exponent * factor / 32)) if hidden else None

    return Converter(fill=fill)


def _width_7(scope: Scope) -> int | None:
    ratio, hidden = as_float(scope.config("hidden_ratio"), "hidden_ratio"), scope.h.hidden_size
    return -(-int(hidden * ratio) // 32) * 32 if ratio and hidden else None


def _gate_rank_to(value: object, scope: Scope) -> int:
    return _GATE_RANK if value else 0


def _heads_from(value: object, scope: Scope) -> object:
    """The number of heads: a GGUF of these says the size of one, and 0 for their number."""
    size, hidden = as_int(scope.gguf("wkv.head_size"), "wkv.head_size"), scope.h.hidden_size
    return hidden // size if size and hidden else DEFAULT


def _heads_to(value: object, scope: Scope) -> GgufKeys | None:
    size = scope.h.plain_head_dim
    return None if size is None else GgufKeys({"wkv.head_size": ("u32", size), "attention.head_count": ("u32", 0)})


RWKV: dict[str, Converter] = {
    "mix_rank": _rank(32),
    "decay_rank": _rank(64),
    "mix_rank_in_qwen": _rank_from(32),
    "decay_rank_in_qwen": _rank_from(64),
    "rwkv_width": Converter(fill=_width_6),
    "rwkv7_width": Converter(fill=_width_7),
    "rank_by_root": _rank_by(0.5, 1.8),
    "value_rank": _rank_by(0.5, 1.3),
    "gate_rank": _rank_by(0.8, 0.6),
    "has_gate": Converter(_gate_rank_to, lambda value, scope: bool(value)),
    "idle_heads": Converter(lambda value, scope: 0, _heads_from),
    "state_heads": Converter(_heads_to, _heads_from),
}
