"""Tiny random models of every row of the architecture table, and what transformers computes with them.

The cases stand in arch_cases_*.py. A model has real tokenizer files, and random values wherever it has a tensor or
a saved buffer, so that a constant or a tensor that is lost on the way changes the logits. Where transformers has no
such class, the checkpoint is made of what the row names; llama.cpp's converter and loader are then the judges.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.convert.logits import relative_error
from aprtrain import reference
from aprtrain.reference import OF_STATES, inputs, output_of, quiet_transformers, transformers_logits

__all__ = ["OF_STATES", "inputs", "quiet_transformers", "relative_error", "transformers_logits"]  # of other tests too

CACHE = Path(os.environ.get("APR_MATERIAL", Path.home() / ".cache" / "aprfmt" / "material"))
BUILD_VERSION = 2
"""To be raised when `build` makes other models of the same cases: what is kept of the converter is then stale."""

CASE_FILES = (
    "llama",
    "qwen",
    "gemma",
    "gemma4",
    "dense",
    "moe",
    "interleaved",
    "gpt",
    "bert",
    "ssm",
    "hybrid",
    "mla",
    "sparse",
    "compressed",
    "remote",
    "remote_dense",
    "remote_gpt",
    "remote_moe",
    "remote_sparse",
    "layered",
    "remote_diffusion",
    "remote_encoder",
    "classifiers",
    "remote_hybrid",
    "remote_rwkv",
    "remote_audio",
    "seq2seq",
    "served",
    "multimodal",
    "drafts",
    "wrappers",
    "vision",
    "alike",
    "plain",
    "mlx",
)
FOLDER_TOKENIZERS = ("qwen2_5", "qwen3", "llama3", "gemma3", "gpt4o")
GGUF_TOKENIZERS = {
    "smollm2": Path("smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "bert": Path("llama.cpp-models", "ggml-vocab-bert-bge.gguf"),
}
RWKV = "rwkv"
"""A vocabulary of RWKV with the tokens of a real tokenizer."""

DIMS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
"""What every case has, as far as its config class knows the key."""

VOCAB = "{vocab}"
"""Stands in the config of a case that transformers does not have for the number of its tokenizer's tokens."""

WHOLE_TOKENIZERS = frozenset(("chameleon", "dspark", "gemma4_dspark", "eagle3/plain", "dflash/all_windows", "youtu"))
"""Rows and cases that name ids or sizes of the whole tokenizer, or come near the tolerance with a smaller one."""
LEAST_TOKENS = {"gemma4_text": 4096, "minimax_m3": 4096, "xlm-roberta_classifier": 4096}
"""Tokens with which the cases of a row stay clear of the tolerance: other sizes draw other weights."""

TEXT = "The lazy dog sat by 3 rivers; def f(x): return x + 1 -- and then, in 1984, it rained over the green hills."


@dataclass(frozen=True)
class ArchCase:
    """One model to build.

    Attributes:
        id: the row, and behind a slash what differs from the row's base case.
        row: id of the row in aprfmt.arch.table.ARCHITECTURES.
        config_class, model_class: names in transformers; without a `config_class` it has no such network.
        config: what differs from DIMS; `vocab_size` only where it is larger than the tokenizer. Without a
            `config_class` the whole config.json but for `architectures`; VOCAB stands for the tokenizer's size.
        tokenizer: which real tokenizer the folder gets.
        llama_cpp_cannot: why llama.cpp's runtime cannot compute this model; empty where it can.
        kind: what is compared: "causal" logits, "encoder" and "states" (of a decoder) the last hidden states; "rank"
            and "rank_decoder" the scores of a text; of an encoder-decoder, whose decoder reads the text backwards,
            "seq2seq" logits, "decoder" the decoder's last hidden states; of a "draft", which needs another model to
            compute, nothing.
        model_options: keyword arguments of the model class.
        dtype: of the saved tensors.
        wrapped: whether the row's network is the language model inside this one, or comes back as one of another class.
        begins: of a `wrapped` case that transformers does not have: beginnings of the row's names -> the checkpoint's.
        beside: of such a case: the tensors that are none of the language model, and their shapes.
        renames: patterns of the names that transformers saves, and what published checkpoints have instead.
        own_head: whether the checkpoint has a head of its own where the class would share the embedding.
        swapped: pattern of tensors that are published with the other order of their last two dimensions than
            transformers saves them in; it reads both.
        target: of a draft model: what the config.json of the model that it drafts for says, beside DIMS.
        optional: tensors of the row that the network need not have, with their shapes.
    """

    id: str
    row: str
    config_class: str
    model_class: str
    config: dict[str, Any] = field(default_factory=dict)
    tokenizer: str = "smollm2"
    llama_cpp_cannot: str = ""
    kind: str = "causal"
    model_options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    wrapped: bool = False
    begins: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    own_head: bool = False
    swapped: str = ""
    target: Mapping[str, Any] = field(default_factory=dict, repr=False)
    optional: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    renames: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def base(self) -> bool:
        """Whether this is the row's base case."""
        return "/" not in self.id

    @property
    def computable(self) -> bool:
        """Whether transformers has the network; where not, no logits can be compared."""
        return bool(self.config_class)


