"""Options of other programs, and what they are here: of any command, of one command, of rows of `foreign_commands`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TypeAlias

Meaning: TypeAlias = str | Callable[[str], list[str] | dict[str, str]]
"""What an option of another program is here.

--option    our option; its value is kept
--a=b       these words, in place of a switch
NAME        its value is this name of the foreign command's line
""          nothing: a switch that changes no result
=           nothing, and so is its value
a function  our words, from its value; or values of names
"""


def _fixed(**words: str) -> Callable[[str], list[str]]:
    """Our words by the value, in lower case; none for another value."""
    return lambda value: words.get(value.lower(), "").split()


def _either(test: Callable[[str], bool], yes: str, no: str) -> Callable[[str], list[str]]:
    """One option for values that pass `test`, another for the rest; an empty name drops the value."""
    return lambda value: [name, value] if value and (name := yes if test(value) else no) else []


def _is_temperature(value: str) -> bool:
    """Whether `-t` is a temperature, as some programs have it, and not a number of threads."""
    return value == "0" or "." in value


def _names_model(value: str) -> bool:
    return value.endswith((".gguf", ".apr", ".safetensors")) or os.path.isdir(value)


def set_key(key: str) -> Callable[[str], list[str]]:
    """Sets a metadata key to the value."""
    return lambda value: ["--set", f"{key}={value}"]


def _many(option: str) -> Callable[[str], list[str]]:
    """Repeats our option for each part of a list with commas."""
    return lambda value: [word for part in value.split(",") for word in (option, part)]


def _page_or_model(value: str) -> list[str]:
    """`--html` of a page, as a switch, or before the model."""
    return [value] if _names_model(value) else ["-o", value] if value else []


def _peft(value: str) -> list[str]:
    """LoRA by its name, or as a switch."""
    return ["--lora", "r=16"] if value.lower() in ("", "lora", "qlora") else []


def _glob(value: str) -> list[str]:
    """A regular expression of a name as a pattern."""
    pattern = re.sub(r"\\d\+?|\.[*+]", "*", value).replace("\\.", ".").strip("^$")
    return ["--filter", pattern if "*" in pattern else value.replace("\\", "")]


def _outtype(value: str) -> list[str]:
    return [] if value == "auto" else ["--dtype", value]


def _type_or_format(value: str) -> list[str]:
    """`--to` of `quantize`: a type, or the format of the output."""
    from aprfmt.convert.presets import find_preset

    return [value] if find_preset(value) else ["--format", value]


def _prompt_and_tokens(value: str) -> list[str]:
    """llama-bench's `-pg 512,128`."""
    prompt, _, tokens = value.partition(",")
    return ["--prompt-tokens", prompt, "--tokens", tokens]


def _type_or_threads(value: str) -> list[str]:
    """`-t` of llama-quantize's users: a number of threads, or the type."""
    return ["--threads", value] if value.isdecimal() else [value]


def model_of_modelfile(path: str) -> dict[str, str]:
    """The model that an Ollama Modelfile starts from."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            words = [line.split(None, 1) for line in file.read(_MAX_MODELFILE_BYTES).splitlines()]
    except OSError:
        return {}
    models = [found[1].strip() for found in words if len(found) == 2 and found[0].upper() == "FROM"]
    return {"MODEL": models[-1]} if models else {}


_MAX_MODELFILE_BYTES = 1 << 16


def named_model(value: str) -> list[str]:
    """`--model`, where some programs have the kind of a model instead: `hf`."""
    return [value] if _names_model(value) else []


def pretrained_model(value: str) -> list[str]:
    """The model of lm_eval's `pretrained=MODEL,dtype=...`."""
    return [part.partition("=")[2] for part in value.split(",") if part.startswith("pretrained=")]


