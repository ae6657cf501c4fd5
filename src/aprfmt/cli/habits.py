"""Commands and options of other programs, and what they are here. One table, which `other_tools` reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Meaning: TypeAlias = str | Callable[[str], list[str]]
"""What an option of another program is here.

--option    our option; its value is kept
--a=b       these words, in place of a switch
NAME        its value is this name of the habit's line
""          nothing: a switch that changes no result
=           nothing, and so is its value
a function  our words, from its value
"""


@dataclass(frozen=True, slots=True)
class Habit:
    """A command of another program.

    Attributes:
        takes: names of its positional arguments, in order. `NAME=VALUE` has a default, which may contain other names
            (`/NAME`: the last part of the path);
            `NAME...` is the rest; `[NAME]` is left out if it is not given.
        ours: our command line with these names.
        then: a sentence about what our line does not do; the line is then suggested, not run. The names may occur.
        options: meanings that apply to this command only.
        alone: whether options of the command change nothing but what `options` lists.
    """

    takes: str
    ours: str
    then: str = ""
    options: Mapping[str, Meaning] = field(default_factory=dict)
    alone: bool = False


def _fixed(**words: str) -> Callable[[str], list[str]]:
    """Our words by the value, in lower case; none for another value."""
    return lambda value: words.get(value.lower(), "").split()


def _set(key: str) -> Callable[[str], list[str]]:
    """Sets a metadata key to the value."""
    return lambda value: ["--set", f"{key}={value}"]


def _many(option: str) -> Callable[[str], list[str]]:
    """Repeats our option for each part of a list with commas."""
    return lambda value: [word for part in value.split(",") for word in (option, part)]


def _outtype(value: str) -> list[str]:
    return [] if value == "auto" else ["--dtype", value]


def _pretrained(value: str) -> list[str]:
    """The model of lm_eval's `pretrained=MODEL,dtype=...`."""
    return [part.partition("=")[2] for part in value.split(",") if part.startswith("pretrained=")]


OPTIONS: dict[str, Meaning] = {
    **dict.fromkeys(("--outfile", "--out", "--output-path", "--output-dir", "--mlx-path", "--out-path"), "--output"),
    **dict.fromkeys(("--out-type", "--ftype", "--torch-dtype"), "--dtype"),
    "--outtype": _outtype,
    **dict.fromkeys(("--dry-run", "--dryrun"), "--plan"),
    **dict.fromkeys(("--overwrite", "--yes", "-y"), "--force"),
    "--q-bits": "--bits",
    "--q-group-size": "--group-size",
    "--quant-predicate": "--recipe",
    **dict.fromkeys(("--to", "--output-format"), "--format"),
    **dict.fromkeys(("--split-max-size", "--max-shard-size", "--out-shard-size"), "--shard-size"),
    "--output-tensor-type": "--output-type",
    "--token-embedding-type": "--embedding-type",
    "--leave-output-tensor": "--leave-output",
    "--tensor-type-file": "--recipe",
    **dict.fromkeys(("--nthreads", "--n-threads"), "--threads"),
    "--temp": "--temperature",
    **dict.fromkeys(("--n-predict", "--predict", "--max-new-tokens", "--num-predict"), "--max-tokens"),
    **dict.fromkeys(("--n-gpu-layers", "--num-gpu", "-ngl"), "--gpu-layers"),
    **dict.fromkeys(("--ctx-size", "--num-ctx"), "--ctx"),
    **dict.fromkeys(("--system-prompt", "-sys"), "--system"),
    **dict.fromkeys(("--hf-path", "--model", "-m", "--model-name-or-path"), "MODEL"),
    **dict.fromkeys(("--hf-repo", "-hf", "-hfr"), lambda value: [f"hf://{value}"]),
    "--prompt": "PROMPT",
    **dict.fromkeys(
        ("--verbose", "-v", "--trust-remote-code", "--color", "-co", "--no-mmap", "--mlock", "--no-warmup", "--jinja"),
        "",
    ),
    **dict.fromkeys(
        ("-e", "--escape", "--no-display-prompt", "--log-disable", "-cnv", "--conversation", "-i", "--interactive"), ""
    ),
    **dict.fromkeys(("-st", "--single-turn", "--simple-io", "--offline", "--skip-contract", "--verbose-prompt"), ""),
    **dict.fromkeys(
        ("-fa", "--flash-attn", "-b", "--batch-size", "-ub", "--ubatch-size", "-tb", "--threads-batch"), "="
    ),
    **dict.fromkeys(("-sm", "--split-mode", "-ts", "--tensor-split", "-mg", "--main-gpu", "-dev"), "="),
}
"""Of any command. Words are looked up with dashes for underscores, as `--output_dir`."""

