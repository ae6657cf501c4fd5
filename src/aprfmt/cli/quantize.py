"""`apr quantize`: quantize a model to a preset of llama.cpp."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from aprfmt.cli.complete import complete_preset
from aprfmt.cli.conversion import Conversion
from aprfmt.cli.options import with_options
from aprfmt.cli.output import out, progress_bar, table, tokens, wrapped
from aprfmt.convert.options import QuantizeCall
from aprfmt.errors import UsageError
from aprfmt.schema import OptionRow, rows


@with_options(rows(QuantizeCall, OptionRow))
@dataclass(kw_only=True)
class Quantize(Conversion):
    """Quantize a model to Q4_K_M, Q8_0, ..., with the same types and bytes as llama.cpp's quantize tool.

    \b
    apr quantize --list
    apr quantize ./Qwen2.5-0.5B q4_k_m        (writes Qwen2.5-0.5B-Q4_K_M.gguf)
    apr quantize ./Qwen2.5-0.5B q4_k_m -o qwen.gguf --verify
    apr quantize model.apr iq3_m -o small.gguf --imatrix model.imatrix.gguf
    apr quantize model.apr iq2_m -o small.gguf --imatrix auto --data text.txt
    apr quantize model.gguf q4_k_m -o m.gguf --tensor-type ffn_down=q6_k --plan
    apr quantize model.gguf --target-bpw 6 -o small.gguf --recipe-out m.toml
    apr quantize model.gguf --max-kl 0.2 -o m.gguf --measure --eval-data text.txt
    apr quantize tuned.gguf --recipe m.toml -o tuned-small.gguf
    apr quantize model.gguf q4_k_m -o m.gguf --report page.html
    apr quantize model.apr --format mlx --target-bpw 6 -o mlx
    """

    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="A model: .apr, .gguf, .safetensors or a folder.")
    ] = None
    mix: Annotated[
        str | None,
        typer.Argument(
            metavar="TYPE", help="Quantization type: q4_k_m, q8_0, ... (see --list).", autocompletion=complete_preset
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PATH", help="Output .gguf or .apr; default: NAME-TYPE.gguf."),
    ] = None
    list_presets: Annotated[bool, typer.Option("--list", help="List the quantization types, with advice.")] = False

    def __call__(self) -> None:
        """Runs the command."""
        if self.list_presets:
            _list_presets()
            return
        given = self.given()
        if self.mix is None and (named := given.get("format")) is not None and _is_type(named):
            self.mix = given.pop("format")
            self.format = None
        words = [word for name in _INSTEAD if (word := given.get(name)) is not None]
        if self.file is None or (self.mix is None and not words):
            from aprfmt.convert.presets import find_preset

            is_type = self.file is not None and find_preset(self.file) and not Path(self.file).exists()
            file, mix = (None, self.file) if is_type else (self.file, None)
            missing = "FILE" if file is None else "TYPE"
            hint = f"{self._line(file or 'FILE', mix or 'q4_k_m')}\napr quantize --list shows all types"
            raise UsageError(f"{missing} is missing", hint=hint)
        import aprfmt
        from aprfmt.convert.presets import find_preset, quantized_name
        from aprfmt.io.sink import check_target
        from aprfmt.running.imatrix import AUTO, cached_imatrix

        if self.mix and find_preset(self.file) and not find_preset(self.mix) and not Path(self.file).exists():
            raise UsageError("FILE must come before TYPE", hint=self._line(self.mix, self.file))
        if self.mix and given.get("format") is None:
            _refuse_scheme(self.file, self.mix, self.output)
        if self.output is None and self.mix is None:
            raise UsageError("--output is missing: without TYPE the output has no default name", hint="-o OUT.gguf")
        output = self.output or Path(
            quantized_name(self.file, self.mix or "", imatrix=bool(given.get("imatrix")), pure=bool(given.get("pure")))
        )
        if not output.suffix and given.get("format") is None:
            hint = f"-o {output}.gguf, or {output}.apr"
            raise UsageError("the output has no suffix", path=output, hint=hint)

        data, auto = given.get("data"), {}
        if given.get("imatrix") == AUTO and data and not given.get("plan"):
            check_target(output, map(str, data), given.get("force", False))
            more = {name: given[name] for name in ("chunks", "text_field") if name in given}
            with progress_bar("computing", tokens) as progress:
                path, warnings = cached_imatrix(self.file, data, **more, progress=progress, log=out.progress_line)
            for warning in warnings:
                out.warning(warning)
            auto = {"imatrix": path, "data": (), "chunks": None}
            if not given.get("eval_data"):
                auto["text_field"] = "text"
        quantize = partial(aprfmt.quantize_model, mix=self.mix, log=out.progress_line)
        self.run("quantizing", quantize, self.file, output, **auto)

    def _line(self, file: str, mix: str) -> str:
        """The line that was typed, with this FILE and TYPE."""
        command, *options = [*out.arguments] or [""]
        options = options if command == "quantize" else []
        for word in filter(None, (self.file, self.mix)):
            if word in options:
                options.remove(word)
        return shlex.join(["apr", "quantize", file, mix, *options])


def _is_type(name: str) -> bool:
    """Whether a format is a quantization type by mistake."""
    from aprfmt.convert.presets import find_preset

    return find_preset(name) is not None


def _refuse_scheme(file: str, name: str, output: Path | None) -> None:
    """Raises UsageError for a quantization scheme of folders, with the line that writes one."""
    from aprfmt.codecs.dtypes import DTYPES
    from aprfmt.codecs.serving import find_scheme
    from aprfmt.convert.presets import counterpart, find_preset

    if find_preset(name) is None and name.upper() not in DTYPES and find_scheme(name) is not None:
        folder = output if output is not None and not output.suffix else "FOLDER"
        line = f"apr convert {file} -o {folder} --format hf --quantize {name}"
        preset = find_preset(counterpart(name) or "")
        line += f"\nor, for a GGUF: apr quantize {file} {preset.name}" if preset is not None else ""
        raise UsageError(f"{name} is a quantization scheme of Hugging Face folders", hint=line)


_INSTEAD = ("target_size", "target_bpw", "max_kl", "recipe")
"""Options that replace TYPE."""


def _list_presets() -> None:
    from aprfmt.convert.presets import ALIASES, PRESETS, usual_bits

    body, cells = [], []
    for preset in PRESETS.values():
        aliases = [alias for alias, name in ALIASES.items() if name == preset.name]
        bits = round(usual_bits(preset), 2)
        row = {"name": preset.name, "aliases": aliases, "bits_per_weight": bits, "file_type": preset.file_type}
        body.append(row | {"dtype": preset.dtype, "advice": preset.advice})
        cells.append([" = ".join([preset.name, *aliases]), f"{bits:.2f}", preset.advice])
    note = "Bits per weight for Llama-3.1-8B; models with row lengths that are not multiples of 256 need more."
    lines = [*table(["type", "bits", "when"], cells, right="bits", indent=0, wrap=24), "", *wrapped(note)]
    out.result({"count": len(body), "mixes": body}, lines)
