"""The data types of the architecture table: tensors, hyper-parameter keys, the family itself. Data only."""

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
"""The map that adds the row index to each value; for integers, whose dtype stays."""

PRODUCT = "product"
"""The map of two tensors to their elementwise product; the inverse yields the product and ones, unless more is known.
"""

INT32 = "int32"
"""The map of 64-bit integers to the 32-bit integers of a GGUF."""

PACKS = {"mxfp4": ("U8", "U8"), "mxfp4_e8m0": ("I8", "F8_E8M0")}
"""Name of a packing -> dtypes of the values and their scales in a checkpoint."""

ROPE, ROTARY_DIM, SHARED_ROTARY_DIM, HALF_ROTARY, HEAD_DIM, WINDOW, COMPRESSED_ROPE = (
    "rope", "rotary_dim", "shared_rotary_dim", "half_rotary", "head_dim", "window", "compressed_rope",
)  # fmt: skip
"""Roles of keys that arch.rope and arch.hparams read and write themselves."""

WHOLE_HEADS, ROTARY_PART, ROTARY_COUNT = "whole", "part", "count"
"""What a class of transformers rotates: all of a head, `partial_rotary_factor` of it, or `rotary_dim` dimensions."""

OF_TENSOR = "of_tensor"
"""Role of a number that is a key in a GGUF and a tensor in a checkpoint, which `hf` names."""

HAS_TENSORS = "has_tensors"
"""Role of a switch that a config.json need not set: on if the checkpoint has the tensors that need it."""

POSITIONS = "positions"
CONTEXT = "context"
FOURTH = "fourth section"
"""The maximum text length, of a Difference."""

SELDOM = "seldom"
"""Role of a key that is written only if llama.cpp's default is not the network's value."""

MOST = "most"
OWN = "own"

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""GGUF tensors derived from the rope parameters: llama3's, then longrope's."""

WHOLE_KEYS = ("general.", "tokenizer.", "diffusion.", "xielu.", "vision.pos_emb_")
"""Prefixes of GGUF keys without the architecture prefix."""


@light_dataclass(frozen=True, slots=True)
class TensorRow:
    """One correspondence between tensors of a Hugging Face checkpoint and tensors of a GGUF, usually one to one.

    From Hugging Face to GGUF: the `hf` tensors, each transposed if `transposed`, are concatenated row by row; `order`
    permutes the rows; `columns` permutes the last dimension; `value` maps the values; the result is split into the
    `gguf` tensors of the shapes `gguf_dims`, each transposed if `gguf_transposed`. All of it is reversible.

    Names contain `{n}` for the layer and `{e}` for the expert: a name with `{e}` means one tensor per expert, which
    GGUF stacks into one of shape [experts, ...]. Sizes and conditions are written in the languages of arch.grammar;
    docs/rows.md has examples of each field.

    Attributes:
        hf: names in a Hugging Face checkpoint, in the order of concatenation.
        gguf: names in a GGUF; () for a tensor that a GGUF cannot store: only the other containers carry it. `{e}`
            occurs in those of mlx_lm only (see arch.mlx).
        dims: shape of each stored `hf` tensor, row-major; one shape for all of them, or one each.
        gguf_dims: shape of each `gguf` tensor; empty: as `dims`, after `experts` if the names contain `{e}`.
        need: condition under which the network must have it, over config keys and the words REQUIRED (always),
            OPTIONAL (never), HEAD (unless the head is tied) and OUTPUT (whose class predicts tokens).
        layers: condition for a layer to have it ("moe", "!first", a kind of `layer_types`); "" for all layers.
        order: orders of rows, applied in turn: "swap:heads,2,head_dim/2" (see arch.orders).
        columns: the same for the last dimension.
        transposed: whether the last two dimensions are swapped on the way to GGUF.
        gguf_transposed: the same for each of the `gguf` tensors, at the end.
        value: name of a map of arch.orders.VALUES ("plus_one", "minus_exp"; "same" for rows that are only cut),
            PLUS_ROW, INT32 or PRODUCT; "mirror:SIZE" negates the second half of each SIZE rows, "unit_columns:KEY"
            divides columns by their norms if the config's KEY is true.
        scale: factors of rows on the way to GGUF, run by run: "rows:number,number*number", where a number is a config
            key ("mlp_multipliers.0" of a list) or a word of arch.grammar.FACTORS; no rows: all remaining ones.
        pack: name of a packing of several stored tensors into one, of PACKS; the `hf` names are then its parts, all
            those with values before all those with scales.
        count: what `{e}` counts, a size.
        skip: number of leading rows of the single `hf` tensor that a GGUF omits, a size; they come back as zeros.
        cut: the same for trailing rows, if values are mapped. lead, trail: number of zero rows that a GGUF has before
            and after those of the `hf` tensors, sizes; they are dropped on the way back, and anything but zeros is
            refused.
        repeats: whether the `trail` rows are copies of the first row instead; on the way back they may be either.
        flat: whether `order` permutes single values, whatever the shape.
        depth: what `{n}` counts, a size: the decoder's layers of a network that has an encoder's too.
        first: the GGUF index of the first of these layers, a size, if it numbers them after those of another stack; ""
            for 0.
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
    repeats: bool = False
    depth: str = "layers"
    first: str = ""


