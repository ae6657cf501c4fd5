"""Recipes: files that say which type each tensor gets, as TOML or as llama-quantize's `--tensor-type-file`.

TOML:
  architecture = "llama"
  type = "q4_k_m"                   the preset whose file type the output states
  [[tensor]]
  pattern = '^blk\\.0\\.attn_q\\.weight$'     searched in the GGUF name of a tensor; the first that matches counts
  type = "q5_k"
  error = 0.0012                    relative squared error of the tensor
  share = 0.01                      of the predicted KL divergence
The other form has words REGEX=TYPE, separated by spaces or new lines.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from aprfmt.errors import CorruptError, RefusedError, UsageError, storage_errors
from aprfmt.io.pipe import FileLayout, Literal, WriteOptions, write_file
from aprfmt.text import first_few, plural
from aprfmt.types import PathLike

_MOST_BYTES = 64 << 20
TOML = ".toml"


@dataclass(frozen=True, slots=True)
class RecipeRow:
    """The type of the tensors that a regular expression matches, with its measured error."""

    pattern: str
    dtype: str
    error: float | None = None
    share: float | None = None


@dataclass(frozen=True, slots=True)
class TypeRecipe:
    """A recipe.

    Attributes:
        rows: the first matching pattern counts.
        architecture: of the model it was made for; None for any.
        preset: the preset for tensors that no row matches, and for the output's file type; None in llama-quantize's
            format.
        facts: further values of the TOML: bits_per_weight, predicted_kl.
    """

    rows: Sequence[RecipeRow]
    architecture: str | None = None
    preset: str | None = None
    facts: tuple[tuple[str, float], ...] = ()

    @property
    def tensor_type(self) -> list[str]:
        """The rows as values of --tensor-type."""
        return [f"{row.pattern}={row.dtype.lower()}" for row in self.rows]

    def check(self, architecture: str | None, names: Sequence[str], path: PathLike) -> None:
        """Raises RefusedError if a complete recipe (TOML) is for a model with other tensors than `names`."""
        if self.preset is None:
            return
        hint = "apr quantize FILE --target-bpw X --recipe-out OUT.toml writes one for this model"
        if None not in (self.architecture, architecture) and self.architecture != architecture:
            raise RefusedError(
                f"the recipe is for another model: its architecture is {self.architecture}, not {architecture}",
                path=path,
                hint=hint,
            )
        patterns = [re.compile(row.pattern, re.IGNORECASE) for row in self.rows]
        unused = [pattern.pattern for pattern in patterns if not any(map(pattern.search, names))]
        unnamed = [name for name in names if not any(pattern.search(name) for pattern in patterns)]
        if unused or unnamed:
            what = f"{plural(len(unused), 'pattern')} match no tensor ({first_few(unused)})" if unused else ""
            what = what or f"no pattern matches {plural(len(unnamed), 'tensor')} ({first_few(unnamed)})"
            raise RefusedError(f"the recipe is for another model: {what}", path=path, hint=hint)


def exact(name: str) -> str:
    """The pattern that matches only this name."""
    return f"^{re.escape(name)}$"


def read_recipe(path: PathLike) -> TypeRecipe:
    """The recipe at `path`: TOML by the suffix .toml, else the form of llama-quantize.

    Raises CorruptError, UsageError (a type or pattern that cannot be parsed), NotFoundError, StorageError.
    """
    with storage_errors(path), open(path, "rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise CorruptError("not a recipe: the file is larger than 64 MiB", path=path)
    try:
        text = data.decode("utf-8")
        return _from_toml(tomllib.loads(text), path) if Path(path).suffix.lower() == TOML else _from_words(text, path)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise CorruptError(f"not a recipe: {error}", path=path, hint="apr quantize --recipe-out writes one") from None


def _from_toml(body: dict[str, object], path: PathLike) -> TypeRecipe:
    tensors, preset = body.get("tensor"), body.get("type")
    if not isinstance(tensors, list) or not isinstance(preset, str):
        raise CorruptError("not a recipe: it needs a type and [[tensor]] tables", path=path)
    rows = []
    for number, row in enumerate(tensors, 1):
        pattern, dtype = (row.get("pattern"), row.get("type")) if isinstance(row, dict) else (None, None)
        if not isinstance(pattern, str) or not isinstance(dtype, str) or "=" in dtype:
            raise CorruptError(f"[[tensor]] table {number} needs a pattern and a type", path=path)
        _compiled(pattern, path)
        rows.append(RecipeRow(pattern, dtype, *(_number(row.get(key)) for key in ("error", "share"))))
    architecture = body.get("architecture")
    return TypeRecipe(rows, architecture if isinstance(architecture, str) else None, preset)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _from_words(text: str, path: PathLike) -> TypeRecipe:
    rows = []
    for word in text.split():
        pattern, _, dtype = word.rpartition("=")
        if not pattern or not dtype:
            raise CorruptError(f"{word!r:.60} is not REGEX=TYPE", path=path, hint="such as ffn_down=q6_k")
        _compiled(pattern, path)
        rows.append(RecipeRow(pattern, dtype))
    if not rows:
        raise CorruptError("the recipe is empty", path=path)
    return TypeRecipe(rows)


def _compiled(pattern: str, path: PathLike) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"the pattern {pattern!r:.60} of the recipe: {error}", path=path) from None


def write_recipe(recipe: TypeRecipe, path: str, *, force: bool) -> None:
    """Writes TOML to a path that ends with .toml, else the form of llama-quantize. Raises ExistsError, StorageError."""
    lines = _toml(recipe) if Path(path).suffix.lower() == TOML else recipe.tensor_type
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
    write_file(path, FileLayout(Path(path).name, [Literal(data)]), WriteOptions(force=force))


def _toml(recipe: TypeRecipe) -> Iterator[str]:
    yield from (f"architecture = {_quoted(recipe.architecture)}" for _ in range(recipe.architecture is not None))
    yield f"type = {_quoted(recipe.preset or 'q8_0')}"
    yield from (f"{name} = {_float(value)}" for name, value in recipe.facts)
    for row in recipe.rows:
        yield from ("", "[[tensor]]", f"pattern = {_quoted(row.pattern)}", f"type = {_quoted(row.dtype.lower())}")
        numbers = {"error": row.error, "share": row.share}
        yield from (f"{name} = {_float(value)}" for name, value in numbers.items() if value is not None)


def _quoted(text: str | None) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _float(value: float) -> str:
    """A float of TOML, which has a point or an exponent."""
    text = f"{value:.6g}"
    return text if set(text) & set(".en") else f"{text}.0"
