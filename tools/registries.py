"""What other projects register and the table lacks, from their sources: nothing of theirs is imported.

    python tools/registries.py [FOLDER ...] [--only TITLE] [--draft] [--json]

FOLDER is an installed package, an unpacked wheel or a source tree of transformers, mlx_lm, llama.cpp, vLLM or SGLang;
without one, the installed transformers and mlx_lm, and llama.cpp's converter of the material cache. Prints how many
classes of each registry are known, and each of the others with the rows whose modules and config keys are most like
its own; `--draft` adds a row to begin with, `--only "transformers causal"` shows one registry. What is left out on
purpose says why (tests/conformance/unregistered.jsonl), and a class with a head whether its network has a row: exit 1
when a class of transformers or a network of mlx_lm is unknown without a reason, or when a reason is given for one that
is known or gone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tools")]

from registry_modules import Near, draft_of, nearest_rows, network_of  # noqa: E402
from registry_sources import (  # noqa: E402
    CONVERTER,
    NO_BACKBONE,
    Registered,
    Registry,
    lacks_backbone,
    reasons,
    registries_in,
    unknown_in,
)

EXPLAINED = ("transformers causal", "mlx_lm")
"""The registries whose every unknown class needs a reason."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; the exit code."""
    options = _options(arguments)
    found = [registry for folder in options.folders or _installed() for registry in registries_in(folder)]
    found = [registry for registry in found if options.only in (None, registry.title)]
    if options.json:
        print(json.dumps([_as_json(registry) for registry in found], indent=1))
    else:
        for registry in found:
            print(*_lines(registry, draft=options.draft), sep="\n")
    wrong = [line for registry in found if registry.title in EXPLAINED for line in _unexplained(registry)]
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", metavar="FOLDER", nargs="*", type=Path)
    parser.add_argument("--only", metavar="TITLE", help="one registry, as it is called in the output")
    parser.add_argument("--draft", action="store_true", help="print a draft of a row for each unknown class")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def _installed() -> Iterator[Path]:
    for name in ("transformers", "mlx_lm"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            yield Path(spec.origin).parent
    if CONVERTER.is_dir():
        yield CONVERTER.parent


def _near(found: Registered) -> list[Near]:
    if found.source is None or found.source.name.startswith("configuration"):
        return []
    network = network_of(found.source, found.top)
    return nearest_rows(network) if network.modules else []


def _lines(registry: Registry, *, draft: bool) -> Iterator[str]:
    unknown, why = unknown_in(registry), _why(registry)
    bare = sum(lacks_backbone(registry, found) for found in unknown)
    rest = f", {bare} whose {NO_BACKBONE}" if bare else ""
    yield f"{registry.title}: {len(registry.classes) - len(unknown)} of {len(registry.classes)} known{rest}"
    for found in unknown:
        near = _near(found)
        beside = ", ".join(f"{row.row} {row.score:.2f}" for row in near)
        reason = why.get(found.name)
        yield f"  {found.name}" + (f"  ~ {beside}" if beside else "") + (f"  ({reason})" if reason else "")
        if draft and near:
            yield "    " + draft_of(found.name, found.model_type, near[0]).replace("\n", "\n    ")


def _why(registry: Registry) -> dict[str, str]:
    return {f.name: NO_BACKBONE for f in unknown_in(registry) if lacks_backbone(registry, f)} | reasons()


def _as_json(registry: Registry) -> dict[str, object]:
    unknown, why = unknown_in(registry), _why(registry)
    return {
        "registry": registry.title,
        "registered": len(registry.classes),
        "known": len(registry.classes) - len(unknown),
        "unknown": [
            {
                "class": found.name,
                "model_type": found.model_type,
                "why": why.get(found.name),
                "nearest": [{"row": near.row, "score": near.score} for near in _near(found)],
            }
            for found in unknown
        ],
    }


def _unexplained(registry: Registry) -> Iterator[str]:
    unknown, why = {found.name for found in unknown_in(registry)}, reasons(registry.title)
    yield from (f"{name}: unknown without a reason" for name in sorted(unknown - why.keys()))
    yield from (f"{name}: has a reason, but is known or no longer registered" for name in sorted(why.keys() - unknown))


if __name__ == "__main__":
    sys.exit(main())
