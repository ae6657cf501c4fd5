"""What the shell completes beside options: mixes, dtypes, formats, architectures, names of tensors."""

from __future__ import annotations

from collections.abc import Iterable

import typer

from aprfmt.errors import UsageError


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


SHELL_OPTIONS = {
    "--install-completion": "Install completion for the current shell, or the one that is named: bash, zsh, fish.",
    "--show-completion": "Print the script of completion instead, for the current shell or the one that is named.",
}


def serve_shell(option: str, shell: str | None) -> None:
    """Does what one of SHELL_OPTIONS asks, for `shell` or, for None, the one that `apr` was started from.

    Raises UsageError for a shell that there is no script for, or that cannot be told.
    """
    from typer import _completion_shared as typers

    known = ", ".join(typers._completion_scripts)
    if shell is None and (shell := typers._get_shell_name()) is None:
        raise UsageError("cannot tell from which shell this was started", hint=f"apr {option} SHELL, one of: {known}")
    if shell not in typers._completion_scripts:
        raise UsageError(f"no completion for the shell {shell!r}", hint=f"apr {option} SHELL, one of: {known}")
    mend_zsh()
    names = {"prog_name": "apr", "complete_var": "_APR_COMPLETE"}
    if option == "--show-completion":
        print(typers.get_completion_script(shell=shell, **names))  # noqa: T201
        return
    _, path = typers.install(shell=shell, **names)
    print(f"completion for {shell} is installed in {path}; it begins with the next {shell}")  # noqa: T201


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
