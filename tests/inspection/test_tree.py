"""The tree of modules holds every tensor once, folds what is built alike and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo_model import build
from safetensors.numpy import save_file

import aprfmt
from aprfmt import RawTensor
from aprfmt.errors import UsageError
from aprfmt.inspection.tree import TreeNode, ranges
from aprfmt.limits import MAX_TREE_DEPTH


def save(path: Path, *names: str, **odd: tuple[int, ...]) -> Path:
    """An `.apr` of float32 vectors; `odd` gives the shapes of some."""
    tensors = {}
    for name in names:
        shape = odd.get(name.replace(".", "_"), (2,))
        tensors[name] = RawTensor("F32", shape, bytes(4 * int(np.prod(shape))))
    aprfmt.save_file(tensors, path, metadata={"model_type": "x"})
    return path


def leaves(nodes: Any) -> Iterator[TreeNode]:
    for node in nodes:
        if node.tensor is not None:
            yield node
        yield from leaves(node.children)


def labels(found: aprfmt.Tree, **options: bool) -> list[tuple[str, int]]:
    return [(step.label, step.times) for step in found.steps(**options)]


def test_every_tensor_is_a_leaf_and_totals_add_up(tmp_path: Path) -> None:
    names = ["a", "a.b", "a.b.c", "a..d", "b.", ".x", "l.0.w", "l.1.w", "l.1.v", "l.10.w", "l.2.w"]
    path = save(tmp_path / "m.apr", *names, l_2_w=(3, 4))
    found = aprfmt.tree(path)
    assert sorted(node.path for node in leaves(found.nodes)) == sorted(names)
    assert sum(node.params for node in found.nodes) == 2 * (len(names) - 1) + 12
    assert found.to_json()["total_size"] == 4 * (2 * (len(names) - 1) + 12)
    (layers,) = (node for node in found.nodes if node.name == "l")
    assert [node.name for node in layers.children] == ["0.w", "1", "2.w", "10.w"]


def test_layers_that_are_built_alike_are_folded(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.{part}" for i in range(12) for part in ("attn.q", "attn.k", "mlp.up")]
    found = aprfmt.tree(save(tmp_path / "m.apr", *names, "model.norm", model_layers_5_mlp_up=(3, 3)))
    assert labels(found) == [
        ("model", 1),
        ("layers", 1),
        ("0–4, 6–11", 11),
        ("attn", 1),
        ("k", 1),
        ("q", 1),
        ("mlp.up", 1),
        ("5", 1),
        ("attn", 1),
        ("k", 1),
        ("q", 1),
        ("mlp.up", 1),
        ("norm", 1),
    ]
    assert len(labels(found, fold=False)) == 2 + 12 * 5 + 1
    equal = aprfmt.tree(save(tmp_path / "e.apr", *names))
    assert labels(equal)[0] == ("model.layers.0–11", 12)
    alike = aprfmt.tree(save(tmp_path / "n.apr", *(f"w.{i}.weight" for i in range(3)), "w.3.bias"))
    assert labels(alike) == [("w", 1), ("0–2.weight", 3), ("3.bias", 1)]


def test_depth_and_filter(tmp_path: Path) -> None:
    path = save(tmp_path / "m.apr", "a.b.c", "a.b.d", "a.e", "f")
    found = aprfmt.tree(path, depth=1)
    assert [(step.label, step.is_closed) for step in found.steps()] == [("a", True), ("f", False)]
    body = json.loads(json.dumps(found.to_json()))
    assert body["tree"][0] == {
        "name": "a",
        "path": "a",
        "type": "group",
        "tensor_count": 3,
        "params": 6,
        "total_size": 24,
    }
    assert aprfmt.tree(path, filter="a.?").matched == 1
    assert [n.path for n in leaves(aprfmt.tree(path, filter=".b.").nodes)] == ["a.b.c", "a.b.d"]
    for bad in (-1, 1.5, True):
        with pytest.raises(UsageError):
            aprfmt.tree(path, depth=bad)  # type: ignore[arg-type]


def test_a_name_of_thousands_of_parts_is_cut_at_the_limit(tmp_path: Path) -> None:
    """Two names that differ at the very end, and each beginning of another: as many levels as the name has parts."""
    long = ".".join(["a"] * 30_000)
    names = [f"{long}.x", f"{long}.y", *(".".join(["b"] * n) for n in range(1, 400))]
    path = tmp_path / "m.safetensors"
    save_file({name: np.zeros(1, "f4") for name in names}, path)
    found = aprfmt.tree(path)
    assert sorted(node.path for node in leaves(found.nodes)) == sorted(names)

    def depth(nodes: tuple[TreeNode, ...]) -> int:
        return 1 + max((depth(node.children) for node in nodes), default=0) if nodes else 0

    assert depth(found.nodes) <= MAX_TREE_DEPTH
    assert json.loads(json.dumps(found.to_json()))["matched"] == len(names)


@pytest.mark.parametrize("glob", ["layers.1.*proj", "model.layers.1.self_attn.q_proj*", "blk.1.attn_q", "layers.1."])
def test_the_names_of_either_convention_choose_tensors(tmp_path: Path, glob: str) -> None:
    build(tmp_path / "m.gguf")
    aprfmt.convert_model(tmp_path / "m.gguf", tmp_path / "hf", format="hf")
    counts = [aprfmt.tensors(path, filter=glob).matched for path in (tmp_path / "m.gguf", tmp_path / "hf")]
    assert counts[0] == counts[1] > 0
    assert aprfmt.tree(tmp_path / "m.gguf", filter=glob).matched == counts[0]
    assert not aprfmt.tensors(tmp_path / "m.gguf", filter="layers.7.").tensors


def test_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0–2, 5, 7–8"
    assert ranges(range(0, 40, 2)) == "0, 2, 4, 6, 8, …, 38"
