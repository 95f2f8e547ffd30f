"""Where an engine's optimizer keeps fp32 masters and states of each parameter: one view of ZeRO-1/2, both half wrappers, and a bare
torch optimizer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from deepspeed_autoep.checkpoint.tensors import Held
from deepspeed_autoep.engine.half import FoldedFusedOptimizer, FoldedUnfusedOptimizer
from deepspeed_autoep.engine.zero import FoldedZeroOptimizer
from deepspeed_autoep.errors import UnsupportedError

# DeepSpeed's FusedAdam counts a group's steps in the state of its last tensor; the others keep what they began with.
_COUNTS_BY_GROUP = "FusedAdam"
STEP = "step"  # a count, also where it is a tensor and the parameter has one element


@dataclass(frozen=True)
class Fragment:
    """Elements ``[start, stop)`` in C order of a parameter's local tensor, for which this rank steps the optimizer.

    ``owner``: the tensor in the optimizer's groups, by which its states are found. ``offset``: the fragment's place in a flat owner;
    None where the owner has the parameter's shape.
    """

    owner: torch.Tensor
    start: int
    stop: int
    offset: int | None = None

    def held(self, value: torch.Tensor) -> Held:
        """``value``: the owner, or a state of its shape."""
        value = value.detach()
        if self.offset is not None:
            value = value.view(-1)[self.offset : self.offset + self.stop - self.start]
        return Held(value, self.start, self.stop)


@dataclass(frozen=True)
class MasterState:
    """Of one engine, now. ``owners``: every parameter that the optimizer trains; ``fragments``: what of them is this rank's."""

    base: torch.optim.Optimizer | None  # None: an engine that does not train
    owners: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    fragments: dict[torch.Tensor, Fragment] = field(default_factory=dict)
    is_partitioned: bool = False  # over each group's data-parallel ranks

    def state_dtypes(self, parameter: torch.Tensor) -> dict[str, torch.dtype]:
        """States that have a value for each element."""
        return {name: value.dtype for name, value in self._states(parameter) if self._is_elementwise(name, value, parameter)}

    def values(self, parameter: torch.Tensor) -> dict[str, object]:
        """The other states: step counts."""
        found = {
            name: value
            for name, value in self._states(parameter)
            if value is not None and not self._is_elementwise(name, value, parameter)
        }
        if STEP in found and type(self.base).__name__ == _COUNTS_BY_GROUP:
            found[STEP] = self._group_steps[id(self._groups[self.owners[parameter]])]
        return found

    @functools.cached_property
    def _groups(self) -> dict[torch.Tensor, dict]:
        """Owner -> the optimizer's group that holds it."""
        return {owner: group for group in self.base.param_groups for owner in group["params"]}

    @functools.cached_property
    def _group_steps(self) -> dict[int, int]:
        """Of each group the largest count of its owners, when first asked."""
        return {
            id(group): max((self.base.state.get(owner, {}).get(STEP, 0) for owner in group["params"]), default=0)
            for group in self.base.param_groups
        }

    def _states(self, parameter: torch.Tensor) -> Iterator[tuple[str, object]]:
        yield from self.base.state.get(self.owners[parameter], {}).items()

    def _is_elementwise(self, name: str, value, parameter: torch.Tensor) -> bool:
        return isinstance(value, torch.Tensor) and name != STEP and value.shape == self.owners[parameter].shape

    def forget(self, kept: dict[torch.Tensor, set[str]]) -> None:
        """Drop all states but those ``kept`` by owner, which are read into where they are."""
        for owner in list(self.base.state):
            state, names = self.base.state[owner], kept.get(owner, set())
            for name in [name for name in state if name not in names]:
                del state[name]
            if not state:
                del self.base.state[owner]

    def prepare(self, parameter: torch.Tensor, dtypes: dict[str, torch.dtype | None]) -> None:
        """Make states that the optimizer has not made yet, as zeros, to be read into. None: the master's dtype."""
        owner = self.owners[parameter]
        for name, dtype in dtypes.items():
            state = self.base.state[owner]
            if not isinstance(state.get(name), torch.Tensor):
                state[name] = torch.zeros_like(owner.detach(), dtype=dtype or owner.dtype)

    def set_value(self, parameter: torch.Tensor, name: str, value: object) -> None:
        owner = self.owners[parameter]
        if isinstance(value, torch.Tensor):
            group = self._groups[owner]
            on_device = name != STEP or group.get("capturable") or group.get("fused")  # torch keeps step counts on the host
            value = value.to(owner.device if on_device else "cpu", copy=True)
        self.base.state[owner][name] = value


