"""`apr quantize`: a model by one of llama.cpp's mixes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from aprfmt.cli.options import (
    MACHINE,
    QUANTISING,
    ArchOption,
    ForceOption,
    JsonOption,
    PlanOption,
    QuietOption,
    TokenizerOption,
    UnmappedOption,
    VerifyOption,
    takes,
)
from aprfmt.cli.output import out, table
from aprfmt.cli.transfer import transfer
from aprfmt.errors import UsageError


@takes(QUANTISING, MACHINE)
def command(
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="A model: .apr, .gguf, .safetensors or a folder.")
    ] = None,
    mix: Annotated[
        str | None, typer.Argument(metavar="MIX", help="q4_k_m, q8_0, ...; with --pure a single type.")
    ] = None,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PATH", help="A .gguf or an .apr to write.")
    ] = None,
    list_mixes: Annotated[
        bool, typer.Option("--list", help="Show the mixes and when to take which.")
    ] = False,
    arch: ArchOption = None,
    tokenizer: TokenizerOption = None,
    allow_unmapped: UnmappedOption = False,
    verify: VerifyOption = False,
    plan: PlanOption = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    more: dict[str, Any],
) -> None:
    """Store the weights of a model in fewer bits: types and bytes as llama.cpp's own quantize tool gives them.

    \b
    apr quantize --list
    apr quantize ./Qwen2.5-0.5B q4_k_m -o qwen.gguf --verify
    apr quantize model.apr iq3_m -o small.gguf --imatrix model.imatrix.gguf
    apr quantize model.gguf q4_k_m -o m.gguf --tensor-type ffn_down=q6_k --plan
    """
    if list_mixes:
        _list()
        return
    if file is None or mix is None or output is None:
        missing = "FILE" if file is None else "MIX" if mix is None else "--output"
        raise UsageError(f"{missing} is missing", hint="apr quantize FILE MIX -o OUT; apr quantize --list")
    from aprfmt.convert.api import convert_model
    from aprfmt.convert.quantize.mixes import require_quantised

    require_quantised(mix)
    transfer(
        "quantising",
        convert_model,
        file,
        output,
        plan=plan,
        dtype=mix,
        arch=arch,
        tokenizer=tokenizer,
        allow_unmapped=allow_unmapped,
        verify=verify,
        force=force,
        **more,
    )


def _list() -> None:
    from aprfmt.convert.quantize.mix_rules import usual_bits
    from aprfmt.convert.quantize.mixes import ALIASES, MIXES

    body: list[dict[str, Any]] = []
    cells = []
    for mix in MIXES.values():
        aliases = [alias for alias, name in ALIASES.items() if name == mix.name]
        bits = usual_bits(mix)
        body.append(
            {
                "name": mix.name,
                "aliases": aliases,
                "bits_per_weight": round(bits, 2),
                "file_type": mix.file_type,
                "dtype": mix.dtype,
                "advice": mix.advice,
            }
        )
        cells.append([" = ".join([mix.name, *aliases]), f"{bits:.2f}", mix.advice])
    lines = [*table(["mix", "bits", "when"], cells, right="bits", indent=0), "", _FOOT]
    out.result({"count": len(body), "mixes": body}, lines)


_FOOT = "Bits a weight of Llama-3.1-8B; narrow models take more, where 256 does not divide their rows."
