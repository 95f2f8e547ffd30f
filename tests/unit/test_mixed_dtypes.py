"""Models of two dtypes: what the user keeps in fp32 inside a bf16 or fp16 model is reduced, stored and trained in fp32.

Gradients are chosen where bits matter: a multiple of 2**-14 next to 1 is nothing that bf16 could carry. Real forwards are
compared with one process that holds the same dtypes.
"""

import copy
import functools
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed_autoep.engine.construction import FoldedConstruction
from deepspeed_autoep.engine.engine import AutoEPEngine
from deepspeed_autoep.engine.zero_dtypes import MixedDtypeGradients, MixedPrecision
from tests.unit.injection import expected_of_powers, injected_engine, one_backward
from tests.unit.models import EXPERTS, OPTIMIZERS, Curve, make_batches, make_model
from tests.unit.pool import run_on
from tests.unit.training import (
    Case,
    allow_fp16_on_cpu,
    build_engine,
    ds_config,
    my_share,
    parameter_error,
    relative,
    train,
)

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUTERS = ("mlp.gate.",)
# One of every family; the first parameter group is then fp32 throughout ("q_proj" and "lm_head" are the TP shards of it).
EVERY_FAMILY = (*ROUTERS, "layers.0.self_attn.q_proj", "layers.0.self_attn.q_norm", "experts.down_proj", "model.norm")
FIRST_GROUP = (*ROUTERS, "self_attn", "lm_head")


def mixed_model(case: Case, fp32: tuple[str, ...], frozen: bool = False):
    """Everything in the case's dtype but what has a name in ``fp32``; ``frozen``: only that is trainable."""
    model = make_model(case.family, **dict(case.overrides))
    for name, parameter in model.named_parameters():
        if not any(part in name for part in fp32):
            parameter.data = parameter.data.to(LOW[case.dtype])
            parameter.requires_grad_(not frozen)
    if case.family == "mixtral":  # its router multiplies by what it is given
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_pre_hook(lambda gate, inputs: (inputs[0].to(gate.weight.dtype), *inputs[1:]))
    return model


# Chosen gradients: fp32 parameters follow one process in fp32 to its own rounding


def fine(shape: torch.Size, rank: int, call: int) -> torch.Tensor:
    """Different for neighbours, ranks and passes; 15 bits."""
    count = shape.numel()
    return 1 + ((torch.arange(count) % 7) + 8 * rank + 64 * call).reshape(shape) * 2.0**-14


def follow(case: Case, fp32: tuple[str, ...], frozen: bool = False, late: str | None = None, steps: int = 2):
    """Train on chosen gradients. For every fp32 parameter: its family, its largest error against torch's optimizer on the
    exact average, relative to the largest step, and whether it went through bf16. ``late``: parts of names that have no
    gradient in a step's first backward pass."""
    calls = 0

    def gradient(name, family, parameter):
        if late is not None and late in name and calls % passes == 0:
            return None
        if parameter.dtype != torch.float32:
            return 2.0 ** dist.get_rank()
        return fine(parameter.shape, dist.get_rank(), calls)

    engine = injected_engine(case, gradient, mixed_model(case, fp32, frozen))
    passes = engine.gradient_accumulation_steps()
    kept = {p: info for p, info in engine.autoep_families.items() if any(part in info.name for part in fp32)}
    start = {parameter: parameter.detach().float().clone() for parameter in kept}
    copies = {parameter: value.clone().requires_grad_() for parameter, value in start.items()}
    kind, options = OPTIMIZERS[case.optimizer]
    stepper = kind(copies.values(), **options)
    for _ in range(steps):
        sums = {parameter: torch.zeros(parameter.shape, dtype=torch.float64) for parameter in kept}
        for first in [True] + [False] * (passes - 1):
            for parameter, info in kept.items():
                if late is None or late not in info.name or not first:
                    sums[parameter] += expected_of_powers(
                        info.family, engine.autoep.handles, lambda rank, p=parameter, call=calls: fine(p.shape, rank, call).double()
                    )
            one_backward(engine)
            engine.step()
            calls += 1
        for parameter, copied in copies.items():
            copied.grad = (sums[parameter] / passes).float()
        stepper.step()
    found = []
    for parameter, info in kept.items():
        moved = (copies[parameter] - start[parameter]).abs().max()
        error = ((parameter.detach().float() - copies[parameter]).abs().max() / moved).item()
        found.append((info.family.value, error, bool((parameter.detach().bfloat16().float() == parameter).all())))
    dtypes = {parameter.dtype for parameter in kept}
    engine.destroy()
    return found, dtypes


