"""What the shell completes beside options: mixes, dtypes, formats, architectures, names of tensors."""

from __future__ import annotations

from collections.abc import Iterable

import typer


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.lower().startswith(incomplete.lower())]


def complete_mix(incomplete: str) -> list[str]:
    """Names of quantization mixes."""
    from aprfmt.convert.mixes import ALIASES, MIXES

    return _beginning((*MIXES, *ALIASES), incomplete)


def complete_dtype(incomplete: str) -> list[str]:
    """What --dtype takes: floats, aprq8, mixes."""
    return [*_beginning(("keep", "f32", "f16", "bf16", "f8_e4m3", "aprq8"), incomplete), *complete_mix(incomplete)]


def complete_format(incomplete: str) -> list[str]:
    """Names of the forms that can be written."""
    from aprfmt.convert.targets.base import targets

    return _beginning((target.name for target in targets()), incomplete)


def complete_architecture(incomplete: str) -> list[str]:
    """Names of the rows of architectures."""
    from aprfmt.arch.table import ARCHITECTURES

    return _beginning(ARCHITECTURES, incomplete)


def complete_tensor(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of the tensors of the FILE on the command line; none where it cannot be read, or is elsewhere."""
    import aprfmt

    # While an option waits for its value the words before it are not assigned to arguments.
    words = [word for word in (ctx.params.get("file"), *ctx.args) if isinstance(word, str)]
    file = next((word for word in words if not word.startswith("-") and "://" not in word), None)
    if file is None:
        return []
    try:
        with aprfmt.open(file) as model:
            return _beginning(model.tensors, incomplete)
    except aprfmt.AprError:
        return []
