"""Folders in the layouts of GPTQ, AWQ and ModelOpt: as their kernels read them, and codes that move between layouts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arch_models import find_case
from tiny_models import BYTES, build

import aprfmt
from aprfmt.codecs import affine
from aprfmt.codecs.serving import SERVING, ServingScheme, in_layout
from aprfmt.codecs.split import TransposedStream
from aprfmt.errors import RefusedError, UsageError
from aprfmt.io.pipe import FileLayout, Flow, Job, Stream, WriteOptions, write_file
from aprfmt.types import Array

torch = pytest.importorskip("torch")

INTEGERS = [
    (layout, name)
    for layout in ("gptq", "awq")
    for name, scheme in SERVING.items()
    if scheme.kind == "int" and in_layout(name, layout) is not None
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama in float16, whose scales GPTQ and AWQ hold as they are."""
    folder = tmp_path_factory.mktemp("layouts") / "source"
    case = find_case("llama")
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    build(replace(case, config={**case.config, **sizes}, tokenizer=BYTES), folder, None, dtype="float16")
    return folder


def stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    with aprfmt.open(folder) as model:
        return {name: (tensor.dtype, tensor.shape, bytes(tensor.raw())) for name, tensor in model.tensors.items()}


def values(folder: Path, to: Path) -> dict[str, Array]:
    aprfmt.convert_model(folder, to, dtype="f32", force=True)
    return {name: np.asarray(value) for name, value in aprfmt.load_file(to).items()}


