"""Edits the metadata of an `.apr`: provenance, single keys, the tokenizer. Tensor bytes stay as they are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from aprfmt import formats
from aprfmt.arch.hparams import EXTRA_KEY
from aprfmt.canonical.model import canonical, check_vocabulary, read_tokenizer
from aprfmt.convert.integrity import open_checked
from aprfmt.convert.recipe import holds_tokenizer, without_weights
from aprfmt.convert.targets.apr import HAS_VOCAB
from aprfmt.convert.targets.base import parse_flag
from aprfmt.errors import RefusedError, UnsupportedError, UsageError
from aprfmt.formats import apr2, apr2_write, apr_metadata
from aprfmt.formats.apr_metadata import SOURCE_KEY
from aprfmt.formats.apr_shards import JoinedNative
from aprfmt.io.pipe import FileLayout, Segment, WriteOptions, write_file
from aprfmt.io.sink import check_target
from aprfmt.model import Model
from aprfmt.provenance import provenance
from aprfmt.tokenizer import apr as tokenizer_apr
from aprfmt.types import PathLike

_LISTS = ("tokenizer.vocabulary", "tokenizer.merges", "tokenizer.token_type", "tokenizer.scores")
_TOKEN_IDS = ("tokenizer.bos_token_id", "tokenizer.eos_token_id")


@dataclass(frozen=True, slots=True)
class StampReport:
    """The result of stamp.

    Attributes:
        source, output: paths.
        input_bytes, output_bytes: sizes of all files read and written.
        tensor_count: tensors, all unchanged.
        stamped: what was set, None for what was removed.
        warnings: what the user should know of the file that was read, and of the tokenizer.
    """

    source: str
    output: str
    input_bytes: int
    output_bytes: int
    tensor_count: int
    stamped: dict[str, object]
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """The object of `apr stamp --json`."""
        return asdict(self)


def stamp(
    src: PathLike,
    dst: PathLike | None = None,
    *,
    license: str | None = None,
    data_source: str | None = None,
    data_license: str | None = None,
    hf_architecture: str | None = None,
    hf_model_type: str | None = None,
    architecture: str | None = None,
    set: Mapping[str, object] | None = None,
    tokenizer: PathLike | None = None,
    in_place: bool = False,
    force: bool = False,
) -> StampReport:
    """Writes `src` again as `dst` (or over itself with `in_place`) with edited metadata.

    Args:
        src, dst: the `.apr` files.
        license, data_source, data_license, hf_architecture, hf_model_type, architecture: the typed fields.
        set: any metadata key; a value of None removes the key.
        tokenizer: tokenizer files (a folder or a tokenizer.json) to put in.
        in_place: replace `src` itself, in one step.
        force: replace an existing output.

    Raises:
        UsageError: an empty patch, a value of the wrong kind, a licence that is not an SPDX id.
        UnsupportedError: `src` is in another format.
    """
    parse_flag("in_place", in_place)
    parse_flag("force", force)
    given = {
        "license": license,
        "data_source": data_source,
        "data_license": data_license,
        "hf_architecture": hf_architecture,
        "hf_model_type": hf_model_type,
        "architecture": architecture,
    }
    if set is not None and not isinstance(set, Mapping):
        raise UsageError(f"set must be a mapping of metadata keys, not {set!r:.80}")
    patch: dict[str, object] = {key: value for key, value in given.items() if value is not None} | dict(set or {})
    # However a licence is given, it is checked and spelled as SPDX does.
    patch |= provenance.from_flags({key: value for key in provenance.FLAGS if isinstance(value := patch.get(key), str)})
    if not patch and tokenizer is None:
        raise UsageError("nothing to stamp", hint="give --license, --data-source, --set KEY=JSON or --tokenizer DIR")
    own = next((key for key in patch if key.startswith("aprfmt.")), None)
    if own is not None:
        raise UsageError(f"{own!r} records how the file was made and cannot be set by hand")
    if dst is None and not in_place:
        raise UsageError("no output", hint="name one with -o, or edit the file itself with --in-place")
    with open_checked(src) as (model, confirm):
        native = apr2.native_of(model)
        if native is None:
            raise UnsupportedError(
                f"stamp edits APR v2 files; this is another kind of file ({model.label})",
                path=model.path,
                hint="apr import it first",
            )
        if in_place and isinstance(native, JoinedNative):
            raise RefusedError(
                "the model is in several files, which cannot be edited in place",
                path=model.path,
                hint="write one file with -o, then apr shard it again",
            )
        target = str(model.path) if in_place or dst is None else formats.path_text(dst, "dst")
        if not in_place:
            check_target(target, [str(model.path), *(source.path for source in model.sources)], force)
        warnings = list(model.warnings)
        segments = _segments(model, native.header.flags, patch, tokenizer, warnings)
        layout = FileLayout(os.path.basename(target), segments, crc_footer=True)
        write_file(target, layout, WriteOptions(force or in_place, confirm=confirm))
        done = patch if tokenizer is None else patch | {"tokenizer": os.fspath(tokenizer)}
        n_tensors = len(model.tensors.entries)
        return StampReport(os.fspath(src), target, model.size_bytes, layout.n_bytes, n_tensors, done, warnings)


def _segments(
    model: Model, flags: int, patch: Mapping[str, object], tokenizer: PathLike | None, warnings: list[str]
) -> list[Segment]:
    """The edited file; `warnings` takes what is odd about the new tokenizer."""
    values = dict(model.metadata)
    if tokenizer is not None:
        values = _with_tokenizer(model, values, Path(tokenizer), warnings)
        flags |= HAS_VOCAB
    if tokenizer is not None or _outdates_record(values, patch):
        values = _without_tokenizer_files(values)
    values = _apply_patch(values, patch)
    if "license" in patch:
        values |= provenance.to_metadata(provenance.without_license(values.get(provenance.GENERAL)))
    text = apr_metadata.dump(values)
    apr_metadata.parse(text)  # a typed field of the wrong type is refused here, before anything is written
    return apr2_write.layout_from_model(model, text, flags)


def _outdates_record(values: Mapping[str, object], patch: Mapping[str, object]) -> bool:
    """Whether the record of the source files would give the old tokenizer back.

    That of a GGUF refers to the lists only; its other keys follow the metadata on export.
    """
    record = values.get(SOURCE_KEY)
    of_gguf = isinstance(record, Mapping) and record.get("format") == "gguf"
    return any(key in _LISTS if of_gguf else key.startswith("tokenizer.") for key in patch)


def _without_tokenizer_files(values: Mapping[str, object]) -> dict[str, object]:
    """`values` with a record of the source files that has none of the weights and the tokenizer, or without any."""
    record = without_weights(values.get(SOURCE_KEY), lambda name: not holds_tokenizer(name))
    rest = {key: value for key, value in values.items() if key != SOURCE_KEY}
    return rest if record is None else rest | {SOURCE_KEY: record}


def _apply_patch(values: Mapping[str, object], patch: Mapping[str, object]) -> dict[str, object]:
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


def _with_tokenizer(model: Model, values: dict[str, object], folder: Path, warnings: list[str]) -> dict[str, object]:
    """`values` with the tokenizer replaced."""
    new = read_tokenizer(folder)
    warnings += check_vocabulary(replace(canonical(model, allow_unmapped=True), tokenizer=new))
    kept = {k: v for k, v in values.items() if not k.startswith(("tokenizer.", "aprfmt.tokenizer"))}
    return kept | tokenizer_apr.to_metadata(new)
