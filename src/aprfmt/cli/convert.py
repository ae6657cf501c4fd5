"""`apr convert`: any readable form to any writable form."""

from __future__ import annotations

from typing import Any

from aprfmt.cli.options import (
    MACHINE,
    QUANTISING,
    ArchOption,
    DataLicenseOption,
    DataSourceOption,
    DtypeOption,
    ForceOption,
    FormatOption,
    JsonOption,
    LicenseOption,
    ModelArgument,
    NoConfigOption,
    OutputOption,
    PadStyleOption,
    PlanOption,
    PreOption,
    QuietOption,
    ShardSizeOption,
    TokenizerOption,
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
    arch: ArchOption = None,
    tokenizer: TokenizerOption = None,
    license: LicenseOption = None,
    data_source: DataSourceOption = None,
    data_license: DataLicenseOption = None,
    pre: PreOption = None,
    pad_style: PadStyleOption = "llama.cpp",
    shard_size: ShardSizeOption = None,
    allow_no_config: NoConfigOption = False,
    allow_unmapped: UnmappedOption = False,
    verify: VerifyOption = False,
    plan: PlanOption = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    more: dict[str, Any],
) -> None:
    """Convert between any two forms in one step.

    \b
    apr convert model.gguf -o folder --format hf --dtype bf16
    apr convert ./Qwen2.5-0.5B -o qwen.gguf --dtype q4_k_m --imatrix qwen.dat
    """
    from aprfmt.convert.api import convert_model

    transfer(
        "converting",
        convert_model,
        file,
        output,
        plan=plan,
        format=format,
        dtype=dtype,
        arch=arch,
        tokenizer=tokenizer,
        license=license,
        data_source=data_source,
        data_license=data_license,
        pre=pre,
        pad_style=pad_style,
        shard_size=parse_shard_size(shard_size),
        allow_no_config=allow_no_config,
        allow_unmapped=allow_unmapped,
        verify=verify,
        force=force,
        **more,
    )
