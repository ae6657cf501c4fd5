"""The tokenizer of whatever has one."""

from __future__ import annotations

from pathlib import Path

from aprfmt import formats
from aprfmt.errors import RefusedError, UnknownFormatError
from aprfmt.formats.hf_files import TOKENIZER_FILES, WEIGHT_SUFFIXES, read_tokenizer
from aprfmt.io.source import is_folder
from aprfmt.tokenizer.data import NO_VOCABULARY
from aprfmt.tokenizer.encoding import TOKENIZER_JSON
from aprfmt.tokenizer.hf import has_vocabulary
from aprfmt.tokenizer.model import Tokenizer


def read_vocabulary(path: str) -> Tokenizer:
    """The tokenizer of a model, of a folder without weights, or of a tokenizer.json.

    Raises RefusedError for a model without one, and for a folder that has neither.
    """
    here = Path(path)
    names = [file.name for file in here.iterdir()] if is_folder(here) else None
    if here.name == TOKENIZER_JSON or (names is not None and has_vocabulary(dict.fromkeys(names, b""))):
        return read_tokenizer(here)
    try:
        with formats.open(path) as model:
            tokenizer = model.tokenizer
    except UnknownFormatError:
        if names is None or any(name.endswith(WEIGHT_SUFFIXES) for name in names):
            raise
        raise RefusedError(
            "no tokenizer and no model found in the folder", path=path,
            hint=f"pass a model, such as hf://org/repo, or a folder with {TOKENIZER_FILES}",
        ) from None  # fmt: skip
    if tokenizer is None or tokenizer.model == NO_VOCABULARY:
        raise RefusedError("the model has no tokenizer", path=path, hint="pass a folder or file with a tokenizer")
    return tokenizer
