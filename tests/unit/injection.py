"""Give an engine chosen gradients: the model's forward becomes a linear function of its parameters."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist

from deepspeed_autoep.folding import FAMILY_RULES, GradientFamily
from tests.unit.training import Case, build_engine

TOKENS = torch.zeros(1, 1, dtype=torch.int64)


def injected_engine(
    case: Case, gradient: Callable[[str, GradientFamily, torch.Tensor], torch.Tensor | float | None], model=None
):
    """An engine whose backward pass leaves ``gradient(name, family, parameter)`` in every trainable parameter; None: none."""
    engine = build_engine(case, model)

    def forward(**_):
        terms = []
        for parameter, info in engine.autoep_families.items():
            value = gradient(info.name, info.family, parameter)
            if value is None:
                continue
            value = torch.as_tensor(value, dtype=parameter.dtype)
            terms.append((parameter * value.expand_as(parameter)).sum())
        # A 0-dim bf16/fp16 sum would overflow; its value does not matter, its gradient does.
        return SimpleNamespace(loss=torch.stack([term.float() for term in terms]).sum())

    engine.module.forward = forward
    engine._watch_interface(None)  # this forward reads the experts' weights itself
    # Lanes are given different gradients on purpose.
    engine.autoep_sync.reducer.verify_next = False
    return engine


def one_backward(engine) -> None:
    engine.backward(engine(input_ids=TOKENS).loss)


def one_step(engine) -> None:
    one_backward(engine)
    engine.step()


def stage_gradient(value: float, family: GradientFamily, spec) -> float:
    """What each rank's backward pass must leave for the whole model's gradient to be ``value``: experts come out tp
    times too large and are divided by dp after a sum over edp ranks (and etp ranks, where those hold the same); partial
    ones are a share on each lane."""
    if family is GradientFamily.EXPERT:
        return value * spec.tp_size * spec.dp_size / spec.edp_size
    if family is GradientFamily.EXPERT_SHARED_ETP:
        return value * spec.tp_size * spec.dp_size / (spec.edp_size * spec.etp_size)
    return value / spec.tp_size if family is GradientFamily.PARTIAL else value


def snapshot(engine) -> dict[str, torch.Tensor]:
    return {info.name: parameter.detach().clone() for parameter, info in engine.autoep_families.items()}


def expected_of_powers(family: GradientFamily, handles, value: Callable[[int], torch.Tensor | float] = lambda rank: 2.0**rank):
    """Gradient ``value(rank)`` on every rank, 2**rank unless given, through the table: written out from the groups' ranks."""
    spec, rank = handles.spec, dist.get_rank()
    lanes = {peer: [peer - peer % spec.tp_size + lane for lane in range(spec.tp_size)] for peer in range(spec.world_size)}
    ranks = {"dense_dp": handles.dense_dp_ranks, "edp": handles.edp_ranks, "expert_shared": handles.expert_shared_ranks}
    data = ranks[FAMILY_RULES[family].data_group]
    after_tp = {
        GradientFamily.TP_SHARDED: value,
        GradientFamily.REPLICATED: lambda peer: sum(value(lane) for lane in lanes[peer]) / spec.tp_size,
        GradientFamily.PARTIAL: lambda peer: sum(value(lane) for lane in lanes[peer]),
        GradientFamily.EXPERT: lambda peer: value(peer) / spec.tp_size,
        GradientFamily.EXPERT_SHARED_ETP: lambda peer: value(peer) / spec.tp_size,
    }[family]
    assert rank in data
    return sum(after_tp(peer) for peer in data) / spec.dp_size
