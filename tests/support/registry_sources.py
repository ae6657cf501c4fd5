"""The classes that other projects register, read from their sources without importing them."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from arch_models import CACHE, quiet_transformers

REASONS = Path(__file__).parents[1] / "conformance" / "unregistered.jsonl"
"""A reason a line, and the classes of a registry that have no row for it."""
CONVERTER = CACHE / "llama.cpp-converter" / "conversion"
HEADLESS = ("masked LM", "sequence classification", "token classification")
"""Tables of transformers whose classes have another head on a network that may have a row."""
TRANSFORMERS_TABLES = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "masked LM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}


@dataclass(frozen=True)
class Registered:
    """A class that a project registers.

    Attributes:
        name: of the class; of mlx_lm, whose classes are all called Model, the module.
        model_type: as in config.json, "" if the registry does not state it.
        source: the file that defines it, None if it was not found.
        top: the name of the class in that file.
    """

    name: str
    model_type: str = ""
    source: Path | None = None
    top: str = ""


@dataclass(frozen=True)
class Registry:
    """What a project registers under one heading.

    Attributes:
        title: "transformers causal", "vllm text".
        classes: sorted by name, each once.
    """

    title: str
    classes: tuple[Registered, ...]


def registries_in(folder: Path) -> list[Registry]:
    """The registries of the project whose sources are in `folder`: a package, or a folder that contains it.

    Raises ValueError if it is none of transformers, mlx_lm, llama.cpp, vLLM and SGLang.
    """
    for inside, read in _READERS.items():
        package, _, tail = inside.partition("/")
        for path in (folder / inside, folder / tail):
            if path.is_file() and package in path.parts:
                return list(read(path.parent))
    found = next(iter(sorted(folder.rglob("conversion/__init__.py"))), None)
    if found is not None:
        return _llama_cpp(found.parent)
    raise ValueError(f"{folder}: found none of {', '.join(_READERS)}, conversion/")


def _transformers(auto: Path, *, sources: bool = True) -> list[Registry]:
    tables = {title: _pairs(auto / "modeling_auto.py", name) for title, name in TRANSFORMERS_TABLES.items()}
    files = _defined(sorted(auto.parent.glob("*/modeling_*.py"))) if sources else {}
    return [
        Registry(f"transformers {title}", _once(Registered(name, kind, files.get(name), name) for kind, name in pairs))
        for title, pairs in tables.items()
    ]


def _mlx(models: Path) -> list[Registry]:
    networks = (path for path in sorted(models.glob("*.py")) if {"Model", "ModelArgs"} <= _defined([path]).keys())
    return [Registry("mlx_lm", _once(Registered(path.stem, path.stem, path, "Model") for path in networks))]


def _vllm(models: Path) -> list[Registry]:
    tree = ast.parse((models / "registry.py").read_text())
    tables = {"text": "_TEXT_GENERATION_MODELS", "multimodal": "_MULTIMODAL_MODELS", "embedding": "_EMBEDDING_MODELS"}
    found = []
    for title, table in tables.items():
        value = _value_of(tree, table)
        pairs = zip(value.keys, value.values, strict=True) if isinstance(value, ast.Dict) else ()
        classes = (_of_vllm(models, key, value) for key, value in pairs if isinstance(key, ast.Constant))
        found.append(Registry(f"vllm {title}", _once(classes)))
    return found


def _of_vllm(models: Path, key: ast.Constant, value: ast.expr) -> Registered:
    words = [str(word.value) for word in ast.walk(value) if isinstance(word, ast.Constant)]
    source = models / f"{words[0]}.py" if words else models
    return Registered(str(key.value), "", source if source.is_file() else None, str(words[-1] if words else ""))


def _sglang(models: Path) -> list[Registry]:
    classes = []
    for path in sorted(models.glob("*.py")):
        value = _value_of(ast.parse(path.read_text()), "EntryClass")
        names = (node.id for node in ast.walk(value) if isinstance(node, ast.Name)) if value is not None else ()
        classes += [Registered(name, "", path, name) for name in names]
    return [Registry("sglang", _once(classes))]


def _llama_cpp(folder: Path) -> list[Registry]:
    files = {
        name: path for path in sorted(folder.glob("*.py")) for node in _classes(path) for name in _registered(node)
    }
    return [
        Registry(f"llama.cpp {title}", tuple(Registered(name, "", files[name]) for name in names))
        for title, names in (("text", converter_classes(folder)), ("towers", tower_classes(folder)))
    ]


_READERS: dict[str, Callable[[Path], Sequence[Registry]]] = {
    "transformers/models/auto/modeling_auto.py": _transformers,
    "mlx_lm/models/switch_layers.py": _mlx,
    "vllm/model_executor/models/registry.py": _vllm,
    "sglang/srt/models/registry.py": _sglang,
}
"""A file of each project, and what reads the folder of it."""


def _once(classes: Iterator[Registered] | Sequence[Registered]) -> tuple[Registered, ...]:
    return tuple(sorted({found.name: found for found in classes}.values(), key=lambda found: found.name))


def _pairs(path: Path, table: str) -> list[tuple[str, str]]:
    """Model types and classes of a table of transformers; a model type may have several classes."""
    value = _value_of(ast.parse(path.read_text()), table)
    if not isinstance(value, ast.Call) or not value.args:
        raise ValueError(f"{path}: {table} is not an OrderedDict of pairs")
    listed = ast.literal_eval(value.args[0])
    return [(kind, name) for kind, names in listed for name in ((names,) if isinstance(names, str) else names)]


def _value_of(tree: ast.Module, name: str) -> ast.expr | None:
    """What a module assigns to `name`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets):
            return node.value
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            return node.value
    return None


