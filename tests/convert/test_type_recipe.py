"""Recipes of types: TOML, and the words of llama-quantize's --tensor-type-file."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from aprfmt.convert.type_recipe import RecipeRow, TypeRecipe, exact, read_recipe, write_recipe
from aprfmt.errors import AprError, CorruptError, ExistsError, NotFoundError, RefusedError, UsageError

NAMES = ["blk.0.ffn_up.weight", 'odd "name"\\.weight', "output.weight"]
RECIPE = TypeRecipe(
    [RecipeRow(exact(name), dtype, 1 / 3, 1.0) for name, dtype in zip(NAMES, ("Q4_K", "Q8_0", "BF16"), strict=True)],
    "llama",
    "q4_k_m",
    (("bits_per_weight", 5.0),),
)


def test_toml_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_recipe(RECIPE, str(tmp_path / "r.toml"), force=False)
    body = tomllib.loads((tmp_path / "r.toml").read_text())
    assert body["bits_per_weight"] == 5.0
    assert isinstance(body["tensor"][0]["share"], float)
    found = read_recipe(tmp_path / "r.toml")
    assert (found.architecture, found.preset) == ("llama", "q4_k_m")
    assert [(row.pattern, row.dtype) for row in found.rows] == [(row.pattern, row.dtype.lower()) for row in RECIPE.rows]
    assert found.rows[0].error == pytest.approx(1 / 3, rel=1e-5)
    found.check("llama", NAMES, "r.toml")
    with pytest.raises(ExistsError):
        write_recipe(RECIPE, str(tmp_path / "r.toml"), force=False)


def test_words_of_llama_quantize(tmp_path: Path) -> None:
    (tmp_path / "types.txt").write_text("blk.*.ffn_down=q6_k  attn_v=Q8_0\noutput=f16\n")
    found = read_recipe(tmp_path / "types.txt")
    assert found.tensor_type == ["blk.*.ffn_down=q6_k", "attn_v=q8_0", "output=f16"]
    assert found.preset is None
    found.check("anything", ["another.weight"], "types.txt")  # patterns for some tensors fit any model
    write_recipe(TypeRecipe(RECIPE.rows[:1]), str(tmp_path / "out.txt"), force=False)
    assert (tmp_path / "out.txt").read_text() == "^blk\\.0\\.ffn_up\\.weight$=q4_k\n"


def test_an_exact_pattern_matches_one_name() -> None:
    RECIPE.check("llama", NAMES, "r.toml")
    one = TypeRecipe([RecipeRow(exact("blk.1.attn_q.weight"), "Q4_K")], None, "q4_k_m")
    one.check(None, ["blk.1.attn_q.weight"], "r.toml")
    with pytest.raises(RefusedError):
        one.check(None, ["blk.1.attn_q.weight", "blk.11.attn_q.weight"], "r.toml")


def test_a_recipe_of_another_model(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"another model.*architecture is llama, not qwen3"):
        RECIPE.check("qwen3", NAMES, tmp_path)
    with pytest.raises(RefusedError, match=r"another model.*1 pattern"):
        RECIPE.check("llama", NAMES[:2], tmp_path)
    with pytest.raises(RefusedError, match=r"another model.*no pattern matches 1 tensor \(more.weight\)"):
        RECIPE.check("llama", [*NAMES, "more.weight"], tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", "not toml ="),
        ("a.toml", ""),
        ("a.toml", 'type = "q4_k_m"'),
        ("a.toml", 'type = 4\n[[tensor]]\npattern = "a"\ntype = "q4_k"'),
        ("a.toml", 'type = "q4_k_m"\n[[tensor]]\npattern = "a"'),
        ("a.toml", 'type = "q4_k_m"\ntensor = [1]'),
        ("a.toml", 'type = "q4_k_m"\n[[tensor]]\npattern = "("\ntype = "q4_k"'),
        ("a.txt", ""),
        ("a.txt", "no-type"),
        ("a.txt", "=q4_k"),
        ("a.txt", "(=q4_k"),
        ("a.txt", "\xff"),
    ],
)
def test_broken_recipes(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises((CorruptError, UsageError)) as caught:
        read_recipe(tmp_path / name)
    assert caught.value.path == str(tmp_path / name)


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_recipe(tmp_path / "none.toml")
    with pytest.raises(AprError):
        read_recipe(tmp_path)
