"""Options that several commands share: single ones as Annotated types, groups of them as dataclasses.

typer reads the signature of the callable that it is given. A dataclass is such a callable, its fields are the
parameters, and inheritance puts a command together from groups. `--help` shows the command's own fields, then those of
its last base class, and so on to the first.
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
PageOption = Annotated[Path | None, typer.Option("--output", "-o", metavar="PATH", help="Write a page too: page.html.")]
ForceOption = Annotated[bool, typer.Option("--force", "-f", help="Overwrite the output if it exists.")]
PlanOption = Annotated[
    bool, typer.Option("--plan", help="Show what would be written, and what it takes; write nothing.")
]
ArchOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Architecture, if the source does not name it.",
        autocompletion=complete_architecture,
        rich_help_panel=sections.SOURCE,
    ),
]
FilterOption = Annotated[
    str | None,
    typer.Option(
        metavar="GLOB",
        help="Only names that match; without wildcards: names that contain it.",
        autocompletion=complete_tensor,
    ),
]
BaseOption = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Model that an adapter is for: a folder with its config.json, or a model file.",
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
        help="Write a GGUF without a tokenizer: llama.cpp then takes token ids only.",
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
    bool,
    typer.Option(
        "--no-mtp",
        help="Leave out the MTP (nextn) layers, which predict further tokens.",
        rich_help_panel=sections.BESIDE,
    ),
]
ShardSizeOption = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Maximum size of a file, such as 5GB or 500MiB; 0: a single file.")
]
TextFieldOption = Annotated[
    str, typer.Option(metavar="NAME", help="The field of a record, or the column of a table, that holds its text.")
]
StrictOption = Annotated[bool, typer.Option("--strict", help="A record that is not a document is an error.")]
VerifyOption = Annotated[bool, typer.Option("--verify", help="Load the result in llama.cpp and run it briefly.")]


@dataclass(kw_only=True)
class Common:
    """Options of every command; `Output.configure` reads them from the raw command line."""

    as_json: JsonOption = False
    quiet: QuietOption = False


@dataclass(kw_only=True)
class Machine:
    """How much of the machine a conversion may use."""

    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Worker threads; by default one per processor.", rich_help_panel=sections.MACHINE
        ),
    ] = None
    max_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory limit, such as 300MiB.", rich_help_panel=sections.MACHINE)
    ] = None
    max_disk: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Room for what is fetched from the hub, beside the output; by default, its largest file.",
            rich_help_panel=sections.MACHINE,
        ),
    ] = None
    fsync: Annotated[
        bool, typer.Option(help="Wait until the output is safely on disk.", rich_help_panel=sections.MACHINE)
    ] = True


@dataclass(kw_only=True)
class LlamaMachine:
    """How much of the machine llama.cpp may use."""

    threads: Annotated[
        int, typer.Option(metavar="N", min=0, help="Threads of llama.cpp; 0: half of the processors.")
    ] = 0
    gpu_layers: Annotated[
        int, typer.Option(metavar="N", min=0, help="Layers to compute on a GPU, if this llama.cpp can.")
    ] = 0


@dataclass(kw_only=True)
class Links:
    """What may lie outside of a model's folder."""

    follow_links: Annotated[
        bool,
        typer.Option(
            "--follow-links",
            help="Take files that symbolic links bring from outside of the folder.",
            rich_help_panel=sections.SOURCE,
        ),
    ] = False


@dataclass(kw_only=True)
class RunOptions(Links):
    """How a conversion is run."""

    allow_unmapped: Annotated[
        bool,
        typer.Option(
            "--allow-unmapped",
            help="Keep tensors with unknown names under those names.",
            rich_help_panel=sections.SOURCE,
        ),
    ] = False
    allow_names: Annotated[
        bool,
        typer.Option(
            "--allow-names",
            help="Carry and write files whose names other programs act on (.envrc, con).",
            rich_help_panel=sections.SOURCE,
        ),
    ] = False
    carry: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Carry a folder's other files (pictures, ...) up to this much together; 0: none.",
            rich_help_panel=sections.SOURCE,
        ),
    ] = "64MB"
    plan: PlanOption = False
    force: ForceOption = False


@dataclass(kw_only=True)
class PresetOptions:
    """Options of a quantization mix."""

    imatrix: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Importance matrix, in the GGUF form or the old one.",
            rich_help_panel=sections.QUANTIZATION,
        ),
    ] = None
    tensor_type: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGEX=TYPE",
            help="Type of the tensors whose GGUF name matches; repeatable, the first match wins.",
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
            help="Store every matrix in this type, without the mix's exceptions.",
            rich_help_panel=sections.QUANTIZATION,
        ),
    ] = False
    leave_output: Annotated[
        bool,
        typer.Option("--leave-output", help="Leave the output head as it is.", rich_help_panel=sections.QUANTIZATION),
    ] = False
    allow_requantize: Annotated[
        bool,
        typer.Option(
            "--allow-requantize",
            help="Quantize tensors that already are quantized, at a further loss.",
            rich_help_panel=sections.QUANTIZATION,
        ),
    ] = False


