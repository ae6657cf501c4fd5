"""`apr push` to a hub on this machine: what arrives, what the card says, what is refused before anything is sent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo_model import build
from hub_server import COMMIT, Answer, Hub, Request, attach, close_stores, serve

import aprfmt
from aprfmt.cli.main import run
from aprfmt.errors import AprError, NotFoundError, RefusedError, StorageError, UsageError
from aprfmt.formats import hub_errors, hub_files
from aprfmt.formats.hub_errors import HubPath
from aprfmt.provenance.model_card import front_matter
from aprfmt.publishing.card import BEGIN, END

constants = pytest.importorskip("huggingface_hub.constants")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("push")
    build(root / "tiny.gguf")
    path = root / "tiny-Q8_0.gguf"
    aprfmt.quantize_model(root / "tiny.gguf", path, "q8_0")
    return path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub without the repository."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with serve() as found:
        attach(found, tmp_path, monkeypatch)
        found.exists = False
        yield found
        close_stores()


def card_of(hub: Hub) -> str:
    return bytes(hub.commits[-1]["files"]["README.md"]).decode()


def test_a_file_arrives_with_a_card(hub: Hub, gguf: Path) -> None:
    report = aprfmt.push(gguf, "org/name", private=True)
    (commit,) = hub.commits
    assert set(commit["files"]) == {gguf.name, "README.md"}
    assert commit["files"][gguf.name] == gguf.read_bytes()
    assert commit["revision"] == "main"
    assert hub.created[0]["name"] == "name"
    assert hub.created[0].get("private") is True or hub.created[0].get("visibility") == "private"
    assert (report.created, report.commit, report.card, report.license) == (True, COMMIT, "made", "mit")
    card = card_of(hub)
    assert front_matter(card.encode())["license"] == "mit"
    assert f"| `{gguf.name}` | Q8_0 |" in card
    assert hashlib.sha256(gguf.read_bytes()).hexdigest() in card
    assert "hf_secret" not in card + repr(report)


def test_the_figures_of_the_card(hub: Hub, gguf: Path) -> None:
    (row,) = aprfmt.push(gguf, "org/name", plan=True).models
    found = aprfmt.inspect(gguf)
    assert row.size_bytes == gguf.stat().st_size
    assert row.params == found.param_count
    assert row.bits_per_weight == pytest.approx(8 * sum(r["bytes"] for r in found.dtypes.values()) / row.params)


def test_a_plan_sends_nothing(hub: Hub, gguf: Path) -> None:
    report = aprfmt.push(gguf, "org/name", plan=True)
    assert report.plan
    assert report.created
    assert report.commit is None
    assert {request.method for request in hub.requests} == {"GET"}
    assert "| `tiny-Q8_0.gguf` |" in report.card_text


def test_a_folder_arrives_whole(hub: Hub, gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    aprfmt.convert_model(gguf, folder, format="hf", dtype="bf16")
    for name in (".git/config", "__pycache__/x.pyc", ".cache/x", "left.tmp"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    (folder / "original").mkdir()
    (folder / "original" / "notes.txt").write_bytes(b"kept")
    report = aprfmt.push(folder, "org/name")
    files = hub.commits[0]["files"]
    here = {path.name for path in folder.iterdir() if path.is_file()} - {"left.tmp"}
    assert set(files) == here | {"original/notes.txt", "README.md"}
    assert files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert report.models[0].type == "BF16"
    card = card_of(hub)
    assert card.startswith((folder / "README.md").read_text())


CARD = b"---\ntags:\n- mine\nlicense: apache-2.0\n---\n\n# By hand\r\n\nText | with <b>marks</b>.\n"


def test_names_that_other_programs_act_on_are_not_published(hub: Hub, gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / ".git").mkdir(parents=True)
    (folder / "m.gguf").write_bytes(gguf.read_bytes())
    for name in (".gitattributes", ".git/config", ".envrc", "con"):
        (folder / name).write_text("x")
    report = aprfmt.push(folder, "org/name")
    assert hub.commits[-1]["files"].keys() == {"m.gguf", ".gitattributes", "README.md"}
    (warning,) = [line for line in report.warnings if line.startswith("not uploaded: ")]
    assert warning.startswith("not uploaded: '.envrc' (other programs read hidden files), 'con' (Windows")


def test_a_link_that_leads_out_is_not_published(hub: Hub, gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "m.gguf").symlink_to(gguf)
    for plan in (True, False):
        with pytest.raises(RefusedError, match="symlinks pointing outside the folder: 'm"):
            aprfmt.push(folder, "org/name", plan=plan)
    assert hub.commits == []
    aprfmt.push(folder, "org/name", follow_links=True)
    assert hub.commits[-1]["files"].keys() == {"m.gguf", "README.md"}


def test_a_card_by_hand_stays(hub: Hub, gguf: Path) -> None:
    hub.exists, hub.files = True, {"README.md": CARD}
    assert aprfmt.push(gguf, "org/name").card == "renewed"
    card = card_of(hub)
    assert card.encode().startswith(CARD)
    assert card.count(BEGIN) == card.count(END) == 1


def test_a_second_push_renews_the_section_alone(hub: Hub, gguf: Path, tmp_path: Path) -> None:
    hub.exists, hub.files = True, {"README.md": CARD}
    aprfmt.push(gguf, "org/name")
    hub.files["README.md"] += b"\nAn afterword.\n"
    hub._digests.clear()
    hub_files._opened.popitem()[1].store.close()
    other = tmp_path / "tiny-Q4_0.gguf"
    aprfmt.quantize_model(gguf, other, "q4_0", allow_requantize=True)
    aprfmt.push(other, "org/name")
    card = card_of(hub)
    assert card.encode().startswith(CARD)
    assert card.endswith("An afterword.\n")
    assert card.count(BEGIN) == 1
    for path in (gguf, other):
        assert f"| `{path.name}` | {path.stem.rpartition('-')[2]} |" in card
        assert f"| `{path.name}` | `{hashlib.sha256(path.read_bytes()).hexdigest()}` |" in card


def test_rows_of_files_that_are_gone_go(hub: Hub, gguf: Path) -> None:
    hub.exists = True
    row = "| `gone.gguf` | Q2_K | 2.6 | 1 MB |"
    hub.files = {"README.md": CARD + f"{BEGIN}\n{row}\n{END}\n".encode()}
    aprfmt.push(gguf, "org/name")
    assert "gone.gguf" not in card_of(hub)


@pytest.mark.parametrize(
    ("old", "start"),
    [
        (b"---\ntags: [x]\n---\n# A\n", b"---\nlicense: mit\ntags: [x]\n---\n# A\n"),
        (b"# A\n", b"---\nlicense: mit\n---\n\n# A\n"),
        (b"", b"---\nlicense: mit\n---\n\n"),
    ],
)
def test_a_licence_that_the_card_lacks(old: bytes, start: bytes, hub: Hub, gguf: Path) -> None:
    hub.exists, hub.files = True, {"README.md": old}
    aprfmt.push(gguf, "org/name")
    assert card_of(hub).encode().startswith(start)


@pytest.fixture
def unlicensed(gguf: Path, tmp_path: Path) -> Path:
    path = tmp_path / "bare.gguf"
    aprfmt.stamp(gguf, path, set={"general.license": None})
    return path


def test_no_licence_no_push(hub: Hub, unlicensed: Path) -> None:
    with pytest.raises(RefusedError, match="license") as caught:
        aprfmt.push(unlicensed, "org/name")
    assert "--no-license" in (caught.value.hint or "")
    assert {request.method for request in hub.requests} == {"GET"}
    assert aprfmt.push(unlicensed, "org/name", no_license=True).license is None
    assert aprfmt.push(unlicensed, "org/name", license="Apache-2.0").license == "Apache-2.0"
    assert front_matter(card_of(hub).encode())["license"] == "Apache-2.0"


def test_another_card(hub: Hub, gguf: Path, tmp_path: Path) -> None:
    hub.exists, hub.files = True, {"README.md": CARD}
    (tmp_path / "card.md").write_bytes(b"---\nlicense: mit\n---\nMine.\n")
    aprfmt.push(gguf, "org/name", card=tmp_path / "card.md")
    assert card_of(hub).startswith("---\nlicense: mit\n---\nMine.\n")


def test_a_repository_is_not_made_unasked(hub: Hub, gguf: Path) -> None:
    with pytest.raises(NotFoundError, match="not on the hub") as caught:
        aprfmt.push(gguf, "org/name", create=False)
    assert caught.value.exit_code == 3
    assert hub.created == hub.commits == []


@pytest.mark.parametrize("repo", ["name", "org/name/file", "org/name:Q4", "../name", "org/na me"])
def test_what_is_no_repository(repo: str, hub: Hub, gguf: Path) -> None:
    with pytest.raises(UsageError):
        aprfmt.push(gguf, repo)
    assert hub.requests == []


def test_what_is_no_model(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model, but a text")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "x.gguf", tmp_path / "empty", tmp_path / "absent.gguf"):
        with pytest.raises(AprError):
            aprfmt.push(path, "org/name")
    assert hub.commits == hub.created == []


ANSWERS: dict[str, tuple[int, dict[str, str], str, str]] = {
    "401": (401, {}, "/api/repos/create", "hf auth login"),
    "403": (403, {}, "/api/repos/create", "token"),
    "500 at the commit": (500, {}, "/commit/", "later"),
    "403 at the upload": (403, {}, "/upload/", "token"),
    "429": (429, {}, "/preupload/", "wait"),
}


@pytest.mark.parametrize(("status", "headers", "place", "hint"), ANSWERS.values(), ids=list(ANSWERS))
def test_a_hub_that_refuses(
    status: int, headers: dict[str, str], place: str, hint: str, hub: Hub, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    http = pytest.importorskip("huggingface_hub.utils._http")
    monkeypatch.setattr(http.time, "sleep", lambda seconds: None)
    hub.fault = lambda request: Answer(status, headers) if place in request.path else None
    with pytest.raises(AprError) as caught:
        aprfmt.push(gguf, "org/name")
    assert isinstance(caught.value, StorageError | NotFoundError)
    assert hint in (caught.value.hint or "")
    assert "cache" not in (caught.value.hint or "")
    assert hub.commits == []
    assert "hf_secret" not in str(caught.value) + (caught.value.hint or "")


@pytest.mark.parametrize("text", ["Illegal header value b'Bearer hf_secret'", "Bearer other-secret", "hf_secret?"])
def test_a_token_is_not_printed(text: str) -> None:
    error = hub_errors.failure(ValueError(text), HubPath("org/name"), Path(), "org/name")
    assert "secret" not in str(error)


def test_offline_nothing_is_sent(hub: Hub, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE"):
        aprfmt.push(gguf, "org/name")
    found = aprfmt.push(gguf, "org/name", plan=True, no_license=True)
    assert [file.name for file in found.files] == [gguf.name]
    assert (found.created, found.warnings[-1].partition(":")[0]) == (False, "HF_HUB_OFFLINE is set")
    assert hub.requests == []


def test_without_a_network_the_hint_is_about_sending(hub: Hub, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    with pytest.raises(StorageError, match="cannot be reached") as caught:
        aprfmt.push(gguf, "org/name", no_license=True)
    assert caught.value.hint == "check the network and its proxies"
    found = aprfmt.push(gguf, "org/name", plan=True, no_license=True)
    assert "cannot be reached" in found.warnings[-1]


def test_what_was_pushed_is_read_back(hub: Hub, gguf: Path) -> None:
    aprfmt.push(gguf, "org/name")
    with aprfmt.open("hf://org/name:Q8_0") as there, aprfmt.open(gguf) as here:
        assert [t.name for t in there.tensors.entries] == [t.name for t in here.tensors.entries]
        name = there.tensors.entries[0].name
        assert bytes(there.tensors[name].raw()) == bytes(here.tensors[name].raw())


def test_another_commit_meanwhile_is_not_written_over(hub: Hub, gguf: Path) -> None:
    hub.exists, hub.files = True, {"README.md": CARD}
    parents: list[object] = []

    def fault(request: Request) -> Answer | None:
        if "/commit/" in request.path:
            parents.append(json.loads(request.body.splitlines()[0])["value"].get("parentCommit"))
        return None

    hub.fault = fault
    aprfmt.push(gguf, "org/name")
    assert parents == [COMMIT]


def test_the_command(hub: Hub, gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["push", str(gguf), "org/name", "--plan", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["schema"], body["repo"], body["plan"]) == ("apr.push/1", "org/name", True)
    assert run(["push", str(gguf), "org/name", "--message", "first", "--private"]) == 0
    said = capsys.readouterr()
    assert "published" in said.out
    assert "Q8_0" in said.out
    assert hub.commits[0]["summary"] == "first"
    assert run(["inspect", "org/name", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["hub"]["sources"] == [f"hf://org/name@{COMMIT}"]
    assert 0 < body["hub"]["fetched_bytes"] <= gguf.stat().st_size
