"""Small files that mean gigabytes or hours, and the process that measures what a command does with each.

    python tests/support/bombs.py FOLDER NAME...

For each of BOMBS of these names a child builds it in FOLDER, is measured at its command, and a JSON line tells the exit
code, the peak of the resident memory, the processor time and the last line of standard error.
"""

from __future__ import annotations

import base64
import gzip
import importlib
import json
import lzma
import os
import resource
import shutil
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MIB = 1 << 20
DEMO = Path(__file__).resolve().parents[2] / "src/aprfmt/cli/demo-tiny.gguf"
STRING, ARRAY, U8, U32 = 8, 9, 0, 4


@dataclass(frozen=True)
class Bomb:
    """What is built in a folder, giving the words of a command line; and the exit codes that are right."""

    build: Callable[[Path], list[str]]
    codes: tuple[int, ...] = (4,)
    is_long: bool = False


BOMBS: dict[str, Bomb] = {}


def bomb(*codes: int, is_long: bool = False) -> Callable[[Callable[[Path], list[str]]], Callable[[Path], list[str]]]:
    """Adds a builder to the table under its name."""

    def add(build: Callable[[Path], list[str]]) -> Callable[[Path], list[str]]:
        BOMBS[build.__name__] = Bomb(build, codes or (4,), is_long)
        return build

    return add