PARTITION = {"expert_config": (("tp_gradient_correction", "partition"),)}
BUCKET = {"expert_config": (("tp_gradient_correction", "bucket"),)}
TWO = (("gradient_accumulation_steps", 2),)
FP32_ACCUMULATION = (("data_types", {"grad_accum_dtype": "fp32"}),)
OVERLAP = (("overlap_comm", True), ("reduce_bucket_size", 3000))


def chosen(zero: int, **settings) -> Case:
    return Case(**{"family": "qwen3_moe", "ep": 4, "optimizer": "SGD", "clip": 0.0, "dtype": "bf16", **settings, "zero": zero})


FOLLOWED = {
    "z0": (chosen(0, config=TWO), EVERY_FAMILY),
    "z0_tp1": (chosen(0, tp=1, ep=2), EVERY_FAMILY),
    "z0_fp16": (chosen(0, dtype="fp16", config=TWO), EVERY_FAMILY),
    "z1": (chosen(1, **PARTITION, config=TWO), EVERY_FAMILY),
    "z1_tp1": (chosen(1, tp=1, ep=2), EVERY_FAMILY),
    "z1_bucket": (chosen(1, **BUCKET), EVERY_FAMILY),
    "z1_first_group": (chosen(1, config=TWO), FIRST_GROUP),
    "z1_fp16_first_group": (chosen(1, dtype="fp16"), FIRST_GROUP),
    "z1_first_group_late_hooks": (
        chosen(1, config=FP32_ACCUMULATION, zero_config=(("contiguous_gradients", False), ("overlap_comm", False))),
        FIRST_GROUP,
    ),
    "z1_scattered": (chosen(1, ep=1, **BUCKET, zero_config=(("contiguous_gradients", False),)), EVERY_FAMILY),
    "z1_accumulate_fp32": (chosen(1, config=FP32_ACCUMULATION + TWO), EVERY_FAMILY),
    "z2": (chosen(2, **PARTITION, config=TWO), EVERY_FAMILY),
    "z2_tp1": (chosen(2, tp=1, ep=1, config=TWO), EVERY_FAMILY),
    "z2_bucket": (chosen(2, **BUCKET), EVERY_FAMILY),
    "z2_fp16_first_group": (chosen(2, dtype="fp16", config=TWO), FIRST_GROUP),
    "z2_overlap": (chosen(2, zero_config=OVERLAP, config=TWO), EVERY_FAMILY),
    "z2_scattered": (chosen(2, ep=1, zero_config=(("contiguous_gradients", False), *OVERLAP), config=TWO), EVERY_FAMILY),
    "z2_accumulate_fp32": (chosen(2, **BUCKET, config=FP32_ACCUMULATION + TWO), EVERY_FAMILY),
    "z2_small_buckets": (chosen(2, zero_config=(("reduce_bucket_size", 700), ("round_robin_gradients", True))), EVERY_FAMILY),
    "z2_sent_in_fp32": (chosen(2, **BUCKET, config=(("communication_data_type", "fp32"), *TWO)), EVERY_FAMILY),
    "z1_sent_in_bf16": (chosen(1, config=(("communication_data_type", "bf16"), *FP32_ACCUMULATION)), EVERY_FAMILY),
}
EXACT = 1e-6


