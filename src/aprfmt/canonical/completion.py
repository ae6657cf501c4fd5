"""Completes hyper-parameters from tensors, and tensors from hyper-parameters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from aprfmt.arch import hparams as hp
from aprfmt.arch import names, rope_factors
from aprfmt.arch.fields import as_mapping
from aprfmt.arch.flat_norms import flat_norms, read_flat_norms
from aprfmt.arch.grammar import factor_names, has_layer
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.loaders import needs_head
from aprfmt.arch.row import OF_TENSOR, ROPE_FACTORS, Architecture
from aprfmt.arch.zero_biases import biases_of, stated_switches
from aprfmt.canonical import sidecar
from aprfmt.canonical.row_mapping import BufferedTensor
from aprfmt.canonical.sidecar import Sidecar
from aprfmt.canonical.tensor import CanonicalTensor, is_copy
from aprfmt.codecs.dtypes import n_elements
from aprfmt.model import Model, Tensor


def complete_from_apr(model: Model, row: Architecture, hparams: Hyperparams) -> None:
    """Infers sizes missing in the metadata from tensor shapes."""
    if model.metadata.get("head_dim") is None:
        complete_from_shapes(hparams, model.tensors)
    if hparams.num_experts is None and "experts" in names.dimension_words(row):
        shapes = {tensor.name: tensor.shape for tensor in model.tensors.entries}
        hparams.num_experts = names.sizes_of_tensors(row, shapes).get("experts")


def complete_from_tensors(
    row: Architecture, hparams: Hyperparams, tensors: dict[str, CanonicalTensor], from_gguf: bool
) -> None:
    """Completes hyper-parameters from tensors, and tensors from hyper-parameters."""
    _join_numbers(row, hparams, tensors, from_gguf)
    if any(t.link is not None and t.link.row.pack for t in tensors.values()):
        hparams.extra.setdefault("quantization_config", dict(row.packed_config))
    hp.set_by_tensors(hparams, row, tensors)


def _join_numbers(
    row: Architecture, hparams: Hyperparams, tensors: dict[str, CanonicalTensor], from_gguf: bool
) -> None:
    """Converts between one-element tensors of a checkpoint and keys of a GGUF, in whichever direction is missing."""
    import numpy as np

    for key in row.keys:
        if key.role != OF_TENSOR:
            continue
        name = key.hf[0]
        if key.kind == "u64[]":
            _join_integers(row, hparams, tensors, name)
            continue
        if "{n}" in name:
            _join_list(row, hparams, tensors, name)
            continue
        number, tensor = hparams.extra.get(name), tensors.get(name)
        if from_gguf and tensor is None and isinstance(number, int | float):
            data = np.float32(number).tobytes()
            tensors[name] = CanonicalTensor(name, (BufferedTensor(name, "F32", (1,), partial(list, (data,))),))
        elif tensor is not None and n_elements(tensor.shape) == 1:
            hparams.extra[name] = float(tensor.produced.values().reshape(-1)[0])


def _join_integers(row: Architecture, h: Hyperparams, tensors: dict[str, CanonicalTensor], template: str) -> None:
    """Converts 64-bit integers between a tensor per layer, named by `template`, and a list in `h.extra`."""
    import numpy as np

    of = next(one for one in row.tensors if one.hf[0] == template)
    layer = next((n for n in range(h.num_layers or 0) if has_layer(of.layers, h, n)), None)
    name, numbers = names.spell(template, layer), h.extra.get(template)
    if (tensor := tensors.get(name)) is not None:
        if tensor.dtype == "I64":
            h.extra[template] = np.frombuffer(tensor.produced.data(), "<i8").tolist()
    elif layer is not None and isinstance(numbers, list):
        data = np.array(numbers, "<i8").tobytes()
        tensors[name] = CanonicalTensor(name, (BufferedTensor(name, "I64", (len(numbers),), partial(list, (data,))),))


def _join_list(row: Architecture, h: Hyperparams, tensors: dict[str, CanonicalTensor], template: str) -> None:
    """Converts one number per layer between one-element tensors, named by `template`, and a list in `h.extra`."""
    import numpy as np

    spelled = [names.spell(template, layer) for layer in range(h.num_layers or 0)]
    found = [tensors[name] for name in spelled if name in tensors]
    numbers = h.extra.get(template)
    if found and len(found) == len(spelled) and all(n_elements(tensor.shape) == 1 for tensor in found):
        h.extra[template] = [float(tensor.produced.values().reshape(-1)[0]) for tensor in found]
    elif not found and isinstance(numbers, list) and len(numbers) == len(spelled):
        dims = next(one.dims[0] for one in row.tensors if one.hf[0] == template)
        for name, number in zip(spelled, numbers, strict=True):
            data = np.float32(number).tobytes()
            shape = (1,) if dims else ()
            tensors[name] = CanonicalTensor(name, (BufferedTensor(name, "F32", shape, partial(list, (data,))),))


def take_factors(hparams: Hyperparams, row: Architecture, kept: Sidecar) -> None:
    """Reads the factors of a GGUF's weights from the sidecar metadata."""
    stated = as_mapping(kept.metadata.get(hp.EXTRA_KEY))
    hparams.extra |= {name: stated[name] for name in factor_names(row) if name in stated}


