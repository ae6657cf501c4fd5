"""vLLM responses: JSON lines with `prompt_logprobs`, one per requested text.

A line is a choice of /v1/completions (or a whole response, or one wrapped by a batch) with `prompt_token_ids` and
`prompt_logprobs`: null for the first token, then for each token an object of ids, each with `logprob`. It contains the
k most likely ids and the prompt's own token.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from aprfmt.errors import CorruptError, NotFoundError, RefusedError, UsageError, storage_errors
from aprfmt.formats.teacher_files import Answer, TeacherHeader, answer_of
from aprfmt.io.jsonx import check_size
from aprfmt.limits import MAX_LIST_BYTES
from aprfmt.texts.sequences import Windows, pieces_of
from aprfmt.types import PathLike

_RESOLUTION = float(np.finfo(np.float32).eps)
"""Minimum residual mass: below it, float32 rounding hides the probability of the other ids."""


class Responses:
    """A file of responses; the line offsets are kept in memory.

    Attributes:
        model: the model name in the lines; "" if absent.
    """

    def __init__(self, path: Path) -> None:
        """Reads all lines once. Raises NotFoundError, CorruptError, StorageError."""
        if not path.is_file():
            raise NotFoundError("response file not found", path=path)
        self.path = path
        self.model = ""
        self._starts: dict[bytes, int] = {}
        start = 0
        with storage_errors(path), path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LIST_BYTES + 1), b""), 1):
                if line.strip():
                    ids, _, model = _response(line, path, number)
                    self.model = self.model or model
                    self._starts[_key(ids)] = start
                start += len(line)

    def answer(self, windows: Windows, number: int, facts: TeacherHeader) -> Answer:
        """The answer for a sequence. Raises RefusedError if a piece is missing, UsageError, CorruptError."""
        columns = []
        with storage_errors(self.path), self.path.open("rb") as file:
            for piece in pieces_of(windows.rows([number]), 0):
                start = self._starts.get(_key(piece.prompt))
                if start is None:
                    raise RefusedError(
                        f"sequence {number}: no response to its {len(piece.prompt)} tokens from position {piece.start}",
                        path=self.path,
                        hint="apr teacher --prompts FILE writes the prompts; send each one as token ids",
                    )
                file.seek(start)
                _, logprobs, _ = _response(file.readline(MAX_LIST_BYTES + 1), self.path, None)
                for place, label in zip(piece.places_P, piece.labels_P.tolist(), strict=True):
                    known = parse_position(logprobs[place - piece.start + 1], label, facts.k, number, self.path)
                    columns.append(tuple(np.array([value]) for value in (place, *known)))
        return answer_of(columns, facts)


def parse_position(
    listed: object, label: int, k: int, window: int, path: PathLike
) -> tuple[list[int], list[float], list[float], float]:
    """Parses the log-probabilities `listed` of one position: an object with `logprob` for each id.

    Returns the top `k` ids, their log-probabilities (descending), the residual mass in a list of one, and the
    log-probability of `label`.
    """
    try:
        entries = listed.items() if isinstance(listed, Mapping) else ()
        found = sorted(((int(i), float(entry["logprob"])) for i, entry in entries), key=lambda pair: -pair[1])
        own = dict(found)[label]
    except (AttributeError, TypeError, ValueError, KeyError):
        raise CorruptError(
            f"sequence {window}: the log-probabilities of a position lack its token {label}", path=path
        ) from None
    if len(found) < k:
        raise UsageError(
            f"sequence {window}: the response has {len(found)} ids per position, --top-k requires {k}",
            hint=f"use --top-k {len(found)}, or set prompt_logprobs={k} in vLLM",
        )
    ids, logprobs = [i for i, _ in found[:k]], [value for _, value in found[:k]]
    return ids, logprobs, [max(_RESOLUTION, 1.0 - math.fsum(map(math.exp, logprobs)))], own


def _key(ids: list[int]) -> bytes:
    return hashlib.sha256(np.array(ids, "<i4").tobytes()).digest()


def _response(line: bytes, path: Path, number: int | None) -> tuple[list[int], list[object], str]:
    """Token ids, log-probabilities, and the model's name."""
    where = f"line {number}" if number is not None else "a line"
    try:
        if len(line) > MAX_LIST_BYTES:
            raise ValueError(f"over {MAX_LIST_BYTES:,} bytes")
        check_size(line)
        found = json.loads(line)
        found = found["response"]["body"] if isinstance(found.get("response"), dict) else found
        choice = found["choices"][0] if "choices" in found else found
        ids = [int(i) for i in choice["prompt_token_ids"]]
        logprobs = choice["prompt_logprobs"]
        np.array(ids, "<i4")
        if not isinstance(logprobs, list) or len(logprobs) != len(ids):
            raise TypeError("not a list as long as prompt_token_ids")
        return ids, logprobs, str(found.get("model") or "")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise CorruptError(
            f"{where} is not a response with prompt_token_ids and prompt_logprobs: {what}",
            path=path,
            hint="set return_token_ids and prompt_logprobs; docs/teacher-files.md has a script",
        ) from None
