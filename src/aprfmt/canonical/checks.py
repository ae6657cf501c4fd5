"""Checks a canonical model before it is written: config, tensor names and shapes, vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aprfmt.arch import mlx, names
from aprfmt.arch.converter import check_layers
from aprfmt.arch.grammar import FIELD_OF_SIZE
from aprfmt.arch.hparams import missing_sizes
from aprfmt.arch.row import Architecture
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.canonical.detection import config_of, find_row, hparams_as
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.model_kinds import looks_like_adapter
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.errors import RefusedError
from aprfmt.formats import hf_modules, hfdir
from aprfmt.model import Model


def require_config(model: Model, allow_no_config: bool, arch: str | None = None) -> None:
    """Refuses weights without a config.json unless the user allows it."""
    if allow_no_config or model.convention != "hf" or model.hparams.hidden_size is not None:
        return
    row = find_row(model, arch)
    hparams = hparams_as(model, row)
    if hparams.hidden_size is not None or looks_like_adapter(model):
        return  # an adapter's config describes the base model's
    if config_of(model):
        keys = missing_sizes(hparams, row).values() if row is not None else ()
        raise RefusedError(
            f"config.json lacks {', '.join(keys or ['hidden_size'])}",
            path=model.path,
            hint="use the config.json that the model was saved with, or add transformers' defaults to it: python -c "
            "\"from transformers import AutoConfig; AutoConfig.from_pretrained('DIR').save_pretrained('DIR')\"",
        )
    raise RefusedError(
        "no config.json found next to the weights: dimensions and architecture are unknown",
        path=model.path,
        hint="put the model's config.json there, or import with --allow-no-config --arch NAME",
    )


def with_dims_of_tensors(c: Canonical) -> Canonical:
    """`c` with dimensions inferred from tensor shapes, if config.json is missing."""
    if not c.tensors or c.model.convention != "hf" or c.hparams.hidden_size is not None:
        return c
    row = c.arch or ARCHITECTURES["llama"]
    sizes = names.sizes_of_tensors(row, network_shapes(c))
    if "q" in sizes and sizes.get("heads"):
        sizes.setdefault("head_dim", sizes["q"] // sizes["heads"])
    if head_dim := sizes.get("head_dim"):
        heads = {"heads": sizes.get("q"), "kv_heads": sizes.get("kv")}
        sizes |= {word: rows // head_dim for word, rows in heads.items() if rows is not None}
    h = replace(c.hparams, extra=dict(c.hparams.extra))
    for word, field_name in FIELD_OF_SIZE.items():
        setattr(h, field_name, sizes.get(word))
    # None is unknown, which differs from transformers' default.
    own = names.dimension_words(row) - {*FIELD_OF_SIZE, "q", "kv"}
    h.extra |= {word: sizes.get(word) for word in own}
    check_layers(h)
    warning = "no config.json: dimensions are inferred from tensor shapes, rope and norm constants are unknown"
    return replace(c, hparams=h, warnings=(*c.warnings, warning))


def check_before_writing(c: Canonical, allow_unmapped: bool) -> list[str]:
    """Warnings about the tokenizer. Raises RefusedError, UnmappedError for a model that could not be loaded again."""
    if c.all_tensors and c.arch is not None:
        check_network(c, c.arch, allow_unmapped=allow_unmapped)
    for file, problem, tensor in hfdir.modules_problems(c.model):
        raise RefusedError(
            f"{file} {problem}",
            path=c.model.path,
            tensor=tensor,
            hint=f"download the repository again, or remove {hf_modules.MODULES_NAME} from the folder",
        )
    return check_vocabulary(c)


def check_network(c: Canonical, row: Architecture, *, allow_unmapped: bool = False) -> None:
    """Raises RefusedError, UnmappedError if the tensors do not match the network by name and shape."""
    shapes = network_shapes(c)
    if not allow_unmapped:
        found = [n for n in shapes if not names.is_gguf_only(row, n)]
        names.check_tensors(row, c.hparams, [*found, *mlx.dropped_tensors(row, c.hparams, c.model.tensors)])
    names.check_shapes(row, c.hparams, shapes | shapes_after_links(c.tensors))


def shapes_after_links(tensors: Mapping[str, CanonicalTensor]) -> dict[str, tuple[int, ...]]:
    """The shapes in a checkpoint of tensors kept under GGUF names, by Hugging Face name."""
    found = {id(t.link): t.link for t in tensors.values() if t.link is not None and t.name not in t.link.hf}
    return {
        name: shape
        for link in found.values()
        if not link.row.pack  # a checkpoint has these as quantized parts
        for name, shape in zip(link.hf, link.mapping.before, strict=True)
    }


def network_shapes(c: Canonical) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the network's tensors; quantized weights with their dequantized shape."""
    shapes = {t.name: t.shape for t in c.tensors.values()}
    if c.packs.decoded or c.arch is None:
        return shapes
    kept = {name: shape for name, shape in shapes.items() if name not in c.packs.parts}
    own = (p for p in c.packs.weights if p.sources[0].name not in c.extras)
    found = kept | {names.canonical_name(c.arch, p.name) or p.name: p.shape for p in own}
    return mlx.checkpoint_shapes(c.arch, c.hparams, found) if c.model.convention != "gguf" else found


def check_vocabulary(c: Canonical) -> list[str]:
    """Warnings about the tokenizer of `c`.

    Its token list may be shorter than the embedding (export pads it); raises RefusedError if it is longer.
    """
    if c.tokenizer is None:
        missing = "no tokenizer: the output is not self-contained; add one with --tokenizer DIR"
        needed = c.tensors and not c.part and not (c.arch is not None and c.arch.no_vocabulary)
        return [missing] if needed else []
    warnings = list(c.tokenizer.notes)
    if c.tokenizer.model == "gpt2" and c.tokenizer.pre is None and c.tokenizer.pre_note:
        warnings.append(f"pre-tokenizer unknown: {c.tokenizer.pre_note}; an export to GGUF needs --pre NAME")
    embedding, size = c.tensors.get(c.embedding), c.hparams.vocab_size
    limit = f"but config.json has vocab_size {size}"
    if embedding is not None:
        size = embedding.shape[0]
        limit = f"but the embedding {size} rows"
    if size is not None and len(c.tokenizer.tokens) > size and not c.part:  # an adapter may add tokens
        raise RefusedError(
            f"the tokenizer has {len(c.tokenizer.tokens)} tokens, {limit}",
            path=c.model.path,
            tensor=c.embedding if embedding is not None else None,
            hint="the tokenizer belongs to another model: set the right one with --tokenizer DIR",
        )
    return warnings
