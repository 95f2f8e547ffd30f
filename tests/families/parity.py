"""Parity of every experts family with one process, and docs/families.md from it.

    python -m tests.families.parity                     # all families, minutes; writes docs/families.md
    python -m tests.families.parity mixtral gpt_oss     # some, no file

Each family trains a tiny model for three steps on four processes and is compared with plain PyTorch on the whole batch:
loss and norm to 1e-5, parameters to 1e-4 of their largest element (see limits_of), clipping on. SGD with momentum: AdamW divides by the
size of a gradient, also of one that is rounding noise, and some of these models are ill-conditioned.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import time
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from deepspeed_autoep import compat
from deepspeed_autoep.moe.discovery import find_experts
from tests.families.catalogue import list_families
from tests.families.tiny import build, loss_of, make_batches
from tests.unit.models import Curve
from tests.unit.pool import run_on
from tests.unit.training import finished, mean_over_data, worst_errors

WORLD, STEPS, SAMPLES, LENGTH, CLIP = 4, 3, 4, 8, 0.5
LIMITS = {"loss": 1e-5, "norm": 1e-5, "parameter": 1e-4}
# Parameters of smaller elements (that start at zero) are compared with this.
_SMALL = 1e-3
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


@dataclass(frozen=True)
class Folding:
    tp: int
    ep: int
    etp: int
    zero: int = 1

    def __str__(self) -> str:
        return f"tp{self.tp} ep{self.ep} etp{self.etp}"


FOLDINGS = (Folding(1, 2, 2, zero=1), Folding(2, 2, 1, zero=2), Folding(2, 2, 2, zero=0))


@cache
def reference(name: str, shares: int = 1) -> Curve:
    """One process, which takes a batch in ``shares`` pieces. A parameter without a gradient is stepped with zeros, as
    DeepSpeed does: weight decay reaches it."""
    model = build(name)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    stepper = torch.optim.SGD(parameters, **SGD)
    curve = Curve()
    for batch in make_batches(name, STEPS, SAMPLES, LENGTH):
        stepper.zero_grad()
        total = 0.0
        for share in range(shares):
            loss = loss_of(model, {key: value.chunk(shares)[share] for key, value in batch.items()}) / shares
            loss.backward()
            total += loss.item()
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        curve.norms.append(torch.nn.utils.clip_grad_norm_(parameters, CLIP).item())
        stepper.step()
        curve.losses.append(total)
    curve.state = copy.deepcopy(model.state_dict())
    return curve


def train(name: str, folding: Folding) -> Curve | None:
    """On one of the workers; rank 0 returns the curve with the consolidated state."""
    import deepspeed_autoep

    model = build(name)
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES * folding.tp // WORLD,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": folding.zero},
        "zero_allow_untested_optimizer": True,
        "expert_parallel": {"enabled": True, "autoep_size": folding.ep, "expert_tensor_parallel_size": folding.etp},
        "tensor_parallel": {"autotp_size": folding.tp},
        "steps_per_print": 10**9,
    }
    stepper = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], **SGD)
    engine, *_ = deepspeed_autoep.initialize(model=model, optimizer=stepper, config=config)
    curve, dp_rank = Curve(), dist.get_rank() // folding.tp
    for batch in make_batches(name, STEPS, SAMPLES, LENGTH):
        share = {key: value.chunk(WORLD // folding.tp)[dp_rank] for key, value in batch.items()}
        loss = loss_of(engine, share)
        engine.backward(loss)
        engine.step()
        curve.losses.append(mean_over_data(loss, engine))
        curve.norms.append(float(engine.get_global_grad_norm()))
    return finished(curve, engine)


def errors_of(name: str, folding: Folding) -> dict[str, float]:
    return worst_errors(run_on(WORLD, train, name, folding)[0], reference(name), _SMALL)


def limits_of(name: str) -> dict[str, float]:
    """The errors allowed: 1e-5 of loss and norm, 1e-4 of parameters; or what one process differs from itself by when it
    takes the samples one by one, times three, where that is more (few families, whose steps amplify rounding)."""
    noise = worst_errors(reference(name, SAMPLES), reference(name), _SMALL)
    return {key: max(limit, 3 * noise[key]) for key, limit in LIMITS.items()}


def is_exact(name: str, errors: dict[str, float]) -> bool:
    return all(errors[key] <= limit for key, limit in limits_of(name).items())


def has_tp_plan(name: str) -> bool:
    """Whether the tiny model says how its dense layers are cut."""
    return bool(compat.hf_tp_plan(build(name)))


def outcome(name: str, folding: Folding) -> tuple[str, dict[str, float]]:
    """("exact", "differs", "no tp_plan" or the last line of the error; the errors measured)."""
    if folding.tp > 1 and not has_tp_plan(name):
        return "no tp_plan", {}
    try:
        errors = errors_of(name, folding)
    except Exception:
        lines = [line for line in traceback.format_exc().strip().splitlines() if line.strip()]
        return lines[-1].strip(), {}
    return ("exact" if is_exact(name, errors) else "differs"), errors


def _flags(name: str) -> str:
    (first, *_) = find_experts(build(name))
    layout = first.layout
    words = {
        "no gate": not layout.has_gate,
        "biases": layout.has_bias,
        "transposed": layout.is_transposed,
        "interleaved": layout.has_gate and not layout.is_concatenated,
        "norm after": layout.has_post_expert_norm,
    }
    return ", ".join(word for word, holds in words.items() if holds) or "plain"


def row(name: str, found: list[tuple[str, dict[str, float]]]) -> str:
    """A line of the table."""
    cells = []
    for word, errors in found:
        exact = f"{errors['loss']:.0e}, {errors['norm']:.0e}" if word == "exact" else word
        cells.append(exact if word != "differs" else f"differs: {errors}")
    notes = []
    limit = limits_of(name)["norm"]
    if limit > LIMITS["norm"]:
        notes.append(f"one process differs from itself by {limit / 3:.0e}")
    if name in NOTES:
        notes.append(NOTES[name])
    return f"| {name} | {_flags(name)} | {' | '.join(cells)} | {'; '.join(notes)} |"


# What a user of the family must know.
NOTES = {
    "ernie4_5_vl_moe": "its experts for images run only where a rank has image tokens: every rank's batch must hold some, or none",
    "phimoe": "with router_jitter_noise > 0 its router draws random numbers, which lanes share and one process does not",
    "zaya": "tp 1, or a partition_config of your own",
    "openai_privacy_filter": "tp 1, or a partition_config of your own",
    "diffusion_gemma": "encoder and decoder share their weights: those blocks stay whole under TP",
    "inkling": "shared experts stay whole under TP",
    "inkling2": "shared experts stay whole under TP",
    "inkling2_loop": "shared experts stay whole under TP",
}
PAGE = """# Families

