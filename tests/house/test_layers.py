"""The house keeps its shape: layers, file sizes, what an import loads, documents that tell the truth."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import aprfmt

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"

# Lowest first; a module may import from its own layer and from those below.
LAYERS = [
    {"errors", "light_dataclass", "limits", "schema", "text", "types"},
    {"io"},
    {"trust"},
    {"html"},
    {"codecs", "arch", "tokenizer"},
    {"texts"},
    {"model"},
    {"formats"},
    {"provenance"},
    {"canonical"},
    {"llama"},
    {"convert", "inspection"},
    {"running", "publishing"},
    {"api"},
    {"cli", "__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# tokenizer reads and writes dtype-free data only; arch may not know tokenizers, and the reverse.
SIBLINGS = {
    ("arch", "tokenizer"), ("tokenizer", "arch"), ("codecs", "arch"), ("codecs", "tokenizer"),
    ("inspection", "convert"), ("convert", "inspection"),
}  # fmt: skip


def modules(package: str) -> Iterator[Path]:
    yield from sorted((SRC / package).rglob("*.py"))


@dataclass(frozen=True)
class Parsed:
    """What the tests of this file ask of a module, from one walk over its tree."""

    imports: list[tuple[ast.Import | ast.ImportFrom, bool]]
    """Each import, and whether it is for type checkers alone."""
    facade: list[tuple[int, str]]
    """(line, name) of `aprfmt.name`."""
    classes: list[str]
    functions: list[tuple[int, int]]
    """First and last line."""


@cache
def parsed(path: Path) -> Parsed:
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    for_types = {
        id(node)
        for block in nodes
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found = Parsed([], [], [], [])
    for node in nodes:
        match node:
            case ast.Import() | ast.ImportFrom():
                assert isinstance(node, ast.Import) or node.level == 0, f"{path}:{node.lineno}: relative import"
                found.imports.append((node, id(node) in for_types))
            case ast.Attribute(value=ast.Name(id="aprfmt"), attr=name, lineno=line):
                found.facade.append((line, name))
            case ast.ClassDef():
                found.classes.append(node.name)
            case ast.FunctionDef():
                found.functions.append((node.lineno, node.end_lineno or node.lineno))
    return found


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, also inside functions, but of those for type checkers."""
    for node, for_types in parsed(path).imports:
        if for_types:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif node.module == "aprfmt":
            yield from ((node.lineno, f"aprfmt.{alias.name}") for alias in node.names)
        else:
            yield node.lineno, node.module or ""


