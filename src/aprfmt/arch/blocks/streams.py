"""Building blocks of rows: several residual streams, which each layer mixes."""

from __future__ import annotations

from aprfmt.arch.blocks.decoder import tensor
from aprfmt.arch.converter import Converter, refuse_if
from aprfmt.arch.row import Key, TensorRow


def streams(attn: str, ffn: str, coefficients: str, scales: str, layers: str = "") -> tuple[TensorRow, ...]:
    """Mixing of the streams around attention and MLP; `attn` and `ffn` are their name prefixes."""
    return tuple(
        tensor(f"{hf}{part}", f"hc_{gguf}_{part}.weight", dims, layers=layers)
        for hf, gguf in ((attn, "attn"), (ffn, "ffn"))
        for part, dims in (("fn", f"{coefficients},hc_mult*hidden"), ("base", coefficients), ("scale", scales))
    )


def last_stream(hf: str) -> tuple[TensorRow, ...]:
    """Reduction of the streams to one before the final norm."""
    parts = {"fn": "hc_mult,hc_mult*hidden", "base": "hc_mult", "scale": "1"}
    return tuple(tensor(f"{hf}{part}", f"output_hc_{part}.weight", dims) for part, dims in parts.items())


HC_COUNT = Key("hyper_connection.count", ("hc_mult",))
HC_EPS = Key("hyper_connection.epsilon", ("hc_eps",), "f32")
HC_ITERATIONS = Key(
    "hyper_connection.sinkhorn_iterations", ("hc_sinkhorn_iters",),
    converter=Converter(refuse_if(lambda value, scope: value == 0, "{name} is 0: llama.cpp's {gguf} needs at least 1")),
)
