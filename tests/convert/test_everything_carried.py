"""Whatever a folder or a GGUF holds beside a plain decoder comes back from an `.apr`, every file the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from carried_models import CONVERTED, FOLDERS, GGUFS

import aprfmt
from aprfmt.errors import AprError

Get = Callable[[str], Path]

# Nothing in these says whose tensors they hold.
_NAMELESS = ("anonymous",)
_NOT_YET = pytest.mark.xfail(strict=True, reason="not carried yet")
_FOLDERS_NOT_YET: set[str] = set()
_GGUFS_NOT_YET = {
    *("glm4_moe_only_mtp", "glm4_moe_lite_mtp", "qwen3_5_mtp", "qwen3_5_only_mtp"),
    *("qwen2_vl_mmproj", "gemma3_mmproj", "control_vector", "imatrix"),
}


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[_NOT_YET] if n in _FOLDERS_NOT_YET else []) for n in FOLDERS])
def test_every_file_of_a_folder_comes_back(name: str, carried_folder: Get, tmp_path: Path) -> None:
    source = carried_folder(name)
    report = aprfmt.import_model(source, tmp_path / "m.apr")
    assert report.lossless
    assert not report.losses
    back = aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back", format="hf")
    assert back.lossless
    assert files(tmp_path / "back") == files(source)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[_NOT_YET] if n in _GGUFS_NOT_YET else [])
        for n in (*CONVERTED, *GGUFS)
        if n not in (*_NAMELESS, "unknown")
    ],
)
def test_every_gguf_comes_back(name: str, carried_gguf: Get, tmp_path: Path) -> None:
    source = carried_gguf(name)
    report = aprfmt.import_model(source, tmp_path / "m.apr")
    assert report.lossless
    assert not report.losses
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("name", ["unknown", "anonymous"])
def test_a_gguf_of_an_unknown_architecture_is_refused_unless_it_may_keep_its_names(
    name: str, carried_gguf: Get, tmp_path: Path
) -> None:
    source = carried_gguf(name)
    with pytest.raises(AprError, match="architecture"):
        aprfmt.import_model(source, tmp_path / "m.apr")
    aprfmt.import_model(source, tmp_path / "m.apr", allow_unmapped=True)
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == source.read_bytes()
