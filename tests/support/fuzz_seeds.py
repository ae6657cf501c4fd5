"""Small valid models in every form that is read: what the fuzzer begins with. Made without transformers."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf_images
import imatrix_files
import mistral_folders
import numpy as np
import packed_models
import rank_files
from demo_model import byte_characters
from packed_parts import BASE, Packed
from tokenizer_folders import sentencepiece

import aprfmt
from aprfmt.formats.gguf_fields import GgufType as T
from aprfmt.tokenizer import rwkv

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 32, 4, 2, 8, 64, 1

Files = dict[str, bytes]
Values = dict[str, tuple[str, tuple[int, ...], bytes]]


@dataclass(frozen=True, slots=True)
class Seed:
    """The files of one model; `main` is the one that is opened, "" for their folder. `role`: "model", "imatrix",
    "state": what reads it.
    """

    files: Files
    main: str = ""
    role: str = "model"


def tokens() -> tuple[list[str], list[str]]:
    """(tokens, merges) of a byte-level BPE of 64 ids."""
    merges = ["h e", "Ġ t", "Ġ a", "i n", "Ġt he", "e r"]
    letters = [c for c in byte_characters() if c in "abcdefghijklmnopqrstuvwxyz0123456789.,ĠĊ"]
    made = ["<|end|>", "<|pad|>", *letters, *(merge.replace(" ", "") for merge in merges)]
    return made + [f"<|{n}|>" for n in range(64 - len(made))], merges


def _arrays(
    vocab: int, layers: int = LAYERS, *, dtype: str = "<f2", head: bool = True, hidden: int = HIDDEN, ffn: int = FFN
) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(3)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for n in range(layers):
        at = f"model.layers.{n}."
        shapes |= {
            at + "input_layernorm.weight": (hidden,),
            at + "post_attention_layernorm.weight": (hidden,),
            at + "self_attn.q_proj.weight": (q, hidden),
            at + "self_attn.k_proj.weight": (kv, hidden),
            at + "self_attn.v_proj.weight": (kv, hidden),
            at + "self_attn.o_proj.weight": (hidden, q),
            at + "mlp.gate_proj.weight": (ffn, hidden),
            at + "mlp.up_proj.weight": (ffn, hidden),
            at + "mlp.down_proj.weight": (hidden, ffn),
        }
    shapes["model.norm.weight"] = (hidden,)
    if head:
        shapes["lm_head.weight"] = (vocab, hidden)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def stored(arrays: Mapping[str, np.ndarray[Any, Any]]) -> Values:
    """Arrays as (dtype, shape, bytes)."""
    names = {"<f4": "F32", "<f2": "F16", "|i1": "I8", "|u1": "U8", "<i4": "I32", "<i8": "I64", "<f8": "F64"}
    return {name: (names[a.dtype.str], a.shape, a.tobytes()) for name, a in arrays.items()}


def safetensors(values: Values, metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape, data) in values.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for *_, data in values.values())


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": [0, 1],
    "torch_dtype": "float16",
}


def _tokenizer_json() -> dict[str, Any]:
    names, merges = tokens()
    special = [i for i, name in enumerate(names) if name.startswith("<|")]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": names[i], "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True} for i in special
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {name: i for i, name in enumerate(names) if i not in special}, "merges": merges},
    }  # fmt: skip


def _text(value: object) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False).encode()


_CARD = b"""---
license: apache-2.0
language: [en, de]
tags:
- text-generation
base_model: org/base
datasets:
- org/data
model-index:
- name: tiny
  results: []
---
# Tiny