OPTIONS: dict[str, Meaning] = {
    **dict.fromkeys(("--outfile", "--out", "--output-path", "--output-dir", "--mlx-path", "--out-path"), "--output"),
    **dict.fromkeys(("--output-file", "--out-file", "--out-dir", "--outdir", "--dest", "--destination"), "--output"),
    **dict.fromkeys(("--save-path", "--save-dir", "--save-to", "--dst", "--target-path"), "--output"),
    **dict.fromkeys(("--out-type", "--ftype", "--torch-dtype"), "--dtype"), "--outtype": _outtype,
    **dict.fromkeys(("--dry-run", "--dryrun"), "--plan"), **dict.fromkeys(("--overwrite", "--yes", "-y"), "--force"),
    "--q-bits": "--bits", "--q-group-size": "--group-size", "--quant-predicate": "--recipe",
    **dict.fromkeys(("--to", "--output-format"), "--format"),
    **dict.fromkeys(("--split-max-size", "--max-shard-size", "--out-shard-size"), "--shard-size"),
    **dict.fromkeys(("--max-size", "--size", "--split-size", "--part-size", "--chunk-size"), "--shard-size"),
    **dict.fromkeys(("--max", "--max-bytes", "--max-file-size", "--limit"), "--shard-size"),
    "--output-tensor-type": "--output-type", "--token-embedding-type": "--embedding-type",
    "--leave-output-tensor": "--leave-output", "--tensor-type-file": "--recipe",
    **dict.fromkeys(("--nthreads", "--n-threads"), "--threads"), "--temp": "--temperature",
    **dict.fromkeys(("--n-predict", "--predict", "--max-new-tokens", "--num-predict"), "--max-tokens"),
    **dict.fromkeys(("--tokens", "--num-tokens", "--n-tokens", "--max-output-tokens"), "--max-tokens"),
    **dict.fromkeys(("--n-gpu-layers", "--num-gpu", "-ngl"), "--gpu-layers"),
    **dict.fromkeys(("--ctx-size", "--num-ctx", "--n-ctx", "--context", "--context-length", "--ctx-len"), "--ctx"),
    **dict.fromkeys(("--system-prompt", "-sys"), "--system"),
    **dict.fromkeys(("--hf-path", "--model", "-m", "--model-name-or-path"), "MODEL"),
    **dict.fromkeys(("--hf-repo", "-hf", "-hfr"), lambda value: [f"hf://{value}"]), "--prompt": "PROMPT",
    **dict.fromkeys(
        ("--verbose", "-v", "--trust-remote-code", "--color", "-co", "--no-mmap", "--mlock", "--no-warmup", "--jinja"),
        "",
    ),
    **dict.fromkeys(
        ("-e", "--escape", "--no-display-prompt", "--log-disable", "-cnv", "--conversation", "-i", "--interactive"), ""
    ),
    **dict.fromkeys(("-it", "--chat", "--interactive-first"), ""),
    **dict.fromkeys(("-st", "--single-turn", "--simple-io", "--offline", "--skip-contract", "--verbose-prompt"), ""),
    **dict.fromkeys(
        ("-fa", "--flash-attn", "-b", "--batch-size", "-ub", "--ubatch-size", "-tb", "--threads-batch"), "="
    ),
    **dict.fromkeys(("-sm", "--split-mode", "-ts", "--tensor-split", "-mg", "--main-gpu", "-dev"), "="),
}  # fmt: skip
"""Of any command. Words are looked up with dashes for underscores, as `--output_dir`."""

