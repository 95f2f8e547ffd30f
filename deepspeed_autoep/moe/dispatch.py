"""Token-partitioned dispatch: every token is sent once, whatever tp is (DESIGN section 5).

A TP group's lanes hold the same ``T`` tokens. Lane ``l`` takes rows ``[min(l*c, T), min((l+1)*c, T))`` with
``c = ceil(T / tp)``, sends its ``T_l * K`` rows to their experts over EP, shares what it received with its ETP peers (who
hold the other parts of the same experts), sums their partial outputs, sends them back, combines them to ``[T_l, H]``,
and the lanes gather ``[T, H]``. Slicing uses tp only, sharing uses etp only.

Gradient convention, "sum of lane losses": the final gather's backward is ``tp *`` own slice; the slice's backward is
all-gather / tp, for hidden states *and* for top-k weights. What flows upstream is exact and identical on every lane;
expert gradients come out ``tp`` times too large and the family table takes that back (EXPERT_TP_CANCEL).

Shapes: T tokens of a TP group, T_l of a lane, K experts a token, H hidden, R rows, E experts, ep expert parallelism.
Every rank enters every collective, forward and backward, also with no tokens: a rank without rows computes one zero row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from deepspeed_autoep.folding.groups import all_gather_single
from deepspeed_autoep.moe.expert_peers import GatherPeerRows, PeerRows, SumPeerRows, gather_counts, own_last
from deepspeed_autoep.moe.experts import RowCounts
from deepspeed_autoep.moe.native import sort_by_expert


@dataclass(frozen=True)
class LaneCut:
    """A lane's tokens ``[start, stop)`` of ``tokens``; ``chunk`` is the padded size that every lane gathers with."""

    tokens: int
    start: int
    stop: int
    chunk: int