_RUN: dict[str, Meaning] = {
    "-p": "PROMPT",
    "-t": "--threads",
    "-c": "--ctx",
    "-s": "--seed",
    "-n": "--max-tokens",
    "-r": "--stop",
    "--reverse-prompt": "--stop",
    **dict.fromkeys(("-no-cnv", "--no-conversation", "--ignore-chat-template"), "--raw"),
    "--chat-template-file": "--template",
    "--adapter-path": "--lora",
}
_EVAL: dict[str, Meaning] = {
    **dict.fromkeys(("-f", "--file", "--text", "--data-path", "--dataset"), "--data"),
    "-t": "--threads",
    **dict.fromkeys(("-c", "--ctx-size", "--max-length", "--sequence-length"), "--seq-len"),
    "--kl-divergence": "",
    "--kl-divergence-base": "--against",
}
_BENCH: dict[str, Meaning] = {
    "-p": "--prompt-tokens",
    "--n-prompt": "--prompt-tokens",
    **dict.fromkeys(("-n", "--n-gen", "--max-tokens", "-g", "--generation-tokens"), "--tokens"),
    **dict.fromkeys(("-r", "--repetitions", "--iterations", "--num-trials"), "--runs"),
    "-t": "--threads",
    **dict.fromkeys(("--warmup", "--percentiles"), "="),
    "--fast": "",
    "-o": _fixed(json="--json", jsonl="--json"),
}
_BENCH_OF_APR: dict[str, Meaning] = {name: meaning for name, meaning in _BENCH.items() if name != "-o"} | {
    "--prompt": "="
}
_IMATRIX: dict[str, Meaning] = {
    **dict.fromkeys(("-f", "--file"), "--data"),
    "-t": "--threads",
    "-c": "--chunk-size",
    "--ctx-size": "--chunk-size",
    "--in-file": lambda value: [value, "--merge"],
    "--output-file": "--output",
    "--output-format": _fixed(),
    "--output-frequency": "=",
}
_QUANTIZE: dict[str, Meaning] = {
    **dict.fromkeys(("--type", "--dtype", "--quantize", "--scheme", "-s"), "TYPE"),
    "-t": "--threads",
    "--keep-split": "",
}
_MERGE: dict[str, Meaning] = {
    **dict.fromkeys(
        ("--merge-method", "--strategy"), lambda value: ["--method", {"average": "linear"}.get(value, value)]
    ),
    "--weights": _many("--weight"),
    "--base-model": "--base",
    "-t": "--t",
    **dict.fromkeys(("--cuda", "--lazy-unpickle", "--copy-tokenizer", "--low-cpu-memory", "--multi-gpu"), ""),
    "--random-seed": "--seed",
}
_TRAIN: dict[str, Meaning] = {
    "--model-name-or-path": "MODEL",
    **dict.fromkeys(("--teacher-model-name-or-path", "--teacher-model"), "TEACHER"),
    **dict.fromkeys(("--dataset-name", "--dataset", "--train-data", "--dataset-path"), "DATA"),
    **dict.fromkeys(("--output-dir", "--run-dir", "--adapter-path"), "OUT"),
    **dict.fromkeys(("--max-steps", "--num-steps", "--iters"), "STEPS"),
    "--num-train-epochs": "--epochs",
    "--learning-rate": "--lr",
    **dict.fromkeys(("--max-length", "--max-seq-length", "--seq-length"), "--seq-len"),
    "--gradient-checkpointing": "--recompute=block",
    "--max-grad-norm": "--clip",
    "--adam-epsilon": "--eps",
    "--adam-beta1": "--beta1",
    "--adam-beta2": "--beta2",
    "--logging-steps": "--log-every",
    "--save-steps": "--save-every",
    "--eval-steps": "--eval-every",
    "--save-total-limit": "--keep",
    "--report-to": "--log-to",
    "--resume-from-checkpoint": "--resume",
    **dict.fromkeys(("--packing", "--bf16", "--train", "--do-train"), ""),
    "--backend": _fixed(cuda="--device cuda", cpu="--device cpu"),
    "--mode": _fixed(),
    **dict.fromkeys(("--tokenizer", "--steps-per-epoch", "--strategy", "--fine-tune-type"), "="),
}
_NEW_METADATA: dict[str, Meaning] = {
    "--general-name": _set("general.name"),
    "--general-description": _set("general.description"),
    "--chat-template": _set("tokenizer.chat_template"),
    "--chat-template-file": lambda value: ["--set", f"tokenizer.chat_template=@{value}"],
    "--pre-tokenizer": _set("tokenizer.ggml.pre"),
    "--remove-metadata": "--unset",
    "--force": "",
}
_DOWNLOAD: dict[str, Meaning] = {
    "--local-dir": "OUT",
    "--repo-type": "=",
    **dict.fromkeys(("--local-dir-use-symlinks", "--cache-dir", "--max-workers"), "="),
}
_QA_SKIPS = ("golden", "throughput", "ollama", "gpu-speedup", "contract", "format-parity", "ptx-parity", "gpu-state")

