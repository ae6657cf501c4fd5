"""`apr vocab`: tokenize and decode text; compare two tokenizers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from aprfmt.cli.options import ModelArgument
from aprfmt.cli.output import out, pairs, printable, table
from aprfmt.errors import UsageError
from aprfmt.text import plural

if TYPE_CHECKING:
    from aprfmt.inspection.vocabulary import TokenizerFacts, Tokens, Vocabulary


def command(
    file: ModelArgument,
    text: Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts to encode.")] = None,
    *,
    ids: Annotated[str | None, typer.Option(metavar="IDS", help="Decode these ids: '1 15043 3186'.")] = None,
    stdin: Annotated[bool, typer.Option("--stdin", help="Encode standard input as one text.")] = False,
    against: Annotated[
        str | None, typer.Option(metavar="FILE", help="Compare with this tokenizer; exit 1 if they differ.")
    ] = None,
    no_special: Annotated[bool, typer.Option("--no-special", help="Do not add special tokens (such as BOS).")] = False,
) -> int:
    """Encode text with a model's own tokenizer, decode ids, or compare two tokenizers.

    FILE can also be a tokenizer.json or a folder with a tokenizer. Without TEXT, --against compares on a built-in
    set of difficult texts.

    \b
    apr vocab m.gguf "Hello, world!"
    apr vocab ./Qwen3-0.6B --ids "9707 11 1879"
    apr vocab m.gguf --against ./Qwen3-0.6B
    """
    from aprfmt.inspection.vocabulary import vocab

    texts = list(text or [])
    if stdin:
        if texts:
            raise UsageError("--stdin already provides the text")
        texts = [sys.stdin.buffer.read().decode("utf-8", "replace")]
    found = vocab(file, texts, ids=ids, against=against, special=not no_special)
    out.result(found.to_json(), _lines(found))
    return 0 if found.identical else 1


def _lines(found: Vocabulary) -> Iterator[str]:
    if found.other is None and not found.texts:
        yield out.style(printable(found.file), "bold")
        yield from pairs(_facts(found.facts))
    for tokens in found.texts:
        yield from _tokens(tokens)
    if found.other is None:
        return
    for note in found.notes:
        yield printable(note)
    if found.identical:
        on = f", the same ids for {plural(found.compared, 'text')}" if found.compared else ""
        yield f"{out.style('same', 'green')} tokenizer: {plural(found.facts.vocab_size, 'token')}{on}"
        return
    yield f"{out.style('different', 'red')} tokenizers"
    yield from table(
        ["what", "count", "first"], [[d.what, f"{d.count:,}", d.first] for d in found.differences], right="count"
    )


def _tokens(tokens: Tokens) -> Iterator[str]:
    if tokens.text is None:
        yield printable(tokens.decoded) if "\n" not in tokens.decoded else repr(tokens.decoded)
    rows = [[str(t.id), t.piece, repr(t.text)] for t in tokens.tokens]
    yield from table(["id", "piece", "text"], rows, right="id")
    yield f"{plural(len(tokens.tokens), 'token')}: {' '.join(map(str, tokens.ids))}"


def _facts(facts: TokenizerFacts) -> Iterator[tuple[str, str]]:
    yield "algorithm", facts.model
    yield "pre-tokenizer", facts.pre or "(unknown)"
    yield "tokens", f"{facts.vocab_size:,}"
    yield "merges", f"{facts.merges:,}"
    yield "special", ", ".join(f"{role} {i}" for role, i in facts.special.items()) or "(none)"
    yield "flags", ", ".join(f"{name} {str(on).lower()}" for name, on in facts.flags.items()) or "(none)"
