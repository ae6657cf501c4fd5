"""import_model, export_model, convert_model: one job under three names, planned, checked, then streamed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from aprfmt import formats
from aprfmt.canonical.checks import check_before_writing, read_tokenizer, require_config, with_dims_of_tensors
from aprfmt.canonical.dtype_choice import Losses
from aprfmt.canonical.model import Canonical, canonical, embedding_rows
from aprfmt.canonical.packed import Decoding
from aprfmt.codecs.pieces import dtype_totals
from aprfmt.convert.lossless.recipe import Recipe, read_recipe
from aprfmt.convert.memory import flow_for, planned
from aprfmt.convert.options import FOLDERS, TARGETS, Options, options_of, target_format
from aprfmt.convert.quantize.mixes import find_mix
from aprfmt.convert.quantize.quantization import Quantization, asked
from aprfmt.convert.report import Report
from aprfmt.convert.targets.apr import apr_layout, source_recipe
from aprfmt.convert.targets.apr_shards import DEFAULT_SHARD_BYTES, Shard, cut, cut_canonical, write_shards
from aprfmt.convert.targets.gguf import GgufOptions, gguf_layouts
from aprfmt.convert.targets.hf import folder_layouts, safetensors_layout
from aprfmt.errors import RefusedError, UsageError
from aprfmt.formats import apr2, apr2_write
from aprfmt.formats.apr_metadata import SOURCE_KEY
from aprfmt.formats.apr_shards import JoinedNative
from aprfmt.formats.out import OutTensor
from aprfmt.io.pipe import source_jobs
from aprfmt.io.segments import FileLayout, Stream
from aprfmt.io.sink import check_target
from aprfmt.io.write import WriteOptions, check_inputs_stay, write_file, write_folder, write_parts
from aprfmt.llama.client import require_llama
from aprfmt.llama.verify import verify_gguf
from aprfmt.model import Model
from aprfmt.provenance import provenance
from aprfmt.types import PathLike

__all__ = ["Report", "convert_model", "export_model", "import_model"]


@dataclass(slots=True)
class Output:
    """What a target format made of a model: files, tensors, and whether they are the imported source itself.

    `shards` are those of a sharded `.apr`, in place of `layouts`; `ready` is called before a byte is written and
    raises when the source is not whole, which a plan does not look for.
    """

    layouts: list[FileLayout]
    tensors: list[OutTensor]
    lossless: bool
    folder: bool = False
    shards: list[Shard] | None = None
    ready: Callable[[], None] = lambda: None


def import_model(src: PathLike, dst: PathLike, **options: Any) -> Report:
    """Converts safetensors, a Hugging Face folder, a GGUF or `hf://org/repo` to an `.apr` file `dst`.

    Options: arch, dtype (a float, AprQ4, AprQ8 or a mix), and beside a mix imatrix, tensor_type ("REGEX=TYPE" texts),
    output_type, embedding_type, pure, leave_output, allow_requantize; tokenizer, license, data_source, data_license,
    allow_no_config, allow_unmapped, plan, force, progress, threads, max_memory (bytes), fsync. Raises AprError;
    nothing is left behind then.
    """
    return _convert(src, dst, options_of(options | {"format": "apr"}))


def export_model(src: PathLike, dst: PathLike, **options: Any) -> Report:
    """Converts any readable model to `format`: "gguf", "safetensors", "hf", "mlx" or "apr-shards" (else by the
    suffix of `dst`).

    Options: dtype and what goes with a mix, pre, pad_style, shard_size (bytes of a file; 0: one file), verify, arch,
    allow_unmapped, plan, force, progress, threads, max_memory (bytes), fsync.
    """
    return _convert(src, dst, options_of(options))


def convert_model(src: PathLike, dst: PathLike, **options: Any) -> Report:
    """Converts any readable model to any writable form; options of import_model and export_model together."""
    return _convert(src, dst, options_of(options))


def _convert(src: PathLike, dst: PathLike, options: Options) -> Report:
    start = time.monotonic()
    target = target_format(dst, options.format)
    if options.verify and target != "gguf":
        raise UsageError(
            "--verify loads a GGUF in llama.cpp; this output is none", hint="export to a .gguf file"
        )
    if options.shard_size and target in ("apr", "safetensors"):
        raise UsageError(
            "--shard-size does not go with an output of one file",
            hint="apr shard FILE -o DIR for .apr shards, --format hf for safetensors",
        )
    if options.verify and not options.plan:
        require_llama()
    quantization = asked(options, target)
    with formats.open(src) as model:
        if not options.plan:
            check_target(dst, _paths(model), options.force, folder=target in FOLDERS)
        c, output, losses = _plan(model, target, Path(dst), options, quantization)
        report = _report(c, output, losses, src, dst, target, options)
        if output.folder:
            check_inputs_stay(Path(dst), [layout.name for layout in output.layouts], _paths(model))
        else:
            for path in report.files:
                check_target(path, _paths(model), options.force or options.plan)
        if not options.plan:
            output.ready()
            _write(os.fspath(dst), c, output, options, report)
            report.losses = losses.sentences()
    report.seconds = time.monotonic() - start
    return report


def _paths(model: Model) -> list[str]:
    joined = model.native_as(JoinedNative)
    own = [str(joined.manifest), str(joined.manifest.parent)] if joined is not None else []
    return [str(model.path), *own, *(source.path for source in model.sources)]


def _plan(
    model: Model, target: str, dst: Path, options: Options, quantization: Quantization | None
) -> tuple[Canonical, Output, Losses]:
    losses = Losses()
    if target == "apr" and model.convention == "apr" and options.changes_nothing():
        return _copy(model, dst), _copied(model, dst), losses
    if target == "apr-shards" and apr2.native_of(model) is not None and options.changes_nothing():
        shards, lossless = cut(model, options.shard_size or DEFAULT_SHARD_BYTES)
        return _copy(model, dst), _sharded(shards, _listed(model), lossless), losses
    if model.format == "apr-v1" and model.flags.get("encrypted"):
        raise RefusedError(
            "the payload is encrypted", path=model.path, hint="read it with aprfmt.read_v1 and its password"
        )
    require_config(model, options.allow_no_config)
    c = canonical(
        model,
        arch=options.arch,
        allow_unmapped=options.allow_unmapped,
        decoding=_decoding(options.dtype, gguf=target == "gguf"),
    )
    losses.others += c.packs.losses()
    c = _override(with_dims_of_tensors(c), options)
    c = replace(c, warnings=(*c.warnings, *check_before_writing(c, options.allow_unmapped)))
    work = _Work(dst.name, options, _recipe(c, target, options), losses, quantization)
    return c, _WRITERS[target](c, work), losses


@dataclass(frozen=True, slots=True)
class _Work:
    """What a writer needs beside the model; `recipe` is there where the source's own files can be had back."""

    name: str
    options: Options
    recipe: Recipe | None
    losses: Losses
    quantization: Quantization | None


