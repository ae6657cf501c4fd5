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
    "--to": "--format",
    "--output-format": "--format",
    "--split-max-size": "--shard-size",
    "--max-shard-size": "--shard-size",
    "--output-tensor-type": "--output-type",
    "--token-embedding-type": "--embedding-type",
    "--leave-output-tensor": "--leave-output",
    "--nthreads": "--threads",
    "--temp": "--temperature",
    "--n-predict": "--max-tokens",
    "--max-new-tokens": "--max-tokens",
    "--n-gpu-layers": "--gpu-layers",
    "-ngl": "--gpu-layers",
    "--ctx-size": "--ctx",
    "--hf-path": None,
    "--model": None,
    "-m": None,
    "--prompt": None,
    "--verbose": "",
    "-v": "",
}

# Of one command alone: what its namesake elsewhere takes.
_OPTIONS_OF: dict[str, dict[str, str | None]] = {
    "tensors": {"--grep": "--filter", "-n": "--limit"},
    "tree": {"--grep": "--filter", "-L": "--depth"},
    "quantize": {"--type": None, "--dtype": None, "--quantize": None, "-t": "--threads"},
    "run": {"-p": None, "-sys": "--system", "-t": "--threads", "-c": "--ctx", "-s": "--seed"},
    "eval": {"-f": "--data"},
    "imatrix": {"-f": "--data", "-t": "--threads"},
    "bench": {"-p": "--prompt-tokens", "-t": "--threads"},
}

_COMMANDS = {
    "mlx_lm.convert": "convert",
    "convert_hf_to_gguf.py": "convert",
    "describe": "inspect",
    "gguf-dump": "inspect",
    "compare": "diff",
    "check": "validate",
    "tokenize": "vocab",
    "llama-tokenize": "vocab",
    "hexdump": "hex",
    "split": "shard",
    "upload": "push",
    "lora": "merge-adapter",
    "merge-lora": "merge-adapter",
    "ask": "run",
    "benchmark": "bench",
    "llama-quantize": "quantize",
    "chat": "run",
    "generate": "run",
    "mlx_lm.generate": "run",
    "llama-cli": "run",
    "perplexity": "eval",
    "llama-perplexity": "eval",
    "llama-imatrix": "imatrix",
    "llama-bench": "bench",
    "mergekit-yaml": "merge",
}

_NO_COMMANDS = {
    "serve": "llama-server serves what `apr convert MODEL -o model.gguf` writes",
    "server": "llama-server serves what `apr convert MODEL -o model.gguf` writes",
    "pull": "every command reads hf://org/repo: apr convert hf://org/repo -o model.gguf",
    "download": "every command reads hf://org/repo: apr convert hf://org/repo -o model.gguf",
    "dequantize": "apr convert FILE -o OUT --dtype f16",
    "train": "`apr distill` trains on a larger model's outputs, `apr pretrain` on text alone",
    "finetune": "`apr distill` trains on a larger model's outputs, `apr pretrain --init MODEL` on text alone",
    "fine-tune": "`apr distill` trains on a larger model's outputs, `apr pretrain --init MODEL` on text alone",
    "preprocess": "apr data PATH --model MODEL shows what a run would read",
    "embed": "apr run MODEL --embed TEXT",
    "embedding": "apr run MODEL --embed TEXT",
    "llama-embedding": "apr run MODEL --embed TEXT",
    "login": "hf auth login; `apr push` uses its token, or HF_TOKEN",
    "list": "`apr inspect FILE` summarizes a model, `apr tensors FILE` lists its tensors",
    "ls": "`apr inspect FILE` summarizes a model, `apr tensors FILE` lists its tensors",
}
"""What answers a command of another program that none of ours has the shape of."""

_EXTRA_WORDS = {
    "tensors": "--filter",
    "tree": "--filter",
    "hex": "--tensor",
    "lint": "--select",
    "report": "-o",
    "distill": "--student",
}
"""What a word too many is likely to be."""

# Options that take no value; in llama-quantize's order they stand before the files.
_SWITCHES = (
    "--allow-requantize",
    "--leave-output",
    "--pure",
    "--keep-split",
    "--plan",
    "--verify",
    "--no-tokenizer",
    "--force",
    "-f",
    "--json",
    "--quiet",
    "-q",
)


def is_of_mlx(arguments: Sequence[str]) -> bool:
    """Whether a command line is one of mlx_lm.convert, where `-q` means quantize."""
    return any(word.partition("=")[0] == "--hf-path" for word in arguments)


