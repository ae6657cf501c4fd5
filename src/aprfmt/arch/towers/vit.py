"""Plain vision transformers behind learned positions, each with a projector of its own. Data only."""

from __future__ import annotations

from aprfmt.arch.converter import DEFAULT, Converter, Scope, words
from aprfmt.arch.converters.towers import activation, inverse, optional, ratio_of_ffn
from aprfmt.arch.fields import as_float, as_int
from aprfmt.arch.row import OPTIONAL, REQUIRED, Key, TensorRow, Tower
from aprfmt.arch.rows.parts import linear, norm, tensor
from aprfmt.arch.towers.parts import (
    GELU,
    IMAGE,
    WIDTH,
    attention,
    epsilon,
    fused_attention,
    layers,
    mlp,
    norms,
    patches,
    projector,
    sees,
    sizes,
)


def _ffn_of_ratio(scope: Scope) -> object:
    width, ratio = (
        scope.size("vision_config.hidden_size"),
        as_float(scope.config("vision_config.mlp_ratio"), scope.name),
    )
    return round(width * ratio) if width and ratio else None


def _one_layer_from(value: object, scope: Scope) -> object:
    return value[0] if isinstance(value, list) and value else DEFAULT


def _merged_patch(scope: Scope) -> int:
    """Pixels along one side of a square of patches."""
    return (scope.size("vision_config.patch_size") or 0) * (scope.size("vision_config.merge_size") or 0)


def _side_to(value: object, scope: Scope) -> object:
    return (as_int(value, scope.name) or 0) * _merged_patch(scope)


def _side_from(value: object, scope: Scope) -> object:
    patch, merge = (as_int(scope.gguf(f"vision.{name}_size"), scope.name) for name in ("patch", "spatial_merge"))
    side = as_int(value, scope.name)
    return side // (patch * merge) if side and patch and merge else DEFAULT


ffn_of_ratio = Converter(derive=_ffn_of_ratio)
downsampling = words({"4x": 2, "16x": 4})
one_layer = Converter(lambda value, scope: None if value is None else [value], _one_layer_from)
side_of_patches = Converter(_side_to, _side_from)

_EPS = epsilon("vision", "vision_config.layer_norm_eps")
_ACTIVATION = Key("", ("vision_config.hidden_act",), "str", converter=activation)
_PATCHES = "image_size/patch_size*image_size/patch_size"
_IMAGENET = {
    "preprocessor_config.image_mean": [0.485, 0.456, 0.406],
    "preprocessor_config.image_std": [0.229, 0.224, 0.225],
}
_CLIP = {
    "preprocessor_config.image_mean": [0.48145466, 0.4578275, 0.40821073],
    "preprocessor_config.image_std": [0.26862954, 0.26130258, 0.27577711],
}
_MERGER = "model.vision_tower.vit_merger."
_EMBEDDER = "model.vision_tower.patch_embedder."
_OF_VISION = f"vision_config.{WIDTH}"
_HALVES = {"preprocessor_config.image_mean": [0.5, 0.5, 0.5], "preprocessor_config.image_std": [0.5, 0.5, 0.5]}


def vision(**values: object) -> dict[str, object]:
    """Defaults of a vision_config."""
    return {f"vision_config.{name}": value for name, value in values.items()}


def siglip(hf: str, *, positions: str = f"{_PATCHES},{WIDTH}", part: str = "") -> tuple[TensorRow, ...]:
    """SigLIP: patches, positions, layers, and the norm behind them.

    `part` ("vision_config.") begins words of sizes that another part has too.
    """
    return (
        *patches(f"{hf}embeddings.patch_embedding"),
        tensor(f"{hf}embeddings.position_embedding.weight", "v.position_embd.weight", positions),
        *layers(
            *norms("layer_norm1", "layer_norm2"),
            *attention(),
            *mlp(ffn=f"{part}intermediate_size"),
            hf=f"{hf}encoder.layers.{{n}}.",
            depth=f"{part}num_hidden_layers",
        ),
        *norm(f"{hf}post_layernorm", "v.post_ln", WIDTH, REQUIRED),
    )


