"""Rules about the network and the dtypes of its weights."""

from __future__ import annotations

import re
from collections.abc import Iterator

from aprfmt.arch import rope
from aprfmt.arch.names import EMBEDDING, OUTPUT_HEAD, gguf_name
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.errors import AprError, UnmappedError
from aprfmt.inspection.lint.common import (
    BLOCK_TYPES,
    NO_NETWORK,
    anew,
    fail,
    gguf_of,
    is_main,
    main_dtype,
    matrices_of,
    network_of,
    quoted,
    set_key,
    skip,
)
from aprfmt.inspection.quality import first_tensor
from aprfmt.inspection.validate import Check, Subject
from aprfmt.text import first_few, format_bytes, plural

_NAME = re.compile(r"[A-Za-z0-9_-]+([.:/][A-Za-z0-9_-]+)*")

_SHORT_CONTEXT = 4096


def no_context(subject: Subject) -> Iterator[Check]:
    """`context.length-missing`: the context length is stated."""
    found = network_of(subject)
    if found is None or found.arch is None:
        yield skip(NO_NETWORK)
        return
    known = {key.field for key in found.arch.keys}
    if "max_position_embeddings" in known and not subject.model.hparams.max_position_embeddings:
        fix = set_key(subject.model, f"{found.arch.gguf}.context_length:u32", "N", "--set max_position_embeddings=N")
        yield fail("the context length is missing", fix)


def no_rope_base(subject: Subject) -> Iterator[Check]:
    """`context.rope-missing`: the RoPE base frequency is stated."""
    found = network_of(subject)
    if found is None or found.arch is None or not {"rope", "rope.freq_base"} & {key.gguf for key in found.arch.keys}:
        yield skip(NO_NETWORK if found is None else "no rotary positions")
    elif gguf_of(subject) is not None and f"{found.arch.gguf}.rope.freq_base" not in subject.model.metadata:
        fix = set_key(subject.model, f"{found.arch.gguf}.rope.freq_base:f32", "10000")
        # Most networks with short contexts were trained with the default.
        is_short = (subject.model.hparams.max_position_embeddings or 0) <= _SHORT_CONTEXT
        message = "the RoPE base is missing: programs assume 10,000"
        yield Check("info" if is_short else "fail", message, suggestion=fix)


def no_original_context(subject: Subject) -> Iterator[Check]:
    """`context.original-missing`: scaled positions state the original context length."""
    if network_of(subject) is None:
        yield skip(NO_NETWORK)
        return
    h = subject.model.hparams
    scaling, key = rope.scaling_of(h), "original_max_position_embeddings"
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("yarn", "longrope", "llama3", "su") and not (scaling.get(key) or h.extra.get(key)):
        message = f"RoPE scaling ({kind}) lacks the original context length"
        yield fail(message, f"add {key} to rope_scaling in the original config.json")


def head_shape(subject: Subject) -> Iterator[Check]:
    """`head.shape`: the output head is [vocabulary, width]."""
    embedding, head = subject.embedding, first_tensor(subject.model, OUTPUT_HEAD)
    if embedding is None or head is None:
        yield skip("no separate output head")
    elif len(embedding.shape) == len(head.shape) == 2 and head.shape != embedding.shape:
        h = subject.model.hparams
        if head.shape[0] not in (h.vocab_size, embedding.shape[0]) or head.shape[1] != (h.hidden_size or head.shape[1]):
            message = f"the output head has shape {list(head.shape)}, the embedding {list(embedding.shape)}"
            yield fail(message, tensor=head.name, suggestion="run apr validate for details; convert the original again")


def head_twice(subject: Subject) -> Iterator[Check]:
    """`head.stored-twice`: a tied head is not stored."""
    embedding, head = subject.embedding, first_tensor(subject.model, OUTPUT_HEAD)
    if embedding is None or head is None:
        yield skip("no separate output head")
    elif subject.model.hparams.tied and head.shape == embedding.shape and head.dtype == embedding.dtype:
        message = f"the metadata ties the head to the embedding, but it is stored too ({format_bytes(head.n_bytes)})"
        yield fail(message, tensor=head.name, suggestion=anew(subject.model))


