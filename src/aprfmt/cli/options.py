"""Shared command-line options: single options as Annotated types, groups of options as dataclasses.

typer reads the signature of a callable. A dataclass is a callable whose fields are the parameters, so a command
combines groups of options by inheritance. `--help` shows the command's own fields first, then those of its base
classes from last to first.
"""

# No `from __future__ import annotations` here: as strings, the types of fields could not be resolved from the module
# of a subclass.
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from aprfmt.cli import sections
from aprfmt.cli.complete import complete_architecture, complete_dtype, complete_format, complete_tensor

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="A model: .apr, .gguf, .safetensors, .bin, an index, a folder, hf://org/repo, org/repo or a URL.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout, even on failure.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
OutputOption = Annotated[Path, typer.Option("--output", "-o", metavar="PATH", help="Where to write.")]
PageOption = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="PATH", help="Also write an HTML report: page.html.")
]
ForceOption = Annotated[bool, typer.Option("--force", "-f", help="Overwrite the output if it exists.")]
PlanOption = Annotated[bool, typer.Option("--plan", help="Show what would be written; write nothing.")]
ArchOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Architecture, if the source does not specify it.",
        autocompletion=complete_architecture,
        rich_help_panel=sections.SOURCE,
    ),
]
FilterOption = Annotated[
    str | None,
    typer.Option(
        metavar="GLOB",
        help="Show only matching names; without wildcards, names that contain GLOB.",
        autocompletion=complete_tensor,
    ),
]
BaseOption = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Base model of an adapter: a folder with config.json, or a model file.",
        rich_help_panel=sections.BESIDE,
    ),
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Use this tokenizer instead: a folder or tokenizer.json.",
        rich_help_panel=sections.TOKENIZER,
    ),
]
NoTokenizerOption = Annotated[
    bool,
    typer.Option(
        "--no-tokenizer",
        help="Write a GGUF without a tokenizer; llama.cpp then accepts only token ids.",
        rich_help_panel=sections.TOKENIZER,
    ),
]
PreOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="llama.cpp pre-tokenizer, if it cannot be detected.", rich_help_panel=sections.TOKENIZER
    ),
]
NoMtpOption = Annotated[
    bool, typer.Option("--no-mtp", help="Drop the MTP (nextn) layers.", rich_help_panel=sections.BESIDE)
]
ShardSizeOption = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Maximum shard size, such as 5GB or 500MiB; 0: a single file.")
]
TextFieldOption = Annotated[
    str, typer.Option(metavar="NAME", help="Field of a record, or column of a table, that contains the text.")
]
StrictOption = Annotated[bool, typer.Option("--strict", help="Fail on invalid records.")]
VerifyOption = Annotated[bool, typer.Option("--verify", help="Load the result in llama.cpp and run it briefly.")]


@dataclass(kw_only=True)
class Common:
    """Options of every command, also read from the raw command line by `Output.configure`."""

    as_json: JsonOption = False
    quiet: QuietOption = False


@dataclass(kw_only=True)
class Machine:
    """Resource limits of a conversion."""

    threads: Annotated[
        int | None,
        typer.Option(metavar="N", help="Worker threads; default: one per CPU.", rich_help_panel=sections.MACHINE),
    ] = None
    max_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory limit, such as 300MiB.", rich_help_panel=sections.MACHINE)
    ] = None
    max_disk: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Disk limit for downloads, not counting the output; default: the largest file.",
            rich_help_panel=sections.MACHINE,
        ),
    ] = None
    fsync: Annotated[
        bool, typer.Option(help="Flush the output to disk before exiting.", rich_help_panel=sections.MACHINE)
    ] = True


@dataclass(kw_only=True)
class LlamaMachine:
    """Resource limits of llama.cpp."""

    threads: Annotated[int, typer.Option(metavar="N", min=0, help="Threads for llama.cpp; 0: half the CPUs.")] = 0
    gpu_layers: Annotated[
        int, typer.Option(metavar="N", min=0, help="Layers to offload to the GPU, if llama.cpp supports one.")
    ] = 0


@dataclass(kw_only=True)
class Links:
    """Access to files outside the model's folder."""

    follow_links: Annotated[
        bool,
        typer.Option(
            "--follow-links",
            help="Follow symbolic links that point outside the folder.",
            rich_help_panel=sections.SOURCE,
        ),
    ] = False


@dataclass(kw_only=True)
class RunOptions(Links):
    """Options of every conversion."""

    allow_unmapped: Annotated[
        bool,
        typer.Option(
            "--allow-unmapped", help="Keep unmapped tensors under their source names.", rich_help_panel=sections.SOURCE
        ),
    ] = False
    allow_names: Annotated[
        bool,
        typer.Option(
            "--allow-names",
            help="Allow file names that other programs execute or reserve (.envrc, con).",
            rich_help_panel=sections.SOURCE,
        ),
    ] = False
    carry: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Include a folder's other files (images, ...) up to this total size; 0: none.",
            rich_help_panel=sections.SOURCE,
        ),
    ] = "64MB"
    plan: PlanOption = False
    force: ForceOption = False


