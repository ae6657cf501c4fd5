"""Edits the metadata of an `.apr`, a GGUF, a safetensors file or a folder; tensor data is unchanged."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from aprfmt import formats
from aprfmt.arch.hparams import EXTRA_KEY, from_gguf, to_apr, to_gguf
from aprfmt.canonical.checks import check_vocabulary
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.read import canonical
from aprfmt.convert import gguf_edit
from aprfmt.convert.files import parts_of
from aprfmt.convert.folder_edit import edit_folder, edit_safetensors
from aprfmt.convert.gguf_edit import Text, parse_text
from aprfmt.convert.integrity import open_checked
from aprfmt.convert.parsing import parse_flag
from aprfmt.convert.source_manifest_writer import holds_tokenizer, without_weights
from aprfmt.convert.targets.apr import HAS_VOCAB
from aprfmt.errors import RefusedError, UnsupportedError, UsageError
from aprfmt.formats import apr2, apr2_write, apr_metadata
from aprfmt.formats.apr_metadata import SOURCE_KEY, TYPED_FIELDS
from aprfmt.formats.apr_shards import JoinedNative
from aprfmt.formats.gguf import GgufNative
from aprfmt.formats.hf_files import read_tokenizer
from aprfmt.formats.hfdir import HfNative
from aprfmt.formats.safetensors import SafetensorsNative
from aprfmt.io.links import check_links, check_opened
from aprfmt.io.pipe import FileLayout, Segment, StartProgress, WriteOptions, write_file
from aprfmt.io.sink import check_target
from aprfmt.io.source import Source, exists, watch_opened
from aprfmt.model import Model
from aprfmt.provenance import provenance
from aprfmt.provenance.model_card import from_card
from aprfmt.tokenizer import apr as tokenizer_apr
from aprfmt.tokenizer import ggml
from aprfmt.tokenizer.template_check import check_rendering, is_template_key
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
        stamped: keys that were set; None for removed ones.
        warnings: about the file and the tokenizer.
        plan: whether this is a plan, with nothing written.
    """

    source: str
    output: str
    input_bytes: int
    output_bytes: int
    tensor_count: int
    stamped: dict[str, object]
    warnings: list[str] = field(default_factory=list)
    plan: bool = False

    def to_json(self) -> dict[str, object]:
        """The object of `apr stamp --json`; `plan` only for a plan."""
        body = asdict(self)
        return body if self.plan else {key: value for key, value in body.items() if key != "plan"}


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
    types: Mapping[str, str] | None = None,
    tokenizer: PathLike | None = None,
    in_place: bool = False,
    plan: bool = False,
    force: bool = False,
    check_template: bool = True,
    follow_links: bool = False,
    progress: StartProgress | None = None,
) -> StampReport:
    """Writes `src` again as `dst` (or over itself with `in_place`) with edited metadata.

    A GGUF whose header keeps its padded length is edited in place; otherwise a copy replaces it.

    Args:
        src, dst: the files or folders, both in one format.
        license, data_source, data_license, hf_architecture, hf_model_type, architecture: the typed fields of an `.apr`;
            a GGUF has keys for the first two.
        set: any metadata key; a value of None removes the key. The keys of a GGUF (`general.tags`,
            `llama.context_length`) also work on an `.apr`, if an export writes them.
        types: types of new GGUF keys that llama.cpp does not know: "u32", "str", "f32[]", ...
        tokenizer: tokenizer files (a folder or a tokenizer.json) to put in an `.apr`.
        in_place: replace `src` itself, in one step.
        plan: check everything and report what would be written, without writing.
        force: replace an existing output.
        check_template: refuse a chat template that does not render two test conversations.
        follow_links: copy files that symlinks refer to outside the folder.
        progress: called with the total bytes of a file that is written again.

    Raises:
        UsageError: an empty patch, a value of the wrong kind, a license that is not an SPDX id, a key without effect.
        RefusedError: keys with which llama.cpp would not load the GGUF, or that contradict the tensors of a folder; a
            chat template that does not render; symlinks out of a folder that is copied.
        UnsupportedError: `src` is in another format.
    """
    parse_flag("in_place", in_place)
    parse_flag("plan", plan)
    parse_flag("force", force)
    parse_flag("follow_links", follow_links)
    given = {
        "license": license, "data_source": data_source, "data_license": data_license,
        "hf_architecture": hf_architecture, "hf_model_type": hf_model_type, "architecture": architecture,
    }  # fmt: skip
    patch = _patch(given, set)
    if not patch and tokenizer is None:
        raise UsageError("nothing to stamp", hint="add --license, --data-source, --set KEY=JSON or --tokenizer DIR")
    if dst is None and not in_place:
        raise UsageError("no output", hint="set one with -o, or edit FILE with --in-place")
    with watch_opened() as opened, open_checked(src) as (model, confirm):
        _check_local(src, in_place)
        target = str(model.path) if in_place or dst is None else formats.path_text(dst, "dst")
        if not in_place:
            check_target(target, [str(model.path), *(source.path for source in model.sources)], force or plan)
        confirm = confirm if in_place or follow_links else _no_links_out(model, opened, confirm)
        options = WriteOptions(force or in_place, progress, confirm=confirm)
        _check_templates(model, patch if check_template else {})
        if model.native_as(GgufNative) is not None:
            if tokenizer is not None:
                raise UsageError(_NOT_IN_GGUF.format("a tokenizer is"), path=model.path, hint=_CONVERT_HINT)
            keys = _in_gguf_words(patch)
            written = gguf_edit.edit(model, keys, types or {}, target, options, in_place=in_place, plan=plan)
            return replace(_report(src, target, model, written, keys), plan=plan)
        if (edit := _text_edit(model)) is not None:
            if types or tokenizer is not None:
                what = "types apply" if types else "--tokenizer applies"
                raise UsageError(f"{what} to .apr and GGUF files only", path=model.path)
            written = edit(model, patch, target, options, in_place=in_place, plan=plan)
            return replace(_report(src, target, model, written, patch, model.warnings), plan=plan)
        native = apr2.native_of(model)
        if native is None:
            raise UnsupportedError(
                f"metadata of {model.label} cannot be edited",
                path=model.path,
                hint=f"apr import {model.path} -o {model.path.name or 'model'}.apr, which has --license etc.",
            )
        if types:
            raise UsageError("types apply to the keys of a GGUF; in an .apr the JSON value sets the type")
        if in_place and isinstance(native, JoinedNative):
            raise RefusedError(
                "a model in several files cannot be edited in place",
                path=model.path,
                hint="write one file with -o, then split it with apr shard",
            )
        warnings = list(model.warnings)
        fields = _in_apr_words(model, patch)
        segments = _segments(model, native.header.flags, fields, tokenizer, warnings)
        layout = FileLayout(os.path.basename(target), segments, crc_footer=True)
        if not plan:
            if not in_place:
                check_target(target, [source.path for source in opened], force)
            write_file(target, layout, options)
        done = patch if tokenizer is None else patch | {"tokenizer": os.fspath(tokenizer)}
        return replace(_report(src, target, model, layout.n_bytes, done, warnings), plan=plan)


