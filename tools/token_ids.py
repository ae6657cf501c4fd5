"""Encodes many texts with llama.cpp and with the tokenizer.json that is written, for every kind of tokenizer.

    python tools/token_ids.py [--texts 10000] [--seed 7] [--jobs 2] [--out docs/token-ids.md] [KIND ...]

A kind is a pre-tokenizer of llama.cpp, or an algorithm: or a kind of file, see KINDS. A table goes to
stdout, and to --out; exit 1 where ids differ for which no reason is known. llama.cpp runs in processes of its own. The
material comes from tools/fetch_material.py.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from token_ids_peer import KINDS, Outcome, compare, explain

HEAD = """# Token ids: llama.cpp and the tokenizer.json that is written

`tools/token_ids.py` writes each kind of tokenizer as a GGUF and as a tokenizer.json, and encodes the same texts with
llama.cpp and with `tokenizers`: sentences in 13 scripts, code, numbers, white space, contractions, emoji, control
characters, special tokens, random code points of all planes, and bytes that are not UTF-8. A tokenizer.json has the
rules that the original tokenizers have; where llama.cpp has others the texts are encoded again by a tokenizer.json
with llama.cpp's, and the ids have to be equal.

"""

TAIL = """
* *llama.cpp's regexes are others*: it compiles in no classes of capitals, so `gpt-4o`, `llama4`, `kanana2`,
  `talkie`, `minimax-m2`, `tekken` and `granite-embed-multi-97m` know a capital only in ASCII, and all but the last
  end a word before a combining mark; `youtu`, `tiny_aya`, `cohere2moe` and `kimi-k2` do not split "helloWorld" at
  all. `tiny_aya` and `cohere2moe` leave what stands before a number in one piece with its first digits.
  `deepseek-llm` and `deepseek-coder` take white space beyond ASCII, such as the ideographic space, for a vertical
  tab. Both rules of each are in `tokenizer/rules.py`.
* *llama.cpp does not normalise to NFC*: Qwen's tokenizers do, and so do the files that are written for their rules.
* *code points that Unicode 14 does not have*: the two have the tables of different versions of Unicode.
* *bytes*: llama.cpp looks at the marks of UTF-8 alone. It takes three bytes for a surrogate where `tokenizers`, which
  gets text, has three U+FFFD; bytes that stand for more than U+10FFFF end it with an exception, so no text has them.
"""


def _table(rows: list[tuple[str, Outcome]]) -> str:
    lines = ["| kind | texts | equal | differ, and why |", "| --- | --- | --- | --- |"]
    for name, outcome in rows:
        equal = outcome.texts - len(outcome.different)
        lines.append(f"| {name} | {outcome.texts:,} | {equal:,} | {explain(outcome) or '-'} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Compares, prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", help="all of them without")
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    kinds = options.kinds or list(KINDS)

    def run(kind: str) -> tuple[str, Outcome]:
        outcome = compare(kind, options.texts, options.seed)
        print(f"{kind}: {len(outcome.different)} differ, {len(outcome.unexplained)} without a reason", file=sys.stderr)
        for text in outcome.unexplained[:3]:
            print(f"    {text!r:.300}", file=sys.stderr)
        return kind, outcome

    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(run, kinds))
    table = HEAD + _table(rows) + TAIL
    print(table)
    if options.out is not None:
        options.out.write_text(table, "utf-8")
    return 1 if any(outcome.unexplained for _, outcome in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