OPTIONS_OF: dict[str, dict[str, Meaning]] = {
    "inspect": {"--filters": ""},
    "tensors": {"--grep": "--filter", "-n": "--limit"},
    "tree": {"--grep": "--filter", "-L": "--depth"},
    "hex": {"--slice": "=", **dict.fromkeys(("--header", "--blocks", "--list", "--contract"), "")},
    "diff": {"--limit": "--top", "--threshold": "--tolerance", "--weights": "--values", "--transpose-aware": ""},
    "import": {**dict.fromkeys(("--preserve-q4k", "--strict", "--enforce-provenance"), "")},
    "convert": {"--dequantize": "--dtype=f16", "-d": "--dtype=f16", "--use-temp-file": "", "--no-lazy": ""},
    "quantize": _QUANTIZE,
    "merge": _MERGE,
    "prune": {"--remove-layers": "--drop-layers", "--prune-layers": "--drop-layers", "-m": "=", "--method": "="},
    "run": _RUN,
    "eval": _EVAL,
    "imatrix": _IMATRIX,
    "bench": _BENCH_OF_APR,
    "qa": {
        **dict.fromkeys((f"--skip-{name}" for name in (*_QA_SKIPS, "metadata", "capability")), ""),
        **dict.fromkeys(("--iterations", "--warmup", "--max-tokens", "--min-executed"), "="),
    },
    "push": {"--commit-message": "--message", "--repo-type": "=", "--repo-id": "REPO", "--local-dir": "SRC"},
    "distill": _TRAIN,
    "pretrain": _TRAIN,
}
"""Of one command of ours: what its namesake in other programs takes."""

_SERVED = "llama-server -m model.gguf serves it; apr has no server"
_TRAINED = "it trains all weights; apr trains no adapters"
_PULLED = "every command also reads hf://org/repo itself"
_TASKS = "it computes the perplexity on a text; apr runs no benchmarks of tasks"

