"""Run the real engine on a tiny model in the workers, and compare with the oracle."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tests.unit.models import OPTIMIZERS, Curve, make_batches, make_model, reference_curve


@dataclass(frozen=True)
class Case:
    """One training run. Hashable, so that a failing one can be named."""

    family: str = "mixtral"
    world: int = 4
    tp: int = 2
    ep: int = 2
    zero: int = 1
    optimizer: str = "AdamW"
    aux: bool = False
    steps: int = 4
    samples: int = 4
    length: int = 9
    clip: float = 0.5
    dtype: str = "fp32"
    config: tuple = ()  # extra top-level configuration, as (key, value) pairs
    zero_config: tuple = ()
    expert_config: tuple = ()
    overrides: tuple = ()  # of the model's configuration
    options: tuple = ()  # of the run: see train()
    etp: int = 1

    def __str__(self) -> str:
        etp = [f"etp{self.etp}"] if self.etp > 1 else []
        parts = [self.family, f"w{self.world}", f"tp{self.tp}", f"ep{self.ep}", *etp, f"z{self.zero}", self.optimizer, self.dtype]
        extra = [*self.config, *self.zero_config, *self.expert_config, *self.overrides, *self.options]
        return "-".join(parts + ["aux"] * self.aux + [f"{key}={value}" for key, value in extra])


def ds_config(case: Case) -> dict:
    dp = case.world // case.tp
    accumulation = dict(case.config).get("gradient_accumulation_steps", 1)
    return {
        "train_micro_batch_size_per_gpu": max(1, case.samples // dp // accumulation),
        "gradient_clipping": case.clip,
        "zero_optimization": {"stage": case.zero, **dict(case.zero_config)},
        "zero_allow_untested_optimizer": True,
        "expert_parallel": {"enabled": True, "autoep_size": case.ep, "expert_tensor_parallel_size": case.etp, **dict(case.expert_config)},
        "tensor_parallel": {"autotp_size": case.tp},
        "steps_per_print": 10**9,
        **({"bf16": {"enabled": True}} if case.dtype == "bf16" else {}),
        **({"fp16": {"enabled": True, "initial_scale_power": 12}} if case.dtype == "fp16" else {}),
        **dict(case.config),
    }


def allow_fp16_on_cpu() -> None:
    """DeepSpeed's CPU accelerator denies fp16; the processor computes it."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    accelerator.supported_dtypes = lambda: [torch.float, torch.half, torch.bfloat16]


def build_engine(case: Case, model=None):
    """The engine of a case, on this rank."""
    import deepspeed_autoep

    if case.dtype == "fp16":
        allow_fp16_on_cpu()
    model = model if model is not None else make_model(case.family, aux=case.aux, **dict(case.overrides))
    kind, options = OPTIMIZERS[case.optimizer]
    stepper = kind([p for p in model.parameters() if p.requires_grad], **options)
    engine, *_ = deepspeed_autoep.initialize(model=model, optimizer=stepper, config=ds_config(case))
    return engine


@contextlib.contextmanager
def engine_of(case: Case, model=None):
    """The engine of a case, which is destroyed also where the test expects an error."""
    engine = build_engine(case, model)
    try:
        yield engine
    finally:
        engine.destroy()


def my_share(batch: torch.Tensor, case: Case) -> torch.Tensor:
    """The samples of this rank's data-parallel index."""
    return batch.chunk(case.world // case.tp)[dist.get_rank() // case.tp]


def mean_over_data(value: torch.Tensor, engine) -> float:
    total = value.detach().double().clone()
    dist.all_reduce(total, group=engine.autoep.handles.dense_dp_group)
    return (total / engine.autoep.handles.spec.dp_size).item()


def train(case: Case, model=None) -> Curve | None:
    """Train the case's model, or the one given; rank 0 returns the curve with the consolidated state.

    Options: ``checkpointing`` = reentrant | nonreentrant; ``manual`` = backward passes a step, whose last is declared the
    boundary by hand.
    """
    options = dict(case.options)
    engine = build_engine(case, model)
    if "checkpointing" in options:
        engine.module.gradient_checkpointing_enable({"use_reentrant": options["checkpointing"] == "reentrant"})
    accumulation = options.get("manual", engine.gradient_accumulation_steps())
    curve = Curve()
    for batch in make_batches(case.steps, case.samples, case.length):
        total = 0.0
        for index, share in enumerate(my_share(batch, case).chunk(accumulation)):
            if "manual" in options:
                engine.set_gradient_accumulation_boundary(index == accumulation - 1)
            loss = engine(input_ids=share, labels=share).loss
            engine.backward(loss / accumulation if "manual" in options else loss)
            if "manual" not in options or index == accumulation - 1:
                engine.step()
            total += mean_over_data(loss, engine) / accumulation
        curve.losses.append(total)
        curve.norms.append(float(engine.get_global_grad_norm()))
    return finished(curve, engine)


def finished(curve: Curve, engine) -> Curve | None:
    """The curve with the consolidated state on rank 0, None elsewhere; the engine is destroyed. Collective."""
    import deepspeed_autoep

    state = deepspeed_autoep.consolidated_state_dict(engine)
    engine.destroy()
    if dist.get_rank() == 0:
        curve.state = state
        return curve
    return None


def finished_beside(engine, plain: torch.nn.Module, worst: float) -> float:
    """The larger of ``worst`` and, on rank 0, a tenth of the largest parameter error against ``plain``, which was trained beside
    the engine; that is destroyed. Collective."""
    import deepspeed_autoep

    state = deepspeed_autoep.consolidated_state_dict(engine)
    engine.destroy()
    if state is not None:
        worst = max(worst, *(parameter_error(state[name], value) / 10 for name, value in plain.state_dict().items()))
    return worst


def reference_of(case: Case) -> Curve:
    dp = case.world // case.tp if case.aux else 1
    return reference_curve(
        case.family, case.optimizer, case.aux, case.steps, case.samples, case.length, case.clip, dp, case.overrides
    )


def relative(value: float, right: float) -> float:
    return abs(value - right) / abs(right)


def parameter_error(value: torch.Tensor, right: torch.Tensor, floor: float = 1e-12) -> float:
    """Largest difference relative to the parameter's largest element, or to ``floor`` where that is larger."""
    return ((value.double() - right.double()).abs().max() / right.double().abs().max().clamp_min(floor)).item()


def worst_errors(curve: Curve, right: Curve, floor: float = 1e-12) -> dict[str, float]:
    """Largest relative error of the losses, of the norms and of any parameter (see :func:`parameter_error`)."""
    assert curve.state.keys() == right.state.keys()
    return {
        "loss": max(relative(*pair) for pair in zip(curve.losses, right.losses, strict=True)),
        "norm": max(relative(*pair) for pair in zip(curve.norms, right.norms, strict=True)),
        "parameter": max(parameter_error(curve.state[name], right.state[name], floor) for name in right.state),
    }


def uncorrected(self, pieces, flats=(), leave_factors=False) -> list[float]:
    """In the place of ``GradientSync.correct``: no TP rule at all."""
    return [1.0] * len(flats)