def write(path: Path, data: bytes, zeros: int = 0, end: bytes = b"") -> Path:
    """A file of `data`, a hole of so many bytes, and `end`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        file.truncate(len(data) + zeros)
        file.seek(0, os.SEEK_END)
        file.write(end)
    return path


# --- GGUF ---


def gguf(folder: Path, entry: bytes, zeros: int, *, n_keys: int = 1, n_tensors: int = 0, end: bytes = b"") -> list[str]:
    head = b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_keys) + entry
    return ["inspect", str(write(folder / "m.gguf", head, zeros, end + bytes(64)))]


def key(name: str, kind: int) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind)


@bomb()
def gguf_name_of_zeros(folder: Path) -> list[str]:
    return gguf(folder, key("general.name", STRING) + struct.pack("<Q", 60_000_000), 60_000_000)


@bomb()
def gguf_template(folder: Path) -> list[str]:
    return gguf(folder, key("tokenizer.chat_template", STRING) + struct.pack("<Q", 250 * MIB), 250 * MIB)


@bomb()
def gguf_empty_strings(folder: Path) -> list[str]:
    return gguf(folder, key("tokenizer.ggml.tokens", ARRAY) + struct.pack("<IQ", STRING, 7_000_000), 56_000_000)


@bomb()
def gguf_bytes(folder: Path) -> list[str]:
    return gguf(folder, key("tokenizer.ggml.precompiled_charsmap", ARRAY) + struct.pack("<IQ", U8, 60 * MIB), 60 * MIB)


@bomb()
def gguf_numbers(folder: Path) -> list[str]:
    return gguf(folder, key("tokenizer.ggml.scores", ARRAY) + struct.pack("<IQ", U32, 15_000_000), 60_000_000)


@bomb()
def gguf_empty_arrays(folder: Path) -> list[str]:
    return gguf(folder, key("general.tags", ARRAY) + struct.pack("<IQ", ARRAY, 4_500_000), 54_000_000)


@bomb()
def gguf_tensors_without_names(folder: Path) -> list[str]:
    return gguf(folder, b"", 24 << 18, n_keys=0, n_tensors=1 << 18)


@bomb()
def gguf_too_many_tensors(folder: Path) -> list[str]:
    return gguf(folder, b"", 24 << 20, n_keys=0, n_tensors=1 << 20)


@bomb(0, is_long=True)
def gguf_long_keys(folder: Path) -> list[str]:
    n = 900
    names = (struct.pack("<Q", 60_000) + struct.pack("<I", i) + bytes(59_996) for i in range(n))
    return gguf(folder, b"".join(name + struct.pack("<IB", U8, 0) for name in names), 0, n_keys=n)


@bomb(is_long=True)
def gguf_tensor_names_of_zeros(folder: Path) -> list[str]:
    n = 900
    names = (struct.pack("<Q", 60_000) + struct.pack("<I", i) + bytes(59_996) for i in range(n))
    return gguf(folder, b"".join(name + struct.pack("<IIQ", 0, 0, 32 * i) for i, name in enumerate(names)), 32 * n,
        n_keys=0, n_tensors=n)  # fmt: skip


@bomb(0, is_long=True)
def gguf_strings_of_four_bytes(folder: Path) -> list[str]:
    n = 4_800_000
    texts = struct.pack("<Q", 4) + "\U0001f600".encode()
    data = texts * n
    return gguf(folder, key("tokenizer.ggml.tokens", ARRAY) + struct.pack("<IQ", STRING, n) + data, 0)


# --- safetensors, folders ---


def shard(folder: Path, head: bytes, zeros: int = 0, end: bytes = b"") -> list[str]:
    n = len(head) + zeros + len(end)
    return ["inspect", str(write(folder / "model.safetensors", struct.pack("<Q", n) + head, zeros, end))]


@bomb()
def safetensors_header_of_zeros(folder: Path) -> list[str]:
    return shard(folder, b"{", 60_000_000)


@bomb()
def safetensors_long_header(folder: Path) -> list[str]:
    return shard(folder, b"{", 99_000_000)


@bomb()
def safetensors_objects(folder: Path) -> list[str]:
    return shard(folder, b'{"a":[' + b"{}," * 3_000_000 + b"{}]}")


@bomb(is_long=True)
def safetensors_long_name(folder: Path) -> list[str]:
    return shard(folder, b'{"' + "\U0001f600".encode() * 12_000_000 + b'":{}}')


def model_folder(folder: Path) -> Path:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    head = json.dumps({"model.embed_tokens.weight": entry}).encode()
    write(folder / "config.json", b'{"model_type":"llama","architectures":["LlamaForCausalLM"]}')
    write(folder / "model.safetensors", struct.pack("<Q", len(head)) + head + bytes(4))
    return folder


def with_file(folder: Path, name: str, data: bytes, zeros: int = 0, end: bytes = b"") -> list[str]:
    write(model_folder(folder) / name, data, zeros, end)
    return ["inspect", str(folder)]


@bomb()
def config_of_zeros(folder: Path) -> list[str]:
    return with_file(folder, "config.json", b"{", 2 << 30)


@bomb()
def config_of_lists(folder: Path) -> list[str]:
    return with_file(folder, "config.json", b'{"a":' + b"[" * 8_000_000 + b"]" * 8_000_000 + b"}")


@bomb()
def config_of_digits(folder: Path) -> list[str]:
    return with_file(folder, "config.json", b'{"hidden_size":' + b"1" * 20_000_000 + b"}")


@bomb()
def template_file_of_zeros(folder: Path) -> list[str]:
    write(folder / "tokenizer.json", b'{"model":{"type":"BPE","vocab":{"a":0},"merges":[]}}')
    return with_file(folder, "chat_template.jinja", b"", 60_000_000)


@bomb()
def tokenizer_with_one_long_string(folder: Path) -> list[str]:
    return with_file(folder, "tokenizer.json", b'{"a":"' + "\U0001f600".encode() + b"x" * (60 * MIB) + b'"}')


@bomb()
def tokenizer_of_lists(folder: Path) -> list[str]:
    return with_file(folder, "tokenizer.json", b'{"model":{"vocab":[' + b"[]," * 5_000_000 + b"[]]}}")


@bomb(is_long=True)
def sentencepiece_of_empty_pieces(folder: Path) -> list[str]:
    return with_file(folder, "tokenizer.model", b"\x0a\x00" * 2_000_000)


@bomb()
def ranks_of_long_tokens(folder: Path) -> list[str]:
    tokens = [bytes([first]) + b"a" * n for first in range(97, 103) for n in range(1000)]
    lines = (base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens))
    return with_file(folder, "qwen.tiktoken", b"".join(lines))


@bomb()
def index_of_zeros(folder: Path) -> list[str]:
    (model_folder(folder) / "model.safetensors").unlink()
    return with_file(folder, "model.safetensors.index.json", b"{", 3 << 30)


# --- APR ---


def apr(folder: Path) -> Path:
    import aprfmt

    aprfmt.import_model(DEMO, folder / "m.apr")
    return folder / "m.apr"


@bomb()
def apr_metadata_of_zeros(folder: Path) -> list[str]:
    path = apr(folder)
    with path.open("r+b") as file:
        file.seek(20)
        file.write(struct.pack("<I", 63 * MIB))
        file.truncate(4 << 30)
        sealed(file)
    return ["inspect", str(path)]


def sealed(file: BinaryIO) -> None:
    """Gives the header of an `.apr` its checksum again."""
    file.seek(0)
    head = file.read(64)
    file.seek(40)
    file.write(struct.pack("<I", zlib.crc32(head[44:], zlib.crc32(head[:40]))))


@bomb()
def apr_that_unpacks_to_a_gigabyte(folder: Path) -> list[str]:
    import zstandard

    head = bytearray(apr(folder).read_bytes()[:64])
    packer = zstandard.ZstdCompressor(level=1).compressobj()
    body = b"".join([*(packer.compress(bytes(MIB)) for _ in range(1000)), packer.flush()])
    head[6:8] = (int.from_bytes(head[6:8], "little") | 2).to_bytes(2, "little")
    with write(folder / "z.apr", bytes(head) + body).open("r+b") as file:
        sealed(file)
    return ["inspect", str(folder / "z.apr")]


def apr_with_a_hole(folder: Path, flag: int, body: bytes) -> list[str]:
    """An `.apr` whose compressed body is `body` and 900 MiB of zeros that take no room on the disk."""
    head = bytearray(apr(folder).read_bytes()[:64])
    head[6:8] = (int.from_bytes(head[6:8], "little") | flag).to_bytes(2, "little")
    with write(folder / "z.apr", bytes(head) + body, 900 * MIB).open("r+b") as file:
        sealed(file)
    return ["inspect", str(folder / "z.apr")]


@bomb()
def apr_of_zstd_with_a_hole(folder: Path) -> list[str]:
    import zstandard

    skipped = struct.pack("<II", 0x184D2A50, 900 * MIB)
    return apr_with_a_hole(folder, 2, zstandard.compress(b"a") + skipped)


@bomb()
def apr_of_lz4_with_a_hole(folder: Path) -> list[str]:
    return apr_with_a_hole(folder, 1, struct.pack("<I", 900 * MIB))


@bomb()
def apr_v1_of_lz4_with_a_hole(folder: Path) -> list[str]:
    import msgpack

    metadata = msgpack.packb({"created_at": "", "aprender_version": ""})
    size = 600 * MIB
    head = struct.pack("<4sBBHIIIBBB9x", b"APRN", 1, 0, 1, len(metadata), size + 4, size, 3, 0, 0) + metadata
    head += struct.pack("<I", size)
    crc = zlib.crc32(head)
    for _ in range(600):
        crc = zlib.crc32(bytes(MIB), crc)
    return ["inspect", str(write(folder / "v.apr", head, size, struct.pack("<I", crc)))]


def apr1_wrapper(folder: Path, algorithm: int, n_mib: int) -> list[str]:
    """A legacy wrapper of an APR1 file whose only tensor has so many MiB, a 26th of it noise."""
    import lz4.block
    import zstandard

    entry = {"name": "w", "dtype": "U8", "shape": [n_mib * MIB], "offset": 0, "size": n_mib * MIB}
    index = json.dumps([entry]).encode()
    head = b"APR1" + struct.pack("<I", 2) + b"{}" + struct.pack("<II", 1, len(index)) + index
    piece = os.urandom(40 << 10) + bytes(MIB - (40 << 10))
    crc = zlib.crc32(head)
    for _ in range(n_mib):
        crc = zlib.crc32(piece, crc)
    parts = [head, *[piece] * n_mib, struct.pack("<I", crc)]
    if algorithm == 1:
        body = lz4.block.compress(b"".join(parts))
    else:
        packer = zstandard.ZstdCompressor(level=1).compressobj()
        body = b"".join([*map(packer.compress, parts), packer.flush()])
    size = struct.pack("<I", len(head) + n_mib * MIB + 4)
    path = write(folder / "w.apr", b"APR2" + bytes([algorithm]) + size + body)
    return ["convert", str(path), "-o", str(folder / "w.safetensors")]


@bomb(0, is_long=True)
def apr_of_zstd_with_a_large_tensor(folder: Path) -> list[str]:
    return apr1_wrapper(folder, 2, 800)


@bomb(0, is_long=True)
def apr_of_lz4_with_a_large_tensor(folder: Path) -> list[str]:
    return apr1_wrapper(folder, 1, 195)


# --- data ---


def data(path: Path) -> list[str]:
    return ["data", str(path), "--model", str(DEMO)]


def pieces(n: int, text: bytes = b"x" * MIB) -> Iterator[bytes]:
    yield b'{"text": "'
    for _ in range(n):
        yield text
    yield b'"}\n'


def gz(path: Path, parts: Iterator[bytes]) -> Path:
    with gzip.open(path, "wb", compresslevel=9) as file:
        for part in parts:
            file.write(part)
    return path


@bomb(5)
def gz_with_one_line(folder: Path) -> list[str]:
    return data(gz(folder / "a.jsonl.gz", pieces(30)))


@bomb()
def gz_without_end(folder: Path) -> list[str]:
    return data(gz(folder / "a.jsonl.gz", pieces(60)))


@bomb()
def gz_text_of_zeros(folder: Path) -> list[str]:
    return data(gz(folder / "a.txt.gz", iter([bytes(MIB)] * 20)))


@bomb()
def gz_csv_with_one_line(folder: Path) -> list[str]:
    return data(gz(folder / "a.csv.gz", iter([b"text\n", *[b"x" * MIB] * 20])))


@bomb()
def gz_list_of_lists(folder: Path) -> list[str]:
    return data(gz(folder / "a.json.gz", iter([b"[[]", *[b",[]" * (MIB // 3)] * 20, b"]"])))


@bomb()
def zst_of_repeated_blocks(folder: Path) -> list[str]:
    import zstandard

    packer = zstandard.ZstdCompressor(level=19).compressobj()
    parts = [packer.compress(part) for part in pieces(64)]
    return data(write(folder / "a.jsonl.zst", b"".join([*parts, packer.flush()])))


@bomb(is_long=True)
def zst_of_blank_lines(folder: Path) -> list[str]:
    import zstandard

    packer = zstandard.ZstdCompressor(level=3).compressobj()
    parts = [packer.compress(b"\n" * MIB) for _ in range(64)]
    return data(write(folder / "a.jsonl.zst", b"".join([*parts, packer.flush()])))


@bomb()
def xz_with_a_large_window(folder: Path) -> list[str]:
    packer = lzma.LZMACompressor(filters=[{"id": lzma.FILTER_LZMA2, "preset": 0}])
    packed = bytearray(packer.compress(b'{"text": "a"}\n') + packer.flush())
    packed[16] = 36  # the properties of LZMA2: a window of a gigabyte
    packed[20:24] = zlib.crc32(packed[12:20]).to_bytes(4, "little")
    return data(write(folder / "a.jsonl.xz", bytes(packed)))


@bomb(0, is_long=True)
def jsonl_line_of_zeros(folder: Path) -> list[str]:
    return data(write(folder / "a.jsonl", b'{"text": "', 400 * MIB, b'"}\n'))


def parquet(folder: Path, column: object) -> Path:
    """A Parquet file of one column of texts; one page a column, so that a row makes a page."""
    path = folder / "a.parquet"
    pyarrow, writer = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    writer.write_table(pyarrow.table({"text": column}), path, compression="zstd", write_statistics=False)
    return path


@bomb()
def parquet_page_that_lies(folder: Path) -> list[str]:
    n_bytes = 135_000_000
    path = parquet(folder, ["x" * n_bytes])
    raw = path.read_bytes()
    told, lie = (zigzag(n) for n in (n_bytes + 4, (1 << 31) - 1))
    assert raw.count(told) == 1
    return data(write(path, raw.replace(told, lie)))


def zigzag(n: int) -> bytes:
    """A number in the headers of Parquet's pages: field of i32, then 7 bits a byte of twice the number."""
    groups = [2 * n >> shift & 0x7F for shift in range(0, (2 * n).bit_length(), 7)]
    return bytes([0x15, *(group | 0x80 for group in groups[:-1]), groups[-1]])


