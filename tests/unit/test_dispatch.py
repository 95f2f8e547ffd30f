"""The dispatch against the model's own experts in one process, in fp64: outputs, and gradients of everything."""

import functools
import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from deepspeed_autoep.folding import build_folding_spec, create_folding_groups
from deepspeed_autoep.moe import dispatch, expert_peers
from deepspeed_autoep.moe.cutting import cut_expert_tensor
from deepspeed_autoep.moe.discovery import ExpertsSite, find_experts
from deepspeed_autoep.moe.dispatch import departure_slots, lane_cut
from deepspeed_autoep.moe.layer import convert_experts
from deepspeed_autoep.moe.native import is_native, sort_by_expert, sort_by_expert_reference
from tests.unit.pool import run_on

EXPERTS, HIDDEN, INNER = 8, 6, 12
DEAD = (3, 6)  # experts that no token visits
# (tp, ep, etp): ETP groups smaller than, equal to and larger than TP groups, across data ranks, and straddling both.
TOPOLOGIES = {
    4: [
        *((tp, ep, 1) for tp, ep in [(1, 1), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4)]),
        *[(1, 1, 4), (1, 2, 2), (2, 1, 2), (2, 2, 2), (2, 1, 4), (4, 1, 2), (4, 2, 2), (4, 1, 4)],
    ],
    6: [(1, 2, 3), (2, 1, 3), (2, 2, 3), (2, 1, 6), (3, 1, 2), (3, 2, 1), (6, 1, 3), (6, 2, 3)],
    8: [*((tp, ep, 1) for tp, ep in [(2, 4), (2, 8), (4, 4), (4, 8), (8, 2)]), (2, 2, 4), (4, 2, 2), (2, 4, 2), (8, 1, 4)],
}
TOKENS, TOP_K = (1, 5, 7, 8), (1, 2, 3)


def make_experts() -> torch.nn.Module:
    torch.manual_seed(3)
    config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS)
    config._experts_implementation = "eager"
    module = MixtralExperts(config).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def make_inputs(tokens: int, top_k: int, data_rank: int):
    """Hidden states, experts of each token (never a dead one), weights and the gradient from above."""
    generator = torch.Generator().manual_seed(100 * tokens + 10 * top_k + data_rank)
    alive = torch.tensor([expert for expert in range(EXPERTS) if expert not in DEAD])
    index = torch.stack([alive[torch.randperm(len(alive), generator=generator)[:top_k]] for _ in range(tokens)])
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return draw(tokens, HIDDEN), index, draw(tokens, top_k).abs() + 0.1, draw(tokens, HIDDEN)


def error(value: torch.Tensor, right: torch.Tensor) -> float:
    return (value - right).abs().max().item() if right.numel() else 0.0


@dataclass(frozen=True)
class Right:
    """What one process has for the tokens of one data rank: output, and gradients of inputs and of whole expert tensors."""

    output: torch.Tensor
    hidden: torch.Tensor
    weights: torch.Tensor
    experts: dict[str, torch.Tensor]


@functools.cache
def right_of(tokens: int, top_k: int, data_rank: int) -> Right:
    whole = make_experts()
    hidden, index, weights, grad = make_inputs(tokens, top_k, data_rank)
    output = whole(hidden.requires_grad_(), index, weights.requires_grad_())
    output.backward(grad)
    experts = {name: parameter.grad for name, parameter in whole.named_parameters()}
    return Right(output.detach(), hidden.grad, weights.grad, experts)


