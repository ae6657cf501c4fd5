"""An output never takes the place of an input, whatever both are called."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plain_models
import pytest
from imatrix_files import new_imatrix

import aprfmt
from aprfmt.cli.main import run
from aprfmt.errors import AprError, NotFoundError, RefusedError, UsageError
from aprfmt.io.pipe import check_inputs_kept
from aprfmt.io.sink import AtomicFile, AtomicFolder, check_target
from aprfmt.io.source import Source
from aprfmt.trust.keys import generate


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    folder = plain_models.write_folder(root / "d")
    (folder / "notes.txt").write_text("mine")
    plain_models.write_adapter(root / "lora")
    aprfmt.convert_model(folder, root / "a.gguf")
    aprfmt.convert_model(folder, root / "a.apr")
    new_imatrix(root / "i.dat", {"w": [1.0, 2.0]}, {"w": [3.0]})
    with aprfmt.open(root / "a.gguf") as model:
        columns = {t.name: t.shape[-1] for t in model.tensors.values() if t.name.endswith(".weight")}
    new_imatrix(root / "q.dat", {name: [1.0] * n for name, n in columns.items()}, {name: [1.0] for name in columns})
    shutil.copy(root / "q.dat", root / "q.gguf")
    (root / "text.md").write_text("mine")
    (root / "run").mkdir()
    (root / "run" / "metrics.jsonl").write_text("{}\n")
    (root / "recipe.yaml").write_text(
        "merge_method: linear\nparameters: {weight: 1.0}\nmodels:\n- {model: a.gguf}\n- {model: d}\n"
    )
    return root


@pytest.fixture
def at(material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a copy of the material, in which the process works."""
    monkeypatch.chdir(shutil.copytree(material, tmp_path / "at"))
    return tmp_path / "at"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def gguf(source: str, target: str, **options: object) -> Callable[[], object]:
    return lambda: aprfmt.convert_model(source, target, format="gguf", dtype="f16", force=True, **options)  # type: ignore[arg-type]


def stamp_text(model: str, output: str) -> None:
    """`apr stamp` with a value of the file that it would replace."""
    from aprfmt.cli.stamp import Stamp

    Stamp(file=Path(model), output=Path(output), set=[f"general.description=@{output}"], force=True)()


def linked_to(file: str, place: str, call: Callable[[], object]) -> Callable[[], object]:
    """With a link at `place`, which the output is written through."""

    def with_link() -> object:
        os.symlink(file, place)
        return call()

    return with_link