def store_record(path: PathLike, key: str, value: object, *, progress: StartProgress | None = None) -> None:
    """Sets one of this package's own keys (`aprfmt.…`) of an `.apr` v2 in place; tensor data is unchanged.

    Raises UnsupportedError for another container or several files, RefusedError for a model on the hub, StorageError.
    """
    with watch_opened(), open_checked(path) as (model, confirm):
        _check_local(path, in_place=True)
        native = apr2.native_of(model)
        if native is None or isinstance(native, JoinedNative):
            raise UnsupportedError(
                f"{model.label} cannot store it", path=model.path, hint="import it to one .apr first"
            )
        segments = _segments(model, native.header.flags, {key: value}, None, [])
        layout = FileLayout(model.path.name, segments, crc_footer=True)
        write_file(str(model.path), layout, WriteOptions(True, progress, confirm=confirm))


def _patch(given: Mapping[str, object], values: Mapping[str, object] | None) -> dict[str, object]:
    """The new values by key. Raises UsageError for a license that is not an SPDX id, and for our own records."""
    if values is not None and not isinstance(values, Mapping):
        raise UsageError(f"set must be a mapping of metadata keys, not {values!r:.80}")
    patch: dict[str, object] = {key: value for key, value in given.items() if value is not None} | dict(values or {})
    # Licenses are always checked and converted to SPDX spelling.
    flags = {key: text for key in provenance.FLAGS if isinstance(text := patch.get(key), str)}
    patch |= provenance.from_flags({key: str(parse_text(t)) if isinstance(t, Text) else t for key, t in flags.items()})
    own = next((key for key in patch if key.startswith("aprfmt.")), None)
    if own is not None:
        raise UsageError(f"{own!r} records how the file was made and cannot be edited")
    return patch


