"""Command lines of other programs in the words of this one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

# Option of another program -> ours; None: its value is the input; "": it has no place here, and takes no value.
_OPTIONS: dict[str, str | None] = {
    "--outfile": "--output",
    "--out": "--output",
    "--output-path": "--output",
    "--output-dir": "--output",
    "--mlx-path": "--output",
    "--outtype": "--dtype",
    "--out-type": "--dtype",
    "--ftype": "--dtype",
    "--torch-dtype": "--dtype",
    "--dry-run": "--plan",
    "--dryrun": "--plan",
    "--overwrite": "--force",
    "--yes": "--force",
    "-y": "--force",
    "--q-bits": "--bits",
    "--q-group-size": "--group-size",
    "--quant-predicate": "--recipe",
    "--split-max-size": "--shard-size",
    "--max-shard-size": "--shard-size",
    "--output-tensor-type": "--output-type",
    "--token-embedding-type": "--embedding-type",
    "--leave-output-tensor": "--leave-output",
    "--nthreads": "--threads",
    "--n-predict": "--max-tokens",
    "--max-new-tokens": "--max-tokens",
    "--n-gpu-layers": "--gpu-layers",
    "-ngl": "--gpu-layers",
    "--ctx-size": "--ctx",
    "--hf-path": None,
    "--model": None,
    "-m": None,
}


def rephrase(arguments: Sequence[str]) -> str | None:
    """The command line `arguments` (without `apr`) as this program would have it; None where nothing is known.

    Options go by the table; `quantize IN OUT TYPE`, llama-quantize's order, becomes `quantize IN TYPE -o OUT`.
    """
    words: list[str] = []
    changed = False
    is_mlx = "--hf-path" in arguments
    for word in arguments:
        name, equals, value = word.partition("=")
        if is_mlx and word == "-q":
            changed = True
        elif name in _OPTIONS:
            changed = True
            ours = _OPTIONS[name]
            words += [ours + equals + value] if ours else [value] if value else []
        else:
            words.append(word)
    if is_mlx:
        words += ["--format", "mlx"]
    words, moved = _in_order(words)
    return shlex.join(["apr", *words]) if changed or moved else None


def _in_order(words: list[str]) -> tuple[list[str], bool]:
    from aprfmt.convert.mixes import find_mix

    if len(words) >= 4 and words[0] == "quantize":
        source, target, mix, *rest = words[1:]
        if not source.startswith("-") and not find_mix(target) and find_mix(mix):
            threads = ["--threads", rest.pop(0)] if rest and rest[0].isdecimal() else []
            return ["quantize", source, mix, "-o", target, *threads, *rest], True
    return words, False
