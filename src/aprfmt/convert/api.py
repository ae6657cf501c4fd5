"""Import, export, convert and quantize: one pipeline that checks, plans, then streams."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from aprfmt import formats
from aprfmt.arch import hparams as hp
from aprfmt.canonical.base_model import find_base
from aprfmt.canonical.checks import check_before_writing, require_config, with_dims_of_tensors
from aprfmt.canonical.drafts import without_mtp_layers
from aprfmt.canonical.lora_pairs import Base
from aprfmt.canonical.model import Canonical, embedding_rows
from aprfmt.canonical.model_kinds import is_adapter
from aprfmt.canonical.packed import Decoding
from aprfmt.canonical.padded_vocabulary import padded_vocabulary
from aprfmt.canonical.read import canonical
from aprfmt.canonical.tensor import Losses
from aprfmt.codecs.dtypes import dtype_totals
from aprfmt.codecs.serving import LAYOUTS
from aprfmt.convert.files import carried_files, parts_of, with_files
from aprfmt.convert.gguf_parts import older_outputs
from aprfmt.convert.integrity import open_checked
from aprfmt.convert.logits import SourceLogits
from aprfmt.convert.memory import flow_for, peak_bytes
from aprfmt.convert.options import ConvertCall, ImportCall, Options, options_of
from aprfmt.convert.parsing import parse_options
from aprfmt.convert.presets import find_preset
from aprfmt.convert.quantization import Observer, Quantization, quantization_of
from aprfmt.convert.report import PlannedTensor, Report
from aprfmt.convert.serving import FOLDERS, serving_scheme
from aprfmt.convert.targets import apr
from aprfmt.convert.targets.base import TARGETS, Output, Target, Work, check_options, find_target
from aprfmt.convert.towers import with_tower
from aprfmt.errors import NotFoundError, RefusedError, UsageError
from aprfmt.formats import hf_files
from aprfmt.formats.apr2_write import check_suffix
from aprfmt.formats.apr_shards import JoinedNative
from aprfmt.formats.hf_files import read_tokenizer
from aprfmt.formats.hfdir import HfNative
from aprfmt.io import names
from aprfmt.io.links import check_links, check_opened
from aprfmt.io.pipe import WriteOptions, check_inputs_kept, write_file, write_folder, write_parts
from aprfmt.io.remote import limit_stores
from aprfmt.io.sink import check_target
from aprfmt.io.source import exists, is_file, is_folder, is_same, watch_opened
from aprfmt.llama.client import Verification, require_llama, verify_gguf
from aprfmt.model import Model
from aprfmt.provenance import provenance
from aprfmt.schema import takes
from aprfmt.text import first_few, plural
from aprfmt.tokenizer.data import NO_VOCABULARY
from aprfmt.tokenizer.model import Tokenizer
from aprfmt.types import PathLike


@takes(ImportCall)
def import_model(call: ImportCall) -> Report:
    """Converts safetensors, a Hugging Face folder, a GGUF or `hf://org/repo` to the `.apr` file `dst`.

    Args:
        src: the model to read.
        dst: the file to write; it appears under its name only when complete.
        progress: called with the total bytes; returns the function to call with the bytes of each step.

    Raises:
        AprError: code "usage" for a wrong value or option. No partial output remains.
    """
    source = formats.path_text(call.src, "src")
    check_suffix(call.dst, "import", f"apr convert {source} -o {call.dst}")
    return convert(source, call.dst, options_of(call, format="apr"))


@takes(ConvertCall)
def convert_model(call: ConvertCall) -> Report:
    """Converts any readable model to any output format in one step.

    An option that does not apply to the format is a usage error.

    Args:
        src, dst: the model to read, the file or folder to write.
        progress: called with the total bytes; returns the function to call with the bytes of each step.
    """
    multiple = call.pad_vocab
    edit = None if multiple is None else partial(padded_vocabulary, multiple=multiple)
    return convert(call.src, call.dst, options_of(call), edit)


export_model = convert_model
"""Alias of convert_model, named after the command `apr export`."""


Edit = Callable[[Canonical], tuple[Canonical, list[str]]]
"""Edits a model during a conversion: returns the new model and one sentence per loss."""


def convert(
    src: PathLike,
    dst: PathLike,
    given: Mapping[str, object],
    edit: Edit | None = None,
    inputs: Sequence[PathLike] = (),
    observe: Observer | None = None,
    check: Callable[[str], None] | None = None,
) -> Report:
    """Converts with the options `given` by name; `edit` changes the model between reading and planning.

    Args:
        inputs: further files that the output depends on, besides those opened as a Source.
        observe: called while a quantization is planned.
        check: called with the path of the complete temporary file; if it raises, the output is not published.
    """
    start = time.monotonic()
    src, dst = formats.path_text(src, "src"), formats.path_text(dst, "dst")
    options = parse_options(given)
    target = find_target(dst, options.format)
    check_options(options, target)
    if options.verify and not options.plan and target.name == "gguf":
        require_llama()
    if options.verify == "logits" and edit is not None:
        raise UsageError(
            "--verify=logits compares with the source's weights, which this command changes", hint="--verify"
        )
    with ExitStack() as stack:
        opened = stack.enter_context(watch_opened())
        quantization = quantization_of(options, target.name, target.takes)
        if quantization is not None:
            quantization = replace(quantization, observe=observe)
        model, confirm, towers = stack.enter_context(_opened(src, target, options))
        stores = limit_stores(model.sources, options.disk_bytes)
        if not options.plan:
            check_target(dst, _inputs(model), options.force, folder=target.folder)
        c, output, losses = _plan(model, target, Path(dst), options, quantization, towers, edit, observe)
        if not options.follow_links:
            folder, own = parts_of(model)
            own += carried_files(c)
            check_links(folder, own)
            confirm = _both(confirm, lambda output: check_opened(folder, own, opened))
        report = _report(c, output, losses, src, dst, target, options)
        sources = [*_inputs(model), *(source.path for source in opened), *(os.fspath(path) for path in inputs)]
        if target.folder:
            names.check([layout.name for layout in output.layouts], src, allowed=options.allow_names)
            check_inputs_kept(Path(dst), [layout.name for layout in output.layouts], sources)
        else:
            for path in report.files or ([] if options.plan else [dst]):
                check_target(path, sources, options.force or options.plan)
        older = _older_outputs(report, sources) if options.force else []
        if not options.plan:
            if output.ready is not None:
                output.ready()
            report.proven = output.is_proven
            source = SourceLogits.of(c, target.name, convert) if options.verify == "logits" else None
            _write(dst, c, output, target, options, report, confirm, older, source, check)
            report.losses = losses.sentences()
            for store in stores:
                store.clear()
    report.seconds = time.monotonic() - start
    return report


def _both(first: Callable[[str], None], second: Callable[[str], None]) -> Callable[[str], None]:
    """Combines two checks of an output."""

    def check(output: str) -> None:
        first(output)
        second(output)

    return check


@contextmanager
def _opened(src: str, target: Target, options: Options) -> Iterator[tuple[Model, Callable[[str], None], Model | None]]:
    """The source, the check to run at the end, and the GGUF of towers, if any."""
    with open_checked(src, reopens=target in TARGETS) as (model, confirm):
        if options.mmproj is None or isinstance(options.mmproj, bool):
            yield model, confirm, None
            return
        with open_checked(options.mmproj, reopens=False) as (towers, unchanged):
            yield model, _both(confirm, unchanged), towers


def _older_outputs(report: Report, sources: Sequence[str]) -> list[str]:
    """Outputs of the same name, whole or split differently, that the new parts replace; adds a warning.

    Left in place, they would load as the old model. Raises RefusedError if one of them is an input.
    """
    files = [Path(path) for path in report.files]
    if not files or not is_folder(files[0].parent):
        return []
    older = older_outputs(files[0], [file.name for file in files])
    for path in (files[0].with_name(name) for name in older):
        if any(exists(source) and is_same(path, source) for source in sources):
            raise RefusedError(
                "the input is one of the older parts that this output replaces",
                path=path,
                hint="choose another output with -o",
            )
    if older:
        report.warnings.append(f"the new parts replace {plural(len(older), 'older file')}: {first_few(older)}")
    return older


def _inputs(model: Model) -> Iterator[str]:
    """The files and folders of the model, with those that an import carries."""
    yield str(model.path)
    yield from (source.path for source in model.sources)
    if (joined := model.native_as(JoinedNative)) is not None:
        yield from (str(joined.manifest), str(joined.manifest.parent))
    if (folder := model.native_as(HfNative)) is not None:
        carried = (name for name in folder.further_files() if not name.endswith(hf_files.WEIGHT_SUFFIXES))
        yield from (str(folder.folder / name) for name in (*folder.own_names(), *carried))


def _plan(
    model: Model,
    target: Target,
    dst: Path,
    options: Options,
    quantization: Quantization | None,
    towers: Model | None,
    edit: Edit | None,
    observe: Observer | None,
) -> tuple[Canonical, Output, Losses]:
    losses = Losses()
    if edit is None and (output := _copy(model, target, dst, options)) is not None:
        return Canonical(model, None, model.hparams, None, {}, {}, {}, tuple(model.warnings)), output, losses
    if model.format == "apr-v1" and model.flags.get("encrypted"):
        raise RefusedError(
            "the payload is encrypted", path=model.path, hint=f"decrypt it first: apr decrypt {model.path} -o PLAIN.apr"
        )
    require_config(model, options.allow_no_config, options.arch)
    c = canonical(
        model,
        arch=options.arch,
        allow_unmapped=options.allow_unmapped,
        decoding=_decoding(options, target, edited=edit is not None),
        base=_base(model, options),
    )
    if options.no_mtp:
        c, drafts = without_mtp_layers(c)
        losses.others += [f"{part} dropped (--no-mtp)" for part in drafts]
    c = with_tower(c, towers) if towers is not None else c
    c = with_files(c, options.carry_bytes, [dst], allow_names=options.allow_names)
    losses.others += [*c.packs.losses(), *c.left_out]
    losses.changes += c.packs.changes()
    c = _override(_with_target(with_dims_of_tensors(c), options), options)
    if edit is not None:
        c, lost = edit(c)
        losses.others += lost
    c = replace(c, warnings=(*c.warnings, *check_before_writing(c, options.allow_unmapped)))
    return c, target.layouts(c, Work(dst.name, options, losses, quantization, observe)), losses


def _base(model: Model, options: Options) -> Base | None:
    """The base model of the adapter `model`. Raises UsageError for --base without an adapter."""
    if is_adapter(model):
        return find_base(model, options.base)
    if options.base is not None:
        raise UsageError("--base applies to adapters, and the input is not an adapter", path=model.path)
    return None


def _copy(model: Model, target: Target, dst: Path, options: Options) -> Output | None:
    """Copies an `.apr`, to one file or to shards, if no option changes it; else None."""
    if not options.changes_nothing() or options.verify:
        return None
    if target.name == "apr":
        return apr.copy(model, dst.name)
    return apr.copy_shards(model, options) if target.name == "apr-shards" else None


def _decoding(options: Options, target: Target, *, edited: bool) -> Decoding:
    """Quantized weights are decoded for a GGUF, for edits and requantization, and for every dtype except "keep"."""
    dtype, gguf = options.dtype, target.name == "gguf"
    if dtype == "keep":
        otherwise = any(value is not None for value in (options.bits, options.group_size, options.recipe))
        relaid, stored = target.name in LAYOUTS, target.name == "modelopt"
        decode = gguf or otherwise or edited or relaid
        return Decoding(decode=decode, keep_blocks=gguf, keep_scales=not edited, keep_stored=stored)
    scheme = serving_scheme(dtype, target.name) if target.name in FOLDERS else None
    if scheme is not None:
        return Decoding(decode=True, keep_stored=scheme.has_tensor_scale)
    # Blocks that a GGUF supports are kept unless floats are requested.
    return Decoding(decode=True, dtype="F32", keep_blocks=find_preset(dtype) is not None)


def _with_target(c: Canonical, options: Options) -> Canonical:
    """`c`, a draft model, with the config values and tokenizer of its target model."""
    if options.target_model is None:
        return c
    folder = Path(options.target_model)
    config = folder / "config.json"
    if not is_file(config):
        raise NotFoundError("--target-model must be a model folder: no config.json found", path=folder)
    hparams = hp.with_target(c.hparams, c.arch, hf_files.read_config(config))
    if hparams is None:
        raise RefusedError(
            f"{c.hparams.hf_architecture or c.hparams.architecture} is not a draft model",
            path=c.model.path,
            hint="--target-model applies to draft models (EAGLE-3, DFlash, ...)",
        )
    return replace(c, hparams=hparams, tokenizer=read_tokenizer(folder))


def _override(c: Canonical, options: Options) -> Canonical:
    """`c` with the user's provenance and tokenizer."""
    stated = provenance.from_flags({name: getattr(options, name) for name in provenance.FLAGS})
    general = provenance.without_license(c.general) if "license" in stated else c.general
    tokenizer = c.tokenizer if options.tokenizer is None else read_tokenizer(Path(options.tokenizer))
    if options.no_tokenizer:
        tokenizer = Tokenizer(NO_VOCABULARY, [])
    return replace(c, stated=stated, info=c.info | stated, general=general, tokenizer=tokenizer)


