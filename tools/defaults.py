"""Writes src/aprfmt/arch/families/defaults.jsonl: what absent keys of a config.json mean to transformers.

    python tools/defaults.py [ROW...]

Every value that is listed becomes that of the class, where transformers has one. A ROW that is not listed gets a line:
all keys of config.json that it knows but the sizes that every config.json has. Edit the lines of networks that
transformers does not have by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support")]

from class_defaults import NO_CLASS, REMOTE, attribute, class_config, is_of_the_class, rotation_of  # noqa: E402

from aprfmt.arch.families import DEFAULTS  # noqa: E402
from aprfmt.arch.row import Architecture  # noqa: E402
from aprfmt.arch.table import ARCHITECTURES, LISTED  # noqa: E402

STATED = {"num_layers", "hidden_size", "intermediate_size", "num_heads", "vocab_size"}
"""Numbers of Hyperparams that every config.json states."""
OF_ALL = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


def main(rows: list[str]) -> None:
    """Brings the lines up to date and adds those of `rows`."""
    lines = [json.loads(line) for line in DEFAULTS.read_text("utf-8").splitlines()]
    known = {line["row"] for line in lines}
    lines += [{"row": row, "model_type": "", "values": _all_of(ARCHITECTURES[row])} for row in rows if row not in known]
    for line in lines:
        if line["row"] in LISTED and line["row"] not in REMOTE:
            _update(ARCHITECTURES[line["row"]], line["model_type"], line["values"])
    for row in {line["row"] for line in lines} & {*LISTED}:
        first = next(line for line in lines if line["row"] == row)
        first.pop("rotates", None)
        if rotates := rotation_of(ARCHITECTURES[row]):
            first["rotates"] = rotates
    order = {row: at for at, row in enumerate(LISTED)}
    lines.sort(key=lambda line: order.get(line["row"], len(order)))
    DEFAULTS.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def _update(row: Architecture, model_type: str, values: dict[str, object]) -> None:
    types = [name for name in row.model_types if name not in NO_CLASS and (name == model_type or not model_type)]
    types = [name for name in types if model_type or name not in row.defaults]
    for name in values if types else ():
        if is_of_the_class(row, name):
            values[name] = attribute(class_config(types[0]), name)


def _all_of(row: Architecture) -> dict[str, object]:
    named = [key.hf[0] for key in row.keys if key.hf and key.field not in STATED]
    try:
        config = class_config(row.model_type)
    except (KeyError, ValueError):
        raise SystemExit(f"transformers has no {row.model_type}: add its line to {DEFAULTS.name} by hand") from None
    found = {name: attribute(config, name) for name in dict.fromkeys((*named, *OF_ALL)) if _has(config, name)}
    return {name: value for name, value in found.items() if value is not None}


def _has(config: object, name: str) -> bool:
    try:
        attribute(config, name)
    except (AttributeError, KeyError):
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
