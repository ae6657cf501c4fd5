"""The modules of a model as a tree, built from tensor names; equal layers can be folded into one line."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from aprfmt import formats
from aprfmt.codecs.dtypes import n_elements
from aprfmt.errors import UsageError
from aprfmt.inspection.tensor_filter import chosen_tensors
from aprfmt.limits import MAX_TREE_DEPTH
from aprfmt.model import Model, Tensor
from aprfmt.types import PathLike

_LONGEST_NUMBER = 9


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A tensor, or a module with its children.

    A module with a single child is merged with it: `self_attn.rotary`.

    Attributes:
        name: the part of the name below the parent.
        path: the whole name.
        tensor: of a leaf; None for a module.
        children: of a module, numbers in order, the rest in file order.
        tensor_count, params, n_bytes: totals of the subtree.
        kind: the same number for nodes with equal structure: names, dtypes and shapes.
    """

    name: str
    path: str
    tensor: Tensor | None
    children: tuple[TreeNode, ...]
    tensor_count: int
    params: int
    n_bytes: int
    kind: int

    def to_json(self, depth: int = 0) -> dict[str, object]:
        """{name, path, type: "tensor" | "group", ...}; groups below `depth` levels (0: all) without children."""
        body: dict[str, object] = {"name": self.name, "path": self.path}
        if self.tensor is not None:
            body |= {"type": "tensor", "dtype": self.tensor.dtype, "shape": list(self.tensor.shape)}
            return body | {"params": self.params, "size_bytes": self.n_bytes}
        body |= {"type": "group", "tensor_count": self.tensor_count, "params": self.params, "total_size": self.n_bytes}
        return body if depth == 1 else body | {"children": [node.to_json(max(0, depth - 1)) for node in self.children]}


@dataclass(frozen=True, slots=True)
class TreeStep:
    """A node in a drawn tree, parents before children.

    Attributes:
        node: the first of several folded ones.
        label: its shown name: `0–31` for folded layers.
        times: number of folded nodes.
        parent: index of the parent among the steps, -1 at the top.
        is_last: whether no sibling follows.
        is_closed: whether it has children that are not drawn.
    """

    node: TreeNode
    label: str
    times: int
    parent: int
    is_last: bool
    is_closed: bool


@dataclass(frozen=True, slots=True)
class Tree:
    """The result of `tree`; `to_json` is the object of `apr tree --json`.

    Attributes:
        file: the path as given.
        format: the container, such as "GGUF v3".
        tensor_count: number of tensors in the file.
        matched: number of tensors that match the filter.
        depth: number of levels shown; 0: all.
        nodes: the top-level modules.
    """

    file: str
    format: str
    tensor_count: int
    matched: int
    depth: int
    nodes: tuple[TreeNode, ...]

    def to_json(self) -> dict[str, object]:
        """The keys of the JSON contract; nothing is folded."""
        return {
            "file": self.file,
            "format": self.format,
            "tensor_count": self.tensor_count,
            "matched": self.matched,
            "total_size": sum(node.n_bytes for node in self.nodes),
            "tree": [node.to_json(self.depth) for node in self.nodes],
        }

    def steps(self, *, fold: bool = True) -> list[TreeStep]:
        """All nodes to draw; with `fold`, numbered siblings with equal structure are combined."""
        found: list[TreeStep] = []
        self._walk(self.nodes, -1, 1, fold, found)
        return found

    def _walk(self, nodes: Sequence[TreeNode], parent: int, level: int, fold: bool, found: list[TreeStep]) -> None:
        views = list(_folded(nodes)) if fold else [(node.name, node, 1) for node in nodes]
        for i, (label, node, times) in enumerate(views):
            inner = list(_folded(node.children)) if fold else []
            if len(inner) == 1 and inner[0][2] > 1 and times == 1:  # `layers` with 32 equal ones is one line
                label, node, times = f"{label}.{inner[0][0]}", inner[0][1], inner[0][2]
            is_closed = level == self.depth and bool(node.children)
            found.append(TreeStep(node, label, times, parent, i == len(views) - 1, is_closed))
            if not is_closed:
                self._walk(node.children, len(found) - 1, level + 1, fold, found)