def _intern(need_norms: str | None) -> tuple[TensorRow, ...]:
    """InternViT: a token for the whole image before the patches, layers whose results are scaled."""
    v = "vision_model."
    return (
        tensor(f"{v}embeddings.class_embedding", "v.class_embd", f"1,1,{WIDTH}"),
        *patches(f"{v}embeddings.patch_embedding"),
        tensor(f"{v}embeddings.position_embedding", "v.position_embd.weight", f"1,{_PATCHES}+1,{WIDTH}"),
        *layers(
            *norm("norm1", "ln1", WIDTH, OPTIONAL),
            *norm("norm2", "ln2", WIDTH, OPTIONAL),
            *fused_attention(),
            *norm("attn.q_norm", "attn_q_norm", WIDTH, need=OPTIONAL),
            *norm("attn.k_norm", "attn_k_norm", WIDTH, need=OPTIONAL),
            *mlp(),
            tensor("ls1", "ls1.weight", WIDTH),
            tensor("ls2", "ls2.weight", WIDTH),
            hf=f"{v}encoder.layers.{{n}}.",
        ),
    )


TOWERS: tuple[Tower, ...] = (
    Tower(
        id="idefics3_vision",
        gguf="clip",
        hf_class="Idefics3ForConditionalGeneration",
        model_type="idefics3",
        hf_classes=("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
        model_types=("idefics3", "smolvlm"),
        when="projector_type=idefics3",
        text="model.text_model.",
        tensors=(
            *siglip("model.vision_model."),
            *linear(
                "model.connector.modality_projection.proj", "mm.model.fc", f"hidden,{WIDTH}*scale_factor*scale_factor"
            ),
        ),
        f32=(".position_embd.", ".patch_embd.weight"),
        keys=sees(
            *sizes(),
            *IMAGE,
            projector("idefics3"),
            _EPS,
            Key("vision.projector.scale_factor", ("scale_factor",)),
            GELU,
            Key("vision.preproc_image_size", ("preprocessor_config.size.longest_edge", "vision_config.image_size")),
        ),
        defaults={
            "": {
                **_HALVES,
                **vision(image_size=224, patch_size=32, hidden_size=1152, intermediate_size=3072),
                **vision(num_hidden_layers=12, num_attention_heads=16, layer_norm_eps=1e-6),
                "scale_factor": 2,
            }
        },
    ),
    Tower(
        id="intern_vision",
        gguf="clip",
        hf_class="InternVLChatModel",
        model_type="internvl_chat",
        hf_classes=("InternVLChatModel", "InternVisionModel"),
        model_types=("internvl_chat",),
        when="projector_type=internvl",
        tensors=(
            *_intern(None),
            *norm("mlp1.0", "mm.model.mlp.0", f"4*{WIDTH}", REQUIRED),
            *linear("mlp1.1", "mm.model.mlp.1", f"hidden,4*{WIDTH}", REQUIRED),
            *linear("mlp1.3", "mm.model.mlp.3", "hidden,hidden", REQUIRED),
        ),
        f32=(".position_embd.",),
        keys=sees(
            *sizes(),
            *IMAGE,
            projector("internvl"),
            _EPS,
            _ACTIVATION,
            Key("vision.projector.scale_factor", ("downsample_ratio",), converter=inverse),
            Key("vision.preproc_min_tiles", ("min_dynamic_patch",), converter=optional),
            Key("vision.preproc_max_tiles", ("max_dynamic_patch",), converter=optional),
        ),
        defaults={"": {**_IMAGENET, **vision(hidden_act="gelu", layer_norm_eps=1e-6)}},
        config={"vision_config.architectures": ["InternVisionModel"], "vision_config.model_type": "intern_vit_6b"},
    ),
    Tower(
        id="cogvlm_vision",
        gguf="clip",
        hf_class="CogVLMForCausalLM",
        model_type="cogvlm",
        hf_classes=("CogVLMForCausalLM",),
        model_types=("cogvlm",),
        when="projector_type=cogvlm",
        text="",
        tensors=(
            tensor("model.vision.patch_embedding.cls_embedding", "v.class_embd", f"1,{WIDTH}"),
            *patches("model.vision.patch_embedding.proj"),
            tensor(
                "model.vision.patch_embedding.position_embedding.weight",
                "v.position_embd.weight",
                f"{_PATCHES}+1,vision_config.{WIDTH}",
            ),
            *layers(
                *norms("input_layernorm", "post_attention_layernorm", width=_OF_VISION),
                *linear("attention.query_key_value", "attn_qkv", f"3*{_OF_VISION},{_OF_VISION}", REQUIRED),
                *linear("attention.dense", "attn_out", f"{_OF_VISION},{_OF_VISION}", REQUIRED),
                *mlp(width=_OF_VISION, ffn="vision_config.intermediate_size"),
                hf="model.vision.transformer.layers.{n}.",
                depth="vision_config.num_hidden_layers",
            ),
            *linear("model.vision.linear_proj.linear_proj", "mm.model.fc", f"hidden,{_OF_VISION}"),
            *norm("model.vision.linear_proj.norm1", "mm.post_fc_norm", "hidden", REQUIRED),
            *linear("model.vision.linear_proj.dense_h_to_4h", "mm.up", "intermediate_size,hidden"),
            *linear("model.vision.linear_proj.gate_proj", "mm.gate", "intermediate_size,hidden"),
            *linear("model.vision.linear_proj.dense_4h_to_h", "mm.down", "hidden,intermediate_size"),
            tensor("model.vision.boi", "v.boi", "1,1,hidden"),
            tensor("model.vision.eoi", "v.eoi", "1,1,hidden"),
        ),
        keys=(
            *sees(*sizes(head_count="num_heads"), *IMAGE, _EPS, projector("cogvlm")),
            Key("", ("intermediate_size",)),
        ),
        defaults={"": {**_CLIP, **vision(layer_norm_eps=1e-6)}},
    ),
    Tower(
        id="janus_vision",
        gguf="clip",
        hf_class="JanusForConditionalGeneration",
        model_type="janus",
        hf_classes=("JanusForConditionalGeneration",),
        model_types=("janus",),
        when="projector_type=janus_pro",
        text="model.language_model.",
        tensors=(
            *patches("model.vision_model.embeddings.patch_embedding"),
            tensor(
                "model.vision_model.embeddings.position_embedding.weight",
                "v.position_embd.weight",
                f"{_PATCHES},{WIDTH}",
            ),
            *layers(
                *norms("layer_norm1", "layer_norm2"),
                *attention(names=("q_proj", "k_proj", "v_proj", "projection_layer")),
                *mlp(),
                hf="model.vision_model.encoder.layers.{n}.",
            ),
            *norm("model.vision_model.post_layernorm", "v.post_ln", WIDTH, REQUIRED),
            *linear("model.aligner.fc1", "mm.0", f"hidden,{WIDTH}", REQUIRED),
            *linear("model.aligner.hidden_layers.0", "mm.1", "hidden,hidden", REQUIRED),
        ),
        f32=(".position_embd.",),
        ignored=(),
        keys=sees(
            *sizes(feed_forward_length=""),
            Key("vision.feed_forward_length", ("vision_config.intermediate_size",), converter=ffn_of_ratio),
            Key("", ("vision_config.mlp_ratio",), "f32", converter=ratio_of_ffn),
            *IMAGE,
            projector("janus_pro"),
            _EPS,
            _ACTIVATION,
        ),
        defaults={
            "": {
                **_HALVES,
                **vision(image_size=384, patch_size=16, hidden_size=1024, mlp_ratio=4.0, hidden_act="gelu"),
                **vision(num_hidden_layers=24, num_attention_heads=16, layer_norm_eps=1e-6),
            }
        },
        config={"vision_config.model_type": "janus_vision_model"},
    ),
    Tower(
        id="llama4_vision",
        gguf="clip",
        hf_class="Llama4ForConditionalGeneration",
        model_type="llama4",
        hf_classes=("Llama4ForConditionalGeneration",),
        model_types=("llama4",),
        when="projector_type=llama4",
        prefixes=(("model.vision_model.", "vision_model."), ("model.multi_modal_projector.", "multi_modal_projector.")),
        tensors=(
            tensor("vision_model.class_embedding", "v.class_embd", WIDTH),
            tensor("vision_model.positional_embedding_vlm", "v.position_embd.weight", f"{_PATCHES}+1,{WIDTH}"),
            tensor(
                "vision_model.patch_embedding.linear.weight", "v.patch_embd.weight", f"{WIDTH},3*patch_size*patch_size"
            ),
            *norm("vision_model.layernorm_pre", "v.pre_ln", WIDTH, REQUIRED),
            *norm("vision_model.layernorm_post", "v.post_ln", WIDTH, REQUIRED),
            *layers(
                *norms("input_layernorm", "post_attention_layernorm"),
                *attention(names=("q_proj", "k_proj", "v_proj", "o_proj")),
                *mlp(),
                hf="vision_model.model.layers.{n}.",
            ),
            *linear("vision_model.vision_adapter.mlp.fc1", "mm.model.mlp.1", "projector_input_dim,intermediate_size"),
            *linear(
                "vision_model.vision_adapter.mlp.fc2", "mm.model.mlp.2", "projector_output_dim,projector_output_dim"
            ),
            *linear("multi_modal_projector.linear_1", "mm.model.fc", "hidden,vision_output_dim"),
        ),
        keys=sees(
            *sizes(),
            *IMAGE,
            projector("llama4"),
            epsilon("vision", "vision_config.norm_eps"),
            Key("vision.projector.scale_factor", ("vision_config.pixel_shuffle_ratio",), converter=inverse),
            GELU,
            *(
                Key("", (f"vision_config.{name}",))
                for name in ("projector_input_dim", "projector_output_dim", "vision_output_dim")
            ),
        ),
        defaults={
            "": {
                **_HALVES,
                **vision(image_size=448, patch_size=14, hidden_size=768, intermediate_size=5632, norm_eps=1e-5),
                **vision(num_hidden_layers=34, num_attention_heads=16, pixel_shuffle_ratio=0.5),
                **vision(projector_input_dim=4096, projector_output_dim=4096, vision_output_dim=7680),
            }
        },
        config={"vision_config.model_type": "llama4_vision_model"},
    ),
    Tower(
        id="lfm2_vl_vision",
        gguf="clip",
        hf_class="Lfm2VlForConditionalGeneration",
        model_type="lfm2_vl",
        hf_classes=("Lfm2VlForConditionalGeneration",),
        model_types=("lfm2_vl",),
        when="projector_type=lfm2",
        prefixes=(
            ("model.vision_tower.vision_model.", "vision_tower.vision_model."),
            ("model.vision_tower.", "vision_tower.vision_model."),
            ("model.multi_modal_projector.", "multi_modal_projector."),
        ),
        tensors=(
            TensorRow(
                ("vision_tower.vision_model.embeddings.patch_embedding.weight",),
                ("v.patch_embd.weight",),
                (f"{WIDTH},16*16*3",),
                gguf_dims=(f"{WIDTH},3,16,16",),
                columns=("swap:1,16*16,3",),
            ),
            tensor("vision_tower.vision_model.embeddings.patch_embedding.bias", "v.patch_embd.bias", WIDTH),
            *siglip("vision_tower.vision_model.", positions=f"num_patches,{WIDTH}")[2:],
            *norm("multi_modal_projector.layer_norm", "mm.input_norm", f"{WIDTH}*4", OPTIONAL, need=OPTIONAL),
            *linear("multi_modal_projector.linear_1", "mm.1", f"projector_hidden_size,{WIDTH}*4", OPTIONAL),
            *linear("multi_modal_projector.linear_2", "mm.2", "hidden,projector_hidden_size", OPTIONAL),
        ),
        keys=sees(
            *sizes(image_size=""),
            Key("vision.image_size", constant=256),
            *IMAGE,
            projector("lfm2"),
            _EPS,
            Key("vision.projector.scale_factor", ("downsample_factor",)),
            GELU,
            Key("", ("vision_config.num_patches",)),
            Key("", ("projector_hidden_size",)),
        ),
        defaults={
            "": {**_HALVES, **vision(patch_size=16, layer_norm_eps=1e-6, num_patches=256), "downsample_factor": 2}
        },
        config={"vision_config.model_type": "siglip2_vision_model"},
    ),
    Tower(
        id="youtu_vl_vision",
        gguf="clip",
        hf_class="YoutuVLForConditionalGeneration",
        model_type="youtu_vl",
        hf_classes=("YoutuVLForConditionalGeneration",),
        model_types=("youtu_vl",),
        when="projector_type=youtuvl",
        text="",
        tensors=(
            *linear(
                "siglip2.vision_model.embeddings.patch_embedding",
                "v.patch_embd",
                f"{WIDTH},3*patch_size*patch_size",
                REQUIRED,
            ),
            *siglip("siglip2.vision_model.")[3:],
            *norm("merger.ln_q", "mm.input_norm", WIDTH),
            *linear("merger.mlp.0", "mm.0", f"4*{WIDTH},4*{WIDTH}", REQUIRED),
            *linear("merger.mlp.2", "mm.2", f"hidden,4*{WIDTH}", REQUIRED),
        ),
        keys=sees(
            *sizes(),
            *IMAGE,
            projector("youtuvl"),
            _EPS,
            _ACTIVATION,
            Key("vision.spatial_merge_size", ("vision_config.spatial_merge_size",)),
            Key("vision.window_size", ("vision_config.window_size",), converter=optional),
            Key("vision.wa_layer_indexes", ("vision_config.fullatt_block_indexes",), "i32[]"),
        ),
        defaults={
            "": {
                **_HALVES,
                **vision(image_size=560, spatial_merge_size=2, layer_norm_eps=1e-6, hidden_act="gelu_pytorch_tanh"),
            }
        },
        config={"vision_config.model_type": "siglip2_vision_model"},
    ),
    Tower(
        id="minicpmv4_6_vision",
        gguf="clip",
        hf_class="MiniCPMV4_6ForConditionalGeneration",
        model_type="minicpmv4_6",
        hf_classes=("MiniCPMV4_6ForConditionalGeneration",),
        model_types=("minicpmv4_6",),
        when="projector_type=minicpmv4_6",
        text="model.language_model.",
        tensors=(
            *siglip("model.vision_tower."),
            *norm(f"{_MERGER}layer_norm1", "v.vit_merger.ln1", WIDTH, REQUIRED),
            *(
                row
                for name, short in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("out_proj", "out"))
                for row in linear(
                    f"{_MERGER}self_attn.{name}", f"v.vit_merger.attn_{short}", f"{WIDTH},{WIDTH}", REQUIRED
                )
            ),
            *norm(f"{_MERGER}pre_norm", "v.vit_merger.ds_ln", f"4*{WIDTH}", REQUIRED),
            *linear(f"{_MERGER}linear_1", "v.vit_merger.ds_ffn_up", f"4*intermediate_size,4*{WIDTH}", REQUIRED),
            *linear(f"{_MERGER}linear_2", "v.vit_merger.ds_ffn_down", f"{WIDTH},4*intermediate_size", REQUIRED),
            *norm("model.merger.mlp.0.pre_norm", "mm.input_norm", f"4*{WIDTH}", REQUIRED),
            *linear("model.merger.mlp.0.linear_1", "mm.up", f"4*{WIDTH},4*{WIDTH}", REQUIRED),
            *linear("model.merger.mlp.0.linear_2", "mm.down", f"hidden,4*{WIDTH}", REQUIRED),
        ),
        keys=sees(
            Key("vision.image_size", ("preprocessor_config.scale_resolution",)),
            *sizes(image_size=""),
            Key("", ("vision_config.image_size",)),
            *IMAGE,
            projector("minicpmv4_6"),
            Key("vision.projector.scale_factor", ("preprocessor_config.downsample_mode",), converter=downsampling),
            Key("vision.wa_layer_indexes", ("insert_layer_id",), "i32[]", converter=one_layer),
            GELU,
            _EPS,
        ),
        defaults={
            "": {
                **_HALVES,
                **vision(image_size=980, patch_size=14, layer_norm_eps=1e-6),
                **vision(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12),
                **{"preprocessor_config.scale_resolution": 448, "preprocessor_config.downsample_mode": "16x"},
                "insert_layer_id": 6,
            }
        },
        config={"vision_config.model_type": "minicpmv4_6_vision"},
    ),
    Tower(
        id="muse_glimmer_vision",
        gguf="clip",
        hf_class="MuseGlimmerForConditionalGeneration",
        model_type="muse_glimmer",
        hf_classes=("MuseGlimmerForConditionalGeneration",),
        model_types=("muse_glimmer",),
        when="projector_type=muse-glimmer",
        text="model.language_model.",
        tensors=(
            TensorRow(
                (f"{_EMBEDDER}patch_embedding.weight",), (), (f"{WIDTH},patch_temporal*3*patch_size*patch_size",)
            ),
            tensor(
                f"{_EMBEDDER}position_embedding_table.weight",
                "v.position_embd.weight",
                f"pos_emb_height*pos_emb_width,{WIDTH}",
            ),
            *norm("model.vision_tower.ln_pre", "v.pre_ln", WIDTH, REQUIRED),
            *norm("model.vision_tower.ln_post", "v.post_ln", WIDTH, REQUIRED),
            *layers(
                *norms("norm1", "norm2"),
                *attention(
                    "attn",
                    names=("q_proj", "k_proj", "v_proj", "proj"),
                    order=("swap:num_attention_heads,2,hidden_size/num_attention_heads/2",),
                ),
                *mlp(),
                hf="model.vision_tower.layers.{n}.",
            ),
            *linear("model.vision_adapter.fc1", "mm.0", f"projector_hidden_size,{WIDTH}*merge_size*merge_size"),
            *linear("model.vision_adapter.fc2", "mm.1", "projector_hidden_size,projector_hidden_size"),
            *linear("model.vision_projection", "mm.2", "hidden,projector_hidden_size"),
        ),
        made={"v.patch_embd.weight": f"sum_of_frames:{_EMBEDDER}patch_embedding.weight,patch_temporal,patch_size"},
        f32=(".position_embd.",),
        keys=sees(
            Key("vision.image_size", ("vision_config.pos_emb_height",), converter=side_of_patches),
            *sizes(image_size=""),
            *IMAGE,
            projector("muse-glimmer"),
            _EPS,
            Key("vision.spatial_merge_size", ("vision_config.merge_size",)),
            Key("", ("vision_config.pos_emb_width",)),
            Key("", ("vision_config.patch_temporal",)),
            Key("", ("projector_hidden_size",)),
        ),
        defaults={
            "": {
                **_CLIP,
                **vision(patch_size=14, pos_emb_height=32, pos_emb_width=32, patch_temporal=2, merge_size=2),
                **vision(hidden_size=1536, intermediate_size=8960, num_hidden_layers=50, num_attention_heads=16),
                **vision(layer_norm_eps=1e-5),
            }
        },
        config={"vision_config.model_type": "muse_glimmer_vision"},
    ),
)