@pytest.mark.parametrize("name", FOLLOWED)
def test_fp32_parameters_follow_fp32(name):
    case, fp32 = FOLLOWED[name]
    for found, dtypes in run_on(4, follow, case, fp32):
        assert dtypes == {torch.float32}
        assert len({family for family, _, _ in found}) >= (3 if case.tp > 1 else 2)
        assert max(error for _, error, _ in found) <= EXACT, found
        assert not any(rounded for _, _, rounded in found)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_gradient_that_comes_in_the_second_pass_only(zero):
    for found, _ in run_on(4, follow, chosen(zero, config=TWO), EVERY_FAMILY, False, "layers.1.mlp.gate"):
        assert max(error for _, error, _ in found) <= EXACT, found


@pytest.mark.parametrize("block", ["bf16", "none"])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_fp32_parameters_beside_a_frozen_bf16_model(zero, block):
    """As adapters are. Without the block nothing is cast and everything trainable is fp32 already."""
    off = (("bf16", {"enabled": False}),) if block == "none" else ()
    for found, _ in run_on(4, follow, chosen(zero, config=TWO + off), ROUTERS, True):
        assert len(found) == 2 and max(error for _, error, _ in found) <= EXACT, found


@pytest.mark.parametrize("torch_adam", [True, False], ids=["torch", "fused"])
def test_adam_from_the_configuration(torch_adam):
    """Under ZeRO-0 DeepSpeed's own fused Adam has one flat master for each group, torch's one for each parameter."""
    for moved, dtypes in run_on(4, adam_step, chosen(0, family="mixtral", samples=4), torch_adam):
        assert dtypes == {torch.float32, torch.bfloat16}
        # Adam's first step is lr times the gradient's sign, to fp32's rounding of a weight; bf16 would give 0 or 2**-12 and more.
        assert moved == pytest.approx(1e-4, abs=1e-7)


def adam_step(case: Case, torch_adam: bool) -> tuple[float, set]:
    import deepspeed_autoep

    options = {"lr": 1e-4, "weight_decay": 0.0, "torch_adam": torch_adam}
    config = ds_config(case) | {"optimizer": {"type": "AdamW", "params": options}}
    engine, *_ = deepspeed_autoep.initialize(model=mixed_model(case, ROUTERS), config=config)
    routers = {info.name: parameter for parameter, info in engine.autoep_families.items() if "mlp.gate." in info.name}
    before = {name: parameter.detach().clone() for name, parameter in routers.items()}
    share = my_share(make_batches(1, case.samples, case.length)[0], case)
    engine.backward(engine(input_ids=share, labels=share).loss)
    engine.step()
    moved = max((parameter - before[name]).abs().max().item() for name, parameter in routers.items())
    dtypes = {parameter.dtype for parameter in engine.module.parameters()}
    engine.destroy()
    return moved, dtypes


# Each part switched off: the comparison must see it


def of_stock(owner, name: str):
    """``owner``'s method as DeepSpeed has it, whose classes come behind in the order of inheritance."""

    def method(self, *arguments, **options):
        return getattr(super(owner, self), name)(*arguments, **options)

    return mock.patch.object(owner, name, method)


def everything_in_low(self, param):
    return self.communication_data_type


def of_first_parameter(self):
    """The optimizer goes by its first parameter's dtype."""
    return MixedPrecision(torch.float32, None)


SABOTAGES = {
    "cast": (lambda: of_stock(FoldedConstruction, "_cast_module_mixed_precision"), "z2"),
    "sent_in_bf16_zero_0": (lambda: of_stock(AutoEPEngine, "allreduce_bucket"), "z0"),
    "sent_in_bf16": (lambda: mock.patch.object(MixedDtypeGradients, "get_param_comm_dtype", everything_in_low), "z1"),
    "buffer": (lambda: of_stock(MixedDtypeGradients, "setup_buckets"), "z2"),
    "copy": (lambda: of_stock(MixedDtypeGradients, "copy_grads_in_partition"), "z2"),
    "first_parameter": (lambda: mock.patch.object(AutoEPEngine, "_mixed_precision", of_first_parameter), "z1_first_group"),
    "zeros": (lambda: of_stock(MixedDtypeGradients, "get_all_grad_tensors"), "late"),
}


