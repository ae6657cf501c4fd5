"""The rules of good practice as a table: what makes a file easy to find, to load, to trust and to run.

A rule looks at metadata, names, shapes and dtypes alone. One that yields "fail" gets the level of its row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from aprfmt.inspection.lint import containers, network, origin, tokens
from aprfmt.inspection.validate import Check, Status, Subject, ValidationRule

_GGUF_SPEC = "the GGUF specification (docs/gguf.md of ggml)"
_HUB = "the documentation of the Hugging Face Hub"
_LLAMA = "llama.cpp"


def _rule(
    level: Status, id: str, holds: str, look: Callable[[Subject], Iterator[Check]], why: str, source: str
) -> ValidationRule:
    return ValidationRule(id, 0, holds, look, level, why, source)


_RULES = (
    _rule("warn", "provenance.no-license", "the licence of the weights is stated", origin.no_license,
          "Without one nobody may use the weights; hubs filter by it and companies refuse files that have none.",
          f"{_HUB}, model cards; {_GGUF_SPEC}, general.license"),
    _rule("warn", "provenance.license-not-spdx", "the licence is an SPDX id", origin.odd_license,
          "Tools compare ids, not texts.", f"SPDX licence list; {_GGUF_SPEC}, general.license"),
    _rule("info", "provenance.no-name", "the model has a name", origin.no_name,
          "A file is renamed and copied; what it holds should still be told.", f"{_GGUF_SPEC}, general.name"),
    _rule("info", "provenance.no-base-model", "a quantization or an adapter names the model that it was made from",
          origin.no_base_model,
          "Hubs show it below its original, and a licence is inherited from it.",
          f"{_HUB}, base_model; {_GGUF_SPEC}, general.base_model"),
    _rule("warn", "card.missing", "a folder has a model card", origin.no_card,
          "What a model is for, and what it must not be used for, stands there.", f"{_HUB}, model cards"),
    _rule("warn", "tokenizer.missing", "a language model has its tokenizer", tokens.tokenizer_missing,
          "A tokenizer that is found elsewhere is often another revision's.", f"{_GGUF_SPEC}, tokenizer.ggml"),
    _rule("warn", "tokenizer.no-chat-template", "a model that was trained for chats has its template",
          tokens.chat_template,
          "With another template a model answers, only worse. Where the vocabulary alone speaks of chats: a note.",
          f"{_HUB}, chat templates; {_GGUF_SPEC}, tokenizer.chat_template"),
    _rule("warn", "tokenizer.no-eos", "a token ends a text", tokens.no_end,
          "Generation stops at it, and at nothing else.", f"{_GGUF_SPEC}, tokenizer.ggml.eos_token_id"),
    _rule("warn", "tokenizer.pre-missing", "a byte-level BPE names its pre-tokenizer", tokens.no_pre,
          "llama.cpp then splits text by its default rules and warns that the quality will suffer.",
          f"{_LLAMA}, llama-vocab.cpp"),
    _rule("warn", "tokenizer.types-missing", "tokens have types", tokens.no_types,
          "Text of a user that spells a control token would be taken for one, or a real one for text.",
          f"{_GGUF_SPEC}, tokenizer.ggml.token_type"),
    _rule("warn", "tokenizer.control-as-text", "tokens that begin and end a turn are control tokens",
          tokens.control_as_text,
          "llama.cpp overrides the type of the best known ones with a warning, other programs print them.",
          f"{_LLAMA}, llama-vocab.cpp"),
    _rule("warn", "tokenizer.duplicates", "every token is there once", tokens.doubled_tokens,
          "One of two ids can never be produced by text, and which one depends on the program.",
          f"{_LLAMA}, llama-vocab.cpp"),
    _rule("info", "vocab.unpadded", "the rows of the embedding are a multiple of 64", tokens.unpadded,
          "Matrix units work on multiples of 8 to 64, and tensor parallelism divides the rows.",
          "NVIDIA, Deep Learning Performance: Matrix Multiplication"),
    _rule("info", "gguf.version", "the file is GGUF version 3", containers.old_version,
          "Version 2 is read everywhere still, and written by nothing.", _GGUF_SPEC),
    _rule("warn", "gguf.alignment", "tensors are aligned to 32 bytes or a multiple", containers.alignment,
          "Files are mapped into memory, and vector instructions load 32 bytes.", f"{_GGUF_SPEC}, general.alignment"),
    _rule("warn", "gguf.key-names", "keys are lower_snake_case with dots", containers.key_names,
          "Readers of other languages make fields of them.", f"{_GGUF_SPEC}, key-value pairs"),
    _rule("warn", "gguf.quantization-version", "a quantized file has general.quantization_version",
          containers.quantization_version,
          "The layout of blocks has changed before; required where a tensor is quantized.",
          f"{_GGUF_SPEC}, general.quantization_version"),
    _rule("fail", "gguf.tensor-name-length", "names of tensors have at most 63 bytes", containers.long_names,
          "llama.cpp refuses the file.", f"{_GGUF_SPEC}, gguf_tensor_info_t; ggml.h, GGML_MAX_NAME"),
    _rule("info", "gguf.no-imatrix", "a file below four bits was made with an importance matrix", containers.no_imatrix,
          "It halves the loss at two to three bits; llama.cpp writes quantize.imatrix.* when one was used.",
          f"{_LLAMA}, tools/quantize and tools/imatrix"),
    _rule("warn", "context.length-missing", "the length of the longest text is stated", network.no_context,
          "Programs size their cache by it.", f"{_GGUF_SPEC}, context_length"),
    _rule("warn", "context.rope-missing", "the base of the rotary positions is stated", network.no_rope_base,
          "The default of 10,000 is wrong for nearly every model of more than 4,096 positions; below it is a note.",
          f"{_GGUF_SPEC}, rope.freq_base"),
    _rule("warn", "context.original-missing", "stretched positions name the length before stretching",
          network.no_original_context,
          "The stretching begins there.", "YaRN, section 3; transformers, rope_scaling"),
    _rule("fail", "head.shape", "the output head is [vocabulary, width]", network.head_shape,
          "A head of another shape was transposed or belongs to another model.",
          "the architecture table of this package"),
    _rule("info", "head.stored-twice", "a tied head is not stored", network.head_twice,
          "It costs its size on disk and in memory.", "transformers, tie_word_embeddings"),
    _rule("warn", "names.non-standard", "names of tensors are letters, digits and single dots", network.odd_names,
          "Names are paths of modules: other characters break state dicts, globs and shells.",
          "torch.nn.Module.register_parameter; safetensors"),
    _rule("warn", "names.unknown", "all tensors have names that the architecture knows", network.unknown_names,
          "A loader ignores them or refuses the file.", "the architecture table of this package"),
    _rule("warn", "tensors.norms-not-float32", "norms and biases of a GGUF are F32", network.norms,
          "They are a thousandth of the size, and several kernels take F32 alone.", f"{_LLAMA}, its converter"),
    _rule("info", "tensors.float32-weights", "matrices are stored in 16 bits or less", network.float32,
          "Models are trained in BF16: the other half of the bits is zero.", f"{_HUB}, model size"),
    _rule("warn", "moe.router-quantized", "routers of experts are not quantized", network.router,
          "They are tiny, and a rounding there chooses another expert.", f"{_LLAMA}, llama-quant.cpp"),
    _rule("warn", "quant.head-below-four-bits", "the output head has at least four bits per weight", network.low_head,
          "Its error is that of the logits; every mix of llama.cpp keeps it at five to eight bits.",
          f"{_LLAMA}, llama-quant.cpp"),
    _rule("info", "shards.unbalanced", "files of a split model have about one size", containers.unbalanced,
          "Downloads and loaders work on files side by side.", f"{_HUB}, uploading large models"),
    _rule("warn", "files.too-large", "no file is larger than 50 GB", containers.large,
          "A transfer that breaks begins anew, and hubs advise against larger ones.", f"{_HUB}, repository limits"),
    _rule("warn", "files.pickle", "weights are safetensors, not pickles", containers.pickle,
          "Loading a pickle can run whatever its author wrote.", f"{_HUB}, pickle scanning"),
    _rule("warn", "files.names", "names of files are safe on every system", containers.odd_file_names,
          "Other programs act on some names, and some systems confuse them: a conversion leaves such files out.",
          "SECURITY.md of this package"),
    _rule("warn", "files.links", "no link leads out of the folder", containers.outside_links,
          "What a link leads to would become part of what is made of the folder; a conversion refuses it.",
          "SECURITY.md of this package"),
    _rule("warn", "safetensors.no-format", "safetensors files say their format", containers.no_format,
          "transformers refuses files whose __metadata__ lacks it, or did so for years.",
          "transformers, load_state_dict"),
    _rule("warn", "config.dtype-mismatch", "config.json names the dtype of the weights", containers.config_dtype,
          "Loaders convert to it: twice the memory, or half of the digits.", "transformers, from_pretrained, dtype"),
    _rule("info", "config.remote-code", "no code of the repository is needed", containers.remote_code,
          "trust_remote_code runs it with the rights of the user.", f"{_HUB}, custom code"),
    _rule("info", "generation.config-missing", "a folder says how to generate", containers.no_generation_config,
          "End tokens and sampling stand there; config.json is no longer the place for them.",
          "transformers, GenerationConfig"),
    _rule("info", "tokenizer.no-fast-file", "a folder has a tokenizer.json", containers.slow_tokenizer,
          "Programs without Python's sentencepiece read nothing else.", "transformers, PreTrainedTokenizerFast"),
    _rule("warn", "apr.no-checksum", "an .apr ends with its checksum", containers.apr_footer,
          "A byte that changed on a disk or a wire is seen by nothing else.", "the APR format, footer"),
    _rule("info", "apr.alignment", "tensors of an .apr begin at multiples of 64", containers.apr_alignment,
          "They are used where they lie, by vector instructions and by devices.", "the APR format, data section"),
    _rule("warn", "apr.vocabulary-flag", "an .apr with a vocabulary says so in its header", containers.apr_vocab_flag,
          "The reference runtime looks for the tokenizer only then.", "the APR format, header flags"),
)  # fmt: skip


def rules(file_types: Mapping[int, str], mixes: Callable[[str], str | None]) -> tuple[ValidationRule, ...]:
    """All rules. `file_types`: llama.cpp's numbers and the dtype of most matrices of such a file; `mixes` gives that
    dtype for the name of a mix, None for one that there is not.
    """
    return (
        *_RULES,
        _rule("warn", "gguf.file-type-mismatch", "general.file_type says which type most of the weights have",
              partial(containers.file_type, file_types),
              "Programs and model pages show this number as the quantization of the file.",
              f"{_GGUF_SPEC}, general.file_type"),
        _rule("warn", "name.quant-suffix", "the quantization in the file's name is the one in the file",
              partial(containers.quant_suffix, mixes),
              "People and tools choose a file by its name; llama.cpp fetches repo:Q4_K_M by it.",
              f"{_GGUF_SPEC}, naming convention"),
    )  # fmt: skip
