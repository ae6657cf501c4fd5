"""Small multimodal models of every row of the table of towers, and what they are held against.

A case is built by transformers where it has the class. Where it has not, the case gives the published config.json at
small sizes, and the checkpoint is made of what the rows name. Values are multiples of 1/256, which float16 holds too,
so that a GGUF gives each of them back.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from arch_models import _fill, n_tokens, quiet_transformers, randomise

CASE_FILES = sorted(path.stem for path in Path(__file__).parent.glob("tower_cases_*.py"))
"""Modules with CASES."""

_COUNTS = (".running_var", ".cluster_usage")
"""Endings of tensors whose values are above 0."""

VOCAB = -1
"""Stands for the tokenizer's size in a config."""

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}
"""A small language model of most families."""

IMAGES: dict[str, Any] = {"image_mean": [0.5, 0.375, 0.25], "image_std": [0.5, 0.625, 0.75]}
"""What a preprocessor_config.json says at least."""


@dataclass(frozen=True)
class TowerCase:
    """One model to build.

    Attributes:
        id: the row of the table of towers, and behind a slash what differs from its base case.
        model_class: what config.json names.
        config: of the transformers class `config_class`, or, without one, the whole config.json.
        config_class: name in transformers; "" where it has no such network.
        preprocessor: what preprocessor_config.json says.
        processor: what processor_config.json says; there is none without.
        renames: patterns of the names that transformers saves, and what published checkpoints have instead; the
            converter knows only those.
        drops: pattern of names that published checkpoints lack and transformers saves.
        no_config: whether the checkpoint is published without a config.json.
        files: further JSON files of the folder, by their names relative to it; a subfolder of theirs holds the tensors
            whose names begin with its own, in a model.safetensors.
        tokens: contents of special tokens that the tokenizer needs.
        extra: tensors of a made checkpoint that no row names, or whose sizes no config tells, with their shapes.
        differs: patterns of keys and tensors in which llama.cpp's converter differs -> why.
        rounds: pattern of tensors of the GGUF that are computed (roots, sines, exponentials), whose last bits are those
            of a library: a millionth of the largest value may part them from the converter's.
        converter_cannot: why the converter does not convert the model; empty where it does.
        patches: edits of the converter that is asked, each of which takes only away that it knows one size, or lets
            it take the name that a sibling's tensor has.
        patched: why it is edited; it must fail as it is.
        lost: pattern of a source's tensors that a folder made of two GGUFs lacks or has in part, as these hold
            what is made of them.
        text_cannot: why the language model has no GGUF of ours; empty where it has.
        feed: how transformers is given an image or a sound (tower_feed.FEEDS), to be compared with mtmd; "" where it
            has no such network.
        inner: class in transformers of the part that sees and hears, "thinker" of the whole; "" for the whole.
        named: the class in config.json where that is another name of `model_class`, which transformers lacks.
        images: (height, width) of three images that no preprocessor changes, or numbers of samples of two sounds.
        mtmd_cannot: why mtmd does not compute what transformers computes, or, without a feed, why it is not asked;
            empty where it does.
    """

    id: str
    model_class: str
    config: dict[str, Any]
    config_class: str = ""
    preprocessor: dict[str, Any] = field(default_factory=lambda: dict(IMAGES))
    processor: dict[str, Any] = field(default_factory=dict)
    renames: tuple[tuple[str, str], ...] = ()
    drops: str = ""
    no_config: bool = False
    files: Mapping[str, Any] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()
    extra: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)
    rounds: str = ""
    converter_cannot: str = ""
    patches: tuple[tuple[str, str, str], ...] = ()
    patched: str = ""
    lost: str = ""
    text_cannot: str = ""
    feed: str = ""
    inner: str = ""
    named: str = ""
    images: tuple[tuple[int, ...], ...] = ((56, 56), (56, 56), (56, 56))
    mtmd_cannot: str = ""

    @property
    def row(self) -> str:
        """Id of the row."""
        return self.id.partition("/")[0]


def all_tower_cases() -> tuple[TowerCase, ...]:
    """Every case of every file. Raises ValueError for an id that occurs twice."""
    cases: list[TowerCase] = []
    for name in CASE_FILES:
        cases += import_module(name).CASES
    ids = [case.id for case in cases]
    if twice := sorted({i for i in ids if ids.count(i) > 1}):
        raise ValueError(f"cases that occur twice: {', '.join(twice)}")
    return tuple(cases)


