"""Repositories of sentence-transformers: a case of arch_models, and modules behind it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arch_models import build, find_case, write_tokenizers

_IDENTITY, _TANH = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"


@dataclass(frozen=True)
class Dense:
    """A layer behind the pooling: the folder, sizes, whether it has a bias, its activation."""

    folder: str
    n_in: int
    n_out: int
    bias: bool = False
    activation: str = _IDENTITY


@dataclass(frozen=True)
class Repository:
    """A case of arch_models as a repository of sentence-transformers.

    Attributes:
        case: id of the case; `model_class` instead of its own.
        pooling: the mode, "" for no Pooling.
        dense: the layers that follow.
        other: types of further modules, in folders without weights.
        keys: what the GGUF says of the modules, after the architecture.
        left: words of what an export says; "" where nothing is left behind.
    """

    case: str
    pooling: str
    dense: tuple[Dense, ...] = ()
    other: tuple[str, ...] = ("Normalize",)
    model_class: str = ""
    keys: tuple[tuple[str, object], ...] = ()
    left: str = ""

    def __str__(self) -> str:
        return "-".join(
            (self.case, self.model_class or "own", self.pooling, *(d.folder for d in self.dense), self.left)
        )


_GEMMA_KEYS = (
    *(("pooling_type", 1), ("dense_2_feat_in", 64), ("dense_2_feat_out", 96)),
    *(("dense_3_feat_in", 96), ("dense_3_feat_out", 64)),
)

REPOSITORIES = (
    Repository("bert", "mean", keys=(("pooling_type", 1),)),
    Repository("bert", "cls", keys=(("pooling_type", 2),)),
    Repository("qwen3", "last", keys=(("pooling_type", 3),)),
    Repository("qwen3", "mean", model_class="Qwen3Model", keys=(("pooling_type", 1),)),
    Repository("mistral", "last", model_class="MistralModel", keys=(("pooling_type", 3),)),
    Repository("gemma_embedding", "mean", (Dense("2_Dense", 64, 96), Dense("3_Dense", 96, 64)), keys=_GEMMA_KEYS),
    Repository("lfm2", "", (Dense("1_Dense", 64, 32),), (), "Lfm2Model", (("embedding_length_out", 32),)),
    Repository("lfm2", "", (Dense("1_Dense", 64, 32, bias=True),), (), "Lfm2Model", (("embedding_length_out", 32),)),
    Repository(
        "gemma_embedding", "mean", (Dense("2_Dense", 64, 64, activation=_TANH),), keys=(("pooling_type", 1),),
        left="1 tensor of the module of sentence-transformers (2_Dense.*",
    ),
    Repository(
        "gemma_embedding", "mean", (Dense("2_Dense", 64, 96, bias=True), Dense("3_Dense", 96, 64)),
        keys=(("pooling_type", 1),), left="3 tensors of the module of sentence-transformers (2_Dense.*, 3_Dense.*",
    ),
    Repository(
        "bert", "mean", (Dense("2_Dense", 64, 32),), keys=(("pooling_type", 1),),
        left="1 tensor of the module of sentence-transformers (2_Dense.*",
    ),
    Repository("bert", "mean", other=("LayerNorm", "Normalize"), keys=(("pooling_type", 1),), left="LayerNorm"),
)  # fmt: skip


def write(repository: Repository, folder: Path, vocabulary: int | None = 4000) -> Any:
    """The folder of the repository, with so many tokens; the transformers model."""
    import torch
    from safetensors.torch import save_file

    case = find_case(repository.case)
    case = replace(case, model_class=repository.model_class or case.model_class)
    model = build(
        replace(case, kind="encoder"), folder, write_tokenizers(folder.parent / "tok", [case.tokenizer], vocabulary)
    )
    kinds = [("", "Transformer")]
    if repository.pooling:
        kinds.append(("1_Pooling", "Pooling"))
        write_json(
            folder / "1_Pooling" / "config.json", {"pooling_mode": repository.pooling.replace("last", "lasttoken")}
        )
    for dense in repository.dense:
        kinds.append((dense.folder, "Dense"))
        config = {"in_features": dense.n_in, "out_features": dense.n_out, "bias": dense.bias}
        write_json(folder / dense.folder / "config.json", {**config, "activation_function": dense.activation})
        tensors = {"linear.weight": torch.randn(dense.n_out, dense.n_in)}
        tensors |= {"linear.bias": torch.randn(dense.n_out)} if dense.bias else {}
        save_file(tensors, folder / dense.folder / "model.safetensors", {"format": "pt"})
    kinds += [(f"{len(kinds) + i}_{kind}", kind) for i, kind in enumerate(repository.other)]
    lines = [
        {"idx": i, "name": str(i), "path": p, "type": f"sentence_transformers.models.{k}"}
        for i, (p, k) in enumerate(kinds)
    ]
    write_json(folder / "modules.json", lines)
    return model


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2))