def _decoding(dtype: str, *, gguf: bool) -> Decoding:
    """Packed weights are decoded for a GGUF and for every dtype but "keep"."""
    if dtype == "keep":
        return Decoding(decode=gguf, keep_blocks=gguf)
    # Blocks that a GGUF holds as they are stay so unless floats are asked for.
    return Decoding(decode=True, dtype="F32", keep_blocks=find_mix(dtype) is not None)


def _copy(model: Model, dst: Path) -> Canonical:
    return Canonical(model, None, model.hparams, None, {}, {}, {}, tuple(model.warnings))


def _copied(model: Model, dst: Path) -> Output:
    """The same `.apr`, byte for byte, whatever its generation; shards become the file that they were cut from."""
    joined = model.native_as(JoinedNative)
    if joined is not None:
        layout = FileLayout(dst.name, apr2_write.layout_from_model(model), crc_footer=True)
        return Output([layout], _listed(model), True, ready=joined.verify)
    source = model.sources[0]
    segment = Stream(source.size, lambda: source_jobs(source, 0, source.size), dst.name)
    return Output([FileLayout(dst.name, [segment])], _listed(model), True)


def _listed(model: Model) -> list[OutTensor]:
    """The tensors of `model` for a report."""
    return [OutTensor(t.name, t.dtype, t.shape, t.n_bytes, lambda: ()) for t in model.tensors.entries]


def _sharded(shards: list[Shard], tensors: list[OutTensor], lossless: bool) -> Output:
    return Output([layout for layout, _ in shards], tensors, lossless, folder=True, shards=shards)


def _override(c: Canonical, options: Options) -> Canonical:
    """`c` with what the user says of its provenance, and the user's tokenizer."""
    stated = provenance.from_flags({name: getattr(options, name) for name in provenance.FLAGS})
    general = provenance.without_license(c.general) if "license" in stated else c.general
    tokenizer = c.tokenizer if options.tokenizer is None else read_tokenizer(Path(options.tokenizer))
    return replace(c, stated=stated, info=c.info | stated, general=general, tokenizer=tokenizer)


# Target -> the format of the sources whose files it may be.
_RECIPES = {"gguf": "gguf", "safetensors": "safetensors", "hf": "hf", "mlx": "hf"}


