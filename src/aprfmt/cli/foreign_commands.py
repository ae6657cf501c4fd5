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
class Foreign:
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
_EXTRACT_IN_EITHER_ORDER = Foreign(
    "BASE TUNED OUT=adapter",
    "merge-adapter BASE TUNED --unmerge -o OUT --format hf",
    "BASE is taken as the base model and TUNED as its fine-tune; swap them if it is the other way round",
    options=_EXTRACT,
)
"""Some programs name the fine-tuned model first, and the adapter of the other order takes away what it should add."""

_TEXT: dict[str, Meaning] = dict.fromkeys(("-p", "--prompt", "--text", "--input"), "TEXT")

_NAME: dict[str, Meaning] = dict.fromkeys(("--name", "--to", "--title"), "NAME")

_KEY: dict[str, Meaning] = dict.fromkeys(("--key", "--field", "--get", "-k"), "KEY")
FOREIGN: dict[str, Foreign] = {
    # A row `COMMAND --option` applies where the option is given, `COMMAND+N` to N positional arguments, and one of two
    # words where the second one is not a file.
    # Our own commands with their arguments elsewhere
    "run": Foreign("[MODEL] [PROMPT...]", "run MODEL PROMPT..."),
    "eval": Foreign("[MODEL] [DATA]", "eval MODEL --data=DATA"),
    "quantize": Foreign("[MODEL] [TYPE]", "quantize MODEL TYPE"),
    "pretrain": Foreign("[MODEL] [DATA] [OUT] [STEPS]", "pretrain --init=MODEL --data=DATA --output=OUT --steps=STEPS"),
    "distill": Foreign(
        "[TEACHER] [MODEL] [DATA] [OUT] [STEPS]",
        "distill TEACHER --student=MODEL --data=DATA --output=OUT --steps=STEPS",
    ),
    "push": Foreign("[SRC] [REPO]", "push SRC REPO"),
    "tensors": Foreign("[MODEL] [NAME]", "tensors MODEL --filter=NAME"),
    "tree": Foreign("[MODEL] [NAME]", "tree MODEL --filter=NAME"), "quantize --bits": Foreign("MODEL", "convert MODEL"),
    "meta --set": Foreign("FILE PAIR", "meta set FILE PAIR", options={"--set": "PAIR"}),
    "meta --key": Foreign("FILE KEY", "meta get FILE KEY", options=_KEY),
    "meta --all": Foreign("FILE", "meta list FILE", options={"--all": ""}),
    "meta --name": Foreign(
        "FILE NAME", "meta set FILE general.name=NAME", options={"--name": "NAME", "--general-name": "NAME"}
    ),
    "edit --chat-template": Foreign(
        "FILE TEMPLATE", "meta template set FILE TEMPLATE", options=dict.fromkeys(TEMPLATE, "TEMPLATE")
    ),
    "stamp --chat-template": Foreign("FILE", "stamp FILE", options=TEMPLATE),
    "merge-models": Foreign("MODEL...", "merge MODEL...", options=MERGE_OPTIONS),
    "resume": Foreign("[RUN]", "resume RUN"),
    "vocab": Foreign("[MODEL] [TEXT]", "vocab MODEL TEXT"),
    "merge-adapter": Foreign("[MODEL] [ADAPTER...]", "merge-adapter MODEL ADAPTER..."),
    "report": Foreign("[MODEL] [OUT]", "report MODEL --output=OUT"),
    "vocab encode": Foreign("MODEL TEXT", "vocab MODEL TEXT"),
    "imatrix compute": Foreign("MODEL DATA", "imatrix MODEL --data DATA", options=CALIBRATION),
    "tensors list": Foreign("MODEL [NAME]", "tensors MODEL --filter=NAME"), "runs show": Foreign("RUN", "report RUN"),
    "runs list": Foreign("FOLDER=.", "runs FOLDER"),
    "pretrain --resume": Foreign("RUN", "resume RUN", options={"--resume": "RUN"}, alone=True),
    "parity --data": Foreign("BASE MODEL DATA", "eval MODEL --data DATA --against BASE", options=AGAINST),
    "run --serve": Foreign("MODEL OUT=<MODEL>.gguf", "convert MODEL -o OUT", _SERVED, alone=True),
    "export --adapter": Foreign(
        "MODEL ADAPTER", "merge-adapter MODEL ADAPTER", options={"--adapter": "ADAPTER", "--lora": "ADAPTER"}
    ),
    "export --html": Foreign("MODEL OUT=<MODEL>.html", "report MODEL -o OUT", options={"--html": ""}),
    "convert --chat-template": Foreign(
        "FILE OUT", "stamp FILE -o OUT", "it sets the template and keeps the format", options=TEMPLATE
    ),
    "stamp --name": Foreign("[MODEL]", "stamp MODEL", options={"--name": set_key("general.name")}),
    "doctor+1": Foreign("FILE", "validate FILE"), "validate+2": Foreign("FILE SUMS", "validate FILE --sha256 SUMS"),
    "verify+2": Foreign("FILE SUMS", "validate FILE --sha256 SUMS"),
    "verify -c": Foreign("SUMS FILE", "validate FILE --sha256 SUMS", options={"-c": "SUMS"}),
    **dict.fromkeys(
        (
            *("verify --sha256", "verify --manifest"),
            *(f"{verb} {name}" for verb in ("verify", "checksum", "llama-gguf-hash") for name in CHECKSUMS),
        ),
        Foreign("FILE", "validate FILE"),
    ),
    "report+2": Foreign("MODEL OUT", "report MODEL -o OUT"),
    "diff --data": Foreign("BASE MODEL DATA", "eval MODEL --data DATA --against BASE", options=AGAINST),
    "merge --lora": Foreign(
        "MODEL ADAPTER OUT=merged", "merge-adapter MODEL ADAPTER -o OUT",
        options={"--base": "MODEL"}
        | dict.fromkeys(("--lora", "--adapter", "--adapter-path", "--peft-model", "--base-model"), "ADAPTER")
        | {"--base-model": "MODEL"},
    ),
    "hex": Foreign("[MODEL] [NAME]", "hex MODEL --tensor=NAME"),
    "lint": Foreign("[MODEL] [ID]", "lint MODEL --select=ID"),
    "inspect --template": Foreign("[MODEL]", "meta template MODEL", options={"--template": "", "--chat-template": ""}),
    "inspect --key": Foreign("FILE KEY", "meta get FILE KEY", options={"--key": "KEY", "--field": "KEY"}),
    "inspect --keys": Foreign("FILE", "meta list FILE", options={"--keys": "", "--kv": ""}),
    "inspect --html": Foreign("MODEL OUT=<MODEL>.html", "report MODEL -o OUT", options={"--html": "", "--report": ""}),
    "inspect --license": Foreign("[MODEL]", "meta get MODEL general.license", options={"--license": ""}),
    "inspect --modelfile": Foreign(
        "MODEL", "convert MODEL -o model.gguf --modelfile", "it writes Modelfile next to the GGUF", alone=True
    ),
    # llama.cpp
    "llama-cli": Foreign("MODEL PROMPT...", "run MODEL PROMPT...", options=RUN_OPTIONS),
    "llama-quantize": Foreign("", "quantize"),
    "llama-perplexity": Foreign("MODEL [DATA]", "eval MODEL --data=DATA", options=EVAL_OPTIONS),
    "llama-imatrix": Foreign("MODEL...", "imatrix MODEL...", options=IMATRIX_OPTIONS),
    "llama-bench": Foreign("MODEL...", "bench MODEL...", options=BENCH_OPTIONS),
    "llama-gguf-split": Foreign("MODEL OUT=<MODEL>-split.gguf", "convert MODEL -o OUT", options={"--split": ""}),
    "llama-gguf-split --merge": Foreign("MODEL OUT", "convert MODEL -o OUT", options={"--merge": ""}),
    "llama-export-lora": Foreign(
        "MODEL ADAPTER OUT=merged", "merge-adapter MODEL ADAPTER -o OUT", options={"--lora": "ADAPTER"}
    ),
    "llama-tokenize": Foreign("MODEL TEXT", "vocab MODEL TEXT", options=_TEXT | {"-t": "TEXT", "--ids": ""}),
    "llama-tokenize --template": Foreign("FILE", "meta template FILE", options={"--template": ""}),
    "llama-tokenize --chat": Foreign(
        "FILE CHAT", "meta template render FILE CHAT", "apr vocab tokenizes what it prints", options=MESSAGES
    ),
    "llama-embedding": Foreign("MODEL TEXT", "run MODEL --embed TEXT", options=_TEXT | {"--pooling": "="}),
    "llama-gguf-hash": Foreign("FILE", "tensors FILE --hash", options={"--sha256": "", "--all": ""}),
    "llama-gguf": Foreign("FILE [MODE]", "tensors FILE"),
    "llama-server": Foreign("MODEL OUT=<MODEL>.gguf", "convert MODEL -o OUT", _SERVED, alone=True),
    "llama-finetune": Foreign(
        "MODEL DATA OUT=run STEPS", "pretrain --init MODEL --data DATA -o OUT --steps STEPS",
        options=FOREIGN_TRAIN | {"-f": "DATA"},
    ),
    "convert-hf-to-gguf": Foreign(
        "MODEL OUT=MODEL.gguf", "convert MODEL -o OUT", options={"--outfile": "OUT", "-o": "OUT"}
    ),
    "convert-hf-to-gguf --print-supported-models": Foreign("", "architectures", alone=True),
    "convert-lora-to-gguf": Foreign(
        "ADAPTER [BASE] OUT=ADAPTER.gguf", "convert ADAPTER --base=BASE -o OUT",
        options={"--base": "BASE", "--base-model-id": "BASE", "--outfile": "OUT"}
        | {"--lora": "ADAPTER", "--adapter": "ADAPTER"},
    ),
    "to-hf": Foreign("MODEL OUT=<MODEL>-hf", "convert MODEL -o OUT --format hf"),
    "to-mlx": Foreign("MODEL OUT=<MODEL>-mlx", "convert MODEL -o OUT --format mlx"),
    "to-apr": Foreign("MODEL OUT=<MODEL>.apr", "import MODEL -o OUT"),
    "to-safetensors": Foreign("MODEL OUT=<MODEL>.safetensors", "convert MODEL -o OUT"),
    # gguf-py
    "gguf-dump": Foreign(
        "FILE", "inspect FILE --metadata --weights", options={"--json-array": "", "--data-offset": ""}
    ),
    "gguf-dump --metadata": Foreign("FILE", "meta list FILE", options={"--metadata": ""}),
    "gguf-dump --no-metadata": Foreign("FILE", "tensors FILE", options={"--no-metadata": ""}),
    "gguf-dump --tensors": Foreign("FILE", "tensors FILE", options={"--tensors": ""}),
    "gguf-dump --key": Foreign("FILE KEY", "meta get FILE KEY", options={"--key": "KEY"}),
    "gguf-dump --keys": Foreign("FILE", "meta list FILE", options={"--keys": ""}),
    "gguf-dump --no-tensors": Foreign("FILE", "meta list FILE", options={"--no-tensors": ""}),
    "gguf-set-metadata": Foreign(
        "FILE KEY VALUE", "meta set FILE KEY=VALUE",
        options={"--force": ""} | dict.fromkeys(("--key", "-k"), "KEY") | dict.fromkeys(("--value", "-v"), "VALUE"),
    ),
    "gguf-new-metadata": Foreign("FILE OUT=<FILE>-new.gguf", "stamp FILE -o OUT", options=NEW_METADATA),
    "gguf-editor-gui": Foreign("FILE", "meta list FILE"),
    # mlx-lm
    "mlx-lm convert": Foreign("MODEL", "convert MODEL", options={"-d": "--dtype=f16"}),
    "mlx-lm generate": Foreign("MODEL PROMPT...", "run MODEL PROMPT...", options=RUN_OPTIONS | {"-m": "--max-tokens"}),
    "mlx-lm chat": Foreign("MODEL", "run MODEL", options=RUN_OPTIONS),
    "mlx-lm fuse": Foreign(
        "MODEL ADAPTER=adapters OUT=fused_model", "merge-adapter MODEL ADAPTER -o OUT --format mlx",
        options={"--adapter-path": "ADAPTER", "--save-path": "OUT", "--de-quantize": "--dtype=f16"},
    ),
    "mlx-lm fuse --export-gguf": Foreign(
        "MODEL ADAPTER=adapters OUT=ggml-model-f16.gguf", "merge-adapter MODEL ADAPTER -o OUT",
        options={"--adapter-path": "ADAPTER", "--gguf-path": "OUT", "--export-gguf": "", "--save-path": "="},
    ),
    "mlx-lm lora": Foreign(
        "MODEL DATA OUT=adapters STEPS=1000", "pretrain --init MODEL --data DATA -o OUT --steps STEPS --lora r=8",
        options=FOREIGN_TRAIN | dict.fromkeys(("--lora", "--train"), "") | {"--num-layers": "="},
    ),
    "mlx-lm upload": Foreign("SRC REPO", "push SRC REPO", options={"--path": "SRC", "--upload-repo": "REPO"}),
    "mlx-lm perplexity": Foreign(
        "MODEL DATA", "eval MODEL --data DATA", options=EVAL_OPTIONS | {"--data-path": "DATA"}
    ),
    "mlx-lm evaluate": Foreign("MODEL DATA", "eval MODEL --data DATA", _TASKS, alone=True),
    "mlx-lm benchmark": Foreign("MODEL", "bench MODEL", options=BENCH_OPTIONS | {"-n": "--runs"}),
    "mlx-lm server": Foreign("MODEL OUT=<MODEL>.gguf", "convert MODEL -o OUT", _SERVED, alone=True),
    "mlx-lm manage": Foreign("", "", "hf cache ls lists downloads; apr inspect hf://org/repo shows one"),
    # Ollama
    "ollama run": Foreign("MODEL PROMPT...", "run MODEL PROMPT...", options=RUN_OPTIONS),
    "ollama show": Foreign("MODEL", "inspect MODEL"),
    "ollama show --template": Foreign("MODEL", "meta template MODEL", options={"--template": ""}),
    "ollama show --license": Foreign("MODEL", "meta get MODEL general.license", options={"--license": ""}),
    "ollama show --modelfile": Foreign(
        "MODEL", "convert MODEL -o model.gguf --modelfile", "it writes Modelfile next to the GGUF", alone=True
    ),
    "ollama create": Foreign(
        "NAME=model MODEL", "convert MODEL -o NAME.gguf --modelfile", "then: ollama create NAME -f Modelfile",
        {"--from": "MODEL", "-q": "--dtype", "--quantize": "--dtype", "-f": "=", "--file": "="},
    ),
    "ollama create -f": Foreign(
        "NAME=model MODEL", "convert MODEL -o NAME.gguf",
        "then write FROM ./NAME.gguf into it and type: ollama create NAME -f Modelfile",
        {"-q": "--dtype", "--quantize": "--dtype", "-f": model_of_modelfile, "--file": model_of_modelfile},
    ),
    "modelfile": Foreign("MODEL OUT=<MODEL>-ollama.gguf", "convert MODEL -o OUT --modelfile"),
    "export --ollama": Foreign(
        "MODEL OUT=<MODEL>-ollama.gguf", "convert MODEL -o OUT --modelfile", options={"--ollama": ""}
    ),
    "ollama cp": Foreign("FILE OUT", "convert FILE -o OUT"),
    "ollama list": Foreign(
        "FOLDER=.", "inspect FOLDER", options=dict.fromkeys(("--all", "-a", "-l", "-la", "--models", "--list"), "")
    ),
    "ollama rm": Foreign("", "", "models are plain files: rm deletes one, and no server keeps it loaded"),
    "ollama serve": Foreign("MODEL OUT=<MODEL>.gguf", "convert MODEL -o OUT", _SERVED, alone=True),
    "ollama pull": Foreign("MODEL", "convert hf://org/repo -o model.gguf", _PULLED, alone=True),
    "ollama push": Foreign("REPO SRC", "push SRC REPO"),
    # mergekit
    "mergekit-yaml": Foreign("CONFIG OUT=merged", "merge --config CONFIG -o OUT", options=MERGE_OPTIONS),
    "mergekit-extract-lora": Foreign(
        "TUNED BASE OUT=adapter", "merge-adapter BASE TUNED --unmerge -o OUT --format hf", options=_EXTRACT
    ),
    "diff --lora": Foreign(
        "BASE TUNED OUT=adapter", "merge-adapter BASE TUNED --unmerge -o OUT --format hf",
        options=_EXTRACT | {"--lora": ""},
    ),
    "extract-lora": Foreign(
        "TUNED BASE OUT=adapter", "merge-adapter BASE TUNED --unmerge -o OUT --format hf", options=_EXTRACT
    ),
    **dict.fromkeys(("extract-lora+2", "extract-lora+3"), _EXTRACT_IN_EITHER_ORDER),
    # The hub
    "hf download": Foreign("REPO OUT=/REPO", "convert hf://REPO -o OUT --format hf", options=DOWNLOAD),
    "hf download+2": Foreign("REPO FILE OUT=.", "convert hf://REPO/FILE -o OUT/FILE", options=DOWNLOAD),
    "hf upload": Foreign("REPO SRC", "push SRC REPO", options=OPTIONS_OF["push"] | {"--revision": "--revision"}),
    "hf auth": Foreign("", "", "hf auth login; apr push uses its token, or HF_TOKEN"),
    "hf cache": Foreign("", "", "hf cache ls lists downloads; apr inspect hf://org/repo shows one"),
    "hf info": Foreign("REPO", "inspect hf://REPO"),
    "hf repo": Foreign("", "", "apr push FOLDER org/repo creates the repository"),
    # optimum, transformers, TRL, vLLM
    "optimum-cli export": Foreign(
        "TARGET [OUT] MODEL", "convert MODEL -o FOLDER --format hf",
        "apr does not write ONNX; optimum-cli exports FOLDER", {"-m": "MODEL", "--model": "MODEL"}, alone=True,
    ),
    "transformers chat": Foreign("MODEL PROMPT...", "run MODEL PROMPT...", options=RUN_OPTIONS),
    "transformers run": Foreign("MODEL PROMPT...", "run MODEL PROMPT...", options=RUN_OPTIONS),
    "transformers serve": Foreign("MODEL OUT=<MODEL>.gguf", "convert MODEL -o OUT", _SERVED, alone=True),
    "vllm bench": Foreign("[KIND] MODEL", "bench MODEL", options=BENCH_OPTIONS),
    "vllm serve": Foreign("MODEL OUT=<MODEL>-hf", "convert MODEL -o OUT --format hf", alone=True),
    "lm-eval": Foreign(
        "MODEL DATA", "eval MODEL --data DATA", _TASKS,
        {"--model": named_model, "-m": named_model, "--model-args": pretrained_model, "-a": pretrained_model},
        alone=True,
    ),
    "trl sft": Foreign(
        "MODEL DATA OUT=run STEPS", "pretrain --init MODEL --data DATA -o OUT --steps STEPS", options=FOREIGN_TRAIN
    ),
    "trl gkd": Foreign(
        "MODEL TEACHER DATA OUT=run STEPS", "distill TEACHER --student MODEL --data DATA -o OUT --steps STEPS",
        options=FOREIGN_TRAIN | {"--teacher": "TEACHER"},
    ),
    "trl dpo": Foreign(
        "MODEL DATA OUT=run STEPS", "pretrain --init MODEL --data DATA -o OUT --steps STEPS",
        "apr pretrain trains on the text only: apr does no preference or reward optimization", FOREIGN_TRAIN,
    ),
    "trl env": Foreign("", "doctor"),
    "distil": Foreign(
        "TEACHER MODEL DATA OUT=run STEPS", "distill TEACHER --student MODEL --data DATA -o OUT --steps STEPS",
        options=FOREIGN_TRAIN | {"--teacher": "TEACHER"},
    ),
    # The reference tool, and words that several programs have
    "debug": Foreign("FILE", "inspect FILE", options=dict.fromkeys(("--drama", "--strings"), "")),
    "compare": Foreign("A B", "diff A B", options={"--a": "A", "--b": "B"}),
    "compare-hf": Foreign(
        "FILE REPO", "diff FILE hf://REPO --values", options={"--hf": "REPO", "--threshold": "--tolerance"}
    ),
    "check": Foreign("FILE", "validate FILE", options={"--no-gpu": ""}),
    "qualify": Foreign("FILE", "qa FILE", options={"--tier": "=", "--timeout": "="}),
    "parity": Foreign("FILE", "qa FILE"),
    "flow": Foreign("FILE", "tree FILE", options={"--component": "=", "--full": "--all"}),
    "check+2": Foreign("FILE SUMS", "validate FILE --sha256 SUMS"),
    "checksum": Foreign("FILE", "tensors FILE --hash", "it hashes each tensor; sha256sum FILE hashes the file"),
    "checksum+2": Foreign("FILE SUMS", "validate FILE --sha256 SUMS"),
    "kl": Foreign("MODEL BASE DATA", "eval MODEL --data DATA --against BASE", options=AGAINST),
    **dict.fromkeys(("compare+3", "diff+3"), Foreign("BASE MODEL DATA", "eval MODEL --data DATA --against BASE")),
    "compare --data": Foreign("BASE MODEL DATA", "eval MODEL --data DATA --against BASE", options=AGAINST),
    "average": Foreign("A...", "merge A... --method linear"),
    "plot": Foreign("RUN OUT=<RUN>.html", "report RUN -o OUT", options={"--logdir": "RUN"}),
    "status": Foreign("RUN", "report RUN"), "html": Foreign("MODEL OUT=<MODEL>.html", "report MODEL -o OUT"),
    "rename": Foreign(
        "FILE NAME", "meta set FILE general.name=NAME", "it changes the name in the metadata", options=_NAME
    ),
    "set-name": Foreign("FILE NAME", "meta set FILE general.name=NAME", options=_NAME),
    "explain": Foreign("NAME", "architectures NAME", alone=True),
    "manifest": Foreign("FILE...", "tensors FILE... --hash"),
    "rosetta inspect": Foreign("FILE", "inspect FILE"), "rosetta convert": Foreign("FILE OUT", "convert FILE -o OUT"),
    "rosetta verify": Foreign("FILE", "validate FILE --strict", options={"--intermediate": "=", "--tolerance": "="}),
    "rosetta diff-tensors": Foreign(
        "A B", "diff A B --values", options=dict.fromkeys(("--mismatches-only", "--show-values"), "")
    ),
    "rosetta fingerprint": Foreign("FILE", "tensors FILE --hash --stats"), "hexdump": Foreign("FILE", "hex FILE --raw"),
    "upload": Foreign("SRC REPO", "push SRC REPO", options=OPTIONS_OF["push"]),
    "split": Foreign(
        "MODEL OUT=<MODEL>-split.gguf", "convert MODEL -o OUT", options={"--format": "--format", "--split": ""}
    ),
    "join": Foreign("MODEL OUT=<MODEL>-joined.gguf", "convert MODEL -o OUT", options={"--join": "", "--merge": ""}),
    "join-lora": Foreign(
        "MODEL ADAPTER OUT=merged", "merge-adapter MODEL ADAPTER -o OUT",
        options={"--adapter-path": "ADAPTER", "--lora": "ADAPTER", "--save-path": "OUT", "--base": "MODEL"},
    ),
    "apply-chat-template": Foreign("FILE [CHAT]", "meta template render FILE CHAT", options=MESSAGES),
    "set-chat-template": Foreign("FILE TEMPLATE", "meta template set FILE TEMPLATE"),
    "dequantize": Foreign("FILE OUT=<FILE>-f16.gguf", "convert FILE -o OUT --dtype f16"),
    "embed": Foreign("MODEL TEXT", "run MODEL --embed TEXT", options=_TEXT | {"-t": "TEXT", "--pooling": "="}),
    "train": Foreign(
        "MODEL DATA OUT=run STEPS", "pretrain --init MODEL --data DATA -o OUT --steps STEPS", options=FOREIGN_TRAIN
    ),
    "train lora": Foreign(
        "MODEL DATA OUT=run STEPS", "pretrain --init MODEL --data DATA -o OUT --steps STEPS --lora r=16",
        options=FOREIGN_TRAIN | {"--lora": "", "--use-peft": ""},
    ),
    "train --resume": Foreign(
        "RUN", "resume RUN", options=dict.fromkeys(("--resume", "--resume-from-checkpoint", "--continue"), "RUN"),
        alone=True,
    ),
    "continue": Foreign("RUN", "resume RUN"),
    "list runs": Foreign("FOLDER=.", "runs FOLDER", options=dict.fromkeys(("--runs", "--list"), "")),
    "evaluate": Foreign("MODEL [DATA]", "eval MODEL --data=DATA", options=EVAL_OPTIONS),
    "axolotl train": Foreign(
        "CONFIG MODEL DATA OUT STEPS", "pretrain --init MODEL --data DATA -o OUT --steps STEPS",
        "apr has its own config format: --config FILE", alone=True,
    ),
    "preprocess": Foreign("DATA MODEL", "data DATA --model MODEL"), "template": Foreign("FILE", "meta template FILE"),
    "template render": Foreign("FILE [CHAT]", "meta template render FILE CHAT", options=MESSAGES),
    "template set": Foreign("FILE TEMPLATE", "meta template set FILE TEMPLATE"),
    "template+2": Foreign("FILE CHAT", "meta template render FILE CHAT"),
    **dict.fromkeys(
        (f"template {option}" for option in MESSAGES),
        Foreign("FILE CHAT", "meta template render FILE CHAT", options=MESSAGES),
    ),
    "template --set": Foreign("FILE TEMPLATE", "meta template set FILE TEMPLATE", options={"--set": "TEMPLATE"}),
    "add-metadata": Foreign("FILE KEY VALUE", "meta set FILE KEY=VALUE"),
    "metadata": Foreign("FILE [GLOB]", "meta list FILE GLOB"),
    "metadata --key": Foreign("FILE KEY", "meta get FILE KEY", options={"--key": "KEY"}),
    "metadata --set": Foreign("FILE PAIR", "meta set FILE PAIR", options={"--set": "PAIR"}),
    "gguf-set-metadata --name": Foreign("FILE NAME", "meta set FILE general.name=NAME", options={"--name": "NAME"}),
    "get-metadata": Foreign("FILE KEY", "meta get FILE KEY"), "env": Foreign("", "doctor"),
    "list-tensors": Foreign("FILE", "tensors FILE"),
}  # fmt: skip
