"""Containers: the registry of readers, and detection of a path's format from its bytes.

A built-in reader is a row of READERS; its module is imported when needed. Packages add readers under the entry point
group `aprfmt.formats`: any object with the attributes of `Reader`. The same group contains targets of plugins, see
convert.targets.base; one object may be both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from aprfmt.errors import ONE_FILE, ZERO_BYTE, AprError, CorruptError, NotFoundError, UnknownFormatError, UsageError
from aprfmt.io import downloads
from aprfmt.io.source import PIPE_HINT, Source, is_file, is_folder, watch_opened
from aprfmt.light_dataclass import light_dataclass
from aprfmt.limits import MAX_HEADER_BYTES
from aprfmt.text import first_few
from aprfmt.trust.signature import FOLDER_SIGNATURE, REQUIRED_SIGNER, UNREADABLE
from aprfmt.types import PathLike

if TYPE_CHECKING:
    from aprfmt.model import Model
    from aprfmt.trust.signature import ModelSignature

HF_INDEX_SUFFIX, APR_MANIFEST_SUFFIX = ".safetensors.index.json", ".apr.index.json"
PICKLE_INDEX_SUFFIX = ".bin.index.json"
INDEX_SUFFIXES = (HF_INDEX_SUFFIX, PICKLE_INDEX_SUFFIX)
"""Suffixes of shard indexes."""

_HEAD_BYTES = 64


@light_dataclass(frozen=True, slots=True)
class Candidate:
    """What detection is based on.

    Attributes:
        path: of the file or folder.
        head: the first 64 bytes of a file, b"" for a folder.
        size: of a file in bytes, 0 for a folder.
        names: the files of a folder, relative and sorted, () for a file.
        source: the open file, for readers that need more than `head`; None for a folder.
    """

    path: Path
    head: bytes = b""
    size: int = 0
    names: tuple[str, ...] = ()
    source: Source | None = None


@runtime_checkable
class Reader(Protocol):
    """A container that can be read.

    Attributes:
        name: its id, returned by `aprfmt.detect`.
        suffixes: usual suffixes of its files; detection uses the bytes.
        folder: whether folders can have this format too.
    """

    name: str
    suffixes: tuple[str, ...]
    folder: bool

    def detect(self, found: Candidate) -> bool:
        """Whether the candidate has this format. May raise AprError if it is recognized but unreadable."""

    def open(self, path: Path) -> Model:
        """Opens it. Raises AprError, leaving no file open."""


@light_dataclass(slots=True)
class _BuiltInReader:
    name: str
    suffixes: tuple[str, ...]
    module: str
    detect: Callable[[Candidate], bool]
    folder: bool = False

    def open(self, path: Path) -> Model:
        model: Model = import_module(f"aprfmt.formats.{self.module}").open_model(path)
        return model


def _is_gguf(found: Candidate) -> bool:
    return found.head[:4] in (b"GGUF", b"FUGG")


def _is_safetensors(found: Candidate) -> bool:
    n_bytes, head = found.size, found.head
    return n_bytes >= 8 and 2 <= int.from_bytes(head[:8], "little") <= n_bytes - 8 and head[8:9] == b"{"


_PICKLES = (b"PK", b"\x80")
"""First bytes of torch.save files: zip archives or pickles."""


def _is_hf(found: Candidate) -> bool:
    if found.source is not None and found.head.lstrip()[:1] == b"{":
        return found.path.name.endswith(INDEX_SUFFIXES)
    if found.source is not None and not found.head.startswith(_PICKLES):
        return False
    from aprfmt.formats import pickles

    if found.source is None:
        return any(n.endswith((".safetensors", *INDEX_SUFFIXES)) or pickles.holds_weights(n) for n in found.names)
    return pickles.is_pickle(found.head, found.source)


def _is_apr2(found: Candidate) -> bool:
    if found.source is None:
        return any(name.endswith(APR_MANIFEST_SUFFIX) for name in found.names)
    if found.head.lstrip()[:1] == b"{":
        return found.path.name.endswith(APR_MANIFEST_SUFFIX)
    return _apr_form(found) == "apr-v2"


def _apr_form(found: Candidate) -> str | None:
    """The id of the reader for a file that begins with `APR`. Raises AprError if no reader matches."""
    if found.source is None or not found.head.startswith(b"APR"):
        return None
    from aprfmt.formats.apr_legacy import detect_apr

    return detect_apr(found.source, found.path)


READERS: tuple[Reader, ...] = (
    _BuiltInReader("gguf", (".gguf",), "gguf", _is_gguf),
    _BuiltInReader("hf", (HF_INDEX_SUFFIX,), "hfdir", _is_hf, folder=True),
    _BuiltInReader("apr-v2", (".apr", APR_MANIFEST_SUFFIX), "apr_shards", _is_apr2, folder=True),
    _BuiltInReader("apr-v1", (".apr",), "apr1", lambda found: _apr_form(found) == "apr-v1"),
    _BuiltInReader("apr-legacy", (".apr",), "apr_legacy", lambda found: _apr_form(found) == "apr-legacy"),
    _BuiltInReader("safetensors", (".safetensors",), "safetensors", _is_safetensors),
)
"""Built-in containers in order of detection: a folder of safetensors may contain a manifest."""


def readers() -> Iterator[Reader]:
    """All readers, built-in ones first; plugins are imported only when reached."""
    yield from READERS
    yield from (plugin for plugin in plugins() if isinstance(plugin, Reader))


@cache
def plugins() -> tuple[object, ...]:
    """The registered plugins. Raises MissingDependencyError if one cannot be imported."""
    from aprfmt.formats.entry_points import load_all

    return load_all()


def open(path: PathLike) -> Model:
    """Opens a model of any readable format. Raises AprError: not found, unknown, corrupt, unsupported.

    Where a signature is required (formats.signatures), it is verified first: ChecksumError, RefusedError.
    """
    name = resolve(path)
    with downloads.explained(name):
        reader = _reader_of(name)
        signature = _signature(name, reader.name)
        model = _open_complete(name, reader)
    model.signature = signature
    return model


def _signature(path: Path, reader: str) -> ModelSignature | None:
    """The signature of a model, verified if one is required."""
    if not os.environ.get(REQUIRED_SIGNER) and reader != "apr-v1" and not _may_be_signed(path):
        return None
    from aprfmt.formats.signatures import check_required, signature_of

    return check_required(path, reader) or signature_of(path, reader)


def _may_be_signed(path: Path) -> bool:
    """Whether there is a signature at one of the places of `signatures.covered_by`, without importing it."""
    folder = path if is_folder(path) else path.parent
    return is_file(folder / FOLDER_SIGNATURE) or is_file(f"{path}.sig")


def open_own(path: PathLike) -> Model:
    """Opens a file that this program has just written: no signature is looked up."""
    name = resolve(path)
    with downloads.explained(name):
        return _open_complete(name, _reader_of(name))


def _open_complete(path: Path, reader: Reader) -> Model:
    model = reader.open(path)
    try:
        for source in model.sources:
            downloads.check_complete(source.path)
    except BaseException:
        model.close()
        raise
    return model


@contextmanager
def open_unchanged(path: PathLike) -> Iterator[Model]:
    """Opens a model for a block that judges it. Raises ChangedError if an opened file changed meanwhile."""
    with watch_opened() as opened, open(path) as model:
        yield model
        for source in opened:
            source.check_unchanged()


def detect(path: PathLike) -> str:
    """The format id of `path`, detected from its bytes, never its suffix: the name of a reader.

    Raises NotFoundError, UnknownFormatError, or CorruptError for a file that begins like an `.apr` but is not one.
    """
    name = resolve(path)
    with downloads.explained(name):
        return _reader_of(name).name


def detect_any(path: PathLike) -> str:
    """The name of the reader that a signature goes by: of a folder, which it covers whole, "hf", of others as `detect`.

    UNREADABLE for a file that no reader opens. Raises NotFoundError, StorageError.
    """
    if is_folder(path):
        return "hf"
    try:
        return detect(path)
    except (CorruptError, UnknownFormatError):
        return UNREADABLE


def path_text(value: object, name: str = "path") -> str:
    """Converts a path to text. Raises UsageError, which calls it `name`, for other types."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        raise UsageError(f"{name} must be a path, not {value!r:.80}")
    if "\0" in text:
        raise UsageError(ZERO_BYTE, path=text)
    return text