def build_tower(case: TowerCase, folder: Path, tokenizer: Path, *, published: bool = False) -> None:
    """Writes the folder of the case; `published` with the names of published checkpoints."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    for path in tokenizer.iterdir():
        shutil.copy(path, folder / path.name)
    size = _add_tokens(folder, case.tokens, n_tokens(tokenizer))
    torch.manual_seed(0)
    if case.config_class:
        transformers = quiet_transformers()
        config = getattr(transformers, case.config_class)(**_filled(case.config, size))
        config._attn_implementation = "eager"
        model = getattr(transformers, case.model_class)(config).eval()
        randomise(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tables of complex numbers are made again, not saved
            model.to(torch.float32).save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        if case.named:
            body = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(body | {"architectures": [case.named]}, indent=2))
    else:
        body = {"architectures": [case.model_class], **_filled(case.config, size)}
        (folder / "config.json").write_text(json.dumps(body, indent=2))
        tensors = dict(_made(case, body))
        if case.no_config:
            (folder / "config.json").unlink()
    tensors = {name: _on_grid(tensor) for name, tensor in tensors.items()}
    tensors |= {name: tensor.abs() + 0.5 for name, tensor in tensors.items() if name.endswith(_COUNTS)}
    # Bounds that cut something off, the lower below the upper.
    tensors |= {name: -tensor.abs() - 0.5 for name, tensor in tensors.items() if name.endswith("put_min")}
    tensors |= {name: tensor.abs() + 0.5 for name, tensor in tensors.items() if name.endswith("put_max")}
    for pattern, instead in case.renames if published else ():
        tensors = {re.sub(pattern, instead, name): tensor for name, tensor in tensors.items()}
    if published and case.drops:
        tensors = {name: tensor for name, tensor in tensors.items() if not re.search(case.drops, name)}
    for name, told in case.files.items():
        place = name.partition("/")[0]
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(told, indent=2))
        inside = {name: tensors.pop(name) for name in list(tensors) if name.startswith(f"{place}.")}
        inside = {name.removeprefix(f"{place}."): tensor for name, tensor in inside.items()}
        save_file(inside, folder / place / "model.safetensors", {"format": "pt"})
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name, told in (("preprocessor_config.json", case.preprocessor), ("processor_config.json", case.processor)):
        if told:
            (folder / name).write_text(json.dumps(told, indent=2))


def _on_grid(tensor: Any) -> Any:
    return ((tensor * 256).round() / 256).contiguous() if tensor.is_floating_point() else tensor


def _filled(config: dict[str, Any], size: int) -> dict[str, Any]:
    return {
        key: _filled(value, size) if isinstance(value, dict) else size if value == VOCAB else value
        for key, value in config.items()
    }


def _add_tokens(folder: Path, tokens: tuple[str, ...], size: int) -> int:
    """Gives the tokenizer these special tokens, behind its last; returns how many tokens there are."""
    path = folder / "tokenizer.json"
    body = json.loads(path.read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    body["added_tokens"] += [{"id": size + i, "content": token, **flags} for i, token in enumerate(tokens)]
    path.write_text(json.dumps(body))
    return size + len(tokens)


def _made(case: TowerCase, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Random tensors of the language model and of the tower, by what the rows name."""
    import torch
    from arch_models import row_tensors

    from aprfmt.arch.hparams import from_hf_config
    from aprfmt.arch.table import TOWERS
    from aprfmt.arch.tower_table import PREPROCESSOR, from_config
    from aprfmt.canonical.tower import TowerPart, checkpoint_spelling

    row = TOWERS[case.row]
    told = {**case.preprocessor, **case.processor}
    text = from_hf_config(config)
    beside = {key: case.files[name] for key, name in row.files.items()}
    h = from_config({**config, **beside, PREPROCESSOR: told}, row, text.hidden_size)
    part = TowerPart(row, h)
    shapes = {part.text_name(name): shape for name, shape in row_tensors(config)}
    shapes |= {checkpoint_spelling(row, h, name): shape for name, shape in tower_tensors(row, h, case.extra)}
    shapes |= case.extra
    for name, shape in shapes.items():
        tensor = torch.empty(shape)
        _fill(name, tensor)
        yield name, tensor


def tower_tensors(row: Any, h: Any, known: Mapping[str, tuple[int, ...]] = {}) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors that a row asks for, but the `known`. Raises ValueError for an unknown size."""
    from aprfmt.arch import names
    from aprfmt.arch.grammar import evaluate, has_layer, is_needed, shape_of, sizes_of

    made: set[str] = set()
    for part in row.tensors:
        depth = evaluate(part.depth, sizes_of(h)) if "{n}" in part.hf[0] else None
        for layer in range(depth or 0) if "{n}" in part.hf[0] else (None,):
            taken = made & {*names.gguf_names(part, layer, h)}
            if (
                taken
                or not is_needed(row, part.need, h)
                or (layer is not None and not has_layer(part.layers, h, layer))
            ):
                continue
            made |= {*names.gguf_names(part, layer, h)}
            for template, dims in zip(part.hf, part.dims * (len(part.hf) // len(part.dims)), strict=True):
                shape = shape_of(dims, sizes_of(h, layer))
                for name in names.expand(part, template, h, layer):
                    if name in known:
                        continue
                    if None in shape:
                        raise ValueError(f"{template}: {dims} is not known: {shape}")
                    yield name, tuple(size for size in shape if size is not None)
