"""What a row of the architecture table is made of: tensors, hyper-parameter keys, the family itself. Data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from aprfmt.light_dataclass import light_dataclass

if TYPE_CHECKING:
    from aprfmt.arch.converter import Converter

REQUIRED = "required"
OPTIONAL = "optional"
HEAD = "head"
OUTPUT = "output"

PLUS_ROW = "plus_row"
"""The map that adds the number of its row to each value; it is for integers, whose dtype stays."""

PRODUCT = "product"
"""The map of two tensors to their product, value by value; back come the product and ones, unless more is known."""

INT32 = "int32"
"""The map of integers of 64 bits to such of 32, which a GGUF has."""

PACKS = {"mxfp4": ("U8", "U8"), "mxfp4_e8m0": ("I8", "F8_E8M0")}
"""Name of a packing -> the dtypes in which a checkpoint has the values and their scales."""

ROPE, ROTARY_DIM, SHARED_ROTARY_DIM, HALF_ROTARY, HEAD_DIM, WINDOW, COMPRESSED_ROPE = (
    "rope", "rotary_dim", "shared_rotary_dim", "half_rotary", "head_dim", "window", "compressed_rope",
)  # fmt: skip
"""Roles of keys that arch.rope and arch.hparams read and write by code of their own."""

WHOLE_HEADS, ROTARY_PART, ROTARY_COUNT = "whole", "part", "count"
"""What a class of transformers rotates: all of a head, `partial_rotary_factor` of it, or `rotary_dim` values."""

OF_TENSOR = "of_tensor"
"""Role of a number that a GGUF has as a key and a checkpoint as a tensor, which `hf` names."""

HAS_TENSORS = "has_tensors"
"""Role of a switch that a config.json need not set: on if the checkpoint has the tensors that need it."""

POSITIONS = "positions"
CONTEXT = "context"
FOURTH = "fourth section"
"""The length of the longest text, of a Difference."""

SELDOM = "seldom"
"""Role of a key that is written only if llama.cpp's default is not the network's value."""

MOST = "most"
OWN = "own"

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""GGUF tensors that follow from the rope parameters: llama3's, then longrope's."""

WHOLE_KEYS = ("general.", "tokenizer.", "diffusion.", "xielu.", "vision.pos_emb_")
"""Beginnings of GGUF keys that stand without the architecture's prefix."""


