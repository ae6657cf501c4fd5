"""Reads that give less than was asked for, as the operating system may: the same comes of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plain_models
import pytest

import aprfmt
from faults import intercepted

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks up descriptors under /proc")

_pread, _preadv = os.pread, os.preadv


def short(name: str, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
    """About a third of what is wanted of each read, at least a byte."""
    if name == "pread":
        fd, n_bytes, offset = args
        return _pread(fd, -(-n_bytes // 3), offset)
    if name == "preadv":
        fd, (buffer,), offset = args
        return _preadv(fd, [buffer[: -(-len(buffer) // 3)]], offset)
    return call()


def seen(path: Path) -> list[object]:
    """All that a model holds."""
    with aprfmt.open(path) as model:
        tensors = [(t.name, t.dtype, t.shape, bytes(t.raw()), t.numpy().tobytes()) for t in model.tensors.values()]
        return [
            dict(model.metadata),
            model.tokenizer and (model.tokenizer.tokens, model.tokenizer.merges),
            model.checksum(),
            tensors,
        ]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models in every form."""
    root = tmp_path_factory.mktemp("short")
    folder = plain_models.write_folder(root / "hf")
    for name in ("m.apr", "m.gguf", "m.safetensors"):
        aprfmt.convert_model(folder, root / name)
    aprfmt.convert_model(folder, root / "hf-parts", format="hf", shard_size=200_000)
    aprfmt.convert_model(root / "m.apr", root / "apr-parts", format="apr-shards", shard_size=200_000)
    aprfmt.write_v1(root / "m.v1.apr", b"x" * 5000, model_type=1, metadata={}, compression=1)
    return root


@pytest.mark.parametrize("name", ["m.apr", "m.gguf", "m.safetensors", "hf", "hf-parts", "apr-parts", "m.v1.apr"])
def test_short_reads_are_completed(name: str, root: Path) -> None:
    wanted = seen(root / name)
    with intercepted(root, short):
        assert seen(root / name) == wanted


@pytest.mark.parametrize(("source", "target"), [("hf", "m.apr"), ("m.apr", "m.gguf"), ("m.gguf", "m.safetensors")])
def test_short_reads_make_the_same_file(source: str, target: str, root: Path, tmp_path: Path) -> None:
    aprfmt.convert_model(root / source, tmp_path / target)
    with intercepted(root, short):
        aprfmt.convert_model(root / source, tmp_path / f"again-{target}")
    assert (tmp_path / f"again-{target}").read_bytes() == (tmp_path / target).read_bytes()
