"""Shell completion of values: quantization presets, dtypes, formats, architectures, tensor names."""

from __future__ import annotations

from collections.abc import Iterable

import typer

from aprfmt.errors import UsageError


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.lower().startswith(incomplete.lower())]


def complete_preset(incomplete: str) -> list[str]:
    """Completes the names of quantization presets."""
    from aprfmt.convert.presets import ALIASES, PRESETS

    return _beginning((*PRESETS, *ALIASES), incomplete)


def complete_dtype(incomplete: str) -> list[str]:
    """Completes --dtype: float types, aprq8, quantization presets and schemes of folders."""
    from aprfmt.codecs.serving import SERVING

    own = _beginning(("keep", "f32", "f16", "bf16", "f8_e4m3", "aprq8", *SERVING), incomplete)
    return [*own, *complete_preset(incomplete)]


def complete_format(incomplete: str) -> list[str]:
    """Completes the names of output formats."""
    from aprfmt.convert.targets.base import targets

    return _beginning((target.name for target in targets()), incomplete)


def complete_architecture(incomplete: str) -> list[str]:
    """Completes architecture names."""
    from aprfmt.arch.table import ARCHITECTURES

    return _beginning(ARCHITECTURES, incomplete)


_DEFINE_ZSH = "compdef %(complete_func)s %(prog_name)s"
_DEFINE_OR_RUN_ZSH = f"""if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  %(complete_func)s "$@"
else
  {_DEFINE_ZSH}
fi"""


def mend_zsh() -> None:
    """Makes the zsh script complete on the first Tab.

    On the first Tab, zsh autoloads the script and runs it as the function; typer's script only defines the function.
    """
    from typer import _completion_shared as typers

    scripts = typers._completion_scripts
    scripts["zsh"] = typers.COMPLETION_SCRIPT_ZSH.replace(_DEFINE_ZSH, _DEFINE_OR_RUN_ZSH)


SHELL_OPTIONS = {
    "--install-completion": "Install completion for the current shell, or for SHELL: bash, zsh, fish.",
    "--show-completion": "Print the completion script for the current shell, or for SHELL.",
}


def serve_shell(option: str, shell: str | None) -> None:
    """Runs one of SHELL_OPTIONS for `shell`, or for the parent shell if it is None.

    Raises UsageError if the shell is not supported or cannot be detected.
    """
    from typer import _completion_shared as typers

    known = ", ".join(typers._completion_scripts)
    if shell is None and (shell := typers._get_shell_name()) is None:
        raise UsageError("cannot detect the current shell", hint=f"apr {option} SHELL, one of: {known}")
    if shell not in typers._completion_scripts:
        raise UsageError(f"no completion for the shell {shell!r}", hint=f"apr {option} SHELL, one of: {known}")
    mend_zsh()
    names = {"prog_name": "apr", "complete_var": "_APR_COMPLETE"}
    if option == "--show-completion":
        print(typers.get_completion_script(shell=shell, **names))  # noqa: T201
        return
    _, path = typers.install(shell=shell, **names)
    print(f"installed completion for {shell} in {path}; start a new {shell} to use it")  # noqa: T201


def complete_tensor(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes tensor names of the FILE on the command line; nothing if it is unreadable or remote."""
    import aprfmt

    # While an option's value is completed, click has not assigned the preceding words to arguments.
    words = [word for word in (ctx.params.get("file"), *ctx.args) if isinstance(word, str)]
    file = next((word for word in words if not word.startswith("-") and "://" not in word), None)
    if file is None:
        return []
    try:
        with aprfmt.open(file) as model:
            return _beginning(model.tensors, incomplete)
    except aprfmt.AprError:
        return []


COMPLETIONS = {"architecture": complete_architecture, "dtype": complete_dtype, "format": complete_format}
"""Completion of an option's values, by the name that its row of the schema gives."""