@cache
def all_cases() -> tuple[ArchCase, ...]:
    """Every case of every file. Raises ValueError for an id that occurs twice."""
    cases: list[ArchCase] = []
    for name in CASE_FILES:
        cases += import_module(f"arch_cases_{name}").CASES
    ids = [case.id for case in cases]
    if twice := sorted({i for i in ids if ids.count(i) > 1}):
        raise ValueError(f"cases that occur twice: {', '.join(twice)}")
    return tuple(cases)


def has_gguf(row: str) -> bool:
    """Whether llama.cpp has a network for a row; a GGUF of any other is refused."""
    from aprfmt.arch.loaders import loader_of
    from aprfmt.arch.table import ARCHITECTURES

    return loader_of(ARCHITECTURES[row].gguf) is not None


def find_case(case_id: str) -> ArchCase:
    """The case of that id."""
    return next(case for case in all_cases() if case.id == case_id)


def n_kept(case: ArchCase, limit: int | None) -> int | None:
    """How many tokens a case has where others have the first `limit` of their tokenizer; None: all of it."""
    if limit is None or not WHOLE_TOKENIZERS.isdisjoint((case.id, case.row)):
        return None
    return max(limit, LEAST_TOKENS.get(case.row, 0))


def tokenizer_files(name: str, limit: int | None = None) -> dict[str, bytes]:
    """The files of a real tokenizer by their names, out of the material cache.

    With `limit` those of GGUF_TOKENIZERS keep only their first tokens, and the merges among them: a small model loads
    and converts several times as fast, and has the same kind of tokenizer.
    """
    if name in FOLDER_TOKENIZERS:
        return {path.name: path.read_bytes() for path in (CACHE / "tokenizers" / name).iterdir()}
    return dict(_made_files(name, limit))


@cache
def _made_files(name: str, limit: int | None) -> dict[str, bytes]:
    if name == RWKV:
        return _rwkv_files(limit)
    if limit is not None:
        files = _made_files(name, None)
        return {**files, "tokenizer.json": _cut(files["tokenizer.json"], limit)}
    import aprfmt
    from aprfmt.tokenizer.hf_write import to_hf_files

    with aprfmt.open(CACHE / GGUF_TOKENIZERS[name]) as model:
        tokenizer = model.tokenizer
        assert tokenizer is not None
        return to_hf_files(tokenizer)


def _rwkv_files(limit: int | None) -> dict[str, bytes]:
    """The vocabulary, whose token 261 is the end of a turn, as in published ones, and a tokenizer.json of the same."""
    from rank_files import ranks_of, rwkv_file

    from aprfmt.tokenizer import hf_write, rwkv
    from aprfmt.tokenizer.hf_algorithms import read_rwkv

    ranks = ranks_of(tokenizer_files("gpt4o")["tokenizer.json"], limit or 65_000)
    longer = [token for token in ranks if len(token) > 1 and token != b"\n\n"]
    vocabulary = rwkv_file([*longer[:4], b"\n\n", *longer[4:]])
    made = hf_write.to_hf_files(read_rwkv(vocabulary.decode(), rwkv.FILE_NAME))
    return {**made, rwkv.FILE_NAME: vocabulary}