def tree(path: PathLike, *, depth: int = 0, filter: str | None = None) -> Tree:
    """Builds the module tree of the model at `path` from its tensor names.

    `depth` is the number of levels to show (0: all). `filter` keeps only matching tensors (a glob; without wildcards:
    names that contain it). Raises AprError if the file cannot be opened, UsageError for a negative depth.
    """
    if type(depth) is not int or depth < 0:
        raise UsageError(f"depth must be a number of levels, 0 or more, not {depth!r}")
    with formats.open_unchanged(path) as model:
        return tree_of(model, os.fspath(path), depth=depth, filter=filter)


def tree_of(model: Model, file: str, *, depth: int = 0, filter: str | None = None) -> Tree:
    """The module tree of an opened model; see `tree`."""
    entries, chosen = model.tensors.entries, chosen_tensors(model, filter)
    nodes = _nodes(chosen, 0, "", 1, {})
    return Tree(file, model.label, len(entries), len(chosen), depth, tuple(nodes))


_Kinds = dict[object, int]


def _nodes(tensors: Sequence[Tensor], start: int, prefix: str, level: int, kinds: _Kinds) -> list[TreeNode]:
    """The nodes of `tensors`, whose names all begin with `prefix`, of length `start`; `kinds` grows."""
    groups: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        end = tensor.name.find(".", start) if level < MAX_TREE_DEPTH else -1
        groups.setdefault(tensor.name[start : end if end >= 0 else None], []).append(tensor)
    names = list(groups)
    if all(map(_is_number, names)):
        names.sort(key=int)
    return [node for name in names for node in _of_name(name, groups[name], start, prefix, level, kinds)]


def _of_name(
    name: str, tensors: list[Tensor], start: int, prefix: str, level: int, kinds: _Kinds
) -> Iterator[TreeNode]:
    end = start + len(name)
    leaves = [_leaf(name, tensor, kinds) for tensor in tensors if len(tensor.name) == end]
    below = [tensor for tensor in tensors if len(tensor.name) > end]
    if not below:
        yield from leaves
        return
    path = prefix + name
    children = [*leaves, *_nodes(below, end + 1, f"{path}.", level + 1, kinds)]
    if len(children) == 1:
        only = children[0]
        yield _node(f"{name}.{only.name}", only.path, only.tensor, only.children, kinds)
        return
    yield _node(name, path, None, tuple(children), kinds)


def _leaf(name: str, tensor: Tensor, kinds: _Kinds) -> TreeNode:
    return _node(name, tensor.name, tensor, (), kinds)


def _node(name: str, path: str, tensor: Tensor | None, children: tuple[TreeNode, ...], kinds: _Kinds) -> TreeNode:
    form = (_rest(name), tensor and (tensor.dtype, tensor.shape), tuple((c.name, c.kind) for c in children))
    kind = kinds.setdefault(form, len(kinds))
    if tensor is not None:
        return TreeNode(name, path, tensor, (), 1, n_elements(tensor.shape), tensor.n_bytes, kind)
    count, params, n_bytes = (
        sum(getattr(child, key) for child in children) for key in ("tensor_count", "params", "n_bytes")
    )
    return TreeNode(name, path, None, children, count, params, n_bytes, kind)


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) <= _LONGEST_NUMBER


def _rest(name: str) -> str:
    """The rest of `name` after its leading number; "" for other names, which are compared by themselves."""
    number, dot, rest = name.partition(".")
    return dot + rest if _is_number(number) else ""


def _folded(nodes: Sequence[TreeNode]) -> Iterator[tuple[str, TreeNode, int]]:
    """(label, first node, number) of `nodes`, with numbered nodes of equal structure combined."""
    groups: dict[object, list[TreeNode]] = {}
    for i, node in enumerate(nodes):
        groups.setdefault(node.kind if _is_number(node.name.partition(".")[0]) else ("alone", i), []).append(node)
    for found in groups.values():
        if len(found) == 1:
            yield found[0].name, found[0], 1
            continue
        numbers = sorted(int(node.name.partition(".")[0]) for node in found)
        yield ranges(numbers) + _rest(found[0].name), found[0], len(found)


def ranges(numbers: Sequence[int], most: int = 6) -> str:
    """`0–3, 6, 9` for sorted numbers; behind `most` runs an ellipsis and the last number."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1][1:] = [n]
        else:
            runs.append([n])
    words = ["–".join(map(str, run)) for run in runs]
    return ", ".join(words if len(words) <= most else [*words[: most - 1], "…", words[-1]])
