"""Writes src/aprfmt/arch/families/plain.jsonl: rows of networks that llama.cpp does not run.

    python tools/plain_rows.py [CLASS ...]

A CLASS of transformers gets a line, or a new one in place of its old; without any, all lines are written again. Two
tiny models of different sizes say which tensors the network has, and what of its config.json gives each dimension; it
is built again with every switch of the config turned over, to see which tensors depend on it. Sizes of a class that the
usual keys do not reach are in tests/support/arch_cases_plain.py. Of a network that only wrappers have, CLASS is the
language model inside (MuseSparkTextModel): the line is of that model with a head.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import chain, combinations
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tools")]

from arch_cases_plain import SIZES, SMALL  # noqa: E402
from arch_models import quiet_transformers  # noqa: E402

from aprfmt.arch.families.plain import LINES, PlainLine  # noqa: E402
from aprfmt.arch.grammar import evaluate, size_words  # noqa: E402
from aprfmt.arch.row import HEAD, OPTIONAL, OUTPUT, REQUIRED  # noqa: E402

Shapes = dict[str, tuple[int, ...]]
FIELDS = {
    "num_layers": ("decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "num_layers"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "context_length"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "intermediate_size": ("decoder_ffn_dim", "intermediate_size", "ffn_dim", "n_inner", "dff", "dim_ff", "d_inner"),
    "num_heads": (
        "decoder_attention_heads",
        "num_decoder_attention_heads",
        "num_attention_heads",
        "n_head",
        "attention_heads",
        "num_heads",
    ),
    "num_kv_heads": ("num_key_value_heads",),
    "rms_norm_eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"),
    "vocab_size": ("vocab_size",),
}
"""Field of Hyperparams -> its spellings."""
FIRST = {
    "num_layers": 2, "max_position_embeddings": 58, "hidden_size": 96, "intermediate_size": 112, "num_heads": 4,
    "num_kv_heads": 2, "vocab_size": 500, "head_dim": 20,
}  # fmt: skip
SECOND = FIRST | {"max_position_embeddings": 74, "hidden_size": 128, "intermediate_size": 144, "vocab_size": 520,
                  "num_heads": 16, "num_kv_heads": 4, "head_dim": 28}  # fmt: skip
KINDS = {bool: "bool", int: "i32", float: "f32", str: "str"}
WORDS = {"vocab_size": "vocab", "hidden_size": "hidden", "intermediate_size": "ffn", "num_layers": "layers",
         "max_position_embeddings": "positions", "num_heads": "heads", "num_kv_heads": "kv_heads"}  # fmt: skip
IGNORED = {"bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "use_cache", "output_attentions"}


WHOLE = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MASKED_LM")
"""Tables with the class of a model type's whole network; a decoder of the same type is a part of it."""
WANTED = {"add_cross_attention": {"is_decoder": True}}
"""Switch -> what else the class then wants."""


class UnfitError(Exception):
    """A class that cannot be described by a line; the message says why."""