@light_dataclass(frozen=True, slots=True)
class TensorRow:
    """One correspondence between tensors of a Hugging Face checkpoint and tensors of a GGUF, usually one to one.

    From Hugging Face to GGUF: the `hf` tensors, each transposed if `transposed`, are laid row after row; `order`
    permutes the rows; `columns` permutes the last dimension; `value` maps the values; the result is cut into the
    `gguf` tensors of the shapes `gguf_dims`, each transposed where `gguf_transposed` says so. It can all be undone.

    Names hold `{n}` for the layer and `{e}` for the expert: a name with `{e}` stands for one tensor an expert, which
    GGUF stacks into one of shape [experts, ...]. Sizes and conditions are written in the languages of arch.grammar;
    docs/rows.md has examples of each field.

    Attributes:
        hf: names in a Hugging Face checkpoint, in the order in which they are laid out.
        gguf: names in a GGUF; () for a tensor that a GGUF has no place for: only the other containers carry it.
        dims: shape of each stored `hf` tensor, row-major; one shape for all of them, or one each.
        gguf_dims: shape of each `gguf` tensor; empty: as `dims`, behind `experts` where the names hold `{e}`.
        need: condition under which the network must have it, over config keys and the words REQUIRED (always),
            OPTIONAL (never), HEAD (unless the head is tied) and OUTPUT (whose class predicts tokens).
        layers: condition for a layer to have it ("moe", "!first", a kind of `layer_types`); "" for all layers.
        order: orders of rows, applied in turn: "swap:heads,2,head_dim/2" (see arch.orders).
        columns: the same for the last dimension.
        transposed: whether the last two dimensions are swapped on the way to GGUF.
        gguf_transposed: the same for each of the `gguf` tensors, at the end.
        value: name of a map of arch.orders.VALUES ("plus_one", "minus_exp"), PLUS_ROW, INT32 or PRODUCT; "mirror:SIZE"
            turns the sign of the second half of each SIZE rows, "unit_columns:KEY" divides columns by their lengths if
            config's KEY is true.
        scale: what rows are multiplied by on the way to GGUF, run after run: "rows:number,number*number", where a
            number is a config key ("mlp_multipliers.0" of a list) or a word of arch.grammar.FACTORS; no rows: all that
            are left.
        pack: name of a packing of several stored tensors into one, of PACKS; the `hf` names are then its pieces, all
            those with values before all those with scales.
        count: what `{e}` counts, a size.
        skip: how many first rows of the one `hf` tensor a GGUF does not have, a size; they come back as zeros.
        cut: the same of its last rows, where values are mapped.
        lead, trail: how many rows of zeros a GGUF has before and behind those of the `hf` tensors, sizes; what stands
            there is not brought back, and anything but zeros is refused.
        flat: whether `order` permutes single values, whatever the shape.
        depth: what `{n}` counts, a size: the decoder's layers of a network that has an encoder's too.
        first: the number that a GGUF gives the first of these layers, a size, where it numbers them behind those of
            another stack; "" for 0.
    """

    hf: tuple[str, ...]
    gguf: tuple[str, ...]
    dims: tuple[str, ...]
    need: str = REQUIRED
    gguf_dims: tuple[str, ...] = ()
    layers: str = ""
    order: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    transposed: bool = False
    gguf_transposed: tuple[bool, ...] = ()
    value: str = ""
    scale: tuple[str, ...] = ()
    pack: str = ""
    flat: bool = False
    count: str = "experts"
    skip: str = ""
    cut: str = ""
    lead: str = ""
    trail: str = ""
    depth: str = "layers"
    first: str = ""


@light_dataclass(frozen=True, slots=True)
class Key:
    """One hyper-parameter: a GGUF key and the config.json keys that mean the same.

    Attributes:
        gguf: key after the architecture's prefix, "attention.head_count"; "" where a GGUF has none (the value stays
            in the `.apr` and in config.json only; a GGUF import then gives the row's default).
        hf: config.json keys, the one that is written first, then older spellings; () for a constant.
        kind: GGUF type: "u32", "i32", "f32", "bool", "str", or a list of them: "u32[]", "f32[]", "bool[]", "i32[]".
        field: attribute of Hyperparams that holds the value; "" keeps it in Hyperparams.extra under `hf[0]`.
        constant: value that is written to every GGUF of the family; a config with another one is refused.
        allowed: values that llama.cpp's network computes, where it is not any; a config with another one is refused.
        converter: how values are converted where config.json and GGUF count differently; None for equal values.
        draft: what the list of a GGUF, with a value a layer, has for each draft layer behind the last; MOST for the
            largest of the others, OWN where config.json lists the draft layers too (0 for those that it does not), or
            the config.json key of a number; None for what is not such a list.
        needed: condition for llama.cpp not to load a file, or to guess wrong, without the key: REQUIRED for always, or
            over GGUF keys after the prefix and `tensors=NAME`. What its loaders always read is in loaders.jsonl.
    """

    gguf: str
    hf: tuple[str, ...] = ()
    kind: str = "u32"
    field: str = ""
    constant: object = None
    converter: Converter | None = None
    allowed: tuple[object, ...] = ()
    draft: object = None
    needed: str = ""

    @property
    def role(self) -> str:
        """The role of the converter, "" without one."""
        return self.converter.role if self.converter is not None else ""


