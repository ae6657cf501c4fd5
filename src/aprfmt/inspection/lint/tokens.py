"""Rules about tokenizers, chat templates and vocabularies."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from aprfmt.inspection.lint.common import (
    NO_NETWORK,
    NO_TOKENIZER,
    fail,
    gguf_of,
    name_of,
    network_of,
    quoted,
    set_key,
    skip,
    tokenizer_of,
)
from aprfmt.inspection.validate import Check, Subject
from aprfmt.text import first_few, plural
from aprfmt.tokenizer.data import TokenType

_CHAT_NAME = re.compile(r"(?:^|[-_. ])(?:instruct|chat|it|sft|dpo|rlhf|assistant)(?:$|[-_. ])", re.IGNORECASE)
_CHAT_TOKENS = (
    *("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|user|>", "<|assistant|>", "<|start_of_role|>"),
    *("<|turn>", "[INST]", "<|START_OF_TURN_TOKEN|>"),
)
_END_TOKENS = (
    *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "<|eom_id|>"),
    *("<EOT>", "<|return|>", "<|END_OF_TURN_TOKEN|>"),
)


def tokenizer_missing(subject: Subject) -> Iterator[Check]:
    """`tokenizer.missing`: a language model has its tokenizer."""
    if network_of(subject) is None:
        yield skip(NO_NETWORK)
    elif tokenizer_of(subject) is None and subject.embedding is not None:
        fix = f"apr convert {quoted(subject.model)} -o NEW{subject.model.path.suffix} --tokenizer DIR"
        yield fail("the file has no tokenizer: text cannot be turned into token ids", fix)


def chat_template(subject: Subject) -> Iterator[Check]:
    """`tokenizer.no-chat-template`: a chat model has its template."""
    tokenizer = tokenizer_of(subject)
    if tokenizer is None:
        yield skip(NO_TOKENIZER)
        return
    if tokenizer.chat_template or tokenizer.chat_templates:
        return
    known = set(tokenizer.tokens)
    markers = [token for token in _CHAT_TOKENS if token in known]
    is_named = _CHAT_NAME.search(name_of(subject)) is not None
    if not (markers or is_named):
        return
    why = "its name suggests a chat model" if is_named else f"its vocabulary has {first_few(markers)}"
    fix = set_key(subject.model, "tokenizer.chat_template", "@chat_template.jinja")
    if subject.model.convention == "hf":
        fix = "copy the original chat_template.jinja into the folder"
    message = f"{why}, but it has no chat template: programs guess one, often wrongly"
    yield Check("fail" if is_named else "info", message, suggestion=fix)


def no_end(subject: Subject) -> Iterator[Check]:
    """`tokenizer.no-eos`: a token ends texts."""
    tokenizer = tokenizer_of(subject)
    if tokenizer is None or tokenizer.model in ("bert", "none", "rwkv"):
        yield skip(NO_TOKENIZER if tokenizer is None else f"a {tokenizer.model} tokenizer needs none")
    elif not {"eos", "eot", "sep"} & tokenizer.special.keys():
        fix = set_key(subject.model, "tokenizer.ggml.eos_token_id", "ID", "--tokenizer DIR")
        yield fail("no end-of-text token is set: generation never stops by itself", fix)


def no_pre(subject: Subject) -> Iterator[Check]:
    """`tokenizer.pre-missing`: a byte-level BPE names its pre-tokenizer."""
    if gguf_of(subject) is None or subject.model.metadata.get("tokenizer.ggml.model") != "gpt2":
        yield skip("not a GGUF with a byte-level BPE tokenizer")
        return
    pre = subject.model.metadata.get("tokenizer.ggml.pre")
    if pre in (None, "", "default"):
        what = "is missing" if not pre else "is 'default'"
        fix = "convert the original again, which detects the pre-tokenizer: apr export FOLDER -o NEW.gguf"
        yield fail(f"tokenizer.ggml.pre {what}: text may be split by wrong rules", fix)


def no_types(subject: Subject) -> Iterator[Check]:
    """`tokenizer.types-missing`: tokens have types."""
    if gguf_of(subject) is None or "tokenizer.ggml.tokens" not in subject.model.metadata:
        yield skip("not a GGUF with tokens")
    elif "tokenizer.ggml.token_type" not in subject.model.metadata:
        fix = "convert the original again: apr export FOLDER -o NEW.gguf"
        yield fail("token types are missing: control tokens are read as plain text", fix)


def control_as_text(subject: Subject) -> Iterator[Check]:
    """`tokenizer.control-as-text`: tokens that begin and end a turn are control tokens."""
    tokenizer = tokenizer_of(subject)
    if tokenizer is None or not tokenizer.types:
        yield skip("token types are missing")
        return
    ids = {token: i for i, token in enumerate(tokenizer.tokens) if token in _END_TOKENS or token in _CHAT_TOKENS}
    plain = [token for token, i in ids.items() if i < len(tokenizer.types) and tokenizer.types[i] == TokenType.NORMAL]
    if plain:
        fix = "mark them as special in the original tokenizer files and convert again"
        message = f"{first_few(plain)} {'is' if len(plain) == 1 else 'are'} stored as plain text, not as control tokens"
        yield fail(message, fix)


def doubled_tokens(subject: Subject) -> Iterator[Check]:
    """`tokenizer.duplicates`: tokens are unique."""
    tokenizer = tokenizer_of(subject)
    if tokenizer is None:
        yield skip(NO_TOKENIZER)
        return
    doubled = [token for token, n in Counter(tokenizer.tokens).items() if n > 1]
    if doubled:
        fix = "fix the original tokenizer files and convert again"
        yield fail(f"{plural(len(doubled), 'token')} occur twice: {first_few(map(repr, doubled))}", fix)


def unpadded(subject: Subject) -> Iterator[Check]:
    """`vocab.unpadded`: the rows of the embedding are a multiple of 64."""
    embedding = subject.embedding
    if embedding is None or len(embedding.shape) != 2 or network_of(subject) is None:
        yield skip("no token embedding")
    elif embedding.shape[0] % 64:
        rows = embedding.shape[0]
        fix = f"for training or tensor parallelism, resize the embedding to {rows + -rows % 64} rows"
        message = (
            f"the vocabulary has {rows:,} rows, not a multiple of 64: slow on tensor cores, hard to split over devices"
        )
        yield fail(message, fix, embedding.name)
