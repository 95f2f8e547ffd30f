"""Train tiny models with DeepSpeed's own engine, save with its own save_checkpoint, and gather what is live. Runs in the workers."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist

from tests.unit.models import FAMILIES, make_batches, make_model
from tests.unit.training import allow_fp16_on_cpu

MOMENTS = ("exp_avg", "exp_avg_sq")
# Its shared expert has a gate, and another name than in DeepSeek's models.
QWEN2 = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 16}


@dataclass(frozen=True)
class StockCase:
    family: str = "mixtral"
    world: int = 2
    ep: int = 0  # 0: AutoEP off
    tp: int = 1
    zero: int = 1
    dtype: str = "fp32"
    steps: int = 2
    frozen: str = ""  # parameters whose names hold this
    accumulation: str = ""  # dtype of accumulated gradients: fp32 gives ZeRO-1 in bf16 another optimizer
    config: tuple = ()
    zero_config: tuple = ()
    expert_config: tuple = ()
    overrides: tuple = ()

    def __str__(self) -> str:
        parts = [self.family, f"w{self.world}", f"tp{self.tp}", f"ep{self.ep}", f"z{self.zero}", self.dtype, *filter(None, (self.frozen, self.accumulation))]
        extra = [*self.config, *self.zero_config, *self.expert_config, *self.overrides]
        return "-".join(parts + [f"{key}={value}" for key, value in extra])

    @property
    def dp(self) -> int:
        return self.world // self.tp


def stock_model(case: StockCase) -> torch.nn.Module:
    """The same weights in every process."""
    with mock.patch.dict(FAMILIES, {"qwen2_moe": ("Qwen2Moe", QWEN2)}):
        model = make_model(case.family, **dict(case.overrides))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (case.frozen and case.frozen in name))
    return model


def ds_config(case: StockCase) -> dict:
    tensor: dict = {}
    if case.tp > 1:
        specs = [
            {"patterns": [r".*\.self_attn\.[qkv]_proj\.weight$"], "partition_type": "column"},
            {"patterns": [r".*\.self_attn\.o_proj\.weight$"], "partition_type": "row"},
        ]
        tensor = {"tensor_parallel": {"autotp_size": case.tp, "partition_config": {"use_default_specs": False, "layer_specs": specs}}}
    expert = {"expert_parallel": {"enabled": True, "autoep_size": case.ep, **dict(case.expert_config)}} if case.ep else {}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": case.zero, **dict(case.zero_config)},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "steps_per_print": 10**9,
        **({"bf16": {"enabled": True}} if case.dtype == "bf16" else {}),
        **({"data_types": {"grad_accum_dtype": case.accumulation}} if case.accumulation else {}),
        **({"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}} if case.dtype == "fp16" else {}),
        **expert,
        **tensor,
        **dict(case.config),
    }


@contextlib.contextmanager
def stock_surroundings():
    """Stock's group registry as it was before, and its AutoEP without the step that fails on transformers 5.24 (the recording of
    router logits, which is not needed here)."""
    from deepspeed.module_inject.auto_ep_presets import base
    from deepspeed.utils import groups

    def kept(value):
        return dict(value) if isinstance(value, dict) else value

    before = {name: kept(value) for name, value in vars(groups).items() if not callable(value) and not name.startswith("__")}
    adapter = base.TransformersTopLevelRouterLogitsAdapter
    try:
        with mock.patch.object(adapter, "retarget_transformers_output_recorders", lambda *_: None):
            yield
    finally:
        for name, value in before.items():
            setattr(groups, name, value)


def train_and_save(case: StockCase, folder: str, client_state: dict | None = None) -> dict | None:
    """Save under ``folder/tag``; rank 0 returns what the engine holds then, see :func:`live`."""
    import deepspeed

    if case.dtype == "fp16":
        allow_fp16_on_cpu()
    with stock_surroundings():
        model = stock_model(case)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=ds_config(case))
        for batch in make_batches(case.steps, case.dp, 9):
            share = batch[dist.get_rank() // case.tp][None]
            engine.backward(engine(input_ids=share, labels=share).loss)
            engine.step()
        engine.save_checkpoint(folder, tag="tag", client_state=client_state or {})
        values = live(engine, case)
        engine.destroy()
    return values


def live(engine, case: StockCase) -> dict | None:
    """{state: {stock's name: the whole tensor}} on rank 0, put together by the ranks here and not by anything under test."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state") and case.steps:
        # Stock links parameters to their states after the first group's step, when the other groups have none yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found: dict[str, dict[str, list]] = {"weight": {}, "master": {}, **{state: {} for state in MOMENTS}}
    for name, parameter in engine.module.named_parameters():
        values = {"weight": parameter.detach().clone()} if case.zero < 3 else {}
        if parameter.requires_grad and case.zero:
            values["master"] = safe_get_full_fp32_param(parameter)
            if case.steps:
                values |= {state: safe_get_full_optimizer_state(parameter, state) for state in MOMENTS}
        for state, value in values.items():
            parts: list = [None] * dist.get_world_size()
            dist.all_gather_object(parts, value)
            found[state][name] = parts
    if dist.get_rank():
        return None
    return {state: {name: _whole(name, parts, case) for name, parts in values.items()} for state, values in found.items()}


def _whole(name: str, parts: list[torch.Tensor], case: StockCase) -> torch.Tensor:
    """Experts lie over the first ``ep`` ranks, or with their replicas' order first over every (world / ep)-th; attention over the
    first ``tp``."""
    if case.ep and ".experts." in name:
        stride = case.world // case.ep if dict(case.config).get("use_data_before_expert_parallelism") else 1
        return torch.cat(parts[::stride][: case.ep])
    if case.tp > 1 and "self_attn" in name and "norm" not in name:
        return torch.cat(parts[: case.tp], dim=1 if "o_proj" in name else 0)
    return parts[0]