A model.
"""


def _tokenizer_files() -> Files:
    return {
        "tokenizer.json": _text(_tokenizer_json()),
        "tokenizer_config.json": _text({
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": {"content": "<|pad|>"},
            "added_tokens_decoder": {"0": {"content": "<|end|>", "special": True, "lstrip": False}},
            "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}", "model_max_length": 128,
        }),
    }  # fmt: skip


def _bpe_folder() -> Files:
    return {
        "config.json": _text(CONFIG),
        "generation_config.json": _text({"eos_token_id": [0, 1], "temperature": 0.6, "do_sample": True}),
        "special_tokens_map.json": _text({"eos_token": "<|end|>", "pad_token": "<|pad|>"}),
        **_tokenizer_files(),
        "chat_template.jinja": b"{% for m in messages %}{{ m['content'] }}{% endfor %}",
        "README.md": _CARD,
        "model.safetensors": safetensors(stored(_arrays(64)), {"format": "pt"}),
    }


def _spm_pieces() -> list[tuple[str, float, int]]:
    special = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    in_bytes = [(f"<0x{n:02X}>", 0.0, 6) for n in range(256)]
    words = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "bc"]
    return [*special, *in_bytes, *((word, -float(n), 1) for n, word in enumerate(words))]


def _spm_folder() -> Files:
    pieces = _spm_pieces()
    model = sentencepiece(pieces, [(3, 2), (35, 1), (40, 0), (41, 1), (42, 2)], [(3, 1), (4, 0), (5, 1)])
    return {
        "config.json": _text(CONFIG | {"vocab_size": len(pieces), "bos_token_id": 1, "eos_token_id": 2}),
        "tokenizer.model": model,
        "tokenizer_config.json": _text({"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}),
        "added_tokens.json": _text({}),
        "model.safetensors": safetensors(stored(_arrays(len(pieces)))),
    }


def _two_lists_folder() -> Files:
    names, merges = tokens()
    return {
        "config.json": _text(CONFIG),
        "vocab.json": _text({name: i for i, name in enumerate(names)}),
        "merges.txt": "\n".join(["#version: 0.2", *merges, ""]).encode(),
        "tokenizer_config.json": _text({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False}),
        "model.safetensors": safetensors(stored(_arrays(64))),
    }


_RANKS = {bytes([byte]): byte for byte in range(256)} | {b"ab": 256, b"abc": 257, b"bc": 258}


def _ranks_folder(files: Files) -> Files:
    """A folder whose tokenizer is `files`."""
    return {
        "config.json": _text(CONFIG | {"vocab_size": 600}),
        **files,
        "model.safetensors": safetensors(stored(_arrays(600))),
    }


def _mistral_folder() -> Files:
    rng = np.random.default_rng(0)
    shapes = mistral_folders.shapes(300, mistral_folders.PARAMS)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return {
        "params.json": _text(mistral_folders.PARAMS | {"vocab_size": 300, **mistral_folders.MINISTRAL3}),
        "tekken.json": rank_files.tekken_file(_RANKS, "", specials=40),
        "consolidated.safetensors": safetensors(stored(arrays)),
    }


def _sharded_folder() -> Files:
    values = stored(_arrays(64, 2))
    first = {name: value for name, value in values.items() if "layers.1" not in name}
    files = {"model-00001-of-00002.safetensors": first,
             "model-00002-of-00002.safetensors": {n: v for n, v in values.items() if n not in first}}  # fmt: skip
    index = {
        "metadata": {"total_size": sum(len(data) for *_, data in values.values())},
        "weight_map": {name: file for file, part in files.items() for name in part},
    }
    return {
        "config.json": _text(CONFIG | {"num_hidden_layers": 2}),
        **_tokenizer_files(),
        "model.safetensors.index.json": _text(index),
        **{file: safetensors(part) for file, part in files.items()},
    }


def _mixture_folder() -> Files:
    """A mixtral of four experts, whose tensors a GGUF stacks."""
    arrays = {name: a for name, a in _arrays(64).items() if ".mlp." not in name}
    rng = np.random.default_rng(5)
    at = "model.layers.0.block_sparse_moe."
    arrays[at + "gate.weight"] = rng.normal(size=(4, HIDDEN)).astype("<f2")
    for e in range(4):
        for name, shape in (("w1", (FFN, HIDDEN)), ("w2", (HIDDEN, FFN)), ("w3", (FFN, HIDDEN))):
            arrays[f"{at}experts.{e}.{name}.weight"] = rng.normal(size=shape).astype("<f2")
    config = CONFIG | {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None,
    }  # fmt: skip
    return {"config.json": _text(config), **_tokenizer_files(), "model.safetensors": safetensors(stored(arrays))}


def _gemma_folder() -> Files:
    """Norms whose values a GGUF counts from one."""
    arrays = _arrays(64, dtype="<f4", head=False)
    config = CONFIG | {
        "architectures": ["GemmaForCausalLM"], "model_type": "gemma", "head_dim": 8, "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh",
    }  # fmt: skip
    return {"config.json": _text(config), **_tokenizer_files(), "model.safetensors": safetensors(stored(arrays))}


def _adapter_folder(*, whole: bool = True) -> Files:
    """A LoRA of a small llama, whose config.json stands beside it; scales and ranks by pattern, a norm as a whole."""
    base, rng = json.loads(_bpe_folder()["config.json"]), np.random.default_rng(9)
    sizes = {"q_proj": (HEADS * HEAD_DIM, 4), "v_proj": (KV_HEADS * HEAD_DIM, 2)}
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, (out, rank) in sizes.items():
        at = f"base_model.model.model.layers.0.self_attn.{name}.lora_"
        arrays |= {f"{at}A.weight": rng.normal(size=(rank, HIDDEN)), f"{at}B.weight": rng.normal(size=(out, rank))}
    if whole:
        arrays["base_model.model.model.norm.weight"] = rng.normal(size=HIDDEN)
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {"v_proj": 2},
        "alpha_pattern": {"layers.0.*v_proj": 5},
        "target_modules": ["q_proj", "v_proj"],
        "modules_to_save": ["norm"],
        "base_model_name_or_path": "a/b",
    }
    weights = safetensors(stored({name: array.astype("<f4") for name, array in arrays.items()}), {"format": "pt"})
    return {"config.json": _text(base), "adapter_config.json": _text(config), "adapter_model.safetensors": weights}


def _expert_adapter_folder() -> Files:
    """A LoRA of a stack of experts, which PEFT stores side by side."""
    rng = np.random.default_rng(9)
    at = "base_model.model.model.layers.0.mlp.experts."
    sizes = {
        f"{at}base_layer.lora_A.weight": (4 * 2, HIDDEN),
        f"{at}base_layer.lora_B.weight": (2 * 16, 4 * 2),
        f"{at}lora_A.weight": (4 * 2, 16),
        f"{at}lora_B.weight": (HIDDEN, 4 * 2),
    }
    parameters = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_parameters": parameters}
    values = stored({name: rng.normal(size=size).astype("<f4") for name, size in sizes.items()})
    return {"adapter_config.json": _text(config), "adapter_model.safetensors": safetensors(values, {"format": "pt"})}


def _packed_folder(packed: Packed) -> Files:
    """A llama of which one weight is packed by another tool; its sizes are those of that weight."""
    ffn, hidden = packed.values.shape[-2:]
    values = stored(_arrays(64, hidden=hidden, ffn=ffn))
    del values[f"{BASE}.weight"]
    values |= {t.name: (t.dtype, t.shape, bytes(t.raw())) for t in packed.tensors.values()}
    config = CONFIG | {
        "hidden_size": hidden, "intermediate_size": ffn, "head_dim": HEAD_DIM,
        "quantization_config": packed.quantization, "dtype": packed.dtype,
    }  # fmt: skip
    return {"config.json": _text(config), **_tokenizer_files(), "model.safetensors": safetensors(values)}


_PACKED: dict[str, Callable[[], Packed]] = {
    "fp8": lambda: packed_models.fp8("block", FFN, HIDDEN),
    **{name: packed_models.CASES[name] for name in (
        "mlx-affine", "gptq-4-order", "awq", "ct-pack-order-zero", "ct-int8-zero", "ct-nvfp4", "mxfp4",
        "bnb-nf4-nested", "bnb-int8",
    )},
}  # fmt: skip


def _gguf_keys(tokenizer: str) -> list[Any]:
    names, merges = tokens()
    keys: list[Any] = [
        ("general.architecture", T.STRING, "llama"),
        ("general.name", T.STRING, "tiny"),
        ("general.license", T.STRING, "mit"),
        ("general.tags", (T.ARRAY, T.STRING), ["a", "b"]),
        ("llama.block_count", T.UINT32, LAYERS),
        ("llama.context_length", T.UINT32, 128),
        ("llama.embedding_length", T.UINT32, HIDDEN),
        ("llama.feed_forward_length", T.UINT32, FFN),
        ("llama.attention.head_count", T.UINT32, HEADS),
        ("llama.attention.head_count_kv", T.UINT32, KV_HEADS),
        ("llama.rope.freq_base", T.FLOAT32, 10000.0),
        ("llama.attention.layer_norm_rms_epsilon", T.FLOAT32, 1e-5),
        ("general.file_type", T.UINT32, 1),
    ]
    if tokenizer == "gpt2":
        keys += [
            ("tokenizer.ggml.model", T.STRING, "gpt2"),
            ("tokenizer.ggml.pre", T.STRING, "gpt-2"),
            ("tokenizer.ggml.tokens", (T.ARRAY, T.STRING), names),
            ("tokenizer.ggml.token_type", (T.ARRAY, T.INT32), [3 if n.startswith("<|") else 1 for n in names]),
            ("tokenizer.ggml.merges", (T.ARRAY, T.STRING), merges),
            ("tokenizer.ggml.eos_token_id", T.UINT32, 0),
            ("tokenizer.ggml.add_bos_token", T.BOOL, False),
            ("tokenizer.chat_template", T.STRING, "{{ messages }}"),
        ]
    if tokenizer == "llama":
        pieces = _spm_pieces()
        keys += [
            ("tokenizer.ggml.model", T.STRING, "llama"),
            ("tokenizer.ggml.pre", T.STRING, "default"),
            ("tokenizer.ggml.tokens", (T.ARRAY, T.STRING), [text for text, _, _ in pieces]),
            ("tokenizer.ggml.scores", (T.ARRAY, T.FLOAT32), [score for _, score, _ in pieces]),
            ("tokenizer.ggml.token_type", (T.ARRAY, T.INT32), [kind for *_, kind in pieces]),
            ("tokenizer.ggml.bos_token_id", T.UINT32, 1),
            ("tokenizer.ggml.eos_token_id", T.UINT32, 2),
        ]
    return keys


def _gguf_values(vocab: int) -> Values:
    from aprfmt.arch.hyperparams import Hyperparams
    from aprfmt.arch.names import gguf_name
    from aprfmt.arch.table import ARCHITECTURES

    values = stored(_arrays(vocab))
    return {gguf_name(ARCHITECTURES["llama"], name, Hyperparams()) or name: value for name, value in values.items()}


def _gguf(at: Path, tokenizer: str = "gpt2", *, version: int = 3, more: tuple[Any, ...] = ()) -> Files:
    vocab = len(_spm_pieces()) if tokenizer == "llama" else 64
    imatrix_files.write_gguf(at / "m.gguf", [*_gguf_keys(tokenizer), *more], _gguf_values(vocab))
    data = bytearray((at / "m.gguf").read_bytes())
    data[4:8] = struct.pack("<I", version)
    return {"m.gguf": bytes(data)}


_SOME_KEYS: tuple[Any, ...] = (
    ("x.bool", T.BOOL, True),
    ("x.i8", T.INT8, -1),
    ("x.u64", T.UINT64, 1 << 63),
    ("x.f64", T.FLOAT64, 0.5),
    ("x.list", (T.ARRAY, T.INT16), [1, -2, 3]),
    ("x.empty", (T.ARRAY, T.STRING), []),
)


def _peer_gguf(at: Path) -> Files:
    tensors = {name: (array[:1] if array.ndim == 2 and array.shape[0] == 3 else array, dtype)
               for name, (array, dtype) in gguf_images.peer_tensors().items()}  # fmt: skip
    gguf_images.write_peer(at / "m.gguf", [], tensors, alignment=64)
    return {"m.gguf": (at / "m.gguf").read_bytes()}


def _nested_gguf() -> Files:
    inner = struct.pack("<IQ", 5, 2) + struct.pack("<2i", 1, 2)
    nested = struct.pack("<IQ", 9, 2) + inner + inner
    pairs = [
        gguf_images.pair(b"general.architecture", 8, gguf_images.string(b"llama")),
        gguf_images.pair(b"x.nested", 9, nested),
        gguf_images.pair(b"general.alignment", 4, struct.pack("<I", 32)),
    ]
    infos = [gguf_images.info(b"a", (4, 2), 0, 0), gguf_images.info(b"b", (32,), 8, 32)]
    return {"m.gguf": gguf_images.image(pairs, infos, bytes(range(66)))}


def _files(at: Path) -> Files:
    return {p.relative_to(at).as_posix(): p.read_bytes() for p in sorted(at.rglob("*")) if p.is_file()}


def write(files: Mapping[str, bytes], folder: Path) -> None:
    """Writes the files below `folder`."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


