"""The rows of towers, a file a kind of network; a new file is added to both lists."""

from __future__ import annotations

from aprfmt.arch.row import Tower
from aprfmt.arch.towers import (
    documents,
    gemma3n,
    gemma4,
    glm,
    granite,
    mimo,
    mixed,
    moon,
    omni,
    paddle,
    pixtral,
    qwen,
    qwen3,
    radio,
    siglip,
    sound,
    speech,
    step,
    vit,
    whisper,
)

_FILES = (
    siglip,
    qwen,
    qwen3,
    pixtral,
    whisper,
    sound,
    vit,
    glm,
    paddle,
    moon,
    omni,
    documents,
    granite,
    step,
    radio,
    mixed,
    gemma4,
    speech,
    mimo,
    gemma3n,
)

TOWERS: tuple[Tower, ...] = tuple(row for file in _FILES for row in file.TOWERS)
"""Of rows that share a class or a projector without a condition, the first counts."""