def _n_params(c: Canonical, output: Output) -> int | None:
    """Parameters of the output; None if they equal the elements of its tensors."""
    packed = c.packs.weights and not c.packs.decoded
    return c.n_params if packed and output.n_params is None else output.n_params


def _report(
    c: Canonical, output: Output, losses: Losses, src: str, dst: str, target: Target, options: Options
) -> Report:
    report = Report(
        source=src, output=dst, format=target.container, label=target.label, architecture=c.hparams.architecture,
        tensor_count=len(output.tensors), input_bytes=c.model.size_bytes,
        output_bytes=sum(layout.n_bytes for layout in output.layouts), dtypes=dtype_totals(output.tensors),
        param_count=_n_params(c, output), lossless=output.lossless, warnings=[*c.warnings, *losses.warnings],
        losses=losses.sentences(), differences=losses.differences, changes=losses.changes, plan=options.plan,
        signature=c.model.signature.sentence() if c.model.signature is not None else None,
    )  # fmt: skip
    if target.folder or len(output.layouts) > 1:
        report.written = {layout.name: layout.n_bytes for layout in output.layouts}
    if not target.folder and len(output.layouts) > 1:
        report.files = [str(Path(dst).with_name(layout.name)) for layout in output.layouts]
        report.output = report.files[0]
    if options.plan:
        flow = flow_for(options.threads, options.memory_bytes, output.tensors)
        report.memory_bytes = peak_bytes(flow, output.tensors)
        report.tensors = [
            PlannedTensor(name=t.name, dtype=t.dtype, shape=[*t.shape], size_bytes=t.n_bytes) for t in output.tensors
        ]
    return report