@dataclass
class _Builder:
    """Builds seeds in a scratch folder; `models` are those that others are converted from."""

    root: Path
    models: dict[str, Seed] = field(default_factory=dict)

    def folder(self, name: str) -> Path:
        at = self.root / name
        at.mkdir()
        return at

    def converted(self, name: str, source: str, main: str, **options: Any) -> Seed:
        """The seed `source` as `main`, a file, or "" for a folder."""
        at, seed = self.folder(name), self.models[source]
        write(seed.files, at / "from")
        (at / "to").mkdir()
        aprfmt.convert_model(at / "from" / seed.main, at / "to" / (main or "m"), fsync=False, **options)
        return Seed(_files(at / "to" if main else at / "to" / "m"), main)


def _vectors() -> Iterator[tuple[str, Seed]]:
    folder = ROOT / "fixtures" / "vectors" / "golden"
    for name in (
        *("legacy_apr1_json_index", "legacy_apr2_magic_v2_header", "legacy_wrapper_apr0_zstd"),
        *("legacy_wrapper_apr2_none", "legacy_wrapper_apr2_zstd", "realizar_v2_lz4_payload"),
        *("realizar_v2_zstd_payload", "v1_encrypted_password", "v1_golden_none", "v1_lz4", "v1_metadata_full_license"),
        *("v1_signed_ed25519", "v1_zstd3", "v2_all_dtypes", "v2_aprq4", "v2_aprq8", "v2_metadata_full", "v2_no_footer"),
        *("v2_q4k_q6k_raw", "v2_sharding", "v2_shapes", "v2_streaming", "v2_tokenizer_bpe_tiny_qwen2"),
    ):
        yield name, Seed({"m.apr": (folder / f"{name}.apr").read_bytes()}, "m.apr")


