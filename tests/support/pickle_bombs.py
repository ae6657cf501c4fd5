"""Pickles that take all memory or time there is, or ask for what is no tensor, in both containers of torch.save."""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

_HUGE = 3 << 30
_PROTO, _STOP = b"\x80\x02", b"."
_OLD_HEAD = b"".join(
    pickle.dumps(value, 2)
    for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True, "protocol_version": 1001})
)


def _nested_tuples(depth: int, width: int, *, key: bool = True) -> bytes:
    """Tuples of the same tuple: their hash, their text and their comparison take width ** depth steps."""
    body = b"K\x01\x85q\x00" + b"".join(
        b"0" + b"(" + b"h\x00" * width + b"tq\x00" for _ in range(depth)
    )  # memo 0 is the tuple of the round before
    return b"}" + body + (b"K\x01s" if key else b"0")


def _sized(opcode: bytes, size: int, form: str) -> bytes:
    return opcode + struct.pack(form, size) + b"x" * 64


def _named(module: str, name: str, arguments: bytes = b"", call: bytes = b"R") -> bytes:
    return f"c{module}\n{name}\n".encode() + b"(" + arguments + b"t" + call


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def _int(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def _dims(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_int, values)) + b"t"


def tensor(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0, elements: int = 4) -> bytes:
    """A state dict with one tensor."""
    storage = b"(" + _text("storage") + b"ctorch\nFloatStorage\n" + _text("0") + _text("cpu") + _int(elements) + b"tQ"
    rebuilt = _named(
        "torch._utils", "_rebuild_tensor_v2", storage + _int(offset) + _dims(shape) + _dims(strides) + b"\x89}"
    )
    return b"}" + _text("w") + rebuilt + b"s"


