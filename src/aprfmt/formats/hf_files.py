"""Text files of a Hugging Face folder: which ones belong to a model, JSON parsing, the tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.errors import CorruptError, LimitError, RefusedError, storage_errors
from aprfmt.io.downloads import check_no_pointer, explained
from aprfmt.io.jsonx import check_size
from aprfmt.io.source import Source, is_file, is_folder
from aprfmt.limits import MAX_CONFIG_BYTES, MAX_FILE_NAME_BYTES, MAX_SPLITS, MAX_TEXT_FILE_BYTES
from aprfmt.tokenizer import generation
from aprfmt.tokenizer.model import Tokenizer
from aprfmt.trust.signature import REQUIRED_SIGNER
from aprfmt.types import Json, JsonObject

if TYPE_CHECKING:
    from aprfmt.tokenizer.model import Tokenizer

TEMPLATE_FOLDER = "additional_chat_templates"
"""The subfolder with additional chat templates."""

MODULE_FOLDERS = ("[0-9]_*", "speech_tokenizer", "audio_tokenizer")
"""Folders of modules, codecs included; config.json and weights of each belong to the model."""

KEPT_FILES = (
    "*.json", "*.jinja", f"{TEMPLATE_FOLDER}/*.jinja", "*.model", "*.tiktoken", "chat_template*", "*.md", "*.txt",
    "*.py", "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", "tokenizer*", "vocab*", "merges*", ".gitattributes",
    *(f"{folder}/config.json" for folder in MODULE_FOLDERS),
)  # fmt: skip
"""Name patterns of a model's files other than weights."""

_FILE_SUFFIXES = (".safetensors", ".json", ".jinja", ".model")

WEIGHT_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".apr", ".h5", ".msgpack"),
    *(".onnx", ".onnx_data", ".ot", ".npz", ".npy"),
)
"""Suffixes of weight files, whatever program wrote them."""

TOKENIZER_FILES = (
    "tokenizer.json, tokenizer.model, tekken.json, a .tiktoken file, vocab.txt, or vocab.json with merges.txt"
)
"""Files of which a tokenizer needs one, as hints list them."""


def list_names(folder: Path, needed: Callable[[str], bool] = lambda name: False) -> list[str]:
    """Regular files of the folder, its template folder and its modules' folders, sorted, with forward slashes.

    Raises NotFoundError, StorageError, and RefusedError for anything but a regular file under a `needed` name: skipping
    a broken link would yield another model.
    """
    names = []
    with storage_errors(folder):
        found = [(path, path.name) for path in folder.iterdir()]
        for pattern in (TEMPLATE_FOLDER, *MODULE_FOLDERS):
            found += [(path, f"{path.parent.name}/{path.name}") for path in folder.glob(f"{pattern}/*")]
        for path, name in found:
            if path.is_file():
                names.append(name)
            elif needed(name) and (path.suffix in _FILE_SUFFIXES or not path.is_dir()):
                what = "a broken symlink" if path.is_symlink() else "not a regular file"
                hint = "download the model again, or remove it from the folder"
                raise RefusedError(f"it is {what}", path=path, hint=hint)
    return sorted(names)


def belongs(name: str) -> bool:
    """Whether a file of that name in a folder is part of the model."""
    return name.endswith((".safetensors", ".bin", ".pt", ".pth")) or bool(select_files([name]))


def select_files(names: Iterable[str]) -> list[Path]:
    """The files among `names` that belong to a model, without weights."""
    return [Path(n) for n in names if _matches(n, KEPT_FILES) and not n.endswith(WEIGHT_SUFFIXES)]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    # `*` must not match into the subfolder: its files have their own pattern.
    return any(name.count("/") == pattern.count("/") and fnmatchcase(name, pattern) for pattern in patterns)


_CONFIGS = ("config.json", "generation_config.json", "preprocessor_config.json")


def read_text_file(path: Path) -> bytes:
    """Reads a JSON or text file. Raises NotFoundError; LimitError above the maximum size."""
    limit = MAX_CONFIG_BYTES if path.name in _CONFIGS else MAX_TEXT_FILE_BYTES
    with Source.open(path) as source:
        if source.size > limit:
            raise LimitError(f"the file has {source.size:,} bytes; the limit is {limit:,}", path=path)
        data = source.read(0, source.size)
    check_no_pointer(data, path, len(data))
    return data


