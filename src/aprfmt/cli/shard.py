"""`apr shard`: a model as `.apr` shards with a manifest."""

from __future__ import annotations

from aprfmt.cli.options import (
    ForceOption,
    JsonOption,
    ModelArgument,
    OutputOption,
    PlanOption,
    QuietOption,
    ShardSizeOption,
    UnmappedOption,
)
from aprfmt.cli.transfer import parse_size, transfer


def command(
    file: ModelArgument,
    output: OutputOption,
    *,
    shard_size: ShardSizeOption = "5GB",
    allow_unmapped: UnmappedOption = False,
    plan: PlanOption = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Cut a model into .apr files no larger than a size, in a folder with a manifest that has their SHA-256.

    Every command reads the folder, its manifest or any shard as the whole model; convert joins it again.

    \b
    apr shard model.apr -o shards --shard-size 2GiB
    apr validate shards
    apr convert shards -o model.apr
    """
    from aprfmt.convert.api import convert_model

    transfer(
        "sharding",
        convert_model,
        file,
        output,
        plan=plan,
        format="apr-shards",
        shard_size=parse_size(shard_size),
        allow_unmapped=allow_unmapped,
        force=force,
    )