def _imatrices(at: Path) -> Iterator[tuple[str, Seed]]:
    names = ("blk.0.attn_q.weight", "blk.0.ffn_down.weight")
    old = imatrix_files.old_imatrix({name: [0.5, 1.0] * (32 if "down" in name else 16) for name in names})
    yield "imatrix-old", Seed({"i.dat": old}, "i.dat", "imatrix")
    counts: dict[str, list[float]] = {name: [3.0] for name in names}
    imatrix_files.new_imatrix(at / "i.gguf", {name: [0.5] * 32 for name in names}, counts)
    yield "imatrix-new", Seed({"i.gguf": (at / "i.gguf").read_bytes()}, "i.gguf", "imatrix")


def _made(root: Path) -> Iterator[tuple[str, Seed]]:
    builder = _Builder(root)
    plain: dict[str, Seed] = {
        "hf-bpe": Seed(_bpe_folder()),
        "hf-spm": Seed(_spm_folder()),
        "hf-lists": Seed(_two_lists_folder()),
        "hf-shards": Seed(_sharded_folder()),
        "hf-tiktoken": Seed(_ranks_folder({"qwen.tiktoken": rank_files.tiktoken_file(_RANKS)})),
        "hf-rwkv": Seed(_ranks_folder({rwkv.FILE_NAME: rank_files.rwkv_file([b"\n\n", b"ab", b"\xe4\xbd"])})),
        "hf-mistral": Seed(_mistral_folder()),
        "hf-experts": Seed(_mixture_folder()),
        "hf-gemma": Seed(_gemma_folder()),
        "adapter-peft": Seed(_adapter_folder()),
        "adapter-plain": Seed(_adapter_folder(whole=False)),
        "adapter-experts": Seed(_expert_adapter_folder()),
        **{f"hf-{name}": Seed(_packed_folder(make())) for name, make in _PACKED.items()},
        "gguf-bpe": Seed(_gguf(builder.folder("bpe"), more=_SOME_KEYS), "m.gguf"),
        "gguf-spm": Seed(_gguf(builder.folder("spm"), "llama"), "m.gguf"),
        "gguf-v2": Seed(_gguf(builder.folder("v2"), "", version=2), "m.gguf"),
        "gguf-dtypes": Seed(_peer_gguf(builder.folder("peer")), "m.gguf"),
        "gguf-nested": Seed(_nested_gguf(), "m.gguf"),
        "safetensors": Seed({"m.safetensors": safetensors(stored(_arrays(64)), {"format": "pt"})}, "m.safetensors"),
    }
    builder.models = plain
    yield from plain.items()
    for name, source, main, options in (
        ("apr-of-folder", "hf-bpe", "m.apr", {}),
        ("apr-of-spm", "hf-spm", "m.apr", {}),
        ("apr-of-experts", "hf-experts", "m.apr", {}),
        ("apr-of-packed", "hf-gptq-4-order", "m.apr", {}),
        ("apr-of-gguf", "gguf-bpe", "m.apr", {}),
        ("apr-of-dtypes", "gguf-dtypes", "m.apr", {"allow_unmapped": True}),
        ("apr-of-safetensors", "safetensors", "m.apr", {"arch": "llama", "allow_no_config": True}),
        ("gguf-of-gemma", "hf-gemma", "m.gguf", {}),
        ("gguf-of-experts", "hf-experts", "m.gguf", {}),
        ("gguf-q8", "hf-bpe", "m.gguf", {"dtype": "q8_0"}),
        ("gguf-parts", "hf-shards", "m.gguf", {"shard_size": 20_000}),
        ("mlx", "hf-bpe", "", {"format": "mlx"}),
        ("adapter-apr", "adapter-peft", "m.apr", {}),
        ("adapter-gguf", "adapter-plain", "m.gguf", {}),
        ("adapter-mlx", "adapter-plain", "", {"format": "mlx"}),
    ):
        made = builder.converted(name, source, main, **options)
        if name == "gguf-parts":
            made = Seed(made.files, next(iter(made.files)))
        builder.models[name] = made
        yield name, made
    yield "apr-shards", builder.converted("apr-shards", "apr-of-folder", "", format="apr-shards", shard_size=20_000)
    yield "gguf-sidecar", builder.converted("gguf-sidecar", "apr-of-folder", "m.gguf")
    yield "hf-of-gguf", builder.converted("hf-of-gguf", "apr-of-gguf", "", format="hf")
    yield from _imatrices(builder.folder("imatrix"))
    yield from _vectors()


def seeds() -> dict[str, Seed]:
    """Every seed by name, the same on every machine."""
    with tempfile.TemporaryDirectory() as folder:
        return dict(_made(Path(folder)))
