"""Which names of a checkpoint are not part of its language model, and what they are said to be of."""

from __future__ import annotations

import pytest

from aprfmt.arch.extra_tensors import outside, parts
from aprfmt.arch.heads import MODULE
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.row import Architecture
from aprfmt.arch.table import ARCHITECTURES

_NETWORK = (
    "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight",
    "model.norm.weight", "lm_head.weight",
)  # fmt: skip


def _outside(row: str, *names: str, layers: int | None = 2, drafts: int | None = None) -> set[str]:
    h = Hyperparams(num_layers=layers)
    if drafts is not None:
        h.extra["num_nextn_predict_layers"] = drafts
    return outside(ARCHITECTURES[row], h, (*_NETWORK, *names))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", "vision tower"),
        ("model.vision_tower.patch_embed.weight", "vision tower"),
        ("model.visual.blocks.0.attn.qkv.weight", "vision tower"),
        ("visual.patch_embed.proj.weight", "vision tower"),
        ("audio_tower.layers.0.fc1.weight", "audio tower"),
        ("multi_modal_projector.linear_1.weight", "projector"),
        ("model.connector.modality_projection.proj.weight", "projector"),
        ("model.image_newline", "projector"),
        ("image_newline", "projector"),
        ("model.image_end", "projector"),
        ("model.sam_model.pos_embed", "vision tower"),
        ("model.view_seperator", "projector"),
        ("mtp.layers.0.self_attn.q_proj.weight", "MTP layers"),
        ("model.mtp_layers.0.eh_proj.weight", "MTP layers"),
        ("pooler.dense.weight", "pooler"),
        ("score.weight", "head of another task"),
        ("2_Dense.linear.weight", "module of sentence-transformers"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "adapter"),
        ("model.something.nobody.foresaw", "other parts"),
        ("v.blk.0.attn_q.weight", "vision tower"),
        ("mm.0.weight", "projector"),
    ],
)
def test_a_module_that_the_row_does_not_have_is_outside(name: str, kind: str) -> None:
    assert _outside("llama", name) == {name}
    (part,) = parts(ARCHITECTURES["llama"], {name: 12})
    assert (part.kind, part.n_tensors, part.n_bytes) == (kind, 1, 12)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.foo.weight",
        "model.layers.0.vision_tower.weight",
        "model.layers.7.self_attn.q_proj.weight",
        "language_model.model.layers.0.self_attn.foo.weight",
        "model.layers.foo.bar.baz",
        "layers.0.self_attn.foo.weight",
        "model.norm.foo",
        "lm_head.qweight",
        "model.embed_norm.weight",
        "model.a",
        "word_embeddings_layernorm.weight",
        "blk.0.attn_foo.weight",
        "token_embd.foo",
        "rope_freqs.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    ],
)
def test_what_the_network_might_have_is_not_outside(name: str) -> None:
    assert _outside("llama", name) == set()


def test_layers_behind_the_last_are_drafts_where_the_config_or_their_tensors_say_so() -> None:
    plain = "model.layers.2.self_attn.q_proj.weight"
    marked = "model.layers.2.eh_proj.weight"
    assert _outside("llama", plain) == set()
    assert _outside("llama", plain, drafts=1) == {plain}
    assert _outside("llama", plain, marked) == {plain, marked}
    assert _outside("llama", plain, marked, layers=None) == {plain, marked}
    assert _outside("llama", marked, "model.layers.3.mlp.up_proj.weight") == {marked}
    assert _outside("llama", "blk.2.nextn.eh_proj.weight", "blk.2.attn_q.weight", drafts=1) == {
        "blk.2.nextn.eh_proj.weight",
        "blk.2.attn_q.weight",
    }
    # A mark inside the network's own layers makes no draft of them.
    assert _outside("llama", "model.layers.1.eh_proj.weight") == set()


def test_parts_are_grouped_by_kind_and_counted() -> None:
    sizes = {f"vision_tower.blocks.{i}.weight": 1000 for i in range(30)}
    sizes |= {"mm_projector.weight": 5, "mm_projector.bias": 5, "model.layers.61.hnorm.weight": 7}
    found = [str(part) for part in parts(ARCHITECTURES["deepseek_v3"], sizes)]
    assert found == [
        "30 tensors of the vision tower (vision_tower.*, 29.3 KiB)",
        "2 tensors of the projector (mm_projector.bias, mm_projector.weight, 10 B)",
        "1 tensor of the MTP layers (model.layers.61.*, 7 B)",
    ]


@pytest.mark.parametrize("row", ARCHITECTURES.values(), ids=lambda row: row.id)
def test_no_name_of_a_row_is_outside_it(row: Architecture) -> None:
    templates = {name for tensor in row.tensors for name in (*tensor.hf, *tensor.gguf)}
    spelled = {template.replace("{n}", "0").replace("{e}", "1") for template in templates}
    names = {name for name in spelled if not MODULE.match(name)}  # config.json says nothing of these
    assert outside(row, Hyperparams(num_layers=1), names) == set()
