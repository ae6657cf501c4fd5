"""Cases of conformers."""

from __future__ import annotations

from tower_models import TEXT, TowerCase

CASES = (
    # As LiquidAI/LFM2-Audio-1.5B has them.
    TowerCase(
        "lfm2_audio_tower",
        "Lfm2AudioForConditionalGeneration",
        {
            "model_type": "lfm2_audio",
            "codebooks": 8,
            "lfm": {
                **TEXT,
                **{"model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "norm_eps": 1e-5, "conv_L_cache": 3},
                **{"layer_types": ["conv", "full_attention"], "conv_bias": False, "block_auto_adjust_ff_dim": False},
            },
            "encoder": {
                **{"feat_in": 128, "n_layers": 7, "d_model": 32, "n_heads": 4, "subsampling": "dw_striding"},
                **{"subsampling_factor": 8, "subsampling_conv_channels": 8, "ff_expansion_factor": 4},
                "conv_kernel_size": 9,
            },
            "adapter_hidden_dims": [64],
        },
        extra={
            **{f"conformer.layers.{n}.conv.batch_norm.num_batches_tracked": () for n in range(7)},
            "audio_embedding.embedding.weight": (24, 64),
            "audio_embedding.embedding_norm.weight": (64,),
            "audio_embedding.to_logits.weight": (24, 64),
            "audio_adapter.model.1.weight": (48, 32),
            "audio_adapter.model.1.bias": (48,),
            "audio_adapter.model.3.weight": (64, 48),
        },
        differs={r"\.conv_norm\.": "square roots of a library that does not round them right, off in the last bit"},
        lost=r"\.batch_norm\.",
    ),
)
