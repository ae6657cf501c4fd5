"""Special tokens and chat templates of a Hugging Face tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aprfmt.errors import CorruptError, RefusedError
from aprfmt.tokenizer.hf_documents import Document, read_json, read_text, token_text
from aprfmt.tokenizer.model import Tokenizer
from aprfmt.types import Json, JsonObject

_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


_FLAGS = ("add_bos", "add_eos", "add_sep", "add_space_prefix")


_LLAMA_TYPES = ("llama", "mistral")


_NO_BOS_VOCAB_SIZE = 49152
"""Small code-model vocabularies under llama classes (Granite, SmolLM): never prepend BOS."""


def special_ids(
    document: Document, tokenizer: Tokenizer, added: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, bool]]:
    """Special ids by role, and the add_* flags.

    Ids come from the texts in tokenizer_config.json, then from the ids in config.json (the first of a list). Flags come
    from the post-processor, then from tokenizer_config.json's add_*_token. Named tokens that the vocabulary lacks are
    added to the tokenizer's notes. `added` has the ids of the added tokens by text.

    Raises RefusedError if a token that is put around every text is not in the vocabulary.
    """
    settings, config, tokens, notes = document.settings, document.config, tokenizer.tokens, tokenizer.notes
    texts = {role: token_text(settings.get(f"{role}_token")) or None for role in _ROLES}
    texts["bos"] = texts["bos"] or texts["cls"]
    texts["eos"] = texts["eos"] or texts["sep"]
    flags: dict[str, bool] = {}
    for processor in _processors(document.parsed.get("post_processor")):
        _apply_processor(processor, texts, flags)
    for role in _ROLES:
        value = settings.get(f"add_{role}_token")
        if isinstance(value, bool):
            flags.setdefault(f"add_{role}", value)
    found: dict[str, int] = {}
    for role, text in texts.items():
        if text is None:
            continue
        if text in added:
            found[role] = added[text]
        elif text in tokens:
            found[role] = tokens.index(text)
        elif flags.get(f"add_{role}"):
            raise RefusedError(
                f"the {role} token {text!r}, added to every text, is not in the vocabulary",
                path="tokenizer_config.json",
                hint="the tokenizer files are from different models: use those of one model",
            )
        else:
            notes.append(f"tokenizer_config.json: the {role} token {text!r} is not in the vocabulary")
    _add_from_config(config, len(tokens), found, notes)
    if _is_llama(config):
        prefix = settings.get("add_prefix_space")
        if isinstance(prefix, bool):
            flags["add_space_prefix"] = prefix
        if config.get("vocab_size") == _NO_BOS_VOCAB_SIZE:
            flags["add_bos"] = False
    return found, {flag: value for flag, value in flags.items() if flag in _FLAGS}


def _add_from_config(config: Mapping[str, Json], n: int, found: dict[str, int], notes: list[str]) -> None:
    """Adds to `found` the ids of config.json for unset roles."""
    size, nested = config.get("vocab_size"), config.get("text_config")
    most = max(n, size if isinstance(size, int) else 0)
    for role in _ROLES:
        key = f"{role}_token_id"
        value = config.get(key)
        if value is None and isinstance(nested, dict):
            value = nested.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        if type(value) is not int or value < 0:
            continue
        if value < most:
            found.setdefault(role, value)
        else:
            notes.append(f"config.json: {key} {value} is not an id of the {n} tokens")


def _is_llama(config: Mapping[str, Json]) -> bool:
    classes = config.get("architectures")
    names = classes if isinstance(classes, list) else []
    return config.get("model_type") in _LLAMA_TYPES or any(
        isinstance(name, str) and name.lower().startswith(_LLAMA_TYPES) for name in names
    )


def _processors(post_processor: Json) -> list[JsonObject]:
    if not isinstance(post_processor, dict):
        return []
    inner = post_processor.get("processors", [post_processor])
    return [step for step in inner if isinstance(step, dict)] if isinstance(inner, list) else []


def _apply_processor(step: JsonObject, texts: dict[str, str | None], flags: dict[str, bool]) -> None:
    """Reads the tokens that a post-processor adds into `flags`; it may also reveal or override special texts."""
    kind = step.get("type")
    if kind == "ByteLevel":
        flags.setdefault("add_bos", False)
        flags.setdefault("add_eos", False)
    elif kind in ("RobertaProcessing", "BertProcessing"):
        flags.update(add_bos=True, add_eos=True, add_sep=True)
        for role, stand_in in (("cls", "bos"), ("sep", "eos")):
            pair = step.get(role)
            named = pair[0] if isinstance(pair, list) and pair else None
            texts[role] = texts[role] or (named if isinstance(named, str) else texts[stand_in])
    elif kind == "TemplateProcessing":
        _apply_template(step, texts, flags)


def _apply_template(step: JsonObject, texts: dict[str, str | None], flags: dict[str, bool]) -> None:
    single, pair = step.get("single"), step.get("pair")
    parts = single if isinstance(single, list) else []
    first, last = (_special_text(parts[0]), _special_text(parts[-1])) if len(parts) > 1 else (None, None)
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
    middle = _separators(pair if isinstance(pair, list) else [], first, last)
    if middle:
        separators = {texts["sep"], texts["eos"]} - {None}
        # One separator is the end token of A if the template ends with one; a second one always counts.
        counted = middle[1:2] if last is not None or len(middle) == 2 else middle[:1]
        flags["add_sep"] = any(_special_text(part) in separators for part in counted) or (
            last is None and _special_text(middle[0]) in separators
        )


def _template_id(part: Json, kind: str) -> str | None:
    """The id of a template part of a `kind`: "SpecialToken" (the inserted text) or "Sequence"."""
    inner = part.get(kind) if isinstance(part, dict) else None
    name = inner.get("id") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else None


def _special_text(part: Json) -> str | None:
    return _template_id(part, "SpecialToken")


def _separators(pair: Sequence[Json], first: str | None, last: str | None) -> Sequence[Json]:
    """What a pair template puts between its sequences, [] unless its form is [first] A ... B [last]."""
    if pair and first is not None and _special_text(pair[0]) == first:
        pair = pair[1:]
    if pair and last is not None and _special_text(pair[-1]) == last:
        pair = pair[:-1]
    if len(pair) < 2 or _template_id(pair[0], "Sequence") != "A" or _template_id(pair[-1], "Sequence") != "B":
        return []
    return pair[1:-1]


def chat_templates(files: Mapping[str, bytes], settings: Mapping[str, Json]) -> tuple[str | None, dict[str, str]]:
    """The default chat template and the further ones by name.

    Template files take precedence over tokenizer_config.json, as in transformers. Raises CorruptError for files that
    are not UTF-8 text or not JSON, and for templates that are not text.
    """
    folder, suffix = "additional_chat_templates/", ".jinja"
    named = {
        name[len(folder) : -len(suffix)]: read_text(files, name)
        for name in sorted(files)
        if name.startswith(folder) and name.endswith(suffix)
    }
    stored = settings.get("chat_template")
    if "chat_template.jinja" in files:
        stored = read_text(files, "chat_template.jinja")
    elif stored is None and "chat_template.json" in files:
        holder = read_json(files, "chat_template.json")
        stored = holder.get("chat_template") if isinstance(holder, dict) else holder
    if isinstance(stored, list):
        named = {**_read_templates(stored), **named}
        return named.pop("default", None), named
    if stored is not None and not isinstance(stored, str):
        raise CorruptError(f"chat_template is not text: {str(stored)[:60]}", path="tokenizer_config.json")
    return stored, named


def _read_templates(entries: list[Json]) -> dict[str, str]:
    named = {}
    for n, entry in enumerate(entries):
        name = entry.get("name") if isinstance(entry, dict) else None
        text = entry.get("template") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not isinstance(text, str):
            raise CorruptError(f"chat_template[{n}] is not a name with a text", path="tokenizer_config.json")
        named[name] = text
    return named
