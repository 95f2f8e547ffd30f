"""The reducer in the engine: how many collectives and bytes, lanes that stay the same, corrections that come twice."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed_autoep.errors import UnsupportedError
from deepspeed_autoep.folding import GradientFamily
from deepspeed_autoep.gradients import reducer as reducer_module
from tests.unit.injection import expected_of_powers, injected_engine, one_backward, one_step, snapshot
from tests.unit.models import make_batches
from tests.unit.pool import run_on
from tests.unit.training import Case, build_engine, my_share

BUCKET = (("tp_gradient_correction", "bucket"),)
PARTITION = (("tp_gradient_correction", "partition"),)
R, P = GradientFamily.REPLICATED, GradientFamily.PARTIAL


# Collectives


@contextlib.contextmanager
def tp_collectives(handles):
    """Elements of each all-reduce over this rank's TP group in the context, while the group is told from the others."""
    found, real = [], dist.all_reduce

    def spy(tensor, *arguments, group=None, **options):
        if group is handles.tp_group:
            found.append(tensor.numel())
        return real(tensor, *arguments, group=group, **options)

    with mock.patch.object(reducer_module.dist, "all_reduce", spy):
        yield found


def buckets_and_collectives(case: Case, options: dict):
    """(all-reduces over TP that the reducer made, flushed buckets that hold gradients which meet their TP peers)."""
    engine = injected_engine(case, lambda *_: 1.0)
    flushed = []
    families = engine.autoep_families
    if case.zero:
        optimizer = engine.optimizer
        real = optimizer.reduce_ipg_grads

        def flush(comm_dtype=None):
            for dtype in [comm_dtype] if comm_dtype is not None else list(optimizer.ipg_buckets):
                members = [optimizer.bit16_groups[group][place] for group, place, _ in optimizer.ipg_buckets[dtype].params]
                if any(families[parameter].family.meets_tp_peers for parameter in members):
                    flushed.append(len(members))
            return real(comm_dtype)

        optimizer.reduce_ipg_grads = flush
    with tp_collectives(engine.autoep.handles) as found:
        for _ in range(options.get("backwards", 1)):
            one_backward(engine)
            engine.step()
    engine.destroy()
    return found, len(flushed)


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize(("size", "least"), [(1, 11), (700, 3), (10**6, 1)])
def test_one_collective_for_each_bucket_that_holds_replicated_parameters(zero, size, least):
    case = Case("qwen3_moe", 4, 2, 4, zero, "SGD", samples=2, zero_config=(("reduce_bucket_size", size),), expert_config=BUCKET)
    for found, buckets in run_on(4, buckets_and_collectives, case, {}):
        assert len(found) == buckets >= least


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_one_collective_a_step_on_the_partition(zero):
    case = Case("qwen3_moe", 4, 2, 4, zero, "SGD", samples=2, zero_config=(("reduce_bucket_size", 700),))
    sizes = run_on(4, buckets_and_collectives, case, {})
    assert all(len(found) == 1 for found, _ in sizes)


@pytest.mark.parametrize("zero", [1, 2])
def test_the_partition_sends_a_share_of_the_bytes(zero):
    """1/dp of what the buckets send, up to the padding of each part to 16 elements."""
    cases = [Case("qwen3_moe", 4, 2, 4, zero, "SGD", samples=2, expert_config=place) for place in (PARTITION, BUCKET)]
    partition, bucket = (sum(run_on(4, buckets_and_collectives, case, {})[0][0]) for case in cases)
    assert partition == pytest.approx(bucket / 2, rel=0.03)


@pytest.mark.parametrize("place", [PARTITION, BUCKET])
@pytest.mark.parametrize("zero", [1, 2])
def test_accumulation_corrects_once_a_step(zero, place):
    """Three backward passes: one correction on the partition, whatever the place for single passes."""
    config = (("gradient_accumulation_steps", 3),)
    case = Case("qwen3_moe", 4, 2, 4, zero, "SGD", samples=6, config=config, expert_config=place)
    for found, buckets in run_on(4, buckets_and_collectives, case, {"backwards": 3}):
        # ZeRO-1 flushes at the boundary only, so its buckets are full gradients.
        assert len(found) == (buckets if zero == 1 and place is BUCKET else 1)


