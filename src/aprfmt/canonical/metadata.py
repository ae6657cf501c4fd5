"""The metadata of an `.apr` for a canonical model."""

from __future__ import annotations

from collections.abc import Mapping

from aprfmt.arch import hparams as hp
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.table import lookup
from aprfmt.canonical.detection import PART_KEY, ROW_KEY, UNMAPPED_KEY, row_of_unknown
from aprfmt.canonical.model import ORIGINAL_FORMATS, Canonical
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.provenance import provenance
from aprfmt.tokenizer import apr as tokenizer_apr
from aprfmt.tokenizer.model import Tokenizer


def _is_unmapped(c: Canonical) -> bool:
    named = c.tensors and c.adapter is None and not c.part and c.arch is None
    return bool(named) and lookup(c.hparams.architecture or "") is not None


def apr_metadata_of(c: Canonical, tensors: list[OutTensor]) -> dict[str, object]:
    """The metadata of an `.apr` for `c`, without the source manifest."""
    further = {
        PART_KEY: c.part or None,
        UNMAPPED_KEY: _is_unmapped(c) or None,
        ROW_KEY: row.id if (row := row_of_unknown(c.hparams, c.arch)) is not None else None,
        **(c.adapter.to_metadata() if c.adapter is not None else {}),
        **(c.tower.to_metadata() if c.tower is not None else {}),
    }
    origin, n_bytes = provenance.Provenance(c.info, c.general), sum(t.n_bytes for t in tensors)
    kind = ORIGINAL_FORMATS.get(c.model.convention)
    return apr_metadata_with(c.hparams, c.tokenizer, origin, further, kind=kind, n_bytes=n_bytes, n_params=c.n_params)


def apr_metadata_with(
    h: Hyperparams,
    tokenizer: Tokenizer | None,
    origin: provenance.Provenance,
    further: Mapping[str, object],
    *,
    kind: str | None,
    n_bytes: int,
    n_params: int,
) -> dict[str, object]:
    """The metadata of an `.apr` whose tensors have this many bytes and elements.

    `kind` is the source's container. Fields of `further` that are None are left out.
    """
    metadata = {
        "model_type": h.hf_model_type or h.architecture or "", **origin.info, "original_format": kind,
        "total_size": n_bytes, "param_count": n_params, **hp.to_apr(h), **provenance.to_metadata(origin.general),
        **further, **(tokenizer_apr.to_metadata(tokenizer) if tokenizer is not None else {}),
    }  # fmt: skip
    return {key: value for key, value in metadata.items() if value is not None}
