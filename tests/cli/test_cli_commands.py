"""Every command on a tiny real model, in all output modes."""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Callable
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from demo_model import MERGES, N_TOKENS, build, vocabulary

from aprfmt.cli.report_text import plan_text
from aprfmt.cli.stamp import parse_assignments
from aprfmt.convert.report import PlannedTensor, Report
from aprfmt.errors import UsageError

Apr = Callable[..., Any]


@pytest.mark.parametrize("kind", ["tiny_gguf", "tiny_apr"])
def test_inspect(apr: Apr, kind: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(kind)
    body = apr("inspect", path, "--json", "--quality").json
    assert body["schema"] == "apr.inspect/1"
    assert body["file"] == str(path)
    assert body["format"] == ("GGUF v3" if kind == "tiny_gguf" else "APR v2")
    assert body["size_bytes"] == path.stat().st_size
    assert (body["tensor_count"], body["architecture"]) == (20, "llama")
    assert body["param_count"] == sum(row["params"] for row in body["dtypes"].values())
    assert body["metadata"]["hidden_size"] == 64
    assert {"license", "data_source", "data_license", "hf_architecture", "hf_model_type"} <= set(body["metadata"])
    assert body["metadata"]["license"] == "mit"
    assert body["tokenizer"] == {
        "model": "gpt2", "pre": "gpt-2", "vocab_size": 300, "merges": 40, "added": 0,
        "bos_id": 1, "eos_id": 2, "pad_id": 3, "unk_id": 0, "chat_template": True,
    }  # fmt: skip
    assert set(body["quality"]) == {"score", "threshold", "ship_ready", "breakdown"}
    assert isinstance(body["compat"]["reference_runtime"], bool)
    assert body["checksum"]["header"] == ("none" if kind == "tiny_gguf" else "ok")


def test_inspect_text_fits_80_columns(apr: Apr, tiny_apr: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = apr("inspect", tiny_apr, "--quality")
    assert done.code == 0
    lines = done.stdout.splitlines()[1:]
    assert [line for line in lines[1:] if len(line) > 80] == []  # the first has the path
    assert any("license" in line and "mit" in line for line in lines)
    assert any("data license" in line and "(missing)" in line for line in lines)


def test_inspect_lists_on_request(apr: Apr, tiny_gguf: Path) -> None:
    body = apr("inspect", tiny_gguf, "--json", "--vocab", "--weights").json
    assert len(body["vocabulary"]) == N_TOKENS
    assert len(body["tensors"]) == 20
    assert "<|im_start|>" in apr("inspect", tiny_gguf, "--vocab").stdout


def test_quiet_says_nothing(apr: Apr, tiny_gguf: Path) -> None:
    for name in ("inspect", "tensors", "validate"):
        done = apr(name, tiny_gguf, "--quiet")
        assert (done.code, done.stdout, done.stderr) == (0, "", "")


def test_tensors(apr: Apr, tiny_gguf: Path) -> None:
    body = apr("tensors", tiny_gguf, "--json", "--hash", "--stats", "--filter", "blk.*.attn_q.weight").json
    assert (body["tensor_count"], len(body["tensors"])) == (20, 2)
    row = body["tensors"][0]
    stored = tiny_gguf.read_bytes()[row["offset"] : row["offset"] + row["size_bytes"]]
    assert row["sha256"] == hashlib.sha256(stored).hexdigest()
    assert row["shape"] == [64, 64]
    assert {"mean", "std", "min", "max", "nan_count", "inf_count", "zero_fraction"} <= set(row)


def test_tensors_limit_and_plain_filter(apr: Apr, tiny_gguf: Path) -> None:
    assert len(apr("tensors", tiny_gguf, "--json", "--limit", "3").json["tensors"]) == 3
    assert len(apr("tensors", tiny_gguf, "--json", "--filter", "norm").json["tensors"]) == 5
    text = apr("tensors", tiny_gguf, "--limit", "2")
    assert len(text.stdout.splitlines()) == 3
    assert "2 of 20" in text.stderr
    assert apr("tensors", tiny_gguf, "--filter", "norm").stderr == ""
    assert "no tensor matches 'nothing'" in apr("tensors", tiny_gguf, "--filter", "nothing").stderr


def test_tensors_of_shards_name_their_file(apr: Apr, tiny_gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    words = ("export", tiny_gguf, "-o", folder, "--format", "hf", "--dtype", "f32", "--shard-size", "100KB")
    assert apr(*words).code == 0
    rows = apr("tensors", folder, "--json", "--hash").json["tensors"]
    assert len({row["file"] for row in rows}) > 1
    for row in rows:
        stored = (folder / row["file"]).read_bytes()[row["offset"] : row["offset"] + row["size_bytes"]]
        assert row["sha256"] == hashlib.sha256(stored).hexdigest()
    assert "file" not in apr("tensors", tiny_gguf, "--json").json["tensors"][0]


@pytest.mark.parametrize("suffix", ["gguf", "safetensors", "GGUF"])
def test_import_refuses_the_name_of_another_container(apr: Apr, tiny_gguf: Path, tmp_path: Path, suffix: str) -> None:
    done = apr("import", tiny_gguf, "-o", tmp_path / f"x.{suffix}", "--json")
    assert done.code == 2
    assert done.json["error"]["hint"].startswith("apr convert ")
    assert list(tmp_path.iterdir()) == []


def test_round_trip_through_the_commands(apr: Apr, tiny_gguf: Path, tmp_path: Path) -> None:
    packed, back = tmp_path / "m.apr", tmp_path / "m.gguf"
    body = apr("import", tiny_gguf, "-o", packed, "--json").json
    keys = {"source", "output", "format", "architecture", "tensor_count", "input_bytes", "output_bytes", "dtypes"}
    assert keys | {"seconds", "warnings", "lossless"} <= set(body)
    assert body["output_bytes"] == packed.stat().st_size
    plan = apr("export", packed, "-o", back, "--plan", "--json")
    assert plan.json["plan"] is True
    assert not back.exists()
    done = apr("export", packed, "-o", back)
    assert done.code == 0
    assert "wrote" in done.stdout
    assert back.read_bytes() == tiny_gguf.read_bytes()
    assert apr("import", tiny_gguf, "-o", packed).code == 5
    assert apr("import", tiny_gguf, "-o", packed, "--force").code == 0
    assert apr("convert", packed, "-o", packed, "--force", "--json").json["error"]["code"] == "refused"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.apr", "m.gguf"]


def test_a_plan_as_text_is_a_row_for_like_tensors_of_all_layers(apr: Apr, tiny_gguf: Path, tmp_path: Path) -> None:
    mix = ("--dtype", "q8_0", "--tensor-type", "blk.0.ffn_down=f16")
    words = ("convert", tiny_gguf, "-o", tmp_path / "x.gguf", *mix, "--plan")
    done = apr(*words)
    assert done.code == 0
    assert "nothing is written" in done.stdout
    assert list(tmp_path.iterdir()) == []
    header, *rows = done.stdout[: done.stdout.index("\n\n")].splitlines()
    assert header.split() == ["tensor", "*", "dtype", "shape", "count", "size"]
    assert rows[0].split() == ["token_embd.weight", "Q8_0", "300×64", "1", "19.9", "KiB"]
    found = [row.split() for row in rows]
    assert [row for row in found if "attn_q" in row[0]] == [
        ["blk.*.attn_q.weight", "0–1", "Q8_0", "64×64", "2", "8.50", "KiB"]
    ]
    assert [row[:3] for row in found if "ffn_down" in row[0]] == [
        ["blk.0.ffn_down.weight", "F16", "64×128"],
        ["blk.1.ffn_down.weight", "Q8_0", "64×128"],
    ]
    planned = apr(*words, "--json").json["tensors"]
    assert sum(int(row[-3]) for row in found) == len(planned) == 20
    assert {name for row in rows for name in row.split()[:1] if "*" not in name} <= {row["name"] for row in planned}


def test_a_plan_folds_experts_and_keeps_numbers_that_are_the_same(tmp_path: Path) -> None:
    def planned(name: str, dtype: str = "BF16") -> PlannedTensor:
        return {"name": name, "dtype": dtype, "shape": [4, 8], "size_bytes": 64}

    experts = [
        planned(f"layers.{layer}.experts.{e}.up", "F8" if layer == 3 else "BF16") for layer in (1, 2, 3) for e in (0, 1)
    ]
    report = Report(
        source="a", output="b", format="hf", label="HF folder", architecture=None, tensor_count=8, input_bytes=0,
        output_bytes=0, dtypes={}, lossless=True, plan=True,
        tensors=[*experts, planned("block.0.layer.1.k2.v"), planned("block.1.layer.1.k2.v")],
    )  # fmt: skip
    rows = [line.split() for line in islice(plan_text(report), 1, 4)]
    assert rows == [
        ["layers.*.experts.*.up", "1–2", "BF16", "4×8", "4", "256", "B"],
        ["layers.3.experts.*.up", "0–1", "F8", "4×8", "2", "128", "B"],
        ["block.*.layer.1.k2.v", "0–1", "BF16", "4×8", "2", "128", "B"],
    ]


def test_quantize_is_an_alias(apr: Apr, tiny_gguf: Path, tmp_path: Path) -> None:
    body = apr("export", tiny_gguf, "-o", tmp_path / "q.gguf", "--quantize", "q8_0", "--json").json
    assert "Q8_0" in body["dtypes"]
    assert body["lossless"] is False


def test_the_machine_options(apr: Apr, tiny_gguf: Path, tmp_path: Path) -> None:
    small = apr("convert", tiny_gguf, "-o", tmp_path / "x.apr", "--max-memory", "5MiB", "--json")
    assert small.code == 5
    assert "--max-memory" in small.json["error"]["hint"]
    none = apr("convert", tiny_gguf, "-o", tmp_path / "x.apr", "--threads", "0")
    assert none.code == 2
    assert "threads must be a number from 1 to" in none.stderr
    assert apr("convert", tiny_gguf, "-o", tmp_path / "x.apr", "--max-memory", "much").code == 2
    assert list(tmp_path.iterdir()) == []
    wish = ("--threads", "3", "--max-memory", "64GiB", "--no-fsync")
    assert apr("import", tiny_gguf, "-o", tmp_path / "a.apr", *wish).code == 0
    assert apr("import", tiny_gguf, "-o", tmp_path / "b.apr").code == 0
    assert (tmp_path / "a.apr").read_bytes() == (tmp_path / "b.apr").read_bytes()


@pytest.mark.parametrize("output", ["-", "missing/x.apr"])
def test_refusals(apr: Apr, tiny_gguf: Path, tmp_path: Path, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert apr("import", tiny_gguf, "-o", output).code == (5 if output == "-" else 7)
    assert list(tmp_path.iterdir()) == []


def test_diff(apr: Apr, tiny_gguf: Path, tiny_apr: Path) -> None:
    assert apr("diff", tiny_apr, tiny_apr).code == 0
    by_value = apr("diff", tiny_gguf, tiny_apr, "--values", "--json")
    assert by_value.code == 0
    assert by_value.json["identical"] is True
    assert by_value.json["tensors_compared"] == 20
    done = apr("diff", tiny_gguf, tiny_apr, "--json")
    assert done.code == 1
    assert [row["kind"] for row in done.json["differences"]] == ["format"]
    assert "GGUF v3" in apr("diff", tiny_gguf, tiny_apr).stdout


def test_diff_refuses_options_that_make_no_sense(apr: Apr, tiny_apr: Path) -> None:
    assert apr("diff", tiny_apr, tiny_apr, "--tolerance", "1").code == 2
    assert apr("diff", tiny_apr, tiny_apr, "--values", "--metadata-only").code == 2
    assert apr("diff", tiny_apr, tiny_apr, "--values", "--tolerance", "nan").code == 2


def test_values_are_shown_as_json(apr: Apr, tiny_apr: Path, tmp_path: Path) -> None:
    target = tmp_path / "s.apr"
    words = ("stamp", tiny_apr, "-o", target, "--set", 'x={"on": [true, null, "é"]}')
    assert '{"on": [true, null, "é"]}' in apr(*words).stdout
    assert '+ {"on": [true, null, "é"]}' in apr("diff", tiny_apr, target).stdout


def test_validate_wraps_on_a_terminal(apr: Apr, tiny_apr: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    whole = "all tensors of the architecture are present, and no others"
    assert whole in apr("validate", tiny_apr).stdout
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda stream: stream is sys.stdout, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    lines = apr("validate", tiny_apr).stdout.splitlines()
    assert [line for line in lines[1:] if len(line) > 80] == []  # the first has the path
    assert " " * 30 + "no others" in lines


def test_validate(apr: Apr, tiny_apr: Path, tmp_path: Path) -> None:
    done = apr("validate", tiny_apr, "--json")
    assert done.code == 0
    assert (done.json["passed"], done.json["score"]) == (True, 100)
    assert set(done.json["checks"][0]) >= {"id", "status", "message"}
    data = bytearray(tiny_apr.read_bytes())
    data[-5000] ^= 255
    damaged = tmp_path / "d.apr"
    damaged.write_bytes(data)
    bad = apr("validate", damaged, "--json")
    assert bad.code == 5
    assert bad.json["passed"] is False
    assert "FAIL" in apr("validate", damaged).stdout


def test_stamp(apr: Apr, tiny_apr: Path, tmp_path: Path) -> None:
    target = tmp_path / "s.apr"
    done = apr("stamp", tiny_apr, "-o", target, "--data-source", "wikitext", "--set", 'author="me"', "--json")
    assert done.code == 0
    body = apr("inspect", target, "--json").json
    assert (body["metadata"]["data_source"], body["metadata"]["author"]) == ("wikitext", "me")
    assert apr("diff", tiny_apr, target, "--values").code == 0
    found = apr("diff", tiny_apr, target, "--metadata-only", "--json")
    assert found.code == 1
    assert sorted(row["name"] for row in found.json["differences"]) == ["author", "data_source"]
    assert apr("stamp", target, "--in-place", "--license", "MIT").code == 0
    assert apr("inspect", target, "--json").json["metadata"]["license"] == "MIT"
    assert apr("stamp", target, "--license", "MIT").code == 2


def test_assignments() -> None:
    assert parse_assignments(["a=1", "b:u32[]=[1]", "d=x=y", "e:f=z"]) == (
        {"a": "1", "b": "[1]", "d": "x=y", "e:f": "z"},
        {"b": "u32[]"},
    )
    for bad in ("novalue", "=1", ":u32=1"):
        with pytest.raises(UsageError):
            parse_assignments([bad])
    with pytest.raises(UsageError):
        parse_assignments(["a=1", "a=2"])


def test_names_that_are_no_unicode(apr: Apr, tmp_path: Path) -> None:
    from aprfmt import RawTensor, save_file

    path = tmp_path / "odd.apr"
    name = b"w\xff\x1b[31m".decode("utf-8", "surrogateescape")
    save_file({name: RawTensor("F32", (2,), b"\0" * 8)}, path, metadata={"model_type": "test"})
    assert apr("tensors", path, "--json").json["tensors"][0]["name"] == name
    text = apr("tensors", path).stdout
    assert "\x1b" not in text
    assert "\\udcff" in text
    assert apr("validate", path, "--json").code == 0  # all zero in one dimension is a warning


def test_demo_model_of_the_package_is_what_its_builder_makes(tmp_path: Path) -> None:
    build(tmp_path / "a.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (files("aprfmt.cli") / "demo-tiny.gguf").read_bytes()
    tokens, merges = vocabulary()
    assert (len(tokens), len(set(tokens))) == (N_TOKENS, N_TOKENS)
    known = set(tokens[4:260])
    for merge in MERGES:
        left, right = merge.split(" ")
        assert {left, right} <= known
        known.add(left + right)
    assert len(merges) == 40


def test_demo(apr: Apr, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aprfmt.llama.client.find_spec", lambda name: None)
    done = apr("demo", tiny_gguf, "-o", tmp_path / "kept")
    assert done.code == 0
    assert "identical to the source" in done.stdout
    assert "all steps except generate passed" in done.stdout
    assert "pip install xllamacpp" in done.stderr
    assert (tmp_path / "kept" / "tiny.roundtrip.gguf").read_bytes() == tiny_gguf.read_bytes()
    assert done.stdout.startswith(f"apr demo on {tiny_gguf}\n")
    monkeypatch.delenv("APR_DEMO_MODEL", raising=False)
    monkeypatch.setattr("aprfmt.cli.demo.find_spec", lambda name: None)
    assert apr("demo").stdout.startswith("apr demo on the bundled tiny model\n")
    assert apr("demo", "-o", tmp_path / "mine").stdout.startswith(f"apr demo on {tmp_path / 'mine'}")
    monkeypatch.setenv("APR_DEMO_MODEL", str(tiny_gguf))
    body = apr("demo", "--json").json
    assert [step["name"] for step in body["steps"]] == ["import", "inspect", "validate", "export", "compare"]


@pytest.mark.llama
def test_demo_generates(apr: Apr, tiny_gguf: Path) -> None:
    done = apr("demo", tiny_gguf, "--json")
    assert json.loads(done.stdout)["steps"][-1]["name"] == "generate"


def test_keys_of_a_gguf_are_listed_and_set(apr: Apr, tiny_gguf: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    target = tmp_path / "s.gguf"
    words = ["--set", "general.name=Seven 7", "--set", f"tokenizer.chat_template=@{template}", "--set", "my.n:u16=7"]
    assert apr("stamp", tiny_gguf, "-o", target, *words).code == 0
    keys = {row["key"]: row for row in apr("inspect", target, "--metadata", "--json").json["keys"]}
    assert keys["general.name"] == {"key": "general.name", "type": "STRING", "count": None, "value": "Seven 7"}
    assert keys["tokenizer.chat_template"]["value"] == "{{ messages }}"
    assert keys["my.n"]["type"] == "UINT16"
    assert "my.n" in apr("inspect", target, "--metadata").stdout
    assert apr("stamp", target, "--in-place", "--unset", "my.n").code == 0
    assert "my.n" not in apr("inspect", target, "--metadata").stdout
    assert apr("stamp", target, "--in-place", "--set", "my.n=7").code == 2


def test_prune_says_what_it_leaves_out(apr: Apr, tiny_gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "cut.gguf"
    plan = apr("prune", tiny_gguf, "--drop-layers", "0", "-o", out, "--plan", "--json")
    assert plan.json["plan"] is True
    assert not out.exists()
    done = apr("prune", tiny_gguf, "--drop-layers", "0", "-o", out)
    assert done.code == 0
    assert "layer 0 of 2 dropped" in done.stdout
    assert apr("inspect", out, "--json").json["metadata"]["num_layers"] == 1
    wrong = apr("prune", tiny_gguf, "--keep-layers", "7", "-o", tmp_path / "x.gguf", "--json")
    assert wrong.code == 2
    assert wrong.json["error"]["code"] == "usage"
    assert "unknown layer 7" in wrong.json["error"]["message"]


def test_merge_takes_options_or_a_recipe(apr: Apr, tiny_gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "merged.gguf"
    words = ("merge", tiny_gguf, tiny_gguf, "-o", out, "--method", "slerp", "--t", "0.25")
    plan = apr(*words, "--plan", "--json")
    assert plan.json["plan"] is True
    assert not out.exists()
    assert apr(*words).code == 0
    tables = [apr("tensors", path, "--hash", "--json").json["tensors"] for path in (tiny_gguf, out)]
    assert [(row["name"], row["sha256"]) for row in tables[0]] == [(row["name"], row["sha256"]) for row in tables[1]]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"merge_method: ties\nbase_model: {tiny_gguf}\nmodels:\n- model: {tiny_gguf}\n"
        "  parameters:\n    weight: [0.2, 1]\n    density: lots\n"
    )
    wrong = apr("merge", "--config", recipe, "-o", out, "--force", "--json")
    assert (wrong.code, wrong.json["error"]["code"]) == (2, "usage")
    assert "line 7: density must be a number, not 'lots'" in wrong.json["error"]["message"]
    deep = tmp_path / "deep.gguf"
    stacked = apr(
        "merge", tiny_gguf, tiny_gguf, "-o", deep, "--method", "passthrough", "--layers", "0-1", "--layers", "1"
    )
    assert stacked.code == 0
    assert apr("inspect", deep, "--json").json["metadata"]["num_layers"] == 3
    assert apr("merge", tiny_gguf, "-o", out, "--method", "mean", "--json").code == 2


def test_vocab_encodes_decodes_and_compares(
    apr: Apr, tiny_gguf: Path, tiny_apr: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = apr("vocab", tiny_gguf, "ab", "b", "--json").json
    assert done["schema"] == "apr.vocab/1"
    (first, second) = done["texts"]
    assert first["decoded"] == "ab"
    assert [token["id"] for token in second["tokens"]] == second["ids"]
    shown = apr("vocab", tiny_gguf, "--ids", " ".join(map(str, first["ids"]))).stdout
    assert shown.startswith("ab\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab")))
    assert apr("vocab", tiny_gguf, "--stdin", "--json").json["texts"] == [first]
    assert apr("vocab", tiny_gguf, "ab", "--stdin").code == 2
    same = apr("vocab", tiny_gguf, "--against", tiny_apr)
    assert (same.code, same.stdout[:4]) == (0, "same")
    other = tmp_path / "other.gguf"
    apr("stamp", tiny_gguf, "-o", other, "--set", "tokenizer.ggml.eos_token_id=7")
    different = apr("vocab", tiny_gguf, "--against", other, "--json")
    assert different.code == 1
    assert [one["what"] for one in different.json["differences"]] == ["special tokens"]
    assert apr("vocab", tiny_gguf).stdout.count("\n") > 4
