"""Files of a folder that are not part of the model (images, `original/`): which are carried, up to a size limit."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aprfmt.arch.differences import differences
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.tensor import CanonicalTensor, Losses
from aprfmt.convert.source_manifest import safe_name
from aprfmt.errors import AprError, ChangedError, NotFoundError, UnknownFormatError
from aprfmt.formats.apr2_write import MAX_WRITTEN_NAME_BYTES
from aprfmt.formats.apr_metadata import FILES_PREFIX, SOURCE_KEY
from aprfmt.formats.apr_shards import JoinedNative
from aprfmt.formats.hfdir import HfNative
from aprfmt.io.names import ALLOW, findings
from aprfmt.io.source import FileIdentity, Source
from aprfmt.limits import MAX_CARRIED_FILES
from aprfmt.model import Model
from aprfmt.text import first_few, format_bytes, format_limit, plural
from aprfmt.types import PathLike, Shape


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A file as the bytes of a tensor; opened only while it is read, as a folder may contain thousands."""

    name: str
    path: Path
    identity: FileIdentity
    dtype: str = "U8"

    @property
    def n_bytes(self) -> int:
        """Bytes of the file."""
        return self.identity.size

    @property
    def shape(self) -> Shape:
        """One row."""
        return (self.n_bytes,)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `offset` of the file. Raises ChangedError if it was removed or replaced."""
        try:
            with Source.open(self.path) as source:
                if source.identity == self.identity:
                    source.read_into(offset, buffer)
                    return
        except (NotFoundError, UnknownFormatError):
            pass
        raise ChangedError("the file changed while it was read", path=self.path)


def with_files(c: Canonical, most_bytes: int, outputs: Sequence[PathLike], *, allow_names: bool = False) -> Canonical:
    """`c` with the unrelated files of its folder, smallest first, up to `most_bytes` in total.

    `left_out` lists what is not carried, including names that io.names refuses; `allow_names` carries those.
    `outputs` never count as files of the folder.
    """
    folder = c.model.native_as(HfNative)
    if folder is None:
        return c
    found: dict[str, FileIdentity] = {}
    odd: list[str] = []
    own = [os.path.abspath(output) for output in outputs]
    names = folder.further_files(hidden=allow_names)
    refused = {} if allow_names else {f.name: f for f in findings(names, folder.own_names()) if not f.is_final}
    for name in names:
        path = os.path.abspath(folder.folder / name)
        if any(path == output or path.startswith(output + os.sep) for output in own):
            refused.pop(name, None)
            continue
        if name in refused:
            continue
        identity = _identity(folder.folder / name, name)
        if identity is None:
            odd.append(name)
        else:
            found[name] = identity
    files: dict[str, CanonicalTensor] = {}
    large: dict[str, int] = {}
    n_bytes = 0
    for name, identity in sorted(found.items(), key=lambda item: (item[1].size, item[0])):
        n_bytes += identity.size
        if n_bytes > most_bytes:
            large[name] = identity.size
        else:
            source = FileTensor(_blob_name(name), folder.folder / name, identity)
            files[name] = CanonicalTensor(source.name, (source,))
    reasons = _reasons(large, odd, most_bytes, n_bytes)
    if refused:
        them = "it" if len(refused) == 1 else "them"
        reasons.append(f"not carried: {first_few(refused.values())}; {ALLOW} carries {them}")
    if len(names) > MAX_CARRIED_FILES:
        reasons.append(f"not carried: files beyond the limit of {MAX_CARRIED_FILES:,} per folder")
    return replace(c, files=dict(sorted(files.items())), left_out=reasons)


def carried_files(c: Canonical) -> list[Path]:
    """The other files of the model's folder, to be stored in the output."""
    return [source.path for file in c.files.values() for source in file.sources if isinstance(source, FileTensor)]


def parts_of(model: Model) -> tuple[Path, list[Path]]:
    """The model's folder and the model files in it, without the given one."""
    place, files = model.path.parent, [Path(source.path) for source in model.sources]
    if (folder := model.native_as(HfNative)) is not None:
        place, files = folder.folder, [folder.folder / name for name in folder.own_names()]
    elif (joined := model.native_as(JoinedNative)) is not None:
        place, files = joined.manifest.parent, [joined.manifest, *files]
    return place, [path for path in files if path != model.path]


def _blob_name(name: str) -> str:
    """The tensor name of a file: its path if it fits into an index, else its digest."""
    whole = FILES_PREFIX + name
    if len(whole.encode()) <= MAX_WRITTEN_NAME_BYTES:
        return whole
    return FILES_PREFIX + hashlib.sha256(name.encode()).hexdigest()


def _identity(path: Path, name: str) -> FileIdentity | None:
    """A key that identifies a file; None if it is unreadable or its name cannot be stored."""
    try:
        safe_name(name)
        if any(finding.is_final for finding in findings([name])):
            return None
        with Source.open(path) as source:
            return source.identity
    except AprError:
        return None


def _reasons(large: dict[str, int], odd: list[str], most_bytes: int, n_bytes: int) -> list[str]:
    """Why files are left out: `large` files exceed `most_bytes`; all files together have `n_bytes`."""
    out = []
    if large:
        shown = first_few([f"{name} ({format_bytes(size)})" for name, size in sorted(large.items())])
        limit = f"the limit for unrelated files is {format_limit(most_bytes)} in total"
        out.append(f"not carried: {shown}; {limit}; apr convert --carry {_option(n_bytes)} carries all of them")
    if odd:
        out.append(f"not carried: {first_few(odd)}; unreadable, not a regular file, or a name that cannot be stored")
    return out


def _option(n_bytes: int) -> str:
    """A round size, at least `n_bytes`, in the syntax of an option."""
    unit, name = next(pair for pair in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B")) if n_bytes >= pair[0])
    return f"{-(-n_bytes // unit)}{name}"


def dropped_files_loss(c: Canonical, reason: str) -> list[str]:
    """The loss for carried files that are not written, with the `reason`; [] without any."""
    if not c.files:
        return []
    return [f"{plural(len(c.files), 'unrelated file')} of the folder dropped ({first_few(c.files)}): {reason}"]


_TOLD = {
    "config_sentence_transformers.json": "the prompts of an embedding model and its similarity function",
    "sentence_bert_config.json": "the maximum text length and input settings",
    "preprocessor_config.json": "image and audio preprocessing",
    "processor_config.json": "image and audio preprocessing",
}


def record_differences(c: Canonical, losses: Losses) -> None:
    """Records in `losses` how llama.cpp differs from transformers for the network of `c`."""
    for found in differences(c.arch, c.hparams) if c.arch is not None else ():
        losses.warnings.append(found.what)
        losses.differences.append({"what": found.what, "beyond": found.beyond, "slight": found.slight})


def losses_without_keys(c: Canonical) -> list[str]:
    """A loss for each file of the model whose settings have no key in a language model's GGUF."""
    folder = c.model.native_as(HfNative)
    record = c.model.metadata.get(SOURCE_KEY) if c.model.convention == "apr" else None
    if folder is not None:
        names = {path.as_posix() for path in folder.other_files}
    else:
        listed = record.get("files") if isinstance(record, Mapping) else None
        files = listed if isinstance(listed, list) else []
        names = {str(row.get("name")) for row in files if isinstance(row, Mapping)}
    return [f"a GGUF has no keys for {name}: {what} dropped" for name, what in _TOLD.items() if name in names]