@dataclass(kw_only=True)
class PresetOptions:
    """Quantization options."""

    imatrix: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Importance matrix, as GGUF or in the legacy format.",
            rich_help_panel=sections.QUANTIZATION,
        ),
    ] = None
    tensor_type: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGEX=TYPE",
            help="Type of tensors whose GGUF name matches; repeatable, first match wins.",
            rich_help_panel=sections.QUANTIZATION,
        ),
    ] = None
    output_type: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Type of the output head.",
            autocompletion=complete_dtype,
            rich_help_panel=sections.QUANTIZATION,
        ),
    ] = None
    embedding_type: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Type of the token embedding.",
            autocompletion=complete_dtype,
            rich_help_panel=sections.QUANTIZATION,
        ),
    ] = None
    pure: Annotated[
        bool,
        typer.Option(
            "--pure",
            help="Use this one type for every matrix, without the preset's exceptions.",
            rich_help_panel=sections.QUANTIZATION,
        ),
    ] = False
    leave_output: Annotated[
        bool,
        typer.Option("--leave-output", help="Do not quantize the output head.", rich_help_panel=sections.QUANTIZATION),
    ] = False
    allow_requantize: Annotated[
        bool,
        typer.Option(
            "--allow-requantize",
            help="Requantize quantized tensors, with additional loss.",
            rich_help_panel=sections.QUANTIZATION,
        ),
    ] = False


@dataclass(kw_only=True)
class IdentityOptions:
    """Tokenizer and provenance that override those in the model's files."""

    tokenizer: TokenizerOption = None
    license: Annotated[
        str | None, typer.Option(metavar="SPDX", help="Licence of the weights.", rich_help_panel=sections.PROVENANCE)
    ] = None
    data_source: Annotated[
        str | None, typer.Option(metavar="ID", help="Training data of the model.", rich_help_panel=sections.PROVENANCE)
    ] = None
    data_license: Annotated[
        str | None,
        typer.Option(metavar="SPDX", help="Licence of the training data.", rich_help_panel=sections.PROVENANCE),
    ] = None


@dataclass(kw_only=True)
class SourceOptions(IdentityOptions):
    """Options for incomplete sources, and recorded hashes."""

    allow_no_config: Annotated[
        bool,
        typer.Option(
            "--allow-no-config",
            help="Proceed without config.json; infer dimensions from tensor shapes.",
            rich_help_panel=sections.SOURCE,
        ),
    ] = False
    hash: Annotated[
        bool,
        typer.Option(
            "--hash",
            help="Record the BLAKE3 hash of each source file in an .apr instead of its CRC-32.",
            rich_help_panel=sections.SOURCE,
        ),
    ] = False


@dataclass(kw_only=True)
class Drafts:
    """Options for MTP layers and draft models."""

    target_model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of a draft model's target model (EAGLE-3, DFlash, ...).",
            rich_help_panel=sections.BESIDE,
        ),
    ] = None

    no_mtp: NoMtpOption = False


@dataclass(kw_only=True)
class OfAdapter:
    """Options for adapters."""

    base: BaseOption = None


@dataclass(kw_only=True)
class TowerOptions:
    """Options for vision and audio towers."""

    mmproj: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="GGUF with the model's towers (vision, audio).", rich_help_panel=sections.BESIDE
        ),
    ] = None


@dataclass(kw_only=True)
class DtypeOptions:
    """Architecture and target dtype of the weights."""

    arch: ArchOption = None
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            "--quantize",
            metavar="TYPE",
            autocompletion=complete_dtype,
            help="keep, f32, f16, bf16, f8_e4m3, aprq8, ... or a preset such as q4_k_m (apr quantize --list).",
        ),
    ] = "keep"


@dataclass(kw_only=True)
class MlxBits:
    """MLX quantization options."""

    bits: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Quantize the weights to 2, 3, 4, 5, 6 or 8 bits.", rich_help_panel=sections.MLX
        ),
    ] = None
    group_size: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Quantization group size: 32, 64 (default) or 128.", rich_help_panel=sections.MLX
        ),
    ] = None
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Mixed-bit recipe instead of --bits: mixed_2_6, mixed_3_4, mixed_3_6, mixed_4_6.",
            rich_help_panel=sections.MLX,
        ),
    ] = None


@dataclass(kw_only=True)
class Derived(MlxBits, Links):
    """Output options of commands that build a new model: merge, merge-adapter, prune."""

    format: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=complete_format,
            help="apr, gguf, safetensors, hf or mlx; default: from the output's suffix.",
        ),
    ] = None
    tokenizer: TokenizerOption = None
    no_tokenizer: NoTokenizerOption = False
    pre: PreOption = None
    shard_size: ShardSizeOption = None
    verify: VerifyOption = False
    plan: PlanOption = False
    force: ForceOption = False


@dataclass(kw_only=True)
class TargetOptions(Drafts, MlxBits):
    """Output options of a conversion."""

    mtp_only: Annotated[
        bool,
        typer.Option(
            "--mtp-only",
            help="Write only the MTP layers, as a draft model for llama.cpp (GGUF).",
            rich_help_panel=sections.BESIDE,
        ),
    ] = False

    mmproj: Annotated[
        bool | None,
        typer.Option(
            "--mmproj",
            help="Write only the towers (vision, audio), as an mmproj GGUF for llama.cpp.",
            rich_help_panel=sections.BESIDE,
        ),
    ] = None

    format: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=complete_format,
            help="apr, apr-shards, gguf, safetensors, hf or mlx; default: from the output's suffix.",
        ),
    ] = None
    no_tokenizer: NoTokenizerOption = False
    pre: PreOption = None
    pad_style: Annotated[
        str,
        typer.Option(
            metavar="STYLE",
            help="Naming of padding tokens in a GGUF: llama.cpp or apr.",
            rich_help_panel=sections.TOKENIZER,
        ),
    ] = "llama.cpp"
    shard_size: ShardSizeOption = None
    verify: VerifyOption = False
    modelfile: Annotated[
        bool, typer.Option("--modelfile", help="Also write an Ollama Modelfile: template, stop tokens, context.")
    ] = False


@dataclass(kw_only=True)
class FileOptions:
    """Input and output."""

    file: ModelArgument
    output: OutputOption