def collectives_of_sync(case: Case):
    """Sizes of the all-reduces over TP in a step, and the model's PARTIAL elements and parameters."""
    engine = injected_engine(case, lambda *_: 1.0)
    with tp_collectives(engine.autoep.handles) as found:
        one_step(engine)
    partial = [p.numel() for p, info in engine.autoep_families.items() if info.family is P]
    engine.destroy()
    return found, sum(partial), len(partial)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_off_sends_partial_gradients_only(zero):
    off = (("replicated_gradient_sync", "off"),)
    case = Case("qwen3_moe", 4, 2, 4, zero, "SGD", samples=2, expert_config=off)
    results = run_on(4, collectives_of_sync, case)
    assert all(len(found) <= 1 for found, _, _ in results)
    # Lane 0 of both data-parallel ranks: shares of the parameters under ZeRO-1/2, all of them twice under ZeRO-0.
    sent = sum(sum(found) for found, _, _ in results[::2]) / (2 if zero == 0 else 1)
    _, elements, count = results[0]
    assert elements <= sent <= elements + 16 * (count + 1)
    case = Case("mixtral", 4, 2, 4, zero, "SGD", samples=2, expert_config=off)
    assert [found for found, _, _ in run_on(4, collectives_of_sync, case)] == [[]] * 4


# 2**rank in either place


def powers(case: Case):
    engine = injected_engine(case, lambda *_: 2.0 ** dist.get_rank())
    before = snapshot(engine)
    one_step(engine)
    wrong = [
        info.name
        for parameter, info in engine.autoep_families.items()
        if ((before[info.name] - parameter.detach()) / 0.5 - expected_of_powers(info.family, engine.autoep.handles)).abs().max()
        > 1e-4 * expected_of_powers(info.family, engine.autoep.handles)
    ]
    engine.destroy()
    return wrong


OVERLAP = (("overlap_comm", True), ("reduce_bucket_size", 3000))


NONCONTIGUOUS = (("contiguous_gradients", False),)


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize(
    ("world", "tp", "ep", "zero_config"),
    [(4, 2, 1, OVERLAP), (4, 2, 4, ()), (4, 2, 4, NONCONTIGUOUS), (4, 4, 2, OVERLAP), (8, 2, 4, ()), (8, 4, 8, OVERLAP)],
)
def test_powers_of_two_through_buckets(world, tp, ep, zero_config, zero):
    case = Case(
        "qwen3_moe",
        world,
        tp,
        ep,
        zero,
        "SGD",
        samples=world // tp,
        clip=0.0,
        zero_config=zero_config,
        expert_config=BUCKET,
    )
    assert run_on(world, powers, case) == [[]] * world