def settings(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def as_kernels_read(layout: str, scheme: str, parts: Sequence[Array], shape: tuple[int, int]) -> Array:
    """The values that the CUDA kernels of the layout compute, element by element."""
    bits, per_word = SERVING[scheme].bits, 32 // SERVING[scheme].bits
    words, zeros = (part.view("<u4").astype("i8") for part in parts[:2])
    scales = parts[2].view("<f2").astype("f4")
    rows, columns = shape
    group = SERVING[scheme].group or columns
    out = np.empty(shape, "f4")
    places = (0, 4, 1, 5, 2, 6, 3, 7)
    for row in range(rows):
        word, lane = divmod(row, per_word)
        shift = bits * (places[lane] if layout == "awq" else lane)
        for column in range(columns):
            zero = zeros[column // group, word] >> shift & (1 << bits) - 1
            if layout == "awq":
                code = words[column, word] >> shift & 15
            else:  # which adds one to a zero point, and does not wrap it around
                code, zero = words[column // per_word, row] >> bits * (column % per_word) & (1 << bits) - 1, zero + 1
            out[row, column] = np.float32(code - zero) * scales[column // group, row]
    return out


def columns_of(scheme: ServingScheme, weight: Array) -> list[Array]:
    """The parts of a weight, uint8 [lines, bytes]."""
    made = scheme.encode(scheme, weight, "F32", 1.0, None)
    shapes = (part.shape(*weight.shape) for part in scheme.parts)
    return [np.frombuffer(data, "u1").reshape(lines, -1) for data, (lines, _) in zip(made, shapes, strict=True)]


@pytest.mark.parametrize(("layout", "name"), INTEGERS)
def test_kernels_find_the_codes_of_compressed_tensors(layout: str, name: str) -> None:
    weight = (np.random.default_rng(0).standard_normal((16, 256)) * 0.05).astype("f4")
    weight[3, 128:] = 0
    weight[5, :128] = np.abs(weight[5, :128]) + 1  # no negative value
    weight = affine.rounded(weight, "F16")
    scheme, plain = in_layout(name, layout), SERVING[name]
    assert scheme is not None
    parts = columns_of(scheme, weight)
    found = as_kernels_read(layout, name, parts, weight.shape)
    assert np.abs(found - weight).max() < 1.2 * np.abs(weight).max() / ((1 << plain.bits) - 2)
    codes = plain.encode(plain, weight, "F16", 1.0, None)
    scale = np.frombuffer(codes[1], "<f2").astype("f4").reshape(16, -1)
    fields = np.frombuffer(codes[0], "u1")
    if plain.bits == 4:
        fields = np.stack([fields & 15, fields >> 4], axis=1)
    zero = np.full(scale.shape, 1 << plain.bits - 1)
    if not plain.symmetric:
        words = np.frombuffer(codes[2], "<u4").reshape(2, -1)
        zero = np.stack([words >> 4 * i & 15 for i in range(8)], axis=1).reshape(16, -1)
    groups = fields.reshape(*scale.shape, -1).astype("f4") - zero[..., None]
    wanted = (groups * scale[..., None]).reshape(weight.shape)
    same = np.ones(16, bool)
    if layout == "gptq" and not plain.symmetric:
        same[[3, 5]] = False  # a zero point of 0 is made 1
        assert (zero[5] == 0).any()
    np.testing.assert_array_equal(found[same], wanted[same])
    assert not found[3, 128:].any()
    halves = [columns_of(scheme, part) for part in (weight[:8], weight[8:])]
    for whole, first, second in zip(parts, *halves, strict=True):
        np.testing.assert_array_equal(np.concatenate([first, second], axis=1), whole)


FOLDERS: dict[str, tuple[str, dict[str, object]]] = {
    "awq": ("w4a16-asym", {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}),
    "gptq": ("w4a16", {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
                       "checkpoint_format": "gptq"}),
    "modelopt": ("nvfp4a16", {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}),
}  # fmt: skip
LABELS = {"awq": "AWQ", "gptq": "GPTQ", "modelopt": "NVFP4"}


@pytest.mark.parametrize("layout", FOLDERS)
def test_a_folder_is_read_back_and_written_again_with_the_same_bytes(layout: str, source: Path, tmp_path: Path) -> None:
    name, wanted = FOLDERS[layout]
    report = aprfmt.convert_model(source, tmp_path / "out", format=layout)
    packed = 14 if layout == "modelopt" else 12  # o_proj has 64 inputs
    assert f"{packed} tensors rounded from F16 to {name}" in report.losses
    found = settings(tmp_path / "out")
    assert wanted.items() <= found.items()
    assert [(row.scheme, row.weights) for row in aprfmt.inspect(tmp_path / "out").quantized] == [
        (LABELS[layout], packed)
    ]
    ignored = found.get("ignore", found.get("modules_to_not_convert", []))
    if layout == "gptq":
        assert found["dynamic"] == {f"-:^model\\.layers\\.{n}\\.self_attn\\.o_proj$": {} for n in range(2)}
        index = aprfmt.load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.mlp.down_proj.g_idx"]
        np.testing.assert_array_equal(index, np.arange(256) // 128)
    else:
        assert "lm_head" in ignored
    if layout == "modelopt":
        beside = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
        assert beside["producer"]["name"] == "modelopt"
        assert beside["quantization"]["quant_algo"] == "W4A16_NVFP4"
        assert beside["quantization"]["exclude_modules"] == ignored
    aprfmt.convert_model(tmp_path / "out", tmp_path / "again", format=layout)
    assert stored(tmp_path / "out") == stored(tmp_path / "again")
    assert settings(tmp_path / "again") == found


def test_codes_move_between_layouts_and_to_a_gguf(source: Path, tmp_path: Path) -> None:
    aprfmt.convert_model(source, tmp_path / "awq", format="awq", dtype="w4a16-g32-asym")
    wanted = values(tmp_path / "awq", tmp_path / "v.safetensors")
    steps = (("gptq", "keep"), ("hf", "w4a16-g32-asym"), ("awq", "keep"))
    before = tmp_path / "awq"
    for number, (layout, name) in enumerate(steps):
        after = tmp_path / f"step-{number}"
        report = aprfmt.convert_model(before, after, format=layout, dtype=name)
        assert (report.losses, report.changes) == ([], [])
        found = values(after, tmp_path / "v.safetensors")
        for weight, value in wanted.items():
            np.testing.assert_array_equal(found[weight], value, err_msg=weight)
        before = after
    assert stored(before) == stored(tmp_path / "awq")


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_blocks_of_a_gguf_keep_their_codes_there_and_back(layout: str, source: Path, tmp_path: Path) -> None:
    aprfmt.export_model(source, tmp_path / "a.gguf", dtype="q4_0", pure=True)
    report = aprfmt.convert_model(tmp_path / "a.gguf", tmp_path / "out", format=layout)
    assert not [loss for loss in report.losses if "w4a16" in loss]
    aprfmt.export_model(tmp_path / "out", tmp_path / "b.gguf")
    a, b = stored(tmp_path / "a.gguf"), stored(tmp_path / "b.gguf")
    blocks = [name for name in a if name.startswith("blk.") and a[name][0] == "Q4_0"]
    assert len(blocks) == 14
    assert {name: b[name] for name in blocks} == {name: a[name] for name in blocks}


@pytest.mark.parametrize("layout", ["hf", "modelopt"])
def test_nvfp4_keeps_its_codes_through_a_gguf(layout: str, source: Path, tmp_path: Path) -> None:
    aprfmt.convert_model(source, tmp_path / "in", format=layout, dtype="nvfp4a16")
    aprfmt.export_model(tmp_path / "in", tmp_path / "m.gguf")
    for to in ("hf", "modelopt"):
        report = aprfmt.convert_model(tmp_path / "m.gguf", tmp_path / to, format=to, dtype="nvfp4a16")
        assert not [loss for loss in report.losses if "rounded from BF16" in loss]
        assert all(change["largest_relative_change"] < 2**-23 for change in report.changes)
    a, b = stored(tmp_path / "in"), stored(tmp_path / layout)
    parts = [name for name in a if name.endswith((".weight_packed", ".weight_scale")) or a[name][0] == "U8"]
    assert len(parts) == 28
    assert {name: b[name] for name in parts} == {name: a[name] for name in parts}


def test_a_merged_base_keeps_its_layout_and_the_codes_of_other_weights(source: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(0)
    lora = tmp_path / "lora"
    lora.mkdir()
    base = "base_model.model.model.layers.0.mlp.up_proj"
    pair = {f"{base}.lora_A.weight": torch.randn(4, 128) * 0.1, f"{base}.lora_B.weight": torch.randn(256, 4) * 0.1}
    save_file(pair, lora / "adapter_model.safetensors")
    (lora / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4}))
    for layout in FOLDERS:
        aprfmt.convert_model(source, tmp_path / layout, format=layout)
        report = aprfmt.merge_adapter(tmp_path / layout, lora, tmp_path / f"{layout}-out", format="hf")
        a, b = stored(tmp_path / layout), stored(tmp_path / f"{layout}-out")
        assert {name.rpartition(".")[0] for name in a if a[name] != b[name]} == {"model.layers.0.mlp.up_proj"}
        assert settings(tmp_path / layout) == settings(tmp_path / f"{layout}-out")
        (row,) = report.requantized
        assert 0 < row["relative_error"] < 0.13


def test_scales_that_float16_lacks_are_counted(tmp_path: Path) -> None:
    case = find_case("llama")
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    build(replace(case, config={**case.config, **sizes}, tokenizer=BYTES), tmp_path / "in", None, dtype="float32")
    aprfmt.convert_model(tmp_path / "in", tmp_path / "ct", format="hf", dtype="w4a16-g32")
    report = aprfmt.convert_model(tmp_path / "ct", tmp_path / "gptq", format="gptq")
    assert len(report.changes) == 14
    assert 0 < max(change["largest_relative_change"] for change in report.changes) < 2**-10
    assert any("14 tensors converted from packed integers to w4a16-g32, codes unchanged" in x for x in report.losses)
    before, after = (values(tmp_path / x, tmp_path / "v.safetensors") for x in ("ct", "gptq"))
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=2**-10, atol=0)


def test_a_symmetric_scheme_takes_no_zero_points(source: Path, tmp_path: Path) -> None:
    aprfmt.convert_model(source, tmp_path / "awq", format="awq", dtype="w4a16-g32-asym")
    for layout in ("hf", "gptq"):
        with pytest.raises(RefusedError, match="AWQ is already quantized; quantizing it again to w4a16-g32 loses"):
            aprfmt.convert_model(tmp_path / "awq", tmp_path / "out", format=layout, dtype="w4a16-g32")
    assert not (tmp_path / "out").exists()


REFUSED: dict[str, tuple[str, str, str, str]] = {
    "8-bit floats as AWQ": ("awq", "fp8-dynamic", "the format awq has no fp8-dynamic weights", "w4a16-g64-asym"),
    "8 bits as AWQ": ("awq", "w8a16-g32", "has no w8a16-g32 weights", "w4a16"),
    "integers as ModelOpt": ("modelopt", "w4a16", "the format modelopt has no w4a16 weights", "nvfp4a16"),
    "floats as GPTQ": ("gptq", "bf16", "the format gptq has no bf16 weights", "w8a16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_what_to_type(case: str, source: Path, tmp_path: Path) -> None:
    layout, name, what, hint = REFUSED[case]
    with pytest.raises(UsageError, match=what) as info:
        aprfmt.convert_model(source, tmp_path / "out", format=layout, dtype=name)
    assert hint in str(info.value.hint)
    assert not (tmp_path / "out").exists()


def test_act_order_is_not_lost(source: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    aprfmt.convert_model(source, tmp_path / "gptq", format="gptq", dtype="w4a16-g32")
    shutil.copytree(tmp_path / "gptq", tmp_path / "ordered")
    tensors = load_file(tmp_path / "gptq" / "model.safetensors")
    for name in [name for name in tensors if name.endswith("g_idx")]:
        tensors[name] = tensors[name].flip(0)
    save_file(tensors, tmp_path / "ordered" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "ordered" / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (tmp_path / "ordered" / "config.json").write_text(json.dumps(config))
    with pytest.raises(RefusedError, match="GPTQ is already quantized"):
        aprfmt.convert_model(tmp_path / "ordered", tmp_path / "out", format="awq")
    report = aprfmt.export_model(tmp_path / "ordered", tmp_path / "m.gguf")
    assert "14 tensors decoded from GPTQ" in report.losses


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("layout", ["awq", "gptq"])
def test_scales_that_are_zero_move_and_others_that_are_no_numbers_are_refused(
    value: float, layout: str, source: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    aprfmt.convert_model(source, tmp_path / "in", format=layout, dtype="w4a16-g32")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    tensors[f"{name}.scales"][2, 5] = value
    save_file(tensors, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    for to, options in (("out", {"format": "gptq"}), ("out.gguf", {})):
        if value == 0:
            aprfmt.convert_model(tmp_path / "in", tmp_path / to, **options)  # type: ignore[arg-type]
            aprfmt.convert_model(tmp_path / to, tmp_path / "v.safetensors", dtype="f32", force=True)
            row = np.asarray(aprfmt.load_file(tmp_path / "v.safetensors")[f"{name}.weight"])[5]
            assert not row[64:96].any()
            assert row[:64].any()
        else:
            with pytest.raises(RefusedError, match="has scales that are NaN or infinite") as info:
                aprfmt.convert_model(tmp_path / "in", tmp_path / to, **options)  # type: ignore[arg-type]
            assert info.value.tensor == f"{name}.scales"
            assert not (tmp_path / to).exists()


def test_a_weight_whose_rows_fill_no_words_stays_float(tmp_path: Path) -> None:
    case = find_case("llama")
    sizes = {"hidden_size": 128, "intermediate_size": 132}
    build(replace(case, config={**case.config, **sizes}, tokenizer=BYTES), tmp_path / "in", None, dtype="float16")
    report = aprfmt.convert_model(tmp_path / "in", tmp_path / "out", format="awq", dtype="w4a16-g32-asym")
    assert any("6 weights not quantized" in warning for warning in report.warnings)
    ignored = settings(tmp_path / "out")["modules_to_not_convert"]
    assert "model.layers.0.mlp.up_proj" in ignored


# --- streams of whole weights ---


def transposed(n_rows: int, fails_at: int | None = None) -> TransposedStream:
    """Rows of four bytes as four lines, and their sums as one, in pieces of three rows."""
    data = np.random.default_rng(0).integers(0, 60, (n_rows, 4), "u1")

    def piece(start: int) -> bytes:
        if start == fails_at:
            raise RefusedError("a damaged piece")
        return data[start : start + 3].tobytes()

    def pieces(unit: int) -> Iterator[Job]:
        for start in range(0, n_rows, 3):
            yield Job(len(data[start : start + 3]) * 4, lambda start=start: piece(start))  # type: ignore[misc]

    def make(buffer: Any) -> list[bytes]:
        rows = np.frombuffer(buffer, "u1").reshape(-1, 4)
        return [rows.T.tobytes(), rows.sum(axis=1, dtype="u1").tobytes()]

    return TransposedStream(4, pieces, [(4, n_rows), (1, n_rows)], make)


@pytest.mark.parametrize("threads", [1, 8])
def test_parts_of_a_whole_weight_do_not_depend_on_threads(threads: int, tmp_path: Path) -> None:
    n = 4001
    stream = transposed(n)
    segments = [Stream(4 * n, lambda: stream.items(0), "a"), Stream(n, lambda: stream.items(1), "b")]
    write_file(str(tmp_path / "out"), FileLayout("out", segments), WriteOptions(flow=Flow(threads)))
    data = np.random.default_rng(0).integers(0, 60, (n, 4), "u1")
    wanted = data.T.tobytes() + data.sum(axis=1, dtype="u1").tobytes()
    assert (tmp_path / "out").read_bytes() == wanted
    assert stream._assembly is None
    assert b"".join(bytes(item.run()) for item in stream.items(1) if isinstance(item, Job)) == wanted[4 * n :]


def test_an_error_ends_every_thread_that_waits(tmp_path: Path) -> None:
    n = 9000
    stream = transposed(n, fails_at=4500)
    segments = [Stream(4 * n, lambda: stream.items(0), "a"), Stream(n, lambda: stream.items(1), "b")]
    with pytest.raises(RefusedError, match="a damaged piece"):
        write_file(str(tmp_path / "out"), FileLayout("out", segments), WriteOptions(flow=Flow(8)))
    assert not (tmp_path / "out").exists()


# --- experts ---


@pytest.fixture(scope="module")
def stacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama 4, whose experts are two tensors a layer, [experts, in, out]."""
    folder = tmp_path_factory.mktemp("experts") / "source"
    build(replace(find_case("llama4_text"), tokenizer=BYTES), folder, None, dtype="bfloat16")
    return folder


def test_stacks_of_experts_become_one_tensor_an_expert(stacked: Path, tmp_path: Path) -> None:
    report = aprfmt.convert_model(stacked, tmp_path / "out", format="hf", dtype="nvfp4a16")
    assert not [warning for warning in report.warnings if "experts" in warning]
    found = {name: shape for name, (_, shape, _) in stored(tmp_path / "out").items() if ".experts." in name}
    codes = {name: shape for name, shape in found.items() if name.endswith("weight_packed")}
    layer = "model.layers.1.feed_forward.experts"
    assert {name: codes[name] for name in codes if name.startswith(f"{layer}.3.")} == {
        f"{layer}.3.gate_proj.weight_packed": (48, 32),
        f"{layer}.3.up_proj.weight_packed": (48, 32),
        f"{layer}.3.down_proj.weight_packed": (64, 24),
    }
    assert len(codes) == 2 * 4 * 3
    scales = aprfmt.load_file(tmp_path / "out" / "model.safetensors")
    gate, up = (float(scales[f"{layer}.3.{name}.weight_global_scale"][0]) for name in ("gate_proj", "up_proj"))
    assert gate == up
    for source, to in ((stacked, "a.gguf"), (tmp_path / "out", "b.gguf")):
        aprfmt.export_model(source, tmp_path / to, dtype="f32")
    with aprfmt.open(tmp_path / "a.gguf") as a, aprfmt.open(tmp_path / "b.gguf") as b:
        assert a.tensors.keys() == b.tensors.keys()
        for name, tensor in a.tensors.items():
            if "_exps" in name:
                wanted, values = (np.asarray(one.numpy(), "f8") for one in (tensor, b.tensors[name]))
                error = ((values - wanted) ** 2).sum(axis=(1, 2)) / (wanted**2).sum(axis=(1, 2))
                assert 0 < np.sqrt(error.max()) < 0.13
    aprfmt.export_model(stacked, tmp_path / "bf16.gguf", dtype="bf16")
    aprfmt.convert_model(tmp_path / "bf16.gguf", tmp_path / "from-gguf", format="hf", dtype="nvfp4a16")
    again = stored(tmp_path / "from-gguf")
    assert {name: again[name] for name in found} == {name: stored(tmp_path / "out")[name] for name in found}


def test_experts_of_a_gguf_keep_their_codes(stacked: Path, tmp_path: Path) -> None:
    aprfmt.export_model(stacked, tmp_path / "a.gguf", dtype="q8_0", pure=True)
    report = aprfmt.convert_model(tmp_path / "a.gguf", tmp_path / "out", format="gptq")
    up = "model.layers.1.feed_forward.experts.0.up_proj"
    assert stored(tmp_path / "out")[f"{up}.qweight"][:2] == ("I32", (16, 48))
    assert not [loss for loss in report.losses if "w8a16" in loss]
    aprfmt.export_model(tmp_path / "out", tmp_path / "b.gguf")
    with aprfmt.open(tmp_path / "a.gguf") as a, aprfmt.open(tmp_path / "b.gguf") as b:
        for stack in ("ffn_gate_exps", "ffn_up_exps"):  # whose rows have 64 values
            one, other = (model.tensors[f"blk.1.{stack}.weight"] for model in (a, b))
            assert one.dtype == "Q8_0"
            np.testing.assert_array_equal(np.asarray(one.numpy()), np.asarray(other.numpy()))
