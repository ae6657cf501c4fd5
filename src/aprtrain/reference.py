"""Logits of a few tokens by transformers or by the trainer's decoder, in float32 on the CPU.

`python -m aprtrain.reference` is the process of `apr convert --verify=logits` and `apr qa --against`. It answers
the request {"engine", "path", "ids", "kind", "out"} on stdin with {"ok": engine and version}, {"missing": package to
install, "reason"} or {"error": message}.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from aprfmt.errors import AprError, RefusedError, UnsupportedError
from aprfmt.types import Array

OF_STATES = ("encoder", "decoder", "states")
"""Kinds of models that are compared by hidden states: an encoder's, a seq2seq decoder's, a decoder's without a head."""

_LEFT_BEHIND = ("pooler", "vqmodel")
"""Parts that a GGUF does not hold and that do not change logits."""


class MissingClassError(Exception):
    """transformers does not have the class of a folder, or lacks a package to load it."""


def quiet_transformers() -> ModuleType:
    """The transformers module without progress bars and warnings."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    module: ModuleType = transformers
    return module


def inputs(ids: Sequence[int], kind: str) -> dict[str, object]:
    """The arguments of a transformers model of this kind; a seq2seq decoder gets `ids` in reverse."""
    import torch

    tokens = torch.tensor([list(ids)])
    found: dict[str, object] = {"input_ids": tokens}
    if kind in ("seq2seq", "decoder"):
        found["decoder_input_ids"] = tokens.flip(-1)
    return found if kind in ("encoder", "rank") else {**found, "use_cache": False}


def transformers_logits(folder: Path, ids: Sequence[int], kind: str = "causal", model_class: str = "") -> Array:
    """What the saved model computes: (tokens, vocabulary) logits, (tokens, hidden) states, or (labels,) scores.

    Scores of decoders ("rank_decoder") are softmaxed, as llama.cpp's are. `model_class` replaces the class of
    config.json.

    Raises:
        MissingClassError: transformers does not know the class.
        ValueError: the folder lacks a tensor, or has one that the model does not know.
    """
    import torch

    transformers = quiet_transformers()
    config = json.loads((folder / "config.json").read_text("utf-8"))
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as AUTOMATIC

    own = (config.get("architectures") or [""])[0]
    usual = "AutoModelForCausalLM"
    if kind != "causal" or (config.get("model_type") not in AUTOMATIC and hasattr(transformers, own)):
        usual = own
    if kind in ("decoder", "states"):
        usual = usual.replace("ForConditionalGeneration", "Model").replace("ForCausalLM", "Model")
    has_head = kind == "encoder" and not usual.endswith("Model")
    if has_head:  # ForMaskedLM: the states are those below the head
        usual = "AutoModel"
    chosen = model_class or usual
    is_known = config.get("model_type") in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    if not hasattr(transformers, chosen) or (chosen.startswith("Auto") and not is_known):
        raise MissingClassError(
            f"transformers {transformers.__version__} has no class {own or config.get('model_type')}"
        )
    model, info = getattr(transformers, chosen).from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
        local_files_only=True,
        trust_remote_code=False,
    )
    lost = [name for name in info["missing_keys"] if not any(part in name for part in _LEFT_BEHIND)]
    unknown = [] if has_head else info["unexpected_keys"]
    if wrong := [*lost, *unknown, *(str(entry) for entry in info["mismatched_keys"])]:
        raise ValueError(f"transformers misses or does not know {sorted(wrong)[:3]} ({len(wrong)} in all)")
    with torch.no_grad():
        found = output_of(model.eval(), inputs(ids, kind), kind)[0].float()
    values: Array = (found.softmax(-1) if kind == "rank_decoder" else found).numpy()
    return values


def output_of(model: Any, given: Mapping[str, Any], kind: str = "causal") -> Any:
    """The logits [1, tokens, vocabulary], states or scores that a model of transformers computes of a text."""
    part = "thinker"
    if type(model).__name__ == "Llama4ForConditionalGeneration":
        part = "language_model"  # transformers 5.24 fails on the outputs of images, which a text does not have
    out = getattr(model, part, model)(**given)
    return out.last_hidden_state if kind in OF_STATES else out.logits


def decoder_logits(path: Path, ids: Sequence[int]) -> Array:
    """(tokens, vocabulary) logits by the trainer's decoder. Raises AprError for a network that it does not compute."""
    import torch

    from aprtrain.network.weights import load_decoder, open_network

    with open_network(path) as network, torch.no_grad():
        decoder = load_decoder(network).eval()
        tokens = torch.tensor([list(ids)])
        values: Array = decoder.logits(decoder(tokens))[0].float().numpy()
        return values


def _answer(engine: str, path: str, ids: list[int], kind: str, out: str) -> dict[str, str]:
    import numpy as np

    try:
        if engine == "transformers":
            found, name = transformers_logits(Path(path), ids, kind), f"transformers {quiet_transformers().__version__}"
        else:
            found, name = decoder_logits(Path(path), ids), "the decoder of aprtrain"
    except (ImportError, MissingClassError) as error:
        return {"missing": "transformers" if engine == "transformers" else "torch", "reason": str(error)}
    except (UnsupportedError, RefusedError) as error:
        return {"missing": "", "reason": error.message}
    except AprError as error:
        return {"error": error.message}
    except Exception as error:  # whatever transformers raises
        return {"error": f"{engine}: {type(error).__name__}: {str(error).strip()[:300]}"}
    np.save(out, np.asarray(found, np.float32))
    return {"ok": name}


def main() -> None:
    """Answers one request."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print on stdout now and then
    answer = _answer(**json.loads(sys.stdin.readline()))
    print(json.dumps(answer), file=replies, flush=True)


if __name__ == "__main__":
    main()