@dataclass(kw_only=True)
class IdentityOptions:
    """What the user says of the model, whatever its files say."""

    tokenizer: TokenizerOption = None
    license: Annotated[
        str | None, typer.Option(metavar="SPDX", help="Licence of the weights.", rich_help_panel=sections.PROVENANCE)
    ] = None
    data_source: Annotated[
        str | None,
        typer.Option(metavar="ID", help="What the model was trained on.", rich_help_panel=sections.PROVENANCE),
    ] = None
    data_license: Annotated[
        str | None,
        typer.Option(metavar="SPDX", help="Licence of the training data.", rich_help_panel=sections.PROVENANCE),
    ] = None


@dataclass(kw_only=True)
class SourceOptions(IdentityOptions):
    """What the source leaves open or gets wrong."""

    allow_no_config: Annotated[
        bool,
        typer.Option(
            "--allow-no-config",
            help="Go on without config.json; infer dimensions from tensor shapes.",
            rich_help_panel=sections.SOURCE,
        ),
    ] = False
    hash: Annotated[
        bool,
        typer.Option(
            "--hash",
            help="Record the BLAKE3 of each source file in an .apr; by default its CRC-32.",
            rich_help_panel=sections.SOURCE,
        ),
    ] = False


@dataclass(kw_only=True)
class Drafts:
    """What becomes of layers that predict further tokens, and what draft models need."""

    target_model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the model that a draft model (EAGLE-3, DFlash, ...) drafts for.",
            rich_help_panel=sections.BESIDE,
        ),
    ] = None

    no_mtp: NoMtpOption = False


@dataclass(kw_only=True)
class OfAdapter:
    """What adapters need."""

    base: BaseOption = None


@dataclass(kw_only=True)
class TowerOptions:
    """What sees or hears beside a language model."""

    mmproj: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="GGUF of the towers (vision, audio) that belong to the model.",
            rich_help_panel=sections.BESIDE,
        ),
    ] = None


@dataclass(kw_only=True)
class DtypeOptions:
    """What the weights become."""

    arch: ArchOption = None
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            "--quantize",
            metavar="TYPE",
            autocompletion=complete_dtype,
            help="keep, f32, f16, bf16, f8_e4m3, aprq8, ... or a mix such as q4_k_m (apr quantize --list).",
        ),
    ] = "keep"


@dataclass(kw_only=True)
class MlxBits:
    """In how many bits a folder for MLX holds its weights."""

    bits: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Quantize the weights to 2, 3, 4, 5, 6 or 8 bits.", rich_help_panel=sections.MLX
        ),
    ] = None
    group_size: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Values that share a scale: 32, 64 (default) or 128.", rich_help_panel=sections.MLX
        ),
    ] = None
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Instead of --bits: mixed_2_6, mixed_3_4, mixed_3_6, mixed_4_6.",
            rich_help_panel=sections.MLX,
        ),
    ] = None


@dataclass(kw_only=True)
class Derived(MlxBits, Links):
    """How a model that is made of others is written."""

    format: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=complete_format,
            help="apr, gguf, safetensors, hf or mlx; by default, the suffix of the output decides.",
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
    """What is written, and how."""

    mtp_only: Annotated[
        bool,
        typer.Option(
            "--mtp-only",
            help="Write a GGUF of the MTP layers alone: a draft model for llama.cpp.",
            rich_help_panel=sections.BESIDE,
        ),
    ] = False

    mmproj: Annotated[
        bool | None,
        typer.Option(
            "--mmproj",
            help="Write the GGUF of the towers (vision, audio) alone, for llama.cpp's mtmd.",
            rich_help_panel=sections.BESIDE,
        ),
    ] = None

    format: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=complete_format,
            help="apr, apr-shards, gguf, safetensors, hf or mlx; by default, the suffix of the output decides.",
        ),
    ] = None
    no_tokenizer: NoTokenizerOption = False
    pre: PreOption = None
    pad_style: Annotated[
        str,
        typer.Option(
            metavar="STYLE",
            help="Names of padding tokens in a GGUF: llama.cpp or apr.",
            rich_help_panel=sections.TOKENIZER,
        ),
    ] = "llama.cpp"
    shard_size: ShardSizeOption = None
    verify: VerifyOption = False
    modelfile: Annotated[
        bool, typer.Option("--modelfile", help="Write an Ollama Modelfile beside the GGUF: template, stops, context.")
    ] = False


@dataclass(kw_only=True)
class FileOptions:
    """From where to where."""

    file: ModelArgument
    output: OutputOption
