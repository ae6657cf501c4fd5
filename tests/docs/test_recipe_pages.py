"""The pages of the manual that a reader types along with: every block is run as it stands."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import yaml
from arch_models import write_tokenizers
from doc_pages import blocks, run_page
from hub_server import serve
from safetensors.numpy import save_file
from tower_models import all_tower_cases, build_tower

import aprfmt

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path for path in (ROOT / "docs/recipes").glob("*.md") if path.stem != "index")
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
"""A picture of one pixel."""

pytestmark = [pytest.mark.slow, pytest.mark.llama]


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> Path:
    """SmolLM2 with its first six layers alone: a fifth of the work, where no text and no figure depends on it."""
    path = tmp_path_factory.mktemp("shallow") / smollm2_gguf.name
    aprfmt.prune_model(smollm2_gguf, path, keep_layers="0-5")
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, shallow: Path) -> Path:
    """The shallow model as a Hugging Face folder in BF16."""
    path = tmp_path_factory.mktemp("original") / "smollm2"
    aprfmt.convert_model(shallow, path, format="hf", dtype="bf16")
    return path


def write_lora(folder: Path, base: Path, seed: int) -> None:
    """A LoRA of rank 4 for two matrices of each of SmolLM2's layers, as PEFT saves it."""
    folder.mkdir()
    random = np.random.default_rng(seed)
    arrays = {}
    with aprfmt.open(base) as model:
        for name, tensor in model.tensors.items():
            if name.endswith(("q_proj.weight", "v_proj.weight")):
                at = f"base_model.model.{name.removesuffix('.weight')}"
                rows, columns = tensor.shape
                arrays[f"{at}.lora_A.weight"] = random.normal(0, 0.02, (4, columns)).astype("float32")
                arrays[f"{at}.lora_B.weight"] = random.normal(0, 0.02, (rows, 4)).astype("float32")
    save_file(arrays, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def adapter(folder: Path, original: Path) -> None:
    (folder / "base").symlink_to(original)
    write_lora(folder / "my-lora", original, 1)


def fine_tunes(folder: Path, original: Path) -> None:
    (folder / "base").symlink_to(original)
    for seed, name in enumerate(("one", "two")):
        write_lora(folder / f"lora-{name}", original, seed)
        aprfmt.merge_adapter(original, [folder / f"lora-{name}"], folder / name, format="hf")


def seeing(folder: Path, original: Path) -> None:
    tokenizer = write_tokenizers(folder / "tokenizers", ["smollm2"], 512)["smollm2"]
    build_tower(next(case for case in all_tower_cases() if case.id == "gemma3_vision"), folder / "seeing", tokenizer)
    (folder / "cat.png").write_bytes(base64.b64decode(PIXEL))


def code(folder: Path, original: Path) -> None:
    shutil.copytree(ROOT / "src/aprfmt/io", folder / "my-code", ignore=shutil.ignore_patterns("__pycache__"))


def gguf(folder: Path, original: Path) -> None:
    (folder / "model.gguf").symlink_to(next(folder.glob("*.gguf")).resolve())


NEEDS: Mapping[str, Callable[[Path, Path], None]] = {
    "apply-a-lora": adapter,
    "merge-two-models": fine_tunes,
    "vision": seeing,
    "distil-on-your-code": code,
    "check-in-ci": gguf,
}
"""What a page says that the reader has, beside the model of `make demo`."""


WHOLE = {
    *("getting-started", "faq", "apr-format", "chat-template", "compare-quantizations", "mlx", "check-in-ci"),
    "provenance",
}
"""Pages that show figures of SmolLM2, or what it says."""


@contextmanager
def hub_of(page: str, original: Path) -> Iterator[dict[str, str]]:
    """Variables for a hub on this machine that has the repository of the page about large models, at a small size."""
    if page != "a-large-model":
        yield {"HF_HUB_OFFLINE": "1"}
        return
    with serve("deepseek-ai/DeepSeek-V3") as hub:
        hub.files = {path.name: path.read_bytes() for path in original.iterdir()}
        yield {"HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1"}


PAGES = [*(ROOT / f"docs/{name}.md" for name in ("getting-started", "faq", "apr-format")), *RECIPES]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_block_runs(page: Path, tmp_path: Path, smollm2_gguf: Path, shallow: Path, original: Path) -> None:
    (tmp_path / smollm2_gguf.name).symlink_to(smollm2_gguf if page.stem in WHOLE else shallow)
    if page.stem in NEEDS:
        NEEDS[page.stem](tmp_path, original)
    with hub_of(page.stem, original) as env:
        count = run_page(page, tmp_path, env)
    if page.stem == "check-in-ci":
        workflow = yaml.safe_load((tmp_path / ".github/workflows/model.yml").read_text())
        steps = [step["run"] for step in workflow["jobs"]["check"]["steps"] if "run" in step]
        script = tmp_path / "steps.md"
        script.write_text("\n".join(f"```sh\n{step}\n```" for step in steps if not step.startswith("pip ")))
        count += run_page(script, tmp_path, {})
    assert count >= 1


def test_there_are_twelve_recipes_and_the_index_names_each() -> None:
    index = (ROOT / "docs/recipes/index.md").read_text()
    assert len(RECIPES) == 12
    assert [page.name for page in RECIPES if f"]({page.name})" not in index] == []
    assert all(blocks(page) for page in RECIPES)
