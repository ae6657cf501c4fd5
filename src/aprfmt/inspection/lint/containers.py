"""Rules about containers and files: GGUF keys, folders, shards, .apr."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from aprfmt.canonical.model_kinds import is_adapter
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.formats import apr2
from aprfmt.formats.gguf import DEFAULT_ALIGNMENT, LOADER_NAME_BYTES
from aprfmt.formats.hfdir import HfNative
from aprfmt.formats.safetensors import SafetensorsNative
from aprfmt.inspection.lint.common import (
    BLOCK_TYPES,
    NO_GGUF,
    fail,
    gguf_of,
    is_main,
    main_dtype,
    matrices_of,
    of_gguf,
    quoted,
    set_key,
    skip,
)
from aprfmt.inspection.package import folder_of, outside_files, refused_names
from aprfmt.inspection.validate import Check, Subject
from aprfmt.io.links import FOLLOW
from aprfmt.io.names import ALLOW
from aprfmt.io.source import is_file
from aprfmt.model import Model, Tensor
from aprfmt.text import first_few, plural

_LARGEST_FILE = 50_000_000_000
_KEY = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*")
_QUANT_IN_NAME = re.compile(
    r"(?:^|[-._])((?:IQ|TQ|Q)\d_(?:K_[SML]|K|[01]|X{1,2}S|NL|[SML])|MXFP4(?:_MOE)?|BF16|F16|FP16|F32|FP32)(?=$|[-._])",
    re.IGNORECASE,
)
_FLOATS = ("F32", "F16", "BF16", "F64")


# --- GGUF ---


def old_version(subject: Subject) -> Iterator[Check]:
    """`gguf.version`: the file is GGUF version 3."""
    found = gguf_of(subject)
    if found is None:
        yield skip(NO_GGUF)
    elif found.parts[0].version < 3:
        fix = f"apr convert {quoted(subject.model)} -o NEW.gguf --dtype keep"
        yield fail(f"GGUF version {found.parts[0].version}; the current version is 3", fix)


def alignment(subject: Subject) -> Iterator[Check]:
    """`gguf.alignment`: tensors are aligned to 32 bytes or a multiple."""
    found = gguf_of(subject)
    if found is None:
        yield skip(NO_GGUF)
        return
    for part in found.parts:
        if part.alignment % 8 or part.alignment < DEFAULT_ALIGNMENT:
            message = f"tensors are aligned to {part.alignment} bytes; kernels expect {DEFAULT_ALIGNMENT}"
            yield fail(message, f"apr stamp {quoted(subject.model)} -o NEW.gguf --unset general.alignment")


@of_gguf
def key_names(subject: Subject) -> Iterator[Check]:
    """`gguf.key-names`: keys are lower_snake_case with dots."""
    odd = [key for key in subject.model.metadata if _KEY.fullmatch(key.replace("-", "_")) is None]
    if odd:
        fix = f"apr stamp {quoted(subject.model)} --in-place --unset {shlex.quote(odd[0])}"
        message = f"{plural(len(odd), 'key')} not in lower_snake_case with dots: {first_few(map(repr, odd))}"
        yield fail(message, fix)


@of_gguf
def quantization_version(subject: Subject) -> Iterator[Check]:
    """`gguf.quantization-version`: a quantized file has general.quantization_version."""
    blocks = {t.dtype for t in subject.model.tensors.entries} & BLOCK_TYPES
    if blocks and "general.quantization_version" not in subject.model.metadata:
        fix = set_key(subject.model, "general.quantization_version:u32", "2")
        message = f"has {first_few(sorted(blocks))} but lacks general.quantization_version"
        yield fail(message, fix)


def file_type(file_types: Mapping[int, str], subject: Subject) -> Iterator[Check]:
    """`gguf.file-type-mismatch`: general.file_type is the type of most weights."""
    matrices = matrices_of(subject.model)
    if gguf_of(subject) is None or not is_main(subject) or not matrices:
        yield skip("not a GGUF model")
        return
    number, main = subject.model.metadata.get("general.file_type"), main_dtype(matrices)
    known = next((n for n, dtype in file_types.items() if dtype == main), None)
    fix = set_key(subject.model, "general.file_type:u32", str(known)) if known is not None else None
    if number is None:
        yield fail(f"general.file_type is missing; most weights are {main}", fix)
        return
    stated = file_types.get(number) if isinstance(number, int) else None
    if stated is not None and not _is_made_of(matrices, stated):
        yield fail(f"general.file_type {number} means {stated}; most weights are {main}", fix)


def _is_made_of(matrices: Sequence[Tensor], dtype: str) -> bool:
    """Whether a preset of that main type can have produced them: rows that its blocks do not divide get other types."""
    if dtype in _FLOATS:
        return main_dtype(matrices) == dtype
    return any(t.dtype == dtype for t in matrices)


def quant_suffix(presets: Callable[[str], str | None], subject: Subject) -> Iterator[Check]:
    """`name.quant-suffix`: the quantization in the file's name is the actual one."""
    model = subject.model
    stem, matrices = model.path.resolve().stem, matrices_of(model)
    named = _QUANT_IN_NAME.findall(stem)
    if not matrices or not named or not is_main(subject):
        yield skip("the file name has no quantization type")
        return
    word = named[-1].upper().replace("FP", "F") if named[-1].upper() in ("FP16", "FP32") else named[-1].upper()
    dtype = word if word in _FLOATS else presets(word)
    if dtype is not None and not _is_made_of(matrices, dtype):
        main = main_dtype(matrices)
        new = model.path.resolve().name.replace(named[-1], str(main))
        yield fail(
            f"the file name says {named[-1]}, but most weights are {main}",
            f"mv {quoted(model)} {shlex.quote(str(model.path.with_name(new)))}",
        )


