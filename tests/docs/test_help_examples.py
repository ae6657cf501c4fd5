"""The examples in the help of every command, each run in a folder that has the files it names."""

from __future__ import annotations

import base64
import inspect
import io
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from arch_models import CACHE, write_tokenizers
from demo_model import build
from hub_server import serve
from plain_models import Weights, write_adapter, write_folder, write_seeing_folder
from plain_models import weights as plain_weights
from signed_models import issue
from tower_models import all_tower_cases, build_tower
from train_corpora import functions

import aprfmt
from aprfmt.cli.commands import COMMANDS
from aprfmt.cli.main import run
from aprfmt.formats.apr1_edit import encrypt_file
from aprfmt.trust.keys import generate, read_public

pytestmark = pytest.mark.usefixtures("two_processors")

VECTORS = Path(__file__).resolve().parents[2] / "fixtures" / "vectors" / "golden"
MAY_BE_1 = {"diff", "lint", "qa", "vocab", "bench", "doctor"}
"""Commands whose exit status 1 is an answer."""

DEEP = 32


COSTLY = {"qa", "bench", "doctor"}
"""Commands of which the first example runs, and the others are read as command lines."""


def command_of(name: str) -> Any:
    """The command as typer has it."""
    from typer.main import get_command

    from aprfmt.cli.group import build as build_group

    return get_command(build_group(name)).commands[name]  # type: ignore[attr-defined]


def examples(name: str) -> list[str]:
    """The lines of the blocks of a command's help that are set as they are."""
    blocks = [text for text in inspect.cleandoc(command_of(name).help).split("\n\n") if text.startswith("\b\n")]
    return [re.sub(r"  +\(.*\)$", "", line) for text in blocks for line in text.splitlines()[1:]]


EXAMPLES = [(name, line) for name in COMMANDS for line in examples(name)]


def write_deep(folder: Path) -> Path:
    """A llama of 32 equal layers."""
    arrays: Weights = {}
    for name, array in plain_weights().items():
        if ".layers.0." in name:
            arrays |= {name.replace(".0.", f".{n}."): array for n in range(DEEP)}
        elif ".layers." not in name:
            arrays[name] = array
    return write_folder(folder, arrays, num_hidden_layers=DEEP)


