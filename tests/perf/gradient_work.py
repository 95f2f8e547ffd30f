"""Workers' side of ``bench_gradients``: gradients of many sizes in one TP group, and what can be done to them."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors

from deepspeed_autoep.folding import GradientFamily, build_folding_spec, create_folding_groups
from deepspeed_autoep.gradients.lanes import LaneVerifier
from deepspeed_autoep.gradients.norms import StatisticsPass
from deepspeed_autoep.gradients.reducer import TPGradientReducer
from deepspeed_autoep.gradients.slices import FlatGradients, GradientSlice, ParameterInfo
from deepspeed_autoep.ops import Segments
from tests.perf.memory import LiveTensors

# Small ones (norms, biases) between large ones (embeddings, routers), as a model has them.
SIZES = [size for _ in range(120) for size in (2048, 65536, 2048, 65536, 2048)]
CPU = torch.device("cpu")


class Gradients:
    """The same gradients in the three forms in which they come, one fp32 or 16-bit value each: 2**rank / 8."""

    def __init__(self, dtype: torch.dtype) -> None:
        world = dist.get_world_size()
        self.dtype = dtype
        self.handles = create_folding_groups(build_folding_spec(world_size=world, pp_size=1, tp_size=world, ep_size=1))
        self.infos = [ParameterInfo(index, f"p{index}", GradientFamily.REPLICATED) for index in range(len(SIZES))]
        self.separate = [torch.empty(size, dtype=dtype) for size in SIZES]
        self.flat = torch.empty(sum(SIZES), dtype=torch.float32)
        self.bare = torch.empty(sum(SIZES), dtype=torch.float32)
        self.parameters = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
        self.fill()

    def fill(self) -> None:
        value = 2.0 ** dist.get_rank() / 8
        for tensor in (*self.separate, self.flat, self.bare):
            tensor.fill_(value)

    def reducer(self, **options) -> TPGradientReducer:
        made = TPGradientReducer(self.handles, self.infos, CPU, **options)
        made.verify_next = False
        return made

    def pieces(self) -> list[GradientSlice]:
        return [GradientSlice(tensor, info, 1) for tensor, info in zip(self.separate, self.infos, strict=True)]

    def flat_pieces(self) -> FlatGradients:
        views = self.flat.split(SIZES)
        return FlatGradients(
            self.flat, tuple(GradientSlice(view, info, 1) for view, info in zip(views, self.infos, strict=True))
        )


def _stock(work: Gradients) -> Callable[[], None]:
    """DeepSpeed's own function, once for each parameter."""
    from deepspeed.module_inject import auto_ep_folding as stock

    spec = stock.build_folding_spec(world_size=dist.get_world_size(), pp_size=1, tp_size=dist.get_world_size(), ep_size=1)

    def run() -> None:
        for parameter, gradient in zip(work.parameters, work.separate, strict=True):
            stock.apply_folding_correction_to_grad_buffer(
                spec, parameter, gradient, tp_group=work.handles.tp_group, use_correction_marker=False
            )

    return run


def variants(work: Gradients) -> dict[str, Callable[[], None]]:
    pieces = work.pieces()
    ours, without = work.reducer(), work.reducer(synchronize_replicated=False)
    runs = {
        "stock, one by one": _stock(work),
        "ours, separate tensors": lambda: ours.correct(pieces),
        "bare all_reduce": lambda: dist.all_reduce(work.bare, group=work.handles.tp_group),
    }
    if work.dtype == torch.float32:
        flat = work.flat_pieces()
        runs["ours, one flat buffer"] = lambda: ours.correct_flat(flat)
        # As ZeRO's step does: the factor joins the multiplication of clipping.
        runs["ours, flat, factor left"] = lambda: ours.correct_flat(flat, leave_factor=True)
    target = work.flat_pieces()
    layout = Segments.of(work.separate, target.offsets())

    def into_flat() -> float:
        """ZeRO's step needs the gradients in one flat fp32 buffer in any case."""
        ours.ops.pack(layout, work.separate, work.flat)
        return ours.correct_flat(target, leave_factor=True)

    runs["ours, into ZeRO's flat buffer"] = into_flat
    runs["DeepSpeed's flatten and cast alone"] = lambda: _flatten_dense_tensors(work.separate).float()
    verifier = LaneVerifier(work.infos, work.handles, CPU, interval=1)
    same = [GradientSlice(torch.ones_like(piece.gradient), piece.parameter, 1) for piece in pieces]

    def verify() -> None:
        without.correct(same)
        verifier.after_step(same)

    runs["ours, sync off"] = lambda: without.correct(pieces)
    runs["ours, a verifying step"] = verify
    return runs