def _cut(data: bytes, limit: int) -> bytes:
    value = json.loads(data)
    model = value["model"]
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < limit}
    if "merges" in model:
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        known = set(model["vocab"])
        model["merges"] = [pair for pair in pairs if known.issuperset((*pair, "".join(pair)))]
    return json.dumps(value).encode()


def write_tokenizers(folder: Path, names: Sequence[str], limit: int | None = None) -> dict[str, Path]:
    """Folders with the files of the named tokenizers, below `folder`; those already there are kept."""
    for name in names:
        if not (folder / name).is_dir():
            parts = folder / f".{name}.{os.getpid()}"
            parts.mkdir(parents=True)
            for file, data in tokenizer_files(name, limit).items():
                (parts / file).write_bytes(data)
            parts.rename(folder / name)
    return {name: folder / name for name in names}


def write_checkpoint(case: ArchCase, folder: Path, tokenizers: Mapping[str, Path], seed: int = 0) -> None:
    """Writes the Hugging Face folder of a case that transformers does not have: config.json, tensors of the row."""
    import torch
    from safetensors.torch import save_file

    source = tokenizers[case.tokenizer]
    folder.mkdir(parents=True, exist_ok=True)
    config = plain_config(case, n_tokens(source))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for path in source.iterdir():
        shutil.copy(path, folder / path.name)
    torch.manual_seed(seed)
    tensors = {}
    target = {**DIMS, **case.target} if case.target else None
    needed = row_tensors(config, target=target, given=case.optional)
    for name, shape in (*needed, *case.optional.items(), *case.beside.items()):
        tensor = torch.empty(shape)
        _fill(name, tensor)
        if name == "d2t":
            tensors[name] = torch.arange(*shape)  # token i of the draft is token 2 i of the other model
            continue
        begin = next((b for b in case.begins if name.startswith(b)), "")
        spelled = name if name in case.beside else case.begins.get(begin, "") + name.removeprefix(begin)
        tensors[spelled] = tensor.to(getattr(torch, case.dtype))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def write_target(case: ArchCase, folder: Path, tokenizers: Mapping[str, Path]) -> None:
    """Writes what a conversion of the draft model of `case` reads of the model that it drafts for, weights apart."""
    source = tokenizers[case.tokenizer]
    folder.mkdir(parents=True, exist_ok=True)
    config = {**DIMS, "vocab_size": n_tokens(source), **case.target}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for path in source.iterdir():
        shutil.copy(path, folder / path.name)


def plain_config(case: ArchCase, vocab_size: int) -> dict[str, Any]:
    """The config.json of a case that transformers does not have."""
    config = {"architectures": [case.model_class], "torch_dtype": case.dtype, **case.config}
    return _filled_in(config, vocab_size)


def whole_config(case: ArchCase, vocab_size: int) -> dict[str, Any]:
    """The same, completed by what a draft model has of the model that it drafts for."""
    from aprfmt.arch.hparams import from_hf_config, with_target
    from aprfmt.arch.table import ARCHITECTURES

    config = plain_config(case, vocab_size)
    if not case.target:
        return config
    h = from_hf_config(config)
    whole = with_target(h, ARCHITECTURES[case.row], {**DIMS, **case.target}) or h
    return config | {key: value for key, value in whole.extra.items() if key not in h.extra}


