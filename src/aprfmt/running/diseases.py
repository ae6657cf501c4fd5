"""Known faults of converted models: how `apr qa` recognizes each, what it says, and what to type to mend it."""

from __future__ import annotations

import re
from dataclasses import dataclass

AGAIN = "apr convert {original} -o FIXED.gguf --verify=logits"
_SET = "apr stamp {file} --in-place --set {key}={value}"


@dataclass(frozen=True, slots=True)
class Disease:
    """A known fault.

    Attributes:
        id: its id in `--json`.
        gates: the gates that name it.
        sign: how it is recognized.
        sentence: what is wrong.
        mend: the command to type; {file}, {original}, {key} and {value} are replaced.
        needs_original: whether it is named only with --against.
    """

    id: str
    gates: tuple[str, ...]
    sign: str
    sentence: str
    mend: str = AGAIN
    needs_original: bool = True


DISEASES = {
    row.id: row
    for row in (
        Disease("rope-base", ("header",), "a different `rope.freq_base`", "wrong RoPE base frequency", _SET),
        Disease(
            "rope-scaling", ("header",), "a different `rope.scaling.*` or `rope.dimension_*`", "wrong RoPE scaling",
            _SET,
        ),
        Disease("norm-epsilon", ("header",), "a different `*_epsilon`", "wrong epsilon of the norms", _SET),
        Disease("hyperparameter", ("header",), "a different hyper-parameter key", "wrong hyper-parameter", _SET),
        Disease("vocabulary", ("header",), "different tokens, merges, scores or token types", "different tokenizer"),
        Disease("pre-tokenizer", ("header",), "a different `tokenizer.ggml.pre`", "wrong pre-tokenizer", _SET),
        Disease("bos", ("header", "bos"), "a different `add_bos_token` or `bos_token_id`", "wrong BOS token", _SET),
        Disease("special-token", ("header",), "a different special token id", "wrong special token", _SET),
        Disease(
            "missing-bos", ("bos",), "without BOS, the loss on text is 0.5 nats per token higher",
            "the tokenizer adds no BOS token, and the model was trained with one",
            "apr stamp {file} --in-place --set tokenizer.ggml.add_bos_token=true", needs_original=False,
        ),
        Disease(
            "chat-template", ("chat-template", "header"),
            "another chat format fits the model better; a different `tokenizer.chat_template`", "wrong chat template",
            "apr stamp {file} --in-place --set tokenizer.chat_template=@chat_template.jinja", needs_original=False,
        ),
        Disease("nan", ("weights", "tensors"), "NaN or infinity", "weights are NaN or infinite", needs_original=False),
        Disease("zeros", ("weights", "tensors"), "a tensor of zeros", "weights are all zeros", needs_original=False),
        Disease(
            "tied-head", ("tensors",), "`output.weight` is missing, or present but not equal to the embedding",
            "the output head was tied to the token embedding, or untied from it, by mistake",
        ),
        Disease(
            "norm-plus-one", ("tensors",), "norm weights differ by 1", "1 was added to the norms twice or not at all"
        ),
        Disease(
            "rope-order", ("rope-order", "tensors"),
            "permuting the rows of Q and K predicts text better, or restores the original",
            "the rows of Q and K are in the wrong order", needs_original=False,
        ),
        Disease("experts", ("tensors",), "the original's experts in a different order", "experts are swapped"),
        Disease(
            "adapter-scale", ("tensors",), "matrices differ by a low-rank matrix",
            "an adapter was merged with a wrong scale, twice or not at all",
            "apr merge-adapter BASE ADAPTER -o FIXED.gguf",
        ),
        Disease("values", ("tensors",), "different values, shapes or names", "weights differ from the original"),
    )
}  # fmt: skip
"""By id; of several differences the first row is reported first."""

KEYS = tuple(
    (re.compile(pattern), disease)
    for pattern, disease in (
        (r"ARCH\.rope\.freq_base.*", "rope-base"),
        (r"ARCH\.rope\..*", "rope-scaling"),
        (r"ARCH\..*epsilon", "norm-epsilon"),
        (r"ARCH\.(?!context_length$|vocab_size$).*", "hyperparameter"),
        (r"tokenizer\.ggml\.(model|tokens|merges|scores|token_type)", "vocabulary"),
        (r"tokenizer\.ggml\.pre", "pre-tokenizer"),
        (r"tokenizer\.ggml\.(add_)?bos_token.*", "bos"),
        (r"tokenizer\.ggml\.(add_)?(eos|sep|cls|space_prefix)\w*", "special-token"),
        (r"tokenizer\.chat_template", "chat-template"),
    )
)
"""Pattern of a GGUF key, in which ARCH is the architecture -> disease of a model whose value differs."""

DEFAULTS: dict[str, object] = {
    "ARCH.rope.freq_base": 10000.0, "ARCH.rope.scaling.type": "none", "ARCH.rope.scaling.factor": 1.0,
    "ARCH.attention.sliding_window": 0, "ARCH.attn_logit_softcapping": 0.0, "ARCH.final_logit_softcapping": 0.0,
    "ARCH.embedding_scale": 1.0, "ARCH.residual_scale": 1.0, "ARCH.logit_scale": 1.0, "ARCH.attention.causal": True,
    "tokenizer.chat_template": "",
}  # fmt: skip
"""llama.cpp's defaults for missing keys; a key that only one file has is compared only if it is listed here."""
