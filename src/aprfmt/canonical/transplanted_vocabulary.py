"""Another tokenizer for a model: the rows of its embedding and output head for the new vocabulary.

A token that both tokenizers have keeps its rows. The others are combinations of rows: with a donor, a model that was
trained with the new tokenizer, those of the shared tokens whose donor embeddings express the donor's embedding of the
token (orthogonal matching pursuit, Goddard and Fernandes Neto 2025, arXiv:2506.06607); without one, the mean of the
old tokens of its text.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

from aprfmt.arch.scopes import TOKEN_IDS
from aprfmt.canonical.combined_rows import CombinedRows, RowSums, row_values
from aprfmt.canonical.matching_pursuit import matching_pursuit
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.padded_vocabulary import replaceable_tokenizer, row_source, token_rows, token_tensors
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.codecs.recode import can_encode
from aprfmt.codecs.stream import TensorSource
from aprfmt.errors import RefusedError
from aprfmt.text import first_few, plural
from aprfmt.tokenizer import generation
from aprfmt.tokenizer.alignment import count_real, is_control, token_bytes
from aprfmt.tokenizer.counterparts import Counterparts, counterparts
from aprfmt.tokenizer.hf_write import to_hf_files
from aprfmt.tokenizer.model import Tokenizer
from aprfmt.tokenizer.trimming import dump, renumbered
from aprfmt.types import Array, Json

Sums: TypeAlias = dict[int, tuple[Array, Array]]
"""The old rows, int64, and their weights, float32, whose sum is each new row."""


@dataclass(frozen=True, slots=True)
class Donor:
    """A model with the new tokenizer, whose embeddings tell how new tokens relate to shared ones.

    Attributes:
        c: the model.
        k: number of shared tokens that express a new one, at most.
        solve: whether to compute them; otherwise they are only counted, for a plan.
    """

    c: Canonical
    k: int
    solve: bool


def transplanted_vocabulary(
    c: Canonical, new: Tokenizer, donor: Donor | None = None, generated: Mapping[str, Json] | None = None
) -> tuple[Canonical, list[str]]:
    """`c` with the tokenizer `new`, and what its rows are made of.

    Args:
        c: the model.
        new: the tokenizer.
        donor: a model whose tokenizer it is.
        generated: the model's generation_config.json, which gets the new ids.

    Raises:
        RefusedError: an unknown architecture, towers, no tokenizer, a tokenizer whose tokens are not bytes of a text,
            tensors with tokens along another axis or in a dtype that cannot be encoded row by row, tokenizers that
            share no token; a donor with another tokenizer.
    """
    n_rows, path = token_rows(c, "replaced"), c.model.path
    old = replaceable_tokenizer(c)
    found = counterparts(old, new, n_rows)
    if not found.same:
        raise RefusedError("the two tokenizers share no token", path=path)
    n_old, n_new = count_real(old, n_rows), count_real(new, len(new.tokens))
    n = n_rows if n_new == n_old else n_new
    same = found.same | {i: i for i in range(n_new, n)}  # padding
    tensors, embedding = dict(c.tensors), _means(found)
    head, n_solved = embedding, 0
    if donor is not None:
        _check_donor(donor.c, new, n_new)
        solved = _solved(donor, donor.c.embedding, new, found)
        n_solved, embedding = len(solved), embedding | solved
        own = donor.c.head in donor.c.tensors and c.head in c.tensors
        head = head | _solved(donor, donor.c.head, new, found) if own else embedding
    for name, tensor in token_tensors(c, n_rows, "replaced").items():
        source = row_source(c, tensor, n_rows)
        if len(same) < n and not can_encode(source.dtype):
            raise RefusedError(
                f"new rows cannot be encoded as {source.dtype}", path=path, tensor=name,
                hint="convert to --dtype bf16 first",
            )  # fmt: skip
        rows = CombinedRows(source, n, {}, _row_sums(n, same, head if name == c.head else embedding))
        tensors[name] = CanonicalTensor(name, (rows,))
    h, ids = deepcopy(c.hparams), {old_id: new_id for new_id, old_id in reversed(found.same.items())}
    h.vocab_size = n
    for key in TOKEN_IDS:
        setattr(h, key, new.special.get(key.removesuffix("_token_id")))
    h.extra |= _with_ids({key: cast(Json, value) for key, value in h.extra.items()}, ids, new)
    counts = {
        "copied": len(same),
        f"solved by at most {donor.k if donor is not None else 0} shared tokens of the donor": n_solved,
        "composed of the old tokens of their text": len(embedding) - n_solved,
        "set to zeros, which the old tokenizer cannot spell": n - len(same) - len(embedding),
    }
    made = ", ".join(f"{number:,} {what}" for what, number in counts.items() if number)
    remarks = [f"vocabulary of {n_old:,} tokens replaced by one of {n_new:,}; of {plural(n, 'row')}: {made}"]
    if found.control:
        remarks.append(f"new control tokens, which the model has not learned: {first_few(found.control)}")
    if old.chat_template is not None and new.chat_template is None:
        remarks.append("the chat template dropped: the new tokenizer has none")
    tokenizer = _with_generation(old, new, ids, generated)
    return replace(c, hparams=h, tensors=tensors, tokenizer=tokenizer, is_whole=False, sidecar=None), remarks


def _means(found: Counterparts) -> Sums:
    import numpy as np

    return {
        i: (np.array(pieces, np.int64), np.full(len(pieces), 1 / len(pieces), np.float32))
        for i, pieces in found.pieces.items()
    }


def _solved(donor: Donor, name: str, new: Tokenizer, found: Counterparts) -> Sums:
    """The new tokens by orthogonal matching pursuit in the donor's tensor `name`; not those that are zeros there."""
    import numpy as np

    source: TensorSource = donor.c.tensors[name].as_source()
    targets = np.array([*found.pieces], np.int64)
    if not donor.solve:
        return {i: (targets[:0], np.zeros(0, np.float32)) for i in found.pieces}
    shared = np.array([i for i in found.same if not is_control(new, i)], np.int64)
    index, weight = matching_pursuit(row_values(source, targets), row_values(source, shared), donor.k)
    old = np.array([*map(found.same.__getitem__, shared.tolist())], np.int64)
    pairs = zip(targets.tolist(), old[index], weight, strict=True)
    return {i: (ids[used], weights[used]) for i, ids, weights in pairs if (used := weights != 0).any()}