def compare(tp: int, ep: int, etp: int, backend: str, tokens: int, top_k: int) -> tuple[float, int]:
    """Worst absolute error on this rank, and the rows that its experts computed."""
    world, rank = dist.get_world_size(), dist.get_rank()
    handles = create_folding_groups(build_folding_spec(world_size=world, pp_size=1, tp_size=tp, ep_size=ep, etp_size=etp))
    data_rank, dp = rank // tp, world // tp

    module = make_experts()
    (site,) = find_experts(torch.nn.ModuleDict({"experts": module}))
    convert_experts(ExpertsSite("experts", module, site.layout), handles, backend=backend, validate_routing=True)
    seen = []
    compute = module._run_local_experts
    module._run_local_experts = lambda rows, counts: seen.append(rows.shape[0]) or compute(rows, counts)
    hidden, index, weights, grad = make_inputs(tokens, top_k, data_rank)
    output = module(hidden.requires_grad_(), index, weights.requires_grad_())
    output.backward(grad)

    first = handles.ep_rank * EXPERTS // ep
    right = right_of(tokens, top_k, data_rank)
    errors = [error(output, right.output), error(hidden.grad, right.hidden), error(weights.grad, right.weights)]
    for tensor in site.layout.tensors:
        total = getattr(module, tensor.name).grad / tp
        dist.all_reduce(total, group=handles.edp_group)
        summed = sum(right_of(tokens, top_k, rank).experts[tensor.name] for rank in range(dp))
        errors.append(error(total, cut_expert_tensor(summed, tensor, module.autoep.shard)))
    dead = [expert - first for expert in DEAD if first <= expert < first + EXPERTS // ep]
    errors.append(max((module.down_proj.grad[expert].abs().max().item() for expert in dead), default=0.0))
    return max(errors), seen[0]


def sweep(topologies, backend: str):
    return [
        (tp, ep, etp, tokens, top_k, *compare(tp, ep, etp, backend, tokens, top_k))
        for (tp, ep, etp), tokens, top_k in itertools.product(topologies, TOKENS, TOP_K)
    ]


@pytest.mark.parametrize("backend", ["loop", "model"])
@pytest.mark.parametrize("world", [4, 6, 8])
def test_equals_one_process(world, backend):
    results = run_on(world, sweep, TOPOLOGIES[world], backend)
    assert len(results[0]) == len(TOPOLOGIES[world]) * len(TOKENS) * len(TOP_K)
    for cases in zip(*results, strict=True):
        tp, ep, etp, tokens, top_k = cases[0][:5]
        assert max(case[5] for case in cases) < 1e-12, cases[0][:5]
        # Trap 3: each assignment is computed once over the stage (by each ETP peer). A rank without rows adds one padding row.
        computed, assignments = sum(case[6] for case in cases), etp * tokens * top_k * world // tp
        assert assignments <= computed <= assignments + etp * world


def sabotaged(name: str) -> float:
    """The same comparison with one piece left out."""
    module = dispatch
    if name == "slice":
        original, owner = dispatch._gather_columns, "_gather_columns"
        replacement = lambda parts, cut, group: [  # noqa: E731
            part * 2 for part in original(parts, cut, group)
        ]
    elif name == "weights":
        original, owner = dispatch._gather_columns, "_gather_columns"

        def replacement(parts, cut, group):
            first, second = original(parts, cut, group)
            second = torch.zeros_like(second)
            second[cut.start : cut.stop] = parts[1]
            return [first, second]

    elif name == "exchange":
        original, owner = dispatch._exchange, "_exchange"
        replacement = lambda rows, route, group: original(rows, route, group) * 0.5  # noqa: E731
    elif name == "etp_sum":  # own summand only, forward of the sum and backward of the gather
        module, original, owner = expert_peers, expert_peers._sum, "_sum"
        replacement = lambda rows, peers, group: rows[rows.shape[0] - peers.own :].clone()  # noqa: E731
    else:
        module, original, owner = expert_peers, expert_peers._gather, "_gather"

        def replacement(rows, peers, group):
            gathered = original(rows, peers, group)
            gathered[: sum(peers.others)] = 0.0
            return gathered

    setattr(module, owner, replacement)
    try:
        return compare(2, 2, 2 if name in PEER_FAULTS else 1, "loop", 8, 2)[0]
    finally:
        setattr(module, owner, original)


PEER_FAULTS = ("etp_sum", "etp_gather")


@pytest.mark.parametrize("name", ["slice", "weights", "exchange", *PEER_FAULTS])
def test_comparison_sees_a_fault(name):
    assert max(run_on(4, sabotaged, name)) > 1e-3


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("tokens", [0, 1, 5, 7, 8, 100])
def test_lane_cut_covers_every_token_once(tokens, tp):
    cuts = [lane_cut(tokens, tp, lane) for lane in range(tp)]
    assert [token for cut in cuts for token in range(cut.start, cut.stop)] == list(range(tokens))
    lengths = [cut.stop - cut.start for cut in cuts]
    assert lengths == sorted(lengths, reverse=True) and max(lengths) <= cuts[0].chunk


@pytest.mark.parametrize(("ep", "rank"), [(1, 0), (2, 0), (2, 1), (4, 2)])
def test_own_experts_leave_last(ep, rank):
    slots = departure_slots(8, ep, rank)
    leaving = sorted(range(8), key=slots.__getitem__)
    own = list(range(rank * 8 // ep, (rank + 1) * 8 // ep))
    assert leaving[-len(own) :] == own and leaving[: 8 - len(own)] == [e for e in range(8) if e not in own]


def rows_sent() -> tuple[int, int, int]:
    """Rows that enter an all-to-all, rows that this rank keeps, and its lane's rows, in one forward."""
    handles = create_folding_groups(build_folding_spec(world_size=4, pp_size=1, tp_size=2, ep_size=4))
    module = make_experts()
    (site,) = find_experts(torch.nn.ModuleDict({"experts": module}))
    convert_experts(ExpertsSite("experts", module, site.layout), handles, backend="loop", validate_routing=False)
    hidden, index, weights, _ = make_inputs(8, 2, 0)
    sent, original = [], dist.all_to_all_single
    dist.all_to_all_single = lambda out, rows, *rest, **named: sent.append(rows) or original(out, rows, *rest, **named)
    try:
        with torch.no_grad():
            module(hidden, index, weights)
    finally:
        dist.all_to_all_single = original
    lane = dist.get_rank() % 2
    mine = index[lane * 4 : lane * 4 + 4].flatten()
    kept = int((mine // 2 == handles.ep_rank).sum())
    return sum(rows.shape[0] for rows in sent if rows.dim() == 2), kept, len(mine)


def test_rows_that_stay_enter_no_collective():
    results = run_on(4, rows_sent)
    assert sum(kept for _, kept, _ in results) > 0
    assert sum(entered for entered, _, _ in results) == 2 * sum(mine - kept for _, kept, mine in results)


def misuse() -> str:
    handles = create_folding_groups(build_folding_spec(world_size=4, pp_size=1, tp_size=2, ep_size=2))
    module = make_experts()
    (site,) = find_experts(torch.nn.ModuleDict({"experts": module}))
    convert_experts(ExpertsSite("model.experts", module, site.layout), handles, backend="auto", validate_routing=False)
    try:
        module(torch.zeros(4, HIDDEN), torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, EXPERTS))
    except ValueError as caught:
        return str(caught)
    return ""


def test_unknown_call_is_an_error_that_names_the_module():
    for message in run_on(4, misuse):
        assert "model.experts" in message and "[4, 8]" in message


def in_place_and_identity():
    """The output takes in-place operations (blocks that add a shared expert so), and the module stays what it was."""
    handles = create_folding_groups(build_folding_spec(world_size=4, pp_size=1, tp_size=2, ep_size=2))
    module = make_experts()
    before = dict(module.named_parameters())
    (site,) = find_experts(torch.nn.ModuleDict({"experts": module}))
    convert_experts(ExpertsSite("experts", module, site.layout), handles, backend="auto", validate_routing=False)
    hidden, index, weights, grad = make_inputs(7, 2, 0)
    hidden.requires_grad_()
    out = module(hidden, index, weights)
    out += hidden
    out.mul_(2.0)
    out.backward(grad)
    same = all(before[name] is parameter for name, parameter in module.named_parameters())
    return isinstance(module, MixtralExperts), same, tuple(module.gate_up_proj.shape), hidden.grad is not None


def test_module_keeps_its_identity_and_output_allows_in_place():
    for result in run_on(4, in_place_and_identity):
        assert result == (True, True, (EXPERTS // 2, 2 * INNER, HIDDEN), True)


@pytest.mark.parametrize("rows", [0, 1, 17, 1000])
def test_sort_by_expert(rows):
    experts = torch.randint(0, 5, (rows,), generator=torch.Generator().manual_seed(rows))
    for sort in (sort_by_expert, sort_by_expert_reference):
        order, inverse, counts = sort(experts, 6)
        assert order.tolist() == sorted(range(rows), key=lambda row: int(experts[row]))  # Python's sort is stable
        assert inverse[order].tolist() == list(range(rows))
        assert counts.tolist() == [int((experts == expert).sum()) for expert in range(6)]


@pytest.mark.skipif(not is_native(), reason="the C++ sort was not built")
@pytest.mark.parametrize("bad", [-1, 6])
def test_sort_refuses_an_expert_out_of_range(bad):
    with pytest.raises(IndexError, match=f"row 1 is routed to expert {bad}: legal are 0..5"):
        sort_by_expert(torch.tensor([0, bad, 2]), 6)
