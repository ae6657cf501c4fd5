"""`--require-signature` and APR_REQUIRE_SIGNATURE: each command that reads models refuses each attack by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from registry_server import serve
from signed_models import ATTACKS, Signed, write_signed

import aprfmt
from aprfmt.cli.commands import COMMANDS
from aprfmt.cli.main import run
from aprfmt.errors import AprError, ChecksumError, RefusedError
from aprfmt.trust.signature import REQUIRED_SIGNER

pytest.importorskip("model_signing.signing")

# IN: the attacked folder, OUT: a path that must not appear, DATA: a text, GOOD: a signed model.
WORDS: dict[str, str] = {
    "inspect": "inspect IN",
    "tensors": "tensors IN",
    "tree": "tree IN",
    "sbom": "sbom IN -o OUT.json",
    "hex": "hex IN/model.safetensors",
    "validate": "validate IN",
    "lint": "lint IN",
    "diff": "diff GOOD IN",
    "vocab": "vocab IN text",
    "report": "report IN -o OUT.html",
    "import": "import IN -o OUT.apr",
    "export": "export IN -o OUT.gguf",
    "convert": "convert IN -o OUT.gguf",
    "quantize": "quantize IN q8_0 -o OUT.gguf",
    "merge": "merge GOOD IN -o OUT --method linear",
    "merge-adapter": "merge-adapter GOOD IN -o OUT",
    "prune": "prune IN -o OUT --drop-layers 1",
    "transplant": "transplant IN -o OUT --tokenizer GOOD",
    "imatrix": "imatrix IN --data DATA -o OUT.gguf",
    "shard": "shard IN -o OUT",
    "meta": "meta list IN",
    "stamp": "stamp IN -o OUT.apr --license MIT",
    "run": "run IN hello",
    "bench": "bench IN",
    "qa": "qa IN",
    "canary": "canary make IN --canary OUT.json",
    "parity": "parity IN GOOD",
    "distill": "distill GOOD --student IN --data DATA -o OUT --steps 1 --device cpu",
    "teacher": "teacher IN --data DATA -o OUT",
    "pretrain": "pretrain --init IN --data DATA -o OUT --steps 1 --device cpu",
    "data": "data DATA --model IN",
    "eval": "eval IN --data DATA",
}
WORDS_OF_PUSH = {
    "push": "push IN org/name --no-license",
    "push to a registry": "push IN oci://127.0.0.1:1/name:1 --no-license",  # nothing listens there
}
SHORT = "--device cpu --steps 1 --seq-len 32 --tokens-per-step 64 --micro-tokens 64 --eval-tokens 64 --held-out 0.1"
ELSEWHERE = {
    "stamp": "takes one file: see test_a_single_file",
    "resume": "takes a run: see test_resume_refuses_every_attack_on_the_teacher",
    "pull": "takes an address: see test_pull_refuses_every_attack",
}


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    return write_signed(tmp_path_factory.mktemp("signed"))


@pytest.fixture(scope="module", params=ATTACKS)
def attacked(request: pytest.FixtureRequest, signed: Signed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("attacked")
    shutil.copytree(signed.root / "stranger", root / "stranger")
    shutil.copytree(signed.folder, root / "model")
    (root / "data.txt").write_text("The cat sat on the mat. " * 50)
    ATTACKS[request.param][0](root / "model")
    return root


def test_the_table_names_every_command_that_reads_models() -> None:
    assert {*WORDS, *ELSEWHERE, "push"} == {name for name, row in COMMANDS.items() if row.reads_models}


@pytest.mark.turns(of=12)  # of every command and every attack
@pytest.mark.parametrize("command", [*WORDS, *WORDS_OF_PUSH])
def test_every_command_refuses_every_attack_by_name(
    signed: Signed, attacked: Path, command: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ATTACKS[request.node.callspec.params["attacked"]][1]
    places = {"IN": attacked / "model", "OUT": attacked / "out", "DATA": attacked / "data.txt", "GOOD": signed.folder}
    arguments = []
    for word in (WORDS | WORDS_OF_PUSH)[command].split():
        stem = next((stem for stem in places if word == stem or word.startswith((f"{stem}.", f"{stem}/"))), None)
        arguments.append(word if stem is None else f"{places[stem]}{word[len(stem) :]}")
    code = run([*arguments, "--require-signature", signed.public, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert code in ((2,) if command == "diff" else (4, 5)), said
    assert words in said["error"]["message"], said
    assert not [path for path in attacked.iterdir() if path.name.startswith("out")]
    assert REQUIRED_SIGNER not in os.environ


@pytest.mark.parametrize("attack", ATTACKS)
def test_pull_refuses_every_attack(
    signed: Signed, tmp_path: Path, attack: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("APR_CACHE", str(tmp_path / "cache"))
    shutil.copytree(signed.root / "stranger", tmp_path / "stranger")
    folder, out = Path(shutil.copytree(signed.folder, tmp_path / "model")), tmp_path / "out"
    words = ["pull", "", "-o", str(out), "--require-signature", signed.public, "--json"]
    with serve() as registry:
        words[1] = f"oci://{registry.host}/model:1"
        aprfmt.push_oci(folder, words[1], no_license=True)
        assert run(words) == 0
        assert "signed by release.pub" in json.loads(capsys.readouterr().out)["signature"]
        shutil.rmtree(out)
        ATTACKS[attack][0](folder)
        with suppress(AprError):  # a damaged model is not even published
            aprfmt.push_oci(folder, words[1], no_license=True)
            assert run(words) in (4, 5)
            assert ATTACKS[attack][1] in json.loads(capsys.readouterr().out)["error"]["message"]
    assert not out.exists()


@pytest.fixture(scope="module")
def trained(signed: Signed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a distillation of one step in `run`, from the signed teacher in `model`."""
    pytest.importorskip("torch")
    root = tmp_path_factory.mktemp("trained")
    shutil.copytree(signed.root / "stranger", root / "stranger")
    shutil.copytree(signed.folder, root / "model")
    texts = [json.dumps({"text": " ".join(str(n**3) for n in range(at, at + 40))}) for at in range(0, 1600, 40)]
    (root / "data.jsonl").write_text("\n".join(texts))
    aprfmt.prune_model(root / "model", root / "student", keep_layers=[0])
    words = f"distill {root}/model --student {root}/student --data {root}/data.jsonl -o {root}/run"
    assert run([*words.split(), *SHORT.split(), "--allow-weaker-teacher", "-q"]) == 0
    return root


