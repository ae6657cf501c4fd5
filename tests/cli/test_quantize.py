"""`apr quantize`, and the same options on export, convert and import."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from imatrix_files import old_imatrix

import aprfmt
from aprfmt.codecs import backend
from aprfmt.convert.presets import PRESETS

Apr = Callable[..., Any]


@pytest.fixture(scope="module")
def weights(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An importance matrix for the tiny model."""
    with aprfmt.open(tiny_gguf) as model:
        entries = {
            t.name: [1.0 + i % 3 for i in range(t.shape[-1])]
            for t in model.tensors.values()
            if t.name.startswith("blk.") and len(t.shape) > 1
        }
    path = tmp_path_factory.mktemp("imatrix") / "m.dat"
    path.write_bytes(old_imatrix(entries))
    return path


def test_the_list_has_every_mix_with_its_size_and_advice(apr: Apr) -> None:
    text = apr("quantize", "--list").stdout
    body = apr("quantize", "--list", "--json").json
    assert [row["name"] for row in body["mixes"]] == list(PRESETS)
    assert body["count"] == len(PRESETS)
    row = next(row for row in body["mixes"] if row["name"] == "q4_k_m")
    assert (row["bits_per_weight"], row["file_type"], row["aliases"]) == (4.89, 15, ["q4_k"])
    for row in body["mixes"]:
        assert row["advice"] in text
        assert f"{row['bits_per_weight']:.2f}" in text


def test_quantize_writes_the_mix(apr: Apr, tiny_gguf: Path, tmp_path: Path) -> None:
    body = apr("quantize", tiny_gguf, "Q8_0", "-o", tmp_path / "q.gguf", "--json").json
    assert body["ok"]
    assert body["dtypes"].keys() == {"Q8_0", "F32"}
    assert 8 < body["bits_per_weight"] < 9
    with aprfmt.open(tmp_path / "q.gguf") as model:
        assert model.metadata["general.file_type"] == PRESETS["q8_0"].file_type
    again = apr("export", tiny_gguf, "-o", tmp_path / "e.gguf", "--quantize", "q8_0", "--json").json
    assert again["dtypes"] == body["dtypes"]
    assert (tmp_path / "e.gguf").read_bytes() == (tmp_path / "q.gguf").read_bytes()
    assert apr("quantize", tiny_gguf, "q8_0", "-o", tmp_path / "q.gguf").code == 5
    assert apr("quantize", tiny_gguf, "q8_0", "-o", tmp_path / "q.gguf", "--force").code == 0


def test_a_plan_shows_types_sizes_and_bits(apr: Apr, tiny_gguf: Path, tmp_path: Path) -> None:
    words = ("quantize", tiny_gguf, "q5_1", "-o", tmp_path / "q.apr", "--tensor-type", "attn_v=q8_0", "--plan")
    body = apr(*words, "--json").json
    types = {row["name"]: row["dtype"] for row in body["tensors"]}
    assert types["model.layers.0.self_attn.v_proj.weight"] == "Q8_0"
    assert types["model.layers.0.self_attn.q_proj.weight"] == "Q5_1"
    done = apr(*words)
    assert f"{body['bits_per_weight']:.2f} bits per weight" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_an_importance_matrix_is_named_in_the_gguf(apr: Apr, tiny_gguf: Path, weights: Path, tmp_path: Path) -> None:
    words = ("convert", tiny_gguf, "-o", tmp_path / "q.gguf", "--dtype", "q4_0", "--imatrix", weights)
    assert apr(*words, "--json").json["warnings"] == []
    with aprfmt.open(tmp_path / "q.gguf") as model:
        assert model.metadata["quantize.imatrix.file"] == str(weights)
        assert model.metadata["quantize.imatrix.chunks_count"] == 7
    weights_free = apr("convert", tiny_gguf, "-o", tmp_path / "p.gguf", "--dtype", "q4_0", "--json").json
    assert weights_free["ok"]
    assert (tmp_path / "p.gguf").read_bytes() != (tmp_path / "q.gguf").read_bytes()


def test_entries_that_are_missing_are_named(apr: Apr, tiny_gguf: Path, tmp_path: Path) -> None:
    with aprfmt.open(tiny_gguf) as model:
        cols = model.tensors["blk.0.attn_q.weight"].shape[-1]
    (tmp_path / "m.dat").write_bytes(old_imatrix({"blk.0.attn_q.weight": [1.0] * cols}))
    words = ("quantize", tiny_gguf, "q4_0", "-o", tmp_path / "q.gguf", "--imatrix", tmp_path / "m.dat")
    body = apr(*words, "--json").json
    assert "no entry for blk.0.attn_k.weight" in body["warnings"][0]