def _recipe(c: Canonical, target: str, options: Options) -> Recipe | None:
    value = None
    if apr2.native_of(c.model) is not None:
        value = c.model.metadata.get(SOURCE_KEY)
        others = [name for name in _RECIPES.values() if name != _RECIPES.get(target)]
        if isinstance(value, dict) and value.get("format") in others:
            return None  # of another format: to hold it against the tensors would be for nothing
    elif c.model.format == target and (target != "gguf" or options.dtype == "keep"):
        value = source_recipe(c)  # the keys of a GGUF are at hand without it
    return read_recipe(value, c.tensors, c.model.tokenizer, str(c.model.path)) if value is not None else None


def _to_apr(c: Canonical, work: _Work) -> Output:
    options, own_tokenizer = work.options, work.options.tokenizer is None
    layout, tensors, recorded = apr_layout(
        c, work.name, options.dtype, work.losses, work.quantization, with_source=own_tokenizer
    )
    whole = c.model.format in ("gguf", "hf", "safetensors") and not (c.left_out or c.parts_left_out)
    return Output([layout], tensors, recorded and whole)


def _to_shards(c: Canonical, work: _Work) -> Output:
    options = work.options
    if options.tokenizer is not None or options.dtype != "keep":
        raise UsageError("sharding changes nothing else", hint="apr import the model first, then shard it")
    shards, tensors = cut_canonical(c, options.dtype, options.shard_size or DEFAULT_SHARD_BYTES, work.losses)
    return _sharded(shards, tensors, c.model.format in ("gguf", "hf", "safetensors"))


def _to_gguf(c: Canonical, work: _Work) -> Output:
    options = work.options
    wanted = GgufOptions(
        options.dtype,
        options.pre,
        options.pad_style,
        options.allow_unmapped,
        options.shard_size,
        work.quantization,
    )
    layouts, tensors, same = gguf_layouts(c, work.name, wanted, work.recipe, work.losses)
    return Output(layouts, tensors, same)


def _to_safetensors(c: Canonical, work: _Work) -> Output:
    layout, tensors, same = safetensors_layout(c, work.name, work.options.dtype, work.recipe, work.losses)
    return Output([layout], tensors, same)


def _to_hf(c: Canonical, work: _Work, framework: str = "pt") -> Output:
    options = work.options
    layouts, tensors, same = folder_layouts(
        c, options.dtype, options.shard_size, work.recipe, work.losses, framework
    )
    return Output(layouts, tensors, same, folder=True)


_WRITERS: dict[str, Callable[[Canonical, _Work], Output]] = {
    "apr": _to_apr,
    "apr-shards": _to_shards,
    "gguf": _to_gguf,
    "safetensors": _to_safetensors,
    "hf": _to_hf,
    "mlx": partial(_to_hf, framework="mlx"),
}


def _report(
    c: Canonical, output: Output, losses: Losses, src: PathLike, dst: PathLike, target: str, options: Options
) -> Report:
    report = Report(
        source=os.fspath(src),
        output=os.fspath(dst),
        format=TARGETS[target],
        architecture=c.hparams.architecture,
        tensor_count=len(output.tensors),
        input_bytes=c.model.size_bytes,
        output_bytes=sum(layout.n_bytes for layout in output.layouts),
        dtypes=dtype_totals(output.tensors),
        lossless=output.lossless,
        warnings=[*c.warnings, *losses.warnings],
        losses=losses.sentences(),
        plan=options.plan,
    )
    if not output.folder and len(output.layouts) > 1:
        report.files = [str(Path(dst).with_name(layout.name)) for layout in output.layouts]
        report.output = report.files[0]
    if options.plan:
        flow = flow_for(options.threads, options.max_memory, output.tensors)
        report.memory_bytes = planned(flow, output.tensors)
        report.tensors = [
            {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "size_bytes": t.n_bytes}
            for t in output.tensors
        ]
    return report


def _write(dst: str, c: Canonical, output: Output, options: Options, report: Report) -> None:
    flow = flow_for(options.threads, options.max_memory, output.tensors)
    way = WriteOptions(options.force, options.progress, flow, options.fsync)
    if output.shards is not None:
        write_shards(dst, output.shards, way)
        return
    if output.folder:
        write_folder(dst, output.layouts, way)
        return

    def check(temporary: str) -> None:
        report.verify = verify_gguf(temporary, embedding_rows(c), report.output)

    checked = check if options.verify else None
    if len(output.layouts) > 1:
        folder = os.path.dirname(os.path.abspath(dst))
        write_parts(folder, output.layouts, way, checked)
        return
    write_file(dst, output.layouts[0], way, checked)