def _filled_in(config: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """`config` with the size of the vocabulary where it says VOCAB."""
    return {
        key: _filled_in(value, vocab_size) if isinstance(value, dict) else vocab_size if value == VOCAB else value
        for key, value in config.items()
    }


def row_tensors(
    config: Mapping[str, Any],
    layers: Sequence[int] | None = None,
    also: Sequence[str] = (),
    target: Mapping[str, Any] | None = None,
    given: Collection[str] = (),
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors that the row of this config asks for. Raises ValueError for an unknown size.

    Those that are `given` are left out.

    `layers` gives those of these layers alone, `also` names optional modules that are made there.
    `target` is the config.json of the model that a draft model drafts for.
    """
    from aprfmt.arch import names
    from aprfmt.arch.grammar import evaluate, has_layer, is_needed, shape_of, sizes_of
    from aprfmt.arch.hparams import from_hf_config, with_target
    from aprfmt.arch.table import ARCHITECTURES

    h = from_hf_config(dict(config))
    h = (with_target(h, ARCHITECTURES[str(h.architecture)], target) if target else None) or h
    row, made = ARCHITECTURES[str(h.architecture)], set[str]()
    for part in row.tensors:
        in_layer = "{n}" in part.hf[0]
        module = part.hf[0].rpartition(".{n}.")[2].rpartition(".")[0]
        for layer in (
            (layers or range(evaluate(part.depth, sizes_of(h)) or 0)) if in_layer else () if layers else (None,)
        ):
            taken = made & {*names.gguf_names(part, layer, h)}
            if (
                taken
                or part.pack  # the same in floats stands beside it
                or not (is_needed(row, part.need, h) or (in_layer and module in also))
                or (layer is not None and not has_layer(part.layers, h, layer))
            ):
                continue
            made |= {*names.gguf_names(part, layer, h)}
            for template, dims in zip(part.hf, part.dims * (len(part.hf) // len(part.dims)), strict=True):
                shape = shape_of(dims, sizes_of(h, layer))
                wanted = [name for name in names.expand(part, template, h, layer) if name not in given]
                if None in shape and wanted:
                    raise ValueError(f"{template}: {dims} is not known: {shape}")
                for name in wanted:
                    yield name, tuple(size for size in shape if size is not None)


def build(case: ArchCase, folder: Path, tokenizers: Mapping[str, Path], seed: int = 0) -> Any:
    """Writes the Hugging Face folder of the case; returns the transformers model (float32, eval)."""
    import torch

    source = tokenizers[case.tokenizer]
    config, model = make_model(case, n_tokens(source))
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    for path in source.iterdir():
        shutil.copy(path, folder / path.name)
    ids = token_ids(folder) if case.kind != "draft" else []
    for attempt in range(20):
        torch.manual_seed(1000 * seed + attempt)
        randomise(model)
        model.to(getattr(torch, case.dtype)).to(torch.float32)
        if case.kind in (*OF_STATES, *OF_TEXTS, "draft") or _clear_winners(model, inputs(ids, case.kind)):
            break
    model.to(getattr(torch, case.dtype)).save_pretrained(folder)
    if case.swapped:
        _swap(folder / "model.safetensors", case.swapped)
    if case.renames:
        _rename(folder / "model.safetensors", case.renames)
    return model.to(torch.float32)


def make_model(case: ArchCase, vocab_size: int) -> tuple[Any, Any]:
    """Config and model (eval) of a case, as transformers initialises them."""
    import torch

    config = make_config(case, vocab_size)
    config._attn_implementation = "eager"
    model = getattr(quiet_transformers(), case.model_class)(config, **case.model_options).eval()
    if case.own_head:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    return config, model


def _rename(path: Path, renames: Sequence[tuple[str, str]]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    for pattern, instead in renames:
        tensors = {re.sub(pattern, instead, name): tensor for name, tensor in tensors.items()}
    save_file(tensors, path, {"format": "pt"})


def _swap(path: Path, pattern: str) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {
        name: tensor.transpose(-1, -2).contiguous() if re.fullmatch(pattern, name) else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})


OF_TEXTS = ("rank", "rank_decoder")
"""Kinds of cases that compare the scores of a text."""


def _clear_winners(model: Any, given: Mapping[str, Any]) -> bool:
    """Whether no position has a near-tie at the top, which llama.cpp's half-precision tables might turn round."""
    import torch

    with torch.no_grad():
        logits = output_of(model, given)[0]
    top = logits.topk(2, -1).values
    return bool((top[:, 0] - top[:, 1]).min() > 2e-3 * logits[logits > _MASKED].std())


def make_config(case: ArchCase, vocab_size: int) -> Any:
    """The transformers config of a case."""
    return getattr(quiet_transformers(), case.config_class)(**config_arguments(case, vocab_size))


def config_arguments(case: ArchCase, vocab_size: int) -> dict[str, Any]:
    """What the config class is given: DIMS as far as it knows the key, then what the case says.

    A wrapper's own keys are not those of its language model, so that such a case says all of them. transformers
    completes what it is given: the value is the caller's.
    """
    if case.wrapped:
        return _filled_in(deepcopy(case.config), vocab_size)
    config_class = getattr(quiet_transformers(), case.config_class)
    known = {*config_class().to_dict(), *getattr(config_class, "attribute_map", {})}
    sizes = {**DIMS, "vocab_size": vocab_size, "vocab_size_per_layer_input": vocab_size}
    dims = {key: value for key, value in sizes.items() if key in known}
    return {**dims, **deepcopy(case.config)}


def n_tokens(folder: Path) -> int:
    """Rows that an embedding needs for the tokenizer in `folder`."""
    from tokenizers import Tokenizer

    return 1 + max(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True).values())


def randomise(model: Any) -> None:
    """Random values for every parameter and every saved buffer, none of them 0 or 1, logits of a sane size."""
    import torch

    saved = set(model.state_dict())
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in saved and (tensor.is_floating_point() or name.endswith(TABLE)):
                _fill(name, tensor)


TABLE = "tid2eid"
"""How tensors are called that name the experts of each token."""


def _fill(name: str, tensor: Any) -> None:
    if name.endswith(TABLE):  # as many different experts of four as there are columns
        tensor.copy_((_steps(len(tensor))[:, None] * 3 // 2 + _steps(tensor.shape[1])) % 4)
    elif name.endswith(("A_log", "dt_bias")):
        tensor.uniform_(-0.6, 1.2)
    elif name.endswith("correction_bias"):
        tensor.uniform_(0.05, 0.4)
    elif name.endswith("bias") and "router" not in name and tensor.ndim == 1:
        tensor.normal_(0.0, 0.3)
    elif tensor.ndim >= 2:
        tensor.normal_(0.0, 0.2)
    elif name.endswith("weight") or name.endswith(".D"):
        tensor.uniform_(0.5, 1.5)
    else:
        tensor.normal_(0.0, 0.5)


def _steps(n: int) -> Any:
    import torch

    return torch.arange(n)


def token_ids(folder: Path, length: int = 24) -> list[int]:
    """Real token ids of a text, `length` of them; longer than any sliding window of the folder's config."""
    from tokenizers import Tokenizer

    config = json.loads((folder / "config.json").read_text())
    windows = [config.get(key) for key in ("sliding_window", "local_attention", "attention_chunk_size")]
    length = max(length, *(3 * w for w in windows if isinstance(w, int) and w < 100), 0)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = []
    while len(ids) < length:
        ids += tokenizer.encode(TEXT, add_special_tokens=False).ids
    return ids[:length]


_MASKED = -1e30
"""Below it stand logits of tokens that a network never gives; llama.cpp leaves them out of its last position alone."""


def unwrapped(h: Hyperparams, other: Hyperparams) -> Hyperparams:
    """`h` without what tells a wrapper from a folder of its language model alone, whose row may be a plainer one."""
    same = h.architecture == other.architecture
    extra = {key: value for key, value in h.extra.items() if same and key != "text_of"}
    return replace(
        h,
        architecture=h.architecture if same else None,
        hf_architecture=None,
        hf_model_type=None,
        rope_type=h.rope_type if same else None,
        extra=extra,
    )


def top1_equal(a: Any, b: Any) -> bool:
    """Whether every position has the same most likely token."""
    import numpy as np

    if a.shape != b.shape:
        return False
    return bool((np.where(b < _MASKED, -np.inf, a).argmax(-1) == b.argmax(-1)).all())


class Inline:
    """The process that computes with torch, in this one: a test does not wait for its imports."""

    def __init__(self, arguments: list[str]) -> None:
        assert arguments == ["-m", "aprtrain.reference"]

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, str]:
        return reference._answer(**json.loads(json.dumps(request)))

    def close(self) -> None:
        pass