@of_gguf
def long_names(subject: Subject) -> Iterator[Check]:
    """`gguf.tensor-name-length`: names of tensors have at most 63 bytes."""
    names = [t.name for t in subject.model.tensors.entries]
    long = [name for name in names if len(name.encode("utf-8", "surrogateescape")) > LOADER_NAME_BYTES]
    if long:
        message = f"{plural(len(long), 'tensor')} with a name over {LOADER_NAME_BYTES} bytes: {first_few(long)}"
        yield fail(message, "shorten the names in the program that writes the file: llama.cpp refuses longer ones")


@of_gguf
def no_imatrix(subject: Subject) -> Iterator[Check]:
    """`gguf.no-imatrix`: a file below four bits was quantized with an importance matrix."""
    matrices = matrices_of(subject.model)
    low = [t for t in matrices if (row := DTYPES[t.dtype]).kind == "ggml" and 8 * row.block_bytes / row.block < 4]
    trained = ("TQ1_0", "TQ2_0", "Q1_0", "Q2_0")  # the weights have no more bits
    low = [t for t in low if t.dtype not in trained]
    keys = [key for key in subject.model.metadata if key.startswith("quantize.imatrix.")]
    if 2 * len(low) > len(matrices) and not keys:
        fix = "apr quantize ORIGINAL TYPE -o NEW.gguf --imatrix FILE"
        message = f"{plural(len(low), 'tensor')} below four bits without a recorded importance matrix"
        yield fail(message, fix)


# --- files ---


def _sizes(model: Model) -> list[tuple[str, int]]:
    return [(Path(source.path).name, source.size) for source in model.sources]


def unbalanced(subject: Subject) -> Iterator[Check]:
    """`shards.unbalanced`: files of a split model have similar sizes."""
    sizes = _sizes(subject.model)
    if len(sizes) < 3:
        yield skip("fewer than three weight files")
        return
    largest = max(size for _, size in sizes)
    small = [name for name, size in sizes[:-1] if size < largest / 4]
    if small:
        fix = f"apr convert {quoted(subject.model)} -o NEW --shard-size {max(1, largest // 10**6)}MB"
        yield fail(f"{first_few(small)}: less than a quarter of the largest file's size", fix)


def large(subject: Subject) -> Iterator[Check]:
    """`files.too-large`: no file is larger than 50 GB."""
    large = [name for name, size in _sizes(subject.model) if size > _LARGEST_FILE]
    if large:
        fix = f"apr convert {quoted(subject.model)} -o NEW --shard-size 40GB"
        yield fail(f"{first_few(large)}: over 50 GB in one file", fix)


def pickle(subject: Subject) -> Iterator[Check]:
    """`files.pickle`: weights are safetensors, not pickles."""
    pickles = [name for name, _ in _sizes(subject.model) if name.endswith((".bin", ".pt", ".pth"))]
    if pickles and subject.model.convention == "hf":
        fix = f"apr convert {quoted(subject.model)} -o NEW --format hf --dtype keep"
        message = f"{first_few(pickles)}: loading a pickle can run code, and needs all weights in memory"
        yield fail(message, fix)


def odd_file_names(subject: Subject) -> Iterator[Check]:
    """`files.names`: file names are safe on every system."""
    if (folder := folder_of(subject.model)) is None:
        yield skip("not a model folder")
    elif found := refused_names(folder):
        what = f"files that a conversion would skip: {first_few([*map(str, found)])}"
        yield fail(what, f"rename or delete them; {ALLOW} carries the files that are safe")


def outside_links(subject: Subject) -> Iterator[Check]:
    """`files.links`: no link leads out of the folder."""
    if (folder := folder_of(subject.model)) is None:
        yield skip("not a model folder")
    elif found := outside_files(folder):
        what = f"symlinks pointing outside the folder: {first_few(found)}"
        yield fail(what, f"replace the symlinks with the files, or convert with {FOLLOW}")