def rephrase(arguments: Sequence[str]) -> str | None:
    """The equivalent `apr` command line of another program's `arguments`; None if unknown.

    Options are mapped by the table; `quantize IN OUT TYPE` of llama-quantize becomes `quantize IN TYPE -o OUT`, and the
    defaults of mlx_lm.convert (four bits, output folder) are made explicit.
    """
    import shlex

    from aprfmt.cli.commands import COMMANDS

    if not arguments:
        return None
    words = [_COMMANDS.get(arguments[0], arguments[0])]
    if words[0] not in COMMANDS:
        return None
    options = _OPTIONS | _OPTIONS_OF.get(words[0], {})
    is_mlx = is_of_mlx(arguments)
    prompts: list[str] = []  # stand behind the model, wherever they were
    left = iter(arguments[1:])
    for word in left:
        name, equals, value = word.partition("=")
        if is_mlx and word in ("-q", "--quantize"):
            continue
        if words[0] == "run" and name in ("-p", "--prompt"):
            prompts.append(value or next(left, ""))
        elif name in options:
            ours = options[name]
            words += [ours + equals + value] if ours else [value] if value else []
        else:
            words.append(word)
    words += prompts
    if is_mlx:
        names = {word.partition("=")[0] for word in words}
        if {"-q", "--quantize"} & {*arguments} and not {"--bits", "--recipe"} & names:
            words += ["--bits", "4"]
        words += [] if {"--output", "-o"} & names else ["--output", "mlx_model"]
        words += ["--format", "mlx"]
    words = _in_order(words)
    return shlex.join(["apr", *words]) if words != list(arguments) else None


def complete(arguments: Sequence[str], known: Sequence[Any], missing: Sequence[Any]) -> str:
    """The command line `arguments` with placeholders for its `missing` parameters, of typer's `known` ones.

    As with `cp`, an extra last argument is the output.
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


def place_extra(arguments: Sequence[str], known: Sequence[Any]) -> str | None:
    """The command line `arguments` with an option for its one extra argument; None if ambiguous."""
    import shlex

    n_places = sum(p.param_type_name == "argument" for p in known)
    switches = [name for p in known if getattr(p, "is_flag", False) for name in (*p.opts, *p.secondary_opts)]
    rest = _apart([*arguments[1:]], switches)[1]
    option = _EXTRA_WORDS.get(arguments[0]) if arguments else None
    if option is None or len(rest) != n_places + 1:
        return None
    words = [*arguments]
    words.reverse()
    words.remove(rest[-1])
    words.reverse()
    return shlex.join(["apr", *words, option, rest[-1]])


def no_such_command(word: str) -> str | None:
    """A hint with our equivalent of another program's command `word`; None if unknown."""
    import shlex

    from aprfmt.io.source import exists

    if word.endswith((".gguf", ".apr", ".safetensors")) or (word and exists(word)):
        return f"apr inspect {shlex.quote(word)}"
    return _NO_COMMANDS.get(word)


def _in_order(words: list[str]) -> list[str]:
    """`quantize` and mergekit's `RECIPE OUT` with their files in our order; anything else as it is."""
    options, files = _apart(words[1:], _SWITCHES)
    if words[0] == "quantize" and (ours := _files_of_quantize(files)):
        return ["quantize", *ours, *options]
    if words[0] == "merge" and len(files) == 2 and files[0].endswith((".yml", ".yaml")):
        return ["merge", "--config", files[0], "-o", files[1], *options]
    return words


def _files_of_quantize(files: list[str]) -> list[str] | None:
    """IN TYPE -o OUT --threads N of llama-quantize's words; None where they are in our order, or unclear."""
    from aprfmt.convert.presets import find_preset

    threads = ["--threads", files.pop()] if len(files) > 2 and files[-1].isdecimal() else []
    presets = [name for name in files if find_preset(name)]
    others = [name for name in files if name not in presets]
    if len(presets) == 1 and len(others) == 2:
        return [others[0], *presets, "-o", others[1], *threads]
    if len(files) == 2 and files == [*presets, *others]:
        return [*others, *presets, *threads]
    if len(files) == 2 and threads and files == [*others, *presets]:  # it has a name for the output then
        return [*files, "-o", f"ggml-model-{files[1]}.gguf", *threads]
    return None


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
