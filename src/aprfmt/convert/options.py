"""The options of conversions, each declared once: groups of fields, and each function's parameters as a dataclass.

Python functions take these dataclasses as their parameters (`schema.takes`), commands build their options from them.
Groups have no __init__, which takes longer to compile than the rest of a class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from typing import TYPE_CHECKING

from aprfmt.light_dataclass import light_dataclass
from aprfmt.schema import BESIDE, MACHINE, MLX, PROVENANCE, QUANTIZATION, SOURCE, TARGET, TOKENIZER, option
from aprfmt.types import PathLike

if TYPE_CHECKING:
    from aprfmt.io.pipe import StartProgress


@light_dataclass(frozen=True, kw_only=True, init=False)
class Running:
    """How every conversion runs."""

    follow_links: bool = option(
        False, "Follow symlinks that point outside the folder; not needed for the hub's cache.", section=SOURCE
    )
    plan: bool = option(False, "Show what would be written; write nothing.")
    force: bool = option(False, "Overwrite the output if it exists.", flags=("-f",))
    progress: StartProgress | None = None
    threads: int | None = option(None, "Worker threads; default: one per CPU.", section=MACHINE)
    max_memory: int | str | None = option(None, "Memory limit, such as 300MiB.", metavar="SIZE", section=MACHINE)
    max_disk: int | str | None = option(
        None,
        "Disk limit for downloads, not counting the output; default: the largest file.",
        metavar="SIZE",
        section=MACHINE,
    )
    fsync: bool = option(True, "Flush the output to disk before exiting.", negatable=True, section=MACHINE)


@light_dataclass(frozen=True, kw_only=True, init=False)
class Access:
    """Names and carried files."""

    allow_unmapped: bool = option(False, "Keep unmapped tensors under their source names.", section=SOURCE)
    allow_names: bool = option(
        False, "Allow file names that other programs execute or reserve (.envrc, con).", section=SOURCE
    )
    carry: int | str = option(
        "64MB",
        "Include a folder's other files (images, ...) up to this total size; 0: none.",
        metavar="SIZE",
        section=SOURCE,
    )


@light_dataclass(frozen=True, kw_only=True, init=False)
class Typed:
    """Target dtype of the weights."""

    dtype: str = option(
        "keep",
        "Output dtype: keep, f32, f16, bf16, aprq8, ...; a preset such as q4_k_m (apr quantize --list); with --format "
        "hf a scheme such as fp8-dynamic, w4a16 or nvfp4a16.",
        metavar="TYPE",
        flags=("--quantize",),
        complete="dtype",
    )


@light_dataclass(frozen=True, kw_only=True, init=False)
class Formatted(Typed):
    """Output format."""

    format: str | None = option(
        None,
        "Output format: apr, apr-shards, gguf, safetensors, hf, gptq, awq, modelopt or mlx; default: from the suffix.",
        metavar="NAME",
        complete="format",
    )


@light_dataclass(frozen=True, kw_only=True, init=False)
class Network:
    """Architecture, tokenizer and quantization of a model."""

    arch: str | None = option(
        None,
        "Architecture, if the source does not specify it; auto-similar finds it by tensors and config keys.",
        metavar="NAME",
        complete="architecture",
        section=SOURCE,
    )
    tokenizer: PathLike | None = option(
        None, "Use this tokenizer instead: a folder or tokenizer.json.", metavar="PATH", section=TOKENIZER
    )
    imatrix: PathLike | None = option(
        None, "Importance matrix, as GGUF or in the legacy format.", metavar="FILE", kind=str, section=QUANTIZATION
    )
    tensor_type: str | Sequence[str] = option(
        (),
        "Type of tensors whose GGUF name matches; for MLX BITS or BITSgGROUP; repeatable, first match wins.",
        metavar="REGEX=TYPE",
        section=QUANTIZATION,
    )
    output_type: str | None = option(
        None, "Type of the output head.", metavar="TYPE", complete="dtype", section=QUANTIZATION
    )
    embedding_type: str | None = option(
        None, "Type of the token embedding.", metavar="TYPE", complete="dtype", section=QUANTIZATION
    )
    pure: bool = option(
        False, "Use this one type for every matrix, without the preset's exceptions.", section=QUANTIZATION
    )
    leave_output: bool = option(False, "Do not quantize the output head.", section=QUANTIZATION)
    allow_requantize: bool = option(False, "Requantize quantized tensors, with additional loss.", section=QUANTIZATION)


@light_dataclass(frozen=True, kw_only=True, init=False)
class Verifiable:
    """Verification before the output is published."""

    verify: bool | str = option(
        False,
        "Load the result in llama.cpp and run it briefly; =logits: also compare 16 tokens' logits with the source's.",
        optional="=logits",
    )


@light_dataclass(frozen=True, kw_only=True, init=False)
class Loadable(Verifiable):
    """How llama.cpp loads the output."""

    no_tokenizer: bool = option(
        False, "Write a GGUF without a tokenizer; llama.cpp then accepts only token ids.", section=TOKENIZER
    )


@light_dataclass(frozen=True, kw_only=True, init=False)
class Shaped(Formatted, Loadable):
    """How a format stores the model."""

    pre: str | None = option(
        None, "llama.cpp pre-tokenizer, if it cannot be detected.", metavar="NAME", section=TOKENIZER
    )
    shard_size: int | str | None = option(
        None, "Maximum shard size, such as 5GB or 500MiB; 0: a single file.", metavar="SIZE"
    )
    search: bool = option(
        False,
        "With a 4-bit scheme: choose scales for the least error, weighted by --imatrix, not by the largest value.",
        section=QUANTIZATION,
    )
    second_moments: PathLike | None = option(
        None,
        "With --search: GPTQ's error feedback, by the file that apr imatrix --second-moments writes.",
        metavar="FILE",
        section=QUANTIZATION,
    )
    bits: int | None = option(None, "Quantize the weights to 2, 3, 4, 5, 6 or 8 bits.", section=MLX)
    group_size: int | None = option(None, "Quantization group size: 32, 64 (default) or 128.", section=MLX)
    recipe: str | None = option(
        None,
        "Mixed-bit recipe instead of --bits: mixed_2_6, mixed_3_4, mixed_3_6, mixed_4_6.",
        metavar="NAME",
        section=MLX,
    )


@light_dataclass(frozen=True, kw_only=True, init=False)
class WithoutDrafts:
    """MTP layers."""

    no_mtp: bool = option(False, "Drop the MTP (nextn) layers.", section=BESIDE)


@light_dataclass(frozen=True, kw_only=True, init=False)
class Stated:
    """Provenance that overrides the source's."""

    license: str | None = option(None, "License of the weights.", metavar="SPDX", section=PROVENANCE)
    data_source: str | None = option(None, "Training data of the model.", metavar="ID", section=PROVENANCE)
    data_license: str | None = option(None, "License of the training data.", metavar="SPDX", section=PROVENANCE)


