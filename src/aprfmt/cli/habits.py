"""Command lines of other programs in the words of this one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

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


_COMMANDS = {"mlx_lm.convert": "convert", "convert_hf_to_gguf.py": "convert", "llama-quantize": "quantize"}

# Options of `quantize` that take no value; in llama-quantize's order they stand before the files.
_SWITCHES = (
    "--allow-requantize",
    "--leave-output",
    "--pure",
    "--keep-split",
    "--plan",
    "--force",
    "-f",
    "--json",
    "--quiet",
    "-q",
)


def is_of_mlx(arguments: Sequence[str]) -> bool:
    """Whether a command line is one of mlx_lm.convert, where `-q` asks for a quantization."""
    return any(word.partition("=")[0] == "--hf-path" for word in arguments)


def rephrase(arguments: Sequence[str]) -> str | None:
    """The command line `arguments` (without `apr`) as this program would have it; None where nothing is known.

    Options go by the table; `quantize IN OUT TYPE`, llama-quantize's order, becomes `quantize IN TYPE -o OUT`, and what
    mlx_lm.convert does unasked is said: four bits, and the name of its folder.
    """
    import shlex

    words: list[str] = []
    is_mlx = is_of_mlx(arguments)
    for word in arguments:
        name, equals, value = word.partition("=")
        if word in _COMMANDS:
            words.append(_COMMANDS[word])
        elif is_mlx and word in ("-q", "--quantize"):
            continue
        elif name in _OPTIONS:
            ours = _OPTIONS[name]
            words += [ours + equals + value] if ours else [value] if value else []
        else:
            words.append(word)
    if is_mlx:
        names = {word.partition("=")[0] for word in words}
        if {"-q", "--quantize"} & {*arguments} and not {"--bits", "--recipe"} & names:
            words += ["--bits", "4"]
        words += [] if {"--output", "-o"} & names else ["--output", "mlx_model"]
        words += ["--format", "mlx"]
    words = _in_order(words)
    return shlex.join(["apr", *words]) if words != list(arguments) else None


def complete(arguments: Sequence[str], known: Sequence[Any], missing: Sequence[Any]) -> str:
    """The command line `arguments` with names for what is `missing` of it, of typer's `known` parameters.

    As with `cp`, a word behind those that the command takes is the output.
    """
    import shlex

    words, places = [*arguments], [p for p in known if p.param_type_name == "argument"]
    switches = [name for p in known if getattr(p, "is_flag", False) for name in (*p.opts, *p.secondary_opts)]
    rest = _apart(words[1:], switches)[1]
    extra = [] if any(p.nargs < 0 for p in places) else rest[len(places) :]
    added = []
    for p in missing:
        value = p.metavar or p.human_readable_name
        if "--output" in p.opts and extra:
            words.remove(extra[-1])
            value = shlex.quote(extra[-1])
        added += [value] if p in places else [min(p.opts, key=len), value]
    return " ".join([shlex.join(["apr", *words]), *added])


def _in_order(words: list[str]) -> list[str]:
    """`quantize [OPTIONS] IN [OUT] TYPE [THREADS]` in our order; anything else as it is."""
    from aprfmt.convert.mixes import find_mix

    if words[:1] != ["quantize"]:
        return words
    options, files = _apart(words[1:], _SWITCHES)
    threads = ["--threads", files.pop()] if len(files) > 2 and files[-1].isdecimal() else []
    if len(files) == 3 and find_mix(files[2]) and not find_mix(files[1]):
        source, target, mix = files
        return ["quantize", source, mix, "-o", target, *threads, *options]
    if len(files) == 2 and threads and find_mix(files[1]):  # it has a name for the output then
        return ["quantize", *files, "-o", f"ggml-model-{files[1]}.gguf", *threads, *options]
    return words


def _apart(words: list[str], switches: Collection[str]) -> tuple[list[str], list[str]]:
    """(options with their values, the rest)."""
    options: list[str] = []
    rest: list[str] = []
    left = iter(words)
    for word in left:
        if not word.startswith("-"):
            rest.append(word)
        elif word in switches or "=" in word:
            options.append(word)
        else:
            options += [word, *([value] if (value := next(left, None)) is not None else [])]
    return options, rest