def order_of_reductions(case: Case):
    """("tp" or "data", stream) of each reduction of one backward pass, and a mark at each flush."""
    from deepspeed.accelerator import get_accelerator

    engine = injected_engine(case, lambda *_: 1.0)
    optimizer, accelerator = engine.optimizer, get_accelerator()
    optimizer.reduction_stream = "reduction stream"
    found, streams = [], ["default stream"]

    @contextlib.contextmanager
    def entered(stream):
        streams.append(stream)
        yield
        streams.pop()

    real_flush, real_reduce, real_correct = optimizer.reduce_ipg_grads, optimizer.allreduce_bucket, engine.autoep_sync.correct

    def flush(comm_dtype=None):
        found.append(("flush", ""))
        return real_flush(comm_dtype)

    def reduce(*arguments, **options):
        found.append(("data", streams[-1]))
        return real_reduce(*arguments, **options)

    def correct(*arguments):
        found.append(("tp", streams[-1]))
        return real_correct(*arguments)

    optimizer.reduce_ipg_grads, optimizer.allreduce_bucket, engine.autoep_sync.correct = flush, reduce, correct
    with mock.patch.object(type(accelerator), "stream", lambda self, stream: entered(stream)):
        one_backward(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("zero", [1, 2])
def test_with_overlap_the_reduction_stream_corrects_before_it_reduces(zero):
    overlap = (("overlap_comm", True), ("reduce_bucket_size", 700))
    for found in run_on(4, order_of_reductions, Case("qwen3_moe", 4, 2, 1, zero, "SGD", samples=2, zero_config=overlap)):
        assert [entry for entry in found if entry[0] != "flush" and entry[1] != "reduction stream"] == []
        flushes = " ".join(kind for kind, _ in found).split("flush")
        filled = [flush.split() for flush in flushes if flush.strip()]
        assert len(filled) > 3
        assert all(flush[0] == "tp" and set(flush[1:]) == {"data"} for flush in filled)


class RecordedStream:
    """Stands for a device's stream: notes in ``log`` who waits for whom."""

    def __init__(self, name: str, log: list) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: RecordedStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


def streams_of_reductions(case: Case) -> list[str]:
    """What one backward pass does on which stream, and the waits between them, as on a device with streams."""
    from deepspeed.accelerator import get_accelerator

    engine = injected_engine(case, lambda *_: 1.0)
    optimizer, accelerator, log = engine.optimizer, type(get_accelerator()), []
    streams = [RecordedStream("backward", log)]
    optimizer.reduction_stream = RecordedStream("reduction", log)

    @contextlib.contextmanager
    def entered(self, stream):
        streams.append(stream)
        yield
        streams.pop()

    def noted(name, real):
        def call(*arguments, **options):
            log.append(f"{name} on {streams[-1].name}")
            return real(*arguments, **options)

        return call

    sync = engine.autoep_sync
    sync.correct = noted("tp", sync.correct)
    optimizer.allreduce_bucket = noted("data", optimizer.allreduce_bucket)
    with contextlib.ExitStack() as patches:
        for name, value in {
            "resolves_data_dependency": lambda self: False,
            "stream": entered,
            "current_stream": lambda self: streams[-1],
            "synchronize": lambda self, *_: log.append("device waits"),
        }.items():
            patches.enter_context(mock.patch.object(accelerator, name, value))
        patches.enter_context(mock.patch.object(torch.Tensor, "record_stream", lambda *_: None))
        patches.enter_context(mock.patch.object(torch, "_foreach_div_", noted("division", torch._foreach_div_)))
        one_backward(engine)
    engine.destroy()
    return log


WAITS = {
    # The backward stream waits for the buckets before this one, never for the correction of this one.
    True: ["reduction waits for backward", "backward waits for reduction", "tp on reduction", "data on reduction"],
    # The division by dp is the backward stream's, so it waits for the correction.
    False: ["device waits", "tp on reduction", "backward waits for reduction", "division on backward", "data on reduction"],
}


@pytest.mark.parametrize("contiguous", [True, False])
def test_streams_wait_for_what_they_need_and_no_more(contiguous):
    overlap = (("overlap_comm", True), ("reduce_bucket_size", 10**6), ("contiguous_gradients", contiguous))
    for log in run_on(4, streams_of_reductions, Case("qwen3_moe", 4, 2, 1, 2, "SGD", samples=2, zero_config=overlap)):
        assert log.count("tp on reduction") == 1 and "data on backward" not in log and "tp on backward" not in log
        # In this order; contiguous ones without a wait in between.
        positions = [log.index(step) for step in WAITS[contiguous]]
        assert positions == sorted(positions)
        if contiguous:
            after = log[log.index("tp on reduction") : log.index("data on reduction")]
            assert "backward waits for reduction" not in after and "device waits" not in after


def corrected_twice(case: Case, how: str):
    """Stock's own correction on top of ours."""
    engine = injected_engine(case, lambda *_: 2.0 ** dist.get_rank())
    optimizer = engine.optimizer
    if how == "stock":
        from deepspeed.module_inject import auto_ep_folding as stock

        optimizer.autoep_folding_spec = stock.build_folding_spec(
            world_size=case.world, pp_size=1, tp_size=case.tp, ep_size=case.ep
        )
        optimizer.autoep_folding_tp_group = engine.autoep.handles.tp_group
    else:
        optimizer._autoep_place_now = None
        real = optimizer._autoep_corrects_buckets
        optimizer._autoep_corrects_buckets = lambda: real() or True  # each bucket, and the partition as well
    before = snapshot(engine)
    try:
        one_step(engine)
    except RuntimeError as caught:
        return type(caught).__name__, str(caught)
    finally:
        engine.autoep.binding.restore()
    wrong = set()
    for parameter, info in engine.autoep_families.items():
        right = expected_of_powers(info.family, engine.autoep.handles)
        if ((before[info.name] - parameter.detach()) / 0.5 - right).abs().max() > 1e-4 * right:
            wrong.add(info.family.value)
    return "done", sorted(wrong)


@pytest.mark.parametrize("zero", [1, 2])
def test_stock_corrections_on_top_are_an_error(zero):
    case = Case("qwen3_moe", 4, 2, 2, zero, "SGD", samples=2, clip=0.0)
    for kind, message in run_on(4, corrected_twice, case, "stock"):
        assert kind == "UnsupportedError" and "corrected twice" in message


@pytest.mark.parametrize("zero", [1, 2])
def test_powers_of_two_see_a_second_correction(zero):
    case = Case("qwen3_moe", 4, 2, 2, zero, "SGD", samples=2, clip=0.0, expert_config=PARTITION)
    for kind, wrong in run_on(4, corrected_twice, case, "both places"):
        assert kind == "done" and {"expert", "partial"} <= set(wrong)


# Lanes stay the same


def fifty_steps(case: Case):
    """Bits of this rank's REPLICATED and PARTIAL parameters and of the norms, after 50 steps."""
    engine = build_engine(case)
    norms = []
    for batch in make_batches(50, case.samples, case.length):
        share = my_share(batch, case)
        engine.backward(engine(input_ids=share, labels=share).loss)
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    state = {info.name: p.detach().float().numpy().tobytes() for p, info in engine.autoep_families.items() if info.family in (R, P)}
    engine.destroy()
    return state, norms


LANES = {
    "average": {},
    "bucket": {"expert_config": BUCKET},
    "off": {"expert_config": (("replicated_gradient_sync", "off"),)},
    "verify": {"expert_config": (("replicated_gradient_sync", "verify"), ("replicated_gradient_verify_interval", 10))},
}


@pytest.mark.parametrize(("name", "dtype"), [("average", "bf16"), ("bucket", "bf16"), ("off", "fp32"), ("verify", "bf16")])
def test_lanes_are_bit_identical_after_fifty_steps(name, dtype):
    """Norms too, on every rank. Not a matter of the dtype: 16-bit lanes round alike."""
    case = Case("qwen3_moe", 4, 2, 4, 2, length=5, dtype=dtype, **LANES[name])
    results = run_on(4, fifty_steps, case)
    for state, norms in results[1:]:
        assert norms == results[0][1]
        assert state == results[0][0]


def drifting(case: Case, steps: int):
    """From its third step on, lane 1 adds one unit in the last place to one element of a norm's gradient."""
    engine = injected_engine(case, lambda *_: 1.0)
    engine.autoep_sync.reducer.verify_next = False
    name = next(info.name for info in engine.autoep_families.values() if info.name.endswith("layers.1.input_layernorm.weight"))
    forward, step = engine.module.forward, [0]

    def drift(**arguments):
        output = forward(**arguments)
        step[0] += 1
        if step[0] >= 3 and dist.get_rank() % case.tp == 1:
            parameter = next(p for p, info in engine.autoep_families.items() if info.name == name)
            output.loss = output.loss + parameter.view(-1)[3].float() * 2.0**-20
        return output

    engine.module.forward = drift
    for done in range(steps):
        try:
            one_step(engine)
        except RuntimeError as caught:
            engine.autoep.binding.restore()
            with pytest.raises(UnsupportedError, match="without a backward pass") if case.zero else contextlib.nullcontext():
                engine.step()  # what was corrected is gone: it must not be corrected again
            return done + 1, type(caught).__name__, str(caught)
    engine.destroy()
    return steps, "nothing", ""


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize(("sync", "found_at"), [("verify", 4), ("off", None), ("average", None)])
def test_verification_names_the_parameter_that_drifts(zero, sync, found_at):
    config = (("replicated_gradient_sync", sync), ("replicated_gradient_verify_interval", 2))
    case = Case("mixtral", 4, 2, 2, zero, "SGD", samples=2, clip=0.0, expert_config=config)
    for step, kind, message in run_on(4, drifting, case, 5):
        if found_at is None:
            assert (step, kind) == (5, "nothing")
        else:
            assert (step, kind) == (found_at, "RankMismatchError")
            assert "layers.1.input_layernorm.weight" in message and "step 4" in message


# What cannot be


def refused(case: Case) -> tuple[str, str]:
    try:
        build_engine(case)
    except Exception as caught:
        return type(caught).__name__, str(caught)
    return "nothing", ""


def test_buckets_of_uneven_shards_are_refused():
    case = Case("mixtral", 4, 2, 2, 1, overrides=(("vocab_size", 67),), expert_config=BUCKET)
    for kind, message in run_on(4, refused, case):
        assert kind == "UnsupportedError" and "lm_head.weight" in message and "partition" in message


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_buckets_need_zero(dtype):
    for kind, message in run_on(4, refused, Case("mixtral", 4, 2, 2, 0, dtype=dtype, expert_config=BUCKET)):
        assert kind == "ConfigError"
        assert "expert_parallel.tp_gradient_correction='bucket'" in message and "stage 1 or 2, and it is 0" in message
