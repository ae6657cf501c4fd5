"""Edits the metadata of an `.apr`: provenance, single keys, the tokenizer. Tensor bytes stay as they are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from aprfmt import formats
from aprfmt.arch.hparams import EXTRA_KEY
from aprfmt.canonical.checks import check_vocabulary, read_tokenizer
from aprfmt.canonical.model import canonical
from aprfmt.convert.targets.apr import HAS_VOCAB
from aprfmt.errors import RefusedError, UnsupportedError, UsageError
from aprfmt.formats import apr2, apr2_write, apr_metadata
from aprfmt.formats.apr_metadata import SOURCE_KEY
from aprfmt.formats.apr_shards import JoinedNative
from aprfmt.io.segments import FileLayout, Segment
from aprfmt.io.sink import check_target
from aprfmt.io.write import WriteOptions, write_file
from aprfmt.model import Model
from aprfmt.provenance import provenance
from aprfmt.tokenizer import apr as tokenizer_apr
from aprfmt.types import PathLike

_LISTS = ("tokenizer.vocabulary", "tokenizer.merges", "tokenizer.token_type", "tokenizer.scores")
_TOKEN_IDS = ("tokenizer.bos_token_id", "tokenizer.eos_token_id")


def stamp_file(
    src: PathLike,
    dst: PathLike | None = None,
    *,
    license: str | None = None,
    data_source: str | None = None,
    data_license: str | None = None,
    hf_architecture: str | None = None,
    hf_model_type: str | None = None,
    architecture: str | None = None,
    set: Mapping[str, Any] | None = None,
    tokenizer: PathLike | None = None,
    in_place: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Writes `src` again as `dst` (or over itself with `in_place`) with edited metadata.

    `set` takes any metadata key; a value of None removes the key. Returns source, output, input_bytes,
    output_bytes, tensor_count, stamped. Raises UsageError for an empty patch or a licence that is no SPDX id,
    UnsupportedError for other formats.
    """
    given = {
        "license": license,
        "data_source": data_source,
        "data_license": data_license,
        "hf_architecture": hf_architecture,
        "hf_model_type": hf_model_type,
        "architecture": architecture,
    }
    patch: dict[str, Any] = {key: value for key, value in given.items() if value is not None} | dict(
        set or {}
    )
    # However a licence is given, it is checked and spelled as SPDX does.
    patch |= provenance.from_flags(
        {key: patch[key] for key in provenance.FLAGS if isinstance(patch.get(key), str)}
    )
    if not patch and tokenizer is None:
        raise UsageError(
            "nothing to stamp", hint="give --license, --data-source, --set SOURCE_KEY=JSON or --tokenizer DIR"
        )
    own = next((key for key in patch if key.startswith("aprfmt.")), None)
    if own is not None:
        raise UsageError(f"{own!r} records how the file was made and cannot be set by hand")
    if dst is None and not in_place:
        raise UsageError("no output", hint="name one with -o, or edit the file itself with --in-place")
    with formats.open(src) as model:
        native = apr2.native_of(model)
        if native is None:
            raise UnsupportedError(
                f"stamp edits APR v2 files; the file is of another kind ({model.label})",
                path=model.path,
                hint="apr import it first",
            )
        if in_place and isinstance(native, JoinedNative):
            raise RefusedError(
                "the model is in several files, which are not edited in place",
                path=model.path,
                hint="write one file with -o, then apr shard it again",
            )
        target = os.fspath(model.path if in_place or dst is None else dst)
        if not in_place:
            check_target(target, [str(model.path), *(source.path for source in model.sources)], force)
        layout = FileLayout(
            os.path.basename(target), _segments(model, native.flags, patch, tokenizer), crc_footer=True
        )
        write_file(target, layout, WriteOptions(force or in_place))
        return {
            "source": os.fspath(src),
            "output": target,
            "input_bytes": model.size_bytes,
            "output_bytes": layout.n_bytes,
            "tensor_count": len(model.tensors.entries),
            "stamped": patch | ({"tokenizer": os.fspath(tokenizer)} if tokenizer is not None else {}),
        }


def _segments(
    model: Model, flags: int, patch: Mapping[str, Any], tokenizer: PathLike | None
) -> list[Segment]:
    values = dict(model.metadata)
    if tokenizer is not None:
        values = _with_tokenizer(model, values, Path(tokenizer))
        flags |= HAS_VOCAB
    if _outdates_record(values, patch):
        values.pop(SOURCE_KEY, None)
    values = _edited(values, patch)
    if "license" in patch:
        values |= provenance.to_metadata(provenance.without_license(values.get(provenance.GENERAL)))
    text = apr_metadata.dump(values)
    apr_metadata.parse(text)  # a typed field of the wrong type is refused here, before anything is written
    return apr2_write.layout_from_model(model, text, flags)


def _outdates_record(values: Mapping[str, Any], patch: Mapping[str, Any]) -> bool:
    """Whether the record of the source files would give the old tokenizer back.

    That of a GGUF refers to the lists only; its other keys follow the metadata on export.
    """
    record = values.get(SOURCE_KEY)
    of_gguf = isinstance(record, Mapping) and record.get("format") == "gguf"
    return any(key in _LISTS if of_gguf else key.startswith("tokenizer.") for key in patch)


def _edited(values: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    removed = {key for key, value in patch.items() if value is None}
    edits = apr_metadata.canonicalize_aliases({k: v for k, v in patch.items() if v is not None})
    kept = {key: value for key, value in values.items() if key not in removed}
    out = apr_metadata.canonicalize_aliases(kept) | edits
    # The network's ids have one more place, which exports read first.
    own = out.get(EXTRA_KEY)
    ids = {key.removeprefix("tokenizer."): key for key in _TOKEN_IDS if key in patch}
    if isinstance(own, Mapping) and EXTRA_KEY not in patch and ids:
        out[EXTRA_KEY] = {k: v for k, v in own.items() if k not in ids} | {
            name: patch[key] for name, key in ids.items() if patch[key] is not None
        }
    return out


def _with_tokenizer(model: Model, values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`values` with the tokenizer replaced; the record of the source files goes, since it names the old lists."""
    new = read_tokenizer(folder)
    check_vocabulary(replace(canonical(model, allow_unmapped=True), tokenizer=new))
    kept = {
        k: v
        for k, v in values.items()
        if not k.startswith("tokenizer.") and k not in (SOURCE_KEY, "aprfmt.tokenizer")
    }
    return kept | tokenizer_apr.to_metadata(new)
