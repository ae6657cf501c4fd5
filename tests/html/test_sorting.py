"""A table of a page is sorted by the column that is clicked: numbers as numbers, infinity above, a dash below."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "src" / "aprfmt" / "html" / "page.js"
_DOCUMENT = """
const cell = t => ({textContent: t, tabIndex: -1, ariaSort: null, on: {}, addEventListener(k, f) { this.on[k] = f }});
const head = {cells: HEADER.map(cell)}, orders = [];
let order = null;
const parentNode = {replaceChildren(...rows) { order = rows.map(row => row.cells[0].textContent).join("") }};
const rows = [head, ...ROWS.map(row => ({cells: row.map(cell), parentNode}))];
const table = {classList: {contains: () => true}, rows};
globalThis.document = {querySelectorAll: which => which.startsWith("table.sortable") ? [table] : []};
globalThis.addEventListener = () => {};
CODE
for (const title of head.cells) for (const event of ["click", "keydown"]) {
  title.on[event]({key: "Enter", preventDefault() {}});
  orders.push([title.ariaSort, order]);
}
console.log(JSON.stringify(orders));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_columns_are_sorted_both_ways() -> None:
    rows = [
        ["a", "5.19 %", "25.7", "1,234"],
        ["b", "∞", "–", "99"],
        ["c", "3e-05 %", "60.1", "100,000"],
        ["d", "0 %", "–", "0"],
    ]
    code = _DOCUMENT.replace("HEADER", '["tensor", "RMSE", "SNR, dB", "differ"]').replace("ROWS", json.dumps(rows))
    done = subprocess.run(
        ["node", "-e", code.replace("CODE", SCRIPT.read_text())], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [
        ["descending", "dcba"],
        ["ascending", "abcd"],
        ["descending", "bacd"],
        ["ascending", "dcab"],
        ["descending", "cabd"],
        ["ascending", "bdac"],
        ["descending", "cabd"],
        ["ascending", "dbac"],
    ]