def _defined(paths: Sequence[Path]) -> dict[str, Path]:
    """Class -> the file that defines it at its outermost level."""
    found: dict[str, Path] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            if line.startswith("class "):
                found.setdefault(line[6:].partition("(")[0].partition(":")[0].strip(), path)
    return found


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
    return tuple(found.name for found in installed("transformers causal").classes)


@cache
def installed(title: str) -> Registry:
    """A registry of the installed transformers or mlx_lm, by its title, without the files of transformers."""
    if title.startswith("transformers"):
        found = _transformers(Path(str(quiet_transformers().__file__)).parent / "models" / "auto", sources=False)
    else:
        import importlib.util

        spec = importlib.util.find_spec("mlx_lm")
        found = _mlx(Path(str(spec.origin)).parent / "models") if spec is not None else []
    return next(registry for registry in found if registry.title == title)


def without_row(classes: tuple[str, ...]) -> list[str]:
    """Those of the classes that the architecture table does not know."""
    from aprfmt.arch.table import ARCHITECTURES, classes_of

    known = {name for row in ARCHITECTURES.values() for name in classes_of(row)}
    return [name for name in classes if name not in known]


def is_known(registry: Registry, found: Registered) -> bool:
    """Whether our tables have a class: as a row, a wrapper or a tower, of mlx_lm as a network that is quantized.

    A class with another head counts if its network has a row: the head is carried.
    """
    from aprfmt.arch.heads import head_of
    from aprfmt.arch.table import find

    if registry.title == "mlx_lm":
        return found.model_type in mlx_modules(found.source)
    if registry.title == "llama.cpp towers":
        return not towers_without_row((found.name,))
    if not without_row((found.name,)):
        return True
    of_head = head_of(found.name) is not None and registry.title.endswith(HEADLESS)
    return of_head and bool(found.model_type) and find(model_type=found.model_type) is not None


@cache
def mlx_modules(source: Path | None) -> frozenset[str]:
    """The modules of mlx_lm that load what our table quantizes; `source` is one of them.

    mlx_lm has two tables of other modules: by model type, and by model type and class.
    """
    from aprfmt.arch.mlx_networks import NETWORKS, ONLY_INSIDE, WRAPPERS
    from aprfmt.arch.table import ARCHITECTURES

    assert source is not None
    tree = ast.parse((source.parent.parent / "utils.py").read_text())
    by_type, by_class = (
        ast.literal_eval(table) if (table := _value_of(tree, f"MODEL_{kind}REMAPPING")) is not None else {}
        for kind in ("", "ARCHITECTURE_")
    )
    found = {str(by_type.get(name, name)) for name in WRAPPERS}
    for row in (ARCHITECTURES[name] for name in NETWORKS if name not in ONLY_INSIDE):
        for kind in {*row.model_types, row.model_type}:
            classes = {module for (name, top), module in by_class.items() if name == kind and top in row.hf_classes}
            found |= classes or {str(by_type.get(kind, kind))}
    return frozenset(found)


def unknown_in(registry: Registry) -> list[Registered]:
    """The classes of a registry that our tables lack."""
    return [found for found in registry.classes if not is_known(registry, found)]


NO_BACKBONE = "backbone has no row"


def lacks_backbone(registry: Registry, found: Registered) -> bool:
    """Whether a class of transformers with a head is unknown because no row has a network of its model type."""
    return registry.title.endswith((*HEADLESS, "seq2seq")) and found.model_type not in _types_of_rows()


@cache
def _types_of_rows() -> frozenset[str]:
    from aprfmt.arch.table import ARCHITECTURES
    from aprfmt.arch.wrappers import WRAPPERS

    rows = {kind for row in ARCHITECTURES.values() for kind in (row.model_type, *row.model_types)}
    return frozenset(rows | {wrapper.model_type for wrapper in WRAPPERS})


def reasons(title: str | None = None) -> dict[str, str]:
    """Class -> why it has no row, from tests/conformance/unregistered.jsonl; those of one registry, or of all."""
    lines = map(json.loads, REASONS.read_text("utf-8").splitlines())
    return {name: line["why"] for line in lines if title in (None, line["registry"]) for name in line["classes"]}


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
