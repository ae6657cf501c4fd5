"""Merge adapters into their base model, or extract one from two models, as an edit during a conversion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack

from aprfmt import formats
from aprfmt.canonical.adapter import read_adapter
from aprfmt.canonical.base_model import find_base
from aprfmt.canonical.extracted import Extraction, extracted
from aprfmt.canonical.lora_pairs import Adapter, Base
from aprfmt.canonical.merged_adapters import with_adapters
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.model_kinds import is_adapter
from aprfmt.canonical.packed import Decoding
from aprfmt.canonical.read import canonical
from aprfmt.canonical.requantized import RequantizationErrors
from aprfmt.convert.api import convert
from aprfmt.convert.files import parts_of
from aprfmt.convert.options import ExtractAdapterCall, MergeAdapterCall, options_of
from aprfmt.convert.presets import find_preset
from aprfmt.convert.report import Report
from aprfmt.errors import RefusedError, UsageError
from aprfmt.io.links import check_links
from aprfmt.io.source import exists, is_same
from aprfmt.model import Model
from aprfmt.schema import takes
from aprfmt.types import PathLike


@takes(MergeAdapterCall)
def merge_adapter(call: MergeAdapterCall) -> Report:
    """Merges one or more adapters into the model `base` and writes `dst` in any output format.

    Base and adapters may be in any readable format. Weights keep their dtype; quantized weights are decoded, merged and
    quantized again, unless `dtype` sets another dtype: GGML blocks to their own type, weights of a checkpoint that
    becomes a folder to its scheme. `requantized` of the report has the error of each weight.

    Args:
        base: the model.
        adapter: the adapter, or several.
        dst: the output file or folder.

    Raises:
        AprError: for an adapter of another base model, and as convert_model.
    """
    adapters = given_paths(call.adapter, "adapter", "apr merge-adapter BASE ADAPTER... -o OUT")
    weights = _weights(call.weight, len(adapters))
    options = options_of(call, base=None)
    if isinstance(call.dtype, str) and find_preset(call.dtype) is not None:
        options["allow_requantize"] = True

    errors = RequantizationErrors()
    with ExitStack() as stack:

        def edit(c: Canonical) -> tuple[Canonical, list[str]]:
            # Opened here, they are among the files that must not change until the output is complete.
            opened = [open_input(stack, path, call.dst, follow_links=call.follow_links) for path in adapters]
            read = [_adapter_for(model, c) for model in opened]
            return with_adapters(c, list(zip(read, weights, strict=True)), keep=call.dtype == "keep", errors=errors)

        report = convert(call.base, call.dst, options, edit)
    report.requantized = errors.rows()
    report.losses += errors.sentences()
    return report


@takes(ExtractAdapterCall)
def extract_adapter(call: ExtractAdapterCall) -> Report:
    """Extracts the LoRA adapter of `rank` that turns the model `base` into `tuned`, in any adapter format.

    Each changed matrix becomes its best approximation of that rank (SVD); other changed weights are stored whole. At
    full rank the merged result equals `tuned`. The report says how much of the change the rank captures.

    Args:
        base: the model.
        tuned: the model after fine-tuning.
        dst: the output file or folder.

    Raises:
        AprError: for models of different architectures, and if no weight changed.
    """
    rank = call.rank
    found: list[Extraction] = []
    reported: list[str] = []
    with ExitStack() as stack:

        def edit(c: Canonical) -> tuple[Canonical, list[str]]:
            model = open_input(stack, formats.path_text(call.base, "base"), call.dst, follow_links=call.follow_links)
            made, notes, extraction = extracted(canonical(model, decoding=Decoding(decode=True)), c, rank)
            found.append(extraction)
            reported.extend(notes)
            return made, notes

        report = convert(call.tuned, call.dst, options_of(call, base=None), edit)
    if found and found[0].total and not call.plan:
        share = found[0].kept / found[0].total
        rest = [f"rank {rank} captures {share:.2%} of the change (sum of squares)"] if share < _WHOLE else []
        report.losses = [*(loss for loss in report.losses if loss not in reported), *rest]
    return report


_WHOLE = 1 - 1e-9
"""Fraction of the sum of squares above which only rounding is missing."""


def open_input(stack: ExitStack, path: PathLike, dst: PathLike, *, follow_links: bool) -> Model:
    """Opens and verifies another input of a conversion until `stack` is closed.

    Raises RefusedError if it is `dst`, and for links that lead out of its folder unless `follow_links`.
    """
    model = stack.enter_context(formats.open(path))
    _refuse_output(dst, model)
    if not follow_links:
        check_links(*parts_of(model))
    model.check_intact()
    return model


def _refuse_output(dst: PathLike, model: Model) -> None:
    for path in (str(model.path), *(source.path for source in model.sources)):
        if exists(dst) and is_same(dst, path):
            raise RefusedError("the output is an input", path=dst, hint="choose another output with -o")


def _adapter_for(model: Model, c: Canonical) -> Adapter:
    if not is_adapter(model):
        raise RefusedError("this is not an adapter", path=model.path, hint="whole models: apr merge A B -o OUT")
    if c.adapter is not None:
        raise RefusedError("this is an adapter, not a base model", path=c.model.path)
    own = Base(c.arch, c.hparams) if c.arch is not None else None
    if c.model.convention == "gguf" and model.convention != "gguf":
        # In some families only the base's own config.json states the factors of weights in a GGUF.
        named = find_base(model, None)
        own = named if named is not None and named.row is c.arch else own
    return read_adapter(model, own)


def given_paths(value: object, name: str, hint: str) -> list[str]:
    """The paths in the argument `name`, one or several. Raises UsageError for none and for other values."""
    found = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not found:
        raise UsageError(f"no {name} given", hint=hint)
    return [formats.path_text(path, name) for path in found]


def _weights(value: object, n: int) -> list[float]:
    """One weight for each of `n` adapters. Raises UsageError."""
    several = isinstance(value, Sequence) and not isinstance(value, str)
    found: list[object] = list(value) if isinstance(value, Sequence) and several else [value] * n
    if len(found) == 1:
        found *= n
    if len(found) != n:
        raise UsageError(
            f"{len(found)} weights given for {n} adapters", hint="use one --weight for each adapter, or one for all"
        )
    out = []
    for number in found:
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise UsageError(f"weight must be a number, not {number!r:.40}")
        out.append(float(number))
    return out
