"""`apr export`: a model to GGUF, safetensors, a Hugging Face folder or MLX."""

from __future__ import annotations

from typing import Any

from aprfmt.cli.options import (
    MACHINE,
    QUANTISING,
    ArchOption,
    DtypeOption,
    ForceOption,
    FormatOption,
    JsonOption,
    ModelArgument,
    OutputOption,
    PadStyleOption,
    PlanOption,
    PreOption,
    QuietOption,
    ShardSizeOption,
    UnmappedOption,
    VerifyOption,
    takes,
)
from aprfmt.cli.transfer import parse_shard_size, transfer


@takes(QUANTISING, MACHINE)
def command(
    file: ModelArgument,
    output: OutputOption,
    *,
    format: FormatOption = None,
    dtype: DtypeOption = "keep",
    pre: PreOption = None,
    pad_style: PadStyleOption = "llama.cpp",
    shard_size: ShardSizeOption = None,
    arch: ArchOption = None,
    allow_unmapped: UnmappedOption = False,
    verify: VerifyOption = False,
    plan: PlanOption = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    more: dict[str, Any],
) -> None:
    """Write a model for other programs: llama.cpp (gguf), transformers (hf, safetensors), MLX.

    \b
    apr export model.apr -o model.gguf --verify
    apr export model.apr -o model.gguf --quantize q4_k_m
    apr export model.apr -o folder --format hf --shard-size 2GB
    apr export model.apr -o model.gguf --shard-size 2GB
    """
    from aprfmt.convert.api import export_model

    transfer(
        "exporting",
        export_model,
        file,
        output,
        plan=plan,
        format=format,
        dtype=dtype,
        pre=pre,
        pad_style=pad_style,
        shard_size=parse_shard_size(shard_size),
        arch=arch,
        allow_unmapped=allow_unmapped,
        verify=verify,
        force=force,
        **more,
    )
