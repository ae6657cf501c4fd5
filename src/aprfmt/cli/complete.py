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


_DEFINE_ZSH = "compdef %(complete_func)s %(prog_name)s"
_DEFINE_OR_RUN_ZSH = f"""if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  %(complete_func)s "$@"
else
  {_DEFINE_ZSH}
fi"""


def mend_zsh() -> None:
    """Lets the script for zsh answer the first Tab, too.

    zsh runs a script of its function path when Tab is first pressed, in place of the function; typer's only defines it.
    """
    from typer import _completion_shared as typers

    scripts = typers._completion_scripts
    scripts["zsh"] = typers.COMPLETION_SCRIPT_ZSH.replace(_DEFINE_ZSH, _DEFINE_OR_RUN_ZSH)


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
