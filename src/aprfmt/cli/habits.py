"""Commands and options of other programs, and what they are here. One table, which `other_tools` reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aprfmt.cli.foreign_options import (
    AGAINST,
    BENCH_OPTIONS,
    CALIBRATION,
    CHECKSUMS,
    DOWNLOAD,
    EVAL_OPTIONS,
    FOREIGN_TRAIN,
    IMATRIX_OPTIONS,
    MERGE_OPTIONS,
    MESSAGES,
    NEW_METADATA,
    OPTIONS_OF,
    RANK,
    RUN_OPTIONS,
    TEMPLATE,
    Meaning,
    model_of_modelfile,
    named_model,
    pretrained_model,
    set_key,
)


@dataclass(frozen=True, slots=True)
class Habit:
    """A command of another program.

    Attributes:
        takes: names of its positional arguments, in order. `NAME=VALUE` has a default, which may contain other names
            (`/NAME`: the last part of the path; `<NAME>`: that without a model's suffix);
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


_SERVED = "llama-server -m OUT serves it; apr has no server"
_PULLED = "every command also reads hf://org/repo itself"
_TASKS = "apr eval computes perplexity on text; apr does not run task benchmarks"

_EXTRACT: dict[str, Meaning] = {
    **dict.fromkeys(("--model", "-m", "--finetuned", "--tuned", "--finetune", "--fine-tuned"), "TUNED"), "--lora": "",
    **dict.fromkeys(("--base-model", "--base", "-b"), "BASE"), "--out-path": "OUT", **RANK, "--cuda": "",
}  # fmt: skip
_EXTRACT_IN_EITHER_ORDER = Habit(
    "BASE TUNED OUT=adapter",
    "merge-adapter BASE TUNED --unmerge -o OUT --format hf",
    "BASE is taken as the base model and TUNED as its fine-tune; swap them if it is the other way round",
    options=_EXTRACT,
)
"""Some programs name the fine-tuned model first, and the adapter of the other order takes away what it should add."""

_TEXT: dict[str, Meaning] = dict.fromkeys(("-p", "--prompt", "--text", "--input"), "TEXT")

_NAME: dict[str, Meaning] = dict.fromkeys(("--name", "--to", "--title"), "NAME")

_KEY: dict[str, Meaning] = dict.fromkeys(("--key", "--field", "--get", "-k"), "KEY")
HABITS: dict[str, Habit] = {
    # A row `COMMAND --option` applies where the option is given, `COMMAND+N` to N positional arguments, and one of two
    # words where the second one is not a file.
    # Our own commands with their arguments elsewhere
    "run": Habit("[MODEL] [PROMPT...]", "run MODEL PROMPT..."),
    "eval": Habit("[MODEL] [DATA]", "eval MODEL --data=DATA"),
    "quantize": Habit("[MODEL] [TYPE]", "quantize MODEL TYPE"),
    "pretrain": Habit("[MODEL] [DATA] [OUT] [STEPS]", "pretrain --init=MODEL --data=DATA --output=OUT --steps=STEPS"),
    "distill": Habit(
        "[TEACHER] [MODEL] [DATA] [OUT] [STEPS]",
        "distill TEACHER --student=MODEL --data=DATA --output=OUT --steps=STEPS",
    ),
    "push": Habit("[SRC] [REPO]", "push SRC REPO"), "tensors": Habit("[MODEL] [NAME]", "tensors MODEL --filter=NAME"),
    "tree": Habit("[MODEL] [NAME]", "tree MODEL --filter=NAME"), "quantize --bits": Habit("MODEL", "convert MODEL"),
    "meta --set": Habit("FILE PAIR", "meta set FILE PAIR", options={"--set": "PAIR"}),
    "meta --key": Habit("FILE KEY", "meta get FILE KEY", options=_KEY),
    "meta --all": Habit("FILE", "meta list FILE", options={"--all": ""}),
    "meta --name": Habit(
        "FILE NAME", "meta set FILE general.name=NAME", options={"--name": "NAME", "--general-name": "NAME"}
    ),
    "edit --chat-template": Habit(
        "FILE TEMPLATE", "meta template set FILE TEMPLATE", options=dict.fromkeys(TEMPLATE, "TEMPLATE")
    ),
    "stamp --chat-template": Habit("FILE", "stamp FILE", options=TEMPLATE),
    "merge-models": Habit("MODEL...", "merge MODEL...", options=MERGE_OPTIONS), "resume": Habit("[RUN]", "resume RUN"),
    "vocab": Habit("[MODEL] [TEXT]", "vocab MODEL TEXT"),
    "merge-adapter": Habit("[MODEL] [ADAPTER...]", "merge-adapter MODEL ADAPTER..."),
    "report": Habit("[MODEL] [OUT]", "report MODEL --output=OUT"),
    "vocab encode": Habit("MODEL TEXT", "vocab MODEL TEXT"),
    "imatrix compute": Habit("MODEL DATA", "imatrix MODEL --data DATA", options=CALIBRATION),
    "tensors list": Habit("MODEL [NAME]", "tensors MODEL --filter=NAME"), "runs show": Habit("RUN", "report RUN"),
    "runs list": Habit("FOLDER=.", "runs FOLDER"),
    "pretrain --resume": Habit("RUN", "resume RUN", options={"--resume": "RUN"}, alone=True),
    "parity --data": Habit("BASE MODEL DATA", "eval MODEL --data DATA --against BASE", options=AGAINST),
    "run --serve": Habit("MODEL OUT=<MODEL>.gguf", "convert MODEL -o OUT", _SERVED, alone=True),
    "export --adapter": Habit(
        "MODEL ADAPTER", "merge-adapter MODEL ADAPTER", options={"--adapter": "ADAPTER", "--lora": "ADAPTER"}
    ),
    "export --html": Habit("MODEL OUT=<MODEL>.html", "report MODEL -o OUT", options={"--html": ""}),
    "convert --chat-template": Habit(
        "FILE OUT", "stamp FILE -o OUT", "it sets the template and keeps the format", options=TEMPLATE
    ),
    "stamp --name": Habit("[MODEL]", "stamp MODEL", options={"--name": set_key("general.name")}),
    "doctor+1": Habit("FILE", "validate FILE"), "validate+2": Habit("FILE SUMS", "validate FILE --sha256 SUMS"),
    "verify+2": Habit("FILE SUMS", "validate FILE --sha256 SUMS"),
    "verify -c": Habit("SUMS FILE", "validate FILE --sha256 SUMS", options={"-c": "SUMS"}),
    **dict.fromkeys(
        (
            *("verify --sha256", "verify --manifest"),
            *(f"{verb} {name}" for verb in ("verify", "checksum", "llama-gguf-hash") for name in CHECKSUMS),
        ),
        Habit("FILE", "validate FILE"),
    ),
    "report+2": Habit("MODEL OUT", "report MODEL -o OUT"),
    "diff --data": Habit("BASE MODEL DATA", "eval MODEL --data DATA --against BASE", options=AGAINST),
    "merge --lora": Habit(
        "MODEL ADAPTER OUT=merged", "merge-adapter MODEL ADAPTER -o OUT",
        options={"--base": "MODEL"}
        | dict.fromkeys(("--lora", "--adapter", "--adapter-path", "--peft-model", "--base-model"), "ADAPTER")
        | {"--base-model": "MODEL"},
    ),
    "hex": Habit("[MODEL] [NAME]", "hex MODEL --tensor=NAME"), "lint": Habit("[MODEL] [ID]", "lint MODEL --select=ID"),
    "inspect --template": Habit("[MODEL]", "meta template MODEL", options={"--template": "", "--chat-template": ""}),
    "inspect --key": Habit("FILE KEY", "meta get FILE KEY", options={"--key": "KEY", "--field": "KEY"}),
    "inspect --keys": Habit("FILE", "meta list FILE", options={"--keys": "", "--kv": ""}),
    "inspect --html": Habit("MODEL OUT=<MODEL>.html", "report MODEL -o OUT", options={"--html": "", "--report": ""}),
    "inspect --license": Habit("[MODEL]", "meta get MODEL general.license", options={"--license": ""}),
    "inspect --modelfile": Habit(
        "MODEL", "convert MODEL -o model.gguf --modelfile", "it writes Modelfile next to the GGUF", alone=True
    ),
    # llama.cpp
    "llama-cli": Habit("MODEL PROMPT...", "run MODEL PROMPT...", options=RUN_OPTIONS),
    "llama-quantize": Habit("", "quantize"),
    "llama-perplexity": Habit("MODEL [DATA]", "eval MODEL --data=DATA", options=EVAL_OPTIONS),
    "llama-imatrix": Habit("MODEL...", "imatrix MODEL...", options=IMATRIX_OPTIONS),
    "llama-bench": Habit("MODEL...", "bench MODEL...", options=BENCH_OPTIONS),
    "llama-gguf-split": Habit("MODEL OUT=<MODEL>-split.gguf", "convert MODEL -o OUT", options={"--split": ""}),
    "llama-gguf-split --merge": Habit("MODEL OUT", "convert MODEL -o OUT", options={"--merge": ""}),
    "llama-export-lora": Habit(
        "MODEL ADAPTER OUT=merged", "merge-adapter MODEL ADAPTER -o OUT", options={"--lora": "ADAPTER"}
    ),
    "llama-tokenize": Habit("MODEL TEXT", "vocab MODEL TEXT", options=_TEXT | {"-t": "TEXT", "--ids": ""}),
    "llama-tokenize --template": Habit("FILE", "meta template FILE", options={"--template": ""}),
    "llama-tokenize --chat": Habit(
        "FILE CHAT", "meta template render FILE CHAT", "apr vocab tokenizes what it prints", options=MESSAGES
    ),
    "llama-embedding": Habit("MODEL TEXT", "run MODEL --embed TEXT", options=_TEXT | {"--pooling": "="}),
    "llama-gguf-hash": Habit("FILE", "tensors FILE --hash", options={"--sha256": "", "--all": ""}),
    "llama-gguf": Habit("FILE [MODE]", "tensors FILE"),
    "llama-server": Habit("MODEL OUT=<MODEL>.gguf", "convert MODEL -o OUT", _SERVED, alone=True),
    "llama-finetune": Habit(
        "MODEL DATA OUT=run STEPS", "pretrain --init MODEL --data DATA -o OUT --steps STEPS",
        options=FOREIGN_TRAIN | {"-f": "DATA"},
    ),
    "convert-hf-to-gguf": Habit(
        "MODEL OUT=MODEL.gguf", "convert MODEL -o OUT", options={"--outfile": "OUT", "-o": "OUT"}
    ),
    "convert-hf-to-gguf --print-supported-models": Habit("", "architectures", alone=True),
    "convert-lora-to-gguf": Habit(
        "ADAPTER [BASE] OUT=ADAPTER.gguf", "convert ADAPTER --base=BASE -o OUT",
        options={"--base": "BASE", "--base-model-id": "BASE", "--outfile": "OUT"}
        | {"--lora": "ADAPTER", "--adapter": "ADAPTER"},
    ),
    "to-hf": Habit("MODEL OUT=<MODEL>-hf", "convert MODEL -o OUT --format hf"),
    "to-mlx": Habit("MODEL OUT=<MODEL>-mlx", "convert MODEL -o OUT --format mlx"),
    "to-apr": Habit("MODEL OUT=<MODEL>.apr", "import MODEL -o OUT"),
    "to-safetensors": Habit("MODEL OUT=<MODEL>.safetensors", "convert MODEL -o OUT"),
    # gguf-py
    "gguf-dump": Habit("FILE", "inspect FILE --metadata --weights", options={"--json-array": "", "--data-offset": ""}),
    "gguf-dump --metadata": Habit("FILE", "meta list FILE", options={"--metadata": ""}),
    "gguf-dump --no-metadata": Habit("FILE", "tensors FILE", options={"--no-metadata": ""}),
    "gguf-dump --tensors": Habit("FILE", "tensors FILE", options={"--tensors": ""}),
    "gguf-dump --key": Habit("FILE KEY", "meta get FILE KEY", options={"--key": "KEY"}),
    "gguf-dump --keys": Habit("FILE", "meta list FILE", options={"--keys": ""}),
    "gguf-dump --no-tensors": Habit("FILE", "meta list FILE", options={"--no-tensors": ""}),
    "gguf-set-metadata": Habit(
        "FILE KEY VALUE", "meta set FILE KEY=VALUE",
        options={"--force": ""} | dict.fromkeys(("--key", "-k"), "KEY") | dict.fromkeys(("--value", "-v"), "VALUE"),
    ),
    "gguf-new-metadata": Habit("FILE OUT=<FILE>-new.gguf", "stamp FILE -o OUT", options=NEW_METADATA),
    "gguf-editor-gui": Habit("FILE", "meta list FILE"),
    # mlx-lm
    "mlx-lm convert": Habit("MODEL", "convert MODEL", options={"-d": "--dtype=f16"}),
    "mlx-lm generate": Habit("MODEL PROMPT...", "run MODEL PROMPT...", options=RUN_OPTIONS | {"-m": "--max-tokens"}),
    "mlx-lm chat": Habit("MODEL", "run MODEL", options=RUN_OPTIONS),
    "mlx-lm fuse": Habit(
        "MODEL ADAPTER=adapters OUT=fused_model", "merge-adapter MODEL ADAPTER -o OUT --format mlx",
        options={"--adapter-path": "ADAPTER", "--save-path": "OUT", "--de-quantize": "--dtype=f16"},
    ),
    "mlx-lm fuse --export-gguf": Habit(
        "MODEL ADAPTER=adapters OUT=ggml-model-f16.gguf", "merge-adapter MODEL ADAPTER -o OUT",
        options={"--adapter-path": "ADAPTER", "--gguf-path": "OUT", "--export-gguf": "", "--save-path": "="},
    ),
    "mlx-lm lora": Habit(
        "MODEL DATA OUT=adapters STEPS=1000", "pretrain --init MODEL --data DATA -o OUT --steps STEPS --lora r=8",
        options=FOREIGN_TRAIN | dict.fromkeys(("--lora", "--train"), "") | {"--num-layers": "="},
    ),
    "mlx-lm upload": Habit("SRC REPO", "push SRC REPO", options={"--path": "SRC", "--upload-repo": "REPO"}),
    "mlx-lm perplexity": Habit("MODEL DATA", "eval MODEL --data DATA", options=EVAL_OPTIONS | {"--data-path": "DATA"}),
    "mlx-lm evaluate": Habit("MODEL DATA", "eval MODEL --data DATA", _TASKS, alone=True),
    "mlx-lm benchmark": Habit("MODEL", "bench MODEL", options=BENCH_OPTIONS | {"-n": "--runs"}),
    "mlx-lm server": Habit("MODEL OUT=<MODEL>.gguf", "convert MODEL -o OUT", _SERVED, alone=True),
    "mlx-lm manage": Habit("", "", "hf cache ls lists downloads; apr inspect hf://org/repo shows one"),
    # Ollama
    "ollama run": Habit("MODEL PROMPT...", "run MODEL PROMPT...", options=RUN_OPTIONS),
    "ollama show": Habit("MODEL", "inspect MODEL"),
    "ollama show --template": Habit("MODEL", "meta template MODEL", options={"--template": ""}),
    "ollama show --license": Habit("MODEL", "meta get MODEL general.license", options={"--license": ""}),
    "ollama show --modelfile": Habit(
        "MODEL", "convert MODEL -o model.gguf --modelfile", "it writes Modelfile next to the GGUF", alone=True
    ),
    "ollama create": Habit(
        "NAME=model MODEL", "convert MODEL -o NAME.gguf --modelfile", "then: ollama create NAME -f Modelfile",
        {"--from": "MODEL", "-q": "--dtype", "--quantize": "--dtype", "-f": "=", "--file": "="},
    ),
    "ollama create -f": Habit(
        "NAME=model MODEL", "convert MODEL -o NAME.gguf",
        "then write FROM ./NAME.gguf into it and type: ollama create NAME -f Modelfile",
        {"-q": "--dtype", "--quantize": "--dtype", "-f": model_of_modelfile, "--file": model_of_modelfile},
    ),
    "modelfile": Habit("MODEL OUT=<MODEL>-ollama.gguf", "convert MODEL -o OUT --modelfile"),
    "export --ollama": Habit(
        "MODEL OUT=<MODEL>-ollama.gguf", "convert MODEL -o OUT --modelfile", options={"--ollama": ""}
    ),
    "ollama cp": Habit("FILE OUT", "convert FILE -o OUT"),
    "ollama list": Habit(
        "FOLDER=.", "inspect FOLDER", options=dict.fromkeys(("--all", "-a", "-l", "-la", "--models", "--list"), "")
    ),
    "ollama rm": Habit("", "", "models are plain files: rm deletes one, and no server keeps it loaded"),
    "ollama serve": Habit("MODEL OUT=<MODEL>.gguf", "convert MODEL -o OUT", _SERVED, alone=True),
    "ollama pull": Habit("MODEL", "convert hf://org/repo -o model.gguf", _PULLED, alone=True),
    "ollama push": Habit("REPO SRC", "push SRC REPO"),
    # mergekit
    "mergekit-yaml": Habit("CONFIG OUT=merged", "merge --config CONFIG -o OUT", options=MERGE_OPTIONS),
    "mergekit-extract-lora": Habit(
        "TUNED BASE OUT=adapter", "merge-adapter BASE TUNED --unmerge -o OUT --format hf", options=_EXTRACT
    ),
    "diff --lora": Habit(
        "BASE TUNED OUT=adapter", "merge-adapter BASE TUNED --unmerge -o OUT --format hf",
        options=_EXTRACT | {"--lora": ""},
    ),
    "extract-lora": Habit(
        "TUNED BASE OUT=adapter", "merge-adapter BASE TUNED --unmerge -o OUT --format hf", options=_EXTRACT
    ),
    **dict.fromkeys(("extract-lora+2", "extract-lora+3"), _EXTRACT_IN_EITHER_ORDER),
    # The hub
    "hf download": Habit("REPO OUT=/REPO", "convert hf://REPO -o OUT --format hf", options=DOWNLOAD),
    "hf download+2": Habit("REPO FILE OUT=.", "convert hf://REPO/FILE -o OUT/FILE", options=DOWNLOAD),
    "hf upload": Habit("REPO SRC", "push SRC REPO", options=OPTIONS_OF["push"] | {"--revision": "--revision"}),
    "hf auth": Habit("", "", "hf auth login; apr push uses its token, or HF_TOKEN"),
    "hf cache": Habit("", "", "hf cache ls lists downloads; apr inspect hf://org/repo shows one"),
    "hf info": Habit("REPO", "inspect hf://REPO"),
    "hf repo": Habit("", "", "apr push FOLDER org/repo creates the repository"),
    # optimum, transformers, TRL, vLLM
    "optimum-cli export": Habit(
        "TARGET [OUT] MODEL", "convert MODEL -o FOLDER --format hf",
        "apr does not write ONNX; optimum-cli exports FOLDER", {"-m": "MODEL", "--model": "MODEL"}, alone=True,
    ),
    "transformers chat": Habit("MODEL PROMPT...", "run MODEL PROMPT...", options=RUN_OPTIONS),
    "transformers run": Habit("MODEL PROMPT...", "run MODEL PROMPT...", options=RUN_OPTIONS),
    "transformers serve": Habit("MODEL OUT=<MODEL>.gguf", "convert MODEL -o OUT", _SERVED, alone=True),
    "vllm bench": Habit("[KIND] MODEL", "bench MODEL", options=BENCH_OPTIONS),
    "vllm serve": Habit("MODEL OUT=<MODEL>-hf", "convert MODEL -o OUT --format hf", alone=True),
    "lm-eval": Habit(
        "MODEL DATA", "eval MODEL --data DATA", _TASKS,
        {"--model": named_model, "-m": named_model, "--model-args": pretrained_model, "-a": pretrained_model},
        alone=True,
    ),
    "trl sft": Habit(
        "MODEL DATA OUT=run STEPS", "pretrain --init MODEL --data DATA -o OUT --steps STEPS", options=FOREIGN_TRAIN
    ),
    "trl gkd": Habit(
        "MODEL TEACHER DATA OUT=run STEPS", "distill TEACHER --student MODEL --data DATA -o OUT --steps STEPS",
        options=FOREIGN_TRAIN | {"--teacher": "TEACHER"},
    ),
    "trl dpo": Habit(
        "MODEL DATA OUT=run STEPS", "pretrain --init MODEL --data DATA -o OUT --steps STEPS",
        "apr pretrain trains on the text only: apr does no preference or reward optimization", FOREIGN_TRAIN,
    ),
    "trl env": Habit("", "doctor"),
    "distil": Habit(
        "TEACHER MODEL DATA OUT=run STEPS", "distill TEACHER --student MODEL --data DATA -o OUT --steps STEPS",
        options=FOREIGN_TRAIN | {"--teacher": "TEACHER"},
    ),
    # The reference tool, and words that several programs have
    "debug": Habit("FILE", "inspect FILE", options=dict.fromkeys(("--drama", "--strings"), "")),
    "compare": Habit("A B", "diff A B", options={"--a": "A", "--b": "B"}),
    "compare-hf": Habit(
        "FILE REPO", "diff FILE hf://REPO --values", options={"--hf": "REPO", "--threshold": "--tolerance"}
    ),
    "check": Habit("FILE", "validate FILE", options={"--no-gpu": ""}),
    "qualify": Habit("FILE", "qa FILE", options={"--tier": "=", "--timeout": "="}), "parity": Habit("FILE", "qa FILE"),
    "flow": Habit("FILE", "tree FILE", options={"--component": "=", "--full": "--all"}),
    "check+2": Habit("FILE SUMS", "validate FILE --sha256 SUMS"),
    "checksum": Habit("FILE", "tensors FILE --hash", "it hashes each tensor; sha256sum FILE hashes the file"),
    "checksum+2": Habit("FILE SUMS", "validate FILE --sha256 SUMS"),
    "kl": Habit("MODEL BASE DATA", "eval MODEL --data DATA --against BASE", options=AGAINST),
    **dict.fromkeys(("compare+3", "diff+3"), Habit("BASE MODEL DATA", "eval MODEL --data DATA --against BASE")),
    "compare --data": Habit("BASE MODEL DATA", "eval MODEL --data DATA --against BASE", options=AGAINST),
    "average": Habit("A...", "merge A... --method linear"),
    "plot": Habit("RUN OUT=<RUN>.html", "report RUN -o OUT", options={"--logdir": "RUN"}),
    "status": Habit("RUN", "report RUN"), "html": Habit("MODEL OUT=<MODEL>.html", "report MODEL -o OUT"),
    "rename": Habit(
        "FILE NAME", "meta set FILE general.name=NAME", "it changes the name in the metadata", options=_NAME
    ),
    "set-name": Habit("FILE NAME", "meta set FILE general.name=NAME", options=_NAME),
    "explain": Habit("NAME", "architectures NAME", alone=True), "manifest": Habit("FILE...", "tensors FILE... --hash"),
    "rosetta inspect": Habit("FILE", "inspect FILE"), "rosetta convert": Habit("FILE OUT", "convert FILE -o OUT"),
    "rosetta verify": Habit("FILE", "validate FILE --strict", options={"--intermediate": "=", "--tolerance": "="}),
    "rosetta diff-tensors": Habit(
        "A B", "diff A B --values", options=dict.fromkeys(("--mismatches-only", "--show-values"), "")
    ),
    "rosetta fingerprint": Habit("FILE", "tensors FILE --hash --stats"), "hexdump": Habit("FILE", "hex FILE --raw"),
    "upload": Habit("SRC REPO", "push SRC REPO", options=OPTIONS_OF["push"]),
    "split": Habit(
        "MODEL OUT=<MODEL>-split.gguf", "convert MODEL -o OUT", options={"--format": "--format", "--split": ""}
    ),
    "join": Habit("MODEL OUT=<MODEL>-joined.gguf", "convert MODEL -o OUT", options={"--join": "", "--merge": ""}),
    "join-lora": Habit(
        "MODEL ADAPTER OUT=merged", "merge-adapter MODEL ADAPTER -o OUT",
        options={"--adapter-path": "ADAPTER", "--lora": "ADAPTER", "--save-path": "OUT", "--base": "MODEL"},
    ),
    "apply-chat-template": Habit("FILE [CHAT]", "meta template render FILE CHAT", options=MESSAGES),
    "set-chat-template": Habit("FILE TEMPLATE", "meta template set FILE TEMPLATE"),
    "dequantize": Habit("FILE OUT=<FILE>-f16.gguf", "convert FILE -o OUT --dtype f16"),
    "embed": Habit("MODEL TEXT", "run MODEL --embed TEXT", options=_TEXT | {"-t": "TEXT", "--pooling": "="}),
    "train": Habit(
        "MODEL DATA OUT=run STEPS", "pretrain --init MODEL --data DATA -o OUT --steps STEPS", options=FOREIGN_TRAIN
    ),
    "train lora": Habit(
        "MODEL DATA OUT=run STEPS", "pretrain --init MODEL --data DATA -o OUT --steps STEPS --lora r=16",
        options=FOREIGN_TRAIN | {"--lora": "", "--use-peft": ""},
    ),
    "train --resume": Habit(
        "RUN", "resume RUN", options=dict.fromkeys(("--resume", "--resume-from-checkpoint", "--continue"), "RUN"),
        alone=True,
    ),
    "continue": Habit("RUN", "resume RUN"),
    "list runs": Habit("FOLDER=.", "runs FOLDER", options=dict.fromkeys(("--runs", "--list"), "")),
    "evaluate": Habit("MODEL [DATA]", "eval MODEL --data=DATA", options=EVAL_OPTIONS),
    "axolotl train": Habit(
        "CONFIG MODEL DATA OUT STEPS", "pretrain --init MODEL --data DATA -o OUT --steps STEPS",
        "apr has its own config format: --config FILE", alone=True,
    ),
    "preprocess": Habit("DATA MODEL", "data DATA --model MODEL"), "template": Habit("FILE", "meta template FILE"),
    "template render": Habit("FILE [CHAT]", "meta template render FILE CHAT", options=MESSAGES),
    "template set": Habit("FILE TEMPLATE", "meta template set FILE TEMPLATE"),
    "template+2": Habit("FILE CHAT", "meta template render FILE CHAT"),
    **dict.fromkeys(
        (f"template {option}" for option in MESSAGES),
        Habit("FILE CHAT", "meta template render FILE CHAT", options=MESSAGES),
    ),
    "template --set": Habit("FILE TEMPLATE", "meta template set FILE TEMPLATE", options={"--set": "TEMPLATE"}),
    "add-metadata": Habit("FILE KEY VALUE", "meta set FILE KEY=VALUE"),
    "metadata": Habit("FILE [GLOB]", "meta list FILE GLOB"),
    "metadata --key": Habit("FILE KEY", "meta get FILE KEY", options={"--key": "KEY"}),
    "metadata --set": Habit("FILE PAIR", "meta set FILE PAIR", options={"--set": "PAIR"}),
    "gguf-set-metadata --name": Habit("FILE NAME", "meta set FILE general.name=NAME", options={"--name": "NAME"}),
    "get-metadata": Habit("FILE KEY", "meta get FILE KEY"), "env": Habit("", "doctor"),
    "list-tensors": Habit("FILE", "tensors FILE"),
}  # fmt: skip