USAGE = {
    "no preset": ((), "TYPE is missing"),
    "unknown": (("q4_k_x",), "unknown dtype or quantization preset"),
    "floats": (("f16",), "not a quantized type"),
    "single": (("mxfp4",), "not a quantization preset"),
    "intermediate": (("q8_k", "--pure"), "unknown dtype or quantization preset"),
    "broken pattern": (("q8_0", "--tensor-type", "attn(=q8_0"), "attn("),
    "no pattern": (("q8_0", "--tensor-type", "=q8_0"), "REGEX=TYPE"),
    "no type": (("q8_0", "--tensor-type", "attn_v"), "REGEX=TYPE"),
    "unknown type": (("q8_0", "--tensor-type", "attn_v=q9"), "q9"),
    "apr type": (("q8_0", "--output-type", "aprq8"), "aprq8"),
    "integers": (("q8_0", "--embedding-type", "i32"), "i32"),
    "pure floats": (("aprq8", "--pure"), "--pure"),
}


@pytest.mark.parametrize("name", USAGE)
def test_what_makes_no_sense_is_a_usage_error(name: str, apr: Apr, tiny_gguf: Path, tmp_path: Path) -> None:
    words, said = USAGE[name]
    done = apr("quantize", tiny_gguf, *words, "-o", tmp_path / "x.apr", "--json")
    assert done.code == 2
    assert said in done.json["error"]["message"]
    assert list(tmp_path.iterdir()) == []


def test_the_hint_is_the_line_that_was_typed(apr: Apr, tiny_gguf: Path, tmp_path: Path) -> None:
    output = tmp_path / "x.apr"
    for words in ((tiny_gguf,), ("q4_k_m", tiny_gguf)):
        error = apr("quantize", *words, "-o", output, "--json").json["error"]
        assert error["hint"].splitlines()[0] == f"apr quantize {tiny_gguf} q4_k_m -o {output} --json"
    assert apr("quantize").stderr.splitlines()[1] == "hint: apr quantize FILE q4_k_m"
    assert apr("quantize", "q8_0").stderr.splitlines()[:2] == ["error: FILE is missing", "hint: apr quantize FILE q8_0"]


def test_an_unknown_mix_names_the_nearest(apr: Apr, tiny_gguf: Path, tmp_path: Path) -> None:
    for words in (("quantize", tiny_gguf, "q4km_"), ("convert", tiny_gguf, "--dtype", "iq3xx")):
        error = apr(*words, "-o", tmp_path / "x.gguf", "--json").json.get("error")
        if words[0] == "quantize":
            assert error is None  # case and underscores do not matter
        else:
            assert error["hint"].startswith("did you mean iq3_xx")
            assert "apr quantize --list" in error["hint"]
    assert "q4_k_m, q4_k_s" in apr("quantize", tiny_gguf, "whatever", "-o", tmp_path / "x.gguf").stderr


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("int4", "q4_k_m"),
        ("4-bit", "q4_k_m"),
        ("Q4", "q4_k_m"),
        ("int8", "q8_0"),
        ("q8", "q8_0"),
        ("float8", "f8_e4m3"),
    ],
)
def test_names_of_other_programs_come_nearest_to_a_mix(
    apr: Apr, tiny_gguf: Path, tmp_path: Path, name: str, nearest: str
) -> None:
    done = apr("convert", tiny_gguf, "-o", tmp_path / "x.gguf", "--dtype", name)
    assert (done.code, done.stderr.splitlines()[1].split("?")[0]) == (2, f"hint: did you mean {nearest}")
    assert apr("quantize", tiny_gguf, name, "-o", tmp_path / "x.gguf").code == 2


def test_a_scheme_of_folders_comes_with_the_line_that_writes_one(apr: Apr, tiny_gguf: Path, tmp_path: Path) -> None:
    for name, lines in {
        "w4a16": ["--format hf --quantize w4a16", f"or, for a GGUF: apr quantize {tiny_gguf} q4_k_m"],
        "FP8_DYNAMIC": ["--format hf --quantize FP8_DYNAMIC"],
    }.items():
        for output in ([], ["-o", tmp_path / "x.gguf"]):
            error = apr("quantize", tiny_gguf, name, *output, "--json").json["error"]
            assert error["code"] == "usage"
            assert error["hint"].splitlines() == [f"apr convert {tiny_gguf} -o FOLDER {lines[0]}", *lines[1:]]


def test_options_of_a_mix_need_one(apr: Apr, tiny_gguf: Path, weights: Path, tmp_path: Path) -> None:
    for words in (("--imatrix", weights), ("--pure",), ("--dtype", "f16", "--tensor-type", "attn=q8_0")):
        done = apr("convert", tiny_gguf, "-o", tmp_path / "x.gguf", *words, "--json")
        assert (done.code, "only applies to a quantization preset" in done.json["error"]["message"]) == (2, True)