def master_state(optimizer) -> MasterState:
    """``optimizer``: an engine's. Raises :class:`UnsupportedError` for a wrapper that is not known."""
    if optimizer is None:
        return MasterState(None)
    if isinstance(optimizer, FoldedZeroOptimizer):
        return _of_zero(optimizer)
    if isinstance(optimizer, FoldedUnfusedOptimizer):
        pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        return _of_pairs(optimizer.optimizer, [pair for parameters, masters in pairs for pair in zip(parameters, masters, strict=True)])
    if isinstance(optimizer, FoldedFusedOptimizer):
        state = MasterState(optimizer.optimizer)
        for parameters, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            offset = 0
            for parameter in parameters:
                state.owners[parameter] = flat
                state.fragments[parameter] = Fragment(flat, 0, parameter.numel(), offset)
                offset += parameter.numel()
        return state
    if isinstance(optimizer, torch.optim.Optimizer):
        return _of_pairs(optimizer, [(parameter, parameter) for group in optimizer.param_groups for parameter in group["params"]])
    raise UnsupportedError(f"checkpoints of an optimizer {type(optimizer).__name__} are not supported")


def _of_pairs(base: torch.optim.Optimizer, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> MasterState:
    return MasterState(base, dict(pairs), {parameter: Fragment(master, 0, parameter.numel()) for parameter, master in pairs})


def _of_zero(optimizer: FoldedZeroOptimizer) -> MasterState:
    state = MasterState(optimizer.optimizer, is_partitioned=True)
    for index, flat in enumerate(optimizer.single_partition_of_fp32_groups):
        size = int(optimizer.partition_size[index])
        first = size * dist.get_rank(optimizer.real_dp_process_group[index])
        places = zip(optimizer.round_robin_bit16_groups[index], optimizer.round_robin_bit16_offsets[index], strict=True)
        for parameter, place in places:
            state.owners[parameter] = flat
            low, high = max(place, first), min(place + parameter.numel(), first + size)
            if low < high:
                state.fragments[parameter] = Fragment(flat, low - place, high - place, low - first)
    return state


def publish_masters(optimizer) -> None:
    """Give the model what its masters hold. Collective over each group's data-parallel ranks under ZeRO."""
    if isinstance(optimizer, FoldedZeroOptimizer):
        optimizer.update_lp_params()
    elif isinstance(optimizer, FoldedUnfusedOptimizer | FoldedFusedOptimizer):
        optimizer._autoep_publish_masters()


# Of DeepSpeed's loss scalers; a static one has only the first.
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def _scaler(optimizer):
    """A dynamic loss scaler, or None."""
    scaler = getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
    return scaler if getattr(scaler, "dynamic", False) or getattr(scaler, "dynamic_loss_scale", False) else None


def loss_scale_state(optimizer) -> dict[str, float] | None:
    """Of a dynamic loss scale, None without one."""
    scaler = _scaler(optimizer)
    return None if scaler is None else {name: getattr(scaler, name) for name in _SCALER if hasattr(scaler, name)}


def set_loss_scale_state(optimizer, state: dict[str, float] | None) -> None:
    """Nothing where there is no dynamic loss scale, or the checkpoint has none."""
    scaler = _scaler(optimizer)
    if scaler is not None and state is not None:
        for name in _SCALER:
            if name in state and hasattr(scaler, name):
                setattr(scaler, name, state[name] if name == "cur_scale" else int(state[name]))