def restore_checkpoint(
    tensors: dict[str, CanonicalTensor],
    row: Architecture | None,
    hparams: Hyperparams,
    kv: Mapping[str, object],
    kept: Sidecar | None,
) -> None:
    """Undoes what a GGUF of ours says was done to a checkpoint's tensors: zeros for llama.cpp, rounded bits."""
    if row is not None:
        _drop_zero_biases(tensors, row, hparams, kv)
    if kept is not None:
        _restore_bits(tensors, kept)


def _drop_zero_biases(
    tensors: dict[str, CanonicalTensor], row: Architecture, hparams: Hyperparams, kv: Mapping[str, object]
) -> None:
    """Drops the biases that only llama.cpp needs; a switch whose biases were edited is on again."""
    for switch, found in biases_of(stated_switches(kv, row), row, list(tensors)).items():
        if any(tensors[name].produced.values().any() for name in found):
            hparams.extra[switch] = True
            continue
        for name in found:
            del tensors[name]


def _restore_bits(tensors: dict[str, CanonicalTensor], kept: Sidecar) -> None:
    """Restores the exact bits of mapped tensors from the sidecar metadata."""
    for name in kept.exact:
        tensor = tensors.get(name)
        if tensor is not None and tensor.link is not None and tensor.inverse:
            sources = sidecar.restore(tensor.link, tensor.sources, kept.exact) or ()
            for own, source in zip(tensor.link.hf, sources, strict=False):
                tensors[own] = CanonicalTensor(own, (source,), link=tensor.link)


def complete_from_gguf(model: Model, row: Architecture, hparams: Hyperparams) -> list[str]:
    """Adds what a GGUF stores outside its keys: rope scaling from tensors, the class from the table."""
    stored = [name for name in (*ROPE_FACTORS, *flat_norms(row, 0)) if name in model.tensors]
    divisors = {name: model.tensors[name].numpy().reshape(-1).tolist() for name in stored}
    warnings = rope_factors.read_factor_tensors(hparams, divisors)
    read_flat_norms(hparams, row, divisors)
    embedding = model.tensors.get("token_embd.weight")
    if hparams.vocab_size is None and embedding is not None and embedding.shape:
        hparams.vocab_size = embedding.shape[0]
    hparams.extra |= names.config_keys_from_shapes(
        row, hparams, {name: tensor.shape for name, tensor in model.tensors.items()}
    )
    if hparams.hf_architecture is None:
        hparams.hf_architecture, hparams.hf_model_type = hp.hf_identity(hparams, row)
    return warnings


def complete_from_shapes(hparams: Hyperparams, tensors: Mapping[str, Tensor | CanonicalTensor]) -> None:
    """Infers the head size of an `.apr` that lacks it: the reference does not store a GGUF's."""
    found = (tensors.get(n) for n in ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight"))
    query = next((tensor for tensor in found if tensor is not None), None)
    if "head_dim" in hparams.extra or query is None or not query.shape or not hparams.num_heads:
        return
    head_dim, rest = divmod(query.shape[0], hparams.num_heads)
    if rest == 0 and head_dim != hparams.head_dim:
        hparams.head_dim = hparams.extra["head_dim"] = head_dim


def drop_tied_head(
    row: Architecture | None, tensors: dict[str, CanonicalTensor], hparams: Hyperparams, from_gguf: bool
) -> dict[str, str]:
    """Drops a head that is declared tied and equals the embedding byte for byte; a different one is kept and untied."""
    head_name, embedding_name = names.head(row), names.embedding(row)
    head, embedding = tensors.get(head_name), tensors.get(embedding_name)
    if head is None:
        if hparams.tied is None and embedding is not None:
            hparams.tied = True
        return {}
    copied = row is not None and needs_head(row.gguf) and not hparams.tied and from_gguf
    if embedding is None or not (hparams.tied or copied):
        return {}
    hparams.tied = same = is_copy(head, embedding)
    if not same:
        return {}
    del tensors[head_name]
    return {head.sources[0].name: embedding_name}