def resolve(path: PathLike) -> Path:
    """`path` itself; for `hf://org/repo`, a hub URL or an `org/repo` that is not a path, the local folder that
    represents it.
    """
    text = path_text(path)
    if text == "-" and not os.path.lexists(text):
        raise UsageError("a model is not read from standard input", hint=PIPE_HINT)
    if isinstance(path, str):
        if text.startswith(("hf://", "https://", "http://")):
            from aprfmt.formats.hub import snapshot

            return snapshot(text)
        if text.count("/") == 1 and not os.path.lexists(text):
            from aprfmt.formats.hub import looks_like_a_repository, of_bare

            if looks_like_a_repository(text):
                return of_bare(text)
        if ":" in text and not os.path.lexists(text):
            from aprfmt.formats.hub import hint_at_address

            if (hint := hint_at_address(text)) is not None:
                raise NotFoundError("no such file or folder", path=text, hint=hint)
    return path if isinstance(path, Path) else Path(text)


def _reader_of(path: Path) -> Reader:
    if is_folder(path):
        from aprfmt.formats.hf_files import belongs, list_names

        found = Candidate(path, names=tuple(list_names(path, belongs)))
        _check_is_no_data(found)
        reader = next((reader for reader in readers() if reader.folder and reader.detect(found)), None)
        if reader is None:
            raise _unknown_folder(found)
        return reader
    with Source.open(path) as source:
        found = Candidate(path, source.read(0, min(source.size, _HEAD_BYTES)), source.size, (), source)
        reader = next((reader for reader in readers() if reader.detect(found)), None)
    if reader is None:
        raise _unknown_file(found)
    return reader


