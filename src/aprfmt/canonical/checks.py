"""What must hold before a byte is written: dimensions known, tensors complete, a vocabulary that fits."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from aprfmt.arch import names
from aprfmt.canonical.model import Canonical
from aprfmt.errors import RefusedError
from aprfmt.formats import hf_files
from aprfmt.io.files import is_file, is_folder
from aprfmt.model import Model
from aprfmt.tokenizer import hf as tokenizer_hf
from aprfmt.tokenizer.model import Tokenizer

_FIRST = "model.layers.0."


def require_config(model: Model, allow_no_config: bool) -> None:
    """Refuses weights without a config.json, unless the user says that they go without."""
    if allow_no_config or model.convention != "hf" or model.hparams.hidden_size is not None:
        return
    raise RefusedError(
        "no config.json beside the weights: dimensions and architecture are unknown",
        path=model.path,
        hint="put the model's config.json there, or import with --allow-no-config --arch NAME",
    )


def with_dims_of_tensors(c: Canonical) -> Canonical:
    """`c` with the dimensions that its tensor shapes tell, where there is no config.json."""
    if not c.tensors or c.model.convention != "hf" or c.hparams.hidden_size is not None:
        return c
    h = replace(c.hparams)
    shapes = {t.name: t.shape for t in c.tensors.values()}
    layers = {int(m[1]) for name in shapes if (m := re.match(r"model\.layers\.(\d{1,6})\.", name))}
    h.num_layers = max(layers) + 1 if layers else None
    # Damaged shapes are left to check_shapes, which names them.
    if len(embedding := shapes.get(c.embedding, ())) == 2:
        h.vocab_size, h.hidden_size = embedding
    if len(gate := shapes.get(f"{_FIRST}mlp.gate_proj.weight", ())) == 2:
        h.intermediate_size = gate[0]
    norm, query, key = (
        shapes.get(f"{_FIRST}self_attn.{name}.weight", ()) for name in ("q_norm", "q_proj", "k_proj")
    )
    if len(norm) == 1 and norm[0] and query and key:
        h.head_dim, h.num_heads, h.num_kv_heads = norm[0], query[0] // norm[0], key[0] // norm[0]
    warning = (
        "no config.json: dimensions were taken from the tensor shapes, rope and norm constants are unknown"
    )
    return replace(c, hparams=h, warnings=(*c.warnings, warning))


def check_before_writing(c: Canonical, allow_unmapped: bool) -> list[str]:
    """Warnings about the tokenizer. Raises RefusedError, UnmappedError for a model that could not be loaded again."""
    if c.tensors and c.arch is not None:
        shapes = _shapes(c)
        if not allow_unmapped:
            names.check_tensors(c.arch, c.hparams, [n for n in shapes if n not in c.arch.gguf_only])
        names.check_shapes(c.arch, c.hparams, shapes)
    return check_vocabulary(c)


def _shapes(c: Canonical) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the network's tensors, packed weights as they are when decoded."""
    shapes = {t.name: t.shape for t in c.tensors.values()}
    if c.packs.decoded or c.arch is None:
        return shapes
    kept = {name: shape for name, shape in shapes.items() if name not in c.packs.parts}
    return kept | {names.canonical_name(c.arch, p.name) or p.name: p.shape for p in c.packs.weights}


def check_vocabulary(c: Canonical) -> list[str]:
    """Warnings about the tokenizer of `c`.

    Its token list may be shorter than the embedding (it is padded on export); RefusedError where it is longer.
    """
    if c.tokenizer is None:
        missing = "no tokenizer: the output is not self-contained; add one with --tokenizer DIR"
        return [missing] if c.tensors else []
    warnings = list(c.tokenizer.notes)
    if c.tokenizer.model == "gpt2" and c.tokenizer.pre is None and c.tokenizer.pre_note:
        warnings.append(
            f"pre-tokenizer unknown: {c.tokenizer.pre_note}; an export to GGUF will need --pre NAME"
        )
    embedding, size = c.tensors.get(c.embedding), c.hparams.vocab_size
    limit = f"config.json a vocab_size of {size}"
    if embedding is not None:
        size = embedding.shape[0]
        limit = f"the embedding {size} rows"
    if size is not None and len(c.tokenizer.tokens) > size:
        raise RefusedError(
            f"the tokenizer has {len(c.tokenizer.tokens)} tokens, {limit}",
            path=c.model.path,
            tensor=c.embedding if embedding is not None else None,
            hint="this tokenizer belongs to another model: give the right one with --tokenizer DIR",
        )
    return warnings


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a folder (or of one tokenizer.json). Raises NotFoundError, RefusedError, CorruptError."""
    if is_folder(path):
        config = path / "config.json"
        tokenizer = hf_files.load_tokenizer(path, hf_files.read_config(config) if is_file(config) else None)
    else:
        tokenizer = tokenizer_hf.read_files({"tokenizer.json": hf_files.read_text_file(path)}, None)
    if tokenizer is None:
        raise RefusedError(
            "no tokenizer in the folder",
            path=path,
            hint="it must hold tokenizer.json, tokenizer.model, vocab.txt, or vocab.json with merges.txt",
        )
    return tokenizer
