"""Writes src/aprfmt/arch/families/index.jsonl: what each row of the architecture table is found by, and its file.

python tools/row_index.py
"""

from __future__ import annotations

from aprfmt.arch.families import INDEX, index_of_rows

if __name__ == "__main__":
    INDEX.write_text(index_of_rows(), "utf-8")
