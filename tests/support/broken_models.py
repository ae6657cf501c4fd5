"""Files of a real model with one fault each, of the kinds that conversions have made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from arch_models import tokenizer_files

import aprfmt
from aprfmt.convert.stamp import stamp


def edit(source: Path, target: Path, change: Callable[[str, bytearray], None], tensors: str) -> Path:
    """A copy of a GGUF in which `change` has edited the bytes of the tensors whose names begin so."""
    shutil.copyfile(source, target)
    with aprfmt.open(source) as model, target.open("r+b") as file:
        for tensor in model.tensors.entries:
            if tensor.name.startswith(tensors):
                data = bytearray(tensor.source.read(tensor.offset, tensor.n_bytes))
                change(tensor.name, data)
                file.seek(tensor.offset)
                file.write(data)
    return target


def zeroed(source: Path, target: Path, layer: int) -> Path:
    """A layer of zeros."""

    def change(name: str, data: bytearray) -> None:
        if not name.endswith("norm.weight"):
            data[:] = bytes(len(data))

    return edit(source, target, change, f"blk.{layer}.")


def with_nan(source: Path, target: Path, tensor: str) -> Path:
    """A NaN among the values of a float tensor."""

    def change(name: str, data: bytearray) -> None:
        if name == tensor:
            data[:4] = np.float32(np.nan).tobytes()

    return edit(source, target, change, tensor)


def reordered(source: Path, target: Path, heads: dict[str, int], *, halves: bool) -> Path:
    """Rows of Q and K of every layer in another order: `heads` is how many each has, by "attn_q", "attn_k".

    `halves`: what llama.cpp's converter did to them is undone; else it is done once more.
    """
    with aprfmt.open(source) as model:
        rows = {tensor.name: tensor.shape[0] for tensor in model.tensors.entries}

    def change(name: str, data: bytearray) -> None:
        part = name.split(".")[2]
        if part in heads:
            n, size = heads[part], rows[name] // heads[part]
            values = np.frombuffer(bytes(data), np.uint8)
            shape = (n, size // 2, 2, -1) if halves else (n, 2, size // 2, -1)
            data[:] = values.reshape(shape).swapaxes(1, 2).tobytes()

    return edit(source, target, change, "blk.")


def with_tokenizer_of(source: Path, target: Path, name: str, folder: Path) -> Path:
    """The tokenizer of another model, cut to the rows of the embedding; its special tokens are the last ones."""
    with aprfmt.open(source) as model:
        n = model.tensors["token_embd.weight"].shape[0]
    files = tokenizer_files(name)
    whole = json.loads(files["tokenizer.json"])
    added = whole["added_tokens"][:_ADDED]
    first = n - len(added)
    vocabulary = {token: i for token, i in whole["model"]["vocab"].items() if i < first}
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in whole["model"]["merges"]]
    merges = [pair for pair in pairs if vocabulary.keys() >= {*pair, "".join(pair)}]
    whole["model"] |= {"vocab": vocabulary, "merges": merges}
    whole["added_tokens"] = [token | {"id": first + i} for i, token in enumerate(added)]
    settings = json.loads(files.get("tokenizer_config.json", b"{}"))
    settings.pop("added_tokens_decoder", None)
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    aprfmt.convert_model(source, target, tokenizer=folder)
    return target


_ADDED = 32


def with_template(source: Path, target: Path, template: str) -> Path:
    """Another chat template."""
    stamp(source, target, set={"tokenizer.chat_template": template}, check_template=False)
    return target


def with_key(source: Path, target: Path, key: str, value: object) -> Path:
    """Another value of a key of the header."""
    stamp(source, target, set={key: value}, check_template=False)
    return target


def with_values(source: Path, target: Path, tensors: str, change: Callable[[np.ndarray], np.ndarray]) -> Path:
    """Other values of the F32 tensors whose names begin so, flat."""

    def edited(name: str, data: bytearray) -> None:
        data[:] = change(np.frombuffer(bytes(data), np.float32)).astype(np.float32).tobytes()

    return edit(source, target, edited, tensors)


def with_swapped_experts(source: Path, target: Path, n_experts: int) -> Path:
    """The first two experts of layer 0 in each other's place, and the router as it was."""

    def change(name: str, data: bytearray) -> None:
        if "_exps." in name:
            experts = np.frombuffer(bytes(data), np.uint8).reshape(n_experts, -1)
            data[:] = experts[[1, 0, *range(2, n_experts)]].tobytes()

    return edit(source, target, change, "blk.0.")
