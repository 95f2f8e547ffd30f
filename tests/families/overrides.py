"""What single families need beyond the general derivation of ``tiny``, each with its reason."""

from __future__ import annotations

from typing import Any


def _rope(sections: list[int], **others: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **others}


# Attributes of the configuration that holds the experts.
OVERRIDES: dict[str, dict[str, Any]] = {
    # The experts are off, and unset, by default.
    "gemma4": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 48},
    "diffusion_gemma": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 48},
    # The shared experts have no default, and the model fails without them.
    "dots1": {"n_shared_experts": 1},
    # The first two layers are dense by default: no experts would be left.
    "flint": {"mlp_only_layers": [0]},
    # Its default for the kinds of layer is None, which the model does not take.
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    # Only whole blocks of layers are looped, not the first one.
    "inkling2_loop": {
        "num_hidden_layers": 3,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "loop_num_passes": 2,
        "loop_gate_rank": 8,
    },
    # The attention's index has no default sizes.
    "qwen4_exp": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    # Its configuration takes no other number of experts a token.
    "zaya": {"num_experts_per_tok": 1},
    # The periods are over more layers than the model has.
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    # It classifies tokens; as many classes as tokens let it take the labels of a language model.
    "openai_privacy_filter": {"num_labels": 64},
    # Its default for the kinds of feed-forward layer is None, which the model does not take.
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse"]},
    # One size for the experts of text, one for those of images; the rotary sections are for larger heads.
    "ernie4_5_vl_moe": {"moe_intermediate_size": [48, 48], "head_dim": 16, "rope_parameters": _rope([3, 3, 2])},
    # The sections of its rotary embedding are not in the configuration, and are for larger heads.
    "glm4v_moe": {"head_dim": 16, "rope_parameters": _rope([2, 1, 1], partial_rotary_factor=0.5)},
    # The sizes of its sliding layers have their own defaults, outside the configuration's fields.
    "dots3_note": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_qk_rope_head_dim": 8,
        "swa_v_head_dim": 16,
    },
    # The attention's index keeps whole pools of positions.
    "glm5_next": {"index_kpool": 2},
    # The model reads it, its configuration has no such field.
    "qwen3_omni_moe_talker": {"shared_expert_intermediate_size": 48},
}
# Where the model to train is not the first one with a language model's head.
MODEL_CLASS: dict[str, str] = {
    "diffusion_gemma": "DiffusionGemmaForBlockDiffusion",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeThinkerForConditionalGeneration",
    # Its head and its own loss read attributes that its configuration does not have.
    "qwen3_omni_moe_talker": "Qwen3OmniMoeTalkerModel",
}
# Ends of the names of parameters to draw after construction: ones that transformers leaves uninitialised, routers
# that are all zero (every choice of experts is a tie then), and biases, whose zeros hide one added twice.
REDRAWN: dict[str, tuple[str, ...]] = {
    "afmoe": ("router.gate.weight",),
    "gpt_oss": ("experts.gate_up_proj_bias", "experts.down_proj_bias"),
    "openai_privacy_filter": ("experts.gate_up_proj_bias", "experts.down_proj_bias"),
    "qwen3_omni_moe_talker": ("experts.gate_up_proj", "experts.down_proj", "mlp.gate.weight"),
}
