"""Model files written tensor by tensor, whatever the tensors are, and what may be wrong with them.

No writer of the package is used: it would refuse most of this.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import aprfmt
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.formats.gguf import GgufNative
from aprfmt.formats.gguf_fields import GgufType
from aprfmt.formats.gguf_write import encode_kv


@dataclass(frozen=True)
class Raw:
    """One stored tensor; the shape is row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def shaped(self, *shape: int) -> Raw:
        """The tensor with another shape, and as many bytes as that takes."""
        n = prod(shape) * len(self.data) // max(1, prod(self.shape))
        return replace(self, shape=shape, data=(self.data * (n // max(1, len(self.data)) + 1))[:n])


@dataclass
class Odd:
    """A model in pieces: `write` puts them together.

    Attributes:
        kind: "gguf", "hf" for a folder, or "safetensors" for its weights alone.
        tensors: in file order.
        config: config.json of a folder.
        entries: the encoded key-value pairs of a GGUF, by key.
        types: what they were read as.
        files: other files of a folder.
    """

    kind: str
    tensors: list[Raw]
    config: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, bytes] = field(default_factory=dict)
    types: dict[str, GgufType] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)

    def set(self, key: str, kind: Any, value: object) -> None:
        """Sets a key of a GGUF."""
        self.entries[key] = encode_kv(key, kind, value)

    def write(self, folder: Path) -> Path:
        """Writes the model into the empty `folder`; returns what is to be opened."""
        if self.kind == "gguf":
            path = folder / "m.gguf"
            path.write_bytes(gguf_bytes(list(self.entries.values()), self.tensors))
            return path
        folder.mkdir(exist_ok=True)
        path = folder / "model.safetensors"
        path.write_bytes(safetensors_bytes(self.tensors))
        if self.kind == "safetensors":
            return path
        (folder / "config.json").write_text(json.dumps(self.config))
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        return folder


def read(source: Path, kind: str) -> Odd:
    """A sound model in pieces; of a folder "hf" or "safetensors", of a file "gguf"."""
    with aprfmt.open(source) as model:
        tensors = [Raw(t.name, t.dtype, t.shape, bytes(t.raw())) for t in model.tensors.entries]
        if (native := model.native_as(GgufNative)) is not None:
            kv = native.parts[0].kv
            entries = {key: bytes(kv.raw(key)) for key in kv}
            return Odd(kind, tensors, entries=entries, types={key: kv.entries[key].type for key in kv})
    config = json.loads((source / "config.json").read_text())
    kept = {p.name: p.read_bytes() for p in source.iterdir() if p.name not in ("config.json", "model.safetensors")}
    return Odd(kind, tensors, config, files=kept)


def gguf_bytes(entries: Sequence[bytes], tensors: Sequence[Raw]) -> bytes:
    """A GGUF file."""
    infos, data = [], b""
    for t in tensors:
        name = t.name.encode("utf-8", "surrogateescape")
        dims = struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *reversed(t.shape))
        infos.append(
            struct.pack("<Q", len(name)) + name + dims + struct.pack("<IQ", DTYPES[t.dtype].ggml_id, len(data))
        )
        data += t.data + bytes(-len(t.data) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join((*entries, *infos))
    return head + bytes(-len(head) % 32) + data


def safetensors_bytes(tensors: Sequence[Raw]) -> bytes:
    """A safetensors file; of two tensors of one name the header holds both."""
    items, end = ['"__metadata__":{"format":"pt"}'], 0
    for t in tensors:
        begin, end = end, end + len(t.data)
        info = {"dtype": DTYPES[t.dtype].safetensors, "shape": t.shape, "data_offsets": [begin, end]}
        items.append(f"{json.dumps(t.name)}:{json.dumps(info)}")
    head = ("{" + ",".join(items) + "}").encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + b"".join(t.data for t in tensors)


# --- what may be wrong: one tensor ---

Damage = Callable[[list[Raw], int], None]
"""Changes a list of tensors at an index."""


def _shape(make: Callable[[Raw], tuple[int, ...]]) -> Damage:
    def damage(tensors: list[Raw], i: int) -> None:
        tensors[i] = tensors[i].shaped(*make(tensors[i]))

    return damage


def _rename(make: Callable[[str], str]) -> Damage:
    def damage(tensors: list[Raw], i: int) -> None:
        tensors[i] = replace(tensors[i], name=make(tensors[i].name))

    return damage


DAMAGES: dict[str, Damage] = {
    "no dimensions": _shape(lambda t: ()),
    "a dimension of zero": _shape(lambda t: (0, *t.shape[1:])),
    "all dimensions zero": _shape(lambda t: (0,) * len(t.shape)),
    "five dimensions": _shape(lambda t: (*(1,) * (5 - len(t.shape)), *t.shape)),
    "one dimension more": _shape(lambda t: (*t.shape, 1)),
    "one dimension for all": _shape(lambda t: (prod(t.shape),)),
    "rows for columns": _shape(lambda t: t.shape[::-1]),
    "a row too many": _shape(lambda t: (t.shape[0] + 1, *t.shape[1:])),
    "half the columns": _shape(lambda t: (*t.shape[:-1], t.shape[-1] // 2)),
    "twice there": lambda tensors, i: tensors.append(tensors[i]),
    "missing": lambda tensors, i: tensors.__delitem__(i),
    "in a layer that is not there": _rename(lambda name: re.sub(r"\.0\.", ".7.", name)),
    "misspelled": _rename(lambda name: name.replace(".weight", ".wieght")),
}
"""What a tensor of the first layer, a matrix that is not square, may suffer."""


# --- what may be wrong: anything ---

_VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 7, 64, 10**9, 2**31, 2**32 - 1, 2**63, 0.5, 1e308),
    *(float("nan"), float("inf"), float("-inf"), "x", "", None, True, False),
    *([], {}, [1, 2], [0, 0], ["full_attention"], [None], {"a": 1}, [[1]]),
)
_TYPES = {bool: GgufType.BOOL, float: GgufType.FLOAT64, str: GgufType.STRING, int: GgufType.INT64}
_NAMES = (
    *(
        "x",
        "",
        "a.b.c",
        "{n}",
        "blk.0.",
        "blk.0.nextn.eh_proj.weight",
        "blk.2.attn_norm.weight",
        "v.blk.0.attn_q.weight",
    ),
    *("mm.0.weight", "token_embd.weight", "output.weight", "rope_freqs.weight", "blk.0.attn_qkv.weight", "cls.weight"),
    *("model.layers.0.", "model.layers.2.eh_proj.weight", "mtp.fc.weight", "lm_head.weight", "vision_tower.x.weight"),
    *("model.layers.0.mlp.experts.0.gate_proj.weight", "model.layers.0.self_attn.q_proj.lora_A.weight"),
)
_DTYPES = ("F32", "F16", "BF16", "I32", "Q8_0", "U8", "F64")


def disturb(odd: Odd, random_: random.Random) -> str:
    """Changes something in the model, chosen by `random_`; says what."""
    if odd.kind != "safetensors" and random_.random() < 0.5:
        return _disturb_keys(odd, random_)
    return _disturb_tensors(odd.tensors, random_)


def _disturb_tensors(tensors: list[Raw], random_: random.Random) -> str:
    what = random_.choice(("damage", "damage", "some gone", "swapped", "layer", "name", "more", "dtype"))
    if not tensors:
        return "nothing"
    i = random_.randrange(len(tensors))
    old = tensors[i]
    if what == "damage":
        what = random_.choice(list(DAMAGES))
        if old.shape:
            DAMAGES[what](tensors, i)
    elif what == "some gone":
        share = random_.random()
        tensors[:] = [t for t in tensors if random_.random() < share]
    elif what == "swapped":
        j = random_.randrange(len(tensors))
        tensors[i], tensors[j] = replace(old, name=tensors[j].name), replace(tensors[j], name=old.name)
    elif what == "layer":
        number = str(random_.choice((0, 1, 2, 3, 99, 10**5, 10**9)))
        tensors[i] = replace(old, name=re.sub(r"\d+", number, old.name, count=random_.choice((1, 2))))
    elif what == "name":
        tensors[i] = replace(old, name=random_.choice((*_NAMES, random_.choice(tensors).name)))
    elif what == "more":
        tensors.append(replace(old, name=random_.choice(_NAMES)))
    else:
        dtype = DTYPES[random_.choice(_DTYPES)]
        spelled = dtype.safetensors if not old.name.startswith(("blk.", "token_embd")) else dtype.ggml_id
        if spelled is not None and old.shape and old.shape[-1] % dtype.block == 0:
            n = dtype.n_bytes(old.shape)
            tensors[i] = Raw(old.name, dtype.name, old.shape, (old.data * (n // max(1, len(old.data)) + 1))[:n])
    return f"{what} {old.name}"


def _disturb_keys(odd: Odd, random_: random.Random) -> str:
    keys = odd.config if odd.kind == "hf" else odd.entries
    key = random_.choice(
        [key for key in keys if not key.startswith("tokenizer.") or random_.random() < 0.2] or list(keys)
    )
    if random_.random() < 0.25:
        del keys[key]
        return f"{key} gone"
    value = random_.choice(_VALUES)
    if odd.kind == "hf":
        odd.config[key] = value
        return f"{key}: {value!r}"
    try:
        odd.set(key, odd.types[key], value)
    except aprfmt.AprError:  # not of its type: then of another
        items = [item for item in (value if isinstance(value, list) else [value]) if type(item) in _TYPES]
        kind = _TYPES[type(items[0])] if items else GgufType.UINT32
        kind = GgufType.UINT64 if items and items[0] == 2**63 else kind
        odd.set(key, *(((GgufType.ARRAY, kind), items) if isinstance(value, list) or not items else (kind, items[0])))
    return f"{key}: {value!r}"


def copy(odd: Odd) -> Odd:
    """A model that can be changed without the first one."""
    return replace(odd, tensors=[*odd.tensors], config=json.loads(json.dumps(odd.config)), entries={**odd.entries})


def clear(folder: Path) -> None:
    """Empties a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
