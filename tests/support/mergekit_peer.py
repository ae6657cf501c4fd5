"""mergekit in a process of its own, out of the folder that tools/fetch_material.py fills.

It wants packages that nothing else here needs, so they are not part of the environment: the process alone sees them.
Run as a program it reads one JSON list of merges from standard input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from arch_models import CACHE

PACKAGES = CACHE / f"mergekit-{sys.implementation.cache_tag}"
LIMIT_S = 300


def merge(*jobs: tuple[Mapping[str, object], Path], masks: Path | None = None) -> None:
    """What mergekit makes of recipes, each as a folder. Raises RuntimeError with its last words where it fails.

    With `masks`, a folder, the random masks of DARE are written there: WEIGHT.NUMBER.npy, numbered in the order of the
    models beside the base.
    """
    told = {"jobs": [[recipe, str(output)] for recipe, output in jobs], "masks": str(masks) if masks else None}
    environment = dict(os.environ, HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(told), text=True, capture_output=True, timeout=LIMIT_S,
        env=environment, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"mergekit ended with {done.returncode}: {done.stderr[-2000:]}")


def _run(told: dict[str, Any]) -> None:
    sys.path.insert(0, str(PACKAGES))
    config: Any = import_module("mergekit.config")
    program: Any = import_module("mergekit.merge")
    options: Any = import_module("mergekit.options")
    if told["masks"] is not None:
        _write_masks(Path(told["masks"]))
    for recipe, output in told["jobs"]:
        made = config.MergeConfiguration.model_validate(recipe)
        program.run_merge(made, output, options.MergeOptions(copy_tokenizer=False, quiet=True))


def _write_masks(folder: Path) -> None:
    """Has each mask written when it is drawn, under the name of the weight that is being merged."""
    import numpy as np

    torch: Any = import_module("torch")
    methods: Any = import_module("mergekit.merge_methods.generalized_task_arithmetic")
    kind = methods.GeneralizedTaskArithmeticMerge
    draw, merge_group = torch.bernoulli, kind.merge_group
    drawing: dict[str, Any] = {"name": "", "count": 0}

    def named(self: Any, group: Any, /, **parameters: Any) -> Any:
        drawing.update(name=group.metadata.name, count=0)
        return merge_group(self, group, **parameters)

    def drawn(chances: Any) -> Any:
        mask = draw(chances)
        np.save(folder / f"{drawing['name']}.{drawing['count']}.npy", mask.numpy().astype(bool))
        drawing["count"] = drawing["count"] + 1
        return mask

    kind.merge_group, torch.bernoulli = named, drawn


if __name__ == "__main__":
    _run(json.load(sys.stdin))