def follow_sabotaged(case: Case, fp32: tuple[str, ...], name: str):
    late = "layers.1.mlp.gate" if SABOTAGES[name][1] == "late" else None
    with SABOTAGES[name][0]():
        return follow(case, fp32, late=late, steps=1)


@pytest.mark.parametrize("name", SABOTAGES)
def test_each_part_switched_off_is_seen(name):
    case, fp32 = FOLLOWED.get(SABOTAGES[name][1], FOLLOWED["z2"])
    results = run_on(4, follow_sabotaged, case, fp32, name)
    assert max(error for found, _ in results for _, error, _ in found) > 100 * EXACT


# Real forwards against one process with the same dtypes


@functools.cache
def mixed_reference(case: Case, fp32: tuple[str, ...], frozen: bool = False) -> Curve:
    """Plain PyTorch: fp32 masters of every parameter, each gradient as the backward pass leaves it."""
    model = mixed_model(case, fp32, frozen)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = [parameter.detach().float().clone().requires_grad_() for parameter in trained]
    kind, options = OPTIMIZERS[case.optimizer]
    stepper = kind(masters, **options)
    scale = 2.0**12 if case.dtype == "fp16" else 1.0
    curve = Curve()
    for batch in make_batches(case.steps, case.samples, case.length):
        model.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        (loss.float() * scale).backward()
        for master, parameter in zip(masters, trained, strict=True):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            master.grad = gradient.float() / scale
        curve.losses.append(loss.item())
        curve.norms.append(torch.nn.utils.clip_grad_norm_(masters, case.clip).item())
        stepper.step()
        with torch.no_grad():
            for master, parameter in zip(masters, trained, strict=True):
                parameter.copy_(master)
    curve.state = copy.deepcopy(model.state_dict())
    return curve


def train_mixed(case: Case, fp32: tuple[str, ...], frozen: bool = False):
    with mock.patch("tests.unit.training.make_model", lambda *_, **__: mixed_model(case, fp32, frozen)):
        return train(case)


ALL_EXPERTS = {"mixtral": (("num_experts_per_tok", EXPERTS),), "deepseek_v3": (("num_experts_per_tok", EXPERTS), ("n_group", 1))}
LOSS, STATE = 1e-2, 2e-2


def real(family: str, zero: int, tp: int, ep: int, **settings) -> Case:
    return Case(family, 4, tp, ep, zero, **{"dtype": "bf16", "overrides": ALL_EXPERTS[family], **settings})


@pytest.mark.parametrize(
    ("case", "frozen"),
    [
        (real("deepseek_v3", 0, 2, 4), False),
        (real("deepseek_v3", 1, 2, 2, samples=8, config=TWO), False),
        (real("deepseek_v3", 2, 1, 4), False),
        (real("deepseek_v3", 2, 2, 2), True),
        (real("mixtral", 1, 1, 2), False),
        (real("mixtral", 2, 2, 4, config=FP32_ACCUMULATION), False),
        (real("mixtral", 0, 2, 1, dtype="fp16"), False),
        (real("mixtral", 1, 2, 1, dtype="fp16", optimizer="SGD"), False),
    ],
    ids=str,
)
def test_real_models(case, frozen):
    plain = Case(case.family, optimizer=case.optimizer, dtype=case.dtype, overrides=case.overrides, samples=case.samples)
    right = mixed_reference(plain, ROUTERS, frozen)
    result = run_on(4, train_mixed, case, ROUTERS, frozen)[0]
    assert {name: value.dtype for name, value in result.state.items()} == {name: value.dtype for name, value in right.state.items()}
    assert max(relative(*pair) for pair in zip(result.losses + result.norms, right.losses + right.norms, strict=True)) <= LOSS
    routers = {name: value for name, value in result.state.items() if "mlp.gate.weight" in name}
    assert routers
    for name, value in routers.items():
        assert not (value.bfloat16().float() == value).all()
        assert parameter_error(value, right.state[name]) <= STATE


# Bad input