@light_dataclass(frozen=True, slots=True)
class Difference:
    """What llama.cpp computes otherwise than transformers, in a network that it loads.

    Attributes:
        what: one sentence for the user; `{window}`, `{positions}`, `{original}`, `{fourth}`, `{epsilon}`, `{inner}`
            and `{betas}` are numbers of the network.
        when: condition for a network to be concerned, over config.json keys and the words of arch.differences; "" for
            all of the family.
        beyond: where only longer texts get other logits: the length that they have to exceed, as WINDOW, POSITIONS,
            FOURTH or the config.json key of a number; CONTEXT where it depends on the context that llama.cpp runs with.
        slight: whether the most likely tokens keep their order, or plain prompts their logits. A difference that is
            neither slight nor of longer texts alone is written with --allow-different only.
    """

    what: str
    when: str = ""
    beyond: str = ""
    slight: bool = False


@light_dataclass(frozen=True, slots=True, eq=False)
class Architecture:
    """A family of networks that share tensor names and hyper-parameter keys.

    Attributes:
        id: name of the row.
        gguf: `general.architecture` and the prefix of its keys.
        hf_class, model_type: what a config.json gets when the source names none.
        hf_classes, model_types: what is recognised, `hf_class` and `model_type` among them.
        tensors: every tensor that may occur, in the order of the network.
        keys: hyper-parameters, in the order in which a GGUF gets them.
        other_names: those of the classes whose checkpoints call tensors otherwise (see prefixes); a config.json that is
            created names `hf_class` instead.
        inside: (key of config.json that holds what is said of the network, model type in there), for classes that hold
            the network in another one; ("", "") for all others.
        bare_classes: those of the classes that have no head (`LlamaModel`).
        rope_type: the value of APR's `rope_type` (0 adjacent pairs, 2 split halves, as the reference assigns them).
        when: condition that tells GGUFs of this row from those of other rows with the same GGUF name. Words are keys
            after the prefix, whole keys of `general.` and `tokenizer.`, and `tensors`: the names of the GGUF's
            tensors, whole and without "blk.N.", nothing where they are unknown.
        hf_when: condition that tells configs of this row from those of other rows with the same class. Words are
            config.json keys, `layer_types` among them by whatever key a config names the kinds of its layers.
        copies: GGUF tensors that llama.cpp's loader insists on, though its network never reads them, and the GGUF
            tensors whose values they get.
        ignored: endings of Hugging Face tensors that hold no weights (buffers of old checkpoints).
        prefixes: beginnings of names in other checkpoints of the family, and what stands there in `tensors`.
        drafts: beginnings of names of draft layers in checkpoints that do not call them like further layers, and what
            stands there in `tensors`: ("mtp.layers.{m}.", "model.layers.{n}."); `{m}` counts the draft layers from 0,
            `{n}` all layers. A beginning without `{m}` is of the first. On the way back the first that fits is taken.
        drafts_apart: of a family whose GGUFs have draft layers only in a file of their own: beginnings of the names of
            tensors that stand there in place of the network's, and how these begin.
        defaults: what an absent config.json key means, by model type ("" for all); read from families/defaults.jsonl.
        rotates: what its class in transformers rotates of a head (WHOLE_HEADS, ROTARY_PART, ROTARY_COUNT), "" where it
            has none; read from families/defaults.jsonl.
        config: what a rebuilt config.json says beside the keys, whatever the source.
        no_vocabulary: whether the network reads no text; a GGUF of a model without tokenizer then says so.
        packed_config: `quantization_config` of a config.json whose weights came packed out of a GGUF (see pack).
        differs: what llama.cpp computes otherwise; an export to GGUF says so.
        nested_rope: whether config.json spells rope parameters by layer type (full_attention, sliding_attention).
        flat_norms: norms of a layer that a GGUF has and a checkpoint does not, by name -> the config key that all their
            values are, "" for 1.
        freqs_always: whether llama.cpp wants `rope_freqs.weight` even where all pairs are rotated as usual.
    """

    id: str
    gguf: str
    hf_class: str
    model_type: str
    hf_classes: tuple[str, ...]
    model_types: tuple[str, ...]
    tensors: tuple[TensorRow, ...]
    keys: tuple[Key, ...]
    bare_classes: tuple[str, ...] = ()
    other_names: tuple[str, ...] = ()
    inside: tuple[str, str] = ("", "")
    rope_type: int = 2
    when: str = ""
    hf_when: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    prefixes: tuple[tuple[str, str], ...] = ()
    drafts: tuple[tuple[str, str], ...] = ()
    drafts_apart: tuple[tuple[str, str], ...] = ()
    defaults: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    rotates: str = ""
    config: Mapping[str, object] = field(default_factory=dict)
    packed_config: Mapping[str, object] = field(default_factory=dict)
    differs: tuple[Difference, ...] = ()
    nested_rope: bool = False
    flat_norms: Mapping[str, str] = field(default_factory=dict)
    freqs_always: bool = False
    no_vocabulary: bool = False