TRAINING = "--device cpu --steps 1 --seq-len 32 --tokens-per-step 64 --micro-tokens 64 --eval-tokens 64 --held-out 0.1"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the examples name, at tiny sizes."""
    root = tmp_path_factory.mktemp("world")
    build(root / "model.gguf")
    aprfmt.import_model(root / "model.gguf", root / "model.apr")
    aprfmt.convert_model(root / "model.gguf", root / "model.safetensors")
    aprfmt.quantize_model(root / "model.gguf", root / "model-q8_0.gguf", "q8_0")
    for name in ("base", "bge-m3", "q4", "model-f16", "model-Q4_K_M", "model-q4_k_m"):
        shutil.copy(root / "model.gguf", root / f"{name}.gguf")
    for name in ("old", "new"):
        shutil.copy(root / "model.apr", root / f"{name}.apr")
    aprfmt.convert_model(root / "model.apr", root / "shards", format="apr-shards")
    deep = write_deep(root / "Qwen2.5-0.5B")
    aprfmt.export_model(deep, root / "m.gguf")
    aprfmt.import_model(deep, root / "big.apr")
    shutil.copy(root / "m.gguf", root / "big.gguf")
    small = write_folder(root / "Qwen3-0.6B")
    aprfmt.import_model(small, root / "m.apr")
    shutil.copy(root / "m.apr", root / "s.apr")
    shutil.copy(small / "config.json", root)
    for name in ("A", "B", "base", "my-model"):
        shutil.copytree(deep, root / name)
    write_adapter(root / "my-lora")
    write_adapter(root / "adapter")
    aprfmt.merge_adapter(root / "base", root / "my-lora", root / "fine-tune", format="hf")
    write_texts(root)
    aprfmt.imatrix(root / "model.gguf", root / "text.txt", root / "model.imatrix.gguf", chunk_size=32)
    aprfmt.imatrix(root / "m.gguf", root / "text.txt", root / "qwen.dat", chunk_size=32)
    for name in ("a", "b"):
        shutil.copy(root / "model.imatrix.gguf", root / f"{name}.imatrix.gguf")
    training = f"pretrain --init {root}/m.apr --data {root}/c.jsonl -o {root}/run {TRAINING} --quiet"
    assert run(training.split()) == 0
    seeing = write_seeing_folder(root / "seeing")
    aprfmt.export_model(seeing, root / "text.gguf")
    aprfmt.export_model(seeing, root / "mmproj.gguf", mmproj=True)
    aprfmt.import_model(seeing, root / "seeing.apr")
    return root


def write_texts(root: Path) -> None:
    """Data, templates and configurations."""
    sentence = "The cat sat on the mat and looked at the rain in the garden. "
    for name in ("text", "wiki"):
        (root / f"{name}.txt").write_text(sentence * 40)
    for name, count in (("c", 30), ("code", 30), ("held-out", 4)):
        texts = (json.dumps({"text": text}) for text in functions(count))
        (root / f"{name}.jsonl").write_text("\n".join(texts))
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The fox."}]
    chats = [turns, [{"role": "user", "content": "And where?"}, {"role": "assistant", "content": "In the garden."}]]
    (root / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (root / "chat.json").write_text(json.dumps(turns[:1]))
    (root / "table.csv").write_text("body\none\ntwo\n")
    (root / "src").mkdir()
    for n, text in enumerate(functions(60, seed=1)):
        (root / "src" / f"part{n}.py").write_text(text)
    (root / "chat.jinja").write_text("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    (root / "recipe.yaml").write_text("merge_method: linear\nmodels: [{model: A, parameters: {weight: 1}}]\n")
    (root / "run.toml").write_text('student = "s.apr"\ndata = "c.jsonl"\nsteps = 2\noutput = "run2"\n')


def of_towers(folder: Path) -> None:
    shutil.copy(folder / "seeing.apr", folder / "model.apr")


def adapters(folder: Path) -> None:
    for name in ("a", "b"):
        aprfmt.convert_model(folder / "my-lora", folder / f"{name}.gguf", base=folder / "Qwen2.5-0.5B")


def fine_tunes(folder: Path) -> None:
    for name in ("a", "b"):
        shutil.copy(folder / "m.gguf", folder / f"{name}.gguf")


def with_a_url(folder: Path) -> None:
    aprfmt.stamp(folder / "model.gguf", in_place=True, set={"general.url": "somewhere"})


def with_qwen3_tokenizer(folder: Path) -> None:
    place = CACHE / "tokenizers" / "qwen3"
    if not place.is_dir():
        pytest.skip("the qwen3 tokenizer is not in the material cache: run tools/fetch_material.py")
    for file in place.iterdir():
        shutil.copy(file, folder / "Qwen3-0.6B")
    config = folder / "Qwen3-0.6B" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 151936}))


def that_sees(folder: Path) -> None:
    tokenizer = write_tokenizers(folder / "tokenizers", ["smollm2"], 512)["smollm2"]
    case = next(case for case in all_tower_cases() if case.id == "gemma3_vision")
    build_tower(case, folder / "sees", tokenizer)
    aprfmt.export_model(folder / "sees", folder / "gemma.gguf")
    aprfmt.export_model(folder / "sees", folder / "mmproj.gguf", mmproj=True, force=True)
    (folder / "cat.png").write_bytes(base64.b64decode(PNG))


PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
"""A picture of one pixel."""


def with_what_a_teacher_said(folder: Path) -> None:
    aprfmt.teacher(folder / "big.gguf", folder / "c.jsonl", folder / "probs", seq_len=64, engine="llama")


def with_responses(folder: Path) -> None:
    """Responses of a vLLM server that finds all tokens equally likely."""
    prompts = folder / "p.jsonl"
    aprfmt.teacher(None, folder / "c.jsonl", folder / "asked", student=folder / "s.apr", prompts=prompts)
    alike = {"logprob": -math.log(320), "rank": 1}
    with open(folder / "r.jsonl", "w", encoding="utf-8") as out:
        for line in prompts.read_text().splitlines():
            ids = json.loads(line)["prompt"]
            told = [None, *({str(j): alike for j in {label, *range(65)}} for label in ids[1:])]
            out.write(json.dumps({"index": 0, "prompt_token_ids": ids, "prompt_logprobs": told}) + "\n")


def with_a_recipe(folder: Path) -> None:
    shutil.copy(folder / "model.gguf", folder / "tuned.gguf")
    aprfmt.quantize_model(
        folder / "model.gguf", folder / "m.gguf", target_bpw=8.5, recipe_out=folder / "m.toml", force=True
    )


def with_an_f16(folder: Path) -> None:
    for name in ("f16", "q3"):
        shutil.copy(folder / "model.gguf", folder / f"{name}.gguf")


def with_logits(folder: Path) -> None:
    logits = folder / "f16.kld"
    aprfmt.kl_divergence(folder / "q3.gguf", folder / "f16.gguf", folder / "text.txt", save_logits=logits)


def with_a_run_to_resume(folder: Path) -> None:
    """The setup alone: its files are copies."""


def experiments(folder: Path) -> None:
    shutil.copytree(folder / "run", folder / "experiments" / "run")


def with_a_passphrase(folder: Path) -> None:
    (folder / "secret.txt").write_text("correct horse\n")


def with_keys(folder: Path) -> None:
    if (folder / "release.key").exists():
        return
    with_a_passphrase(folder)
    generate(folder / "release")
    generate(folder / "locked", passphrase=b"correct horse")
    generate(folder / "ed", "ed25519")
    generate(folder / "inbox", "x25519")
    key, team, *_ = issue(folder)
    key.rename(folder / "team.key")
    team.rename(folder / "team.pem")
    (folder / "issuer.pem").rename(folder / "ca.pem")
    shutil.copy(VECTORS / "v1_zstd3.apr", folder / "v1.apr")


def to_sign(folder: Path) -> None:
    pytest.importorskip("model_signing")
    with_keys(folder)


def with_signatures(folder: Path) -> None:
    to_sign(folder)
    chain = [folder / "ca.pem"]
    aprfmt.sign(folder / "Qwen2.5-0.5B", key=folder / "team.key", certificate=folder / "team.pem", chain=chain)
    aprfmt.sign(folder / "model.gguf", key=folder / "release.key")


def with_a_canary(folder: Path) -> None:
    aprfmt.make_canary(folder / "model.gguf")


def with_secrets(folder: Path) -> None:
    with_keys(folder)
    encrypt_file(folder / "v1.apr", folder / "secret.apr", password=b"correct horse")
    encrypt_file(folder / "model.gguf", folder / "letter.apr", recipient=read_public(folder / "inbox.pub").raw())


def two_runs(folder: Path) -> None:
    shutil.copytree(folder / "run", folder / "run2")


SETUPS = {
    "report run run2": two_runs,
    "resume run": with_a_run_to_resume,
    "runs experiments": experiments,
    "keygen -o inbox": with_a_passphrase,
    "apr sign": to_sign,
    "apr verify": with_signatures,
    "apr canary check": with_a_canary,
    "apr encrypt": with_keys,
    "apr decrypt": with_secrets,
    "--recipe m.toml": with_a_recipe,
    "f16": with_an_f16,
    "--against f16.kld": with_logits,
    "--teacher-logprobs": with_what_a_teacher_said,
    "--from-vllm": with_responses,
    "merge-adapter m.gguf": adapters,
    "merge a.gguf": fine_tunes,
    "export model.apr -o mmproj.gguf": of_towers,
    "--unset general.url": with_a_url,
    "meta unset model.gguf general.url": with_a_url,
    "--ids": with_qwen3_tokenizer,
    "--image": that_sees,
}
"""What a line needs beyond the world: by words that stand in it."""


@pytest.mark.slow
@pytest.mark.llama
@pytest.mark.turns(rows=True)
@pytest.mark.parametrize(
    ("name", "line"), EXAMPLES, ids=[f"{name}/{line.replace('/', ' ')}" for name, line in EXAMPLES]
)
def test_the_example_runs(
    name: str,
    line: str,
    world: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "here"
    setups = [setup for text, setup in SETUPS.items() if text in line]
    changed = setups or "--in-place" in line or "apr meta" in line  # else nothing is written into a file that is there
    shutil.copytree(world, folder, copy_function=shutil.copy2 if changed else os.link)
    monkeypatch.chdir(folder)
    _, found, rest = line.replace("torchrun --nproc-per-node 2 -m aprfmt ", "apr ").partition("apr ")
    assert found, "an example is a line of apr"
    words = shlex.split(rest.partition(" | ")[0])
    for setup in setups:
        setup(folder)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"A change.\n")))
    if "-o" in words and words[0] not in ("distill", "report"):
        target = folder / words[words.index("-o") + 1]
        shutil.rmtree(target, ignore_errors=True)
        target.unlink(missing_ok=True)
    if words[0] in ("distill", "pretrain"):
        if "--resume" not in words:
            shutil.rmtree(folder / "run", ignore_errors=True)
        words += ["--plan", "--device", "cpu", "--seq-len", "64", *(() if "--epochs" in words else ("--repeat",))]
    if words[0] == "resume":
        words = [*words[:2], "--steps", "2"]
    if "curves.png" in words:
        pytest.importorskip("matplotlib")
    # tests/html/test_live_page.py, tests/train/teacher and tests/train/data run these.
    elsewhere = "--live" in words or any(word.startswith(("http://", "hf://datasets/", "oci://")) for word in words)
    if elsewhere or (name in COSTLY and line != examples(name)[0]):
        command_of(name).make_context(name, words[1:])
        return
    if "org/" in line:
        code, said = on_a_hub(words, folder)
    else:
        code = run(words)
        said = "".join(capsys.readouterr())
    there = ", ".join(sorted(path.name for path in folder.iterdir()))
    assert code in ((0, 1) if name in MAY_BE_1 else (0,)), f"{said}\nan example may use {there}"


def on_a_hub(words: list[str], folder: Path) -> tuple[int, str]:
    """Exit code and output of a command that talks to a hub on this machine, which has org/repo alone."""
    repo = next(re.sub("^hf://", "", word) for word in words if word.startswith(("org/", "hf://org/")))
    with serve(repo) as hub:
        hub.exists = repo == "org/repo"
        hub.files = {path.name: path.read_bytes() for path in (folder / "Qwen3-0.6B").iterdir()}
        env = os.environ | {"HF_ENDPOINT": hub.address, "HF_TOKEN": "hf_x", "HF_HUB_DISABLE_XET": "1"}
        env |= {"HF_HUB_CACHE": str(folder / "hub"), "APR_CACHE": str(folder / "cache")}
        done = subprocess.run(
            [sys.executable, "-m", "aprfmt", *words], cwd=folder, env=env, capture_output=True, text=True, check=False
        )
    return done.returncode, done.stdout + done.stderr
