"""Containers: which one a path holds, decided by its bytes, and the module that opens it."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.errors import CorruptError, NotFoundError, UnknownFormatError

if TYPE_CHECKING:
    from aprfmt.model import Model

# Format id -> module with `open_model(path: Path) -> Model`.
MODULES = {
    "apr-v2": "aprfmt.formats.apr_shards",
    "apr-v1": "aprfmt.formats.apr1",
    "apr-legacy": "aprfmt.formats.apr_legacy",
    "gguf": "aprfmt.formats.gguf",
    "safetensors": "aprfmt.formats.safetensors",
    "hf": "aprfmt.formats.hfdir",
}

APR_MANIFEST_SUFFIX = ".apr.index.json"
"""How the manifest of a sharded `.apr` ends."""


def open(path: str | os.PathLike[str]) -> Model:
    """Opens a model of any readable format. Raises AprError: not found, unknown, corrupt, unsupported."""
    name = resolve(path)
    model: Model = import_module(MODULES[detect(name)]).open_model(name)
    return model


def resolve(path: str | os.PathLike[str]) -> Path:
    """`path` itself, or the local snapshot of `hf://org/repo[@revision]`."""
    text = os.fspath(path)
    if text.startswith("hf://"):
        from aprfmt.formats.hub import snapshot

        return snapshot(text)
    return path if isinstance(path, Path) else Path(text)


def detect(path: str | os.PathLike[str]) -> str:
    """The format id of what `path` holds, by its bytes and never by its suffix: a key of MODULES.

    Raises NotFoundError, UnknownFormatError, or CorruptError for a file that begins like an APR and is none.
    """
    name = resolve(path)
    if name.is_dir():
        from aprfmt.formats.hfdir import detect_folder

        return detect_folder(name)
    from aprfmt.io.source import Source

    with Source.open(name) as source:
        head = source.read(0, min(source.size, 64))
        size = source.size
        if head.startswith(b"APR"):
            from aprfmt.formats.apr_magic import detect_apr

            return detect_apr(source, name)
    return _detect_other(name, head, size)


def _detect_other(name: Path, head: bytes, size: int) -> str:
    if head[:4] in (b"GGUF", b"FUGG"):
        return "gguf"
    if head[:4] in (b"GGML", b"ggml", b"ggjt", b"tjgg", b"lmgg", b"fmgg"):
        raise UnknownFormatError(
            "a GGML file from before GGUF", path=name, hint="convert it with llama.cpp's old tools first"
        )
    if size >= 8 and 2 <= int.from_bytes(head[:8], "little") <= size - 8 and head[8:9] == b"{":
        return "safetensors"
    if head.lstrip()[:1] == b"{" and name.name.endswith(".safetensors.index.json"):
        return "hf"
    if head.lstrip()[:1] == b"{" and name.name.endswith(APR_MANIFEST_SUFFIX):
        return "apr-v2"
    if size == 0:
        raise UnknownFormatError("the file is empty", path=name)
    if name.suffix == ".safetensors":
        raise CorruptError("not a safetensors file: its header length does not fit", path=name, offset=0)
    hint = "a PyTorch pickle: convert it to safetensors first" if head[:2] in (b"PK", b"\x80\x02") else None
    raise UnknownFormatError("not a file of any known format (APR, GGUF, safetensors)", path=name, hint=hint)


__all__ = ["APR_MANIFEST_SUFFIX", "MODULES", "NotFoundError", "detect", "open", "resolve"]