def generation_config(texts: Mapping[str, bytes], path: str) -> JsonObject | None:
    """The generation_config.json among the text files of the model at `path`. Raises CorruptError."""
    raw = texts.get(generation.FILE_NAME)
    return None if raw is None else parse_object(raw, path, generation.FILE_NAME)


def parse_object(raw: bytes, path: str, what: str, *, unique: bool = True) -> JsonObject:
    """Parses a JSON object. Raises CorruptError for invalid JSON, another type, a duplicate key (with `unique`)."""

    def pairs(items: list[tuple[str, Json]]) -> JsonObject:
        result = dict(items)
        if len(result) < len(items):
            seen: set[str] = set()
            twice = next(key for key, _ in items if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CorruptError(f"{what} has duplicate key {twice!r}", path=path)
        return result

    try:
        check_size(raw)
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=pairs if unique else None)
    except CorruptError as error:
        error.path = path
        raise
    except (ValueError, RecursionError) as error:
        with explained(path):
            raise CorruptError(f"{what} is not valid JSON: {error}", path=path) from error
    if not isinstance(value, dict):
        raise CorruptError(f"{what} is not a JSON object", path=path)
    return value


def check_file_name(name: str, what: str, path: Path) -> None:
    """Refuses a name that leads out of its folder, or is invalid. `what` names it in the file `path`.

    Raises CorruptError, LimitError.
    """
    if not name or name in (".", "..") or set(name) & set("/\\:\0") or not name.isprintable():
        raise CorruptError(f"{what} lists {name[:80]!r}, which is not a file of its folder", path=path)
    if len(os.fsencode(name)) > MAX_FILE_NAME_BYTES:
        raise LimitError(
            f"{what} lists a file name of {len(os.fsencode(name)):,} bytes; file systems allow {MAX_FILE_NAME_BYTES}",
            path=path,
        )


def read_config(path: Path) -> JsonObject:
    """config.json as a dict. Raises CorruptError, NotFoundError."""
    return parse_config(read_text_file(path), path)


def parse_config(raw: bytes, path: Path) -> JsonObject:
    """Parses config.json; of duplicate keys the last wins, as in transformers. Raises CorruptError."""
    return parse_object(raw, str(path), "the file", unique=False)


def load_tokenizer(folder: Path, config: JsonObject | None) -> Tokenizer | None:
    """The tokenizer of a folder, None without one. Raises UnsupportedError, CorruptError."""
    from aprfmt.tokenizer import generation
    from aprfmt.tokenizer.hf import is_tokenizer_file, read_files

    def is_read(name: str) -> bool:
        return is_tokenizer_file(name) or name == generation.FILE_NAME

    names = [name for name in list_names(folder, is_read) if is_read(name)]
    return read_files({name: read_text_file(folder / name) for name in names}, config)


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a folder (or of one tokenizer.json), verified if a signature is required.

    Raises NotFoundError, RefusedError, CorruptError, ChecksumError.
    """
    if os.environ.get(REQUIRED_SIGNER):
        from aprfmt.formats.signatures import check_required

        check_required(path, "hf")
    if is_folder(path):
        config = path / "config.json"
        tokenizer = load_tokenizer(path, read_config(config) if is_file(config) else None)
    else:
        from aprfmt.tokenizer.hf import read_files

        tokenizer = read_files({"tokenizer.json": read_text_file(path)}, None)
    if tokenizer is None:
        raise RefusedError("no tokenizer found in the folder", path=path, hint=f"it must contain {TOKENIZER_FILES}")
    return tokenizer


def read_weight_map(raw: bytes, path: Path) -> dict[str, str]:
    """Tensor name -> shard file name of an index. Raises CorruptError, LimitError."""
    found = parse_object(raw, str(path), "the index").get("weight_map")
    weight_map = {k: v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}
    if not isinstance(found, dict) or len(weight_map) < len(found):
        raise CorruptError("the index lacks 'weight_map' (tensor names to file names)", path=path)
    shards = set(weight_map.values())
    if len(shards) > MAX_SPLITS:
        raise LimitError(f"the index lists {len(shards)} files; the limit is {MAX_SPLITS}", path=path)
    for name in shards:
        check_file_name(name, "the index", path)
    return weight_map
