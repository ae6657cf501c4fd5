"""Depth, width and expert pruning and vocabulary trimming, as an edit during a conversion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from aprfmt.arch.grammar import sizes_of
from aprfmt.canonical.depth_pruning import check_layer, parse_layers, ranges, select_layers
from aprfmt.canonical.expert_pruning import most_salient, with_fewer_experts
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.trimmed_vocabulary import trimmed_vocabulary
from aprfmt.canonical.width_pruning import narrowed, parse_widths
from aprfmt.convert.api import convert
from aprfmt.convert.base_model import with_base_model
from aprfmt.convert.expert_rating import rate_experts
from aprfmt.convert.options import PruneCall, options_of
from aprfmt.convert.report import Report
from aprfmt.convert.source_manifest_writer import restorable
from aprfmt.convert.targets.hf import source_texts
from aprfmt.errors import RefusedError, RunError, UsageError
from aprfmt.formats import path_text
from aprfmt.formats.hf_files import generation_config
from aprfmt.schema import check_numbers, takes
from aprfmt.texts.encoding import HIDDEN, Encoder, Ids
from aprfmt.texts.records import ReadProgress, RecordReader, is_blank
from aprfmt.texts.sources import list_files
from aprfmt.types import paths_of

_DOCUMENTS = 256  # encoded at a time


@takes(PruneCall)
def prune_model(call: PruneCall) -> Report:
    """Drops layers or experts of the model `src`, narrows its layers or trims its vocabulary, and writes `dst`.

    The remaining layers are renumbered, and the number of layers and per-layer lists in config.json are updated; kept
    weights are unchanged. The model needs training afterwards. The output's provenance records the pruning. Layers may
    be a list of numbers, widths a mapping; other widths are unchanged. Of its experts, the `experts` most salient ones
    of each layer on the texts of `experts_from` are kept: saliency is the mean, over an expert's tokens, of router
    weight times norm of the output (REAP, arXiv 2510.13999), computed by the trainer's decoder in a process of its
    own; a plan does not compute it. A trimmed vocabulary has the tokens that the
    texts in `vocab_from` use, what their merges are made of, added tokens and bytes: these texts are encoded twice, and
    their tokens may change in their ids only.

    Args:
        src: the model.
        dst: the output file or folder.

    Raises:
        AprError: code "usage" if none or both of drop_layers and keep_layers are given, for unknown layers, if none or
            all layers would be kept, and for invalid widths; code "refused" for a layer whose role follows from its
            number (periodic patterns), for an MTP layer (use `no_mtp`), and for widths of networks other than plain
            attention with dense MLPs; for a model without experts, with groups of them or MTP layers; for a vocabulary
            without merges; code "unsupported" for experts of a family that the trainer does not compute; code
            "missing-dependency" for experts without torch; and as convert_model.
    """
    drop, keep, width = call.drop_layers, call.keep_layers, call.width
    texts = [Path(path_text(path, "vocab_from")) for path in paths_of(call.vocab_from)]
    rated = [Path(path_text(path, "experts_from")) for path in paths_of(call.experts_from)]
    check_numbers(experts=(call.experts, 1))
    if (call.experts is None) != (not rated):
        raise UsageError("use --experts and --experts-from together", hint="--experts 32 --experts-from texts/")
    list_files(rated, Counter())  # before a model runs
    others = width is None and call.experts is None and not texts
    if (drop is not None and keep is not None) or (drop is None and keep is None and others):
        raise UsageError(
            "use either --drop-layers or --keep-layers, or --width, --experts or --vocab-from",
            hint="--drop-layers 10-15,20, or --width ffn=1408, or --vocab-from texts/",
        )
    widths = parse_widths(width) if isinstance(width, str) else _checked(width or {})

    def edit(c: Canonical) -> tuple[Canonical, list[str]]:
        n_layers = c.hparams.num_layers or 0
        made, remarks, gone = c, list[str](), list[int]()
        experts = ""
        if call.experts is not None:
            made, experts, remarks = _with_experts(made, call.experts, rated, plan=call.plan)
        if drop is not None or keep is not None:
            named = _numbers(drop if drop is not None else keep, n_layers)
            for layer in named:
                check_layer(c, layer)
            kept = [layer for layer in range(n_layers) if (layer in named) == (drop is None)]
            if not kept or len(kept) == n_layers:
                what = f"cannot drop all {n_layers} layers" if not kept else f"this drops none of the {n_layers} layers"
                raise UsageError(what, path=c.model.path)
            made = select_layers([made], [(0, layer) for layer in kept])
            gone = sorted(set(range(n_layers)) - set(kept))
            remarks.append(f"{_layers(gone, n_layers)} dropped: train the model to recover its quality")
        notes = [f"Kept in each layer: {experts}."] if experts else []
        notes += [f"Dropped from the base model: {_layers(gone, n_layers)}."] if gone else []
        if widths:
            made, more = narrowed(made, widths)
            sizes = sizes_of(c.hparams)
            words = ", ".join(f"{number} of {sizes[name]} {name}" for name, number in widths.items())
            remarks += [f"{words} kept: train the model to recover its quality", *more]
            notes.append(f"Kept of the base model's widths: {words}.")
        if texts:
            made, said = _trimmed(made, source_texts(c, restorable(c, "hf")), texts)
            remarks.append(said)
            notes.append(f"Vocabulary: {said}.")
        return with_base_model(made, " ".join(notes), "pruned"), remarks

    return convert(call.src, call.dst, options_of(call), edit, inputs=[*texts, *rated])


def _with_experts(c: Canonical, n: int, texts: Sequence[Path], *, plan: bool) -> tuple[Canonical, str, list[str]]:
    """`c` with its `n` most salient experts in each layer, what was kept, and what was dropped."""
    made, kept = with_fewer_experts(c, n)
    n_experts = c.hparams.num_experts or 0
    what = f"{n} of {n_experts} experts"
    if plan:
        return made, what, [f"{what} of each layer kept: those most salient on the texts"]
    saliency, tokens = rate_experts(c, texts)
    kept.of_layer = most_salient(saliency, n)
    gone = {layer: {*range(n_experts)} - {*those} for layer, those in enumerate(kept.of_layer) if those}
    listed = "; ".join(f"layer {layer}: {ranges(sorted(those))}" for layer, those in gone.items())
    said = f"{what} of each layer kept, by router weights and outputs on {tokens:,} tokens"
    return made, what, [f"{said}: train the model to recover its quality", f"experts dropped: {listed}"]


def _trimmed(c: Canonical, folder: Mapping[str, bytes], paths: Sequence[Path]) -> tuple[Canonical, str]:
    """`c` with the vocabulary of some texts, and what was kept.

    Raises RunError if their tokens change, CorruptError for a damaged generation_config.json.
    """
    import numpy as np

    generated = generation_config(folder, str(c.model.path))
    encoder, used = Encoder(c.tokenizer), np.zeros(0, np.uint32)
    for ids in _encoded(paths, encoder):
        used = np.union1d(used, ids)
    if not len(used):
        raise RefusedError("the texts of --vocab-from have no tokens", path=paths[0], hint="add text")
    made, kept, said = trimmed_vocabulary(c, {*used.tolist()}, folder, generated)
    new = np.zeros(encoder.n_ids, np.uint32)
    new[kept] = np.arange(len(kept), dtype=np.uint32)
    n = 0
    for before, after in zip(_encoded(paths, encoder), _encoded(paths, Encoder(made.tokenizer)), strict=True):
        n += len(before)
        if not np.array_equal(new[before], after):
            raise RunError(
                "the trimmed tokenizer encodes the texts differently; nothing was written",
                hint="report it with the tokenizer's files: its merges do not tell how its tokens are made",
            )
    return made, f"{said}; the {n:,} tokens of the texts are unchanged except for their ids"


def _encoded(paths: Sequence[Path], encoder: Encoder) -> Iterator[Ids]:
    """The ids of the texts, some documents at a time."""
    import numpy as np

    reader = RecordReader(separator=encoder.separator, render=encoder.render)
    files = list_files(paths, Counter())
    progress = ReadProgress(sum(file.size for file in files), lambda line: None)
    documents = (document for file in files for document in progress.documents(file, reader) if not is_blank(document))
    while some := list(islice(documents, _DOCUMENTS)):
        yield np.concatenate(encoder.encode(some)) & ~HIDDEN


def _numbers(value: object, n_layers: int) -> list[int]:
    if isinstance(value, str):
        return parse_layers(value, n_layers)
    items = list(value) if isinstance(value, Sequence) else [None]
    if not items or any(type(item) is not int for item in items):
        raise UsageError(f"layers must be numbers or a string such as '10-15,20', not {value!r:.60}")
    return sorted({item for item in items if type(item) is int})


def _checked(widths: object) -> dict[str, int]:
    if not isinstance(widths, Mapping) or any(type(number) is not int for number in widths.values()):
        raise UsageError(f"width must be a string such as 'hidden=512,heads=8' or a mapping, not {widths!r:.60}")
    return parse_widths(",".join(f"{name}={number}" for name, number in widths.items())) if widths else {}


def _layers(gone: list[int], n_layers: int) -> str:
    """`layer 3 of 30`, `layers 3-5 of 30`."""
    return f"layer {gone[0]} of {n_layers}" if len(gone) == 1 else f"layers {ranges(gone)} of {n_layers}"