@bomb()
def parquet_of_one_text(folder: Path) -> list[str]:
    pyarrow = importlib.import_module("pyarrow")
    numbers = pyarrow.array([0] * 100_000, pyarrow.int32())
    return data(parquet(folder, pyarrow.DictionaryArray.from_arrays(numbers, pyarrow.array(["x" * (8 * MIB)]))))


@bomb()
def parquet_of_nothing(folder: Path) -> list[str]:
    pyarrow = importlib.import_module("pyarrow")
    return data(parquet(folder, pyarrow.nulls(20_000_000, pyarrow.string())))


# --- the rest ---


@bomb(2)
def recipe_of_aliases(folder: Path) -> list[str]:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    return ["merge", "--config", str(write(folder / "r.yml", "\n".join(lines).encode())), "-o", str(folder / "o")]


@bomb()
def log_of_zeros(folder: Path) -> list[str]:
    write(folder / "run" / "metrics.jsonl", b"{", 3 << 30)
    return ["report", str(folder / "run")]


@bomb()
def log_of_objects(folder: Path) -> list[str]:
    write(folder / "run" / "metrics.jsonl", b'{"a":{}}\n' * 1_000_000)
    return ["report", str(folder / "run")]


def vocabulary(folder: Path, text: str, **parts: object) -> list[str]:
    tokenizer: dict[str, object] = {
        "version": "1.0", "added_tokens": [], "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "normalizer": None, "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}, **parts,
    }  # fmt: skip
    return ["vocab", str(write(folder / "tokenizer.json", json.dumps(tokenizer).encode())), text]


