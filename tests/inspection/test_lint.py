"""Every rule finds a file that breaks it, and nothing in files that are well made."""

from __future__ import annotations

import json
import random
import shlex
import struct
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import demo_model
import gguf
import gguf_images
import numpy as np
import plain_models
import pytest
from safetensors.numpy import save_file as save_safetensors

import aprfmt
import lint_docs
from aprfmt import RawTensor
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.errors import UsageError
from aprfmt.formats import gguf_write
from aprfmt.formats.gguf_fields import GgufType as T
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.inspection.lint import containers
from aprfmt.io.pipe import FileLayout, write_layout
from aprfmt.io.sink import AtomicFile

Build = Callable[[Path], Path]
Key = tuple[Any, object]

HIDDEN = demo_model.HIDDEN


def tensor(name: str, dtype: str, shape: tuple[int, ...]) -> OutTensor:
    """One of random codes; scales are small numbers."""
    n_bytes = DTYPES[dtype].n_bytes(shape)
    data = random.Random(name).randbytes(n_bytes) if DTYPES[dtype].kind == "ggml" else bytes(n_bytes)
    return OutTensor(name, dtype, shape, n_bytes, partial(iter, (data,)))


def gguf_file(
    path: Path,
    keys: Mapping[str, Key | None] | None = None,
    tensors: Mapping[str, tuple[str, tuple[int, ...]] | None] | None = None,
) -> Path:
    """The demo's model with other keys and tensors; None takes one away."""
    changes, others = keys or {}, tensors or {}
    pairs = [row for row in demo_model._metadata() if row[0] not in changes]
    pairs += [(key, *value) for key, value in changes.items() if value is not None]
    kept = [t for t in demo_model._tensors() if t.name not in others]
    kept += [tensor(name, *form) for name, form in others.items() if form is not None]
    layout = FileLayout(path.name, gguf_write.layout(pairs, kept))
    with AtomicFile(path, n_bytes=layout.n_bytes) as sink:
        write_layout(layout, sink)
    return path


def folder(path: Path, arrays: Mapping[str, Any] | None = None, **config: Any) -> Path:
    """A well-made Hugging Face folder of 16-bit weights."""
    halves = {name: array.astype("<f2") for name, array in (arrays or plain_models.weights()).items()}
    plain_models.write_folder(path, halves, **({"torch_dtype": "float16"} | config))
    (path / "README.md").write_text("---\nlicense: mit\nbase_model: a/b\n---\n# A model\n")
    (path / "generation_config.json").write_text('{"eos_token_id": 2}')
    return path


def without(name: str) -> Build:
    def build(tmp: Path) -> Path:
        path = folder(tmp / "hf")
        (path / name).unlink()
        return path

    return build


def keys(**changes: Key | None) -> Build:
    """The demo's GGUF with other keys; two underscores stand for a dot."""
    return lambda tmp: gguf_file(tmp / "m.gguf", {key.replace("__", "."): value for key, value in changes.items()})


def weights(**changes: tuple[str, tuple[int, ...]] | None) -> Build:
    names = {key.replace("__", "."): value for key, value in changes.items()}
    return lambda tmp: gguf_file(tmp / "m.gguf", tensors=names)


def of_config(**config: Any) -> Build:
    return lambda tmp: folder(tmp / "hf", **config)


def tokens(**changes: object) -> Build:
    """The demo's vocabulary, some tokens replaced: by position."""
    known, _ = demo_model.vocabulary()
    for at, token in changes.items():
        known[int(at[1:])] = str(token)
    return lambda tmp: gguf_file(tmp / "m.gguf", {"tokenizer.ggml.tokens": ((T.ARRAY, T.STRING), known)})


def experts(tmp: Path) -> Path:
    forms: dict[str, tuple[str, tuple[int, ...]] | None] = {}
    for n in range(demo_model.LAYERS):
        at = f"blk.{n}.ffn_"
        forms |= {f"{at}{part}.weight": None for part in ("gate", "up", "down")}
        forms |= {f"{at}{part}_exps.weight": ("F16", (2, demo_model.FEED_FORWARD, HIDDEN)) for part in ("gate", "up")}
        forms[f"{at}down_exps.weight"] = ("F16", (2, HIDDEN, demo_model.FEED_FORWARD))
        forms[f"{at}gate_inp.weight"] = ("Q8_0", (2, HIDDEN))
    sizes: dict[str, Key | None] = {"llama.expert_count": (T.UINT32, 2), "llama.expert_used_count": (T.UINT32, 1)}
    return gguf_file(tmp / "m.gguf", sizes, forms)


def old_version(tmp: Path) -> Path:
    data = bytearray(gguf_file(tmp / "m.gguf").read_bytes())
    data[4] = 2
    (tmp / "m.gguf").write_bytes(data)
    return tmp / "m.gguf"


