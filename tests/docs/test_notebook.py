"""The example notebook runs from top to bottom, and shows what it says that it shows."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import demo_model
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs/notebooks/a-model.ipynb"
_RUN = """
import asyncio, sys
import nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""
_NEEDED = ("nbclient", "nbformat", "ipykernel")


@pytest.mark.skipif(not all(map(find_spec, _NEEDED)), reason="needs nbclient and ipykernel")
def test_the_notebook_runs(tmp_path: Path) -> None:
    demo_model.build(tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf")  # a smaller model under the name that is typed
    done = subprocess.run(
        [sys.executable, "-c", _RUN, NOTEBOOK, tmp_path / "done.ipynb"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    shown = [cell["outputs"] for cell in cells(tmp_path / "done.ipynb")]
    pages = ["".join(out["data"]["text/html"]) for outs in shown for out in outs if "text/html" in out.get("data", {})]
    model, tensor, quantized, difference, exported = pages
    assert "<summary>tensors</summary>" in model
    assert '<path class="area' in tensor, "the histogram"
    assert "lossless" in quantized
    assert "SNR, dB" in difference
    assert ">True<" in exported
    last = "".join(shown[-1][0]["data"]["text/plain"])
    assert last == "['back.gguf', 'model.apr', 'page.html', 'smaller.gguf']"


def test_it_is_kept_without_outputs() -> None:
    """What a machine printed once says nothing about the code as it stands."""
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells(NOTEBOOK))


def cells(path: Path) -> list[dict[str, Any]]:
    """The cells with code."""
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