CASES: dict[str, Callable[[], object]] = {
    "a missing folder and back": gguf("a.gguf", "nosuch/../a.gguf"),
    "a folder and back": gguf("a.gguf", "d/../a.gguf"),
    "a hard link": gguf("a.gguf", "hard.gguf"),
    "a link": gguf("a.gguf", "link.gguf"),
    "through a link": gguf("link.gguf", "a.gguf"),
    "the config of a folder": gguf("d", "d/config.json"),
    "the tokenizer of a folder": gguf("d", "d/tokenizer.json"),
    "a file of a folder that belongs to no model": gguf("d", "d/notes.txt"),
    "a link to the config": gguf("d", "link.json"),
    "a tokenizer": gguf("a.gguf", "d/tokenizer.json", tokenizer="d"),
    "an adapter": lambda: aprfmt.merge_adapter("a.gguf", "lora", "lora/adapter_config.json", format="gguf", force=True),
    "a recipe": lambda: aprfmt.merge_models((), "recipe.yaml", config="recipe.yaml", format="gguf", force=True),
    "a model to merge": lambda: aprfmt.merge_models(
        ["a.gguf", "d"], "d/config.json", method="linear", format="gguf", force=True
    ),
    "a stamped tokenizer": lambda: aprfmt.stamp("a.apr", "d/tokenizer.json", tokenizer="d", force=True),
    "a folder over itself": lambda: aprfmt.convert_model("d", "d", format="hf", dtype="f16", force=True),
    "a folder over its link": lambda: aprfmt.convert_model("d", "folder-link", format="hf", dtype="f16", force=True),
    "a file in the output folder": lambda: aprfmt.convert_model(
        "d/model.safetensors", "d", format="hf", dtype="f16", force=True, allow_no_config=True
    ),
    "an importance matrix": lambda: aprfmt.convert_model(
        "a.gguf", "q.dat", format="gguf", dtype="q8_0", imatrix="q.dat", force=True
    ),
    "an importance matrix of quantize": lambda: aprfmt.quantize_model(
        "a.gguf", "q.gguf", mix="q8_0", imatrix="q.gguf", force=True
    ),
    "a stamped text": lambda: stamp_text("a.gguf", "text.md"),
    "a stamped text of an .apr": lambda: stamp_text("a.apr", "text.md"),
    "a Modelfile": linked_to("a.gguf", "Modelfile", gguf("a.gguf", "out.gguf", modelfile=True)),
    "a page over a model": linked_to(
        "a.gguf", "page.html", lambda: aprfmt.report("a.gguf", output="page.html", force=True)
    ),
    "a page over a config": linked_to(
        "d/config.json", "page.html", lambda: aprfmt.report("d", output="page.html", force=True)
    ),
    "a page over a log": linked_to(
        "run/metrics.jsonl", "page.html", lambda: aprfmt.report("run", output="page.html", force=True)
    ),
    "a page of qa": linked_to("d/config.json", "page.html", lambda: aprfmt.qa("d", output="page.html", force=True)),
    "text of a matrix": lambda: aprfmt.imatrix("a.gguf", "text.md", "d/../text.md", force=True),
    "matrices": lambda: aprfmt.merge_imatrix(["i.dat", "i.dat"], "d/../i.dat", force=True),
}


@pytest.mark.parametrize("name", CASES)
def test_an_input_is_never_replaced(name: str, at: Path) -> None:
    os.link("a.gguf", "hard.gguf")
    os.symlink("a.gguf", "link.gguf")
    os.symlink("d/config.json", "link.json")
    os.symlink("d", "folder-link")
    before = contents(at)
    with pytest.raises(AprError) as caught:
        CASES[name]()
    assert caught.value.code in ("refused", "storage", "not-found"), caught.value
    assert caught.value.hint
    for made in (name for name in ("Modelfile", "page.html") if os.path.islink(name)):
        os.unlink(made)
    assert contents(at) == before


def test_what_is_no_input_is_replaced(at: Path) -> None:
    """An output from an earlier run may lie in the folder of the model."""
    for _ in range(2):
        gguf("d", "d/out.gguf")()
        gguf("d", str(at / "lora" / ".." / "out.gguf"))()
    assert (at / "out.gguf").read_bytes() == (at / "d" / "out.gguf").read_bytes()
    before = contents(at / "d")
    aprfmt.convert_model("d/out.gguf", "x", format="hf")
    aprfmt.convert_model("d", "d/inner", format="hf")
    shutil.rmtree("d/inner")
    assert contents(at / "d") == before


def test_a_folder_behind_a_link_and_back(at: Path) -> None:
    """What the operating system means by `link/..`, not what is left of the text."""
    (at / "far" / "inner").mkdir(parents=True)
    os.symlink("far/inner", "link")
    with AtomicFile("link/../f", force=True) as sink:
        sink.write(b"x")
    with AtomicFolder("link/../g") as folder:
        (folder / "y").write_text("y")
    assert ((at / "far" / "f").read_bytes(), (at / "far" / "g" / "y").read_text()) == (b"x", "y")
    (at / "far" / "f").write_bytes(b"another")
    shutil.copy("a.gguf", "far/b.gguf")
    with Source.open("link/../b.gguf") as source:
        source.check_unchanged()


