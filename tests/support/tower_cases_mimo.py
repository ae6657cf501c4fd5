"""Cases of MiMo's towers: windows of rows and columns, codes of sounds in a folder of their own."""

from __future__ import annotations

from tower_cases_moon import WHOLE
from tower_models import IMAGES, TowerCase

_BOOKS = (24, 16, 8)
_TOKENIZER = "audio_tokenizer.encoder.quantizer.vq.layers"

CASES = (
    TowerCase(
        "mimo_v2_towers",
        "MiMoV2ForCausalLM",
        {
            **WHOLE["mimo_v2_flash/v2_5"],
            "vision_config": {
                **{"model_type": "mimovl", "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4},
                **{
                    "num_key_value_heads": 2,
                    "num_query_groups": 2,
                    "in_chans": 3,
                    "patch_size": 8,
                    "hidden_act": "silu",
                },
                **{"spatial_patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 32},
                **{"visual_token_window_size": 16, "fullatt_block_indexes": [0], "vit_window_attn_types": [-1, 0, 1]},
                **{"use_sink": True, "out_hidden_size": 64},
            },
            "audio_config": {
                **{"audio_channels": 3, "group_size": 4, "audio_segment_size": 6000, "input_full_attention": True},
                **{"input_local_attn_heads": 2, "input_local_dim": 32, "input_local_head_dim": 16},
                **{"input_local_intermediate_size": 40, "input_local_layers": 2, "input_local_hidden_dropout": 0.0},
                **{"out_hidden_size": 64, "projection_layers": 2, "rope_theta": 640000, "partial_rotary_factor": 1.0},
                **{"add_post_norm": True, "speech_vocab_size": "28", "speech_zeroemb_idx": "24"},
            },
        },
        preprocessor={**IMAGES, "min_pixels": 1024, "max_pixels": 262144, "patch_size": 8, "merge_size": 2},
        files={
            "audio_tokenizer/config.json": {
                **{"d_model": 32, "encoder_layers": 4, "encoder_attention_heads": 2, "encoder_ffn_dim": 48},
                **{"n_mels": 16, "kernel_size": 3, "stride_size": 2, "avg_pooler": 2, "encoder_skip_layer_id": 3},
                **{"encoder_causal": True, "encoder_attn_window_size": [8, 0], "hybrid_attention": True},
                **{"swa_per_block": 2, "rope_theta": 10000, "num_quantizers": 3, "codebook_size": list(_BOOKS)},
                **{"scale_embedding": False, "ln_type": "LayerNorm", "activation_function": "gelu"},
            }
        },
        extra={
            **{f"visual.blocks.{layer}.attn.sinks": (4,) for layer in (1, 2)},
            **{f"{_TOKENIZER}.{i}._codebook.embed": (size, 32) for i, size in enumerate(_BOOKS)},
            **{f"{_TOKENIZER}.{i}._codebook.embed_avg": (size, 32) for i, size in enumerate(_BOOKS)},
            **{f"{_TOKENIZER}.{i}._codebook.cluster_size": (size,) for i, size in enumerate(_BOOKS)},
            **{f"speech_embeddings.{i}.weight": (28, 32) for i in range(3)},
            "audio_encoder.projection.mlp.0.weight": (96, 128),
            "audio_encoder.projection.mlp.2.weight": (64, 96),
            "audio_tokenizer.decoder.conv1.weight": (8, 32, 3),
        },
        lost=r"_codebook\.",
    ),
)
