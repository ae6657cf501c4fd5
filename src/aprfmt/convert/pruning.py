"""Depth and width pruning, as an edit during a conversion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from aprfmt.arch.grammar import sizes_of
from aprfmt.canonical.depth_pruning import check_layer, parse_layers, ranges, select_layers
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.width_pruning import narrowed, parse_widths
from aprfmt.convert.api import convert
from aprfmt.convert.options import PruneCall, options_of
from aprfmt.convert.report import Report
from aprfmt.errors import UsageError
from aprfmt.provenance.model_card import entries
from aprfmt.schema import takes


@takes(PruneCall)
def prune_model(call: PruneCall) -> Report:
    """Drops layers of the model `src`, or narrows them, and writes `dst` in any output format.

    The remaining layers are renumbered, and the number of layers and per-layer lists in config.json are updated; kept
    weights are unchanged. The model needs training afterwards. The output's provenance records the pruning. Layers may
    be a list of numbers, widths a mapping; other widths are unchanged.

    Args:
        src: the model.
        dst: the output file or folder.

    Raises:
        AprError: code "usage" if none or both of drop_layers and keep_layers are given, for unknown layers, if none or
            all layers would be kept, and for invalid widths; code "refused" for a layer whose role follows from its
            number (periodic patterns), for an MTP layer (use `no_mtp`), and for widths of networks other than plain
            attention with dense MLPs; and as convert_model.
    """
    drop, keep, width = call.drop_layers, call.keep_layers, call.width
    if (drop is not None and keep is not None) or (drop is None and keep is None and width is None):
        raise UsageError(
            "use either --drop-layers or --keep-layers, or --width", hint="--drop-layers 10-15,20, or --width ffn=1408"
        )
    widths = parse_widths(width) if isinstance(width, str) else _checked(width or {})

    def edit(c: Canonical) -> tuple[Canonical, list[str]]:
        n_layers = c.hparams.num_layers or 0
        made, remarks, gone = c, list[str](), list[int]()
        if drop is not None or keep is not None:
            named = _numbers(drop if drop is not None else keep, n_layers)
            for layer in named:
                check_layer(c, layer)
            kept = [layer for layer in range(n_layers) if (layer in named) == (drop is None)]
            if not kept or len(kept) == n_layers:
                what = f"cannot drop all {n_layers} layers" if not kept else f"this drops none of the {n_layers} layers"
                raise UsageError(what, path=c.model.path)
            made = select_layers([c], [(0, layer) for layer in kept])
            gone = sorted(set(range(n_layers)) - set(kept))
            remarks.append(f"{_layers(gone, n_layers)} dropped: train the model to recover its quality")
        notes = [f"Dropped from the base model: {_layers(gone, n_layers)}."] if gone else []
        if widths:
            made, more = narrowed(made, widths)
            sizes = sizes_of(c.hparams)
            words = ", ".join(f"{number} of {sizes[name]} {name}" for name, number in widths.items())
            remarks += [f"{words} kept: train the model to recover its quality", *more]
            notes.append(f"Kept of the base model's widths: {words}.")
        return _with_provenance(made, " ".join(notes)), remarks

    return convert(call.src, call.dst, options_of(call), edit)


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


def _with_provenance(c: Canonical, note: str) -> Canonical:
    """`c` with the source as its base model, and a `note` on the pruning."""
    general = dict(c.general or {})
    base = {name: value for name in ("author", "version", "organization", "repo_url") if (value := general.get(name))}
    base = {**({"name": c.info["name"]} if c.info.get("name") else {}), **base}
    if base:
        general["base_models"] = entries([base])
    tags = general.get("tags")
    general["tags"] = list(dict.fromkeys([*(tags if isinstance(tags, list) else []), "pruned"]))
    before = c.info.get("description")
    return replace(c, general=general, info=c.info | {"description": f"{before} {note}" if before else note})


def _layers(gone: list[int], n_layers: int) -> str:
    """`layer 3 of 30`, `layers 3-5 of 30`."""
    return f"layer {gone[0]} of {n_layers}" if len(gone) == 1 else f"layers {ranges(gone)} of {n_layers}"
