"""Vocabulary trimming: the tokens that some texts use, with their rows of embedding and output head."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import cast

from aprfmt.arch.scopes import TOKEN_IDS
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.padded_vocabulary import ChosenRows, token_rows, token_tensors
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.errors import RefusedError
from aprfmt.tokenizer.trimming import closure, renumbered, trim
from aprfmt.types import Json


def trimmed_vocabulary(
    c: Canonical, used: Collection[int], folder: Mapping[str, bytes] | None = None
) -> tuple[Canonical, list[int], str]:
    """`c` with the tokens `used` and what they are made of; the kept ids in their new order, and how many those are.

    Args:
        c: the model.
        used: ids that texts have.
        folder: text files of its folder, of which the new tokenizer's files replace those that name ids.

    Raises:
        RefusedError: an unknown architecture, towers, a tokenizer without merges, tensors with tokens along another
            axis or with scales.
    """
    import numpy as np

    n_rows, path = token_rows(c, "trimmed"), c.model.path
    if c.tokenizer is None:
        raise RefusedError("the model has no tokenizer", path=path, hint="set it with --tokenizer DIR")
    if c.extras:
        raise RefusedError(
            "the model has extra tensors (towers, MTP layers), whose configs name tokens by id",
            path=path, tensor=next(iter(c.extras)), hint="extract the language model first, or use --no-mtp",
        )  # fmt: skip
    h = deepcopy(c.hparams)
    stated = [i for key in TOKEN_IDS if (i := getattr(h, key)) is not None]
    stated += [i for key, value in h.extra.items() if key.endswith("_token_id") for i in _ids(value)]
    kept = closure(c.tokenizer, {*used, *(i for i in stated if 0 <= i < len(c.tokenizer.tokens))})
    if kept[-1] >= n_rows:
        kept = kept[: int(np.searchsorted(kept, n_rows))]  # control tokens without a row
    new, rows = {old: i for i, old in enumerate(kept)}, np.array(kept, np.int64)
    tensors = dict(c.tensors)
    for name, tensor in token_tensors(c, n_rows, "trimmed").items():
        source = tensor.as_source()
        if tensor.scales or source.n_bytes % n_rows:
            raise RefusedError(
                f"{source.dtype} does not store rows one by one here", path=path, tensor=name,
                hint="convert to --dtype bf16 first",
            )  # fmt: skip
        tensors[name] = CanonicalTensor(name, (ChosenRows(source, len(rows), {}, rows),))
    h.vocab_size = len(kept)
    for key in TOKEN_IDS:
        i = getattr(h, key)
        setattr(h, key, None if i is None else new.get(i))
    h.extra |= renumbered({key: cast(Json, value) for key, value in h.extra.items()}, new)
    tokenizer = trim(c.tokenizer, kept, folder)
    said = f"{len(kept):,} of {n_rows:,} tokens kept, {n_rows - len(kept):,} dropped"
    return replace(c, hparams=h, tensors=tensors, tokenizer=tokenizer, is_whole=False, sidecar=None), kept, said


def _ids(value: object) -> list[int]:
    found = value if isinstance(value, list) else [value]
    return [i for i in found if type(i) is int and i >= 0]
