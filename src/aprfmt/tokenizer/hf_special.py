"""Special ids, add-flags and chat templates of Hugging Face files, chosen as llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from aprfmt.errors import CorruptError, RefusedError

__all__ = ["chat_templates", "special_ids"]

_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_FLAGS = ("add_bos", "add_eos", "add_sep", "add_space_prefix")
_LLAMA_TYPES = ("llama", "mistral")
_NO_BOS_VOCAB_SIZE = 49152
"""Small code-model vocabularies under llama classes (Granite, SmolLM): never a BOS in front."""


def special_ids(
    parsed: Mapping[str, Any],
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    added: Mapping[str, int],
    tokens: Sequence[str],
    notes: list[str],
) -> tuple[dict[str, int], dict[str, bool]]:
    """Special ids by role, and the add_* flags.

    Ids come from the texts in tokenizer_config.json, then from the ids in config.json (the first of a list).
    Flags come from the post-processor, then from tokenizer_config.json's add_*_token.

    Args:
        parsed: tokenizer.json.
        settings: tokenizer_config.json.
        config: config.json.
        added: ids of the added tokens by text.
        tokens: text of each id.
        notes: what the files name and the vocabulary has not is added here.

    Raises:
        RefusedError: a token that is put around every text is not in the vocabulary.
    """
    texts = {role: _text(settings.get(f"{role}_token")) for role in _ROLES}
    texts["bos"] = texts["bos"] or texts["cls"]
    texts["eos"] = texts["eos"] or texts["sep"]
    flags: dict[str, bool] = {}
    for processor in _processors(parsed.get("post_processor")):
        _apply_processor(processor, texts, flags)
    for role in _ROLES:
        value = settings.get(f"add_{role}_token")
        if isinstance(value, bool):
            flags.setdefault(f"add_{role}", value)
    found: dict[str, int] = {}
    for role, text in texts.items():
        i = None if text is None else _find(text, added, tokens)
        if i is not None:
            found[role] = i
        elif text is not None:
            _missing(role, text, flags, notes)
    _from_config(config, len(tokens), found, notes)
    if _is_llama(config):
        prefix = settings.get("add_prefix_space")
        if isinstance(prefix, bool):
            flags["add_space_prefix"] = prefix
        if config.get("vocab_size") == _NO_BOS_VOCAB_SIZE:
            flags["add_bos"] = False
    return found, {flag: value for flag, value in flags.items() if flag in _FLAGS}


def _from_config(config: Mapping[str, Any], n: int, found: dict[str, int], notes: list[str]) -> None:
    """Adds to `found` the ids of config.json for roles that are open."""
    size = config.get("vocab_size")
    for role in _ROLES:
        config_id = _config_id(config, f"{role}_token_id")
        if config_id is None:
            continue
        if config_id < max(n, size if isinstance(size, int) else 0):
            found.setdefault(role, config_id)
        else:
            notes.append(f"config.json: {role}_token_id {config_id} is no id of the {n} tokens")


def _missing(role: str, text: str, flags: Mapping[str, bool], notes: list[str]) -> None:
    if flags.get(f"add_{role}"):
        raise RefusedError(
            f"every text is to get the {role} token {text!r}, which is not in the vocabulary",
            path="tokenizer_config.json",
            hint="the tokenizer files belong to different models: take all of them from one",
        )
    notes.append(f"tokenizer_config.json: the {role} token {text!r} is not in the vocabulary")


def chat_templates(
    files: Mapping[str, bytes], settings: Mapping[str, Any]
) -> tuple[str | None, dict[str, str]]:
    """The default chat template and the further ones by name.

    Template files win over tokenizer_config.json, as they do for transformers. Raises CorruptError for files
    that are no UTF-8 text or no JSON, and for templates that are no text.
    """
    folder, suffix = "additional_chat_templates/", ".jinja"
    named = {
        name[len(folder) : -len(suffix)]: _utf8(files, name)
        for name in sorted(files)
        if name.startswith(folder) and name.endswith(suffix)
    }
    stored: object = settings.get("chat_template")
    if "chat_template.jinja" in files:
        stored = _utf8(files, "chat_template.jinja")
    elif stored is None and "chat_template.json" in files:
        try:
            holder = json.loads(files["chat_template.json"])
        except (ValueError, RecursionError) as error:
            raise CorruptError(f"no valid JSON: {error}", path="chat_template.json") from error
        stored = holder.get("chat_template") if isinstance(holder, Mapping) else holder
    if isinstance(stored, list):
        named = {**_listed(stored), **named}
        return named.pop("default", None), named
    if stored is not None and not isinstance(stored, str):
        raise CorruptError(f"chat_template is no text: {str(stored)[:60]}", path="tokenizer_config.json")
    return stored, named


def _listed(entries: list[Any]) -> dict[str, str]:
    named = {}
    for n, entry in enumerate(entries):
        name, text = (
            (entry.get("name"), entry.get("template")) if isinstance(entry, Mapping) else (None, None)
        )
        if not isinstance(name, str) or not isinstance(text, str):
            raise CorruptError(f"chat_template[{n}] is no name with a text", path="tokenizer_config.json")
        named[name] = text
    return named


def _utf8(files: Mapping[str, bytes], name: str) -> str:
    try:
        return files[name].decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptError(f"no UTF-8 text: {error}", path=name) from error


def _text(value: object) -> str | None:
    """A special token's text, given as a string or as an object with `content`."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) and text else None