HABITS: dict[str, Habit] = {
    # A row `COMMAND --option` applies where the option is given, `COMMAND+N` to N positional arguments.
    # Our own commands with their arguments elsewhere
    "run": Habit("[MODEL] [PROMPT...]", "run MODEL PROMPT..."),
    "eval": Habit("[MODEL] [DATA]", "eval MODEL --data=DATA"),
    "quantize": Habit("[MODEL] [TYPE]", "quantize MODEL TYPE"),
    "pretrain": Habit("[MODEL] [DATA] [OUT] [STEPS]", "pretrain --init=MODEL --data=DATA --output=OUT --steps=STEPS"),
    "distill": Habit(
        "[TEACHER] [MODEL] [DATA] [OUT] [STEPS]",
        "distill TEACHER --student=MODEL --data=DATA --output=OUT --steps=STEPS",
    ),
    "push": Habit("[SRC] [REPO]", "push SRC REPO"),
    "tensors": Habit("[MODEL] [NAME]", "tensors MODEL --filter=NAME"),
    "tree": Habit("[MODEL] [NAME]", "tree MODEL --filter=NAME"),
    "hex": Habit("[MODEL] [NAME]", "hex MODEL --tensor=NAME"),
    "lint": Habit("[MODEL] [ID]", "lint MODEL --select=ID"),
    "inspect --template": Habit("[MODEL]", "meta template MODEL", options={"--template": ""}),
    "inspect --license": Habit("[MODEL]", "meta get MODEL general.license", options={"--license": ""}),
    "inspect --modelfile": Habit(
        "MODEL", "convert MODEL -o model.gguf --modelfile", "it writes Modelfile next to the GGUF", alone=True
    ),
    # llama.cpp
    "llama-cli": Habit("MODEL PROMPT...", "run MODEL PROMPT...", options=_RUN),
    "llama-quantize": Habit("", "quantize"),
    "llama-perplexity": Habit("MODEL [DATA]", "eval MODEL --data=DATA", options=_EVAL),
    "llama-imatrix": Habit("MODEL...", "imatrix MODEL...", options=_IMATRIX),
    "llama-bench": Habit("MODEL...", "bench MODEL...", options=_BENCH),
    "llama-gguf-split": Habit("MODEL OUT", "convert MODEL -o OUT.gguf", options={"--split": ""}),
    "llama-gguf-split --merge": Habit("MODEL OUT", "convert MODEL -o OUT", options={"--merge": ""}),
    "llama-export-lora": Habit(
        "MODEL ADAPTER OUT", "merge-adapter MODEL ADAPTER -o OUT", options={"--lora": "ADAPTER"}
    ),
    "llama-tokenize": Habit("MODEL TEXT", "vocab MODEL TEXT", options={"-p": "TEXT", "--prompt": "TEXT", "--ids": ""}),
    "llama-embedding": Habit("MODEL TEXT", "run MODEL --embed TEXT", options={"-p": "TEXT", "--prompt": "TEXT"}),
    "llama-gguf-hash": Habit("FILE", "tensors FILE --hash"),
    "llama-gguf": Habit("FILE [MODE]", "tensors FILE"),
    "llama-server": Habit("MODEL", "convert MODEL -o model.gguf", then=_SERVED, alone=True),
    "llama-finetune": Habit(
        "MODEL DATA OUT=run STEPS",
        "pretrain --init MODEL --data DATA -o OUT --steps STEPS",
        options=_TRAIN | {"-f": "DATA"},
    ),
    "convert-hf-to-gguf": Habit(
        "MODEL OUT=MODEL.gguf", "convert MODEL -o OUT", options={"--outfile": "OUT", "-o": "OUT"}
    ),
    "convert-hf-to-gguf --print-supported-models": Habit("", "architectures", alone=True),
    "convert-lora-to-gguf": Habit(
        "ADAPTER BASE OUT=ADAPTER.gguf",
        "convert ADAPTER --base BASE -o OUT",
        options={"--base": "BASE", "--base-model-id": "BASE", "--outfile": "OUT"},
    ),
    # gguf-py
    "gguf-dump": Habit("FILE", "inspect FILE --metadata --weights", options={"--json-array": "", "--data-offset": ""}),
    "gguf-dump --no-tensors": Habit("FILE", "meta list FILE", options={"--no-tensors": ""}),
    "gguf-set-metadata": Habit("FILE KEY VALUE", "meta set FILE KEY=VALUE", options={"--force": ""}),
    "gguf-new-metadata": Habit("FILE OUT", "stamp FILE -o OUT", options=_NEW_METADATA),
    "gguf-editor-gui": Habit("FILE", "meta list FILE"),
    # mlx-lm
    "mlx-lm convert": Habit("MODEL", "convert MODEL", options={"-d": "--dtype=f16"}),
    "mlx-lm generate": Habit("MODEL PROMPT...", "run MODEL PROMPT...", options=_RUN | {"-m": "--max-tokens"}),
    "mlx-lm chat": Habit("MODEL", "run MODEL", options=_RUN),
    "mlx-lm fuse": Habit(
        "MODEL ADAPTER=adapters OUT=fused_model",
        "merge-adapter MODEL ADAPTER -o OUT --format mlx",
        options={"--adapter-path": "ADAPTER", "--save-path": "OUT", "--de-quantize": "--dtype=f16"},
    ),
    "mlx-lm fuse --export-gguf": Habit(
        "MODEL ADAPTER=adapters OUT=ggml-model-f16.gguf",
        "merge-adapter MODEL ADAPTER -o OUT",
        options={"--adapter-path": "ADAPTER", "--gguf-path": "OUT", "--export-gguf": "", "--save-path": "="},
    ),
    "mlx-lm lora": Habit(
        "MODEL DATA OUT=run STEPS",
        "pretrain --init MODEL --data DATA -o OUT --steps STEPS",
        _TRAINED,
        {**_TRAIN, "--data": "DATA"},
    ),
    "mlx-lm upload": Habit("SRC REPO", "push SRC REPO", options={"--path": "SRC", "--upload-repo": "REPO"}),
    "mlx-lm perplexity": Habit("MODEL DATA", "eval MODEL --data DATA", options=_EVAL | {"--data-path": "DATA"}),
    "mlx-lm evaluate": Habit("MODEL DATA", "eval MODEL --data DATA", _TASKS, alone=True),
    "mlx-lm benchmark": Habit("MODEL", "bench MODEL", options=_BENCH | {"-n": "--runs"}),
    "mlx-lm server": Habit("MODEL", "convert MODEL -o model.gguf", _SERVED, alone=True),
    "mlx-lm manage": Habit("", "", "hf cache ls lists what is downloaded; apr inspect hf://org/repo reads it"),
    # Ollama
    "ollama run": Habit("MODEL PROMPT...", "run MODEL PROMPT...", options=_RUN),
    "ollama show": Habit("MODEL", "inspect MODEL"),
    "ollama show --template": Habit("MODEL", "meta template MODEL", options={"--template": ""}),
    "ollama show --license": Habit("MODEL", "meta get MODEL general.license", options={"--license": ""}),
    "ollama show --modelfile": Habit(
        "MODEL", "convert MODEL -o model.gguf --modelfile", "it writes Modelfile next to the GGUF", alone=True
    ),
    "ollama create": Habit(
        "NAME MODEL",
        "convert MODEL -o NAME.gguf --modelfile",
        "then: ollama create NAME -f Modelfile",
        {"--from": "MODEL", "-q": "--dtype", "--quantize": "--dtype", "-f": "=", "--file": "="},
    ),
    "ollama cp": Habit("FILE OUT", "convert FILE -o OUT"),
    "ollama list": Habit("", "", "models are files: apr inspect FILE shows one; ollama list those of Ollama"),
    "ollama serve": Habit("MODEL", "convert MODEL -o model.gguf", _SERVED, alone=True),
    "ollama pull": Habit("MODEL", "convert hf://org/repo -o model.gguf", _PULLED, alone=True),
    "ollama push": Habit("REPO SRC", "push SRC REPO"),
    # mergekit
    "mergekit-yaml": Habit("CONFIG OUT", "merge --config CONFIG -o OUT", options=_MERGE),
    "mergekit-extract-lora": Habit(
        "TUNED BASE OUT",
        "merge-adapter BASE TUNED --unmerge -o OUT --format hf",
        options={"--model": "TUNED", "--base-model": "BASE", "--out-path": "OUT", "--max-rank": "--rank", "--cuda": ""},
    ),
    # The hub
    "hf download": Habit("REPO OUT=/REPO", "convert hf://REPO -o OUT --format hf", options=_DOWNLOAD),
    "hf download+2": Habit("REPO FILE OUT=.", "convert hf://REPO/FILE -o OUT/FILE", options=_DOWNLOAD),
    "hf upload": Habit("REPO SRC", "push SRC REPO", options=OPTIONS_OF["push"] | {"--revision": "--revision"}),
    "hf auth": Habit("", "", "hf auth login; apr push uses its token, or HF_TOKEN"),
    "hf cache": Habit("", "", "hf cache ls lists what is downloaded; apr inspect hf://org/repo reads it"),
    "hf repo": Habit("", "", "apr push FOLDER org/repo creates the repository"),
    # optimum, transformers, TRL, vLLM
    "optimum-cli export": Habit(
        "TARGET [OUT] MODEL",
        "convert MODEL -o FOLDER --format hf",
        "optimum-cli exports FOLDER; apr writes no ONNX",
        {"-m": "MODEL", "--model": "MODEL"},
        alone=True,
    ),
    "transformers chat": Habit("MODEL PROMPT...", "run MODEL PROMPT...", options=_RUN),
    "transformers run": Habit("MODEL PROMPT...", "run MODEL PROMPT...", options=_RUN),
    "transformers serve": Habit("MODEL", "convert MODEL -o model.gguf", _SERVED, alone=True),
    "vllm serve": Habit("MODEL", "convert MODEL -o FOLDER --format hf", "vllm serve FOLDER reads it", alone=True),
    "lm-eval": Habit(
        "MODEL DATA",
        "eval MODEL --data DATA",
        _TASKS,
        {"--model": "=", "-m": "=", "--model-args": _pretrained, "-a": _pretrained},
        alone=True,
    ),
    "trl sft": Habit(
        "MODEL DATA OUT=run STEPS", "pretrain --init MODEL --data DATA -o OUT --steps STEPS", options=_TRAIN
    ),
    "trl gkd": Habit(
        "MODEL TEACHER DATA OUT=run STEPS",
        "distill TEACHER --student MODEL --data DATA -o OUT --steps STEPS",
        options=_TRAIN | {"--teacher": "TEACHER"},
    ),
    "trl env": Habit("", "doctor"),
    # The reference tool, and words that several programs have
    "describe": Habit("FILE", "inspect FILE"),
    "debug": Habit("FILE", "inspect FILE", options=dict.fromkeys(("--drama", "--strings"), "")),
    "compare": Habit("A B", "diff A B"),
    "compare-hf": Habit(
        "FILE REPO", "diff FILE hf://REPO --values", options={"--hf": "REPO", "--threshold": "--tolerance"}
    ),
    "check": Habit("FILE", "validate FILE", options={"--no-gpu": ""}),
    "qualify": Habit("FILE", "qa FILE", options={"--tier": "=", "--timeout": "="}),
    "parity": Habit("FILE", "qa FILE"),
    "flow": Habit("FILE", "tree FILE", options={"--component": "=", "--full": "--all"}),
    "explain": Habit("NAME", "architectures NAME", alone=True),
    "manifest": Habit("FILE...", "tensors FILE... --hash"),
    "rosetta inspect": Habit("FILE", "inspect FILE"),
    "rosetta convert": Habit("FILE OUT", "convert FILE -o OUT"),
    "rosetta verify": Habit("FILE", "validate FILE --strict", options={"--intermediate": "=", "--tolerance": "="}),
    "rosetta diff-tensors": Habit(
        "A B", "diff A B --values", options=dict.fromkeys(("--mismatches-only", "--show-values"), "")
    ),
    "rosetta fingerprint": Habit("FILE", "tensors FILE --hash --stats"),
    "tokenize": Habit("MODEL TEXT", "vocab MODEL TEXT"),
    "hexdump": Habit("FILE", "hex FILE --raw"),
    "upload": Habit("SRC REPO", "push SRC REPO", options=OPTIONS_OF["push"]),
    "split": Habit("MODEL OUT", "convert MODEL -o OUT", options={"--format": "--format"}),
    "join": Habit("MODEL OUT", "convert MODEL -o OUT"),
    "join-lora": Habit(
        "MODEL ADAPTER OUT",
        "merge-adapter MODEL ADAPTER -o OUT",
        options={"--adapter-path": "ADAPTER", "--lora": "ADAPTER", "--save-path": "OUT"},
    ),
    "apply-chat-template": Habit("FILE CHAT", "meta template render FILE CHAT"),
    "set-chat-template": Habit("FILE TEMPLATE", "meta template set FILE TEMPLATE"),
    "dequantize": Habit("FILE OUT", "convert FILE -o OUT --dtype f16"),
    "embed": Habit("MODEL TEXT", "run MODEL --embed TEXT", options={"-p": "TEXT", "--prompt": "TEXT"}),
    "train": Habit(
        "MODEL DATA OUT=run STEPS",
        "pretrain --init MODEL --data DATA -o OUT --steps STEPS",
        "apr distill trains on a larger model's outputs",
        _TRAIN,
    ),
    "axolotl train": Habit(
        "CONFIG MODEL DATA OUT STEPS",
        "pretrain --init MODEL --data DATA -o OUT --steps STEPS",
        "apr has its own configuration: --config",
        alone=True,
    ),
    "preprocess": Habit("DATA MODEL", "data DATA --model MODEL"),
    "template": Habit("FILE", "meta template FILE"),
    "add-metadata": Habit("FILE KEY VALUE", "meta set FILE KEY=VALUE"),
    "metadata": Habit("FILE", "meta list FILE"),
    "get-metadata": Habit("FILE KEY", "meta get FILE KEY"),
    "env": Habit("", "doctor"),
}