def odd_names(subject: Subject) -> Iterator[Check]:
    """`names.non-standard`: tensor names consist of letters, digits and single dots."""
    if not subject.model.tensors:
        yield skip(subject.no_tensors)
        return
    odd = [t.name for t in subject.model.tensors.entries if _NAME.fullmatch(t.name) is None]
    if odd:
        message = (
            f"{plural(len(odd), 'name')} with characters other than letters, digits and single dots: "
            f"{first_few(map(repr, odd))}"
        )
        yield fail(message, "rename the tensors in the program that writes the file")


def unknown_names(subject: Subject) -> Iterator[Check]:
    """`names.unknown`: all tensors have names that the architecture knows."""
    found = subject.canonical
    if isinstance(found, UnmappedError) and found.tensor is not None:
        yield fail(found.message, tensor=found.tensor, suggestion=found.hint or "run apr validate for details")
    elif isinstance(found, AprError):
        yield skip(found.message)


def norms(subject: Subject) -> Iterator[Check]:
    """`tensors.norms-not-float32`: norms and biases of a GGUF are F32."""
    if gguf_of(subject) is None or not is_main(subject):
        yield skip("not a GGUF model")
        return
    vectors = [t for t in subject.model.tensors.entries if len(t.shape) <= 1 and t.dtype != "F32"]
    odd = [t for t in vectors if not t.dtype.startswith("I")]
    if odd:
        message = f"{plural(len(odd), 'vector')} (norms, biases) not stored as F32: {first_few(t.name for t in odd)}"
        yield fail(message, anew(subject.model), odd[0].name if len(odd) == 1 else None)


def float32(subject: Subject) -> Iterator[Check]:
    """`tensors.float32-weights`: matrices are stored in 16 bits or less."""
    matrices = matrices_of(subject.model)
    if not matrices or not is_main(subject):
        yield skip("no matrices")
    elif (main := main_dtype(matrices)) in ("F32", "F64"):
        size = sum(t.n_bytes for t in matrices)
        message = f"most weights are {main} ({format_bytes(size)}); models are trained in BF16, half the size"
        suffix = subject.model.path.suffix
        yield fail(message, f"apr convert {quoted(subject.model)} -o NEW{suffix} --dtype bf16")


def router(subject: Subject) -> Iterator[Check]:
    """`moe.router-quantized`: routers of experts are not quantized."""
    found = network_of(subject)
    if found is None or found.arch is None:
        yield skip(NO_NETWORK)
        return
    quantized = []
    for tensor in found.tensors.values():
        if tensor.original_dtype in BLOCK_TYPES:
            name = gguf_name(found.arch, tensor.name, found.hparams)
            if name is not None and name.endswith("ffn_gate_inp.weight"):
                quantized.append(tensor.name)
    if quantized:
        message = (
            f"{plural(len(quantized), 'router')} quantized: {first_few(quantized)}; small rounding errors "
            "change the chosen expert"
        )
        yield fail(message, "apr quantize ORIGINAL TYPE -o NEW.gguf keeps routers in F32")


def low_head(subject: Subject) -> Iterator[Check]:
    """`quant.head-below-four-bits`: the output head has at least four bits per weight."""
    head = first_tensor(subject.model, OUTPUT_HEAD) or first_tensor(subject.model, EMBEDDING)
    if head is None or network_of(subject) is None:
        yield skip(NO_NETWORK)
        return
    row = DTYPES[head.dtype]
    if row.kind == "ggml" and 8 * row.block_bytes / row.block < 4:
        message = f"the output head is {head.dtype}, {8 * row.block_bytes / row.block:.2f} bits per weight"
        fix = "apr quantize ORIGINAL TYPE -o NEW.gguf --output-type q6_k"
        yield fail(f"{message}: quantizing it costs more quality than any other tensor", fix, head.name)
