"""Rows of the architecture table: networks whose output is sound, not text."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converter import Converter, Scope, default
from aprfmt.arch.row import OPTIONAL, REQUIRED, Architecture, Key, TensorRow
from aprfmt.arch.rows.parts import (
    DECODER, DIMS, GROUPED, HEAD_DIM, LAYER_EPS, ROPE, SILU, VOCAB, attention, block, class_names, final_norm, flag,
    gated_mlp, gelu, linear, must_be, norm, plain_mlp, rename, split, tensor,
)
from aprfmt.arch.rows.parts_encoder import ENCODER
from aprfmt.errors import RefusedError


def _folded_to(value: object, scope: Scope) -> None:
    """A GGUF of these holds an embedding that is computed, of which the checkpoint cannot be made again."""
    raise RefusedError(
        f"llama.cpp's {scope.row.gguf} wants the embedding with the projection behind it multiplied in, which no "
        "checkpoint holds and nothing brings back",
        hint="an .apr or a folder holds the model as it is; for a GGUF take llama.cpp's convert_hf_to_gguf.py",
    )


folded = Converter(_folded_to, default)

_SOUND_KEYS = (
    "features_length", "attention.group_norm_epsilon", "attention.group_norm_groups", "posnet.embedding_length",
    "posnet.block_count", "convnext.embedding_length", "convnext.block_count",
)
_POS, _NEXT = "posnet.n_embd", "convnext.n_embd"


def _column(hf: str, gguf: str, dims: str, *, of_weight: bool = False) -> tuple[TensorRow, ...]:
    """A layer whose bias, and weight if `of_weight`, is a column, as its values stand beside a row of sound."""
    return (
        tensor(f"{hf}.weight", f"{gguf}.weight", f"{_POS},1" if of_weight else dims),
        tensor(f"{hf}.bias", f"{gguf}.bias", f"{_POS},1"),
    )


def _posnet(n: int) -> tuple[TensorRow, ...]:
    """A layer of the six before the convolutions: attention in the third, a norm in the last, residual blocks else."""
    hf, gguf = f"backbone.posnet.{n}", f"posnet.{n}"
    if n in (2, 5):
        named = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "proj_out": "attn_output"} if n == 2 else {}
        layers = (_column(f"{hf}.{a}", f"{gguf}.{b}", f"{_POS},{_POS},1") for a, b in named.items())
        return (
            *_column(f"{hf}.norm", f"{gguf}.attn_norm", "", of_weight=True), *(row for two in layers for row in two),
        )
    halves = (
        (
            *_column(f"{hf}.norm{i}", f"{gguf}.norm{i}", "", of_weight=True),
            *_column(f"{hf}.conv{i}", f"{gguf}.conv{i}", f"{_POS},{_POS},3"),
        )
        for i in (1, 2)
    )
    return tuple(row for half in halves for row in half)


def _placeless(dims: str, *names: str) -> tuple[TensorRow, ...]:
    """What the network must have, and what a GGUF has no place for."""
    return tuple(TensorRow((name,), (), (dims,)) for name in names)


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="wavtokenizer_dec", required=dict.fromkeys(_SOUND_KEYS, ""), gguf="wavtokenizer-dec",
        **class_names("WavTokenizerDec", types=("wavtokenizer_dec",), bare=("WavTokenizerDec",)), no_vocabulary=True,
        tensors=(
            tensor("backbone.embedding.weight", "token_embd.weight", "vocab,n_embd_features"),
            *_column("backbone.embed", "conv1d", f"{_POS},n_embd_features,7"),
            *(row for n in range(6) for row in _posnet(n)), *norm("backbone.norm", "token_embd_norm", _POS, REQUIRED),
            *block(
                tensor("dwconv.weight", "dw.weight", f"{_NEXT},1,7"), tensor("dwconv.bias", "dw.bias", f"{_NEXT},1"),
                *norm("norm", "norm", _NEXT, REQUIRED), *linear("pwconv1", "pw1", f"ffn,{_NEXT}", REQUIRED),
                *linear("pwconv2", "pw2", f"{_NEXT},ffn", REQUIRED), tensor("gamma.weight", "gamma.weight", _NEXT),
                hf="backbone.convnext.{n}.", gguf="convnext.{n}.", depth="convnext.n_layer",
            ),
            *norm("backbone.final_layer_norm", "output_norm", _NEXT, REQUIRED),
            *linear("head.out", "output", f"hidden,{_NEXT}", REQUIRED),
        ),
        keys=(
            *rename(DIMS, num_layers="n_layer", intermediate_size="n_ff", num_heads="n_head"),
            replace(LAYER_EPS, hf=("layer_norm_epsilon",)), VOCAB, Key("features_length", ("n_embd_features",)),
            Key("attention.group_norm_epsilon", ("group_norm_epsilon",), "f32"),
            Key("attention.group_norm_groups", ("group_norm_groups",)), Key("posnet.embedding_length", (_POS,)),
            Key("posnet.block_count", ("posnet.n_layer",), allowed=(6,)), Key("convnext.embedding_length", (_NEXT,)),
            Key("convnext.block_count", ("convnext.n_layer",)), ENCODER[0],
        ),
        gguf_only=(), ignored=("codebook.cluster_size", "codebook.embed_avg", "codebook.inited"),
        defaults={"": {"layer_norm_epsilon": 1e-6, "tie_word_embeddings": False}},
    ),
    # Of both networks below llama.cpp's file holds a computed embedding: none is made, and none is of these rows.
    Architecture(
        id="qwen3_tts_talker", gguf="qwen3tts",
        **class_names("Qwen3TTSTalkerForConditionalGeneration", types=("qwen3_tts_talker",)),
        when="tensors=text_embd.weight", gguf_only=(),
        tensors=(
            *_placeless("vocab,text_hidden_size", "talker.model.text_embedding.weight"),
            *_placeless("vocab_size,hidden", "talker.model.codec_embedding.weight"),
            *_placeless("text_hidden_size,text_hidden_size", "talker.text_projection.linear_fc1.weight"),
            *_placeless("text_hidden_size", "talker.text_projection.linear_fc1.bias"),
            *_placeless("hidden,text_hidden_size", "talker.text_projection.linear_fc2.weight"),
            *_placeless("hidden", "talker.text_projection.linear_fc2.bias"),
            *block(
                *norm("input_layernorm", "attn_norm"), *attention(qk_norm="head_dim"),
                *norm("post_attention_layernorm", "ffn_norm"), *gated_mlp(),
                hf="talker.model.layers.{n}.",
            ),
            *final_norm("talker.model.norm"), *linear("talker.codec_head", "output", "vocab_size,hidden"),
        ),
        keys=(
            *DECODER, SILU, must_be("attention_bias", False),
            Key("vocab_size", ("text_vocab_size",), field="vocab_size"), Key("", ("vocab_size",)),
            Key("", ("text_hidden_size",)), Key("", converter=folded),
        ),
        defaults={
            "": {
                "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 32768,
                "text_hidden_size": 2048, "text_vocab_size": 151936, "vocab_size": 3072, "attention_bias": False,
            }
        },
    ),
    Architecture(
        id="pocket_tts", gguf="pockettts",
        **class_names(
            "PocketTTSModel", "PocketTTSForConditionalGeneration", types=("pocket_tts",),
            bare=("PocketTTSModel", "PocketTTSForConditionalGeneration"),
        ),
        when="tensors=text_embd.weight", gguf_only=(),
        tensors=(
            *_placeless("vocab,hidden", "model.embed_tokens.weight"),
            *_placeless("hidden,latent_dim", "model.audio_prompt_proj.weight", "model.audio_latent_proj.weight"),
            *_placeless("latent_dim", "model.bos_latent"),
            *block(
                *norm("input_layernorm", "attn_norm", bias=REQUIRED), *attention("attention_bias", "attention_bias"),
                *norm("post_attention_layernorm", "ffn_norm", bias=REQUIRED), *plain_mlp(None, "mlp.fc1", "mlp.fc2"),
            ),
            *final_norm(bias=REQUIRED),
        ),
        keys=(
            *DIMS, GROUPED, ROPE, LAYER_EPS, HEAD_DIM, flag("attention_bias"), gelu(), Key("", ("flow_head_config",)),
            Key("", converter=folded),
        ),
        defaults={
            "": {
                "layer_norm_eps": 1e-5, "max_position_embeddings": 8192, "latent_dim": 32, "attention_bias": False,
                "hidden_act": "gelu_pytorch_tanh", "pad_token_id": 3,
            }
        },
    ),
    # The same network as it is published, without a config.json (arch.configless).
    Architecture(
        id="pocket_tts_published", gguf="pockettts", when="tensors=bos_emb.weight",
        **class_names("FlowLMModel", types=("pockettts",), bare=("FlowLMModel",)), gguf_only=(),
        tensors=(
            *_placeless("vocab,hidden", "flow_lm.conditioner.embed.weight"),
            *_placeless("latent_dim", "flow_lm.bos_emb", "flow_lm.emb_mean", "flow_lm.emb_std"),
            TensorRow(("flow_lm.bos_before_voice",), (), ("1,1,hidden",), OPTIONAL),
            *_placeless("hidden,latent_dim", "flow_lm.input_linear.weight"),
            *_placeless("1,hidden", "flow_lm.out_eos.weight"), *_placeless("1", "flow_lm.out_eos.bias"),
            *_placeless("hidden,inner_dim", "flow_lm.speaker_proj_weight"),
            *block(
                *norm("norm1", "attn_norm", bias=REQUIRED),
                split(
                    "self_attn.in_proj.weight", "3*hidden,hidden",
                    {f"attn_{letter}.weight": "hidden,hidden" for letter in "qkv"},
                ),
                *linear("self_attn.out_proj", "attn_output", "hidden,hidden"),
                *norm("norm2", "ffn_norm", bias=REQUIRED), *linear("linear1", "ffn_up", "ffn,hidden"),
                *linear("linear2", "ffn_down", "hidden,ffn"),
                hf="flow_lm.transformer.layers.{n}.",
            ),
            *final_norm("flow_lm.out_norm", bias=REQUIRED),
        ),
        keys=(
            *DIMS, GROUPED, ROPE, LAYER_EPS, Key("", ("audio_config.latent_dim",)),
            Key("", ("audio_config.inner_dim",)), Key("", ("model_variant",), "str"),
            Key("", converter=folded),
        ),
        defaults={"": {"layer_norm_eps": 1e-5, "max_position_embeddings": 4096, "rope_theta": 10000.0,
                      "tie_word_embeddings": False}},
    ),
)
