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

HEAD = """# Token ids: llama.cpp compared with the tokenizer.json that apr writes

`tools/token_ids.py` writes each kind of tokenizer as a GGUF and as a tokenizer.json and encodes the same texts with
llama.cpp and with `tokenizers`: sentences in 13 scripts, code, numbers, white space, contractions, emoji, control
characters, special tokens, random code points of all planes, and bytes that are not UTF-8. The tokenizer.json follows
the rules of the original tokenizer. Where llama.cpp's rules differ, the texts are encoded again with a tokenizer.json
that follows llama.cpp's rules, and then the ids must be equal.

"""

TAIL = """
* *llama.cpp uses different regexes*: it has no Unicode classes of uppercase letters, so `gpt-4o`, `llama4`, `kanana2`,
  `talkie`, `minimax-m2`, `tekken` and `granite-embed-multi-97m` recognize ASCII capitals only, and all but the last
  end a word before a combining mark; `youtu`, `tiny_aya`, `cohere2moe` and `kimi-k2` do not split "helloWorld".
  `tiny_aya` and `cohere2moe` keep the text before a number in one piece with its first digits.
  `deepseek-llm` and `deepseek-coder` treat white space beyond ASCII, such as the ideographic space, as a vertical
  tab. `tokenizer/rules.py` has both rules of each.
* *llama.cpp does not normalize to NFC*: Qwen's tokenizers do, and so does the tokenizer.json written for them.
* *code points newer than Unicode 14*: the two libraries have tables of different Unicode versions.
* *invalid UTF-8*: llama.cpp checks only the marker bits of UTF-8. It decodes three bytes as a surrogate where
  `tokenizers`, which receives text, sees three U+FFFD. Bytes that encode more than U+10FFFF raise an exception in
  llama.cpp, so no text contains them.
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
