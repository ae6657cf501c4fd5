"""Weights that torch.save wrote: read where they lie, refused where the pickle needs more than tensors."""

from __future__ import annotations

import json
import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pickle_bombs
import pytest
import torch
from mlx_folders import files
from plain_models import CONFIG, weights
from tiny_models import write_byte_tokenizer

import aprfmt
from aprfmt.errors import AprError, CorruptError, RefusedError, UnknownFormatError, UnsupportedError

State = dict[str, Any]
OLD = {"_use_new_zipfile_serialization": False}


def state() -> State:
    """A llama's state dict."""
    return {name: torch.from_numpy(array) for name, array in weights().items()}


def parameters() -> State:
    """The same as parameters, with what a module puts beside its state dict."""
    from collections import OrderedDict

    found = OrderedDict((name, torch.nn.Parameter(tensor)) for name, tensor in state().items())
    found._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    return found


def folder_of(path: Path, write: Callable[[Path], object]) -> Path:
    """A folder with config and tokenizer, and what `write` puts there."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    write_byte_tokenizer(path)
    write(path)
    return path


def in_shards(folder: Path) -> None:
    names = list(state())
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[:9], names[9:]), 1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({name: state()[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def tied(folder: Path) -> None:
    found = state()
    found["lm_head.weight"] = found["model.embed_tokens.weight"]
    torch.save(found, folder / "pytorch_model.bin")


def one_storage(folder: Path) -> None:
    """All tensors in one storage, as views of it."""
    whole = torch.cat([tensor.reshape(-1) for tensor in state().values()])
    found, start = {}, 0
    for name, tensor in state().items():
        found[name] = whole[start : start + tensor.numel()].reshape(tensor.shape)
        start += tensor.numel()
    torch.save(found, folder / "pytorch_model.bin")


def of_a_training(folder: Path) -> None:
    beside = {"epoch": 3, "optimizer": {"state": {0: {"exp_avg": torch.ones(50)}}}}
    torch.save({**beside, "state_dict": state()}, folder / "last.pth")
    torch.save({"lr": 1.0}, folder / "training_args.bin")


FORMS: dict[str, Callable[[Path], object]] = {
    "zip": lambda folder: torch.save(state(), folder / "pytorch_model.bin"),
    "old": lambda folder: torch.save(state(), folder / "pytorch_model.bin", **OLD),
    "pt": lambda folder: torch.save(state(), folder / "weights.pt"),
    "model": lambda folder: torch.save({"model": state(), "step": 5}, folder / "model.pth", **OLD),
    "parameters": lambda folder: torch.save(parameters(), folder / "pytorch_model.bin"),
    "shards": in_shards,
    "tied": tied,
    "one storage": one_storage,
    "training": of_a_training,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_comes_back_file_by_file(form: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "folder", FORMS[form])
    assert aprfmt.detect(folder) == "hf"
    assert aprfmt.import_model(folder, tmp_path / "m.apr").lossless
    assert aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back", format="hf").proven
    assert files(tmp_path / "back") == files(folder)


@pytest.mark.parametrize("form", FORMS)
def test_the_values_are_those_of_torch(form: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "folder", FORMS[form])
    with aprfmt.open(folder) as model:
        assert set(model.tensors) == set(state())
        for name, array in weights().items():
            if not (form == "tied" and name == "lm_head.weight"):
                assert np.array_equal(model.tensors[name].numpy(), array)
    aprfmt.export_model(folder, tmp_path / "new", format="hf", dtype="bf16")
    assert {path.name for path in (tmp_path / "new").iterdir()} >= {"model.safetensors", "config.json"}
    written = {name for name in files(tmp_path / "new") if name != "training_args.bin"}
    assert not [name for name in written if name.endswith((".bin", ".bin.index.json", ".pt", ".pth"))]


@pytest.mark.parametrize("options", [{}, OLD], ids=["zip", "old"])
def test_every_dtype(options: dict[str, bool], tmp_path: Path) -> None:
    kinds = [
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.int16,
        torch.int64,
        torch.uint8,
        torch.bool,
    ]
    found = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
    found |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5), "parameter": torch.nn.Parameter(torch.ones(3))}
    torch.save(found, tmp_path / "m.bin", **options)
    with aprfmt.open(tmp_path / "m.bin") as model:
        for name, tensor in found.items():
            assert model.tensors[name].shape == tuple(tensor.shape)
            assert torch.equal(model.tensors[name].torch(), tensor.detach())


def test_a_single_file_takes_nothing_else_of_its_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "folder", FORMS["zip"])
    torch.save(state(), folder / "other.bin")
    (folder / "picture.png").write_bytes(b"picture")
    aprfmt.import_model(folder / "other.bin", tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back", format="hf")
    assert files(tmp_path / "back").keys() == files(folder).keys() - {"pytorch_model.bin", "picture.png"}


def test_what_a_training_saved_beside_the_weights_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path / "folder", of_a_training)
    with aprfmt.open(folder) as model:
        assert model.warnings == ["last.pth contains more than weights; not converted: epoch, optimizer"]
    assert aprfmt.import_model(folder, tmp_path / "small.apr").lossless
    monkeypatch.setattr("aprfmt.convert.source_manifest_writer.MAX_LITERAL_BYTES", 150_000)
    torch.save({"model": state(), "optimizer": torch.randn(50_000)}, folder / "last.pth")
    assert not aprfmt.import_model(folder, tmp_path / "large.apr").lossless
    aprfmt.export_model(tmp_path / "large.apr", tmp_path / "out", format="hf")
    assert files(tmp_path / "out").keys() >= {"model.safetensors", "config.json", "tokenizer.json"}


def test_weights_are_not_read_to_find_them(tmp_path: Path) -> None:
    big = {"w": torch.zeros(64 << 20, dtype=torch.uint8)}
    for name, options in (("zip.bin", {}), ("old.bin", OLD)):
        torch.save(big, tmp_path / name, **options)
        before = _resident()
        with aprfmt.open(tmp_path / name) as model:
            assert model.tensors["w"].n_bytes == 64 << 20
            assert _resident() - before < 32 << 20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


# --- what is refused ---


class Call:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("options", [{}, OLD], ids=["zip", "old"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_call_in_a_pickle_is_refused_and_never_made(options: dict[str, bool], nested: bool, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    found: State = {"state_dict": state(), "args": Call(marker)} if nested else {**state(), "x": Call(marker)}
    folder = folder_of(tmp_path / "folder", lambda path: torch.save(found, path / "pytorch_model.bin", **options))
    for attempt in (aprfmt.open, lambda path: aprfmt.import_model(path, tmp_path / "m.apr")):
        with pytest.raises(RefusedError, match=r"needs posix\.mkdir, which is not a tensor; nothing was executed"):
            attempt(folder)
    assert not marker.exists()
    assert not (tmp_path / "m.apr").exists()


def test_a_bare_pickle_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(pickle.dumps({"w": Call(tmp_path / "marker")}))
    with pytest.raises(UnknownFormatError) as caught:
        aprfmt.open(path)
    assert "can run any code" in str(caught.value.hint)
    assert not (tmp_path / "marker").exists()


def test_torch_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path / "folder", FORMS["zip"])
    monkeypatch.setitem(sys.modules, "torch", None)
    assert aprfmt.import_model(folder, tmp_path / "m.apr").lossless


def test_a_pickle_changes_nothing_for_the_next_one(tmp_path: Path) -> None:
    """One process reads many; BUILD sets attributes of whatever a pickle names."""
    for form, write in pickle_bombs.FORMS.items():
        torch.save(state(), tmp_path / "sound.bin", **({} if form == "zip" else OLD))
        write(pickle_bombs.BODIES["a changed global"](), tmp_path / "bad.bin")
        with pytest.raises(CorruptError, match="cannot be changed"):
            aprfmt.open(tmp_path / "bad.bin")
        with aprfmt.open(tmp_path / "sound.bin") as model:
            assert set(model.tensors) == set(state())


@pytest.mark.parametrize("form", pickle_bombs.FORMS)
@pytest.mark.parametrize(("offset", "elements"), [(0, 3), (1, 4), (0, 8)])
def test_a_tensor_beyond_its_storage(form: str, offset: int, elements: int, tmp_path: Path) -> None:
    """Four elements: of a storage that says to have three, from the second one, and of one that the file cuts short."""
    n = 8 if elements == 8 else 4
    pickle_bombs.FORMS[form](pickle_bombs.tensor((n,), (1,), offset, elements), tmp_path / "m.bin")
    with pytest.raises(CorruptError, match="values are outside") as caught:
        aprfmt.open(tmp_path / "m.bin")
    assert caught.value.tensor == "w"


@pytest.mark.parametrize("options", [{}, OLD], ids=["zip", "old"])
def test_views_that_share_a_storage(options: dict[str, bool], tmp_path: Path) -> None:
    whole = torch.arange(12, dtype=torch.float16)
    found = {"a": whole[:4], "b": whole[2:8].reshape(2, 3), "c": whole, "d": whole[5:5], "e": whole[7]}
    torch.save(found, tmp_path / "m.bin", **options)
    with aprfmt.open(tmp_path / "m.bin") as model:
        for name, tensor in found.items():
            assert torch.equal(model.tensors[name].torch(), tensor)


@pytest.mark.parametrize("options", [{}, OLD], ids=["zip", "old"])
def test_what_a_checkpoint_holds_beside_tensors(options: dict[str, bool], tmp_path: Path) -> None:
    from collections import Counter

    beside: State = {
        "device": torch.device("cpu"), "dtype": torch.bfloat16, "size": torch.Size([2]), "count": Counter("ab"),
        "set": {1, 2}, "bytes": b"ab", "array": bytearray(b"x"), "complex": 1j, "layout": torch.strided,
        "grad": torch.nn.Parameter(torch.ones(2)), "step": torch.tensor(3), "text": "\u4f60",
    }  # fmt: skip
    torch.save({"model": state(), **beside}, tmp_path / "m.bin", **options)
    torch.load(tmp_path / "m.bin", weights_only=True)  # torch takes it too
    with aprfmt.open(tmp_path / "m.bin") as model:
        assert set(model.tensors) == set(state())


def test_dtypes_without_a_storage_of_their_own(tmp_path: Path) -> None:
    found = {"a": torch.ones(2).to(torch.float8_e4m3fn), "b": torch.ones(2).to(torch.uint16)}
    torch.save(found, tmp_path / "m.bin")
    with aprfmt.open(tmp_path / "m.bin") as model:
        assert (model.tensors["a"].dtype, model.tensors["a"].raw().tobytes()) == ("F8_E4M3", b"\x38\x38")
        assert model.tensors["b"].raw().tobytes() == b"\x01\x00" * 2


def compressed(path: Path) -> None:
    torch.save(state(), path / "plain")
    with zipfile.ZipFile(path / "plain") as old, zipfile.ZipFile(path / "pytorch_model.bin", "w", 8) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    (path / "plain").unlink()


def big_endian(path: Path) -> None:
    torch.save(state(), path / "pytorch_model.bin")
    data = (path / "pytorch_model.bin").read_bytes()
    with zipfile.ZipFile(path / "pytorch_model.bin", "w") as file:
        file.writestr("archive/data.pkl", zipfile.ZipFile(_bytes_file(data)).read("pytorch_model/data.pkl"))
        file.writestr("archive/byteorder", "big")


def _bytes_file(data: bytes) -> Any:
    import io

    return io.BytesIO(data)


def cut(path: Path) -> None:
    torch.save(state(), path / "pytorch_model.bin", **OLD)
    data = (path / "pytorch_model.bin").read_bytes()
    (path / "pytorch_model.bin").write_bytes(data[: len(data) - 1000])


def without_a_shard(path: Path) -> None:
    in_shards(path)
    (path / "pytorch_model-00002-of-00002.bin").unlink()


def saved(found: object) -> Callable[[Path], object]:
    return lambda path: torch.save(found, path / "pytorch_model.bin")


BAD: dict[str, tuple[Callable[[Path], object], type[AprError], str]] = {
    "compressed": (compressed, RefusedError, "is compressed"),
    "big-endian": (big_endian, UnsupportedError, "big-endian"),
    "cut": (cut, AprError, "."),
    "a shard is missing": (without_a_shard, RefusedError, "but missing"),
    "no state dict": (saved(torch.ones(3)), RefusedError, "not a state dict"),
    "numbers": (saved({"a": 1}), RefusedError, "not a state dict"),
    "transposed": (saved({"w": torch.ones(3, 4).T}), RefusedError, "a strided view"),
    "sparse": (saved({"w": torch.eye(3).to_sparse()}), AprError, "."),
    "a module": (saved(torch.nn.Linear(2, 2)), RefusedError, "needs torch.nn"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", BAD)
def test_damaged_and_odd_files(case: str, tmp_path: Path) -> None:
    write, kind, words = BAD[case]
    folder = folder_of(tmp_path / "folder", write)
    with pytest.raises(kind, match=words):
        aprfmt.import_model(folder, tmp_path / "m.apr")
    assert not (tmp_path / "m.apr").exists()


def test_every_byte_that_is_turned_is_an_error_or_another_value(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    small = {"a.weight": torch.ones(2, 3), "b": torch.ones(4)}
    for options in ({}, OLD):
        torch.save(small, path, **options)
        data = path.read_bytes()
        for at in range(0, len(data), 7):
            path.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
            try:
                with aprfmt.open(path) as model:
                    for tensor in model.tensors.values():
                        tensor.numpy()
            except AprError:
                continue


def test_a_zip_file_of_something_else(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.bin", "w") as file:
        file.writestr("a.txt", "text")
    with pytest.raises(UnknownFormatError):
        aprfmt.open(tmp_path / "m.bin")
    with pytest.raises(CorruptError):
        aprfmt.open(folder_of(tmp_path / "folder", lambda p: (p / "pytorch_model.bin").write_bytes(b"PK\x03\x04junk")))
