"""Vocabulary trimming: the tokens that some texts use, with their rows of embedding and output head."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import cast

from aprfmt.arch.scopes import TOKEN_IDS
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.padded_vocabulary import ChosenRows, replaceable_tokenizer, row_source, token_rows, token_tensors
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.tokenizer.trimming import closure, renumbered, trim
from aprfmt.types import Json


def trimmed_vocabulary(
    c: Canonical,
    used: Collection[int],
    folder: Mapping[str, bytes] | None = None,
    generated: Mapping[str, Json] | None = None,
) -> tuple[Canonical, list[int], str]:
    """`c` with the tokens `used` and what they are made of; the kept ids in their new order, and how many those are.

    Args:
        c: the model.
        used: ids that texts have.
        folder: text files of its folder, of which the new tokenizer's files replace those that name ids.
        generated: the generation_config.json among them.

    Raises:
        RefusedError: an unknown architecture, towers, a tokenizer without merges, tensors with tokens along another
            axis or with scales.
    """
    import numpy as np

    n_rows, tokenizer = token_rows(c, "trimmed"), replaceable_tokenizer(c)
    h = deepcopy(c.hparams)
    stated = [i for key in TOKEN_IDS if (i := getattr(h, key)) is not None]
    stated += [i for key, value in h.extra.items() if key.endswith("_token_id") for i in _ids(value)]
    kept = closure(tokenizer, {*used, *(i for i in stated if 0 <= i < len(tokenizer.tokens))})
    if kept[-1] >= n_rows:
        kept = kept[: int(np.searchsorted(kept, n_rows))]  # control tokens without a row
    new, rows = {old: i for i, old in enumerate(kept)}, np.array(kept, np.int64)
    tensors = dict(c.tensors)
    for name, tensor in token_tensors(c, n_rows, "trimmed").items():
        source = row_source(c, tensor, n_rows)
        tensors[name] = CanonicalTensor(name, (ChosenRows(source, len(rows), {}, rows),))
    h.vocab_size = len(kept)
    for key in TOKEN_IDS:
        i = getattr(h, key)
        setattr(h, key, None if i is None else new.get(i))
    h.extra |= renumbered({key: cast(Json, value) for key, value in h.extra.items()}, new)
    tokenizer = trim(tokenizer, kept, folder, generated)
    said = f"{len(kept):,} of {n_rows:,} tokens kept, {n_rows - len(kept):,} dropped"
    return replace(c, hparams=h, tensors=tensors, tokenizer=tokenizer, is_whole=False, sidecar=None), kept, said


def _ids(value: object) -> list[int]:
    found = value if isinstance(value, list) else [value]
    return [i for i in found if type(i) is int and i >= 0]