@light_dataclass(frozen=True, kw_only=True, init=False)
class Packaged(Running, Access, Network, Typed, WithoutDrafts, Stated):
    """Options of import and convert only."""

    base: PathLike | None = option(
        None,
        "Base model of an adapter: a folder with config.json, or a model file.",
        metavar="PATH",
        kind=str,
        section=BESIDE,
    )
    target_model: PathLike | None = option(
        None, "Folder of a draft model's target model (EAGLE-3, DFlash, ...).", metavar="DIR", section=BESIDE
    )
    allow_no_config: bool = option(
        False, "Proceed without config.json; infer dimensions from tensor shapes.", section=SOURCE
    )
    hash: bool = option(
        False, "Record the BLAKE3 hash of each source file in an .apr instead of its CRC-32.", section=SOURCE
    )


@light_dataclass(frozen=True, kw_only=True)
class Options(Packaged, Shaped):
    """Every option of a conversion. As `parse_options` returns it, sizes are in bytes."""

    mmproj: PathLike | bool | None = option(
        None, "Write only the towers (vision, audio), as an mmproj GGUF for llama.cpp.", section=BESIDE
    )
    mtp_only: bool = option(False, "Write only the MTP layers, as a draft model for llama.cpp (GGUF).", section=BESIDE)
    pad_style: str = option(
        "llama.cpp", "Naming of padding tokens in a GGUF: llama.cpp or apr.", metavar="STYLE", section=TOKENIZER
    )
    modelfile: bool = option(False, "Also write an Ollama Modelfile: template, stop tokens, context.")
    allow_different: bool = option(False, "Write a GGUF even if llama.cpp computes different logits.")

    def non_defaults(self) -> list[str]:
        """The options that differ from their defaults."""
        return [f.name for f in fields(self) if getattr(self, f.name) != f.default]

    def changes_nothing(self) -> bool:
        """Whether the options leave the model unchanged."""
        return not set(self.non_defaults()) - (COMMON - {"arch", "base"}) - {"shard_size", "verify", "allow_requantize"}

    @property
    def carry_bytes(self) -> int:
        """`carry` of parsed options."""
        assert isinstance(self.carry, int)
        return self.carry

    @property
    def shard_bytes(self) -> int | None:
        """`shard_size` of parsed options; 0: one file."""
        return _bytes(self.shard_size)

    @property
    def memory_bytes(self) -> int | None:
        """`max_memory` of parsed options."""
        return _bytes(self.max_memory)

    @property
    def disk_bytes(self) -> int | None:
        """`max_disk` of parsed options."""
        return _bytes(self.max_disk)


