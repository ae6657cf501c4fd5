"""A model whose file is cut short while it is read: an AprError with exit 4 from every command, and never a signal.

Each case cuts one file behind one read of it. `APR_CUTS=all` cuts behind many more reads, and to several lengths.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import plain_models
import pytest
from cut_files import Child, Cut, Outcome

import aprfmt

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks up descriptors under /proc")

_ALL = os.environ.get("APR_CUTS") == "all"
_POINTS, _SHARES = (12, (0.0, 0.5, 0.9)) if _ALL else (2, (0.0,))
_PART = 200_000  # bytes of a shard: three of them

COMMANDS: dict[str, tuple[str, ...]] = {
    "library": (),
    "inspect": ("inspect", "IN", "--vocab", "--weights", "--quality"),
    "tensors": ("tensors", "IN", "--stats", "--hash"),
    "validate": ("validate", "IN"),
    "diff": ("diff", "IN", "TWIN", "--values"),
    "report": ("report", "IN", "-o", "OUT/page.html"),
    "import": ("import", "IN", "-o", "OUT/m.apr"),
    "export": ("export", "IN", "-o", "OUT/m.gguf"),
    "folder": ("convert", "IN", "-o", "OUT/hf", "--format", "hf"),
    "narrow": ("convert", "IN", "-o", "OUT/m.safetensors", "--dtype", "f16"),
    "quantize": ("quantize", "IN", "q8_0", "-o", "OUT/q.gguf"),
    "shard": ("shard", "IN", "-o", "OUT/parts", "--shard-size", "100000"),
    "stamp": ("stamp", "IN", "-o", "OUT/s.apr", "--license", "MIT"),
}
_LOOKS = ("library", "inspect", "tensors", "validate", "diff")
_MOST = tuple(name for name in COMMANDS if name not in ("shard", "stamp"))
MODELS = {
    "m.apr": tuple(COMMANDS),
    "m.gguf": _MOST,
    "hf": _MOST,
    "hf-parts": _MOST,
    "apr-parts": _MOST,
    "m.safetensors": (*_LOOKS, "report"),  # without a config it has no other form
    "m.v1.apr": _LOOKS,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models in every form."""
    root = tmp_path_factory.mktemp("cuts")
    folder = plain_models.write_folder(root / "hf")
    for name in ("m.apr", "m.gguf", "m.safetensors"):
        aprfmt.convert_model(folder, root / name)
    aprfmt.convert_model(folder, root / "hf-parts", format="hf", shard_size=_PART)
    aprfmt.convert_model(root / "m.apr", root / "apr-parts", format="apr-shards", shard_size=_PART)
    aprfmt.write_v1(root / "m.v1.apr", b"x" * 5000, model_type=1, metadata={})
    return root


def _points(n_reads: int) -> list[int]:
    """Reads behind which to cut: some between the first and the last, which nothing follows."""
    n = min(_POINTS, n_reads - 1)
    return sorted({1 + i * (n_reads - 2) // max(1, n - 1) for i in range(n)})


def _judged(cut: Cut, outcome: Outcome) -> str:
    """What is wrong with it, "" where nothing is."""
    if not outcome.file and outcome.reads < cut.after:  # threads read side by side: fewer reads this time, no cut
        return "" if outcome.exit == 0 else "failed without a cut"
    if outcome.left:
        return f"left {outcome.left}"
    if not cut.words and outcome.exit == 0:  # a program that has read what it wanted is told nothing
        return "" if not outcome.again or cut.share else "nothing was noticed"
    wanted = 2 if cut.words[:1] == ("diff",) else 4
    seen = (
        outcome.code in ("changed", "truncated", "corrupt", "checksum")
        and outcome.path
        and outcome.path in outcome.file  # or its name, or its folder
    )
    return "" if seen and outcome.exit == wanted else "not said, or not as it is"


@pytest.fixture(scope="module")
def child(root: Path) -> Iterator[Child]:
    """Where the cases run."""
    with Child(root) as child:
        yield child


@pytest.mark.parametrize("name", MODELS)
def test_a_cut_is_an_error_and_no_signal(name: str, child: Child) -> None:
    wrong = []
    for words in (COMMANDS[command] for command in MODELS[name]):
        whole = child.run(Cut(name, words))
        assert whole.exit == 0, whole
        for after in _points(whole.reads):
            for share in _SHARES:
                cut = Cut(name, words, after, share)
                outcome = child.run(cut)
                if why := _judged(cut, outcome):
                    wrong.append(f"{why}: {cut} {outcome}")
    assert not wrong, "\n".join(wrong)