def test_refusals_leave_nothing_behind(apr: Apr, tiny_gguf: Path, weights: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert apr("quantize", tiny_gguf, "q8_0", "-o", tmp_path / "q8.gguf").code == 0
    other, cut = tmp_path / "other.dat", tmp_path / "cut.dat"
    other.write_bytes(old_imatrix({"blk.0.attn_q.weight": [1.0] * 7}))
    (tmp_path / "none.dat").write_bytes(old_imatrix({"blk.0.attn_z.weight": [1.0] * 7}))
    cut.write_bytes(weights.read_bytes()[:100])
    cases = [
        (5, "already quantized", (tmp_path / "q8.gguf", "q4_0")),
        (5, "belongs to another model", (tiny_gguf, "q4_0", "--imatrix", other)),
        (5, "belongs to another model", (tiny_gguf, "q4_0", "--imatrix", tmp_path / "none.dat")),
        (4, "bytes", (tiny_gguf, "q4_0", "--imatrix", cut)),
        (3, "no such file", (tiny_gguf, "q4_0", "--imatrix", tmp_path / "absent.dat")),
    ]
    for code, said, words in cases:
        done = apr("quantize", *words, "-o", out / "x.gguf", "--json")
        assert (done.code, said in done.json["error"]["message"]) == (code, True), words
        if said == "belongs to another model":
            assert f"apr imatrix {tiny_gguf} --data TEXT -o FILE" in done.json["error"]["hint"]
        assert list(out.iterdir()) == []
    # told to, it requantizes
    words = (tmp_path / "q8.gguf", "q4_0", "--allow-requantize", "-o", out / "x.gguf")
    assert apr("quantize", *words).code == 0


def test_without_the_library_a_mix_that_needs_it_is_refused(
    apr: Apr, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_find", lambda package: f"{package} is not installed")
    words = (tiny_gguf, "q4_0", "--tensor-type", "attn_v=iq4_nl", "-o", tmp_path / "x.gguf", "--json")
    done = apr("quantize", *words)
    assert done.code == 6
    error = done.json["error"]
    assert "IQ4_NL" in error["message"]
    assert "not installed" in error["message"]
    assert list(tmp_path.iterdir()) == []
    # the simpler types need no library
    words = (tiny_gguf, "q4_0", "--output-type", "q8_0", "-o", tmp_path / "x.gguf", "--json")
    assert apr("quantize", *words).code == 0


def test_wishes_without_effect_are_said(apr: Apr, tiny_gguf: Path, tmp_path: Path) -> None:
    words = ("--tensor-type", "nowhere=q6_k", "--tensor-type", r"FFN_\Down=q8_0", "--plan", "--json")
    warnings = apr("quantize", tiny_gguf, "q8_0", "-o", tmp_path / "q.gguf", *words).json["warnings"]
    assert "--tensor-type nowhere=q6_k matches no tensor that the preset quantizes" in warnings
    both = apr("quantize", tiny_gguf, "q8_0", "-o", tmp_path / "q.gguf", "--leave-output", "--output-type", "q8_0")
    assert both.code == 2
    assert "are mutually exclusive" in both.stderr


def test_patterns_keep_their_classes(apr: Apr, tiny_gguf: Path, tmp_path: Path) -> None:
    """`\\S` is not `\\s`, and case does not matter."""
    words = ("--tensor-type", r"FFN_\Sown=f16", "--json")
    assert apr("quantize", tiny_gguf, "q8_0", "-o", tmp_path / "q.gguf", *words).json["ok"]
    with aprfmt.open(tmp_path / "q.gguf") as model:
        assert {t.dtype for t in model.tensors.values() if "ffn_down" in t.name} == {"F16"}


def test_rows_that_blocks_do_not_divide_are_said(apr: Apr, tiny_gguf: Path, tmp_path: Path) -> None:
    body = apr("quantize", tiny_gguf, "q4_k_m", "-o", tmp_path / "q.gguf", "--plan", "--json").json
    assert any("with rows that are not a multiple of 256: stored as" in warning for warning in body["warnings"])


def test_a_forbidden_library_is_not_called_missing(
    apr: Apr, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APR_BACKEND", "numpy")
    done = apr("quantize", tiny_gguf, "iq4_nl", "-o", tmp_path / "q.gguf")
    assert done.code == 6
    assert "APR_BACKEND=numpy disables it" in done.stderr


def test_an_importance_that_no_encoder_takes(apr: Apr, tiny_gguf: Path, tmp_path: Path) -> None:
    for value in (-5.0, 1e30):
        path = tmp_path / "m.dat"
        path.write_bytes(old_imatrix({"blk.0.attn_q.weight": [1.0, value]}))
        words = ("--imatrix", path, "--plan", "--json")
        error = apr("quantize", tiny_gguf, "q4_0", "-o", tmp_path / "q.gguf", *words).json["error"]
        assert (error["path"], error["tensor"]) == (str(path), "blk.0.attn_q.weight")
        assert "negative, above 2^60" in error["message"]