def narrow(tmp: Path) -> Path:
    fields = [("general.name", gguf.GGUFValueType.STRING, "x")]
    gguf_images.write_peer(tmp / "m.gguf", fields, {"w": (np.ones((2, 4), "<f4"), "F32")}, alignment=8)
    return tmp / "m.gguf"


def two_bits(tmp: Path) -> Path:
    path = tmp / "m.gguf"
    layout = FileLayout(
        "m", gguf_write.layout([("general.architecture", T.STRING, "x")], [tensor("w", "Q2_K", (2, 256))])
    )
    with AtomicFile(path, n_bytes=layout.n_bytes) as sink:
        write_layout(layout, sink)
    return path


def renamed(tmp: Path) -> Path:
    return gguf_file(tmp / "demo-Q4_K_M.gguf")


def shards(tmp: Path) -> Path:
    path = folder(tmp / "hf")
    arrays = {name: array.astype("<f2") for name, array in plain_models.weights().items()}
    (path / "model.safetensors").unlink()
    names = sorted(arrays)
    parts = [[n for n in names if "norm" in n], [n for n in names if "mlp" in n], []]
    parts[2] = [n for n in names if n not in parts[0] + parts[1]]
    where: dict[str, str] = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05d}-of-00003.safetensors"
        save_safetensors({n: arrays[n] for n in part}, path / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path


def pickle(tmp: Path) -> Path:
    import torch

    path = folder(tmp / "hf")
    (path / "model.safetensors").unlink()
    torch.save({n: torch.from_numpy(a) for n, a in plain_models.weights().items()}, path / "pytorch_model.bin")
    return path


def bare(tmp: Path) -> Path:
    path = folder(tmp / "hf")
    save_safetensors({n: a.astype("<f2") for n, a in plain_models.weights().items()}, path / "model.safetensors")
    return path


def slow(tmp: Path) -> Path:
    path = folder(tmp / "hf")
    (path / "tokenizer.json").unlink()
    (path / "tokenizer.model").write_bytes(b"\n\x05\n\x01a\x15\0")
    return path


def apr(tmp: Path, name: str = "model.norm.weight", metadata: Mapping[str, Any] | None = None) -> Path:
    path = tmp / "m.apr"
    tensors = {name: RawTensor("F32", (4,), bytes(16))}
    aprfmt.save_file(
        tensors, path, metadata={"model_type": "llama", "license": "MIT", "name": "m"} | dict(metadata or {})
    )
    return path


def cut(tmp: Path) -> Path:
    path = apr(tmp)
    path.write_bytes(path.read_bytes()[:-4])
    return path


def unaligned(tmp: Path) -> Path:
    """Two blobs of 16 bytes side by side, as another writer may put them."""
    metadata = b'{"model_type":"x"}'
    entries = b"".join(
        struct.pack("<H", 1) + name + struct.pack("<BBQQQ", 0, 1, 4, at, 16) for name, at in ((b"a", 0), (b"b", 16))
    )
    index = 64 + len(metadata)
    data = -(-(index + len(entries)) // 64) * 64
    head = struct.pack("<4sBBHIQIQQ", b"APR\0", 2, 0, 0x400, 2, 64, len(metadata), index, data)
    rest = bytes(20)
    body = head + struct.pack("<I", zlib.crc32(head + rest)) + rest + metadata + entries
    body = body.ljust(data, b"\0") + bytes(64)
    path = tmp / "m.apr"
    path.write_bytes(body + struct.pack("<I", zlib.crc32(body)))
    return path


def flagless(tmp: Path) -> Path:
    path = apr(tmp, metadata={"tokenizer.model": "gpt2", "tokenizer.vocabulary": ["a", "b"], "tokenizer.merges": []})
    data = bytearray(path.read_bytes()[:-4])
    data[6:8] = struct.pack("<H", struct.unpack_from("<H", data, 6)[0] & ~0x200)
    data[40:44] = struct.pack("<I", zlib.crc32(data[:40] + data[44:64]))
    path.write_bytes(data + struct.pack("<I", zlib.crc32(data)))
    return path


def twice(tmp: Path) -> Path:
    arrays = plain_models.weights()
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    return folder(tmp / "hf", arrays, tie_word_embeddings=True)


_NORM = "output_norm.weight"
_EMBEDDING = "token_embd.weight"
_ROWS = demo_model.N_TOKENS
_NO_TOKENIZER = {row[0].replace(".", "__"): None for row in demo_model._metadata() if row[0].startswith("tokenizer.")}


def with_file(name: str, target: str | None) -> Build:
    """A folder with another file, or a link."""

    def build(tmp: Path) -> Path:
        path = plain_models.write_folder(tmp / "hf")
        (tmp / "outside.txt").write_bytes(b"")
        if target is None:
            (path / name).write_bytes(b"")
        else:
            (path / name).symlink_to(target)
        return path

    return build


CASES: dict[str, tuple[str, Build]] = {
    "provenance.no-license": ("warn", keys(general__license=None)),
    "provenance.license-not-spdx": ("warn", keys(general__license=(T.STRING, "ask me first"))),
    "provenance.no-name": ("info", keys(general__name=None)),
    "provenance.no-base-model": ("info", weights(token_embd__weight=("Q8_0", (_ROWS, HIDDEN)))),
    "card.missing": ("warn", without("README.md")),
    "tokenizer.missing": ("warn", keys(**_NO_TOKENIZER)),
    "tokenizer.no-chat-template": (
        "warn", keys(tokenizer__chat_template=None, general__name=(T.STRING, "Demo 7B Instruct"))
    ),
    "tokenizer.no-eos": ("warn", keys(tokenizer__ggml__eos_token_id=None)),
    "tokenizer.pre-missing": ("warn", keys(tokenizer__ggml__pre=None)),
    "tokenizer.types-missing": ("warn", keys(tokenizer__ggml__token_type=None)),
    "tokenizer.control-as-text": ("warn", keys(tokenizer__ggml__token_type=((T.ARRAY, T.INT32), [1] * _ROWS))),
    "tokenizer.duplicates": ("warn", tokens(_299="<|pad|>")),
    "vocab.unpadded": ("info", keys()),
    "gguf.version": ("info", old_version),
    "gguf.alignment": ("warn", narrow),
    "gguf.key-names": ("warn", keys(**{"My Key": (T.UINT32, 1)})),
    "gguf.quantization-version": (
        "warn",
        lambda tmp: gguf_file(
            tmp / "m.gguf", {"general.quantization_version": None}, {_EMBEDDING: ("Q8_0", (_ROWS, HIDDEN))}
        ),
    ),
    "gguf.tensor-name-length": ("error", weights(**{"x" * 64: ("F32", (2, 2))})),
    "gguf.no-imatrix": ("info", two_bits),
    "gguf.file-type-mismatch": ("warn", keys(general__file_type=(T.UINT32, 7))),
    "name.quant-suffix": ("warn", renamed),
    "context.length-missing": ("warn", keys(llama__context_length=None)),
    "context.rope-missing": (
        "warn", keys(llama__rope__freq_base=None, llama__context_length=(T.UINT32, 32768))
    ),
    "context.original-missing": ("warn", of_config(rope_scaling={"rope_type": "yarn", "factor": 4.0})),
    "head.shape": ("error", weights(output__weight=("F16", (7, HIDDEN)))),
    "head.stored-twice": ("info", twice),
    "names.non-standard": ("warn", partial(apr, name="a..b c")),
    "names.unknown": ("warn", weights(blk__0__weird__weight=("F32", (3, 3)))),
    "tensors.norms-not-float32": ("warn", weights(output_norm__weight=("F16", (HIDDEN,)))),
    "tensors.float32-weights": ("info", lambda tmp: plain_models.write_folder(tmp / "hf")),
    "moe.router-quantized": ("warn", experts),
    "quant.head-below-four-bits": ("warn", weights(token_embd__weight=("Q2_0", (_ROWS, HIDDEN)))),
    "shards.unbalanced": ("info", shards),
    "files.too-large": ("warn", lambda tmp: gguf_file(tmp / "m.gguf")),
    "files.pickle": ("warn", pickle),
    "files.names": ("warn", with_file(".envrc", None)),
    "files.links": ("warn", with_file("notes.txt", "../outside.txt")),
    "safetensors.no-format": ("warn", bare),
    "config.dtype-mismatch": ("warn", of_config(torch_dtype="float32")),
    "config.remote-code": ("info", of_config(auto_map={"AutoModel": "modeling.X"})),
    "generation.config-missing": ("info", without("generation_config.json")),
    "tokenizer.no-fast-file": ("info", slow),
    "apr.no-checksum": ("warn", cut),
    "apr.alignment": ("info", unaligned),
    "apr.vocabulary-flag": ("warn", flagless),
}  # fmt: skip


def test_inspect_tells_names_and_links(tmp_path: Path) -> None:
    folder = with_file("notes.txt", "../outside.txt")(tmp_path)
    (folder / ".envrc").write_bytes(b"")
    told = " / ".join(aprfmt.inspect(folder).warnings)
    assert "files that a conversion would skip: '.envrc'" in told
    assert "symlinks pointing outside the folder: 'notes.txt'" in told


@pytest.mark.parametrize("name", CASES)
def test_a_rule_finds_what_it_is_for(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "files.too-large":
        monkeypatch.setattr(containers, "_LARGEST_FILE", 1000)
    level, build = CASES[name]
    found = aprfmt.lint(build(tmp_path), select=[name])
    rows = [row for row in found.findings if row.id == name]
    assert [row.level for row in rows] == [level], found.findings
    assert rows[0].suggestion, "what to do stands beside every finding"
    assert found.passed is (level == "info")


def test_every_rule_has_a_case_and_a_reason() -> None:
    rules = aprfmt.lint_rules()
    assert {rule.id for rule in rules} == set(CASES)
    assert len({rule.id for rule in rules}) == len(rules)
    assert all(rule.holds and rule.why and rule.source for rule in rules)


def test_well_made_files_pass(tmp_path: Path) -> None:
    gguf_file(tmp_path / "demo-F16.gguf")
    folder(tmp_path / "hf")
    aprfmt.import_model(tmp_path / "demo-F16.gguf", tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "hf", tmp_path / "from-hf.gguf")
    for name in ("demo-F16.gguf", "hf", "m.apr", "from-hf.gguf"):
        found = aprfmt.lint(tmp_path / name)
        assert found.passed, found.findings
        assert {row.id for row in found.findings} <= {"vocab.unpadded"}
        assert aprfmt.lint(tmp_path / name, fail_at="info", ignore=["vocab.*"]).passed


def test_levels_and_choice(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf", {"general.license": None, "general.name": None})
    found = aprfmt.lint(path, ignore=["vocab.unpadded"])
    assert [(row.id, row.level) for row in found.findings] == [
        ("provenance.no-license", "warn"),
        ("provenance.no-name", "info"),
    ]
    passed = {level: aprfmt.lint(path, fail_at=level).passed for level in ("error", "warn", "info")}
    assert passed == {"error": True, "warn": False, "info": False}
    assert aprfmt.lint(path, select=["gguf.*"]).findings == []
    assert {rule.partition(".")[0] for rule in aprfmt.lint(path, select=["gguf.*"]).rules} == {"gguf"}
    body = found.to_json()
    assert body["counts"] == {"error": 0, "warn": 1, "info": 1}
    for wrong in (
        partial(aprfmt.lint, fail_at="fatal"),
        partial(aprfmt.lint, select=["gguf.algnment"]),
        partial(aprfmt.lint, ignore=["x"]),
    ):
        with pytest.raises(UsageError):
            wrong(path)


def test_what_is_suggested_can_be_typed(tmp_path: Path) -> None:
    """The commands for keys, run as they stand, end the finding."""
    from aprfmt.cli.main import run

    changes: dict[str, Key | None] = {
        "general.license": None,
        "general.name": None,
        "general.quantization_version": None,
        "general.file_type": (T.UINT32, 7),
    }
    path = gguf_file(tmp_path / "a b.gguf", changes, {_EMBEDDING: ("Q8_0", (_ROWS, HIDDEN))})
    for name in ("provenance.no-license", "provenance.no-name", "gguf.quantization-version", "gguf.file-type-mismatch"):
        rows = aprfmt.lint(path, select=[name]).findings
        if name == "gguf.file-type-mismatch":
            assert rows == [], "some weights have that type"
            continue
        words = shlex.split(rows[0].suggestion or "")
        assert words[0] == "apr"
        assert run([*words[1:], "--quiet"]) == 0
        assert aprfmt.lint(path, select=[name]).findings == []


def test_an_adapter_is_no_model_of_its_own(tmp_path: Path) -> None:
    path = plain_models.write_adapter(tmp_path / "lora")
    (path / "README.md").write_text("---\nlicense: mit\n---\n")
    config = json.loads((path / "adapter_config.json").read_text())
    assert [row.id for row in aprfmt.lint(path).findings] == ["provenance.no-base-model"]
    (path / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "a/b"}))
    assert aprfmt.lint(path).findings == []


def test_a_licence_in_the_card_of_an_old_file_counts() -> None:
    golden = Path(__file__).resolve().parents[2] / "fixtures" / "vectors" / "golden"
    for name, count in (("v1_metadata_full_license.apr", 0), ("v1_golden_none.apr", 1)):
        assert len(aprfmt.lint(golden / name, select=["provenance.no-license"]).findings) == count


def test_metadata_that_cannot_be_read_is_one_finding(tmp_path: Path) -> None:
    path = folder(tmp_path / "hf")
    (path / "tokenizer.json").write_text("{")
    found = aprfmt.lint(path)
    assert [row.id for row in found.findings if row.level == "error"] == ["metadata.readable"]
    assert not found.passed


def test_the_page_follows_the_table() -> None:
    assert lint_docs.PAGE.read_text() == lint_docs.page(), "python tools/lint_docs.py"