def behind_facade(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every public name that is taken from `aprfmt` itself: the module that defines it."""
    for line, name in parsed(path).facade:
        if name in aprfmt._LAZY:
            yield line, aprfmt._LAZY[name].partition(":")[0]


def imported(path: Path, known: Container[str], *, types: bool = False) -> set[str]:
    """The modules that `path` imports; a module that is imported from its package counts, and not the package."""
    found = set()
    for node, for_types in parsed(path).imports:
        if for_types and not types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else str(node.module) for name in whole}
    return found


def inner_lines(path: Path) -> set[int]:
    """Lines that stand inside functions."""
    return {line for first, last in parsed(path).functions for line in range(first, last + 1)}


def layer(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "aprfmt" and len(parts) > 1 and parts[1] in RANK else None


@pytest.mark.parametrize("path", modules("aprfmt"), ids=lambda p: str(p.relative_to(SRC)))
def test_no_module_imports_from_a_higher_layer(path: Path) -> None:
    own = layer(".".join(path.relative_to(SRC).with_suffix("").parts))
    if own is None:
        assert path.name == "__init__.py", f"{path} belongs to no layer"
        return
    for line, module in (*imports(path), *behind_facade(path)):
        if module.startswith("aprtrain"):
            assert own == "cli", f"{path}:{line}: aprfmt must not know aprtrain"
            assert line in inner_lines(path), f"{path}:{line}: aprtrain is imported inside the command only"
        other = layer(module)
        if other is not None:
            assert RANK[other] <= RANK[own], f"{path}:{line}: {own} imports {other}, which lies above it"
            assert (own, other) not in SIBLINGS, f"{path}:{line}: {own} and {other} stand side by side"


@pytest.mark.parametrize("path", modules("aprtrain"), ids=lambda p: str(p.relative_to(SRC)))
def test_the_trainer_takes_nothing_of_its_own_from_aprfmt(path: Path) -> None:
    assert [module for _, module in behind_facade(path) if module.startswith("aprtrain")] == []


def test_a_name_of_the_facade_is_an_import(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("import aprfmt\naprfmt.open('x')\naprfmt.AprError\naprfmt.teacher\n")
    assert sorted(behind_facade(tmp_path / "m.py")) == [(2, "aprfmt.formats"), (4, "aprtrain.api")]


def in_our_house() -> dict[str, Path]:
    """Our modules by their names."""
    paths = [*modules("aprfmt"), *modules("aprtrain")]
    return {".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def test_no_import_leads_back() -> None:
    """Through any number of modules: inside functions, by names of the facade, and for type checkers too."""
    paths = in_our_house()
    untyped = {"aprfmt", "aprfmt.arch.row"}  # the facade names all; a key names its converter, which takes keys
    found = {
        name: (imported(path, paths, types=name not in untyped) | {module for _, module in behind_facade(path)})
        & {*paths}
        for name, path in paths.items()
    }
    TopologicalSorter(found).prepare()  # CycleError names the modules


def test_a_class_name_is_used_once() -> None:
    """So that a search for a name finds one thing."""
    classes = ((found, name) for name, path in in_our_house().items() for found in parsed(path).classes)
    places: dict[str, list[str]] = {}
    for name, module in classes:
        places.setdefault(name, []).append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def test_llama_cpp_is_imported_by_its_worker_alone() -> None:
    """It dies on some machines and files. libggml, of which codecs call checked functions, is not llama.cpp."""
    inside = {f"aprfmt.llama.{name}" for name in ("capi", "session", "importance", "media", "watch")}
    worker = "aprfmt.llama.worker"
    for package in ("aprfmt", "aprtrain"):
        for path in modules(package):
            own = ".".join(path.relative_to(SRC).with_suffix("").parts)
            found = {module for _, module in imports(path)}
            assert own in {worker, *inside} or not found & inside, f"{path} runs llama.cpp in our process"
            assert not {module.split(".")[0] for module in found} & {"llama_cpp", "xllamacpp"}, path
    code = "import aprfmt.llama.client, sys; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert worker in loaded
    assert not inside & {*loaded}


def test_processes_are_started_in_one_place() -> None:
    """There alone is made sure that a process imports nothing from the current folder."""
    starts = {"subprocess", "multiprocessing", "concurrent.futures.process", "pty"}
    for name, path in in_our_house().items():
        found = {module for _, module in imports(path) if module in starts or module.split(".")[0] in starts}
        assert not found or name == "aprfmt.io.child", f"{path} imports {sorted(found)}: use aprfmt.io.child"
        words = re.findall(r"os\.(?:exec|spawn|posix_spawn|popen|system)\w*\(|ProcessPoolExecutor", path.read_text())
        assert not words, f"{path} starts a process by {words[0]}"


def test_targets_do_not_know_each_other() -> None:
    for path in modules("aprfmt/convert/targets"):
        found = {name.split(".")[3] for _, name in imports(path) if name.startswith("aprfmt.convert.targets.")}
        assert found <= {"base"}, f"{path} imports {sorted(found)}"


HEAVY = {
    "click", "cryptography", "gguf", "huggingface_hub", "llama_cpp", "lz4", "numpy", "tokenizers", "torch",
    "transformers", "typer", "xllamacpp", "yaml", "zstandard",
}  # fmt: skip


def heavy_modules(code: str) -> set[str]:
    """Those of HEAVY that a new interpreter has loaded after `code`."""
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return HEAVY & set(result.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert not heavy_modules("import aprfmt")


@pytest.mark.parametrize("name", ["hf", "m.safetensors", "m.apr", "m.gguf", "parts"])
def test_opening_files_loads_nothing_heavy(name: str, tmp_path: Path) -> None:
    import plain_models

    import aprfmt

    path = plain_models.write_folder(tmp_path / "hf")
    if name != "hf":
        path = tmp_path / name
        aprfmt.convert_model(tmp_path / "hf", path, format="apr-shards" if name == "parts" else None)
    code = f"import aprfmt\nwith aprfmt.open({str(path)!r}) as m: print(repr(m), m.metadata.keys(), m.tensors)"
    assert not heavy_modules(code)


def test_the_version_command_loads_nothing_heavy() -> None:
    code = "sys.argv = ['apr', '--version']\nfrom aprfmt.cli.main import main\ntry: main()\nexcept SystemExit: pass"
    assert not heavy_modules(code)


def test_documents_name_every_room_and_the_version() -> None:
    import aprfmt

    architecture = (ROOT / "ARCHITECTURE.md").read_text()
    for package in ("aprfmt", "aprtrain"):
        for room in {path.parent.name for path in (SRC / package).glob("*/*.py")}:
            assert f"`{room}/`" in architecture, f"ARCHITECTURE.md does not name the room {room}/"
    assert re.search(rf"^## {re.escape(aprfmt.__version__)}", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_documents_have_every_command_and_exit_code() -> None:
    from aprfmt.cli.commands import COMMANDS
    from aprfmt.errors import AprError

    readme, page = (ROOT / "README.md").read_text(), (ROOT / "docs/commands.md").read_text()
    for name in COMMANDS:
        assert f"`apr {name}`" in readme, f"README.md does not show apr {name}"
        assert f"| `apr {name}" in page, f"docs/commands.md does not show apr {name}"
    codes = {
        AprError.exit_code,
        *(c.exit_code for c in AprError.__subclasses__() if c.__module__.startswith("aprfmt.")),
    }
    for code in codes:
        assert re.search(rf"^\| {code} \|", page, re.MULTILINE), f"docs/commands.md does not explain exit code {code}"


def test_the_guide_for_contributors_names_functions_that_exist() -> None:
    """`module.name` in CONTRIBUTING.md is a name of that module."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    places: dict[str, list[str]] = {}
    for path in (*SRC.rglob("*.py"), *(ROOT / "tests" / "support").glob("*.py")):
        places.setdefault(path.stem, []).append(path.read_text())
    named = [found for found in re.findall(r"`([a-z_]\w*)\.([A-Za-z_]\w*)[`(]", text) if found[0] in places]
    assert len(named) > 5
    for module, name in named:
        found = any(re.search(rf"^(def |class |async def )?{name}\b", code, re.MULTILINE) for code in places[module])
        assert found or name in ("py", "sig"), f"CONTRIBUTING.md: {module} has no {name}"


def test_the_documents_have_every_key_of_a_conversion() -> None:
    from dataclasses import fields

    from aprfmt.convert.report import Report

    page = (ROOT / "docs/commands.md").read_text()
    keys = {key for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)}
    assert {field.name for field in fields(Report)} - {"label"} <= keys