class Probe:
    """A class of transformers, its tiny models and the shapes of its full one."""

    def __init__(self, name: str, like: str = "") -> None:
        self.library = quiet_transformers()
        self.chosen = SIZES.get(like or name, {})
        self.model_class = getattr(self.library, name)
        self.config_class = self.model_class.config_class
        own, plain = self.config_class(), self.library.PretrainedConfig()
        self.names = dict(self.config_class.attribute_map)
        self.fields = {key: value for key, value in own.to_dict().items() if key not in plain.to_dict()}
        self.sizes = {field: key for field, spelled in FIELDS.items() if (key := self._spelled(spelled))}
        self.tied = getattr(own, "tie_word_embeddings", None)
        self.prefix = str(self.model_class.base_model_prefix)
        self.inside = name.endswith("TextModel") and not like

    def _spelled(self, spelled: Sequence[str]) -> str:
        for name in (str(self.names.get(name, name)) for name in spelled):
            if name in self.fields or name == "vocab_size":
                return name
        return ""

    def config(self, sizes: Mapping[str, int], **more: Any) -> Any:
        """The config of a tiny model."""
        values = {key: sizes[field] for field, key in self.sizes.items() if field in sizes}
        if isinstance(self.fields.get("head_dim"), int):
            values["head_dim"] = sizes["head_dim"]
        values |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        counts = ("per_tok", "topk", "group", "first_k", "layers", "window", "rotary", "token_id")
        values |= {
            key: value if sizes is FIRST or any(word in key for word in counts) else value * 2
            for key, value in SMALL.items() if key in self.fields and key not in values
        }  # fmt: skip
        return self.config_class(**{**values, **self.chosen, **more})

    def shapes(self, sizes: Mapping[str, int], **more: Any) -> Shapes:
        """Names and shapes of a saved model."""
        from safetensors import safe_open

        untied = {"tie_word_embeddings": False} if self.tied is not None else {}
        config = self.config(sizes, **{**untied, **more})
        model = self.model_class(config)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            found: Shapes = {}
            for path in Path(folder).glob("*.safetensors"):
                with safe_open(path, "pt") as file:
                    found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
                    if not more:
                        self.embedding = self._name_of(model.get_input_embeddings(), file)
                        self.head = self._name_of(model.get_output_embeddings(), file)
        if self.inside:
            found = {f"model.{name}": shape for name, shape in found.items()}
            self.prefix, self.embedding, self.head = "model", "model.embed_tokens.weight", "lm_head.weight"
            if not getattr(config, "tie_word_embeddings", False):
                found[self.head] = (config.vocab_size, config.hidden_size)
        if self.prefix not in _firsts(found):  # a class may save its model under another name
            self.prefix = next(iter(_firsts([self.embedding])), "")
        return found

    def full_shapes(self) -> Shapes:
        """Shapes of the full model by template, of those that all tensors of a name share.

        Raises UnfitError if it has tensors that the tiny model has not: SIZES then gives that layers of each kind.
        """
        if lost := _kinds(self.full) - _kinds(self.planned(self.config(FIRST))):
            raise UnfitError(f"the tiny model lacks {sorted(lost)[0]} and {len(lost) - 1} more")
        found: dict[str, set[tuple[int, ...]]] = {}
        for name, shape in self.full.items():
            found.setdefault(template_of(name), set()).add(shape)
        return {name: next(iter(shapes)) for name, shapes in found.items() if len(shapes) == 1}

    @cached_property
    def full(self) -> Shapes:
        """Names and shapes of the model that the config class makes by itself."""
        return self.planned(self.config_class())

    def planned(self, config: Any) -> Shapes:
        """Names and shapes that a checkpoint of the config would have; no weights are made."""
        import torch
        from transformers.core_model_loading import revert_weight_conversion

        with torch.device("meta"):
            model = self.model_class(config)
        saved = revert_weight_conversion(model, model.state_dict())
        return {f"model.{name}" if self.inside else name: tuple(weight.shape) for name, weight in saved.items()}

    @staticmethod
    def _name_of(module: Any, file: Any) -> str:
        """The name under which the weight of a module is stored, which may not be the model's own; "" without one."""
        weight = getattr(module, "weight", None)
        return next((name for name in file.keys() if weight is not None and _is_stored(weight, file, name)), "")  # noqa: SIM118

    def is_shared(self) -> bool:
        """Whether classes of other networks have the same model type: encoders, encoder-decoders, wrappers."""
        return self.model_class.__name__ not in next(self._tabled(*WHOLE), (self.model_class.__name__,))

    def same_network(self, tensors: Collection[str]) -> list[str]:
        """Other classes with the network whose tensors these are, but for heads and poolers: those of a decoder or an
        encoder, and the one without a head.
        """
        own = _body(tensors, f"{self.prefix}.")
        found = []
        for name in dict.fromkeys(name for names in self._tabled("MASKED_LM", "CAUSAL_LM", "") for name in names):
            if name != self.model_class.__name__:
                other = Probe(name, self.model_class.__name__)
                shapes = {template_of(tensor) for tensor in other.shapes(FIRST)}
                beginning = "" if name.endswith("Model") and self.prefix not in _firsts(shapes) else f"{self.prefix}."
                if own and _body(shapes, beginning) == own:
                    found.append(name)
        return found

    def _tabled(self, *tables: str) -> Iterator[tuple[str, ...]]:
        """The classes of the model type in tables of transformers ("MASKED_LM"; "" for those without a head)."""
        from transformers.models.auto import modeling_auto as auto

        for table in tables:
            known = getattr(auto, f"MODEL_FOR_{table}_MAPPING_NAMES" if table else "MODEL_MAPPING_NAMES")
            if self.config_class.model_type in known:
                names = known[self.config_class.model_type]
                yield (names,) if isinstance(names, str) else tuple(names)

    def has_nested_rope(self) -> bool:
        """Whether the rope parameters are those of layer types, which only the class itself reads."""
        stated = self.fields.get("rope_parameters")
        return isinstance(stated, dict) and any(isinstance(value, dict) for value in stated.values())

    def switches(self) -> Iterator[str]:
        """Switches of the config that may change the tensors."""
        yield from (
            name
            for name, value in self.fields.items()
            if isinstance(value, bool) and name not in IGNORED and "router_logits" not in name
        )