def _bytes(size: int | str | None) -> int | None:
    assert not isinstance(size, str)
    return size


COMMON = frozenset({f.name for kind in (Running, Access) for f in fields(kind)}) | {
    *("arch", "base", "allow_no_config", "format")
}
"""Options about reading the source and running the conversion, the same for every target."""

PRESET_OPTIONS = frozenset(
    ("imatrix", "tensor_type", "output_type", "embedding_type", "pure", "leave_output", "allow_requantize")
)
"""Options that need a quantization preset."""

PROVENANCE_OPTIONS = frozenset(f.name for f in fields(Stated))


# --- calls ---


@light_dataclass(frozen=True, kw_only=True)
class ImportCall(Packaged, Verifiable):
    """Parameters of import_model."""

    src: PathLike = field(kw_only=False)
    dst: PathLike = field(kw_only=False)
    mmproj: PathLike | None = option(
        None, "GGUF with the model's towers (vision, audio).", metavar="FILE", section=BESIDE
    )


@light_dataclass(frozen=True, kw_only=True)
class ConvertCall(Options):
    """Parameters of convert_model."""

    src: PathLike = field(kw_only=False)
    dst: PathLike = field(kw_only=False)
    pad_vocab: int | None = option(
        None, "Pad embedding and head with zeros to a multiple of N rows, such as 64.", metavar="N", section=TOKENIZER
    )


@light_dataclass(frozen=True, kw_only=True)
class QuantizeCall(Running, Access, Network, Loadable):
    """Parameters of quantize_model."""

    src: PathLike = field(kw_only=False)
    dst: PathLike = field(kw_only=False)
    mix: str | None = field(default=None, kw_only=False)
    format: str | None = option(
        None, "Output format: gguf, apr or mlx; default: from the suffix.", metavar="NAME", complete="format"
    )
    target_size: int | str | None = option(
        None,
        "Choose the type of each tensor for a file of at most this size, such as 4.2GB.",
        metavar="SIZE",
        section=TARGET,
    )
    target_bpw: float | None = option(
        None, "Choose the type of each tensor for at most this many bits per weight.", low=0.5, high=32, section=TARGET
    )
    max_kl: float | None = option(
        None,
        "Choose the smallest types with at most this KL divergence in nats per token, measured on --eval-data.",
        low=1e-9,
        section=TARGET,
    )
    measure: bool = option(
        False, "Measure on --eval-data how errors in each part of the model affect the KL.", section=TARGET
    )
    eval_data: PathLike | Sequence[PathLike] = option(
        (), "Text for --measure and --max-kl; repeatable.", metavar="PATH", section=TARGET
    )
    eval_tokens: int = option(2048, "Tokens of --eval-data to use.", low=512, section=TARGET)
    recipe: PathLike | None = option(
        None,
        "Use the types of this recipe: TOML, or llama-quantize's REGEX=TYPE lines.",
        metavar="FILE",
        kind=str,
        section=TARGET,
    )
    recipe_out: PathLike | None = option(
        None,
        "Write the chosen types as a recipe: .toml with errors, else for llama-quantize --tensor-type-file.",
        metavar="FILE",
        kind=str,
        section=TARGET,
    )
    report: PathLike | None = option(
        None,
        "Write a page: the types before and after, errors, and size against KL beside every preset.",
        metavar="PAGE.html",
        kind=str,
        section=TARGET,
    )
    imatrix: PathLike | None = option(
        None, "Importance matrix; auto: compute one from --data.", metavar="FILE|auto", kind=str
    )
    data: PathLike | Sequence[PathLike] = option(
        (), "Text for --imatrix auto; repeatable.", metavar="PATH", flags=("-d",)
    )
    chunks: int | None = option(None, "With --imatrix auto: stop after N chunks of 512 tokens.", low=1)
    text_field: str = option("text", "Field of a record, or column of a table, that contains the text.", metavar="NAME")
    log: Callable[[str], None] = lambda line: None


@light_dataclass(frozen=True, kw_only=True, init=False)
class Derived(Running, Network, Shaped):
    """Output options of functions that make a new model."""


