"""Adapters of mlx_lm: what it writes comes in and goes out, and ours it loads, with the logits of the merged model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx_peer
import numpy as np
import pytest
from adapter_models import FAMILIES, files, values, write_adapter, write_base
from arch_models import token_ids

import aprfmt

STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
CASES: dict[str, dict[str, Any]] = {
    "llama": {"targets": [*FAMILIES["llama"], "embed_tokens"]},
    "qwen3": {"targets": FAMILIES["qwen3"], "rank_pattern": {"q_proj": 2}},
    "qwen3_moe": {"targets": ["q_proj"], "target_parameters": list(STACKS)},
}
KEYS = {
    "llama": ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"],
    "qwen3_moe": ["self_attn.o_proj", "mlp.switch_mlp.gate_proj", "mlp.switch_mlp.down_proj"],
}


def base_for_mlx(case: str, folder: Path) -> Any:
    """Writes the base of a case with the keys of published config.json files, which mlx_lm insists on."""
    model = write_base(case, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_theta": config["rope_parameters"]["rope_theta"]}
    config |= {"num_experts": config["num_local_experts"]} if "num_local_experts" in config else {}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def close(a: Path, b: Path, plain: Path) -> None:
    """Whether two files of logits are the same, beside how far they are from those of the base."""
    x, y, z = (np.load(path) for path in (a, b, plain))
    moved = np.abs(y - z).max()
    assert moved > 0.01
    assert np.abs(x - y).max() <= 1e-3 * moved


@pytest.mark.turns
@pytest.mark.parametrize("case", sorted(CASES))
def test_mlx_lm_loads_what_a_peft_folder_becomes(case: str, tmp_path: Path) -> None:
    options = dict(CASES[case])
    base, lora = tmp_path / "base", tmp_path / "lora"
    write_adapter(base_for_mlx(case, base), lora, options.pop("targets"), base, **options)
    aprfmt.convert_model(lora, tmp_path / "mlx", format="mlx")
    aprfmt.merge_adapter(base, lora, tmp_path / "merged")
    ids = token_ids(base)[:24]
    out = {name: str(tmp_path / f"{name}.npy") for name in ("beside", "merged", "plain")}
    mlx_peer.run(
        ("adapted_logits", str(base), str(tmp_path / "mlx"), ids, out["beside"]),
        ("logits", str(tmp_path / "merged"), ids, out["merged"]),
        ("logits", str(base), ids, out["plain"]),
    )
    close(*(Path(out[name]) for name in ("beside", "merged", "plain")))


@pytest.mark.turns
@pytest.mark.parametrize("case", sorted(KEYS))
def test_what_mlx_lm_trains_goes_into_every_form_and_comes_back(case: str, tmp_path: Path) -> None:
    base, mlx = tmp_path / "base", tmp_path / "mlx"
    base_for_mlx(case, base)
    ids = token_ids(base)[:24]
    out = {name: str(tmp_path / f"{name}.npy") for name in ("beside", "merged", "plain")}
    mlx_peer.run(
        ("write_adapter", str(base), str(mlx), KEYS[case], 4, 10.0),
        ("adapted_logits", str(base), str(mlx), ids, out["beside"]),
        ("logits", str(base), ids, out["plain"]),
    )
    found = aprfmt.inspect(mlx).adapter
    assert found is not None
    assert (found.rank, list(found.scales)) == (4, [10.0])
    assert aprfmt.import_model(mlx, tmp_path / "x.apr").lossless
    aprfmt.convert_model(tmp_path / "x.apr", tmp_path / "again", format="mlx")
    assert files(tmp_path / "again") == files(mlx)
    # By way of each other form it is the same adapter.
    aprfmt.convert_model(mlx, tmp_path / "x.gguf")
    for source in (tmp_path / "x.gguf", tmp_path / "x.apr"):
        aprfmt.convert_model(source, tmp_path / f"{source.name}.peft", format="hf", base=base)
        aprfmt.convert_model(tmp_path / f"{source.name}.peft", tmp_path / f"{source.name}.mlx", format="mlx", base=base)
        there, back = values(mlx / "adapters.safetensors"), values(tmp_path / f"{source.name}.mlx/adapters.safetensors")
        assert sorted(there) == sorted(back)
        for name, array in there.items():
            assert array.shape == back[name].shape
            assert (array == back[name]).all(), name
    aprfmt.merge_adapter(base, mlx, tmp_path / "merged")
    mlx_peer.run(("logits", str(tmp_path / "merged"), ids, out["merged"]))
    close(*(Path(out[name]) for name in ("beside", "merged", "plain")))