def _firsts(names: Collection[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def _body(names: Collection[str], beginning: str) -> set[str]:
    """The names inside a model without its head, without those of a pooler."""
    inside = {name.removeprefix(beginning) for name in names if name.startswith(beginning)}
    return {name for name in inside if "pooler" not in name.split(".")}


def _is_stored(weight: Any, file: Any, name: str) -> bool:
    same = tuple(file.get_slice(name).get_shape()) == tuple(weight.shape)
    return same and bool((file.get_tensor(name) == weight).all())


def template_of(name: str) -> str:
    """`model.layers.3.mlp.experts.0.up.weight` -> `model.layers.{n}.mlp.experts.{e}.up.weight`.

    Adapters that layers share are counted as experts are.
    """
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    for i in numbers:
        if "expert" in parts[i - 1] or parts[i - 1].endswith("_adapter_list"):
            parts[i] = "{e}"
        elif i == numbers[0]:
            parts[i] = "{n}"
    return re.sub(r"\bexpert_\d+", "expert_{e}", ".".join(parts))


def _kinds(shapes: Shapes) -> set[tuple[str, int]]:
    """Names and numbers of dimensions: of one name, layers of two kinds may have a matrix and a vector."""
    return {(template_of(name), len(shape)) for name, shape in shapes.items()}


def words_of(probe: Probe, sizes: Mapping[str, int] | None = None) -> dict[str, int]:
    """Words of sizes and their values for a tiny model, or for that of the class's own config."""
    config = (probe.config_class() if sizes is None else probe.config(sizes)).to_dict()
    words = {WORDS[field]: config.get(key) for field, key in probe.sizes.items() if field in WORDS}
    heads, hidden = words.get("heads"), words.get("hidden")
    head_dim = config.get("head_dim") or (hidden // heads if heads and hidden else None)
    if heads and head_dim:
        words |= {"head_dim": head_dim, "q": heads * head_dim, "kv": (words.get("kv_heads") or heads) * head_dim}
    words |= {name: config[name] for name in probe.fields if name in config and name not in {*IGNORED, *words}}
    return {name: value for name, value in words.items() if type(value) is int and value > 0}


def sizes_by_value(a: Mapping[str, int], b: Mapping[str, int]) -> Table:
    """What a dimension comes to in the two networks -> the sizes that give both values, the simplest first."""
    names = [name for name in dict.fromkeys((*USUAL, *a)) if name in a and name in b]
    pairs = {name: (Fraction(a[name]), Fraction(b[name])) for name in names}
    literals = [(str(n), (Fraction(n), Fraction(n))) for n in range(1, MAX_LITERAL + 1)]
    table: Table = {}
    for size, pair in chain(pairs.items(), _multiples(pairs), literals, _combined(pairs)):
        if pair[0] != pair[1] or size.isdigit():
            table.setdefault(pair, []).append(size)
    return table


class _Sizes:
    """Words for the dimensions of a class's tensors, from two tiny models and the names of its own, full one."""

    def __init__(self, probe: Probe) -> None:
        self.words = words_of(probe, FIRST)
        self.table = sizes_by_value(self.words, words_of(probe, SECOND))
        self.full = probe.full_shapes()
        self.full_words = words_of(probe)
        self._named: dict[str, tuple[int, str]] = {}

    def __call__(self, name: str, first: tuple[int, ...], second: tuple[int, ...]) -> str:
        """The shape of a tensor, in words that give all three shapes; `any_size` for a dimension without one.

        A bias is as long as its weight, which a switch of the config need not have turned on in the full model.
        """
        rows, of_weight = self._named.get(f"{name.removesuffix('.bias')}.weight", (0, ""))
        if name.endswith(".bias") and first == (rows,):
            return of_weight.partition(",")[0]
        full = self.full.get(name, ())
        known = full if len(full) == len(first) else (None,) * len(first)
        sizes = zip(zip(first, second, strict=True), known, strict=True)
        dims = ",".join(size_of(pair, self.table, of_full, self.full_words) for pair, of_full in sizes)
        self._named[name] = next(iter(first), 0), dims
        return dims


def size_of(
    values: tuple[int, int], table: Table, full: int | None = None, words: Mapping[str, int] | None = None
) -> str:
    """The simplest size that gives both values, and `full` for a network of these words; `any_size` without one."""
    sizes = table.get((Fraction(values[0]), Fraction(values[1])), [])
    known = words or {}
    return next(
        (one for one in sizes if full is None or size_words(one) - {*known} or evaluate(one, known) == full), UNKNOWN
    )


Table = dict[tuple[Fraction, Fraction], list[str]]
Pairs = Mapping[str, tuple[Fraction, Fraction]]
Sizes = Iterator[tuple[str, tuple[Fraction, Fraction]]]
"""Sizes and what they come to in the two networks."""
USUAL = ("hidden", "vocab", "ffn", "q", "kv", "head_dim", "heads", "kv_heads")


def _multiples(pairs: Pairs) -> Sizes:
    for name, (x, y) in pairs.items():
        for k in (2, 3, 4, 5, 6, 8):
            yield f"{k}*{name}", (k * x, k * y)
            yield f"{name}/{k}", (x / k, y / k)
        for k in (1, 2, 8):
            yield f"{name}+{k}", (x + k, y + k)


def _combined(pairs: Pairs) -> Sizes:
    for (one, (x, y)), (two, (v, w)) in combinations(pairs.items(), 2):
        yield f"{one}*{two}", (x * v, y * w)
        yield f"{one}+{two}", (x + v, y + w)
        if one.removesuffix("_start") == two.removesuffix("_end") != one:  # of layers that run several times
            yield f"2*{two}-2*{one}", (2 * v - 2 * x, 2 * w - 2 * y)
        if "heads" in pairs and {one, two} < _PARTS:  # of latent attention
            heads = pairs["heads"]
            yield f"heads*{one}+heads*{two}", (heads[0] * (x + v), heads[1] * (y + w))
        for k in (2, 3):
            yield f"{one}+{k}*{two}", (x + k * v, y + k * w)
            yield f"{k}*{one}+{two}", (k * x + v, k * y + w)
    for (one, (x, y)), (two, (v, w)) in combinations(pairs.items(), 2):
        yield f"{one}/{two}", (x / v, y / w)


_PARTS = {"qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
MAX_LITERAL = 4
"""Largest dimension that may be written as a number: the width of a convolution, a single value."""
UNKNOWN = "any_size"
"""The word of a size that no config gives: it is not checked."""


def line_of(name: str) -> PlainLine:
    """The line of a class. Raises UnfitError."""
    probe = Probe(name)
    shapes = probe.shapes(FIRST), probe.shapes(SECOND)
    first, second = map(_by_template, shapes)
    if first.keys() != second.keys():
        raise UnfitError("the sizes change the names of the tensors")
    dims = _Sizes(probe)
    tensors: dict[str, tuple[str, str]] = {
        found: (dims(found, first[found], second[found]), REQUIRED)
        for found in sorted(first, key=lambda name: name.endswith(".bias"))
    }
    tensors = {found: tensors[found] for found in first}
    second_shapes = [_of_other_rank(one) for one in shapes]
    tensors |= {
        found: (f"{tensors[found][0]}|{dims(found, second_shapes[0][found], second_shapes[1][found])}", REQUIRED)
        for found in second_shapes[0]
    }
    counts = _stacks(shapes[0])
    depth = {stack: _depth(layers, dims.words, alone=len(counts) == 1) for stack, layers in counts.items()}
    counts = {stack: dims.words["layers"] if depth[stack] == "layers" else n for stack, n in counts.items()}
    tensors |= {found: (tensors[found][0], OPTIONAL) for found in _not_in_all_layers(shapes[0], counts)}
    if not probe.inside:
        tensors |= {found: (tensors[found][0], OPTIONAL) for found in first.keys() - {*map(template_of, probe.full)}}
    tensors |= _switched(probe, tensors, dims, counts)
    if probe.tied is not None:
        kept = {template_of(tensor) for tensor in probe.shapes(FIRST, tie_word_embeddings=True)}
        tensors |= {found: _also(tensors[found], HEAD) for found in first.keys() - kept}
    inside = probe.prefix in _firsts(tensors)
    beginning = f"{probe.prefix}." if inside else ""
    tensors |= {found: _also(tensors[found], OUTPUT) for found in tensors if not found.startswith(beginning)}
    kinds = {key: KINDS[type(value)] for key, value in probe.fields.items() if type(value) in KINDS}
    kinds |= {key: "u32" for key in probe.fields if key not in kinds}
    rest = {key: kind for key, kind in kinds.items() if key not in {*probe.sizes.values(), *IGNORED}}
    kind = str(probe.config_class.model_type)
    shared = probe.is_shared()
    others = probe.same_network(first) if inside and not shared and not probe.inside else []
    return PlainLine(
        id=f"{kind}_decoder" if shared else kind,
        classes=[name.replace("TextModel", "ForCausalLM"), name] if probe.inside else [name, *others],
        prefix=beginning if others and probe.prefix != "model" else "",
        model_type=kind,
        shared=shared,
        sizes=probe.sizes,
        rope=not probe.has_nested_rope() and rest.pop("rope_parameters", None) is not None,
        config=rest,
        tensors=tensors,
        depth=depth,
        embedding=probe.embedding,
        head=probe.head,
    )


def _also(tensor: tuple[str, str], need: str) -> tuple[str, str]:
    """A tensor that is needed if `need` holds too."""
    dims, known = tensor
    if known == REQUIRED:
        return dims, need
    return dims, known if known == OPTIONAL or known.endswith(HEAD) else f"{known}&{need}"


def _by_template(shapes: Shapes) -> Shapes:
    """The shape that all tensors of a name have; 0 for a dimension that is not the same in each layer.

    Of a name with shapes of several numbers of dimensions, that of the first layer.
    """
    found: Shapes = {}
    for tensor, shape in shapes.items():
        other = found.setdefault(template_of(tensor), shape)
        if len(other) == len(shape):
            found[template_of(tensor)] = tuple(a if a == b else 0 for a, b in zip(other, shape, strict=True))
    return found


def _of_other_rank(shapes: Shapes) -> Shapes:
    """The shapes that `_by_template` leaves out. Raises UnfitError for a name with a third number of dimensions."""
    first = _by_template(shapes)
    others = {name: shape for name, shape in shapes.items() if len(shape) != len(first[template_of(name)])}
    found = _by_template(others)
    for tensor, shape in others.items():
        if len(shape) != len(found[template_of(tensor)]):
            raise UnfitError(f"{template_of(tensor)} has vectors, matrices and more")
    return found


def _layer(name: str) -> set[int]:
    numbers = [int(part) for before, part in zip(("", *name.split(".")), name.split("."), strict=False)
               if part.isdigit() and "expert" not in before]  # fmt: skip
    return {numbers[0]} if numbers else set()


def _stacks(shapes: Shapes) -> dict[str, int]:
    """The part of a name before the number of a layer -> how many layers there are."""
    found: dict[str, int] = {}
    for tensor in shapes:
        before, numbered, _ = template_of(tensor).partition("{n}")
        if numbered:
            found[before] = max(found.get(before, 0), *(layer + 1 for layer in _layer(tensor)))
    return found


def _not_in_all_layers(shapes: Shapes, stacks: Mapping[str, int]) -> Iterator[str]:
    counted: dict[str, set[int]] = {}
    for tensor in shapes:
        counted.setdefault(template_of(tensor), set()).update(_layer(tensor))
    for found, layers in counted.items():
        if "{n}" in found and layers != set(range(stacks[found.partition("{n}")[0]])):
            yield found


def _depth(layers: int, words: Mapping[str, int], *, alone: bool) -> str:
    """What counts so many layers. Of several stacks one may have tensors in some of the layers only."""
    if words.get("layers") == layers:
        return "layers"
    counts = (name for name, value in words.items() if value == layers and re.search(r"(layers|groups)$", name))
    if (name := next(counts, "")) != "":
        return name
    if not alone and layers < words.get("layers", 0):
        return "layers"
    if words.get("layers") == 2 * layers:  # its config.json counts attention and MLP apart
        return "layers/2"
    raise UnfitError(f"nothing counts {layers} layers")


def _switched(
    probe: Probe, tensors: Mapping[str, tuple[str, str]], dims: _Sizes, stacks: Mapping[str, int]
) -> dict[str, tuple[str, str]]:
    """The tensors that a switch of the config adds or takes away, by the name itself where it is of no known stack."""

    def spell(name: str) -> str:
        template = template_of(name)
        return template if "{n}" not in template or template.partition("{n}")[0] in stacks else name

    changed: dict[str, tuple[str, str]] = {}
    for switch in probe.switches():
        value = not getattr(probe.config(FIRST), switch)
        turned = {switch: value, **WANTED.get(switch, {})}
        try:
            first = probe.shapes(FIRST, **turned)
            added = {*map(spell, first)} - tensors.keys()
            other = first, probe.shapes(SECOND, **turned) if added else first
        except Exception:
            continue  # the class refuses it, or has no such network
        new = {spell(name): (shape, other[1][name]) for name, shape in other[0].items()}
        need = switch if value else f"!{switch}"
        partial = {*_not_in_all_layers({n: shape for n, shape in first.items() if spell(n) != n}, stacks)}
        for name, pair in new.items():
            if name not in tensors:
                changed[name] = (dims(name, *pair), OPTIONAL if name in changed or name in partial else need)
        for name in tensors.keys() - new.keys():
            once = name not in changed and tensors[name][1] == REQUIRED
            changed[name] = (tensors[name][0], need.removeprefix("!") if need[0] == "!" and once else
                             f"!{need}" if once else OPTIONAL)  # fmt: skip
    return changed


def main(names: Sequence[str]) -> int:
    """Writes the lines; the exit code is 1 when a class has none."""
    lines: dict[str, PlainLine] = {line["classes"][0]: line for line in map(json.loads, LINES.read_text().splitlines())}
    failed = 0
    for name in names or list(lines):
        try:
            has_class = hasattr(quiet_transformers(), name)
            line = line_of(name if has_class else lines[name]["classes"][-1])
            lines[line["classes"][0]] = line
        except Exception as failure:
            failed = 1
            print(f"{name}: {type(failure).__name__}: {str(failure).splitlines()[:1]}", file=sys.stderr)
        inside = {other for line in lines.values() for other in line["classes"][1:]}
        lines = {first: line for first, line in lines.items() if first not in inside}
        LINES.write_text("".join(json.dumps(lines[first]) + "\n" for first in sorted(lines)))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