SAME = {
    **dict.fromkeys(("llama-run", "llama-simple", "llama-simple-chat", "llama-mtmd-cli", "main"), "llama-cli"),
    **dict.fromkeys(("chat", "ask", "generate", "complete"), "llama-cli"),
    "perplexity": "llama-perplexity",
    "ppl": "llama-perplexity",
    "benchmark": "llama-bench",
    "gguf-split": "llama-gguf-split",
    "merge-shards": "join",
    "gguf-hash": "llama-gguf-hash",
    "export-lora": "llama-export-lora",
    "merge-lora": "join-lora",
    "lora": "join-lora",
    "lora --train": "mlx-lm lora",
    "fuse": "mlx-lm fuse",
    "fuse --export-gguf": "mlx-lm fuse --export-gguf",
    "create": "ollama create",
    "dump": "gguf-dump",
    "dump --no-tensors": "gguf-dump --no-tensors",
    "convert-lora": "convert-lora-to-gguf",
    **dict.fromkeys(("push-to-hub", "publish"), "upload"),
    "config": "metadata",
    "gkd": "trl gkd",
    **dict.fromkeys(("render", "render-template", "render-chat"), "apply-chat-template"),
    "set-template": "set-chat-template",
    **dict.fromkeys(("server", "serve"), "llama-server"),
    "convert-hf-to-gguf-update": "convert-hf-to-gguf",
    **dict.fromkeys(("set-metadata", "set"), "gguf-set-metadata"),
    "new-metadata": "gguf-new-metadata",
    "mlx-lm quantize": "mlx-lm convert",
    **dict.fromkeys(("ollama ls", "ollama ps", "ollama rm", "ollama stop", "list", "ls", "ps"), "ollama list"),
    "hf models": "hf cache",
    "download": "hf download",
    "login": "hf auth",
    "hf login": "hf auth",
    "hf whoami": "hf auth",
    "hf scan-cache": "hf cache",
    "hf delete-cache": "hf cache",
    "hf repos": "hf repo",
    "hf upload-large-folder": "hf upload",
    **dict.fromkeys(("optimum-cli onnxruntime", "optimum-cli inc", "optimum-cli openvino"), "optimum-cli export"),
    "mergekit-multi": "mergekit-yaml",
    "mergekit-mega": "mergekit-yaml",
    **dict.fromkeys(("finetune", "fine-tune", "sft"), "train"),
    **dict.fromkeys(("trl dpo", "trl grpo", "trl reward", "trl kto", "trl rloo"), "train"),
    **dict.fromkeys(("tune run", "accelerate launch", "torchrun"), "axolotl train"),
    "distil": "trl gkd",
    "embedding": "embed",
    "chat-template": "template",
    "evaluate": "lm-eval",
    "lm-eval run": "lm-eval",
}
"""Other names of rows of HABITS."""

PROGRAMS = (
    "mlx-lm",
    "ollama",
    "hf",
    "optimum-cli",
    "transformers",
    "trl",
    "vllm",
    "rosetta",
    "axolotl",
    "tune",
    "lm-eval",
)
"""Programs whose first argument is a command of theirs."""
