"""Containers: the registry of readers, and which of them opens a path, decided by its bytes.

A built-in reader is a row of READERS, its module is loaded when it is needed. A package adds one under the entry
point group `aprfmt.formats`: any object with what `Reader` names. The same group holds the targets of plugins, see
convert.targets.base; one object may be both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from aprfmt.errors import ZERO_BYTE, AprError, CorruptError, NotFoundError, UnknownFormatError, UsageError
from aprfmt.io import downloads
from aprfmt.io.source import Source, is_file, is_folder, watch_opened
from aprfmt.light_dataclass import light_dataclass
from aprfmt.limits import MAX_HEADER_BYTES
from aprfmt.text import first_few
from aprfmt.types import PathLike

if TYPE_CHECKING:
    from aprfmt.model import Model

HF_INDEX_SUFFIX, APR_MANIFEST_SUFFIX = ".safetensors.index.json", ".apr.index.json"
PICKLE_INDEX_SUFFIX = ".bin.index.json"
INDEX_SUFFIXES = (HF_INDEX_SUFFIX, PICKLE_INDEX_SUFFIX)
"""How the lists of shards end."""

_HEAD_BYTES = 64


@light_dataclass(frozen=True, slots=True)
class Candidate:
    """What a reader decides by.

    Attributes:
        path: of the file or folder.
        head: the first 64 bytes of a file, b"" for a folder.
        size: of a file in bytes, 0 for a folder.
        names: the files of a folder, relative and sorted, () for a file.
        source: the open file, for readers that have to look further; None for a folder.
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
        name: its id, which `aprfmt.detect` gives.
        suffixes: how its files are usually called; detection goes by the bytes.
        folder: whether folders hold it too.
    """

    name: str
    suffixes: tuple[str, ...]
    folder: bool

    def detect(self, found: Candidate) -> bool:
        """Whether it is this container. May raise AprError for one that is recognised and cannot be read."""

    def open(self, path: Path) -> Model:
        """Opens it. Raises AprError, and leaves no file open then."""


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
"""How a file begins that torch.save wrote: as a zip archive or a pickle."""


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
    """The id of the reader for a file that begins with `APR`. Raises AprError where no form fits."""
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
"""The containers that we read, in the order in which they are asked: a folder of safetensors may hold a manifest."""


def readers() -> Iterator[Reader]:
    """Every reader, ours before those of plugins, which are loaded only when it comes to them."""
    yield from READERS
    yield from (plugin for plugin in plugins() if isinstance(plugin, Reader))


@cache
def plugins() -> tuple[object, ...]:
    """What packages register under the entry point group. Raises MissingDependencyError where one does not load."""
    from aprfmt.formats.entry_points import load_all

    return load_all()


def open(path: PathLike) -> Model:
    """Opens a model of any readable format. Raises AprError: not found, unknown, corrupt, unsupported."""
    name = resolve(path)
    with downloads.explained(name):
        model = _reader_of(name).open(name)
        try:
            for source in model.sources:
                downloads.check_complete(source.path)
        except BaseException:
            model.close()
            raise
    return model


@contextmanager
def open_unchanged(path: PathLike) -> Iterator[Model]:
    """The same for a block that judges the model. Raises ChangedError where a file that it opened changed meanwhile."""
    with watch_opened() as opened, open(path) as model:
        yield model
        for source in opened:
            source.check_unchanged()


def detect(path: PathLike) -> str:
    """The format id of what `path` holds, by its bytes and never by its suffix: the name of a reader.

    Raises NotFoundError, UnknownFormatError, or CorruptError for a file that begins like an `.apr` but is not one.
    """
    name = resolve(path)
    with downloads.explained(name):
        return _reader_of(name).name


def path_text(value: object, name: str = "path") -> str:
    """A path as text. Raises UsageError, which calls it `name`, for any other value."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        raise UsageError(f"{name} must be a path, not {value!r:.80}")
    if "\0" in text:
        raise UsageError(ZERO_BYTE, path=text)
    return text


def resolve(path: PathLike) -> Path:
    """`path` itself; of `hf://org/repo`, a URL of the hub, or an `org/repo` that is not a path: what stands for it."""
    text = path_text(path)
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
    """Raises UnknownFormatError for folders of a training whose files look like a model's."""
    if is_file(found.path / _TOKENS):
        hint = f"apr data {found.path} --model FILE summarizes them"
        raise UnknownFormatError("token shards are data, not a model", path=found.path, hint=hint)
    numbered = all("-of-" in name for name in found.names if name.endswith(".safetensors"))
    if numbered and "config.json" not in found.names and is_file(found.path / "tokens" / _TOKENS):
        hint = f"apr distill --teacher-logprobs {found.path} trains on them"
        raise UnknownFormatError("teacher log-probabilities are not a model", path=found.path, hint=hint)


def _unknown_folder(found: Candidate) -> AprError:
    models = [name for name in found.names if name.endswith((".gguf", ".apr"))]
    if models:
        best = next((name for name in models if name.startswith("model.")), models[0])
        names = dict.fromkeys([best, *models])
        which = "the file" if len(names) == 1 else "one of its files"
        reason = "no safetensors weights found in the folder"
        hint = f"name {which}: {first_few([found.path / name for name in names])}"
    elif any(name.endswith((".h5", ".msgpack")) for name in found.names):
        reason = "the folder's weights are neither safetensors nor PyTorch"
        hint = "convert the weights to safetensors first (transformers: save_pretrained)"
    else:
        reason = "no model weights found in the folder"
        hint = "expected model.safetensors or model.safetensors.index.json"
    return UnknownFormatError(reason, path=found.path, hint=hint)