_BESIDE_WEIGHTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def _unknown_file(found: Candidate) -> AprError:
    path, head = found.path, found.head
    if head[:4] in (b"GGML", b"ggml", b"ggjt", b"tjgg", b"lmgg", b"fmgg"):
        hint = "convert it with llama.cpp's old tools first"
        return UnknownFormatError("a GGML file from before GGUF", path=path, hint=hint)
    if found.size == 0:
        return UnknownFormatError("the file is empty", path=path)
    if path.suffix == ".safetensors" and head[8:9] == b"{" and len(head) > 8:
        length = int.from_bytes(head[:8], "little")
        if length <= MAX_HEADER_BYTES:
            return downloads.cut_short(found.size, 8 + length, path, least=True)
    if path.suffix == ".safetensors":
        return CorruptError("not a safetensors file: invalid header length", path=path, offset=0)
    if path.name in _BESIDE_WEIGHTS:
        hint = f"pass the folder: {path.parent}"
        return UnknownFormatError("this file belongs to a model but contains no weights", path=path, hint=hint)
    pickle = head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    return UnknownFormatError(
        "not a file of any known format (APR, GGUF, safetensors, PyTorch)",
        path=path,
        hint="not a torch.save pickle: not opened, since a pickle can run any code" if pickle else None,
    )


_TOKENS = "tokens.json"
"""The header of token shards (texts/shards.py)."""


def _check_is_no_data(found: Candidate) -> None:
    """Raises UnknownFormatError for training data folders whose files look like a model's."""
    if is_file(found.path / _TOKENS):
        hint = f"apr data {found.path} --model FILE summarizes them"
        raise UnknownFormatError("token shards are data, not a model", path=found.path, hint=hint)
    numbered = all("-of-" in name for name in found.names if name.endswith(".safetensors"))
    if numbered and "config.json" not in found.names and is_file(found.path / "tokens" / _TOKENS):
        hint = f"apr distill --teacher-logprobs {found.path} trains on them"
        raise UnknownFormatError("teacher log-probabilities are not a model", path=found.path, hint=hint)


_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


def is_single_file(name: str) -> bool:
    """Whether the name is that of a GGUF or `.apr`; of several shards only the first."""
    return name.endswith((".gguf", ".apr")) and not _LATER_PART.search(name)


def _unknown_folder(found: Candidate) -> AprError:
    models = [name for name in found.names if is_single_file(name)]
    if models:
        best = next((name for name in models if name.startswith("model.")), models[0])
        names = dict.fromkeys([best, *models])
        which = ONE_FILE if len(names) == 1 else "name one of its files: "
        reason = "no safetensors weights found in the folder"
        hint = which + first_few([found.path / name for name in names])
    elif any(name.endswith((".h5", ".msgpack")) for name in found.names):
        reason = "the folder's weights are neither safetensors nor PyTorch"
        hint = "convert the weights to safetensors first (transformers: save_pretrained)"
    else:
        reason = "no model weights found in the folder"
        hint = "expected model.safetensors or model.safetensors.index.json"
    return UnknownFormatError(reason, path=found.path, hint=hint)