def lane_cut(tokens: int, tp_size: int, lane: int) -> LaneCut:
    """Only trailing lanes are short, so equal padded chunks plus ``[:T]`` restore the order."""
    chunk = -(-tokens // tp_size)
    return LaneCut(tokens, min(lane * chunk, tokens), min((lane + 1) * chunk, tokens), chunk)


def _gather_lanes(local: torch.Tensor, cut: LaneCut, group) -> torch.Tensor:
    """[T_l, C] -> [T, C] over the lanes: one all-gather of equal chunks."""
    if local.shape[0] == cut.chunk:
        padded = local.contiguous()
    else:
        padded = local.new_zeros(cut.chunk, local.shape[1])
        padded[: local.shape[0]] = local
    gathered = local.new_empty(dist.get_world_size(group) * cut.chunk, local.shape[1])
    all_gather_single(gathered, padded, group=group)
    # No view may leave an autograd Function: a block that adds to its output in place would be refused.
    return gathered if gathered.shape[0] == cut.tokens else gathered[: cut.tokens].clone()


def _gather_columns(parts: list[torch.Tensor], cut: LaneCut, group) -> list[torch.Tensor]:
    """Gather several [T_l, C_i] in one collective. Mixed dtypes (fp32 router weights) travel as bytes."""
    mixed = len({part.dtype for part in parts}) > 1
    columns = [part.contiguous().view(torch.uint8) if mixed else part for part in parts]
    whole = _gather_lanes(torch.cat(columns, dim=1) if len(columns) > 1 else columns[0], cut, group)
    pieces = whole.split([column.shape[1] for column in columns], dim=1)
    return [
        piece.contiguous().view(part.dtype) if mixed else piece for piece, part in zip(pieces, parts, strict=True)
    ]


class _SliceTokens(torch.autograd.Function):
    """(hidden [T, H], weights [T, K]) -> this lane's rows of both.

    One Function for both, so that the order of their gathers in backward is fixed. Backward: all-gather / tp; an input
    that needs no gradient is left out, the same on every lane.
    """

    @staticmethod
    def forward(ctx, hidden, weights, cut: LaneCut, group):
        ctx.cut, ctx.group = cut, group
        sliced = hidden[cut.start : cut.stop].clone(), weights[cut.start : cut.stop].clone()
        ctx.mark_non_differentiable(
            *(part for part, needed in zip(sliced, ctx.needs_input_grad[:2], strict=True) if not needed)
        )
        return sliced

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        wanted = [position for position in (0, 1) if ctx.needs_input_grad[position]]
        result: list[torch.Tensor | None] = [None, None]
        if wanted:
            tp_size = dist.get_world_size(ctx.group)
            gathered = _gather_columns([grads[position] for position in wanted], ctx.cut, ctx.group)
            for position, whole in zip(wanted, gathered, strict=True):
                result[position] = whole / tp_size
        return *result, None, None


class _GatherTokens(torch.autograd.Function):
    """Lane's [T_l, H] -> [T, H] on every lane. Backward: own slice times tp, no collective."""

    @staticmethod
    def forward(ctx, local, cut: LaneCut, group):
        ctx.cut, ctx.tp_size = cut, dist.get_world_size(group)
        return _gather_lanes(local, cut, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad[ctx.cut.start : ctx.cut.stop] * ctx.tp_size, None, None


class _TokensToRows(torch.autograd.Function):
    """tokens [T_l, H] -> rows [T_l * K, H] sorted by expert: ``rows[i] = tokens[order[i] // K]``."""

    @staticmethod
    def forward(ctx, tokens, order, inverse, top_k: int):
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return tokens.index_select(0, torch.div(order, top_k, rounding_mode="floor"))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        hidden = grad.shape[1]
        by_token = grad.index_select(0, inverse).view(inverse.shape[0] // ctx.top_k, ctx.top_k, hidden)
        return by_token.sum(dim=1), None, None, None


class _Permute(torch.autograd.Function):
    """``out[i] = rows[order[i]]`` for a permutation, whose backward is a gather too (no scatter-add)."""

    @staticmethod
    def forward(ctx, rows, order, inverse):
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


@dataclass(frozen=True)
class Route:
    """How many rows go to and come from each EP peer (own entry 0), and how many stay: those never enter a collective."""

    send: list[int]  # [ep]
    receive: list[int]  # [ep]
    own: int

    def reversed(self) -> Route:
        return Route(self.receive, self.send, self.own)


def _exchange(rows: torch.Tensor, route: Route, group) -> torch.Tensor:
    """All-to-all-v of rows: peers' rows by rank, then the ones that stay. Own rows are the last of ``rows``, too.

    A rank that ends up without rows gets one zero row, so that its graph is like everybody's.
    """
    sent, received = sum(route.send), sum(route.receive)
    count = received + route.own
    out = rows.new_empty(count, rows.shape[1]) if count else rows.new_zeros(1, rows.shape[1])
    if dist.get_world_size(group) > 1:
        dist.all_to_all_single(out[:received], rows[:sent].contiguous(), route.receive, route.send, group=group)
    out[received:count] = rows[sent : sent + route.own]
    return out


class _ExchangeRows(torch.autograd.Function):
    """Rows over EP. Backward is the reverse."""

    @staticmethod
    def forward(ctx, rows, route: Route, group):
        ctx.route, ctx.group, ctx.rows = route, group, rows.shape[0]
        return _exchange(rows, route, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        back = _exchange(grad, ctx.route.reversed(), ctx.group)
        return back[: ctx.rows], None, None  # without the zero row, if the input had none


@dataclass(frozen=True)
class ExchangePlan:
    """How one lane's rows travel, and the order that sorts received rows by local expert."""

    route: Route
    peer_rows: PeerRows
    order: torch.Tensor | None  # all rows here -> sorted by local expert; None: they arrive sorted (ep = etp = 1)
    inverse: torch.Tensor | None
    counts: RowCounts
    own_experts: torch.Tensor  # [own rows] local expert of each row that this rank received, in order of arrival


@torch.no_grad()
def plan_exchange(counts: torch.Tensor, ep_group, etp_group) -> ExchangePlan:
    """``counts`` [E] int64: rows this lane has for each expert. One small collective over EP and over ETP, one host sync."""
    ep_size, me, etp_size = dist.get_world_size(ep_group), dist.get_rank(ep_group), dist.get_world_size(etp_group)
    experts = counts.shape[0] // ep_size
    theirs = torch.empty_like(counts)
    if ep_size == 1:
        theirs.copy_(counts)
    else:
        dist.all_to_all_single(theirs, counts, group=ep_group)
    received = theirs.view(ep_size, experts)  # [source, local expert]
    arrival = own_last(received, me)
    arrival[-1, 0] += received.sum() == 0  # the zero row of _exchange belongs to local expert 0
    here = gather_counts(arrival.reshape(-1), etp_group).view(etp_size, ep_size, experts)  # own last

    sums = [counts.view(ep_size, experts).sum(1), received.sum(1), here.sum((1, 2)), here.sum((0, 1))]
    send, receive, peers, per_expert = (part.tolist() for part in torch.cat(sums).cpu().split([ep_size, ep_size, etp_size, experts]))
    own = send[me]
    send[me] = receive[me] = 0

    expert_ids = torch.arange(experts, device=counts.device).repeat(etp_size * ep_size)
    row_experts = expert_ids.repeat_interleave(here.reshape(-1), output_size=sum(peers))
    order = inverse = None
    if ep_size * etp_size > 1:
        order, inverse, _ = sort_by_expert(row_experts, experts)
    offsets = torch.tensor(per_expert, device=counts.device).cumsum(0).to(torch.int32)
    return ExchangePlan(
        route=Route(send, receive, own),
        peer_rows=PeerRows(tuple(peers[:-1]), peers[-1]),
        order=order,
        inverse=inverse,
        counts=RowCounts(tuple(per_expert), offsets),
        own_experts=row_experts[sum(peers[:-1]) :],
    )


def departure_slots(num_experts: int, ep_size: int, ep_rank: int) -> list[int]:
    """Position of each expert in the order in which rows leave: peers' experts by rank, then the own ones."""
    per_rank = num_experts // ep_size
    first, last = ep_rank * per_rank, (ep_rank + 1) * per_rank
    leaving = [expert for expert in range(num_experts) if not first <= expert < last] + list(range(first, last))
    slots = [0] * num_experts
    for slot, expert in enumerate(leaving):
        slots[expert] = slot
    return slots


class TokenDispatcher:
    """Dispatch, expert compute and combine of one MoE layer, on explicit groups."""

    def __init__(self, *, num_experts: int, tp_group, tp_size: int, lane: int, ep_group, etp_group) -> None:
        self.num_experts = num_experts
        self.tp_group, self.tp_size, self.lane = tp_group, tp_size, lane
        self.ep_group, self.etp_group = ep_group, etp_group
        self.etp_size = dist.get_world_size(etp_group)
        self._slots = torch.tensor(departure_slots(num_experts, dist.get_world_size(ep_group), dist.get_rank(ep_group)))

    def __call__(
        self,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        run_experts: Callable[[torch.Tensor, RowCounts], torch.Tensor],
        finish_rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """hidden [T, H], top_k_index [T, K] int, top_k_weights [T, K] -> [T, H], identical on every lane.

        ``run_experts``: rows sorted by local expert -> their output, or this ETP peer's part of a sum of it;
        ``finish_rows``: whole output rows and the local expert of each -> what must be done once to a row.
        """
        cut = lane_cut(hidden.shape[0], self.tp_size, self.lane)
        tokens, weights = hidden, top_k_weights
        if self.tp_size > 1:
            tokens, weights = _SliceTokens.apply(hidden, top_k_weights, cut, self.tp_group)
        index = top_k_index[cut.start : cut.stop]

        if self._slots.device != index.device:
            self._slots = self._slots.to(index.device)
        order, inverse, slot_counts = sort_by_expert(self._slots[index.reshape(-1)], self.num_experts)
        plan = plan_exchange(slot_counts[self._slots], self.ep_group, self.etp_group)
        rows = _TokensToRows.apply(tokens, order, inverse, index.shape[1])
        rows = _ExchangeRows.apply(rows, plan.route, self.ep_group)
        if self.etp_size > 1:
            rows = GatherPeerRows.apply(rows, plan.peer_rows, self.etp_group)
        if plan.order is not None:
            rows = _Permute.apply(rows, plan.order, plan.inverse)
        rows = run_experts(rows, plan.counts)
        if plan.order is not None:
            rows = _Permute.apply(rows, plan.inverse, plan.order)
        if self.etp_size > 1:
            rows = SumPeerRows.apply(rows, plan.peer_rows, self.etp_group)
        rows = finish_rows(rows, plan.own_experts)
        rows = _ExchangeRows.apply(rows, plan.route.reversed(), self.ep_group)
        combined = self._combine(rows, inverse, order, weights, hidden.dtype)
        return _GatherTokens.apply(combined, cut, self.tp_group) if self.tp_size > 1 else combined

    @staticmethod
    def _combine(rows, inverse, order, weights, dtype) -> torch.Tensor:
        """Rows back in token order, weighted and summed over K, as transformers' grouped forward does."""
        tokens, top_k = weights.shape
        by_token = _Permute.apply(rows[: tokens * top_k], inverse, order).view(tokens, top_k, rows.shape[1])
        return (by_token * weights.unsqueeze(-1)).sum(dim=1).to(dtype)