@light_dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """What an Architecture is found by, without importing it; fields that are not named here are as there.

    Attributes:
        file: the module of `arch.families` that defines it.
        tower: whether it is a Tower.
        embedding, head: Hugging Face names of `token_embd.weight` and `output.weight`, "" for a row without them.
    """

    file: str
    id: str
    gguf: str
    hf_classes: Sequence[str] = ()
    model_types: Sequence[str] = ()
    when: str = ""
    hf_when: str = ""
    embedding: str = ""
    head: str = ""
    tower: bool = False


@light_dataclass(frozen=True, slots=True, eq=False)
class Tower(Architecture):
    """The parts of a multimodal network that see or hear, and the projector to its language model.

    It is a row like that of a language model, for a GGUF of its own whose keys begin with "clip.", with these words:
    `hf_classes` are those of the whole network; `hf_when` asks for keys of its config.json by their path
    ("vision_config.model_type=pixtral"); keys of preprocessor_config.json and processor_config.json stand behind
    "preprocessor_config."; `hidden` is the width of the language model, every other size a key by its last name
    ("hidden_size" of vision_config), or by its path where two parts have the same, with "_" for "-"; words that begin
    with "any_" are sizes that no key tells; `config` gives keys by their path.

    Attributes:
        f32, f16: what names of GGUF tensors contain that are F32 or F16 whatever the dtype that is asked for; "^" is
            where a name begins, "*" stands for anything.
        convolutions: what names of GGUF tensors contain that are F16 where the file is, else F32, as convolutions over
            patches are.
        made: GGUF tensors that are computed rather than taken from a tensor of the checkpoint: name -> a function of
            canonical.made with its arguments, "batch_scale:conformer.layers.{n}.conv.batch_norm".
        text: how checkpoints of the whole begin the names of the language model's tensors: put before those of its
            row, or, where it begins with "model." or is `bare`, in place of the row's "model.".
        bare: whether the language model in the whole is one without a head, whose names have no "model." before them.
        listed: beginnings of names whose number counts the items of a list of layers, and the key of that list, or a
            word of arch.projectors.NUMBERS: item 2 of [5, 11, 17] is layer 17 in the row, as it is in a GGUF.
        files: further files of a folder, relative to it, whose objects count as keys of config.json, by these keys.
    """

    f32: tuple[str, ...] = ()
    f16: tuple[str, ...] = ()
    convolutions: tuple[str, ...] = ()
    made: Mapping[str, str] = field(default_factory=dict)
    text: str = "language_model."
    bare: bool = False
    listed: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@light_dataclass(frozen=True, slots=True)
class Wrapper:
    """A network around a language model of the table: one that also sees, hears or speaks. Its config.json names the
    language model in a part of its own, which decides the row.

    Attributes:
        hf_class, model_type: of the whole; "" where published configs have none.
        row: id of the row that counts where the part does not tell, as in older configs that have no part.
        instead: row that the part tells -> row that it is inside this network, where GGUF has another name for it.
        beside: beginnings of tensor names that look like the language model's and are none of it.
    """

    hf_class: str
    model_type: str
    row: str
    instead: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
