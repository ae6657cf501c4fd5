"""The table of commands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CommandRow:
    """One command.

    Attributes:
        name: what users type.
        place: `module` or `module:callable` in this package.
        help: summary in `apr --help`.
        section: heading in `apr --help`.
        reads_models: whether it takes `--require-signature`.
    """

    name: str
    place: str
    help: str
    section: str
    reads_models: bool = True


COMMANDS = {
    row.name: row
    for row in (
        CommandRow("inspect", "look:inspect", "Show a model's container, architecture, dtypes and tokenizer.", "Look"),
        CommandRow("tensors", "look:tensors", "List tensors, optionally with statistics and hashes.", "Look"),
        CommandRow("tree", "tree:tree", "Show the module tree, identical layers folded; dot, Mermaid.", "Look"),
        CommandRow("hex", "hex:hex", "Annotate the bytes of a file, or decode a tensor's blocks.", "Look"),
        CommandRow("validate", "look:validate", "Check integrity and content; exit 5 if a check fails.", "Look"),
        CommandRow("lint", "lint:lint", "Check a file against best practices; exit 1 on findings.", "Look"),
        CommandRow("diff", "compare:diff", "Compare two models; exit 0: same, 1: different, 2: error.", "Look"),
        CommandRow("vocab", "vocab", "Tokenize and decode text; compare two tokenizers.", "Look"),
        CommandRow("report", "measure:report", "Write an HTML report about a model or a training run.", "Look"),
        CommandRow("architectures", "look:architectures", "List the supported architectures.", "Look", False),
        CommandRow(
            "import", "convert:Import", "Import safetensors, Hugging Face, GGUF or hf://... to .apr.", "Convert"
        ),
        CommandRow("export", "convert:Export", "Export to GGUF, safetensors, a Hugging Face folder or MLX.", "Convert"),
        CommandRow("convert", "convert:Convert", "Convert between any two supported formats in one step.", "Convert"),
        CommandRow(
            "quantize", "quantize:Quantize", "Quantize to Q4_K_M, Q8_0, ...; --list shows all types.", "Convert"
        ),
        CommandRow("merge", "merge:Merge", "Merge models: linear, slerp, TIES, DARE or stacked layers.", "Convert"),
        CommandRow(
            "merge-adapter",
            "merge_adapter:MergeAdapter",
            "Merge LoRA adapters into a base; --unmerge extracts one.",
            "Convert",
        ),
        CommandRow("prune", "prune:Prune", "Prune a model's layers, width, experts or vocabulary.", "Convert"),
        CommandRow(
            "transplant",
            "transplant:Transplant",
            "Replace a model's tokenizer; rows of new tokens are computed.",
            "Convert",
        ),
        CommandRow("imatrix", "imatrix:ImatrixCommand", "Compute an importance matrix for quantization.", "Convert"),
        CommandRow(
            "shard", "convert:ShardCommand", "Split into .apr files of limited size, with a manifest.", "Convert"
        ),
        CommandRow("stamp", "stamp:Stamp", "Edit metadata; tensor data is copied unchanged.", "Convert"),
        CommandRow("meta", "meta:meta", "Read and edit metadata by key; show, set, try chat templates.", "Convert"),
        CommandRow("run", "run:RunCommand", "Generate text, chat or compute embeddings with llama.cpp.", "Run"),
        CommandRow("bench", "bench:Bench", "Benchmark speed and memory in llama.cpp.", "Run"),
        CommandRow("push", "push", "Upload a model to the hub, or to an OCI registry.", "Convert"),
        CommandRow("pull", "pull:pull", "Download a model from an OCI registry.", "Convert"),
        CommandRow("qa", "qa:qa", "Sanity-check a model; exit 1 if a check fails.", "Run"),
        CommandRow("canary", "canary:canary", "Save golden outputs of a model, or check them.", "Run"),
        CommandRow("parity", "canary:parity", "Compare two forms of a model layer by layer.", "Run"),
        CommandRow("distill", "training:Distill", "Train a student on a teacher's outputs.", "Train"),
        CommandRow("teacher", "teacher:TeacherCommand", "Save a teacher's top-k log-probabilities to files.", "Train"),
        CommandRow("pretrain", "training:Pretrain", "Train a model on text, without a teacher.", "Train"),
        CommandRow("resume", "runs:resume", "Continue a training run from its folder.", "Train"),
        CommandRow("runs", "runs:runs", "List training runs: steps, loss, KL, speed, age.", "Train", False),
        CommandRow("data", "data:Data", "Summarize training data and loss masks.", "Train"),
        CommandRow("eval", "measure:evaluate", "Compute loss on held-out text, and KL from a teacher.", "Train"),
        CommandRow("keygen", "sign:keygen", "Make a key pair for signing or decrypting.", "Trust", False),
        CommandRow("sign", "sign:sign", "Sign a model: OpenSSF Model Signing, or in an .apr v1.", "Trust", False),
        CommandRow("verify", "sign:verify", "Verify a model's signature; names what was modified.", "Trust", False),
        CommandRow("sbom", "sbom:sbom", "Write a model's bill of materials (CycloneDX).", "Trust"),
        CommandRow("encrypt", "sign:encrypt", "Encrypt a file as an .apr v1.", "Trust", False),
        CommandRow("decrypt", "sign:decrypt", "Decrypt an .apr v1.", "Trust", False),
        CommandRow("doctor", "doctor:doctor", "Check the installation: llama.cpp, torch and extras.", "Try", False),
        CommandRow("demo", "demo", "Round-trip a small model, timing and checking each step.", "Try", False),
    )
}
