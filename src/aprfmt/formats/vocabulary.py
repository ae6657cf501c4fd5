"""The tokenizer of whatever has one."""

from __future__ import annotations

from pathlib import Path

from aprfmt import formats
from aprfmt.errors import RefusedError
from aprfmt.formats.hf_files import read_tokenizer
from aprfmt.io.source import is_folder
from aprfmt.tokenizer.data import NO_VOCABULARY
from aprfmt.tokenizer.encoding import TOKENIZER_JSON
from aprfmt.tokenizer.hf import has_vocabulary
from aprfmt.tokenizer.model import Tokenizer


def read_vocabulary(path: str) -> Tokenizer:
    """The tokenizer of a model, of a folder without weights, or of a tokenizer.json.

    Raises RefusedError for a model without one.
    """
    here = Path(path)
    if here.name == TOKENIZER_JSON or (is_folder(here) and has_vocabulary({f.name: b"" for f in here.iterdir()})):
        return read_tokenizer(here)
    with formats.open(path) as model:
        tokenizer = model.tokenizer
    if tokenizer is None or tokenizer.model == NO_VOCABULARY:
        raise RefusedError("the model has no tokenizer", path=path, hint="pass a folder or file with a tokenizer")
    return tokenizer