def attempt(changes: tuple, config: dict, only_on: int | None):
    """initialize() with ``changes`` = (part of names, dtype, trainable) made to a bf16 model, on one rank or all."""
    import deepspeed_autoep

    allow_fp16_on_cpu()
    model = mixed_model(Case(dtype="bf16"), ROUTERS)
    for part, dtype, trainable in changes if only_on in (None, dist.get_rank()) else ():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.data = parameter.data.to(dtype)
                parameter.requires_grad_(trainable)
    try:
        stepper = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
        deepspeed_autoep.initialize(model=model, optimizer=stepper, config={**ds_config(Case(ep=4)), **config})
    except Exception as caught:
        return type(caught).__name__, str(caught)
    return "nothing", ""


BF16 = {"bf16": {"enabled": True}}
NORM = "model.layers.1.input_layernorm.weight"
REFUSED = {
    "float64": (((NORM, torch.float64, True),), BF16, "ModelError", [NORM, "torch.float64", "torch.float32 and torch.bfloat16"]),
    "fp16 in bf16": (((NORM, torch.float16, True),), BF16, "ModelError", [NORM, "torch.float16", "bf16.enabled"]),
    "no block": ((), {}, "ConfigError", ["model.embed_tokens.weight", "torch.bfloat16", '"bf16": {"enabled": true}']),
    "block off": ((), {"bf16": {"enabled": False}}, "ConfigError", ['"bf16": {"enabled": true}']),
    "the other block": ((), {"fp16": {"enabled": True}}, "ModelError", ["model.embed_tokens.weight", "fp16.enabled"]),
    "block of words": ((), {"bf16": {"enabled": "auto"}}, "ConfigError", ["bf16.enabled='auto'", "true and false"]),
    "param_dtype": ((), {**BF16, "data_types": {"param_dtype": "bf16"}}, "ConfigError", ["data_types.param_dtype", "mlp.gate.weight"]),
    "grad_accum_dtype": ((), {**BF16, "data_types": {"grad_accum_dtype": "fp16"}}, "ConfigError", ["grad_accum_dtype='fp16'", "'fp32'"]),
    "bf16 masters": (
        (),
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        "UnsupportedError",
        ["bf16.bf16_master_weights_and_grads", "mlp.gate.weight"],
    ),
    "autocast": ((), {**BF16, "torch_autocast": {"enabled": True}}, "UnsupportedError", ["torch_autocast", "bf16"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    changes, config, error, words = REFUSED[name]
    for kind, message in run_on(4, attempt, changes, config, None):
        assert kind == error, message
        assert all(word in message for word in words), message


def test_refused_on_every_rank_when_one_differs():
    changes, config, error, _ = REFUSED["float64"]
    kinds = [kind for kind, _ in run_on(4, attempt, changes, config, 2)]
    assert kinds == ["RankMismatchError", "RankMismatchError", error, "RankMismatchError"]


def buffers_and_dtypes(keep: list | None):
    """A model that is fp32 throughout is cast; in a mixed one buffers are left too, unless the configuration names them."""
    case = real("deepseek_v3", 1, 1, 4)
    model = mixed_model(case, ROUTERS)
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.data = buffer.data.to(torch.bfloat16)
    data_types = {} if keep is None else {"data_types": {"keep_in_fp32_modules": keep}}
    engine = build_engine(replace(case, config=tuple(data_types.items())), model)
    named = {**dict(engine.module.named_buffers()), **dict(engine.module.named_parameters())}
    found = {part: {value.dtype for name, value in named.items() if part in name} for part in ("inv_freq", "e_score", "mlp.gate.weight")}
    engine.destroy()
    cast = build_engine(case)
    found["cast"] = {parameter.dtype for parameter in cast.module.parameters()}
    cast.destroy()
    return found


@pytest.mark.parametrize("keep", [None, ["e_score_correction_bias"]])
def test_what_keeps_its_dtype(keep):
    bias = torch.bfloat16 if keep is None else torch.float32
    for found in run_on(4, buffers_and_dtypes, keep):
        assert found == {
            "inv_freq": {torch.float32},
            "e_score": {bias},
            "mlp.gate.weight": {torch.float32},
            "cast": {torch.bfloat16},
        }