_CHECKED = (
    "stock, one by one",
    "ours, separate tensors",
    "ours, one flat buffer",
    "ours, flat, factor left",
    "ours, into ZeRO's flat buffer",
)


def check(work: Gradients, runs: dict[str, Callable[[], None]]) -> None:
    """A time of something else would mean nothing: the mean of the lanes' values, exactly."""
    world = dist.get_world_size()
    mean = (2.0**world - 1) / 8 / world
    for name in _CHECKED:
        if name in runs:
            work.fill()
            right = mean / (runs[name]() or 1.0)
            tensors = [work.flat] if "flat" in name else work.separate
            wrong = [tensor for tensor in tensors if not (tensor.float() == torch.tensor(right).to(work.dtype).float()).all()]
            if wrong:
                raise RuntimeError(f"{name} computed {wrong[0].flatten()[0].item()} instead of {right}")


def measure(dtype: str, rounds: int) -> dict[str, list[float]]:
    """Seconds from a barrier to the end on this rank, of each variant in turn, ``rounds`` times."""
    work = Gradients(getattr(torch, dtype))
    runs = variants(work)
    check(work, runs)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds + 2):
        for name, run in runs.items():
            work.fill()
            dist.barrier()
            start = time.perf_counter()
            run()
            elapsed = time.perf_counter() - start
            if index >= 2:
                samples[name].append(elapsed)
    return samples


def transfer_sizes(dtype: str, sizes: Sequence[int], depths: Sequence[int], rounds: int) -> dict[str, list[float]]:
    """As :func:`measure`, of the reducer with other transfer sizes and numbers of transfers under way."""
    work = Gradients(getattr(torch, dtype))
    pieces = work.pieces()
    made = {(size, depth): work.reducer(transfer_elements=size, under_way=depth) for size in sizes for depth in depths}
    samples: dict[str, list[float]] = {f"{size / 2**20:g} Mi elements, {depth} under way": [] for size, depth in made}
    samples["bare all_reduce"] = []
    for index in range(rounds + 1):
        for (size, depth), reducer in [*made.items(), ((0, 0), None)]:
            work.fill()
            dist.barrier()
            start = time.perf_counter()
            if reducer is None:
                dist.all_reduce(work.bare, group=work.handles.tp_group)
            else:
                reducer.correct(pieces)
            elapsed = time.perf_counter() - start
            if index >= 1:
                name = f"{size / 2**20:g} Mi elements, {depth} under way" if reducer else "bare all_reduce"
                samples[name].append(elapsed)
    return samples


def memory(dtype: str) -> dict[str, int]:
    """Bytes: the gradients, and the peak of what a first correction allocates and keeps."""
    work = Gradients(getattr(torch, dtype))
    pieces, reducer = work.pieces(), work.reducer()
    with LiveTensors() as live:
        reducer.correct(pieces)
    return {
        "gradients": sum(piece.gradient.nbytes for piece in pieces),
        "extra, peak": live.peak,
        "extra, kept": reducer.ring_bytes,
        "one bucket": 4 * sum(SIZES),
    }


def _bare_read(library: str, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    read = ctypes.CDLL(library).bare_read
    size = len(tensors)
    addresses = (ctypes.c_void_p * size)(*[tensor.data_ptr() for tensor in tensors])
    counts = (ctypes.c_int64 * size)(*[tensor.nbytes for tensor in tensors])
    return lambda: read(ctypes.c_int64(size), addresses, counts)


def statistics(dtype: str, library: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of the statistics, of one bare read of the same tensors (``library``), and of one operation a tensor."""
    work = Gradients(getattr(torch, dtype))
    pieces = work.pieces()
    compute = StatisticsPass(work.handles.spec, work.handles.stage_group, CPU, work.infos, groups=1)

    flat = torch.cat(work.separate)

    def one_by_one() -> None:
        torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in work.separate]).norm().item()

    segments, tensors = compute._prepare(pieces)[0], [piece.gradient for piece in pieces]
    runs = {
        "the pass over the gradients": lambda: compute.ops.squares_and_zeros(segments, tensors),
        "statistics, with their all_reduce": lambda: compute(pieces),
        "one read": _bare_read(library, tensors),
        "torch's sum of one flat tensor": lambda: flat.sum(),
        "a norm for each tensor": one_by_one,
        "small all_reduce": lambda: dist.all_reduce(torch.zeros(8, dtype=torch.float64)),
    }
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds + 2):
        for name, run in runs.items():
            dist.barrier()
            start = time.perf_counter()
            run()
            if index >= 2:
                samples[name].append(time.perf_counter() - start)
    return samples
