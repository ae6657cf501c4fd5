"""Writes docs/pre-tokenizers.md: our choice of `tokenizer.ggml.pre` beside llama.cpp's hash, for all material.

    python tools/pre_table.py [--check]

With --check nothing is written; exit 1 when the committed table is another one. The material comes from
tools/fetch_material.py.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from aprfmt import formats
from aprfmt.errors import AprError
from aprfmt.tokenizer import hf_write, pre, rules

CACHE = Path(os.environ.get("APR_MATERIAL", Path.home() / ".cache" / "aprfmt" / "material"))
TABLE = Path(__file__).resolve().parent.parent / "docs" / "pre-tokenizers.md"

HEAD = """# Pre-tokenizers: our choice and llama.cpp's

A byte-level BPE in a GGUF names its splitting rules by one word, `tokenizer.ggml.pre`. llama.cpp's converter finds
the word by a hash of the ids of a fixed text and gives up when the hash is not in its table. `apr` takes the same
hash, compares the rules in `tokenizer.json` with those that llama.cpp implements ("structure"), which decide where
the two disagree, and names the nearest ones when none fits. `--pre NAME` overrules it. Written by
`tools/pre_table.py`.

GPT-4o: the hash says `gpt-4o`, whose regex in llama.cpp ends a word before a combining mark, although the
tokenizer's own regex has the marks in it. Of 10,000 mixed texts (`tests/support/texts.py`) 1,247 get other ids than
from `tokenizers`. Of all 91 names that llama.cpp knows, `granite-embed-multi-97m` gives equal ids for all 10,000; the
next ones (`gpt-4o`, `llama4`, `kanana2`, `talkie`, `minimax-m2`) differ on 101 of the first 1,000. It takes whole
tokens before any merge, which changes nothing where the merges give every token, and that is checked. Both rules keep
a capital after a small letter in one word where the letters are not ASCII ("éÉ"). llama.cpp loads the name from build
b9484 on (b9479 does not); an older one needs `--pre gpt-4o`, and the export says so.

Llama 3: without a BOS in its post-processor the ids of the fixed text are those of another name, which does not take
whole tokens before merges; the tokenizer says that it does.

"""
COLUMNS = ("tokenizer", "our choice", "found by", "llama.cpp's hash", "agree")


def _row(name: str, text: bytes) -> tuple[str, ...]:
    choice = pre.detect(text)
    hashed = pre.hash_name(text)
    agree = "-" if None in (hashed, choice.name) else "yes" if choice.name == hashed else "no, see above"
    found_by = choice.how if choice.name else "SentencePiece-style"
    return name, choice.name or "none needed", found_by, hashed or "not in its table", agree


def real_rows() -> Iterator[tuple[str, ...]]:
    """One row a tokenizer.json of the material."""
    for folder in sorted((CACHE / "tokenizers").iterdir()):
        yield _row(folder.name, (folder / "tokenizer.json").read_bytes())


def gguf_rows() -> Iterator[tuple[str, ...]]:
    """One row a GGUF; its tokenizer.json is made from its lists, so that hash and structure can be taken."""
    paths = [*(CACHE / "smollm2").glob("*.gguf"), *sorted((CACHE / "llama.cpp-models").glob("*.gguf"))]
    for path in paths:
        name = path.name.removeprefix("ggml-vocab-").removesuffix(".gguf")
        with formats.open(path) as model:
            tok = model.tokenizer
            assert tok is not None
            stated = f"{tok.model}, `{tok.pre}`" if tok.pre else tok.model
            try:
                text = hf_write.to_hf_files(tok)["tokenizer.json"]
            except AprError as error:
                yield name, stated, error.message, "-", "-"
                continue
        choice = pre.detect(text)
        same = "-" if tok.model != "gpt2" else "yes" if _alike(choice.name, tok.pre) else "no"
        found = choice.name or "none needed"
        yield name, stated, found, pre.hash_name(text) or "not in its table", same


def _alike(ours: str | None, stated: str | None) -> bool:
    stated = stated or rules.UNNAMED
    return ours == stated or (rules.rule(ours) is not None and rules.rule(ours) == rules.rule(stated))


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def render() -> str:
    """The whole document."""
    ours = ("vocabulary", "stated in the file", "our choice for its tokenizer.json", "llama.cpp's hash", "same rules")
    return (
        HEAD
        + "## tokenizer.json files\n\n"
        + _table(COLUMNS, list(real_rows()))
        + "\n## GGUF vocabularies, through the tokenizer.json that `apr export --format hf` makes of them\n\n"
        + _table(ours, list(gguf_rows()))
    )


def main(arguments: list[str]) -> int:
    """Writes the table, or compares it with --check."""
    text = render()
    if "--check" in arguments:
        same = TABLE.is_file() and TABLE.read_text("utf-8") == text
        print("the table is up to date" if same else "the table is another one", file=sys.stderr)
        return 0 if same else 1
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(text, "utf-8")
    print(json.dumps({"written": TABLE.name, "rows": text.count("\n| ")}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
