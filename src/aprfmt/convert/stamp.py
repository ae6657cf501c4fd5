"""Edits the metadata of an `.apr`: provenance, single keys, the tokenizer. Tensor bytes stay as they are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aprfmt import formats
from aprfmt.convert.canonical import canonical
from aprfmt.convert.checks import check_vocabulary, read_tokenizer
from aprfmt.convert.recipe import KEY
from aprfmt.convert.run import write_file
from aprfmt.convert.to_apr import HAS_VOCAB
from aprfmt.errors import UnsupportedError, UsageError
from aprfmt.formats import apr2_write, apr_metadata
from aprfmt.io.segments import FileLayout
from aprfmt.io.sink import check_target
from aprfmt.model import Model
from aprfmt.tokenizer import apr as tokenizer_apr


def stamp_file(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str] | None = None,
    *,
    license: str | None = None,
    data_source: str | None = None,
    data_license: str | None = None,
    hf_architecture: str | None = None,
    hf_model_type: str | None = None,
    architecture: str | None = None,
    set: Mapping[str, Any] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    in_place: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Writes `src` again as `dst` (or over itself with `in_place`) with edited metadata.

    `set` takes any metadata key; a value of None removes the key. Returns source, output, input_bytes,
    output_bytes, tensor_count, stamped. Raises UsageError for an empty patch, UnsupportedError for other formats.
    """
    fields = {
        "license": license,
        "data_source": data_source,
        "data_license": data_license,
        "hf_architecture": hf_architecture,
        "hf_model_type": hf_model_type,
        "architecture": architecture,
    }
    patch: dict[str, Any] = {key: value for key, value in fields.items() if value is not None} | dict(
        set or {}
    )
    if not patch and tokenizer is None:
        raise UsageError(
            "nothing to stamp", hint="give --license, --data-source, --set KEY=JSON or --tokenizer DIR"
        )
    if dst is None and not in_place:
        raise UsageError("no output", hint="name one with -o, or edit the file itself with --in-place")
    with formats.open(src) as model:
        if model.format != "apr-v2":
            raise UnsupportedError(
                f"stamp edits APR v2 files, this is {model.label}",
                path=model.path,
                hint="apr import it first",
            )
        target = os.fspath(model.path if in_place or dst is None else dst)
        if not in_place:
            check_target(target, [str(model.path)], force)
        layout = FileLayout(os.path.basename(target), _segments(model, patch, tokenizer), crc_footer=True)
        write_file(target, layout, force=force or in_place, progress=None)
        return {
            "source": os.fspath(src),
            "output": target,
            "input_bytes": model.size_bytes,
            "output_bytes": layout.n_bytes,
            "tensor_count": len(model.tensors.entries),
            "stamped": patch | ({"tokenizer": os.fspath(tokenizer)} if tokenizer is not None else {}),
        }


def _segments(model: Model, patch: Mapping[str, Any], tokenizer: str | os.PathLike[str] | None) -> Any:
    values = dict(model.metadata)
    flags = model.native.flags
    if tokenizer is not None:
        values = _with_tokenizer(model, values, Path(tokenizer))
        flags |= HAS_VOCAB
    if any(key.startswith("tokenizer.") for key in patch):
        values.pop(KEY, None)
    for key, value in patch.items():
        if value is None:
            values.pop(key, None)
        else:
            values[key] = value
    text = apr_metadata.dump(values)
    apr_metadata.parse(text)  # a typed field of the wrong type is refused here, before anything is written
    return apr2_write.layout_from_model(model, text, flags)


def _with_tokenizer(model: Model, values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`values` with the tokenizer replaced; the record of the source files goes, since it names the old lists."""
    c = canonical(model, allow_unmapped=True)
    c.tokenizer = read_tokenizer(folder, c)
    check_vocabulary(c)
    kept = {
        k: v
        for k, v in values.items()
        if not k.startswith("tokenizer.") and k not in (KEY, "aprfmt.tokenizer")
    }
    return kept | tokenizer_apr.to_metadata(c.tokenizer)
