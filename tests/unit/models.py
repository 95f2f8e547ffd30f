"""Tiny real models, their batches, and the oracle: the same training in one plain PyTorch process."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field

import torch
import transformers

VOCAB, HIDDEN, HEADS, EXPERTS = 64, 32, 4, 8

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 64,
    "num_hidden_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
FAMILIES: dict[str, tuple[str, dict]] = {
    "mixtral": ("Mixtral", {"intermediate_size": 48, "num_local_experts": EXPERTS, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 8,
            "intermediate_size": 48,
            "moe_intermediate_size": 48,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "intermediate_size": 48,
            "moe_intermediate_size": 32,
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "rope_interleave": True,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 8,
            "intermediate_size": 48,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "olmoe": ("Olmoe", {"intermediate_size": 48, "num_experts": EXPERTS, "num_experts_per_tok": 2}),
}
HAS_AUX_LOSS = ("mixtral", "qwen3_moe", "gpt_oss", "olmoe")


def make_model(family: str, *, aux: bool = False, seed: int = 0, **overrides) -> torch.nn.Module:
    """A tiny random causal language model with 8 experts, in train mode; the same weights for the same seed."""
    name, options = FAMILIES[family]
    options = {**_COMMON, **options, **overrides}
    if aux:
        options |= {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    config = getattr(transformers, f"{name}Config")(**options)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    for parameter in model.parameters():
        if parameter.device.type != "meta" and not parameter.any():  # biases start as zeros: one that is added twice would not show
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def make_batches(steps: int, samples: int, length: int, seed: int = 1) -> torch.Tensor:
    """[steps, samples, length] token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (steps, samples, length), generator=generator)


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
}


@dataclass
class Curve:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


@functools.cache
def reference_curve(
    family: str, optimizer: str, aux: bool, steps: int, samples: int, length: int, clip: float, dp: int, overrides: tuple = ()
) -> Curve:
    """Plain PyTorch on the whole batch: loss, ``clip_grad_norm_``, ``optimizer.step()``.

    With an auxiliary loss, which is not linear in the tokens, the loss is the mean over the ``dp`` ranks' shares; else
    one forward of the whole batch (``dp`` = 1).
    """
    return plain_curve(make_model(family, aux=aux, **dict(overrides)), optimizer, steps, samples, length, clip, dp)


def plain_curve(model, optimizer: str, steps: int, samples: int, length: int, clip: float, dp: int = 1) -> Curve:
    """See :func:`reference_curve`; frozen parameters stay as they are."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind, options = OPTIMIZERS[optimizer]
    stepper = kind(trainable, **options)
    curve = Curve()
    for batch in make_batches(steps, samples, length):
        stepper.zero_grad()
        total = 0.0
        for share in batch.chunk(dp):
            loss = model(input_ids=share, labels=share).loss / dp
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(trainable, clip)
        stepper.step()
        curve.losses.append(total)
        curve.norms.append(norm.item())
    curve.state = copy.deepcopy(model.state_dict())
    return curve
