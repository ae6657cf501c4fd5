"""The rows of the architecture table beside llama.cpp's loaders: a section of docs/architectures.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from aprfmt.arch.loaders import Loader, loader_of
from aprfmt.arch.row import ROPE, Architecture
from aprfmt.arch.table import ARCHITECTURES

_WHOLE = "n_embd_head == n_rot"


def written(row: Architecture) -> set[str]:
    """The keys of a GGUF that the row can write, without prefix; all of RoPE's where one key writes them."""
    own = {key.gguf for key in row.keys if key.gguf}
    if rotates(row):
        own |= {"rope.freq_base", "rope.dimension_sections", *(["rope.freq_base_swa"] if row.nested_rope else [])}
    return own


def rotates(row: Architecture) -> bool:
    """Whether the network has rotary embeddings."""
    return any(key.role == ROPE for key in row.keys)


def tensors(row: Architecture) -> set[str]:
    """The tensors that a GGUF of the row can have, without layers."""
    names = [*row.copies, *row.flat_norms, *(name for part in row.tensors for name in part.gguf)]
    return {name.replace(".{n}", "").replace("blk.0.", "blk.") for name in names}


def left(row: Architecture, loader: Loader) -> list[str]:
    """The optional keys of the loader's own that the row leaves to llama.cpp's default."""
    shared = ("rope.scaling.", "tokenizer.", "general.")
    return sorted(key for key in loader.own - loader.required - written(row) if not key.startswith(shared))


def unread(row: Architecture, loader: Loader) -> list[str]:
    """The tensors of checkpoints that the loader does not read."""
    return sorted(loader.unknown(tensors(row)))


_FACTS: tuple[tuple[str, Callable[[Architecture, Loader], object], str], ...] = (
    ("the loader reads optional keys that the row never writes", left,
     "llama.cpp's default; a field of the config class without a key carries no logits (tests/arch/test_keys.py)"),
    ("checkpoints have tensors that the loader does not read", unread,
     "an export of a model with one is refused"),
    ("the graph reads no rope factors", lambda row, loader: rotates(row) and not loader.rope_factors,
     "`llama3` and `longrope` are refused"),
    ("layers with a window are not stretched", lambda row, loader: loader.window_factor,
     "scaling of these layers is refused"),
    ("the graph does not scale scores by yarn's factor", lambda row, loader: rotates(row) and not loader.scales_scores,
     "scales that need it are refused"),
    ("the loader asserts that whole heads are rotated", lambda row, loader: _WHOLE in loader.asserts,
     "a rotated part of a head is refused"),
    ("full-attention layers rotate as many values as the first layer",
     lambda row, loader: loader.first_rotation and "rope.dimension_count_swa" in written(row),
     "a first layer with a window and another rotated part is refused"),
    ("the loader reads no epsilon of norms", lambda row, loader: not loader.reads_epsilon,
     "epsilons above 5e-5 are refused without `--allow-different`"),
    ("a projection is as wide as the hidden size", lambda row, loader: loader.square,
     "other numbers and widths of heads are refused"),
    ("the cache needs layers of both kinds", lambda row, loader: loader.memory in ("hybrid", "windowed"),
     "layers of one kind only are refused where the cache cannot be empty"),
)  # fmt: skip
"""(what differs, whether it does for a row, what became of it)."""


def loader_lines() -> list[str]:
    """The section."""
    pairs = [(row, loader) for row in ARCHITECTURES.values() if (loader := loader_of(row.gguf)) is not None]
    loaders, apart = {row.gguf for row, _ in pairs}, len(ARCHITECTURES) - len(pairs)
    return [
        "## llama.cpp's loaders",
        "",
        f"{len(pairs)} rows are compared with the {len(loaders)} loaders of llama.cpp that read their GGUFs; {apart}",
        "have none. `tools/loaders.py` takes from llama.cpp's source which keys and tensors a loader reads and what",
        "its graph computes. A GGUF has every key and tensor that its loader requires (tests/arch/test_gguf_keys.py,",
        "tests/arch/test_loaders.py).",
        "",
        "| Difference | Rows | What became of it |",
        "|---|---:|---|",
        *(f"| {what} | {sum(bool(differs(*pair)) for pair in pairs)} | {became} |" for what, differs, became in _FACTS),
        "",
        "By row: keys that are left to llama.cpp's default, and tensors whose export is refused.",
        "",
        "| Row | Loader | Keys | Tensors |",
        "|---|---|---|---|",
        *(line for pair in pairs for line in _by_row(*pair)),
        "",
    ]


def _by_row(row: Architecture, loader: Loader) -> Iterator[str]:
    keys, names = left(row, loader), unread(row, loader)
    if keys or names:
        yield f"| {row.id} | {row.gguf} | {_listed(keys)} | {_listed(names)} |"


def _listed(names: list[str]) -> str:
    return " ".join(f"`{name}`" for name in names)
