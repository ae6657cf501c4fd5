"""A damaged record of the source files is refused or passed over: nothing but an AprError comes of it."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
from plain_models import write_folder

import aprfmt

VALUES: tuple[Any, ...] = (
    None, -1, 0, 3, 1 << 40, "x", "swap", "deal", "mxfp4", "plus_one", [], [[1]], {}, {"before": []}, True, 1.5,
    "F16", "Q4_0", "model.norm.weight", [["a{e}", 3]], [1, [4]],
    {"before": [[1, [64, 64]]], "after": [[1, [64, 64]]], "pack": "mxfp4"},
    {"before": [[1, [64, 64]]], "after": [[1, [64, 64]]], "value": "plus_one"},
    {"before": [[1, [64, 64]]], "after": [[1, [60, 64]]], "skip": 4, "orders": [["swap", 4, 2, 8]]},
)  # fmt: skip


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and tensors of an `.apr` made from a GGUF with moved rows."""
    folder = tmp_path_factory.mktemp("packed")
    aprfmt.convert_model(write_folder(folder / "f"), folder / "m.gguf")
    aprfmt.import_model(folder / "m.gguf", folder / "m.apr")
    with aprfmt.open(folder / "m.apr") as model:
        return dict(model.metadata), {t.name: t.numpy().copy() for t in model.tensors.values()}


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a JSON value."""
    keys = list(enumerate(value)) if isinstance(value, list) else list(value.items()) if isinstance(value, dict) else []
    return [(value, key) for key, _ in keys] + [place for _, item in keys for place in places(item)]


@pytest.mark.parametrize("seed", range(120))
def test_damage_is_refused_or_passed_over(seed: int, packed: tuple[Any, Any], tmp_path: Path) -> None:
    metadata, tensors = packed
    rng = random.Random(seed)
    record = copy.deepcopy(metadata["aprfmt.source"])
    links = [segment for segment in record["files"][0]["segments"] if segment[0] == "l"]
    assert links
    for _ in range(rng.randint(1, 3)):
        container, key = rng.choice(places(rng.choice(links) if rng.random() < 0.8 else record))
        container[key] = copy.deepcopy(rng.choice(VALUES))
    aprfmt.save_file(tensors, tmp_path / "m.apr", metadata | {"aprfmt.source": record})
    failure: aprfmt.AprError | None = None
    try:
        aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf")
    except aprfmt.AprError as error:
        failure = error
    if failure is not None:
        assert failure.path
        assert not (tmp_path / "m.gguf").exists()
    else:
        with aprfmt.open(tmp_path / "m.gguf") as model:
            assert model.tensors