@light_dataclass(frozen=True, slots=True)
class Key:
    """One hyper-parameter: a GGUF key and the config.json keys that mean the same.

    Attributes:
        gguf: key after the architecture's prefix, "attention.head_count"; "" if a GGUF has none (the value is in the
            `.apr` and in config.json only; a GGUF import yields the row's default).
        hf: config.json keys, the one that is written first, then older spellings; () for a constant.
        kind: GGUF type: "u32", "i32", "f32", "bool", "str", or a list of them: "u32[]", "f32[]", "bool[]", "i32[]".
        field: attribute of Hyperparams with the value; "" keeps it in Hyperparams.extra under `hf[0]`.
        constant: value that is written to every GGUF of the family; a config with another one is refused.
        allowed: values that llama.cpp's network supports, if not all; a config with another one is refused.
        converter: converts values if config.json and GGUF differ; None for equal values.
        draft: value of each MTP layer in a GGUF's per-layer list; MOST for the largest of the others, OWN if
            config.json lists the MTP layers too (0 for those that it does not), or the config.json key of a number;
            None for other keys.
        needed: condition under which llama.cpp refuses a file without the key, or assumes a wrong value: REQUIRED for
            always, or over GGUF keys after the prefix and `tensors=NAME`. What its loaders always read is in
            loaders.jsonl.
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
    """A difference between llama.cpp and transformers in a network that llama.cpp loads.

    Attributes:
        what: one sentence for the user; `{window}`, `{positions}`, `{original}`, `{fourth}`, `{epsilon}`, `{inner}`
            and `{betas}` are numbers of the network.
        when: condition under which a network is affected, over config.json keys and the words of arch.differences; ""
            for all of the family.
        beyond: if only longer texts get other logits: the length above which they do, as WINDOW, POSITIONS, FOURTH or
            the config.json key of a number; CONTEXT if it depends on llama.cpp's context.
        slight: whether the most likely tokens keep their order, or plain prompts their logits. Other differences that
            affect short texts require --allow-different.
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
        hf_class, model_type: for a config.json if the source states none. hf_classes, model_types: recognized names,
        including `hf_class` and `model_type`.
        tensors: every tensor that may occur, in the order of the network.
        keys: hyper-parameters, in GGUF order.
        other_names: classes whose checkpoints use other tensor names (see prefixes); a new config.json states
            `hf_class` instead.
        inside: (config.json key of the network's own config, its model type), for classes that nest the network; ("",
            "") for all others.
        bare_classes: the classes without a head (`LlamaModel`).
        rope_type: the value of APR's `rope_type` (0 adjacent pairs, 2 split halves, as the reference assigns them).
        when: condition that distinguishes GGUFs of this row from those of other rows with the same GGUF name. Words are
            keys after the prefix, whole keys of `general.` and `tokenizer.`, and `tensors`: the names of the GGUF's
            tensors, with and without "blk.N.", empty if unknown.
        hf_when: condition that distinguishes configs of this row from those of other rows with the same class. Words
            are config.json keys; `layer_types` stands for any key with layer types.
        copies: GGUF tensors that llama.cpp's loader requires although its network does not use them, and the GGUF
            tensors whose values they get.
        ignored: suffixes of Hugging Face tensors that are not weights (buffers of old checkpoints).
        prefixes: name prefixes in other checkpoints of the family, and their replacement in `tensors`.
        drafts: name prefixes of MTP layers in checkpoints that do not name them like further layers, and their
            replacement in `tensors`: ("mtp.layers.{m}.", "model.layers.{n}."); `{m}` counts the MTP layers from 0,
            `{n}` all layers. A prefix without `{m}` is of the first. The way back uses the first match.
        drafts_apart: for families whose GGUFs have MTP layers in a separate file: name prefixes of tensors that replace
            the network's there, and the network's prefixes.
        defaults: meaning of absent config.json keys, by model type ("" for all); read from families/defaults.jsonl.
        rotates: how much of a head its class in transformers rotates (WHOLE_HEADS, ROTARY_PART, ROTARY_COUNT), ""
            without a class; read from families/defaults.jsonl.
        config: constant entries of a rebuilt config.json.
        no_vocabulary: whether the network does not read text; a GGUF of a model without tokenizer then says so.
        packed_config: `quantization_config` of a config.json with packed weights from a GGUF (see pack).
        differs: differences in llama.cpp, which an export to GGUF reports.
        nested_rope: whether config.json spells rope parameters by layer type (full_attention, sliding_attention).
        flat_norms: constant norms of a layer that a checkpoint lacks, by name -> the config key of their value, "" for
            1.
        freqs_always: whether llama.cpp requires `rope_freqs.weight` even if all pairs are rotated as usual.
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
    """How an Architecture is recognized, without importing it; other fields have the same meaning there.

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
    """The vision or audio towers of a multimodal network, and the projector to its language model.

    It is a row like that of a language model, for a GGUF of its own whose keys begin with "clip.", with these words:
    `hf_classes` are those of the whole network; `hf_when` asks for keys of its config.json by their path
    ("vision_config.model_type=pixtral"); keys of preprocessor_config.json and processor_config.json stand behind
    "preprocessor_config."; `hidden` is the width of the language model, every other size a key by its last name
    ("hidden_size" of vision_config), or by its path where two parts have the same, with "_" for "-"; words that begin
    with "any_" are sizes that no key tells; `config` gives keys by their path.

    Attributes:
        f32, f16: patterns of GGUF tensor names that are F32 or F16 whatever the requested dtype; "^" is the start of a
        name, "*" matches anything.
        convolutions: patterns of GGUF tensor names that are F16 if the file is, else F32, such as patch convolutions.
        made: computed GGUF tensors: name -> a function of canonical.derived_tensors with its arguments,
            "batch_scale:conformer.layers.{n}.conv.batch_norm".
        text: prefix of the language model's tensors in checkpoints of the whole: put before those of its row, or, if it
            begins with "model." or is `bare`, in place of the row's "model.".
        bare: whether the nested language model has no head, so its names lack the prefix "model.".
        listed: name prefixes whose number indexes a list of layers, and the key of that list, or a word of
            arch.projectors.NUMBERS: item 2 of [5, 11, 17] is layer 17 in the row, as in a GGUF.
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
    """A network around a language model of the table: one with vision, audio or speech. Its config.json has a nested
    config of the language model, which decides the row.

    Attributes:
        hf_class, model_type: of the whole; "" if published configs have none.
        row: id of the default row, as for older configs without a nested one.
        instead: row of the nested config -> row inside this network, if GGUF has another name for it.
        beside: prefixes of tensor names that look like the language model's but do not belong to it.
        lacks: what llama.cpp's mtmd lacks to run its towers; "" if they have a row, or could have one.
    """

    hf_class: str
    model_type: str
    row: str
    instead: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    lacks: str = ""
