"""Trims a BPE tokenizer to some of its tokens: other texts encode to smaller tokens, down to bytes."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace

from aprfmt.errors import RefusedError
from aprfmt.tokenizer import generation
from aprfmt.tokenizer.alignment import count_real, is_control
from aprfmt.tokenizer.data import TokenType
from aprfmt.tokenizer.hf import is_tokenizer_file
from aprfmt.tokenizer.hf_write import to_hf_files
from aprfmt.tokenizer.model import Tokenizer
from aprfmt.types import Json

_JSON, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
_LISTS = ("vocab.json", "merges.txt", "added_tokens.json", "tokenizer.model")
"""Files of the whole vocabulary that tokenizer.json repeats."""

_LETTERS = (TokenType.BYTE, TokenType.USER_DEFINED)


def closure(tokenizer: Tokenizer, used: Collection[int]) -> list[int]:
    """The ids to keep, ascending: those used, all that their merges are made of, added tokens, and bytes.

    A text whose tokens are `used` has the same tokens without the others: each merge that was applied to it makes one
    of these tokens or a part of one, and all merges that make these are kept.

    Raises RefusedError for a tokenizer without merges.
    """
    if not tokenizer.merges:
        raise RefusedError(
            f"the tokenizer ({tokenizer.model}) has no merges: only a BPE vocabulary can be trimmed",
            hint="use a model with a BPE tokenizer.json",
        )
    ids = {text: i for i, text in enumerate(tokenizer.tokens)}
    parts: dict[str, list[str]] = {}
    for left, right in map(_sides, tokenizer.merges):
        parts.setdefault(left + right, []).extend((left, right))
    n = count_real(tokenizer, len(tokenizer.tokens))
    kinds = tokenizer.types or [int(TokenType.NORMAL)] * n
    found = {i for i in range(n) if is_control(tokenizer, i) or kinds[i] in _LETTERS or len(tokenizer.tokens[i]) == 1}
    todo = [*used]
    while todo:
        found.add(i := todo.pop())
        todo += [ids[text] for text in parts.pop(tokenizer.tokens[i], ()) if text in ids]
    return sorted(found)


def trim(
    tokenizer: Tokenizer,
    kept: list[int],
    folder: Mapping[str, bytes] | None = None,
    generated: Mapping[str, Json] | None = None,
) -> Tokenizer:
    """The tokenizer with the ids `kept`, as of `closure`, in order.

    `folder` has the text files of its model, `generated` is the generation_config.json among them. The tokenizer.json
    and the configs that name ids are edited; lists that tokenizer.json repeats are left out.
    """
    files = tokenizer.files or {name: data for name, data in (folder or {}).items() if is_tokenizer_file(name)}
    new = {old: i for i, old in enumerate(kept)}
    texts = [tokenizer.tokens[i] for i in kept]
    known = {*texts}
    merges = [m for m in tokenizer.merges if {*(sides := _sides(m)), "".join(sides)} <= known]
    extra = dict(tokenizer.extra)
    if generation.SUPPRESSED in extra:
        kind, ids = extra[generation.SUPPRESSED]
        extra[generation.SUPPRESSED] = kind, [new[i] for i in ids if i in new] if isinstance(ids, list) else ids
    made = replace(
        tokenizer, tokens=texts, merges=merges, types=[tokenizer.types[i] for i in kept] if tokenizer.types else [],
        scores=[tokenizer.scores[i] for i in kept] if tokenizer.scores else [], shared=None, files={}, extra=extra,
        special={role: new[i] for role, i in tokenizer.special.items() if i in new},
    )  # fmt: skip
    if _JSON not in files and generated is None:
        return made
    files = {name: data for name, data in files.items() if name not in _LISTS}
    files = _trimmed_files(files, known, new) if _JSON in files else to_hf_files(made)
    if generated is not None:
        files[generation.FILE_NAME] = dump(renumbered(generated, new))
    return replace(made, files=files)


def renumbered(config: Mapping[str, Json], new: Mapping[int, int]) -> dict[str, Json]:
    """A config with the ids of its `*_token_id(s)` and `suppress_tokens` replaced; lists lose ids that are gone."""

    def value_of(value: Json) -> Json:
        if isinstance(value, list):
            return [value_of(i) for i in value if type(i) is not int or i in new]
        return new.get(value) if type(value) is int and value >= 0 else value

    def is_id(key: str) -> bool:
        return key.endswith(("_token_id", "_token_ids")) or key in ("suppress_tokens", "begin_suppress_tokens")

    return {key: value_of(value) if is_id(key) else value for key, value in config.items()}


def _trimmed_files(files: dict[str, bytes], known: set[str], new: Mapping[int, int]) -> dict[str, bytes]:
    document = _object(files[_JSON])
    model, added = document["model"], document.get("added_tokens") or []
    assert isinstance(model, dict)
    assert isinstance(added, list)
    vocabulary, merges = model["vocab"], model["merges"]
    assert isinstance(vocabulary, dict)
    assert isinstance(merges, list)
    model["vocab"] = {text: new[i] for text, i in vocabulary.items() if isinstance(i, int) and i in new}
    pairs = ((merge, _sides(merge) if isinstance(merge, str) else _pair(merge)) for merge in merges)
    model["merges"] = [merge for merge, pair in pairs if {*pair, "".join(pair)} <= known]
    document["added_tokens"] = [_with_id(token, new) for token in added if isinstance(token, dict)]
    document["post_processor"] = _processor(document.get("post_processor"), new)
    out = files | {_JSON: dump(document)}
    if _SETTINGS in files:
        settings = _object(files[_SETTINGS])
        decoder = settings.get("added_tokens_decoder")
        if isinstance(decoder, dict):
            settings["added_tokens_decoder"] = {
                str(new[int(i)]): token for i, token in decoder.items() if int(i) in new
            }
        out[_SETTINGS] = dump(settings)
    return out


def _with_id(token: dict[str, Json], new: Mapping[int, int]) -> Json:
    i = token.get("id")
    return token | ({"id": new[i]} if isinstance(i, int) else {})


def _processor(value: Json, new: Mapping[int, int]) -> Json:
    """A post-processor: `ids` of a template, and [text, id] pairs (`sep`, `cls`)."""
    if isinstance(value, dict):
        return {
            key: [new[i] for i in part if isinstance(i, int)]
            if key == "ids" and isinstance(part, list)
            else _processor(part, new)
            for key, part in value.items()
        }
    if isinstance(value, list):
        if len(value) == 2 and isinstance(value[0], str) and type(value[1]) is int:
            return [value[0], new[value[1]]]
        return [_processor(part, new) for part in value]
    return value


def _sides(merge: str) -> tuple[str, ...]:
    left, _, right = merge.partition(" ")
    return left, right


def _pair(merge: Json) -> tuple[str, ...]:
    return tuple(map(str, merge)) if isinstance(merge, list) else ()


def _object(data: bytes) -> dict[str, Json]:
    value = json.loads(data)
    assert isinstance(value, dict)
    return value


def dump(value: Mapping[str, object]) -> bytes:
    """The text of a JSON file."""
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode("utf-8", "replace")
