"""`apr import`: any source to `.apr`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from aprfmt.cli.options import (
    MACHINE,
    QUANTISING,
    ArchOption,
    DataLicenseOption,
    DataSourceOption,
    DtypeOption,
    ForceOption,
    JsonOption,
    LicenseOption,
    NoConfigOption,
    OutputOption,
    PlanOption,
    QuietOption,
    TokenizerOption,
    UnmappedOption,
    takes,
)
from aprfmt.cli.transfer import transfer
from aprfmt.errors import UsageError


@takes(QUANTISING, MACHINE)
def command(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="safetensors, index, folder, .gguf or hf://org/repo.")
    ],
    output: OutputOption,
    *,
    arch: ArchOption = None,
    dtype: DtypeOption = "keep",
    tokenizer: TokenizerOption = None,
    license: LicenseOption = None,
    data_source: DataSourceOption = None,
    data_license: DataLicenseOption = None,
    allow_no_config: NoConfigOption = False,
    allow_unmapped: UnmappedOption = False,
    plan: PlanOption = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    more: dict[str, Any],
) -> None:
    """Pack a model into one .apr file with everything that is needed to give the source back byte for byte.

    \b
    apr import model.gguf -o model.apr
    apr import ./Qwen2.5-0.5B -o qwen.apr --license apache-2.0
    apr import hf://org/repo -o model.apr --plan
    """
    from aprfmt.convert.api import import_model

    _check_suffix(source, output)
    transfer(
        "importing",
        import_model,
        source,
        output,
        plan=plan,
        arch=arch,
        dtype=dtype,
        tokenizer=tokenizer,
        license=license,
        data_source=data_source,
        data_license=data_license,
        allow_no_config=allow_no_config,
        allow_unmapped=allow_unmapped,
        force=force,
        **more,
    )


def _check_suffix(source: str, output: Path) -> None:
    """Refuses a name that promises another container than the .apr that import writes."""
    suffix = output.suffix.lower()
    if suffix in (".gguf", ".safetensors"):
        raise UsageError(
            f"import writes .apr files, and the output is named {suffix}",
            path=str(output),
            hint=f"apr convert {source} -o {output}",
        )
