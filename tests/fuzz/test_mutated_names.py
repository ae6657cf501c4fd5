"""Names that a package gives to files, and links in a model's folder, mutated. APR_NAMES=3000 takes some minutes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import unicodedata
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import plain_models

import aprfmt
from aprfmt.errors import AprError, RefusedError
from aprfmt.formats.apr_metadata import SOURCE_KEY
from aprfmt.io import names

CASES = int(os.environ.get("APR_NAMES", "24"))
"""Folders of each kind; names are judged a hundred times as often."""

SECRET, TEXT = b"root:*:1:0:99999:7:::\n", b"[core]\n"

PARTS = (
    *(".git", ".hg", ".envrc", ".vscode", "conftest.py", "sitecustomize", "desktop.ini", "pytest.ini", "a.lnk", "con"),
    *("nul.txt", "git~1", "HEAD", "objects", "refs", "commondir", "..", ".", "", "config.json", "CONFIG.JSON", "notes"),
    *("Notes", "caf\u00e9", "cafe\u0301", "stra\u00dfe", "STRASSE", ".gitignore", ".m.tmp", ".switch", "x" * 255),
)
ODDITIES = (
    "\u200c",
    "\u200d",
    "\ufeff",
    ".",
    " ",
    ":",
    "::$DATA",
    "\\",
    "\0",
    "\n",
    "\x1b[2J",
    "\u202e",
    "\ud800",
    "~1",
)
ACTED_ON = (".git", ".hg", ".envrc", ".vscode", "conftest.py", "sitecustomize", "con", "nul.txt", "git~1")
FILES_ACTED_ON = ("desktop.ini", "pytest.ini", "a.lnk")
"""Harmless as folders."""


def mutated(dice: Random) -> str:
    """A path of one to four parts, spelled in some odd way."""
    parts = [dice.choice(PARTS) for _ in range(dice.choice((1, 1, 2, 2, 3, 4)))]
    for _ in range(dice.choice((0, 0, 1, 2))):
        at = dice.randrange(len(parts))
        part, place = parts[at], dice.randrange(len(parts[at]) + 1)
        parts[at] = dice.choice(
            (
                part.swapcase(),
                part.upper(),
                part[:place] + dice.choice(ODDITIES) + part[place:],
                part + dice.choice(ODDITIES),
                unicodedata.normalize("NFD", part),
                part[:place] + chr(dice.choice((dice.randrange(1, 128), dice.randrange(128, 0xD800)))) + part[place:],
            )
        )
    return "/".join(parts)


def on_ntfs(name: str) -> str:
    """The file that Windows opens."""
    return "/".join(part.partition(":")[0].rstrip(". ").upper() for part in name.replace("\\", "/").split("/"))


def on_hfs(name: str) -> str:
    """The file that a Mac opens."""
    visible = "".join(c for c in unicodedata.normalize("NFD", name) if unicodedata.category(c) != "Cf")
    return unicodedata.normalize("NFD", visible.casefold())


def test_no_mutated_name_is_taken_for_one_that_programs_act_on() -> None:
    dice, fine = Random(1), 0
    for _ in range(CASES * 100):
        every = list(dict.fromkeys(mutated(dice) for _ in range(dice.randint(1, 4))))
        refused = {finding.name for finding in names.findings(every)}
        kept = [name for name in every if name not in refused]
        fine += len(kept)
        for view in (on_ntfs, on_hfs):
            seen = [view(name) for name in kept]
            assert len(set(seen)) == len(seen), kept
            for place in seen:
                parts = place.split("/")
                assert not set(parts) & {"", ".", ".."}, kept
                assert not set(parts) & set(map(view, ACTED_ON)), kept
                assert parts[-1] not in map(view, FILES_ACTED_ON), kept
                assert not any("/".join(parts[:n]) in seen for n in range(1, len(parts))), kept
        assert not any(unicodedata.category(c) in ("Cc", "Cs") or c == "\u202e" for name in kept for c in name)
    assert fine > CASES * 20


def error_of(call: Callable[..., object], *words: Path, **options: Any) -> AprError | None:
    try:
        call(*words, **options)
    except AprError as error:
        return error
    return None


def crafted(plain: Path, path: Path, given: list[str]) -> Path:
    """The `.apr` of a folder, with further files of these names."""
    with aprfmt.open(plain) as model:
        metadata = json.loads(json.dumps(dict(model.metadata)))
        tensors: dict[str, Any] = {
            n: aprfmt.RawTensor(t.dtype, t.shape, bytes(t.raw())) for n, t in model.tensors.items()
        }
    record = metadata[SOURCE_KEY]
    literals = zlib.decompress(base64.b64decode(record["literals"])) + TEXT * len(given)
    record["literals"] = base64.b64encode(zlib.compress(literals)).decode()
    record["files"] += [{"name": name, "size": len(TEXT), "segments": [["b", len(TEXT)]]} for name in given]
    aprfmt.save_file(tensors, path, metadata, force=True)
    return path


def test_no_mutated_package_writes_beside_its_folder(tmp_path: Path) -> None:
    place, plain = tmp_path / "work" / "place", tmp_path / "plain.apr"
    aprfmt.import_model(plain_models.write_folder(tmp_path / "hf"), plain)
    place.mkdir(parents=True)
    usual = {path.name for path in (tmp_path / "hf").iterdir()}
    dice, written = Random(2), 0
    before = sorted(tmp_path.rglob("*"))
    for number in range(CASES):
        given = [name for name in (mutated(dice) for _ in range(dice.randint(1, 3))) if "\ud800" not in name]
        package = crafted(plain, tmp_path / "work" / "m.apr", given)
        is_allowed = number % 2 == 0
        error = error_of(aprfmt.export_model, package, place / "out", format="hf", allow_names=is_allowed)
        if error is not None:
            assert error.exit_code in (4, 5), given
            assert not (place / "out").exists()
        else:
            written += 1
            found = {str(path.relative_to(place / "out")) for path in (place / "out").rglob("*") if path.is_file()}
            assert found == usual | set(given)
            assert is_allowed or names.findings(given, usual) == []
            assert not any(finding.is_final for finding in names.findings(given))
            shutil.rmtree(place / "out")
        assert list(place.iterdir()) == []
        package.unlink()
    assert sorted(tmp_path.rglob("*")) == before
    assert written > CASES // 10


def linked(folder: Path, name: str, dice: Random) -> None:
    """Puts a link of that name into the folder: to a file or folder, in it or outside, straight or by other links."""
    link = folder / name
    targets = [
        *("../secret", "../place/secret", "../place", "..", ".", "config.json", "assets", "assets/logo.png", "nowhere"),
        *(
            f"{name}",
            "assets/../../secret",
            "assets/../config.json",
            "via/secret",
            "via",
            "/proc/self/cwd",
            "/dev/null",
        ),
        *(str(folder.parent / "secret"), str(folder / "config.json"), "../alias/secret", "../alias/config.json"),
    ]
    target = dice.choice(targets)
    if link.parent != folder and not target.startswith("/"):
        target = os.path.join("..", target)
    if link.is_file() and not link.is_symlink() and dice.random() < 0.5:
        shutil.move(link, folder.parent / "place" / Path(name).name)
        target = str(folder.parent / "place" / Path(name).name)
    if os.path.lexists(link):
        link.unlink()
    link.symlink_to(target)


def leads_out(folder: Path) -> bool:
    """Whether some file below the folder, through links to folders too, lies outside of it."""
    root = os.path.realpath(folder) + os.sep
    return any(
        not (os.path.realpath(os.path.join(place, name)) + os.sep).startswith(root)
        for place, folders, files in os.walk(folder)
        for name in (*folders, *files)
    )


def test_no_mutated_link_brings_a_file_from_outside(tmp_path: Path) -> None:
    folder, clean = tmp_path / "hf", tmp_path / "clean"
    plain_models.write_folder(clean)
    (clean / "assets").mkdir()
    (clean / "assets" / "logo.png").write_bytes(b"png")
    outcomes = {"written": 0, "refused": 0}
    for number in range(CASES):
        dice = Random(f"links {number}")
        shutil.copytree(clean, folder)
        (tmp_path / "place").mkdir()
        for path in (tmp_path / "secret", tmp_path / "place" / "secret"):
            path.write_bytes(SECRET)
        (tmp_path / "alias").symlink_to(folder)
        (folder / "via").symlink_to(dice.choice(("assets", "../place", "..", "via")))
        for name in dice.sample(["LICENSE", "notes.txt", "assets/logo.png", "config.json", "tokenizer.json"], 2):
            linked(folder, name, dice)
        for output, form in (("m.apr", None), ("out", "hf")):
            error = error_of(aprfmt.convert_model, folder, tmp_path / output, format=form)
            if error is not None:
                assert error.exit_code in (3, 4, 5), number
                assert not (tmp_path / output).exists()
                assert (
                    leads_out(folder) or not isinstance(error, RefusedError) or "symlinks pointing" not in error.message
                )
                outcomes["refused"] += 1
                continue
            outcomes["written"] += 1
            files = [tmp_path / output] if output == "m.apr" else list((tmp_path / output).rglob("*"))
            assert not any(path.is_symlink() for path in files)
            if output == "m.apr":
                aprfmt.convert_model(tmp_path / output, tmp_path / "back", format="hf")
                files = list((tmp_path / "back").rglob("*"))
            assert not any(SECRET in path.read_bytes() for path in files if path.is_file()), number
        for path in (*tmp_path.glob("out"), *tmp_path.glob("back"), folder, tmp_path / "place"):
            shutil.rmtree(path)
        for path in (tmp_path / "alias", *tmp_path.glob("m.apr")):
            path.unlink()
    assert min(outcomes.values()) > CASES // 10, outcomes