BODIES: dict[str, Callable[[], bytes]] = {
    # time
    "hash of nested tuples": lambda: _nested_tuples(40, 2),
    "hash of wide tuples": lambda: _nested_tuples(12, 9),
    "hash of tuples in a set": lambda: _named("builtins", "set", b"]" + _nested_tuples(40, 2, key=False)[1:-1] + b"a"),
    "hash in a frozenset": lambda: b"(" + _nested_tuples(40, 2, key=False)[1:-1] + b"\x91",
    "keys of nested tuples": lambda: _nested_tuples(40, 2) * 3,
    "deep tuple as a key": lambda: b"}K\x01" + b"\x85" * 400_000 + b"K\x01s",
    "many equal hashes": lambda: b"}(" + b"".join(_int(i * ((1 << 61) - 1)) + b"N" for i in range(9000)) + b"u",
    "long decimal": lambda: b"I" + b"7" * 4_000_000 + b"\n",
    "long long": lambda: b"L" + b"7" * 4_000_000 + b"L\n",
    "long float": lambda: b"F" + b"7" * 4_000_000 + b"\n",
    # memory
    "bytes of 3 GB": lambda: _sized(b"\x8e", _HUGE, "<Q"),
    "bytearray of 3 GB": lambda: _sized(b"\x96", _HUGE, "<Q"),
    "text of 3 GB": lambda: _sized(b"\x8d", _HUGE, "<Q"),
    "short text of 3 GB": lambda: _sized(b"X", _HUGE, "<I"),
    "long of 2 GB": lambda: _sized(b"\x8b", (1 << 31) - 1, "<i"),
    "frame of 3 GB": lambda: _sized(b"\x95", _HUGE, "<Q"),
    "bytearray by call": lambda: _named("builtins", "bytearray", _int(_HUGE)),
    "memo far away": lambda: b"Nr" + struct.pack("<I", (1 << 32) - 2),
    "memo by text": lambda: b"Np4000000000\n",
    "marks": lambda: b"(" * 33_000_000,
    "numbers": lambda: b"](" + b"K\x01" * 30_000_000 + b"e",
    "lists": lambda: b"](" + b"]" * 5_000_000 + b"e",
    "dicts": lambda: b"](" + b"}" * 5_000_000 + b"e",
    "texts": lambda: b"](" + b"X\x04\x00\x00\x00abcd" * 5_000_000 + b"e",
    "copies on the stack": lambda: b"](" + b"N2" * 16_000_000 + b"e",
    "deep lists": lambda: b"]" * 9_000_000 + b"a" * 8_999_999,
    "tuple of tuples": lambda: b"(" + b"N\x85" * 6_000_000 + b"t",
    "encoded text": lambda: _named("_codecs", "encode", _text("x" * 4_000_000)) * 9,
    "a storage of numbers": lambda: b"(" + b"K\x01" * 9 + b"tQ",
    # shapes that do not fit
    "tensor of 2**60": lambda: tensor((1 << 60,), (1,)),
    "tensor of many dims": lambda: tensor((1,) * 5000, (1,) * 5000),
    "tensor beyond its storage": lambda: tensor((8,), (1,)),
    "offset beyond its storage": lambda: tensor((2,), (1,), offset=3),
    "negative shape": lambda: tensor((-4,), (1,)),
    "overflowing shape": lambda: tensor((1 << 40, 1 << 40), (1 << 40, 1)),
    "repeated rows": lambda: tensor((1 << 30, 4), (0, 1)),
    "storage of 2**60": lambda: tensor((1 << 59,), (1,), elements=1 << 60),
    # calls
    "posix.system": lambda: _named("posix", "system", _text("touch {marker}")),
    "builtins.eval": lambda: _named("builtins", "eval", _text("open('{marker}', 'w')")),
    "eval of Python 2": lambda: _named("__builtin__", "eval", _text("open('{marker}', 'w')")),
    "subprocess.Popen": lambda: _named("subprocess", "Popen", _text("touch {marker}")),
    "builtins.getattr": lambda: _named("builtins", "getattr", b"ctorch\nTensor\n" + _text("__class__")),
    "a dotted name": lambda: b"\x80\x04" + b"\x8c\x05torch\x8c\x0fTensor.__init__\x93",
    "a method of OrderedDict": lambda: b"\x80\x04" + b"\x8c\x0bcollections\x8c\x14OrderedDict.fromkeys\x93",
    "torch.load": lambda: _named("torch", "load", _text("x")),
    "torch.hub.load": lambda: _named("torch.hub", "load", _text("x")),
    "NEWOBJ of a class": lambda: b"cbuiltins\nobject\n)\x81",
    "INST": lambda: b"(ios\nsystem\n",
    "OBJ": lambda: b"(cos\nsystem\n" + _text("touch {marker}") + b"o",
    "an extension code": lambda: b"\x82\x01",
    "a changed global": lambda: b"ccollections\nOrderedDict\n(N}" + _text("call") + b"ctorch\nSize\nstb",
}  # fmt: skip


def _zip(body: bytes, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", _PROTO + body + _STOP)
        file.writestr("archive/byteorder", "little")
        file.writestr("archive/data/0", bytes(16))


def _old(body: bytes, path: Path) -> None:
    keys = pickle.dumps(["0"], 2)
    path.write_bytes(_OLD_HEAD + _PROTO + body + _STOP + keys + struct.pack("<q", 4) + bytes(16))


FORMS: dict[str, Callable[[bytes, Path], None]] = {"zip": _zip, "old": _old}


def write(name: str, form: str, path: Path, marker: Path) -> None:
    """Writes one of BODIES in one of FORMS; a call that is made makes the file `marker`."""
    FORMS[form](_with_marker(BODIES[name](), str(marker).encode()), path)


def _with_marker(body: bytes, marker: bytes) -> bytes:
    at = body.find(b"{marker}")
    if at < 0:
        return body
    start = body.rfind(b"X", 0, at)  # the text that it is part of, after its length
    (size,) = struct.unpack_from("<I", body, start + 1)
    text = body[start + 5 : start + 5 + size].replace(b"{marker}", marker)
    return body[:start] + b"X" + struct.pack("<I", len(text)) + text + body[start + 5 + size :]
