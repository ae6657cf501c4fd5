"""`quantize_model`: quantizes to a preset, by a recipe or to a target, optionally with an importance matrix."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt import formats
from aprfmt.convert.options import QuantizeCall, options_of
from aprfmt.errors import RefusedError, UsageError
from aprfmt.io.sink import check_target
from aprfmt.running.imatrix import AUTO, cached_imatrix
from aprfmt.schema import takes
from aprfmt.types import PathLike, paths_of

if TYPE_CHECKING:
    from aprfmt.convert.bit_allocation import Allocation
    from aprfmt.convert.quantization import Observer, QuantizedTensor
    from aprfmt.convert.report import Report
    from aprfmt.convert.type_recipe import TypeRecipe
    from aprfmt.running.prepared import Prepared
    from aprfmt.running.sensitivity import PerturbedModel
    from aprfmt.running.target_types import TypeChooser
    from aprfmt.running.type_systems import TypeSystem

ROUNDS = 3
"""Maximum number of outputs that --max-kl measures."""

_CLOSE = 0.8
"""Fraction of --max-kl from which a measured KL is accepted instead of trying smaller types."""

_MARGIN = 0.03
"""Factor by which each further round aims below --max-kl."""

_CALIBRATION = 4
"""Text on which the chosen types are measured together, in multiples of --eval-tokens."""

MLX = "mlx"
"""The format, and the preset of recipes, of MLX folders."""

_LEAST_TYPED_TARGET = 1_000_000
"""Bytes: the smallest --target-size without a unit."""
_WAYS = ("target_size", "target_bpw", "max_kl", "recipe")


@takes(QuantizeCall)
def quantize_model(call: QuantizeCall) -> Report:
    """Quantizes a model to the `.gguf` or `.apr` file `dst`, or with format "mlx" to a folder.

    Args:
        src: the model.
        dst: the file to write.
        mix: a quantization preset of llama.cpp ("q4_k_m"); with `pure` also a single type. None with a target or with
            a recipe in TOML.
        log: called with progress lines while something is measured.
    """
    from aprfmt.convert.presets import require_quantized

    _check(call)
    texts = paths_of(call.data)
    if call.mix is not None:
        require_quantized(call.mix)
    warnings: list[str] = []
    given = options_of(call, recipe=None)  # of a conversion to MLX
    if call.imatrix == AUTO:
        if call.plan:
            raise UsageError(
                f"--plan cannot be combined with --imatrix {AUTO}, which runs the model",
                hint="apr imatrix FILE --data TEXT -o OUT --plan reports the amount of text",
            )
        given["imatrix"], warnings = cached_imatrix(
            call.src, texts, chunks=call.chunks, text_field=call.text_field, log=call.log
        )
    else:
        own_text = call.text_field != "text" and not paths_of(call.eval_data)
        auto_only = {"data": texts, "chunks": call.chunks is not None, "text-field": own_text}
        for name, is_given in auto_only.items():
            if is_given:
                raise UsageError(f"--{name} requires --imatrix {AUTO}")
    run = _Quantizing(call, given, [*texts, *paths_of(call.eval_data)])
    report = run.for_target() if _target(call) else run.as_given()
    report.warnings[:0] = warnings
    return report


def _target(call: QuantizeCall) -> bool:
    return any(value is not None for value in (call.target_size, call.target_bpw, call.max_kl))


def _check(call: QuantizeCall) -> None:
    """Raises UsageError for options that exclude or need each other, and for a size that is none."""
    ways = [f"--{name.replace('_', '-')}" for name in _WAYS if getattr(call, name) is not None]
    if len(ways) > 1:
        raise UsageError(f"{ways[0]} and {ways[1]} are mutually exclusive", hint="use one of them")
    if call.format == MLX:
        _check_mlx(call)
    if _target(call):
        if call.mix is not None or call.pure:
            what = f"the preset {call.mix}" if call.mix is not None else "--pure"
            raise UsageError(f"{ways[0]} chooses the types itself; {what} does not apply", hint=f"drop {what}")
    elif call.measure:
        raise UsageError("--measure requires a target", hint="--target-size, --target-bpw or --max-kl")
    elif call.mix is None and call.recipe is None:
        raise UsageError("the quantization type is missing", hint="add a preset such as q4_k_m, or --target-bpw X")
    measures = call.measure or call.max_kl is not None
    if measures and not paths_of(call.eval_data):
        option = "--measure" if call.measure else "--max-kl"
        raise UsageError(f"{option} needs held-out text", hint="set it with --eval-data")
    if paths_of(call.eval_data) and not measures:
        raise UsageError("--eval-data requires --measure or --max-kl")
    if call.max_kl is not None and Path(formats.path_text(call.dst, "dst")).suffix.lower() != ".gguf":
        raise UsageError("--max-kl measures the output in llama.cpp: write a .gguf", hint="-o OUT.gguf")
    _target_bytes(call)


def _target_bytes(call: QuantizeCall) -> int | None:
    """The target size in bytes. Raises UsageError."""
    from aprfmt.convert.parsing import parse_size

    if call.target_size is None:
        return None
    return parse_size(call.target_size, name="target_size", least_typed=_LEAST_TYPED_TARGET)


def _check_mlx(call: QuantizeCall) -> None:
    if call.mix is not None:
        what = f"{call.mix} is a preset of GGUF"
        hint = "--target-bpw X --format mlx, or apr export FILE -o OUT --format mlx --bits 4"
        raise UsageError(f"{what}, not of MLX", hint=hint)
    if call.measure or call.max_kl is not None:
        option = "--measure" if call.measure else "--max-kl"
        raise UsageError(f"{option} runs llama.cpp, which reads no MLX folder", hint="--target-size or --target-bpw")


class _MissedError(RefusedError):
    """A measured output that is not the one to publish."""


@dataclass(slots=True)
class _Quantizing:
    """One call of quantize_model.

    Attributes:
        call: its parameters.
        given: options of the conversion.
        texts: all files of text.
        seen: the tensors that the last conversion quantized.
    """

    call: QuantizeCall
    given: Mapping[str, object]
    texts: Sequence[PathLike]
    architecture: str | None = None
    seen: Sequence[QuantizedTensor] = ()
    _prepared: Prepared | None = field(default=None, init=False)

    @property
    def types(self) -> TypeSystem:
        """What to choose from."""
        from aprfmt.running.type_systems import GGML_TYPES, MLX_TYPES

        return MLX_TYPES if self.call.format == MLX else GGML_TYPES

    # --- conversions ---

    def convert(
        self,
        changes: Mapping[str, object],
        observe: Observer | None = None,
        check: Callable[[str], None] | None = None,
        dst: PathLike | None = None,
    ) -> Report:
        """Runs the conversion to `dst`, by default the call's, with some options changed; the user's --tensor-type
        takes precedence.
        """
        from aprfmt.convert.api import convert
        from aprfmt.convert.parsing import parse_options

        def note(architecture: str | None, found: Sequence[QuantizedTensor]) -> None:
            self.architecture, self.seen = architecture, found
            if observe is not None:
                observe(architecture, found)

        user, more = parse_options(self.given).tensor_type, changes.get("tensor_type", ())
        types = [*([user] if isinstance(user, str) else user), *(more if isinstance(more, list) else ())]
        inputs = [formats.path_text(text, "data") for text in self.texts]
        return convert(
            self.call.src,
            dst or self.call.dst,
            {**self.given, **changes, "tensor_type": types},
            None,
            inputs,
            note,
            check,
        )

    def plan(self, changes: Mapping[str, object], observe: Observer | None = None) -> Report:
        """Plans the conversion with some options changed."""
        return self.convert({**changes, "plan": True, "progress": None}, observe)

    def as_given(self) -> Report:
        """Quantizes to a preset or by a recipe."""
        from aprfmt.convert.type_recipe import RecipeRow, TypeRecipe, exact, read_recipe

        changes: dict[str, object] = {"dtype": self.call.mix}
        observe = None
        if (path := self.call.recipe) is not None:
            recipe = read_recipe(path)
            preset = self.call.mix or recipe.preset
            if (recipe.preset == MLX) != (self.call.format == MLX) and (recipe.preset or self.call.format == MLX):
                forms = ["a GGUF", "an MLX folder"][:: 1 if recipe.preset != MLX else -1]
                hint = "--format mlx" if recipe.preset == MLX else "drop --format mlx"
                raise UsageError(f"the recipe has the types of {forms[0]}, not of {forms[1]}", path=path, hint=hint)
            if preset is None:
                raise UsageError(
                    "a llama-quantize recipe does not set the type of the other tensors",
                    hint=f"apr quantize {formats.path_text(self.call.src, 'src')} TYPE --recipe {path}",
                )
            changes = self.types.options(preset, recipe.tensor_type)

            def observe(architecture: str | None, found: Sequence[QuantizedTensor]) -> None:
                recipe.check(architecture, [row.tensor.name for row in found], path)

        self._check_more_outputs()
        report = self.convert(changes, observe)
        types = {row.tensor.name: row.target.dtype for row in self.seen}
        rows = [RecipeRow(exact(name), dtype) for name, dtype in types.items()]
        self._write_recipe(TypeRecipe(rows, self.architecture, str(changes.get("dtype", MLX))))
        if self.call.report is not None:
            chooser = self._chooser()
            chooser.measure_errors(self.plan, types)
            chooser.default_costs()
            options = {tensor.name: {o.dtype: o for o in tensor.options} for tensor in chooser.tensors}
            self._write_page(chooser, {name: found[types[name]] for name, found in options.items()}, report)
        return report

    # --- targets ---

    def for_target(self) -> Report:
        """Quantizes to the types for the target."""
        from aprfmt.running.target_types import ROUNDED

        call = self.call
        self._check_more_outputs()
        if not call.plan:  # before minutes of measuring
            paths = formats.path_text(call.dst, "dst"), [formats.path_text(call.src, "src")]
            check_target(*paths, call.force, folder=call.format == MLX)
        chooser = self._chooser()
        chooser.measure_errors(self.plan)
        chooser.default_costs()
        with ExitStack() as stack:
            model = cache(lambda: stack.enter_context(self._perturbed(chooser)))
            if call.measure:
                bits = None if call.max_kl is not None else self._bits(chooser)
                chooser.measure_costs(model, bits)
                chooser.measure_rounding(lambda: self._divergence(model(), {"dtype": ROUNDED}))
                chosen = self._choose(chooser)
                times = _CALIBRATION if call.max_kl is None else 1  # the rounds measure --eval-tokens
                chooser.calibrate(chosen, lambda: self._divergence(model(), chooser.options(chosen), times), times)
        chosen = self._choose(chooser)
        if call.max_kl is not None and not call.plan:
            report, chosen = self._measured(chooser, chosen)
        else:
            report = self.convert(chooser.options(chosen))
        report.groups = chooser.groups(chosen)
        report.predicted_kl = chooser.predicted(chosen)
        if not call.measure:
            report.warnings.append("the predicted KL is a rough estimate; --measure calibrates it on --eval-data")
        self._write_recipe(chooser.recipe(chosen))
        self._write_page(chooser, chosen, report)
        return report

    def _chooser(self) -> TypeChooser:
        from aprfmt.convert.parsing import parse_options
        from aprfmt.running.prepared import key, source_files
        from aprfmt.running.target_types import TypeChooser, measurements

        options = parse_options(self.given)
        paths = [*source_files(self.call.src), *([str(options.imatrix)] if options.imatrix is not None else [])]
        evals = [formats.path_text(text, "eval_data") for text in paths_of(self.call.eval_data)]
        how = {"spread_tokens": self.call.eval_tokens if evals else 0, "arch": options.arch, "no_mtp": options.no_mtp}
        return TypeChooser(self.call.log, measurements(key([*paths, *evals], how)), options.threads, self.types)

    def _bits(self, chooser: TypeChooser) -> float:
        """Bits per weight of the target."""
        chosen = self._choose(chooser)
        return 8 * sum(option.n_bytes for option in chosen.values()) / sum(chooser.sizes.values())

    def _choose(self, chooser: TypeChooser) -> Allocation:
        call = self.call
        if (n_bytes := _target_bytes(call)) is not None:
            return chooser.within_bytes(n_bytes, self.plan)
        if call.target_bpw is not None:
            return chooser.within_bits(call.target_bpw)
        assert call.max_kl is not None
        return chooser.within_loss(call.max_kl)

    def _perturbed(self, chooser: TypeChooser) -> PerturbedModel:
        from aprfmt.running.sensitivity import PerturbedModel

        return PerturbedModel(
            self._source(), formats.path_text(self.call.src, "src"), self._eval_texts(), self.call.eval_tokens,
            chooser.weights, text_field=self.call.text_field, log=self.call.log,
        )  # fmt: skip

    def _divergence(self, model: PerturbedModel, changes: Mapping[str, object], times: int = 1) -> float:
        """The KL of a scratch file with some options of the conversion changed, on `times` as much text."""
        from aprfmt.io.temporary import scratch_folder

        fixed = {"format": "gguf", "plan": False, "progress": None, "fsync": False, "verify": False}
        with scratch_folder("measured") as folder:
            path = os.path.join(folder, "measured.gguf")
            self.convert({**changes, **fixed}, dst=path)
            return model.divergence_of(path, times)

    def _source(self) -> str:
        """The model as a GGUF that llama.cpp loads."""
        from aprfmt.running.prepared import prepare

        if self._prepared is None:
            self._prepared = prepare(self.call.src, say=self.call.log)
        return self._prepared.path

    def _eval_texts(self) -> list[Path]:
        return [Path(formats.path_text(text, "eval_data")) for text in paths_of(self.call.eval_data)]

    def _measured(self, chooser: TypeChooser, chosen: Allocation) -> tuple[Report, Allocation]:
        """Writes the smallest output whose measured KL is at most --max-kl. Raises RefusedError after ROUNDS."""
        from aprfmt.io.temporary import scratch_folder
        from aprfmt.running.decoders import open_decoder
        from aprfmt.running.divergence import DEFAULT_CTX, compare, sample_chunks, write_logits

        most = self.call.max_kl
        assert most is not None
        best: tuple[float, Allocation] | None = None
        measured = 0.0
        with scratch_folder("reference") as folder:
            reference = os.path.join(folder, "reference.kld")
            with open_decoder(self._source(), n_ctx=DEFAULT_CTX) as llama:
                chunks = sample_chunks(llama, self._eval_texts(), self.call.eval_tokens, self.call.text_field)
                write_logits(llama, chunks, reference)

            def follows() -> Allocation:
                chooser.correct(chosen, measured)
                return chooser.within_loss(most * (1 - _MARGIN * number))

            def check(output: str) -> None:
                nonlocal measured
                with open_decoder(output, n_ctx=DEFAULT_CTX) as llama:
                    measured = float(compare(llama, reference)[0].mean())
                self.call.log(f"round {number}: KL {measured:.5f}, predicted {chooser.predicted(chosen):.5f}")
                if measured > most or (measured < _CLOSE * most and number < ROUNDS and follows() != chosen):
                    raise _MissedError(f"measured KL {measured:.4g}")

            for number in range(1, ROUNDS + 1):
                try:
                    report = self.convert(chooser.options(chosen), check=check)
                except _MissedError:
                    if measured <= most and (best is None or measured > best[0]):
                        best = (measured, chosen)
                    chosen = follows()
                    continue
                report.measured_kl, report.rounds = measured, number
                return report, chosen
        if best is None:
            raise RefusedError(
                f"--max-kl {most:g} was not reached in {ROUNDS} rounds: the last output has a KL of {measured:.4g}",
                path=formats.path_text(self.call.dst, "dst"),
                hint=f"--max-kl {measured * 1.05:.2g}, or --measure for a better prediction",
            )
        report = self.convert(chooser.options(best[1]))
        report.measured_kl, report.rounds = best[0], ROUNDS
        return report, best[1]

    # --- recipes and pages ---

    def _check_more_outputs(self) -> None:
        """Raises UsageError or ExistsError for a recipe or a page that cannot be written."""
        from aprfmt.html.file import check_page

        call, taken = self.call, {os.path.abspath(formats.path_text(self.call.dst, "dst")): "--output"}
        inputs = [formats.path_text(path, "src") for path in (call.src, call.recipe) if path is not None]
        for option, path in (("--recipe-out", call.recipe_out), ("--report", call.report)):
            if path is None:
                continue
            target = formats.path_text(path, option[2:].replace("-", "_"))
            if (other := taken.setdefault(os.path.abspath(target), option)) != option:
                raise UsageError(f"{option} and {other} are the same file", hint="choose another file")
            if option == "--report":
                check_page(target, option=option)
            check_target(target, inputs, call.force or (call.plan and option == "--recipe-out"))

    def _write_recipe(self, recipe: TypeRecipe) -> None:
        from aprfmt.convert.type_recipe import write_recipe

        if self.call.recipe_out is not None and not self.call.plan:
            write_recipe(recipe, formats.path_text(self.call.recipe_out, "recipe_out"), force=self.call.force)

    def _write_page(self, chooser: TypeChooser, chosen: Allocation, report: Report) -> None:
        if self.call.report is None:
            return
        from aprfmt.html.file import write_page
        from aprfmt.running.quantization_page import quantization_html
        from aprfmt.running.quantization_report import report_on

        self.call.log("comparing with the presets")
        found = report_on(chooser, chosen, report, self.plan, is_measured=self.call.measure)
        write_page(formats.path_text(self.call.report, "report"), quantization_html(found), force=self.call.force)