@bomb()
def vocabulary_that_doubles(folder: Path) -> list[str]:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    return vocabulary(folder, "a", normalizer={"type": "Sequence", "normalizers": [step] * 40})


@bomb()
def vocabulary_that_panics(folder: Path) -> list[str]:
    return vocabulary(folder, "a", normalizer={"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="})


@bomb(is_long=True)
def vocabulary_of_a_slow_regex(folder: Path) -> list[str]:
    step = {"type": "Split", "pattern": {"Regex": "a*$"}, "behavior": "Isolated", "invert": False}
    return vocabulary(folder, "a" * 100_000 + "b", pre_tokenizer=step)


@bomb(is_long=True)
def vocabulary_of_long_words(folder: Path) -> list[str]:
    model = {"type": "WordPiece", "vocab": {"[UNK]": 0, "a": 1, "##a": 2}, "unk_token": "[UNK]",
        "max_input_chars_per_word": 10**9, "continuing_subword_prefix": "##"}  # fmt: skip
    return vocabulary(folder, "a" * 100_000 + "b", model=model)


# --- measuring ---


def run(name: str, folder: Path) -> dict[str, object]:
    """Builds and runs one; what it came to."""
    words = _built(name, folder)
    errors = folder / "stderr"
    began = time.monotonic()
    child = os.fork()
    if not child:
        _command(words, errors)
    _, status, used = os.wait4(child, 0)
    text = errors.read_text(errors="replace").strip()
    return {
        "name": name,
        "code": os.waitstatus_to_exitcode(status),
        "mib": used.ru_maxrss >> 10,
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "wall_s": round(time.monotonic() - began, 2),
        "said": text[:300],
    }


def _built(name: str, folder: Path) -> list[str]:
    """Builds in a child of its own, whose memory is not that of the command."""
    place = folder / "words.json"
    builder = os.fork()
    if not builder:
        code = 1
        try:
            place.write_text(json.dumps(BOMBS[name].build(folder)))
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(builder, 0)[1]) == 0
    words: list[str] = json.loads(place.read_text())
    return words


def _command(words: list[str], errors: Path) -> None:
    from aprfmt.cli.main import main

    code = 99
    try:
        with errors.open("w") as file, open(os.devnull, "w") as nothing:
            os.dup2(file.fileno(), 2)
            os.dup2(nothing.fileno(), 1)
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
        main(words)
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    import aprfmt.cli.main  # what every child would import for itself
    import aprfmt.formats.gguf
    import aprfmt.inspection.describe
    import aprfmt.texts.summary  # noqa: F401

    for wanted in sys.argv[2:]:
        place = Path(sys.argv[1], wanted)
        place.mkdir(parents=True)
        print(json.dumps(run(wanted, place)), flush=True)
        shutil.rmtree(place)