def _check_donor(donor: Canonical, new: Tokenizer, n: int) -> None:
    path, own = donor.model.path, replaceable_tokenizer(donor)
    rows = token_rows(donor, "used")
    row_source(donor, donor.tensors[donor.embedding], rows)
    if rows < n:
        raise RefusedError(f"the donor has {rows:,} rows for {n:,} tokens", path=path)
    different = (i for i in range(n) if i >= len(own.tokens) or token_bytes(own, i) != token_bytes(new, i))
    if (i := next(different, None)) is not None:
        theirs = repr(own.tokens[i]) if i < len(own.tokens) else "no token"
        raise RefusedError(
            f"the donor has another tokenizer: id {i} is {theirs}, not {new.tokens[i]!r}", path=path,
            hint="leave --tokenizer out to use the donor's",
        )  # fmt: skip


def _row_sums(n: int, same: Mapping[int, int], sums: Sums) -> RowSums:
    import numpy as np

    copied, counts = np.full(n, -1, np.int64), np.zeros(n, np.int64)
    copied[[*same]] = [*same.values()]
    each = sorted(sums.items())
    counts[[i for i, _ in each]] = [len(index) for _, (index, _) in each]
    index = np.concatenate([np.zeros(0, np.int64), *(index for _, (index, _) in each)])
    weight = np.concatenate([np.zeros(0, np.float32), *(weight for _, (_, weight) in each)])
    return RowSums(copied, np.concatenate([[0], counts.cumsum()]), index, weight)


def _with_ids(config: Mapping[str, Json], ids: Mapping[int, int], new: Tokenizer) -> dict[str, Json]:
    """A config with the new ids; a role whose old token the new tokenizer lacks gets its own."""
    made = renumbered(config, ids)
    for role in ("bos", "eos", "pad"):
        key = f"{role}_token_id"
        if config.get(key) is not None and made[key] in (None, []):
            made[key] = new.special.get(role)
    return made


def _with_generation(
    old: Tokenizer, new: Tokenizer, ids: Mapping[int, int], generated: Mapping[str, Json] | None
) -> Tokenizer:
    """The new tokenizer with the model's generation settings, in the new ids."""
    kind, suppressed = old.extra.get(generation.SUPPRESSED, ("", None))
    if isinstance(suppressed, list):
        new = replace(new, extra={**new.extra, generation.SUPPRESSED: (kind, [ids[i] for i in suppressed if i in ids])})
    if generated is None:
        return new
    return replace(
        new, files={**to_hf_files(new), generation.FILE_NAME: dump(_with_ids(generated, ids, new))}, shared=None
    )
