"""Outputs other than next-token logits: classes, scores, embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aprfmt.arch.heads import head_of
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.light_dataclass import light_dataclass
from aprfmt.model import Model

_MAX_LABELS = 64


@light_dataclass(frozen=True, slots=True)
class HeadInfo:
    """The head of a network, and pooling.

    Attributes:
        task: purpose of the head ("token classification"); None for an output head, and for a headless network.
        labels: names of the head's outputs, at most 64; [] without names.
        n_labels: their number; None if unknown.
        pooling: pooling type of a text embedding ("mean", "rank": a score); None if not stated.
        dense: input and output widths of each layer after pooling.
        modules: classes of further modules of a sentence-transformers folder.
    """

    task: str | None
    labels: Sequence[str]
    n_labels: int | None
    pooling: str | None
    dense: Sequence[tuple[int, int]]
    modules: Sequence[str]


def head_info(model: Model) -> HeadInfo | None:
    """The head of `model`; None for a language model, and for a network that outputs hidden states only."""
    h = model.hparams
    head, extra = head_of(h.hf_architecture or _class_of(model)), h.extra
    labels = list(_labels(extra.get("id2label"))) if head is not None else []
    n_labels = extra.get("num_labels") or len(labels) or None
    pooling = extra.get("pooling") or (extra.get("classifier_pooling") if head is not None else None)
    dense = [(a, b) for n in range(1, 10) for a, b in [_sizes(h, n)] if a is not None and b is not None]
    others = extra.get("other_modules")
    modules = [str(name) for name in others] if isinstance(others, list) else []
    if head is None and not (isinstance(pooling, str) or dense or modules):
        return None
    return HeadInfo(
        task=head.task if head is not None else None,
        labels=labels[:_MAX_LABELS],
        n_labels=n_labels if type(n_labels) is int and head is not None else None,
        pooling=pooling if isinstance(pooling, str) else None,
        dense=dense,
        modules=modules,
    )


def _class_of(model: Model) -> str | None:
    """The class of a GGUF's network, from its tensors."""
    from aprfmt.arch.table import row_of

    if model.convention != "gguf":
        return None
    row = row_of(model.hparams, kv=model.metadata, tensor_names=model.tensors)
    return row.hf_class if row is not None else None


def _labels(value: object) -> Sequence[str]:
    if not isinstance(value, Mapping):
        return []
    return [str(value[key]) for key in sorted(value, key=lambda key: str(key).zfill(9))]


def _sizes(h: Hyperparams, n: int) -> tuple[int | None, int | None]:
    a, b = (h.extra.get(f"dense_{n}_{side}") for side in ("in", "out"))
    return (a if type(a) is int else None), (b if type(b) is int else None)