RUN_OPTIONS: dict[str, Meaning] = {
    "-p": "PROMPT", "-t": _either(_is_temperature, "--temperature", "--threads"), "-T": "--temperature", "-c": "--ctx",
    **dict.fromkeys(("--context-size", "--context-window", "--max-context"), "--ctx"),
    "-s": _either(str.isdecimal, "--seed", "--system"), "--sys": "--system",
    "--do-sample": lambda value: ["--temperature", "0"] if value.lower() in ("false", "0") else [],
    "-n": "--max-tokens", **dict.fromkeys(("--max-length", "--length", "--limit", "--ntokens", "--n"), "--max-tokens"),
    **dict.fromkeys(("--seq-len", "--max-seq-len", "--max-seq-length", "--max-kv-size", "--n-ctx"), "--ctx"),
    **dict.fromkeys(("--system-message", "--instructions", "-S"), "--system"),
    **dict.fromkeys(("--question", "--message", "--user", "--text", "--input", "--query", "-q"), "PROMPT"),
    "--random-seed": "--seed", **dict.fromkeys(("--greedy", "--deterministic"), "--temperature=0"), "--stream": "",
    "-r": "--stop", "--reverse-prompt": "--stop",
    **dict.fromkeys(("-no-cnv", "--no-conversation", "--ignore-chat-template"), "--raw"),
    "--chat-template-file": "--template", "--adapter-path": "--lora",
    **dict.fromkeys(("--embedding", "--embeddings"), "--embed"),
}  # fmt: skip
EVAL_OPTIONS: dict[str, Meaning] = {
    **dict.fromkeys(("-f", "--file", "--text", "--data-path", "--dataset"), "--data"),
    **dict.fromkeys(("--corpus", "--input", "-i", "--text-file", "--input-file", "--eval-data"), "--data"),
    "-t": "--threads",
    **dict.fromkeys(("-c", "--ctx-size", "--max-length", "--sequence-length"), "--seq-len"),
    "--kl-divergence": "",
    **dict.fromkeys(("--kl-divergence-base", "--reference", "--base", "--original", "--teacher"), "--against"),
    **dict.fromkeys(("--metric", "--metrics", "--task", "--tasks"), "="),
    **dict.fromkeys(("--ref", "--baseline", "--reference-model", "--base-model"), "--against"),
    **dict.fromkeys(("--perplexity", "--ppl"), ""),
    **dict.fromkeys(("--kl", "--kld"), _either(_names_model, "--against", "--data")),
}
BENCH_OPTIONS: dict[str, Meaning] = {
    "-p": "--prompt-tokens",
    **dict.fromkeys(("--n-prompt", "-pp", "--pp", "--prompt-length", "--prompt-len"), "--prompt-tokens"),
    **dict.fromkeys(("--input-len", "--input-tokens", "--prompt-size"), "--prompt-tokens"),
    **dict.fromkeys(("--generate", "--gen", "--output-len", "--output-tokens", "--max-new-tokens"), "--tokens"),
    **dict.fromkeys(("--num-prompt-tokens", "--prefill", "--prompt-length"), "--prompt-tokens"),
    **dict.fromkeys(("--gen-len", "--gen-length", "--num-tokens", "--decode", "--generated-tokens"), "--tokens"),
    **dict.fromkeys(("--n-predict", "--num-generated-tokens", "--max-output-tokens"), "--tokens"),
    "-pg": _prompt_and_tokens,
    **dict.fromkeys(("-n", "--n-gen", "--max-tokens", "-g", "--generation-tokens"), "--tokens"),
    **dict.fromkeys(("--gen-tokens", "-tg", "--tg"), "--tokens"),
    **dict.fromkeys(("-r", "--repetitions", "--iterations", "--num-trials"), "--runs"),
    "-t": "--threads",
    **dict.fromkeys(("--warmup", "--percentiles"), "="),
    "--fast": "",
    "-o": _fixed(json="--json", jsonl="--json"),
}
_BENCH_OF_APR: dict[str, Meaning] = {name: meaning for name, meaning in BENCH_OPTIONS.items() if name != "-o"} | {
    "--prompt": _either(str.isdecimal, "--prompt-tokens", "")
}
IMATRIX_OPTIONS: dict[str, Meaning] = {
    **dict.fromkeys(("-f", "--file", "--text", "--dataset", "--corpus", "--train-data"), "--data"),
    **dict.fromkeys(("--calibration", "--calibration-data", "--calib", "--calibration-file"), "--data"),
    **dict.fromkeys(("--input", "-i", "--train", "--prompt-file", "--text-file", "--input-file"), "--data"),
    "-t": "--threads", "-c": "--chunk-size", "--ctx-size": "--chunk-size",
    "--in-file": lambda value: [value, "--merge"], "--output-file": "--output", "--output-format": _fixed(),
    "--output-frequency": "=",
}  # fmt: skip
CALIBRATION: dict[str, Meaning] = {
    name: "DATA" if meaning == "--data" else meaning for name, meaning in IMATRIX_OPTIONS.items()
} | dict.fromkeys(("--data", "-d"), "DATA")
_QUANTIZE: dict[str, Meaning] = {
    **dict.fromkeys(("--type", "--dtype", "--quantize", "--scheme", "-s"), "TYPE"),
    **dict.fromkeys(("--qtype", "--quant", "--quantization", "--preset", "--quant-type", "--method"), "TYPE"),
    **dict.fromkeys(("--target", "--target-type", "--quantization-type"), "TYPE"),
    **dict.fromkeys(("--to", "--format"), _type_or_format),
    "--input": "MODEL",
    **dict.fromkeys(("--ftype", "--outtype", "--out-type", "--level", "--precision", "--quants"), "TYPE"),
    **dict.fromkeys(("--importance-matrix", "--imatrix-file", "--importance", "--imat", "--im"), "--imatrix"),
    **dict.fromkeys(("--calibration", "--calib", "--i-matrix"), "--imatrix"),
    "-t": _type_or_threads,
    "--keep-split": "",
}
_AVERAGES = dict.fromkeys(("average", "mean", "avg", "soup", "uniform"), "linear")
MERGE_OPTIONS: dict[str, Meaning] = {
    **dict.fromkeys(("--merge-method", "--strategy"), lambda value: ["--method", _AVERAGES.get(value, value)]),
    "--method": lambda value: ["--method", _AVERAGES.get(value, value)], "--weights": _many("--weight"),
    **{f"--{name}": f"--method={name}" for name in ("linear", "slerp", "ties", "dare")},
    **dict.fromkeys(("--average", "--mean"), "--method=linear"),
    **dict.fromkeys(("-c", "--yaml", "--file", "--from", "--merge-config", "--recipe"), "--config"), "-w": "--weight",
    "--allow-crimes": "", "--base-model": "--base", "-t": "--t",
    **dict.fromkeys(("--cuda", "--lazy-unpickle", "--copy-tokenizer", "--low-cpu-memory", "--multi-gpu"), ""),
    "--random-seed": "--seed",
}  # fmt: skip
_TRAIN: dict[str, Meaning] = {
    **dict.fromkeys(("--model-name-or-path", "--base"), "MODEL"),
    **dict.fromkeys(("--teacher-model-name-or-path", "--teacher-model"), "TEACHER"),
    **dict.fromkeys(("--dataset-name", "--dataset", "--train-data", "--dataset-path"), "DATA"),
    **dict.fromkeys(("--train-file", "--train-files", "--data-path", "--data-files", "--dataset-file"), "DATA"),
    **dict.fromkeys(("--output-dir", "--run-dir", "--adapter-path"), "OUT"),
    **dict.fromkeys(("--max-steps", "--num-steps", "--iters"), "STEPS"), "--num-train-epochs": "--epochs",
    "--learning-rate": "--lr", **dict.fromkeys(("--max-length", "--max-seq-length", "--seq-length"), "--seq-len"),
    "--gradient-checkpointing": "--recompute=block", "--max-grad-norm": "--clip", "--adam-epsilon": "--eps",
    "--adam-beta1": "--beta1", "--adam-beta2": "--beta2", "--logging-steps": "--log-every",
    "--save-steps": "--save-every", "--eval-steps": "--eval-every", "--save-total-limit": "--keep",
    "--report-to": "--log-to", "--resume-from-checkpoint": "--resume",
    **dict.fromkeys(("--packing", "--bf16", "--do-train"), ""),
    "--train": lambda value: {"DATA": value} if os.path.exists(value) else {},
    "--backend": _fixed(cuda="--device cuda", cpu="--device cpu"),
    **dict.fromkeys(("--use-cpu", "--no-cuda", "--cpu"), "--device=cpu"),
    **dict.fromkeys(("--distill", "--no-packing", "--fp16"), ""), "-d": "DATA", "--mode": _fixed(),
    **dict.fromkeys(("--tokenizer", "--steps-per-epoch", "--strategy", "--fine-tune-type"), "="),
}  # fmt: skip
_OF_PEFT: dict[str, Meaning] = {
    "--use-peft": "--lora=r=16",
    **dict.fromkeys(("--method", "--peft", "--adapter", "--peft-type"), _peft),
    "--lora": lambda value: ["--lora", value],
    **dict.fromkeys(("--lora-r", "--lora-rank", "--rank"), lambda value: ["--lora", f"r={value}"]),
}
_STUDENT = ("--to", "--into", "--student-model", "--student-model-name-or-path", "-s")
FOREIGN_TRAIN = (
    _TRAIN
    | dict.fromkeys(_STUDENT, "MODEL")
    | _OF_PEFT
    | {"--data": "DATA", "--steps": "STEPS", "--student": "MODEL", "--init": "MODEL"}
)
"""Of rows whose line has these names."""