@light_dataclass(frozen=True, kw_only=True)
class MergeAdapterCall(Derived):
    """Parameters of merge_adapter."""

    base: PathLike = field(kw_only=False)
    adapter: PathLike | Sequence[PathLike] = field(kw_only=False)
    dst: PathLike = field(kw_only=False)
    weight: float | Sequence[float] = option(
        1.0, "Scale of the adapters: one for all, or one for each, in order.", metavar="X"
    )


@light_dataclass(frozen=True, kw_only=True)
class ExtractAdapterCall(Running, Formatted):
    """Parameters of extract_adapter."""

    base: PathLike = field(kw_only=False)
    tuned: PathLike = field(kw_only=False)
    dst: PathLike = field(kw_only=False)
    rank: int = option(32, "With --unmerge: rank of the adapter.", low=1)


@light_dataclass(frozen=True, kw_only=True)
class MergeCall(Derived):
    """Parameters of merge_models."""

    models: PathLike | Sequence[PathLike] = field(kw_only=False)
    dst: PathLike = field(kw_only=False)
    method: str | None = option(
        None, "linear, weighted, slerp, ties, dare-linear, dare-ties, task-arithmetic or passthrough.", metavar="NAME"
    )
    base: PathLike | None = option(None, "Base model of the fine-tunes.", metavar="FILE", kind=str)
    config: PathLike | None = option(
        None, "mergekit YAML config, instead of models and method.", metavar="FILE", kind=str
    )
    weight: float | Sequence[float] | None = option(None, "Weight of each model: one for all, or one each.")
    density: float | Sequence[float] | None = option(
        None, "Fraction of the task vector to keep, for ties and dare: one for all, or one each."
    )
    t: float | Sequence[float] | None = option(
        None, "For slerp: 0 is the base, 1 the other; several values: a gradient. [default: 0.5]"
    )
    normalize: bool | None = option(None, "Normalize the weights by their sum.", negatable=True)
    rescale: str | bool | None = option(
        None,
        "Rescale after dropping: norm (default for dare), density, none (default for ties).",
        metavar="HOW",
        kind=str,
    )
    lambda_: float | None = option(None, "Scale of the merged task vector.")
    scale: float | Sequence[float] | None = option(None, "For passthrough: scale of the weights.")
    layers: Sequence[str] = option((), "For passthrough: layers of each model, numbered from 0.", metavar="A-B")
    seed: int = option(0, "Random seed of dare.")
    pad_vocab: bool = option(False, "Pad or truncate embeddings to the first model's vocabulary.")


@light_dataclass(frozen=True, kw_only=True)
class PruneCall(Derived, WithoutDrafts):
    """Parameters of prune_model."""

    src: PathLike = field(kw_only=False)
    dst: PathLike = field(kw_only=False)
    drop_layers: str | Sequence[int] | None = option(None, "Layers to drop, numbered from 0: 10-15,20.", metavar="LIST")
    keep_layers: str | Sequence[int] | None = option(None, "Layers to keep, instead of --drop-layers.", metavar="LIST")
    width: str | Mapping[str, int] | None = option(
        None, "Keep this many hidden, ffn, heads, kv_heads: hidden=512,heads=8.", metavar="SIZES"
    )
    experts: int | None = option(
        None, "Keep this many experts per layer: those most salient on --experts-from (REAP).", metavar="N", low=1
    )
    experts_from: PathLike | Sequence[PathLike] = option(
        (), "For --experts: texts to run the model on, files or folders, as for training; repeatable.", metavar="PATH"
    )
    vocab_from: PathLike | Sequence[PathLike] = option(
        (),
        "Keep the tokens that these texts use (BPE tokenizers): files or folders, as for training; repeatable.",
        metavar="PATH",
    )


@light_dataclass(frozen=True, kw_only=True)
class TransplantCall(Derived, WithoutDrafts):
    """Parameters of transplant_model."""

    src: PathLike = field(kw_only=False)
    dst: PathLike = field(kw_only=False)
    tokenizer: PathLike | None = option(
        None,
        "The new tokenizer: a folder, tokenizer.json, or a model that has it; default: the donor's.",
        metavar="PATH",
        kind=str,
    )
    donor: PathLike | None = option(
        None,
        "Model with the new tokenizer: its embeddings tell how new tokens relate to shared ones.",
        metavar="MODEL",
        kind=str,
    )
    k: int | None = option(None, "With --donor: shared tokens that express a new one, at most. [default: 64]", low=1)


def options_of(call: Running, **changes: object) -> dict[str, object]:
    """The options of a conversion in the parameters of a function, with `changes`."""
    return {f.name: getattr(call, f.name) for f in fields(Options) if hasattr(call, f.name)} | changes