def _find(text: str, added: Mapping[str, int], tokens: Sequence[str]) -> int | None:
    if text in added:
        return added[text]
    try:
        return tokens.index(text)
    except ValueError:
        return None


def _config_id(config: Mapping[str, Any], key: str) -> int | None:
    nested = config.get("text_config")
    value = config.get(key)
    if value is None and isinstance(nested, Mapping):
        value = nested.get(key)
    if isinstance(value, list) and value:
        value = value[0]
    return value if type(value) is int and value >= 0 else None


def _is_llama(config: Mapping[str, Any]) -> bool:
    classes = config.get("architectures")
    names = classes if isinstance(classes, list) else []
    return config.get("model_type") in _LLAMA_TYPES or any(
        isinstance(name, str) and name.lower().startswith(_LLAMA_TYPES) for name in names
    )


def _processors(post_processor: object) -> list[Mapping[str, Any]]:
    if not isinstance(post_processor, Mapping):
        return []
    inner = post_processor.get("processors", [post_processor])
    return [step for step in inner if isinstance(step, Mapping)] if isinstance(inner, list) else []


def _apply_processor(step: Mapping[str, Any], texts: dict[str, str | None], flags: dict[str, bool]) -> None:
    """What a post-processor adds around a text, into `flags`; it may reveal or overrule special texts too."""
    kind = step.get("type")
    if kind == "ByteLevel":
        flags.setdefault("add_bos", False)
        flags.setdefault("add_eos", False)
    elif kind in ("RobertaProcessing", "BertProcessing"):
        flags.update(add_bos=True, add_eos=True, add_sep=True)
        for role, stand_in in (("cls", "bos"), ("sep", "eos")):
            pair = step.get(role)
            first = (
                pair[0] if isinstance(pair, list) and pair and isinstance(pair[0], str) else texts[stand_in]
            )
            texts[role] = texts[role] or first
    elif kind == "TemplateProcessing":
        _apply_template(step, texts, flags)


def _apply_template(step: Mapping[str, Any], texts: dict[str, str | None], flags: dict[str, bool]) -> None:
    single, pair = step.get("single"), step.get("pair")
    parts = single if isinstance(single, list) else []
    first, last = (_inserted(parts[0]), _inserted(parts[-1])) if len(parts) > 1 else (None, None)
    if first is not None:
        if first not in (texts["bos"], texts["cls"]):
            texts["bos"] = texts["bos"] or first
        flags["add_bos"] = first in (texts["bos"], texts["cls"])
    if last is not None:
        if texts["eos"] is not None and last != texts["eos"]:
            # The template ends texts with another token than the configured one, which then only ends turns.
            texts["eot" if texts.get("eot") is None else "eom"] = texts["eos"]
        texts["eos"] = last
        flags["add_eos"] = True
    middle = _between(pair if isinstance(pair, list) else [], first, last)
    if middle:
        separators = {texts["sep"], texts["eos"]} - {None}
        # One separator is the end token of A where the template ends with one; a second one always counts.
        counted = middle[1:2] if last is not None or len(middle) == 2 else middle[:1]
        flags["add_sep"] = any(_inserted(part) in separators for part in counted) or (
            last is None and _inserted(middle[0]) in separators
        )


def _inserted(part: object) -> str | None:
    """The special token that a template part inserts."""
    token = part.get("SpecialToken") if isinstance(part, Mapping) else None
    text = token.get("id") if isinstance(token, Mapping) else None
    return text if isinstance(text, str) else None


def _between(pair: list[Any], first: str | None, last: str | None) -> list[Any]:
    """What a pair template puts between its sequences, [] unless its form is [first] A ... B [last]."""

    def sequence(part: object) -> object:
        inner = part.get("Sequence") if isinstance(part, Mapping) else None
        return inner.get("id") if isinstance(inner, Mapping) else None

    if pair and first is not None and _inserted(pair[0]) == first:
        pair = pair[1:]
    if pair and last is not None and _inserted(pair[-1]) == last:
        pair = pair[:-1]
    if len(pair) < 2 or sequence(pair[0]) != "A" or sequence(pair[-1]) != "B":
        return []
    return pair[1:-1]