NEW_METADATA: dict[str, Meaning] = {
    **dict.fromkeys(("--general-name", "--name"), set_key("general.name")),
    "--general-description": set_key("general.description"),
    "--chat-template": set_key("tokenizer.chat_template"),
    "--chat-template-file": lambda value: ["--set", f"tokenizer.chat_template=@{value}"],
    "--pre-tokenizer": set_key("tokenizer.ggml.pre"),
    "--remove-metadata": "--unset",
    "--force": "",
}
TEMPLATE: dict[str, Meaning] = dict.fromkeys(
    ("--template", "--chat-template", "--chat-template-file"),
    lambda value: ["--set", f"tokenizer.chat_template=@{value}"],
)
DOWNLOAD: dict[str, Meaning] = {
    "--local-dir": "OUT",
    **dict.fromkeys(("--repo", "--repo-id"), "REPO"),
    "--repo-type": "=",
    **dict.fromkeys(("--local-dir-use-symlinks", "--cache-dir", "--max-workers"), "="),
}
CHECKSUMS = (
    *("--checksum", "--checksums", "--sums", "--hash", "--sha256sums", "--sha256sum", "--check", "-c", "--sha"),
    *("--sha256-file", "--sums-file", "--checksum-file", "--against", "--verify", "--sha256-sums", "--hashes"),
)
RANK: dict[str, Meaning] = dict.fromkeys(("-r", "--lora-rank", "--lora-r", "--max-rank"), "--rank")
_QA_SKIPS = ("golden", "throughput", "ollama", "gpu-speedup", "contract", "format-parity", "ptx-parity", "gpu-state")

