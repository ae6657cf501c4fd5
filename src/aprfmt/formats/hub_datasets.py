"""Data sets of the hub as training data: hf://datasets/org/name[@revision][/path], in the cache of huggingface_hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path

from aprfmt.errors import MissingDependencyError, NotFoundError
from aprfmt.formats.hub import parse
from aprfmt.formats.hub_errors import cache_folder, failure
from aprfmt.texts.sources import COMPRESSED, split_weights

PREFIX = "hf://datasets/"
_SUFFIXES = ("jsonl", "ndjson", "json", "parquet", "csv", "tsv", "txt")
_PATTERNS = [f"*.{name}{packed}" for name in _SUFFIXES for packed in ("", *COMPRESSED)]
_ADDRESS = re.compile(r"(?P<address>hf://datasets/.+?)(?P<weight>:(\d+(\.\d*)?|\.\d+))?")


def split_sources(texts: Sequence[str]) -> tuple[list[Path], list[Fraction]]:
    """`split_weights` of the values of --data; data sets of the hub are downloaded first.

    Raises UsageError, and as `download_dataset`.
    """
    found = []
    for text in texts:
        match = _ADDRESS.fullmatch(text)
        found.append(text if match is None else f"{download_dataset(match['address'])}{match['weight'] or ''}")
    return split_weights(found)


@cache
def download_dataset(address: str) -> Path:
    """The folder (or file) with the records of a data set; other files are not downloaded.

    Raises UsageError for a malformed address, MissingDependencyError, NotFoundError, StorageError.
    """
    wanted = parse("hf://" + address.removeprefix(PREFIX))
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingDependencyError(
            "data sets of the hub need huggingface_hub", path=address, hint="pip install huggingface_hub"
        ) from error
    inside = [wanted.file, f"{wanted.file}/*"] if wanted.file else _PATTERNS
    try:
        folder = snapshot_download(
            wanted.repo, repo_type="dataset", revision=wanted.revision, allow_patterns=inside,
            cache_dir=str(cache_folder()),
        )  # fmt: skip
    except Exception as error:  # the library raises its own, those of its HTTP client, and OSError
        raise failure(error, wanted, cache_folder(), address) from error
    path = Path(folder, wanted.file)
    if not path.is_file() and not (path.is_dir() and any(each.is_file() for each in path.rglob("*"))):
        raise NotFoundError(
            "the data set has no file of records there", path=address,
            hint=f"apr reads {', '.join(_SUFFIXES)}; name a folder or a file: {PREFIX}{wanted.repo}/PATH",
        )  # fmt: skip
    return path