def test_names_in_which_case_does_not_count(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vfat and ext4's casefold have it: every name in which only the case differs is the file."""
    real = os.stat

    def folded(path: str | int, **how: Any) -> os.stat_result:
        if isinstance(path, (str, os.PathLike)) and str(path).startswith((str(at), "A.", "d")):
            folder, name = os.path.split(str(path))
            for other in os.listdir(folder or "."):
                if other.lower() == name.lower():
                    path = os.path.join(folder, other)
        return real(path, **how)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", folded)
        with pytest.raises(RefusedError, match="the output is the input"):
            check_target("A.GGUF", ["a.gguf"], True)
        with pytest.raises(RefusedError, match=r"contains the input Config\.json"):
            check_inputs_kept(at / "d", ["Config.json"], [str(at / "d" / "config.json")])
    check_inputs_kept(at / "d", ["Config.json"], [str(at / "d" / "config.json")])


@pytest.mark.parametrize(
    ("words", "output"),
    [
        ("sbom d", "d/config.json"),
        ("sbom d/model.safetensors", "d/config.json"),
        ("sbom a.gguf", "a.gguf"),
        ("sign d --key own.key", "d/tokenizer.json"),
        ("sign d --key own.key", "hard.sig"),
        ("sign d --key own.key", "own.key"),
        ("sign a.gguf --key own.key", "own.key"),
        ("sign d --key own.key --certificate own.pem", "own.pem"),
        ("canary make d", "d/config.json"),
        ("meta template d", "d/tokenizer_config.json"),
        ("diff d a.gguf --values", "link.html"),
    ],
)
def test_what_is_written_about_a_model_never_replaces_a_file_of_it(
    words: str, output: str, at: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate("own")
    Path("own.pem").write_text("a certificate")
    os.link("d/config.json", "hard.sig")
    os.symlink("d/config.json", "link.html")
    settings = json.loads(Path("d/tokenizer_config.json").read_text())
    Path("d/tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "x"}))
    before = contents(at)
    option = "--canary" if words.startswith("canary") else "-o"
    assert run([*words.split(), option, output, "--force", "--json"]) == (2 if words.startswith("diff") else 5)
    assert json.loads(capsys.readouterr().out)["error"]["message"].endswith("the output is the input")
    assert contents(at) == before


def test_an_earlier_document_beside_the_model_is_replaced(at: Path) -> None:
    for _ in range(2):
        assert run(["sbom", "d", "-o", "d/model.cdx.json", "--force", "-q"]) == 0
    listed = {row["name"] for row in json.loads(Path("d/model.cdx.json").read_text())["components"]}
    assert {"config.json", "model.safetensors"} < listed
    assert "model.cdx.json" not in listed


BAD = "a\0b"


@pytest.mark.parametrize(
    "call",
    [
        lambda: aprfmt.convert_model("a.gguf", f"{BAD}.apr"),
        lambda: aprfmt.convert_model(BAD, "x.apr"),
        lambda: aprfmt.convert_model("a.gguf", "x.gguf", tokenizer=BAD),
        lambda: aprfmt.convert_model("a.gguf", "x.gguf", imatrix=BAD, dtype="q4_k_m"),
        lambda: aprfmt.open(BAD),
        lambda: aprfmt.save_file({}, BAD),
        lambda: aprfmt.write_v1(BAD, b"", model_type=1, metadata={}),
        lambda: aprfmt.stamp("a.apr", BAD, license="MIT"),
        lambda: aprfmt.diff("a.apr", "a.gguf", output=f"{BAD}.html", values=True),
        lambda: aprfmt.merge_models((), "x.apr", config=BAD),
        lambda: aprfmt.merge_imatrix(["i.dat", "i.dat"], BAD),
        lambda: AtomicFile(BAD),
        lambda: AtomicFolder(Path(BAD)),
        lambda: check_target(BAD, [], False),
    ],
)
@pytest.mark.usefixtures("at")
def test_a_zero_byte_in_a_path(call: Callable[[], object]) -> None:
    with pytest.raises((UsageError, NotFoundError)) as caught:
        call()
    assert "zero byte" in caught.value.message


def test_the_command_line_says_what_to_do(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(at)
    assert run(["export", "a.gguf", "-o", "nosuch/../a.gguf", "--dtype", "f16", "--force"]) == 7
    assert "mkdir -p" in capsys.readouterr().err
    assert run(["export", "d", "-o", "d/config.json", "--format", "gguf", "--force"]) == 5
    assert "choose another output with -o" in capsys.readouterr().err
    assert contents(at) == before
