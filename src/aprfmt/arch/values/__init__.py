"""Converters of hyper-parameters that config.json and GGUF tell in different ways, a file a kind of network."""

from __future__ import annotations

from aprfmt.arch.values import attention, base, mixed

FILES = (base, attention, mixed)
CONVERTERS: dict[str, base.Converter] = {
    name: item for file in FILES for name, item in file.CONVERTERS.items()
}
"""What a Key's `via` names."""
