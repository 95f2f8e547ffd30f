"""Tiny trainable models of every experts family, with batches and a loss that is a mean over equal samples."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from tests.families.catalogue import Family, find
from tests.families.overrides import MODEL_CLASS, OVERRIDES, REDRAWN

# Tokens from 0 to LAST_SPECIAL_BELOW, and from FIRST_SPECIAL on, mean padding, images and the like.
LAST_SPECIAL_BELOW, FIRST_SPECIAL = 2, 48
# Of a parameter; the largest of the experts' have 8 * 96 * 32.
MOST_ELEMENTS = 2**18

# Every known spelling of a size; only those that a configuration class has are set.
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "swa_num_attention_heads": 4,
    "intermediate_size": 48,
    "dense_intermediate_size": 48,
    "vocab_size": 64,
    "unpadded_vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "max_position_embeddings": 64,
    "model_max_length": 64,
    "initializer_range": 0.1,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 16,
    "swa_head_dim": 16,
    "global_head_dim": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "o_lora_rank": 8,
    "o_groups": 2,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 16,
    "swa_v_head_dim": 16,
    "rotary_dim": 8,
    "index_topk": 4,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "moe_intermediate_size": 48,
    "moe_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "shared_experts_intermediate_size": 48,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "decoder_sparse_step": 1,
    "layer_group_size": 2,
    "global_attn_every_n_layers": 2,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_d_state": 16,
    "mamba_d_head": 16,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_dt_rank": 4,
    "mamba_chunk_size": 4,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 4,
    "router_hidden_size": 16,
    "hc_mult": 2,
    "hc_count": 2,
    "hc_lowrank": 8,
    "hc_sinkhorn_iters": 4,
    "rel_extent": 8,
    "d_rel": 8,
    "gated_norm_rank": 8,
    "n_layers_per_attn_res_block": 1,
    # What is random, or is not a mean over samples, would hide a difference between parallel and serial training.
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "classifier_dropout": 0.0,
    "input_jitter_noise": 0.0,
    "router_jitter_noise": 0.0,
    "router_aux_loss_coef": 0.0,
    "output_router_logits": False,
}
# These switch a feature off by being empty or zero: they are made small only where the family has them on.
SMALL_IF_SET: dict[str, Any] = {
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "shared_intermediate_size": 48,
    "qk_rope_head_dim": 8,
    "sliding_window": 4,
    "sliding_window_size": 4,
    "mtp_num_layers": 0,
    "num_nextn_predict_layers": 0,
}
# What an image or audio tower has; text does not go through it, so it only has to exist.
TOWER_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "d_model": 32,
    "embed_dim": 32,
    "intermediate_size": 32,
    "projection_intermediate_size": 32,
    "encoder_ffn_dim": 32,
    "mlp_dim": 32,
    "out_hidden_size": 32,
    "output_dim": 32,
    "projector_hidden_size": 32,
    "output_channels": 32,
    "downsample_channels": [32, 32],
    "hidden_sizes": [16, 16, 16, 16],
    "depths": [1, 1, 1, 1],
    "downsample_hidden_size": 32,
    "num_hidden_layers": 1,
    "encoder_layers": 1,
    "depth": 1,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "encoder_attention_heads": 2,
    "head_dim": 16,
    "image_size": 56,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "max_image_size": 64,
    "max_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}
GROUPS = {"n_group": 4, "num_expert_group": 4, "topk_group": 2}
MROPE_SECTIONS = {16: [2, 3, 3], 8: [2, 1, 1], 4: [2, 0, 0]}


def _model_class(family: Family) -> type[PreTrainedModel]:
    module = importlib.import_module(family.module)
    if family.name in MODEL_CLASS:
        return getattr(module, MODEL_CLASS[family.name])
    own = [
        each
        for each in vars(module).values()
        if inspect.isclass(each) and issubclass(each, PreTrainedModel) and each.__module__ == family.module
    ]
    for ending in ("ForCausalLM", "ForConditionalGeneration", "ForTokenClassification"):
        heads = [each for each in own if each.__name__.endswith(ending)]
        if heads:
            return min(heads, key=lambda each: len(each.__name__))
    raise LookupError(f"{family.name}: no class with a head in {family.module}")


def _cover(kinds: list[Any], length: int) -> list[Any]:
    """``length`` entries that hold one of each of ``kinds`` in order of appearance, the last one repeated."""
    distinct = list(dict.fromkeys(kinds))[-length:]
    return distinct + distinct[-1:] * (length - len(distinct))


def _layers(default: PreTrainedConfig, known: dict[str, Any]) -> dict[str, Any]:
    """Number of layers, and every list with an entry a layer, cut so that each kind of layer is there."""
    whole = getattr(default, "num_hidden_layers", None)
    if whole is None:
        return {}
    lists = {k: v for k, v in vars(default).items() if isinstance(v, list) and len(v) == whole and len(v) > 1}
    names = {k: v for k, v in lists.items() if v and all(isinstance(each, str) for each in v)}
    length = known.get("num_hidden_layers", max([2, *(len(set(each)) for each in names.values())]))
    cut = {k: _cover(v, length) if k in names else v[:length] for k, v in lists.items()}
    return {"num_hidden_layers": length, **cut}


def _small_rope(rope: dict[str, Any], rotary: int) -> dict[str, Any]:
    small = {k: _small_rope(v, rotary) if isinstance(v, dict) else v for k, v in rope.items()}
    if "mrope_section" in small:
        small["mrope_section"] = MROPE_SECTIONS[int(rotary * small.get("partial_rotary_factor", 1.0))]
    return small


def _text_values(config_class: type[PreTrainedConfig], known: dict[str, Any]) -> dict[str, Any]:
    default = config_class()
    has = vars(default)
    values = {k: v for k, v in SIZES.items() if k in has}
    values |= {k: v for k, v in SMALL_IF_SET.items() if has.get(k)}
    values |= {k: v for k, v in GROUPS.items() if (has.get(k) or 1) > 1 and (has.get("n_group") or 4) > 1}
    for prefix in ("", "swa_"):
        keys = f"{prefix}num_key_value_heads"
        if has.get(keys):
            values[keys] = 2 if has[keys] < has[f"{prefix}num_attention_heads"] else 4
    # With latent attention some families mean only the rotary part by it.
    if has.get("qk_rope_head_dim") and has.get("head_dim") == has["qk_rope_head_dim"]:
        values["head_dim"] = values["qk_rope_head_dim"]
    values |= _layers(default, known)
    if "moe_layer_end_index" in has:
        values["moe_layer_end_index"] = values["num_hidden_layers"] - 1
    if isinstance(has.get("rope_parameters"), dict):
        values["rope_parameters"] = _small_rope(has["rope_parameters"], values.get("head_dim", 8))
    # Kinds of layers that an override names are few, however many layers another one asks for.
    length = values.get("num_hidden_layers", 0)
    kinds = {k: _cover(v, length) for k, v in known.items() if isinstance(v, list) and k.endswith("layer_types")}
    return values | known | kinds


def _tower(default: PreTrainedConfig) -> PreTrainedConfig:
    has = vars(default)
    nested = {k: _tower(has[k]) for k in default.sub_configs if isinstance(has.get(k), PreTrainedConfig)}
    # One that has a depth for each stage counts its stages as layers.
    kept = {"num_hidden_layers"} if has.get("depths") else set()
    sizes = {k: v for k, v in TOWER_SIZES.items() if has.get(k) and k not in kept}
    if isinstance(has.get("layer_types"), list):
        sizes["layer_types"] = has["layer_types"][: sizes["num_hidden_layers"]]
    return type(default)(**sizes, **nested)


def _config(config_class: type[PreTrainedConfig], name: str, overrides: dict[str, Any]) -> PreTrainedConfig:
    known = {**OVERRIDES.get(name, {}), **overrides}
    if "text_config" not in config_class.sub_configs:
        return config_class(**_text_values(config_class, known))
    default = config_class()
    has = vars(default)
    text = type(has["text_config"])
    values: dict[str, Any] = {k: v for k, v in TOWER_SIZES.items() if has.get(k)}
    values["text_config"] = text(**_text_values(text, known))
    for key in config_class.sub_configs:
        if key != "text_config" and isinstance(has.get(key), PreTrainedConfig):
            values[key] = _tower(has[key])
    tokens = sorted(k for k, v in has.items() if k.endswith(("_token_id", "_token_index")) and v)
    values |= {key: FIRST_SPECIAL + i for i, key in enumerate(tokens)}
    return config_class(**values)


def _check_size(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    # A size that nothing here makes small would take all of the machine's memory.
    with torch.device("meta"):
        model = model_class._from_config(copy.deepcopy(config), attn_implementation="eager")
    large = [key for key, value in model.named_parameters() if value.numel() > MOST_ELEMENTS]
    if large:
        raise ValueError(f"{model_class.__name__}: not tiny: {large[:4]}")


def _fill_hash_table(table: Tensor, experts: int) -> None:
    """Different experts for each token of ``table`` (vocabulary, experts a token)."""
    # Without a checkpoint it is all zero: every token would go to the first expert, as often as it has experts.
    tokens = torch.arange(table.shape[0]).unsqueeze(1)
    strides = 1 + tokens // experts % (experts - 1)
    table.copy_((tokens + strides * torch.arange(table.shape[1])) % experts)


def build(name: str, seed: int = 0, **overrides: Any) -> nn.Module:
    """A tiny model of family ``name`` in fp32 and train mode; ``overrides`` are attributes of its text configuration."""
    family = find(name)
    model_class = _model_class(family)
    config = _config(model_class.config_class, name, overrides)
    config.dtype = torch.float32
    _check_size(model_class, config)
    torch.manual_seed(seed)
    model = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32)
    for key, value in model.named_parameters():
        if key.endswith(REDRAWN.get(name, ())):
            nn.init.normal_(value, std=SIZES["initializer_range"])
    for key, value in model.named_buffers():
        if key.endswith("tid2eid"):
            _fill_hash_table(value, config.num_local_experts)
    return model.float().train()


def _ids(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randint(LAST_SPECIAL_BELOW + 1, FIRST_SPECIAL, shape, generator=generator)


def _text(shape: tuple[int, int], generator: torch.Generator) -> dict[str, Tensor]:
    ids = _ids(shape, generator)
    return {"input_ids": ids, "labels": ids.clone()}


def _canvas(shape: tuple[int, int], generator: torch.Generator) -> dict[str, Tensor]:
    names = ("input_ids", "decoder_input_ids", "targets")
    return {name: _ids(shape, generator) for name in names}


def _embeds(shape: tuple[int, int], generator: torch.Generator) -> dict[str, Tensor]:
    names = ("inputs_embeds", "targets")
    return {name: torch.randn(*shape, SIZES["hidden_size"], generator=generator) for name in names}


def _modalities(shape: tuple[int, int], generator: torch.Generator) -> dict[str, Tensor]:
    # Every second position counts as an image's, or the experts for images would get no token.
    kinds = torch.arange(shape[1]).remainder(2).expand(shape).contiguous()
    return {**_text(shape, generator), "moe_mm_token_type_ids": kinds}


# By the model's class; every other one takes text.
BATCHES: dict[str, Callable[[tuple[int, int], torch.Generator], dict[str, Tensor]]] = {
    "DiffusionGemmaForBlockDiffusion": _canvas,
    "Ernie4_5_VLMoeForConditionalGeneration": _modalities,
    "Qwen3OmniMoeTalkerModel": _embeds,
}


def make_batches(
    model_or_name: nn.Module | str, steps: int, samples: int, length: int, seed: int = 1
) -> list[dict[str, Tensor]]:
    """For each step what ``loss_of`` takes; every tensor is (samples, length) or (samples, length, hidden).

    All are keyword arguments of forward but ``targets``, which is there for the models that compute no loss.
    """
    model_class = _model_class(find(model_or_name)) if isinstance(model_or_name, str) else type(model_or_name)
    generator = torch.Generator().manual_seed(seed)
    make = BATCHES.get(model_class.__name__, _text)
    return [make((samples, length), generator) for _ in range(steps)]


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over the samples of the batch, a scalar."""
    if "targets" not in batch:
        return model(**batch).loss
    targets = batch["targets"]
    output = model(**{name: value for name, value in batch.items() if name != "targets"})
    if targets.is_floating_point():
        return nn.functional.mse_loss(output.last_hidden_state, targets)
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
