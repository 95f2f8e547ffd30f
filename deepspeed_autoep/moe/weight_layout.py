"""How an experts module stores its weights, read from the interface's flags, and where cuts go. Pure.

transformers v5 decorates each experts class with ``use_experts_implementation``, which leaves these flags on the
module: ``has_gate`` (a gate next to the up projection), ``has_bias``, ``is_transposed`` (``[E, in, out]`` instead of
``[E, out, in]``), ``is_concatenated`` (``[gate | up]`` instead of interleaved pairs) and, newer, ``has_post_expert_norm``
(a norm with one weight for all experts, on whole output rows).

One :class:`ExpertTensor` says all that cutting, joining and files need to know of a tensor: experts lie along dimension 0
in blocks over EP; the intermediate size lies along ``intermediate_dim`` in ``halves`` runs that expert TP cuts alike.
"""

from __future__ import annotations

from dataclasses import dataclass

INTERFACE_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
POST_EXPERT_NORM = "post_expert_norm"  # name of the norm's module


@dataclass(frozen=True)
class ExpertTensor:
    """One stacked parameter of an experts module: dimension 0 is the expert."""

    name: str
    shape: tuple[int, ...]
    intermediate_dim: int | None  # the dimension that expert TP cuts; None: whole on every ETP peer
    # Runs of intermediate_dim that each hold the whole intermediate size: 2 for [gate | up]; interleaved pairs are one run.
    halves: int = 1

    def runs(self, etp_size: int, etp_rank: int) -> tuple[tuple[int, int], ...]:
        """Ranges ``[start, stop)`` of ``intermediate_dim`` that ETP rank ``etp_rank`` owns, in order; () where it is not cut.

        Each half is cut alike (a plain cut of ``[gate | up]`` would give one rank all gates and another all ups), and
        interleaved pairs stay together: the size of each run divides by ``etp_size`` times the pair, see
        :func:`check_expert_sizes`.
        """
        if self.intermediate_dim is None:
            return ()
        half = self.shape[self.intermediate_dim] // self.halves
        part = half // etp_size
        return tuple((h * half + etp_rank * part, h * half + (etp_rank + 1) * part) for h in range(self.halves))


@dataclass(frozen=True)
class ExpertShard:
    """Which part of an experts module one rank holds: experts ``[first, last)``, and of each its ETP part."""

    first: int
    last: int
    etp_size: int = 1
    etp_rank: int = 0

    @staticmethod
    def of(num_experts: int, ep_size: int, ep_rank: int, etp_size: int = 1, etp_rank: int = 0) -> ExpertShard:
        return ExpertShard(*expert_range(num_experts, ep_size, ep_rank), etp_size, etp_rank)

    def shape(self, tensor: ExpertTensor) -> tuple[int, ...]:
        """Of this rank's part of ``tensor``."""
        shape = [self.last - self.first, *tensor.shape[1:]]
        if tensor.intermediate_dim is not None:
            shape[tensor.intermediate_dim] //= self.etp_size
        return tuple(shape)


@dataclass(frozen=True)
class ExpertLayout:
    """The layout of one experts module with ``E`` experts, hidden size ``H`` and intermediate size ``I``."""

    has_gate: bool
    has_bias: bool
    is_transposed: bool
    is_concatenated: bool
    num_experts: int
    hidden_size: int
    intermediate_size: int
    tensors: tuple[ExpertTensor, ...]
    has_post_expert_norm: bool = False

    @property
    def up_name(self) -> str:
        return "gate_up_proj" if self.has_gate else "up_proj"


def expected_tensor_names(has_gate: bool, has_bias: bool) -> tuple[str, ...]:
    """Names of the stacked parameters that the flags promise."""
    weights = ("gate_up_proj" if has_gate else "up_proj", "down_proj")
    return weights + tuple(f"{name}_bias" for name in weights if has_bias)


def describe_layout(
    *,
    has_gate: bool,
    has_bias: bool,
    is_transposed: bool,
    is_concatenated: bool,
    shapes: dict[str, tuple[int, ...]],
    has_post_expert_norm: bool = False,
) -> ExpertLayout:
    """Derive E, H and I from the shapes and check every shape against them.

    Raises ``ValueError`` that says which shape was expected; the caller adds the module's name.
    """
    names = expected_tensor_names(has_gate, has_bias)
    missing = [name for name in names if name not in shapes]
    unknown = sorted(set(shapes) - set(names))
    if missing or unknown:
        raise ValueError(f"its parameters are {sorted(shapes)}, the flags ask for {list(names)}")

    up_name, width = names[0], 2 if has_gate else 1
    down = shapes["down_proj"]
    if len(down) != 3:
        raise ValueError(f"down_proj has shape {list(down)}, expected three dimensions [E, ., .]")
    experts = down[0]
    hidden, intermediate = (down[2], down[1]) if is_transposed else (down[1], down[2])
    up_rows = width * intermediate
    expected = {
        up_name: (experts, hidden, up_rows) if is_transposed else (experts, up_rows, hidden),
        "down_proj": down,
        f"{up_name}_bias": (experts, up_rows),
        "down_proj_bias": (experts, hidden),
    }
    for name in names:
        if tuple(shapes[name]) != expected[name]:
            raise ValueError(f"{name} has shape {list(shapes[name])}, expected {list(expected[name])} from down_proj {list(down)}")

    up_cut, down_cut = (2, 1) if is_transposed else (1, 2)
    cuts = {up_name: up_cut, "down_proj": down_cut, f"{up_name}_bias": 1, "down_proj_bias": None}
    halves = 2 if has_gate and is_concatenated else 1
    return ExpertLayout(
        has_gate=has_gate,
        has_bias=has_bias,
        is_transposed=is_transposed,
        is_concatenated=is_concatenated,
        num_experts=experts,
        hidden_size=hidden,
        intermediate_size=intermediate,
        has_post_expert_norm=has_post_expert_norm,
        tensors=tuple(
            ExpertTensor(name, expected[name], cuts[name], halves if name.startswith(up_name) else 1) for name in names
        ),
    )


def expert_range(num_experts: int, ep_size: int, ep_rank: int) -> tuple[int, int]:
    """Experts ``[first, last)`` that EP rank ``ep_rank`` owns: consecutive blocks of E / ep."""
    per_rank = num_experts // ep_size
    return ep_rank * per_rank, (ep_rank + 1) * per_rank