_DTYPE: dict[str, Meaning] = {
    **dict.fromkeys(("--input", "--src", "--source", "--adapter", "--lora", "--infile", "--in"), "MODEL"),
    "--scheme": "--dtype",
    "--target": "--output",
    **dict.fromkeys(("--type", "-t", "--quant", "--qtype", "--quantization", "--precision"), "--dtype"),
    **{f"--{dtype}": f"--dtype={dtype}" for dtype in ("f16", "bf16", "f32", "fp16", "q8_0")},
    **{f"--{name}": f"--format={name}" for name in ("mlx", "gguf", "hf", "safetensors")},
    "--from": "=",
    **dict.fromkeys(("--base-model", "--base-model-id"), "--base"),
}
MESSAGES: dict[str, Meaning] = dict.fromkeys(
    ("--messages", "--render", "--chat", "--conversation", "--input", "--apply"), "CHAT"
)
AGAINST: dict[str, Meaning] = (
    EVAL_OPTIONS
    | {name: "BASE" for name, meaning in EVAL_OPTIONS.items() if meaning == "--against"}
    | {name: "DATA" for name, meaning in EVAL_OPTIONS.items() if meaning == "--data"}
    | dict.fromkeys(("--data", "-d", "-f"), "DATA")
    | {"-b": "BASE"}
    | dict.fromkeys(("--kl", "--kld"), "")
)

