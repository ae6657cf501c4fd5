"""The tokenizer of a model in an inspection."""

from __future__ import annotations

from collections.abc import Mapping

from aprfmt.formats.apr_metadata import AprMetadata
from aprfmt.light_dataclass import light_dataclass
from aprfmt.model import Model
from aprfmt.tokenizer import ggml
from aprfmt.tokenizer.model import Tokenizer


@light_dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """Counts and special ids of an embedded tokenizer; `chat_template` tells whether it has one."""

    model: str
    pre: str | None
    vocab_size: int
    merges: int
    added: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    unk_id: int | None
    chat_template: bool


def tokenizer_info(model: Model) -> TokenizerInfo | None:
    """Counts and special ids of the embedded tokenizer; None without one.

    The lists of an `.apr` and of a GGUF are counted, not decoded: 150,000 strings would take longer than the rest.
    """
    if isinstance(model.metadata, AprMetadata):
        return _apr_tokenizer_info(model.metadata)
    from aprfmt.formats.gguf import GgufNative

    if (gguf := model.native_as(GgufNative)) is not None:
        entries = {key: e for key, e in gguf.parts[0].kv.entries.items() if key.startswith("tokenizer.")}
        scalars = {key: model.metadata[key] for key, entry in entries.items() if entry.count is None}
        counts = {key: entry.count for key, entry in entries.items()}
        return _info(ggml.from_gguf(scalars), counts.get("tokenizer.ggml.tokens"), counts.get("tokenizer.ggml.merges"))
    return _info(model.tokenizer)


def _apr_tokenizer_info(metadata: AprMetadata) -> TokenizerInfo | None:
    from aprfmt.tokenizer import apr as tokenizer_apr

    keys = (f"tokenizer.{name}" for name in ("vocabulary", "merges", "token_type", "scores"))
    lists = {key: found for key in keys if (found := metadata.peek(key)) is not None}
    short = {key: lists[key][0] if key in lists else metadata[key] for key in metadata}
    if isinstance(own := metadata.get(tokenizer_apr.OWN_KEY), Mapping):
        short[tokenizer_apr.OWN_KEY] = {key: value for key, value in own.items() if key != "patches"}
    n_tokens, n_merges = (lists.get(f"tokenizer.{name}", ([], None))[1] for name in ("vocabulary", "merges"))
    return _info(tokenizer_apr.from_metadata(short), n_tokens, n_merges)


def _info(
    tokenizer: Tokenizer | None, n_tokens: int | None = None, n_merges: int | None = None
) -> TokenizerInfo | None:
    """The facts of `tokenizer`; `n_tokens` and `n_merges` replace the lengths of lists that were cut short."""
    if tokenizer is None:
        return None
    special = tokenizer.special
    return TokenizerInfo(
        model=tokenizer.model, pre=tokenizer.pre, vocab_size=len(tokenizer.tokens) if n_tokens is None else n_tokens,
        merges=len(tokenizer.merges) if n_merges is None else n_merges, added=tokenizer.n_added,
        bos_id=special.get("bos"), eos_id=special.get("eos"), pad_id=special.get("pad"), unk_id=special.get("unk"),
        chat_template=bool(tokenizer.chat_template),
    )  # fmt: skip