def no_format(subject: Subject) -> Iterator[Check]:
    """`safetensors.no-format`: safetensors files state their format."""
    native, folder = subject.model.native_as(SafetensorsNative), subject.model.native_as(HfNative)
    headers = {subject.model.path.name: native.metadata} if native is not None else {}
    if folder is not None:
        headers = {name: s.metadata for name, s in folder.shards.items() if name.endswith(".safetensors")}
    if not headers:
        yield skip("not a safetensors file")
        return
    bare = [name for name, metadata in headers.items() if "format" not in metadata]
    if bare:
        fix = f"apr convert {quoted(subject.model)} -o NEW --format hf --dtype keep"
        yield fail(f"{first_few(bare)}: __metadata__ lacks `format`, which transformers expects", fix)


def _config(subject: Subject) -> Mapping[str, object] | None:
    native = subject.model.native_as(HfNative)
    is_one = native is not None and native.config is not None and not is_adapter(subject.model)
    return subject.model.metadata if is_one else None


def config_dtype(subject: Subject) -> Iterator[Check]:
    """`config.dtype-mismatch`: config.json states the dtype of the weights."""
    config, main = _config(subject), main_dtype(matrices_of(subject.model))
    stated = config and (config.get("dtype") or config.get("torch_dtype"))
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    if (
        config is None
        or not isinstance(stated, str)
        or stated not in names
        or "quantization_config" in config
        or main not in names.values()
    ):
        yield skip("config.json has no dtype of unquantized weights")
    elif names[stated] != main:
        dtype = names[stated].lower()
        fix = f"apr convert {quoted(subject.model)} -o NEW --format hf --dtype {dtype}, or set {main} in config.json"
        yield fail(f"config.json says {stated}, but most weights are {main}", fix)


def remote_code(subject: Subject) -> Iterator[Check]:
    """`config.remote-code`: no code of the repository is needed."""
    config = _config(subject)
    if config is None:
        yield skip("no config.json")
    elif config.get("auto_map"):
        message = (
            "config.json loads code from the repository (auto_map), which runs on every machine that loads the model"
        )
        yield fail(message, "use a built-in transformers class if one exists, and remove auto_map")


def no_generation_config(subject: Subject) -> Iterator[Check]:
    """`generation.config-missing`: a folder has a generation config."""
    native, name = subject.model.native_as(HfNative), subject.model.hparams.hf_architecture or ""
    is_folder = native is not None and not native.alone and not is_adapter(subject.model)
    if native is None or not is_folder or not name.endswith(("ForCausalLM", "ForConditionalGeneration")):
        yield skip("not a folder with a generative model")
    elif not is_file(native.folder / "generation_config.json"):
        fix = "copy the original generation_config.json into the folder (GenerationConfig.save_pretrained)"
        yield fail("no generation_config.json: each program picks its own sampling and end tokens", fix)


def slow_tokenizer(subject: Subject) -> Iterator[Check]:
    """`tokenizer.no-fast-file`: a folder has a tokenizer.json."""
    native = subject.model.native_as(HfNative)
    if native is None or native.alone:
        yield skip("not a model folder")
    elif is_file(native.folder / "tokenizer.model") and not is_file(native.folder / "tokenizer.json"):
        fix = f"apr convert {quoted(subject.model)} -o NEW --format hf writes one"
        yield fail("tokenizer.model without tokenizer.json: each program converts it in its own way", fix)


def apr_footer(subject: Subject) -> Iterator[Check]:
    """`apr.no-checksum`: an .apr ends with its checksum."""
    native = apr2.native_of(subject.model)
    if native is None or len(subject.model.sources) > 1:
        yield skip("not an .apr file")
    elif native.source.size - native.index.data_end < 4:
        fix = f"apr convert {quoted(subject.model)} -o NEW.apr --dtype keep"
        yield fail("the file has no checksum, so damage cannot be detected", fix)


def apr_alignment(subject: Subject) -> Iterator[Check]:
    """`apr.alignment`: tensors of an .apr begin at multiples of 64."""
    native = apr2.native_of(subject.model)
    if native is None:
        yield skip("not an .apr file")
    elif not native.index.is_aligned:
        fix = f"apr convert {quoted(subject.model)} -o NEW.apr --dtype keep"
        yield fail("tensor offsets are not multiples of 64 bytes: tensors cannot be memory-mapped", fix)


def apr_vocab_flag(subject: Subject) -> Iterator[Check]:
    """`apr.vocabulary-flag`: an .apr with a vocabulary says so in its header."""
    native = apr2.native_of(subject.model)
    if native is None:
        yield skip("not an .apr file")
    elif subject.model.metadata.get("tokenizer.vocabulary") and not subject.model.flags.get("has_vocab"):
        fix = f"apr convert {quoted(subject.model)} -o NEW.apr --dtype keep"
        yield fail("the header flag HAS_VOCAB is not set, but the file has a vocabulary", fix)