Every experts class of transformers {version}, {count} of them, found by its decorator (`use_experts_implementation`); written by
`python -m tests.families.parity` on {date}.

A tiny model of each trains for {steps} steps on {world} processes and in one plain PyTorch process: fp32, SGD with momentum, clipping
on. The cells are the largest relative differences of loss and of gradient norm (limit 1e-5, and 1e-4 for parameters). The foldings
run under ZeRO {zeros}. Where a family's rounding noise is larger, the last column says by how much one process differs from
itself when it takes the samples one by one; the limit is three times that.

Exact in every folding that the family's tp_plan allows: **{exact} of {count}**. No family has code of its own in
`deepspeed_autoep`.

| family | weights | {foldings} | |
|---|---|{dashes}---|
{rows}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="families; all without")
    options = parser.parse_args()
    rows, exact = [], 0
    names = options.names or [family.name for family in list_families()]
    for name in names:
        start = time.perf_counter()
        found = [outcome(name, folding) for folding in FOLDINGS]
        exact += all(word in ("exact", "no tp_plan") for word, _ in found)
        rows.append(row(name, found))
        print(f"{rows[-1]} {time.perf_counter() - start:.0f} s", flush=True)
    if not options.names:
        page = PAGE.format(
            version=transformers.__version__,
            count=len(names),
            date=datetime.date.today(),
            steps=STEPS,
            world=WORLD,
            zeros=", ".join(str(folding.zero) for folding in FOLDINGS),
            exact=exact,
            foldings=" | ".join(map(str, FOLDINGS)),
            dashes="---|" * len(FOLDINGS),
            rows="\n".join(rows),
        )
        Path("docs/families.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
