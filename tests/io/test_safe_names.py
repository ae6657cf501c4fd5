"""Names that a package may give to files in a user's folder, and those that it may not."""

from __future__ import annotations

import pytest

from aprfmt.errors import RefusedError
from aprfmt.io import names

NEVER = (
    *(
        "../evil",
        "/evil",
        "a//b",
        "a/./b",
        "",
        "a\\b",
        "a\0b",
        "line\nbreak",
        "\x1b[2Jx",
        "\u202egpj.exe",
        "half\ud800",
    ),
    *("\u200c", "\u200d/b", "a/.\u200c./b", "...", "a/. ./b", " "),
    *(".m.0123456789abcdef-1-1-01234567.tmp/.switch", "a/.switch", ".X.TMP", "x" * 256, "a/" * 64 + "b", "é" * 128),
)
ACTED_ON = (
    *("\u200d.git/config", "a/\ufeff.envrc", "co\u200cn", "conftest\u2060.py"),
    *(".git/config", ".GIT/config", "a/.git/hooks/post-checkout", ".g\u200cit/config", ".git\u200d/config"),
    *(".git ", ".git.", ".git::$INDEX_ALLOCATION/config", "git~1/config", "GIT~1/config", "a/GI7EBA~1"),
    *(".gitmodules", ".hg/hgrc", ".svn/entries", ".envrc", ".env", ".vscode/tasks.json", ".idea/workspace.xml"),
    *(".github/workflows/x.yml", ".ssh/authorized_keys", ".bashrc", ".npmrc", ".pypirc", ".gitattributes/x"),
    *("sitecustomize.py", "SiteCustomize.py", "src/conftest.py", "desktop.ini", "pytest.ini", "a/tox.ini"),
    *("sitecustomize/__init__.py", "usercustomize.so", "sitecustomize.cp312-win_amd64.pyd", "conftest.pyc"),
    *("__pycache__/conftest.cpython-312.pyc", "sitecustomize"),
    *("a.lnk", "a/b.SCF", "model.url", "x.desktop", "docs.library-ms"),
    *("con", "CON.json", "a/nul.txt", "com1", "COM¹.log", "lpt9.tar.gz", "aux .txt", "conin$"),
    *("config.json.", "config.json ", "config.json::$DATA", "a:b"),
)
FINE = (
    *(".gitattributes", ".gitignore", "assets/.gitkeep", "config.json", "modeling_x.py", "Makefile", "original/a.pth"),
    *("console.txt", "com10", "a.b.c", "~note", "README.md~", "caf\u00e9.png", "\u0645\u06cc\u200c\u062e.txt", "git~a"),
    *(
        "HEAD",
        "objects/a",
        "a/head/refs/b",
        "a/head/objects/c",
        "config",
        "b/HEAD",
        "b/refs/c",
        "url",
        "curl.urls",
        "my_conftest.py",
    ),
    *("x" * 255, "what is it?.wav", "com", "data/con-1.txt"),
)


@pytest.mark.parametrize("name", NEVER, ids=ascii)
def test_what_is_never_written(name: str) -> None:
    (found,) = names.findings([name])
    assert found.is_final
    with pytest.raises(RefusedError, match="no option allows it") as caught:
        raise_with_hint(name)
    assert caught.value.exit_code == 5


def raise_with_hint(name: str) -> None:
    """The check with everything allowed; its hint in the message."""
    try:
        names.check([name], "m.apr", allowed=True)
    except RefusedError as error:
        raise RefusedError(str(error.hint)) from error


@pytest.mark.parametrize("name", ACTED_ON, ids=ascii)
def test_what_other_programs_act_on_is_written_when_asked_for(name: str) -> None:
    (found,) = names.findings(["config.json", name])
    assert (found.name, found.is_final) == (name, False)
    with pytest.raises(RefusedError, match="the model would write") as caught:
        names.check([name], "m.apr", allowed=False)
    assert (caught.value.path, caught.value.hint) == (
        "m.apr",
        "--allow-names allows such names; inspect the files before other programs read them",
    )
    names.check([name], "m.apr", allowed=True)


def test_ordinary_names_are_fine() -> None:
    assert names.findings(FINE) == []


@pytest.mark.parametrize("around", ["", "a/", "A/b/"])
@pytest.mark.parametrize("head", ["HEAD", "head", "Head.", "HE\u200cAD"])
@pytest.mark.parametrize("others", [("objects/n.txt", "refs/n.txt"), ("Objects/x/y", "REFS/x"), ("commondir",)])
def test_a_folder_that_git_takes_for_a_repository(around: str, head: str, others: tuple[str, ...]) -> None:
    placed = [f"{around}{name}" for name in (head, "config", *others)]
    for order in (placed, placed[::-1]):
        (found,) = names.findings(order)
        assert (found.name, found.is_final) == (around + head, False)
    (found,) = names.findings(placed[:1], [name.lower() for name in placed[1:]])
    assert found.name == around + head


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *(("config.json", "CONFIG.JSON"), ("a/b", "A/B"), ("stra\u00dfe", "STRASSE"), ("caf\u00e9", "cafe\u0301")),
        *(("config.json", "con\u200cfig.json"), ("a", "a/b"), ("a/b", "a"), ("A", "a/b/c"), ("x/y", "X")),
    ],
    ids=ascii,
)
def test_names_that_some_file_system_takes_for_one(first: str, second: str) -> None:
    (found,) = names.findings([first, second])
    assert (found.name, found.is_final) == (second, False)
    assert repr(first) in found.reason
    (found,) = names.findings([second], [first])
    assert found.name == second


def test_folders_that_differ_in_case_alone_are_one_folder() -> None:
    assert names.findings(["Images/a.png", "images/b.png"]) == []
