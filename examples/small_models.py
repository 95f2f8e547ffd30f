"""Small Hugging Face MoE models over bytes, by family, or the architecture of a configuration folder."""

from __future__ import annotations

from pathlib import Path

import torch
from corpus import VOCAB
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict] = {
    "deepseek_v3": {
        "intermediate_size": 384,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
    "mixtral": {"intermediate_size": 256, "num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "head_dim": 32,
        "intermediate_size": 256,
        "moe_intermediate_size": 256,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
}


class ModelChoiceError(ValueError):
    """``--model`` names nothing that can be trained here."""


def model_config(choice: str) -> PreTrainedConfig:
    """The configuration of a small model of a family, or of a folder with a ``config.json``.

    Raises :class:`ModelChoiceError`.
    """
    if choice in FAMILIES:
        return AutoConfig.for_model(choice, **{**_COMMON, **FAMILIES[choice]})
    if not (Path(choice) / "config.json").is_file():
        raise ModelChoiceError(
            f"--model {choice}: legal are {', '.join(FAMILIES)}, or a folder with a Hugging Face config.json"
        )
    try:
        config = AutoConfig.from_pretrained(choice)
    except (OSError, ValueError) as error:
        raise ModelChoiceError(f"--model {choice}: {error}") from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelChoiceError(f"--model {choice}: {config.model_type!r} has no causal language model in transformers")
    if getattr(config, "vocab_size", 0) < VOCAB:
        raise ModelChoiceError(f"--model {choice}: tokens are bytes, which need vocab_size >= {VOCAB}")
    return config


def build_model(config: PreTrainedConfig, seed: int) -> torch.nn.Module:
    """Random fp32 weights, the same ones for the same seed, in train mode."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def randomness(config: PreTrainedConfig) -> str | None:
    """The first setting that draws random numbers in training, such as dropout; None when there is none."""
    for name, value in config.to_dict().items():
        if ("dropout" in name or "jitter" in name) and isinstance(value, float) and value > 0:
            return f"{name}={value}"
    return None