@pytest.mark.turns(of=4)
@pytest.mark.parametrize("attack", ATTACKS)
def test_resume_refuses_every_attack_on_the_teacher(
    signed: Signed, trained: Path, attack: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(trained / "model")
    shutil.copytree(signed.folder, trained / "model")
    ATTACKS[attack][0](trained / "model")
    words = ["resume", str(trained / "run"), "--steps", "2", "--require-signature", signed.public, "--json"]
    assert run(words) in (4, 5)
    assert ATTACKS[attack][1] in json.loads(capsys.readouterr().out)["error"]["message"]


@pytest.mark.parametrize("command", ["inspect", "tensors", "convert", "import", "validate"])
def test_a_signed_model_is_read(
    signed: Signed, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = {"convert": ["-o", str(tmp_path / "o.gguf")], "import": ["-o", str(tmp_path / "o.apr")]}
    assert run([command, str(signed.folder), *out.get(command, []), "--require-signature", signed.public]) == 0
    assert command not in ("inspect", "convert", "import") or "signed by release.pub" in capsys.readouterr().out


def test_a_single_file(signed: Signed, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copy(signed.gguf, tmp_path / "m.gguf"))
    stamp = [
        "stamp",
        str(copy),
        "-o",
        str(tmp_path / "o.gguf"),
        "--set",
        "a:str=b",
        "--require-signature",
        signed.public,
    ]
    assert run(stamp) == 5
    assert f"sign it: apr sign {copy} --key KEY" in capsys.readouterr().err
    assert run(["verify", f"{signed.gguf}.sig", "--key", signed.public]) == 5
    assert f"pass the signed file: {signed.gguf}" in capsys.readouterr().err
    shutil.copy(f"{signed.gguf}.sig", f"{copy}.sig")
    assert run(stamp) == 0
    with copy.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    assert run([*stamp, "--force"]) == 4
    assert "modified after it was signed" in capsys.readouterr().err


def test_weights_of_a_folder_are_covered_with_what_is_beside_them(signed: Signed, tmp_path: Path) -> None:
    shutil.copytree(signed.folder, tmp_path / "model")
    weights = tmp_path / "model/model.safetensors"
    aprfmt.sign(signed.gguf, key=signed.key, force=True)
    assert run(["tensors", str(weights), "--require-signature", signed.public, "-q"]) == 0
    (tmp_path / "model/config.json").write_text("{}")
    assert run(["tensors", str(weights), "--require-signature", signed.public, "-q"]) == 4


def test_a_changed_output_does_not_carry_the_signature_of_its_source(signed: Signed, tmp_path: Path) -> None:
    report = aprfmt.convert_model(signed.folder, tmp_path / "bf16", format="hf", dtype="bf16")
    assert any("model.sig" in loss for loss in report.losses)
    aprfmt.prune_model(signed.folder, tmp_path / "pruned", keep_layers=[0])
    assert run(["stamp", str(signed.folder), "-o", str(tmp_path / "stamped"), "--license", "MIT", "-q"]) == 0
    for name in ("bf16", "pruned", "stamped"):
        aprfmt.import_model(tmp_path / name, tmp_path / f"{name}.apr")  # would be refused as modified
    aprfmt.import_model(signed.folder, tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back", format="hf")
    assert aprfmt.verify(tmp_path / "back", key=signed.public).signature.verified


def test_without_a_required_signer_files_are_compared_with_their_signature(signed: Signed, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(signed.folder, tmp_path / "model"))
    report = aprfmt.import_model(folder, tmp_path / "a.apr")
    assert report.signature is not None
    assert report.signature.endswith("not verified: pass --require-signature KEY")
    (folder / "notes.txt").write_text("mine")  # not signed, and no part of the model
    aprfmt.import_model(folder, tmp_path / "b.apr")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x77")
    with pytest.raises(ChecksumError, match=r"model\.safetensors was modified"):
        aprfmt.import_model(folder, tmp_path / "c.apr")
    assert not (tmp_path / "c.apr").exists()


def test_other_processes_inherit_it(signed: Signed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(signed.folder, tmp_path / "model"))
    monkeypatch.setenv(REQUIRED_SIGNER, signed.public)
    aprfmt.open(folder).close()
    (folder / "added.json").write_text("{}")  # after it was verified in this process
    with pytest.raises(ChecksumError, match=r"added\.json was added"):
        aprfmt.open(folder)
    code = "import aprfmt, sys; aprfmt.open(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    assert "added.json was added after signing" in done.stderr
    (folder / "added.json").unlink()
    (folder / "model.sig").unlink()
    with pytest.raises(RefusedError, match="not signed"):
        aprfmt.open(folder)


def test_a_missing_or_private_key_is_said_before_anything_is_read(
    signed: Signed, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", str(signed.folder), "--require-signature", "nowhere.pub"]) == 3
    assert "nowhere.pub: key not found" in capsys.readouterr().err
    assert run(["inspect", str(signed.folder), "--require-signature", str(signed.key)]) == 2
    assert "this is a private key" in capsys.readouterr().err
