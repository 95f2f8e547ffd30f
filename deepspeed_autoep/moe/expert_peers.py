"""Rows shared among the ETP peers, who hold parts of the same experts along their intermediate size.

Every peer computes all peers' rows with its part: its output is a summand of theirs. Gathering rows and summing outputs
are each other's adjoint, so no factor is needed (DESIGN section 5). Rows are exchanged without padding: peers hold
different numbers of them. In every list the peers come by rank without this one, then this one: own rows never move.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from deepspeed_autoep.folding.groups import all_gather_single


@dataclass(frozen=True)
class PeerRows:
    """Rows of each other peer, by rank, and the own ones. A rank has at least one row (the zero row of an empty one)."""

    others: tuple[int, ...]
    own: int

    def splits(self, me: int) -> list[int]:
        """Rows by peer, none for this one: what a collective receives when rows are gathered."""
        return [*self.others[:me], 0, *self.others[me:]]


def own_last(by_rank: torch.Tensor, me: int) -> torch.Tensor:
    """[ranks, ...] -> a copy with row ``me`` at the end."""
    return torch.cat([by_rank[:me], by_rank[me + 1 :], by_rank[me : me + 1]])


def gather_counts(mine: torch.Tensor, group) -> torch.Tensor:
    """[N] int64 -> [etp, N] of all peers, the own last."""
    size = dist.get_world_size(group)
    if size == 1:
        return mine[None]
    everyone = mine.new_empty(size * mine.shape[0])
    all_gather_single(everyone, mine, group=group)
    return own_last(everyone.view(size, -1), dist.get_rank(group))


def _gather(rows: torch.Tensor, peers: PeerRows, group) -> torch.Tensor:
    """[own, H] -> [all, H]."""
    me, others = dist.get_rank(group), len(peers.others)
    sent = [peers.own] * others
    sent.insert(me, 0)
    theirs = sum(peers.others)
    out = rows.new_empty(theirs + peers.own, rows.shape[1])
    dist.all_to_all_single(out[:theirs], rows.repeat(others, 1), peers.splits(me), sent, group=group)
    out[theirs:] = rows
    return out


def _sum(rows: torch.Tensor, peers: PeerRows, group) -> torch.Tensor:
    """[all, H], of which every peer has a summand -> [own, H]. Sums in fp32 or better, in the same order every time."""
    me, others = dist.get_rank(group), len(peers.others)
    received = [peers.own] * others
    received.insert(me, 0)
    theirs = sum(peers.others)
    summands = rows.new_empty((others + 1) * peers.own, rows.shape[1])
    summands[others * peers.own :] = rows[theirs:]
    dist.all_to_all_single(
        summands[: others * peers.own], rows[:theirs].contiguous(), received, peers.splits(me), group=group
    )
    return summands.view(others + 1, peers.own, rows.shape[1]).sum(dim=0)


class GatherPeerRows(torch.autograd.Function):
    """Own rows [R, H] -> the rows of all peers. Backward: sum over the peers."""

    @staticmethod
    def forward(ctx, rows, peers: PeerRows, group):
        ctx.peers, ctx.group = peers, group
        return _gather(rows, peers, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _sum(grad, ctx.peers, ctx.group), None, None


class SumPeerRows(torch.autograd.Function):
    """Summands of all peers' rows -> own rows [R, H], summed. Backward: gather."""

    @staticmethod
    def forward(ctx, rows, peers: PeerRows, group):
        ctx.peers, ctx.group = peers, group
        return _sum(rows, peers, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _gather(grad.contiguous(), ctx.peers, ctx.group), None, None
