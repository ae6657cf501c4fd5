"""The table of lint rules: what makes a file easy to find, load, trust and run.

A rule looks only at metadata, names, shapes and dtypes. One that yields "fail" gets the level of its row.
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
    _rule("warn", "provenance.no-license", "the license of the weights is set", origin.no_license,
          "Without a license nobody may use the weights; hubs filter by it, companies refuse unlicensed files.",
          f"{_HUB}, model cards; {_GGUF_SPEC}, general.license"),
    _rule("warn", "provenance.license-not-spdx", "the license is an SPDX id", origin.odd_license,
          "Tools compare ids, not free text.", f"SPDX license list; {_GGUF_SPEC}, general.license"),
    _rule("info", "provenance.no-name", "the model has a name", origin.no_name,
          "Files are renamed and copied; the model must stay identifiable.", f"{_GGUF_SPEC}, general.name"),
    _rule("info", "provenance.no-base-model", "a quantization or adapter names its base model",
          origin.no_base_model, "Hubs list it under the base model; the license follows from the base.",
          f"{_HUB}, base_model; {_GGUF_SPEC}, general.base_model"),
    _rule("warn", "card.missing", "a folder has a model card", origin.no_card,
          "It states intended uses and limits of the model.", f"{_HUB}, model cards"),
    _rule("warn", "tokenizer.missing", "a language model includes its tokenizer", tokens.tokenizer_missing,
          "A tokenizer from elsewhere may be from a different revision.", f"{_GGUF_SPEC}, tokenizer.ggml"),
    _rule("warn", "tokenizer.no-chat-template", "a chat model has its chat template",
          tokens.chat_template,
          "With a wrong template a model answers, but worse. Level info if only the vocabulary suggests a "
"chat model.",
          f"{_HUB}, chat templates; {_GGUF_SPEC}, tokenizer.chat_template"),
    _rule("warn", "tokenizer.no-eos", "an end-of-text token is set", tokens.no_end,
          "Generation does not stop without it.", f"{_GGUF_SPEC}, tokenizer.ggml.eos_token_id"),
    _rule("warn", "tokenizer.pre-missing", "a byte-level BPE names its pre-tokenizer", tokens.no_pre,
          "Without it llama.cpp splits text by its default rules and warns of degraded quality.",
          f"{_LLAMA}, llama-vocab.cpp"),
    _rule("warn", "tokenizer.types-missing", "tokens have types", tokens.no_types,
          "Without types, user text can inject control tokens, or control tokens are read as text.",
          f"{_GGUF_SPEC}, tokenizer.ggml.token_type"),
    _rule("warn", "tokenizer.control-as-text", "tokens that begin or end a turn are control tokens",
          tokens.control_as_text,
          "llama.cpp overrides the type of well-known ones with a warning; other programs print them.",
          f"{_LLAMA}, llama-vocab.cpp"),
    _rule("warn", "tokenizer.duplicates", "tokens are unique", tokens.doubled_tokens,
          "Text maps to only one of two equal tokens, and which one depends on the program.",
          f"{_LLAMA}, llama-vocab.cpp"),
    _rule("info", "vocab.unpadded", "the number of embedding rows is a multiple of 64", tokens.unpadded,
          "Tensor cores work on multiples of 8 to 64, and tensor parallelism splits the rows.",
          "NVIDIA, Deep Learning Performance: Matrix Multiplication"),
    _rule("info", "gguf.version", "the file is GGUF version 3", containers.old_version,
          "Version 2 is outdated; no current program writes it.", _GGUF_SPEC),
    _rule("warn", "gguf.alignment", "tensors are aligned to 32 bytes or a multiple", containers.alignment,
          "Files are memory-mapped, and vector instructions load 32 bytes.", f"{_GGUF_SPEC}, general.alignment"),
    _rule("warn", "gguf.key-names", "keys are dotted lower_snake_case", containers.key_names,
          "Readers in other languages map them to fields.", f"{_GGUF_SPEC}, key-value pairs"),
    _rule("warn", "gguf.quantization-version", "a quantized file has general.quantization_version",
          containers.quantization_version,
          "Block layouts have changed in the past; the specification requires it in quantized files.",
          f"{_GGUF_SPEC}, general.quantization_version"),
    _rule("fail", "gguf.tensor-name-length", "tensor names have at most 63 bytes", containers.long_names,
          "llama.cpp refuses files with longer names.", f"{_GGUF_SPEC}, gguf_tensor_info_t; ggml.h, GGML_MAX_NAME"),
    _rule("info", "gguf.no-imatrix", "files below four bits are made with an importance matrix", containers.no_imatrix,
          "It halves the quantization loss at two to three bits; llama.cpp records its use as quantize.imatrix.*.",
          f"{_LLAMA}, tools/quantize and tools/imatrix"),
    _rule("warn", "context.length-missing", "the context length is set", network.no_context,
          "Programs size their KV cache by it.", f"{_GGUF_SPEC}, context_length"),
    _rule("warn", "context.rope-missing", "the RoPE base is set", network.no_rope_base,
          "The default of 10,000 is wrong for most models with a context over 4,096; level info for shorter ones.",
          f"{_GGUF_SPEC}, rope.freq_base"),
    _rule("warn", "context.original-missing", "RoPE scaling has the original context length",
          network.no_original_context,
          "Scaling starts at that length.", "YaRN, section 3; transformers, rope_scaling"),
    _rule("fail", "head.shape", "the output head is [vocabulary, width]", network.head_shape,
          "A head with a different shape is transposed or from another model.",
          "the architecture table of this package"),
    _rule("info", "head.stored-twice", "a tied head is not stored", network.head_twice,
          "A copy wastes disk and memory.", "transformers, tie_word_embeddings"),
    _rule("warn", "names.non-standard", "tensor names are letters, digits and single dots", network.odd_names,
          "Names are module paths: other characters break state dicts, globs and shells.",
          "torch.nn.Module.register_parameter; safetensors"),
    _rule("warn", "names.unknown", "every tensor name belongs to the architecture", network.unknown_names,
          "Loaders ignore unknown tensors or refuse the file.", "the architecture table of this package"),
    _rule("warn", "tensors.norms-not-float32", "norms and biases of a GGUF are F32", network.norms,
          "They are a thousandth of the size, and several kernels require F32.", f"{_LLAMA}, its converter"),
    _rule("info", "tensors.float32-weights", "matrices are stored in 16 bits or less", network.float32,
          "Models are trained in BF16: the other 16 bits of F32 are zero.", f"{_HUB}, model size"),
    _rule("warn", "moe.router-quantized", "routers of experts are not quantized", network.router,
          "They are tiny, and rounding changes which expert is chosen.", f"{_LLAMA}, llama-quant.cpp"),
    _rule("warn", "quant.head-below-four-bits", "the output head has at least four bits per weight", network.low_head,
          "Its error goes straight into the logits; every llama.cpp preset keeps it at five to eight bits.",
          f"{_LLAMA}, llama-quant.cpp"),
    _rule("info", "shards.unbalanced", "files of a split model have similar sizes", containers.unbalanced,
          "Files are downloaded and loaded in parallel.", f"{_HUB}, uploading large models"),
    _rule("warn", "files.too-large", "no file is over 50 GB", containers.large,
          "An interrupted transfer starts over, and hubs advise against larger files.", f"{_HUB}, repository limits"),
    _rule("warn", "files.pickle", "weights are safetensors, not pickles", containers.pickle,
          "Loading a pickle can run arbitrary code.", f"{_HUB}, pickle scanning"),
    _rule("warn", "files.names", "file names are safe on every system", containers.odd_file_names,
          "Some names trigger other programs or clash on some systems: a conversion skips these files.",
          "SECURITY.md of this package"),
    _rule("warn", "files.links", "no symlink points outside the folder", containers.outside_links,
          "Its target would become part of the output; a conversion refuses it.",
          "SECURITY.md of this package"),
    _rule("warn", "safetensors.no-format", "safetensors files state their format", containers.no_format,
          "transformers refuses files without it in __metadata__, or did so for years.",
          "transformers, load_state_dict"),
    _rule("warn", "config.dtype-mismatch", "config.json has the dtype of the weights", containers.config_dtype,
          "Loaders cast to it: a wrong one wastes memory or loses precision.", "transformers, from_pretrained, dtype"),
    _rule("info", "config.remote-code", "the model needs no code from its repository", containers.remote_code,
          "trust_remote_code runs it with the user's permissions.", f"{_HUB}, custom code"),
    _rule("info", "generation.config-missing", "a folder has a generation_config.json", containers.no_generation_config,
          "It contains end tokens and sampling settings; in config.json they are deprecated.",
          "transformers, GenerationConfig"),
    _rule("info", "tokenizer.no-fast-file", "a folder has a tokenizer.json", containers.slow_tokenizer,
          "Programs without sentencepiece need it.", "transformers, PreTrainedTokenizerFast"),
    _rule("warn", "apr.no-checksum", "an .apr file ends with its checksum", containers.apr_footer,
          "Nothing else detects a byte changed on disk or in transit.", "the APR format, footer"),
    _rule("info", "apr.alignment", "tensor offsets of an .apr file are multiples of 64", containers.apr_alignment,
          "Vector instructions and devices use them in place, memory-mapped.", "the APR format, data section"),
    _rule("warn", "apr.vocabulary-flag", "an .apr file with a vocabulary sets HAS_VOCAB", containers.apr_vocab_flag,
          "The reference runtime loads the tokenizer only if it is set.", "the APR format, header flags"),
)  # fmt: skip


def rules(file_types: Mapping[int, str], presets: Callable[[str], str | None]) -> tuple[ValidationRule, ...]:
    """All rules. `file_types`: llama.cpp's file types and the dtype of most matrices of such a file; `presets` returns
    that dtype for the name of a preset, None if unknown.
    """
    return (
        *_RULES,
        _rule("warn", "gguf.file-type-mismatch", "general.file_type matches the type of most weights",
              partial(containers.file_type, file_types),
              "Programs and model pages show it as the file's quantization.",
              f"{_GGUF_SPEC}, general.file_type"),
        _rule("warn", "name.quant-suffix", "the quantization in the file name matches the file",
              partial(containers.quant_suffix, presets),
              "People and tools pick files by name; llama.cpp fetches repo:Q4_K_M by it.",
              f"{_GGUF_SPEC}, naming convention"),
    )  # fmt: skip