def _check_local(src: PathLike, in_place: bool) -> None:
    """Raises RefusedError for a model on the hub that would be edited in place."""
    if in_place and not exists(src):
        hint = f"download it first: apr convert {os.fspath(src)} -o FOLDER --format hf"
        raise RefusedError("a model on the hub cannot be edited in place", path=src, hint=hint)


def _text_edit(model: Model) -> Callable[..., int] | None:
    """The function that edits a folder or a safetensors file; None for other containers."""
    native = model.native_as(HfNative)
    if native is not None and not native.alone:
        return edit_folder
    return edit_safetensors if model.native_as(SafetensorsNative) is not None else None


def _no_links_out(model: Model, opened: list[Source], confirm: Callable[[str], None]) -> Callable[[str], None]:
    """Extends `confirm` by a check that no file of a copy comes from outside the model's folder.

    Raises RefusedError if a link leads out already.
    """
    folder, own = parts_of(model)
    if (native := model.native_as(HfNative)) is not None:
        own += [native.folder / name for name in native.further_files()]
    check_links(folder, own)

    def check(output: str) -> None:
        confirm(output)
        check_opened(folder, own, opened)

    return check


def _check_templates(model: Model, patch: Mapping[str, object]) -> None:
    """Raises RefusedError for a chat template that does not render."""
    sources = [str(value) for key, value in patch.items() if is_template_key(key) and value is not None]
    tokenizer = model.tokenizer if sources else None
    for source in sources:
        check_rendering(source, tokenizer, model.path)


def _report(
    src: PathLike, target: str, model: Model, n_bytes: int, done: dict[str, object], warnings: Sequence[str] = ()
) -> StampReport:
    n_tensors = len(model.tensors.entries)
    return StampReport(os.fspath(src), target, model.size_bytes, n_bytes, n_tensors, done, list(warnings))


# --- GGUF ---

_NOT_IN_GGUF = "{} not editable in a GGUF"
_CONVERT_HINT = "write a new file: apr convert FILE -o OUT.gguf --tokenizer DIR"


def _in_gguf_words(patch: Mapping[str, object]) -> dict[str, object]:
    """The patch with provenance under GGUF keys. Raises UsageError for fields that have no GGUF key."""
    if "chat_template" in patch:  # its name in .apr and in Hugging Face folders
        patch = {"tokenizer.chat_template" if key == "chat_template" else key: v for key, v in patch.items()}
    own = next((key for key in patch if key in TYPED_FIELDS and key not in ("license", "data_source")), None)
    if own is not None:
        raise UsageError(f"a GGUF has no key {own!r}", hint="use the GGUF key name, see apr inspect --metadata")
    info = {"license": patch["license"]} if patch.get("license") is not None else {}
    sources = patch.get("data_source")
    general = from_card({"datasets": str(sources).split(",")})[1] if sources is not None else None
    rest = {key: value for key, value in patch.items() if key not in ("license", "data_source")}
    return rest | {key: value for key, _, value in provenance.to_gguf(info, general)}


# --- APR ---

_GGUF_WORDS = ("general.", "tokenizer.ggml.", "tokenizer.chat_template")


