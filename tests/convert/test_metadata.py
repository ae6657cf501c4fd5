"""`apr meta` and `stamp`: metadata of every container by key, chat templates that render, folders in place."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from demo_model import build
from plain_models import write_folder

import aprfmt
from aprfmt.cli.main import run
from aprfmt.errors import AprError, NotFoundError, RefusedError, UsageError
from aprfmt.provenance.model_card import front_matter, with_front_matter

GOOD = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
BAD = {
    "{% if %}": "at line 1",
    "{{ nothing.at.all }}": "undefined",
    "{% for m in messages %}.{% endfor %}": "leaves out the user's message",
    "{{ raise_exception('no') }}": "rejects the conversation: no",
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ 1/0 }}{% endif %}{% endfor %}": "zero",
}
CONTAINERS = ["m.gguf", "m.apr", "m.safetensors", "folder"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("metadata")
    build(root / "m.gguf")
    aprfmt.import_model(root / "m.gguf", root / "m.apr")
    write_folder(root / "folder")
    aprfmt.convert_model(root / "folder", root / "m.safetensors")
    return root


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "here")
    return tmp_path / "here"


def contents(path: Path) -> dict[str, bytes]:
    return {
        p.relative_to(path).as_posix(): p.read_bytes()
        for p in ([path] if path.is_file() else path.rglob("*"))
        if p.is_file()
    }


def tensors(path: Path) -> dict[str, str]:
    with aprfmt.open(path) as model:
        return {name: hashlib.sha256(t.raw()).hexdigest() for name, t in model.tensors.items()}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_key_is_set_read_and_removed_in_place(name: str, here: Path) -> None:
    path, before = here / name, tensors(here / name)
    key = "general.url" if name in ("m.gguf", "m.apr") else "url"
    done = aprfmt.edit_metadata(path, {key: "http://here"})
    assert [(c.key, c.old, c.new) for c in done.changes] == [(key, None, "http://here")]
    assert aprfmt.metadata_value(path, key) == "http://here"
    again = aprfmt.edit_metadata(path, {key: None})
    assert [(c.old, c.new) for c in again.changes] == [("http://here", None)]
    with pytest.raises(NotFoundError):
        aprfmt.metadata_value(path, key)
    assert tensors(path) == before
    with pytest.raises(UsageError, match="unknown key"):
        aprfmt.edit_metadata(path, {"nothing.of.the.kind": None})


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_plan_writes_nothing_and_a_copy_leaves_the_source(name: str, here: Path) -> None:
    path, before = here / name, contents(here / name)
    key = "general.description" if name in ("m.gguf", "m.apr") else "description"
    assert aprfmt.edit_metadata(path, {key: "new"}, plan=True).changes[0].new == "new"
    assert contents(path) == before
    copy = here / f"copy-{name}"
    aprfmt.edit_metadata(path, {key: "new"}, copy)
    assert contents(path) == before
    assert aprfmt.metadata_value(copy, key) == "new"
    assert tensors(copy) == tensors(path)
    with pytest.raises(AprError, match="exists"):
        aprfmt.edit_metadata(path, {key: "new"}, copy)


@pytest.mark.parametrize("source", BAD)
@pytest.mark.parametrize("name", ["m.gguf", "m.apr", "folder"])
def test_a_template_that_does_not_render_is_not_written(name: str, source: str, here: Path) -> None:
    path, before = here / name, contents(here / name)
    with pytest.raises(RefusedError, match=BAD[source]):
        aprfmt.edit_metadata(path, {"tokenizer.chat_template": source})
    with pytest.raises(RefusedError):
        aprfmt.stamp(path, in_place=True, set={"tokenizer.chat_template": source})
    assert contents(path) == before


@pytest.mark.parametrize("name", ["m.gguf", "m.apr", "folder"])
def test_a_template_is_set_shown_and_rendered(name: str, here: Path) -> None:
    path = here / name
    old = aprfmt.chat_template(path)
    done = aprfmt.edit_metadata(path, {"tokenizer.chat_template": GOOD})
    assert [(c.old, c.new) for c in done.changes] == [(old, GOOD)]
    assert aprfmt.chat_template(path) == GOOD
    assert aprfmt.render_chat(path, [{"role": "user", "content": "hey"}]) == "<|im_start|>hey<|im_end|>"
    assert (
        aprfmt.render_chat(path, [{"role": "user", "content": "hey"}], template="{{ messages[0]['content'] }}!")
        == "hey!"
    )


def test_a_folder_keeps_its_template_where_it_was(here: Path) -> None:
    folder = here / "folder"
    aprfmt.edit_metadata(folder, {"chat_template": GOOD})
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == GOOD
    assert not (folder / "chat_template.jinja").exists()
    aprfmt.edit_metadata(folder, {"chat_template": None})
    assert "chat_template" not in json.loads((folder / "tokenizer_config.json").read_text())
    aprfmt.edit_metadata(folder, {"chat_template": GOOD})
    assert (folder / "chat_template.jinja").read_text() == GOOD
    aprfmt.edit_metadata(folder, {"chat_template": None})
    assert not (folder / "chat_template.jinja").exists()
    with pytest.raises(NotFoundError, match="no chat template"):
        aprfmt.chat_template(folder)


def test_files_of_a_folder_are_edited_together(here: Path) -> None:
    folder = here / "folder"
    old = json.loads((folder / "config.json").read_text())
    values = {"rope_theta": 7, "generation_config.temperature": 0.5, "license": "mit", "data_source": "a/b,c/d"}
    aprfmt.edit_metadata(folder, values)
    assert json.loads((folder / "config.json").read_text()) == old | {"rope_theta": 7.0}
    assert json.loads((folder / "generation_config.json").read_text()) == {"temperature": 0.5}
    card = front_matter((folder / "README.md").read_bytes())
    assert card == {"license": "MIT", "datasets": ["a/b", "c/d"]}
    with aprfmt.open(folder) as model:
        assert model.hparams.rope_theta == 7


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("hidden_size", 63, "does not fit the tensors"),
        ("hidden_size", "big", "is a number, not a string"),
        ("architectures", "LlamaForCausalLM", "is a list, not a string"),
        ("tokenizer_config.pad_token", 3, "is a string, not a number"),
        ("quantize_config.bits", 3, "no quantize_config.json"),
        ("license", "whatever", "SPDX"),
    ],
)
def test_what_does_not_fit_a_folder_is_refused(key: str, value: object, said: str, here: Path) -> None:
    before = contents(here / "folder")
    with pytest.raises(AprError, match=said):
        aprfmt.edit_metadata(here / "folder", {key: value})
    assert contents(here / "folder") == before


def test_nested_keys_and_the_style_of_a_file_are_kept(here: Path) -> None:
    config = here / "folder" / "config.json"
    values = json.loads(config.read_text()) | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    config.write_text(json.dumps(values, indent=4) + "\n")
    aprfmt.edit_metadata(here / "folder", {"rope_scaling.factor": 4})
    values["rope_scaling"]["factor"] = 4.0
    assert config.read_text() == json.dumps(values, indent=4) + "\n"
    assert aprfmt.metadata_value(here / "folder", "rope_scaling.factor") == 4.0


def test_a_short_edit_of_safetensors_overwrites_the_header(here: Path) -> None:
    path = here / "m.safetensors"
    aprfmt.edit_metadata(path, {"step": "1000"})
    before = path.stat()
    assert aprfmt.edit_metadata(path, {"step": "7"}).report.output_bytes <= 512
    assert (path.stat().st_ino, path.stat().st_size) == (before.st_ino, before.st_size)
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        assert file.metadata()["step"] == "7"
    with pytest.raises(UsageError, match="holds no chat template"):
        aprfmt.edit_metadata(path, {"chat_template": GOOD})


@pytest.mark.parametrize(
    ("card", "value", "edited"),
    [
        (b"", "mit", b"---\nlicense: mit\n---\n"),
        (b"# A\n", "mit", b"---\nlicense: mit\n---\n\n# A\n"),
        (b"---\na: 1\nlicense: x\nb: 2\n---\ntext", "mit", b"---\na: 1\nlicense: mit\nb: 2\n---\ntext"),
        (b"---\nlicense:\n- x\n- y\nb: 2\n---\n", "mit", b"---\nlicense: mit\nb: 2\n---\n"),
        (b"---\r\nb: 2\r\n---\r\n", "mit", b"---\r\nb: 2\r\nlicense: mit\n---\r\n"),
        (b"---\nlicense: mit\n---\n", None, b"---\n---\n"),
        (b"---\nlicense_name: x\n---\n", None, b"---\nlicense_name: x\n---\n"),
    ],
)
def test_the_front_matter_of_a_card_keeps_its_other_lines(card: bytes, value: object, edited: bytes) -> None:
    assert with_front_matter(card, "license", value) == edited


def test_the_command(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)

    def apr(*words: str) -> tuple[int, str, str]:
        code = run([*words])
        said = capsys.readouterr()
        return code, said.out, said.err

    shutil.copy("m.gguf", "old.gguf")
    Path("new.jinja").write_bytes(b"{#\xc3\xa4#}\n\n" + GOOD.encode())
    Path("chat.json").write_text('{"messages": [{"role": "user", "content": "hey"}]}')
    code, text, _ = apr("meta", "set", "m.gguf", "general.name=My model", "my.key:u32=7")
    assert (code, text.splitlines()[1:4]) == (0, ["  general.name", "    - apr demo", "    + My model"])
    assert apr("meta", "get", "m.gguf", "general.name") == (0, "My model\n", "")
    assert apr("meta", "m.gguf", "my.key") == (0, "7\n", "")
    assert "my.key" in apr("meta", "m.gguf")[1]
    assert "general.name" not in apr("meta", "list", "m.gguf", "my.*")[1]
    assert apr("meta", "template", "set", "m.gguf", "new.jinja")[0] == 0
    assert apr("meta", "template", "m.gguf")[1].encode() == Path("new.jinja").read_bytes()
    assert apr("meta", "template", "m.gguf", "-o", "copy.jinja")[0] == 0
    assert Path("copy.jinja").read_bytes() == Path("new.jinja").read_bytes()
    assert "<|im_start|>hey" in apr("meta", "template", "render", "m.gguf", "chat.json")[1]
    code, text, _ = apr("meta", "diff", "old.gguf", "m.gguf", "--json")
    assert (code, {row["name"] for row in json.loads(text)["differences"]}) == (
        1, {"general.name", "my.key", "tokenizer.chat_template"},
    )  # fmt: skip
    body: Any = json.loads(apr("meta", "unset", "m.gguf", "my.key", "--json")[1])
    assert body["changes"] == [{"key": "my.key", "old": 7, "new": None}]
    assert apr("meta", "set", "m.gguf", "general.name", "a=b")[0] == 0
    assert apr("meta", "get", "m.gguf", "general.name")[1] == "a=b\n"
    assert apr("meta", "gett", "m.gguf")[0] == 2
    code, _, said = apr("meta", "list", "m.gguf", "--template", "new.jinja")
    assert (code, "meta list only reads, so --template has no effect" in said) == (2, True)
    assert apr("meta", "get", "m.gguf", "general.nam")[2].endswith("hint: did you mean general.name?\n")
    assert apr("stamp", "folder", "--in-place", "--license", "mit")[0] == 0
    assert apr("stamp", "m.gguf", "--in-place", "--set", "tokenizer.chat_template={% if %}")[0] == 5
