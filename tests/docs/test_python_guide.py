"""docs/python.md: its programs run as they stand; every command has the function that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import demo_model
from doc_pages import blocks, run_page

import aprfmt
from aprfmt.cli.commands import COMMANDS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"
FUNCTIONS = {
    **{f"{name}": f"{name}_model" for name in ("import", "export", "convert", "quantize", "prune", "transplant")},
    "merge-adapter": "merge_adapter",
    "eval": "evaluate",
    "canary": "make_canary",
}
"""Commands whose functions have other names."""


def test_the_programs_run(tmp_path: Path) -> None:
    demo_model.build(tmp_path / "model.gguf")
    aprfmt.quantize_model(tmp_path / "model.gguf", tmp_path / "small.gguf", "q8_0")
    talks = [[{"role": "user", "content": "Who? " * n}, {"role": "assistant", "content": "The fox."}] for n in (1, 200)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    assert len([block for block in blocks(PAGE) if block.title.endswith(".py")]) == 5
    assert run_page(PAGE, tmp_path, {}) >= 9


WITHOUT = {"demo", "meta", "serve", "keygen", "encrypt", "decrypt"}
"""Commands that may be without a function of their name."""


def test_every_command_has_its_function() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE.read_text().partition("Results are typed")[0])) - {"import aprfmt"}
    assert named <= {*aprfmt.__all__}, "docs/python.md names a function that does not exist"
    functions = {FUNCTIONS.get(name, name) for name in COMMANDS.keys() - WITHOUT}
    assert functions - {*aprfmt.__all__} == set()
    assert {"distill", "pretrain", "resume", "runs", "shard", "tensors", "architectures", "evaluate"} <= named