def _in_apr_words(model: Model, patch: Mapping[str, object]) -> dict[str, object]:
    """The patch with texts parsed and GGUF keys converted to the `.apr`'s, as an import would.

    Raises UsageError for a GGUF key that no export would write.
    """
    c = canonical(model, allow_unmapped=True)
    own = (*_GGUF_WORDS, f"{c.arch.gguf}.") if c.arch is not None else _GGUF_WORDS
    words = {key: value for key, value in patch.items() if key.startswith(own) and key not in model.metadata}
    out = {key: _as_field_type(key, value, model.metadata) for key, value in patch.items() if key not in words}
    if not words:
        return out
    keys = {key: value for key, _, value in gguf_pairs(c)}
    before = _imported(c, keys)
    for key, value in words.items():
        edited = {name: value for name, value in keys.items() if name != key}
        if value is not None:
            edited[key] = gguf_edit.read_value(key, value, c.arch)
        after = _imported(c, edited)
        if edited != keys and (after == before or key.endswith(".vocab_size")):
            raise UsageError(
                f"{key!r} has no effect: an export derives it from the tensors and the other metadata",
                path=model.path,
                hint="edit the exported file instead: apr stamp OUT.gguf --in-place",
            )
        for name in before.keys() | after.keys():
            if before.get(name) != after.get(name):
                out[name] = _merged(before.get(name), after.get(name), out.get(name, model.metadata.get(name)))
    return out


def _as_field_type(key: str, value: object, metadata: Mapping[str, object]) -> object:
    """A command-line text converted to the type of the field."""
    if not isinstance(value, Text):
        return value
    parsed = parse_text(value)
    is_text = apr_metadata.is_text(key) or isinstance(metadata.get(key), str)
    return str(value) if is_text and not isinstance(parsed, str) else parsed


def gguf_pairs(c: Canonical) -> Iterator[tuple[str, object, object]]:
    """The known keys of a GGUF of `c`."""
    yield from provenance.to_gguf(c.info, c.general)
    if c.arch is not None:
        yield "general.architecture", "STRING", c.arch.gguf
        yield from to_gguf(c.hparams, c.arch, complete=False, misfits=True)
    if c.tokenizer is not None:
        yield from ggml.to_gguf(c.tokenizer, vocab_size=None)


def _imported(c: Canonical, keys: Mapping[str, object]) -> dict[str, object]:
    """The metadata that an import of a GGUF with these keys gives."""
    known = provenance.from_gguf(keys)
    tokenizer = ggml.from_gguf(keys)
    out = known.info | provenance.to_metadata(known.general)
    out |= {} if c.arch is None else to_apr(from_gguf(keys, (), c.arch))
    return out | ({} if tokenizer is None else tokenizer_apr.to_metadata(tokenizer))


def _merged(before: object, after: object, current: object) -> object:
    """`current` with the differences between two objects applied; `after` if they are not objects."""
    if not (isinstance(before, Mapping) and isinstance(after, Mapping) and isinstance(current, Mapping)):
        return after
    gone = {key for key in before if key not in after}
    changed = {key: value for key, value in after.items() if key not in before or before[key] != value}
    return {key: value for key, value in current.items() if key not in gone} | changed


def _segments(
    model: Model, flags: int, patch: Mapping[str, object], tokenizer: PathLike | None, warnings: list[str]
) -> list[Segment]:
    """The edited file; problems of the new tokenizer go to `warnings`."""
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
    apr_metadata.parse(text)  # an invalid typed field is refused here, before anything is written
    return apr2_write.layout_from_model(model, text, flags)


def _outdates_record(values: Mapping[str, object], patch: Mapping[str, object]) -> bool:
    """Whether the source record would restore the old tokenizer.

    The record of a GGUF refers to the token lists only; an export derives its other keys from the metadata.
    """
    record = values.get(SOURCE_KEY)
    of_gguf = isinstance(record, Mapping) and record.get("format") == "gguf"
    return any(key in _LISTS if of_gguf else key.startswith(("tokenizer.", tokenizer_apr.OWN_KEY)) for key in patch)


def _without_tokenizer_files(values: Mapping[str, object]) -> dict[str, object]:
    """`values` with the source record reduced to files other than weights and tokenizer, or removed."""
    record = without_weights(values.get(SOURCE_KEY), lambda name: not holds_tokenizer(name))
    rest = {key: value for key, value in values.items() if key != SOURCE_KEY}
    return rest if record is None else rest | {SOURCE_KEY: record}


def _apply_patch(values: Mapping[str, object], patch: Mapping[str, object]) -> dict[str, object]:
    removed = {key for key, value in patch.items() if value is None}
    edits = apr_metadata.canonicalize_aliases({k: v for k, v in patch.items() if v is not None})
    kept = {key: value for key, value in values.items() if key not in removed}
    out = apr_metadata.canonicalize_aliases(kept) | edits
    # The network's ids are stored in another field too, which exports read first.
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