def _write(
    dst: str,
    c: Canonical,
    output: Output,
    target: Target,
    options: Options,
    report: Report,
    confirm: Callable[[str], None],
    older: Sequence[str],
    source: SourceLogits | None,
    more: Callable[[str], None] | None,
) -> None:
    flow = flow_for(options.threads, options.memory_bytes, output.tensors)
    how = WriteOptions(options.force, options.progress, flow, options.fsync, confirm)
    if output.write is not None:
        output.write(dst, how)
        return

    def check(temporary: str) -> None:
        found = verify_gguf(temporary, embedding_rows(c), report.output) if target.name == "gguf" else Verification()
        if source is not None:
            dtypes = {tensor.dtype for tensor in output.tensors if len(tensor.shape) > 1}
            found["logits"] = source.compare(temporary, report.output, dtypes, keeps=options.dtype == "keep")
        report.verify = found

    def checked(temporary: str) -> None:
        if options.verify:
            check(temporary)
        if more is not None:
            more(temporary)

    if target.folder:
        write_folder(dst, output.layouts, how, checked)
        return
    if len(output.layouts) > 1:
        folder = os.path.dirname(os.path.abspath(dst))
        write_parts(folder, output.layouts, how, checked, [glob.escape(name) for name in older])
        return
    write_file(dst, output.layouts[0], how, checked)
