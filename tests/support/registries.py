"""What other projects register, from their sources: the classes of llama.cpp's converter, those of transformers."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from arch_models import CACHE, quiet_transformers

CONVERTER = CACHE / "llama.cpp-converter" / "conversion"


@cache
def converter_classes(folder: Path = CONVERTER) -> tuple[str, ...]:
    """Every class of a text network that llama.cpp's converter registers, sorted."""
    classes = {node.name: node for path in sorted(folder.glob("*.py")) for node in _classes(path)}
    return tuple(
        sorted(
            {name for node in classes.values() if _comes_from("TextModel", node, classes) for name in _registered(node)}
        )
    )


@cache
def tower_classes(folder: Path = CONVERTER) -> tuple[str, ...]:
    """Every class whose towers llama.cpp's converter registers, sorted."""
    classes = {node.name: node for path in sorted(folder.glob("*.py")) for node in _classes(path)}
    found = (node for node in classes.values() if _comes_from("MmprojModel", node, classes))
    return tuple(sorted({name for node in found for name in _registered(node)}))


def towers_without_row(classes: tuple[str, ...]) -> list[str]:
    """Those of the classes that the table of towers does not know."""
    from aprfmt.arch.table import TOWERS

    known = {name for row in TOWERS.values() for name in row.hf_classes}
    return [name for name in classes if name not in known]


def causal_classes() -> tuple[str, ...]:
    """Every class of transformers that AutoModelForCausalLM knows, sorted."""
    quiet_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    names = (name for value in CLASSES.values() for name in ((value,) if isinstance(value, str) else value))
    return tuple(sorted(set(names)))


def without_row(classes: tuple[str, ...]) -> list[str]:
    """Those of the classes that the architecture table does not know."""
    from aprfmt.arch.table import ARCHITECTURES, classes_of

    known = {name for row in ARCHITECTURES.values() for name in classes_of(row)}
    return [name for name in classes if name not in known]


def registry_lines() -> list[str]:
    """How many of the classes that others register are known here, and which are not; a line each of a document."""
    import transformers

    lines = []
    for who, classes in (
        ("The text classes that llama.cpp's converter registers", converter_classes()),
        (f"The causal language models of transformers {transformers.__version__}", causal_classes()),
    ):
        unknown = without_row(classes)
        rest = f"; not {', '.join(f'`{name}`' for name in unknown)}" if unknown else ""
        lines.append(f"* {who}: {len(classes) - len(unknown)} of {len(classes)} are known{rest}.")
    return lines


def _classes(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))


def _registered(node: ast.ClassDef) -> Iterator[str]:
    for call in node.decorator_list:
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "ModelBase.register":
            yield from (str(word.value) for word in call.args if isinstance(word, ast.Constant))


def _comes_from(root: str, node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> bool:
    """Whether the class comes from the converter's class `root`, by whatever way."""
    bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    return root in bases or any(_comes_from(root, classes[base], classes) for base in bases if base in classes)