TENSOR_OPTIONS: dict[str, Meaning] = {
    "-n": "--limit",
    **dict.fromkeys(("--grep", "--match", "--name", "--pattern", "--include", "--tensor", "--names"), "--filter"),
    **dict.fromkeys(("--prefix", "--select", "--only", "--module", "--search", "--component", "-k", "-p"), "--filter"),
    **dict.fromkeys(("--regex", "--re", "--regexp", "-e", "-r"), _glob),
    **dict.fromkeys(("-f", "-g"), "--filter"),
    **dict.fromkeys(
        ("--layer", "--layers", "--block", "--blk", "-l", "-L"), lambda value: ["--filter", f"*.{value}.*"]
    ),
    **dict.fromkeys(("--tensors", "--shapes", "--shape", "--dtype", "--types", "--all", "-a", "--long"), ""),
}

OPTIONS_OF: dict[str, dict[str, Meaning]] = {
    "inspect": {
        **dict.fromkeys(("--filters", "--summary", "--arch", "--config", "--details", "--brief"), ""),
        **dict.fromkeys(("--all", "--meta", "--metadata-only", "--no-tensors"), "--metadata"), "--tensors": "--weights",
    },
    "tensors": TENSOR_OPTIONS, "validate": dict.fromkeys(CHECKSUMS, "--sha256"),
    "report": {"--html": _page_or_model, "--run": "MODEL", "--format": "="},
    "resume": {"--max-steps": "--steps", "--num-steps": "--steps", "--run": "RUN", "-r": "RUN"},
    "vocab": dict.fromkeys(("--text", "--tokenize", "--encode", "-p", "--prompt"), "TEXT"),
    "merge-adapter": {
        "--base": "MODEL", "--base-model": "MODEL",
        **dict.fromkeys(("--adapter", "--lora", "--adapter-path", "--peft-model"), "ADAPTER"), "--extract": "--unmerge",
        **RANK,
    },
    "tree": {"--grep": "--filter", "-L": "--depth"},
    "hex": {"--slice": "=", **dict.fromkeys(("--header", "--blocks", "--list", "--contract"), "")},
    "diff": {
        "--limit": "--top", "--threshold": "--tolerance", "--weights": "--values", "--stats": "--values",
        "--transpose-aware": "",
        **dict.fromkeys(("--tensors", "--all", "--full", "--only-different", "--per-tensor", "--changed"), ""),
        **dict.fromkeys(("--content", "--deep", "--brief", "-b", "--names-only"), ""),
        **dict.fromkeys(("--a", "--b"), "MODEL"),
    },
    "meta": {"--chat-template": "--template", "--chat-template-file": "--template"},
    "import": {**dict.fromkeys(("--preserve-q4k", "--strict", "--enforce-provenance"), "")},
    "convert": {**_DTYPE, "--dequantize": "--dtype=f16", "-d": "--dtype=f16", "--use-temp-file": "", "--no-lazy": ""},
    "export": _DTYPE, "quantize": _QUANTIZE, "merge": MERGE_OPTIONS,
    "prune": {"--remove-layers": "--drop-layers", "--prune-layers": "--drop-layers", "-m": "=", "--method": "="},
    "run": RUN_OPTIONS, "eval": EVAL_OPTIONS, "imatrix": IMATRIX_OPTIONS, "bench": _BENCH_OF_APR,
    "qa": {
        **dict.fromkeys((f"--skip-{name}" for name in (*_QA_SKIPS, "metadata", "capability")), ""),
        **dict.fromkeys(("--iterations", "--warmup", "--max-tokens", "--min-executed"), "="),
    },
    "push": {
        "--commit-message": "--message", "--repo-type": "=", "--repo-id": "REPO", "--local-dir": "SRC",
        **dict.fromkeys(("--repo", "--to", "--repository", "--upload-repo"), "REPO"),
        **dict.fromkeys(("--folder", "--folder-path", "--path", "--model", "-m", "--src"), "SRC"), "-r": "REPO",
    },
    "distill": _TRAIN | {"--from": "TEACHER", "-t": "TEACHER", "-n": "STEPS"} | dict.fromkeys(_STUDENT, "MODEL"),
    "pretrain": _TRAIN | _OF_PEFT,
}  # fmt: skip
"""Of one command of ours: what its namesake in other programs takes."""
