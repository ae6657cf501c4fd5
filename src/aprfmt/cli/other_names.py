"""Names of commands: other ones of rows of `foreign_commands`, and how a command line is reduced to a row."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from aprfmt.cli.commands import COMMANDS
from aprfmt.cli.foreign_commands import FOREIGN
from aprfmt.cli.foreign_options import MESSAGES, TEMPLATE
from aprfmt.io.source import exists

SAME = {
    **dict.fromkeys(("llama-run", "llama-simple", "llama-simple-chat", "llama-mtmd-cli", "main"), "llama-cli"),
    **dict.fromkeys(("chat", "ask", "generate", "complete", "completion", "prompt", "infer", "inference"), "llama-cli"),
    **dict.fromkeys(("predict", "query", "cli", "repl", "talk", "text-generation", "llama-completion"), "llama-cli"),
    **dict.fromkeys(("run --server", "run --port", "chat --serve", "api", "llama-swap"), "run --serve"),
    **dict.fromkeys(("speed", "perf", "throughput", "benchmarks"), "llama-bench"),
    **dict.fromkeys(("eval perplexity", "evaluate perplexity"), "evaluate"),
    **dict.fromkeys(("evaluate --tasks", "evaluate --model-args"), "lm-eval"),
    **dict.fromkeys(("imatrix create", "importance-matrix"), "imatrix compute"),
    **dict.fromkeys(("tokenizer encode", "vocab tokenize", "tok"), "llama-tokenize"),
    **{f"vocab {option}": "llama-tokenize --chat" for option in ("--chat", "--messages")},
    **dict.fromkeys(("lora merge", "merge lora", "peft merge", "adapter merge", "merge adapter"), "join-lora"),
    **dict.fromkeys(("lora extract", "extract lora", "lora-extract", "unmerge", "adapter extract"), "extract-lora"),
    **dict.fromkeys(("soup", "blend", "avg", "mean", "model-soup"), "average"),
    **dict.fromkeys(("mergekit", "merge-yaml"), "mergekit-yaml"),
    **dict.fromkeys(("gguf-merge", "merge-gguf", "split --merge", "split --join", "shard --merge"), "join"),
    "shard --join": "join",
    **dict.fromkeys(("to-gguf", "gguf", "hf-to-gguf", "convert hf-to-gguf"), "convert-hf-to-gguf"),
    **dict.fromkeys(("gguf-to-hf", "convert-gguf-to-hf", "hf-from-gguf", "to-transformers"), "to-hf"),
    **dict.fromkeys(("convert gguf-to-hf", "export hf", "convert hf", "export transformers"), "to-hf"),
    **dict.fromkeys(("export gguf", "convert gguf"), "convert-hf-to-gguf"),
    **dict.fromkeys(("mlx", "hf-to-mlx", "export mlx", "convert mlx"), "to-mlx"), "mlx convert": "mlx-lm convert",
    "mlx generate": "mlx-lm generate", "export ollama": "export --ollama",
    **dict.fromkeys(("lora-to-gguf", "convert-adapter", "convert --lora"), "convert-lora-to-gguf"),
    **dict.fromkeys(("template show", "template get", "template print", "meta template-show"), "template"),
    **dict.fromkeys(("template apply", "template format"), "template render"),
    **{f"chat-template {verb}": "template" for verb in ("show", "get", "print")},
    **dict.fromkeys(("chat-template render", "chat-template apply"), "template render"),
    "chat-template set": "template set", **dict.fromkeys(("inspect --field", "show --key"), "inspect --key"),
    "meta --field": "meta --key", "inspect --kv": "inspect --keys", "inspect --chat-template": "inspect --template",
    "inspect --report": "inspect --html", "export --lora": "export --adapter",
    **dict.fromkeys(("metadata --name", "edit --general-name", "set-metadata --general-name"), "meta --name"),
    **{f"convert {option}": "convert --chat-template" for option in ("--chat-template-file", "--template")},
    **{f"export {option}": "convert --chat-template" for option in TEMPLATE},
    **dict.fromkeys(("hf pull", "hf get", "hf clone", "clone", "snapshot-download"), "hf download"),
    "sft lora": "train lora", **dict.fromkeys(("train sft", "train full"), "train"),
    **dict.fromkeys(("qlora", "finetune lora", "train qlora", "lora train"), "train lora"),
    **dict.fromkeys(("train --teacher", "sft --teacher", "finetune --teacher"), "trl gkd"),
    **dict.fromkeys(("kd", "distillation", "distill-model", "train distill"), "distil"),
    **dict.fromkeys(("train resume", "resume run"), "continue"),
    **{f"{name} --resume-from-checkpoint": "train --resume" for name in ("sft", "trl sft", "finetune", "fine-tune")},
    **{f"{name} --resume": "train --resume" for name in ("sft", "trl sft", "fine-tune")}, "runs report": "runs show",
    "runs ls": "runs list", **dict.fromkeys(("ls runs", "history", "experiments"), "list runs"),
    **dict.fromkeys(("scan", "find", "ls models", "list models"), "ollama list"),
    **dict.fromkeys(("card", "model-card"), "html"), "kv": "metadata", "fsck": "check",
    **dict.fromkeys(("cmp", "delta"), "compare"), "merge --peft-model": "merge --lora",
    **{
        f"{verb} {option}": "edit --chat-template"
        for verb in ("edit", "set", "gguf-set-metadata", "update", "modify")
        for option in TEMPLATE
        if f"{verb} {option}" != "edit --chat-template"
    },
    "metadata --chat-template-file": "edit --chat-template",
    **dict.fromkeys(("stamp --template", "stamp --chat-template-file"), "stamp --chat-template"), "cache": "hf cache",
    "perplexity": "llama-perplexity", "ppl": "llama-perplexity", "benchmark": "llama-bench",
    "gguf-split": "llama-gguf-split", "merge-shards": "join", "gguf-hash": "llama-gguf-hash",
    "export-lora": "llama-export-lora", "merge-lora": "join-lora", "lora": "join-lora", "lora --train": "mlx-lm lora",
    "fuse": "mlx-lm fuse", "fuse --export-gguf": "mlx-lm fuse --export-gguf", "create": "ollama create",
    "dump": "gguf-dump", "dump --no-tensors": "gguf-dump --no-tensors", "convert-lora": "convert-lora-to-gguf",
    **dict.fromkeys(("push-to-hub", "publish"), "upload"), "config": "metadata", "gkd": "trl gkd", "sft": "trl sft",
    **dict.fromkeys(
        ("train --resume-from-checkpoint", "pretrain --resume-from-checkpoint", "finetune --resume"), "train --resume"
    ),
    **dict.fromkeys(("ls-tensors", "layers"), "list-tensors"), "keys": "metadata",
    **dict.fromkeys(("edit", "update", "modify"), "gguf-set-metadata"),
    **dict.fromkeys(("edit --set", "set-metadata --set", "set --set"), "metadata --set"),
    **dict.fromkeys(("edit --name", "set-metadata --name"), "gguf-set-metadata --name"),
    "apply-template": "apply-chat-template",
    **{f"chat-template {option}": f"template {option}" for option in (*MESSAGES, "--set")},
    **dict.fromkeys(("apply-lora", "merge-and-unload", "merge-peft", "merge-lora-adapter"), "join-lora"),
    **dict.fromkeys(("merge --adapter", "merge --adapter-path"), "merge --lora"),
    **dict.fromkeys(("extract-adapter", "extract"), "extract-lora"),
    **dict.fromkeys(("unsplit", "cat", "concat", "unshard"), "join"), **dict.fromkeys(("kld", "kl-divergence"), "kl"),
    **dict.fromkeys(("diff --kl", "compare --kl"), "diff --data"),
    **dict.fromkeys(("tokenize", "encode", "tokens", "tokenizer"), "llama-tokenize"),
    **dict.fromkeys(("hash", "sha256", "sha256sum"), "checksum"), "diagnose": "check",
    **dict.fromkeys(("ollama create --file", "create -f", "create --file"), "ollama create -f"),
    **dict.fromkeys(("logs", "progress", "log"), "status"),
    **dict.fromkeys(("curves", "chart", "graph", "tensorboard", "wandb"), "plot"),
    **dict.fromkeys(("page", "view"), "html"), **dict.fromkeys(("get", "fetch"), "hf download"),
    **dict.fromkeys(("render", "render-template", "render-chat"), "apply-chat-template"),
    "set-template": "set-chat-template", **dict.fromkeys(("server", "serve"), "llama-server"),
    "convert-hf-to-gguf-update": "convert-hf-to-gguf", **dict.fromkeys(("set-metadata", "set"), "gguf-set-metadata"),
    "new-metadata": "gguf-new-metadata", "mlx-lm quantize": "mlx-lm convert",
    **dict.fromkeys(("ollama ls", "list", "ls", "models", "list-models", "ls-models"), "ollama list"),
    **dict.fromkeys(("ollama ps", "ollama stop", "ps"), "ollama rm"), "hf models": "hf cache",
    "download": "hf download", "login": "hf auth", "hf login": "hf auth", "hf whoami": "hf auth",
    "hf scan-cache": "hf cache", "hf delete-cache": "hf cache", "hf repos": "hf repo",
    "hf upload-large-folder": "hf upload",
    **dict.fromkeys(("optimum-cli onnxruntime", "optimum-cli inc", "optimum-cli openvino"), "optimum-cli export"),
    "mergekit-multi": "mergekit-yaml", "mergekit-mega": "mergekit-yaml",
    **dict.fromkeys(("finetune", "fine-tune"), "train"),
    **dict.fromkeys(("dpo", "grpo", "trl grpo", "trl reward", "trl kto", "trl rloo", "trl orpo"), "trl dpo"),
    **dict.fromkeys(("tune run", "accelerate launch", "torchrun"), "axolotl train"),
    **dict.fromkeys(("embedding", "embeddings"), "embed"), "chat-template": "template", "lm-eval run": "lm-eval",
}  # fmt: skip
"""Other names of rows of FOREIGN."""

PROGRAMS = (
    "mlx-lm", "ollama", "hf", "optimum-cli", "transformers", "trl", "vllm", "rosetta", "axolotl", "tune", "lm-eval",
)  # fmt: skip
"""Programs whose first argument is a command of theirs."""

_SPELLINGS = {
    "huggingface-cli": "hf", "hub": "hf", "transformers-cli": "transformers", "mlx-lm-convert": "mlx-lm convert",
    "gguf-split": "llama-gguf-split",
}  # fmt: skip

_NAMES: dict[str, str] = {
    "inspect": "describe|about|architecture|arch|details|examine|file|head|header|identify|modelinfo|stat"
    "|parse|what|summary|summarize|type|detect|explain-model",
    "list-tensors": "weights|list-weights|show-weights|params|parameters|state-dict|tensor|tensor-list|module|modules",
    "metadata": "attributes|meta-list|properties|kv-list",
    "template": "template extract|template dump|template cat|extract-template|jinja|meta-template",
    "template render": "template preview|template try|template test|preview-template|preview|render-chat-template"
    "|format|format-chat|format-prompt|test-template|try-template",
    "template set": "template add|template replace|template update|template edit|template write|add-template"
    "|add-chat-template|inject-template|update-template|replace-template|edit-template|update-chat-template"
    "|replace-chat-template|edit-chat-template|change-template",
    "gguf-set-metadata": "change|set-key|set-value|edit-metadata|update-metadata|gguf-editor|add-key|write-metadata",
    "convert-hf-to-gguf": "make-gguf|save-gguf|create-gguf|build-gguf|write-gguf|convert-gguf-from-hf",
    "to-hf": "unpack|save-pretrained|gguf-to-transformers|from-gguf|dequantize-to-hf",
    "convert": "pack|package|transform|transcode|save|reformat|save-as|convert-model|convert-file",
    "dequantize": "dequant|unquantize|upcast",
    "quantize": "quant|quants|quantization|requantize|compress|q|quantizer|shrink",
    "llama-cli": "gen|answer|exec|llm|llama|sample|say|llama-chat|console|shell|interactive|conversation|tui|speak"
    "|respond|reply|play|text-gen|generation|generate-text",
    "llama-bench": "speedtest|measure|time|profile|latency|tps|measure-speed|bench-model|llama-batched-bench",
    "llama-perplexity": "eval ppl|evaluate ppl|score|loss|nll|ce|cross-entropy|measure-perplexity",
    "kl": "kl-div|kldiv|divergence|drift|kl-loss|quality-loss|compare-logits|measure-kl",
    "imatrix compute": "calibrate|calibration|importance|imat|calibrate-imatrix|llama-calibrate|imatrix collect",
    "llama-tokenize": "token|ids|count-tokens|encode-text|token-ids|tokenizer tokenize|to-tokens",
    "embed": "vector|vectorize|vectors|sentence-embedding|embed-text|feature-extraction|llama-embeddings",
    "join-lora": "bake|bake-lora|fuse-lora|merge-adapters|merge-adaptor|apply-adapter|add-lora|add-adapter|unload"
    "|mergekit-lora|attach-lora",
    "convert-lora-to-gguf": "adapter-to-gguf|export-adapter|peft-to-gguf|convert-peft-to-gguf"
    "|convert-lora-adapter|lora convert|lora export|adapter convert|adapter export|lora-gguf",
    "extract-lora": "diff-to-lora|make-lora|create-lora|svd-lora|lora-from-diff|lora-diff|get-lora",
    "average": "average-weights|weight-average|interpolate|mix|lerp|mergekit-linear|linear|linear-merge|merge-average"
    "|merge-linear|merge linear|merge average|merge mean|combine-models|average-checkpoints|wise-ft",
    "mergekit-yaml": "merge-recipe|merge-config|merge yaml|merge recipe|merge config",
    "split": "chunk|cut|split-file|partition|make-shards|split-model",
    "join": "merge-splits|merge-parts|merge-files|join-shards|join-parts|join-files|combine-shards|combine-parts"
    "|assemble|shard merge|shard join|llama-gguf-split merge|llama-gguf-split join|merge-split|gguf-split-merge",
    "compare --data": "compare -f|compare --text|compare --file|compare --corpus|compare --kld|diff --text|diff -f"
    "|diff --file",
    "meta --key": "meta --get|meta -k",
    "export --ollama": "convert --ollama|export-ollama|ollama export|ollama convert",
    "run --serve": "run --api|run --http|ollama run --serve|ollama run --port",
    "set-name": "rename --name|name|rename-model|change-name|title",
    "vllm serve": "vllm entrypoints.openai.api-server|vllm server|vllm api-server",
    "train --resume": "train --continue|run --resume",
    "compare": "compare-models|compare-tensors|compare-weights|compare tensors|compare weights|diff-models"
    "|diff-tensors|diff-weights|difference|differences|vs|tensor-diff|weight-diff|diff tensors|diff weights",
    "qa": "test|test-model|sanity-check|selftest|smoke-test",
    "gguf-dump": "llama-gguf-dump|gguf-reader|gguf-py-dump|dump-gguf",
    "gguf-dump --keys": "dump --keys",
    "merge": "combine|merge-checkpoints|model-merge",
    "check": "integrity|verify-file|verify-integrity|check-file|check-integrity|health|analyze|analyse|why|inspect-file"
    "|checkup|verify-model|check-model|repair|doctor-model|validate-gguf",
    "check+2": "verify-checksum|verify-sha256|verify-sums|verify-hash|check-sha256|check-checksum|check-sums"
    "|verify-sha|sha256-verify|checksum verify|checksum check|hash verify|hash check",
    "ollama create": "to-ollama|package-ollama|make-ollama|ollama-create|ollama package|ollama build|build",
    "modelfile": "make-modelfile|create-modelfile|write-modelfile|export-modelfile|modelfile create"
    "|modelfile write|generate-modelfile",
    "llama-server": "run-server|start-server|start|api-server|http|http-server|openai-server|host|daemon|webui|web-ui"
    "|ui|serve-api|serve-http|launch|llama-cpp.server|text-generation-launcher|text-generation-inference|tgi"
    "|serving|rest|run-api|openai|endpoint|run server|run serve|llama-api-server",
    "hf download": "download-model|hf-download|download hf|git clone|fetch-model|get-model|pull-model",
    "upload": "upload-folder|upload-model|hf-upload|hf push|hf publish|share|release|deploy|push-model|push-hub",
    "train": "tune|instruct-tune|instruction-tune|train-model|train full|full-finetune|ft|sft-train|trl train",
    "train lora": "train-lora|lora-train|finetune-lora|lora-finetune|sft-lora|peft|peft train|lora sft|train peft"
    "|fine-tune lora|fine-tune-lora|mlx-lm qlora|train-qlora|train-adapter|lora-tune|lora-sft|peft-train",
    "distil": "trl distill|trl distil|knowledge-distillation|distil-model|kd-train|train-student|distill-train",
    "continue": "resume-run|resume-training|continue-training|continue-run|restart|runs resume|run resume|runs continue"
    "|train continue|restart-run|restart-training|pretrain resume|distill resume|sft resume",
    "list runs": "list-runs|ls-runs|show-runs|show runs|jobs|training-runs|trl runs|run list|run ls|runs --list"
    "|run --list|list --runs|ls --runs|trainings|checkpoints|sessions|runs-list|list-training-runs",
    "plot": "curve|loss-curve|loss-curves|plot-run|plot-loss|plot-metrics|plot-curves|charts|graphs|dashboard|metrics"
    "|watch|monitor|runs plot|runs html|run report|run plot|report run|plot run|training-report|train-report|plots"
    "|report-run|runs page|show-curves|run-report|losses|learning-curve",
    "html": "modelcard|visualize|viz|web|website|webpage|html-report|report-html|document|docs|report html"
    "|report model|report-model|model-report|present|share-page|to-html|netron|export-html|make-html|page html",
    "ollama list": "model list|model ls|models list|models ls|index|catalog|catalogue|inventory|dir|discover|local"
    "|find-models|scan-models|list --models|hf list|hf ls|list-files|list-local",
    "inspect --html": "describe --html|describe --report",
}
"""By row of FOREIGN or command of ours: its other names."""

SAME |= {name: row for row, names in _NAMES.items() for name in names.split("|") if name not in FOREIGN}

_GLUE = frozenset({"to", "from", "a", "the", "of", "as", "my", "all", "into"})
_SHOW = frozenset({"show", "list", "ls", "print", "dump", "read", "view", "display", "get", "see", "info", "inspect"})
_NOUNS = frozenset({"gguf", "model", "models", "apr", "llama", "hf", "transformers", "mlx", "ollama", "trl", "vllm"})
_PARTS = frozenset({"optimum", "cli", "lm", "mergekit"})
_VERBS = frozenset({"make", "create", "compute", "generate", "build", "do", "write", "measure"})
_IZE = re.compile(r"is(?=(e|er|ed|ation|ing)(-|$| ))")
_TO = re.compile(r"^([a-z]+)2([a-z]+)$")


def _is_known(name: str) -> bool:
    return name in COMMANDS or name in FOREIGN or name in SAME


def _reduced(words: Sequence[str]) -> str | None:
    """The name of which `words` are another form: `show-template`, `gguf quantize`, `mlx-convert`; None if unknown."""
    for without in (frozenset[str](), _GLUE, _GLUE | _SHOW | _NOUNS | _PARTS | _VERBS):
        kept = [word for word in words if word not in without]
        for order in (kept, kept[::-1]):
            for name in ("-".join(order), " ".join(order)):
                if name and _is_known(name):
                    return name
    is_about_model = bool(words) and {*words} <= _SHOW | _NOUNS and not _SHOW.isdisjoint(words)
    return "inspect" if is_about_model else None


def _spelled(name: str) -> Iterator[str]:
    """`name` in the spellings that the tables may have."""
    yield name
    yield _IZE.sub("iz", name)
    yield _TO.sub(r"\1-to-\2", name)


def named(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The command of another program, of one or two words as FOREIGN has them, and its arguments."""
    words = [*arguments]
    while len(words) > 1 and (re.fullmatch(r"python[\d.]*|-m|apr", words[0])):
        words.pop(0)
    if not words:
        return "", []
    first = words[0]
    if first in COMMANDS:
        return _with_verb(first, words[1:])
    name = re.sub(r"\.(py|exe|sh)$", "", os.path.basename(first)).replace("_", "-").lower()
    name = name.removeprefix("gguf.scripts.").removeprefix("gguf.")
    name = _SPELLINGS.get(name, name)
    program, dot, command = name.partition(".")
    if dot and program in PROGRAMS:
        name = f"{program} {command}"
    elif name in PROGRAMS and len(words) > 1 and not words[1].startswith("-"):
        both = f"{name} {words[1]}".replace("_", "-")
        if _is_known(both) or not exists(words[1]):
            name, words = both, words[1:]
    name = next(filter(_is_known, _spelled(name)), name)
    name, rest = _with_verb(name, words[1:])
    if not _is_known(name):
        name = _reduced(re.split(r"[- ]", name)) or name
    return name, rest


_WORD = re.compile(r"[a-z]+([-_][a-z]+)*")


def _with_verb(name: str, rest: list[str]) -> tuple[str, list[str]]:
    """A command with the word behind it, where the tables have both and the word is not a file."""
    if not rest or rest[0].startswith("-") or exists(rest[0]):
        return name, rest
    word = rest[0].replace("_", "-")
    for both in _spelled(f"{name} {word}"):
        if both in FOREIGN or both in SAME:
            return both, rest[1:]
    if _WORD.fullmatch(word) and any(map(exists, rest[1:])):
        found = _reduced([*re.split(r"[- ]", name), *word.split("-")])
        if found is not None:
            return found, rest[1:]
    return name, rest


def nearest(word: str) -> str | None:
    """The command, of ours or of another program, that `word` was possibly meant to be; None if none is similar."""
    names = [name for name in (*COMMANDS, *FOREIGN, *SAME) if " " not in name and "+" not in name]
    found = get_close_matches(word.replace("_", "-").lower(), names, 1, 0.8)
    return found[0] if found else None
