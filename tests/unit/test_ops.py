"""The bucket ops: every implementation against the reference on any list of segments, and the choice between them."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_autoep import ops
from deepspeed_autoep.errors import ConfigError
from deepspeed_autoep.ops import IN_PLACE, Segments, choose_ops, cpu, reference
from deepspeed_autoep.shared_library import load_library

gpu = pytest.importorskip("deepspeed_autoep.ops.gpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCK = gpu.kernels.BLOCK


@pytest.fixture(autouse=True)
def rounding_interpreter(monkeypatch):
    """Triton's interpreter cuts fp32 down to bf16 where a GPU rounds to nearest even."""
    from triton.runtime import interpreter

    cut = interpreter._convert_float

    def convert(values, source, target, mode):
        if target is not interpreter.tl.bfloat16 or source is not interpreter.tl.float32:
            return cut(values, source, target, mode)
        rounded = torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


class _Build:
    """One build of the C++ library, through the same Python."""

    def __init__(self, stem: str) -> None:
        self.NAME = stem.strip("_")
        self.library = load_library(stem)
        cpu.declare(self.library)

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*arguments):
            own, cpu._LIBRARY = cpu._LIBRARY, self.library
            try:
                return getattr(cpu, name)(*arguments)
            finally:
                cpu._LIBRARY = own

        return call


def implementations():
    return [*map(_Build, cpu.runnable_builds()), gpu]


every_implementation = pytest.mark.parametrize("implementation", implementations(), ids=lambda it: it.NAME)


def test_the_widest_build_that_the_processor_runs_is_loaded():
    assert cpu.is_available()
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= set(flags):
        assert "_avx512" in cpu._LIBRARY._name
    elif {"avx2", "fma", "f16c"} <= set(flags):
        assert "_avx2" in cpu._LIBRARY._name
    for capability, builds in {"DEFAULT": 1, "AVX2": 2, "AVX512": 3, "something new": 1}.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
            assert cpu.runnable_builds() == (cpu._AVX512, cpu._AVX2, cpu._PORTABLE)[3 - builds :]


@dataclass
class Problem:
    segments: Segments
    tensors: list[torch.Tensor]
    buffer: torch.Tensor

    def copy(self) -> Problem:
        """Tensors keep their alignment."""
        return Problem(self.segments, [_like(tensor) for tensor in self.tensors], self.buffer.clone())


def _like(tensor: torch.Tensor) -> torch.Tensor:
    shift = tensor.storage_offset()
    fresh = torch.empty(shift + tensor.numel(), dtype=tensor.dtype)[shift:]
    return fresh.copy_(tensor)


def _values(count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Mixed sizes, exact zeros, both signs."""
    scale = 2.0 ** torch.randint(-12, 8, (count,), generator=generator)
    values = torch.randn(count, generator=generator) * scale
    values[torch.rand(count, generator=generator) < 0.1] = 0.0
    return values.to(dtype)


@st.composite
def problems(draw, powers_of_two: bool):
    """Any segment list: empty, one element, ragged, gaps, any mix of dtypes, in place or packed, aligned or not."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sizes = st.one_of(st.integers(0, 40), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 2 * BLOCK + 17]))
    exact = st.sampled_from([0.25, 0.5, 1.0, 2.0])
    factors = exact if powers_of_two else st.one_of(exact, st.floats(2.0**-7, 3.0, width=32), st.sampled_from([1 / 3, 1 / 6]))
    tensors, offsets, scales, end = [], [], [], 0
    for _ in range(draw(st.integers(0, 7))):
        shift = draw(st.sampled_from([0, 0, 0, 1, 3, 8]))
        count, dtype = draw(sizes), draw(st.sampled_from(DTYPES))
        tensors.append(torch.empty(shift + count, dtype=dtype)[shift:].copy_(_values(count, dtype, generator)))
        if draw(st.booleans()):
            end += draw(st.sampled_from([0, 0, 1, 5, 16]))  # gaps, and offsets that are not aligned
            offsets.append(end)
            end += -(-count // 16) * 16
        else:
            offsets.append(IN_PLACE)
        scales.append(draw(factors))
    buffer = _values(end + 3, torch.float32, generator)
    return Problem(Segments.of(tensors, offsets, scales), tensors, buffer)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit, the signs of zeros too."""
    integer = torch.int32 if left.dtype == torch.float32 else torch.int16
    return torch.equal(left.contiguous().view(integer), right.contiguous().view(integer))


def within_one_ulp(left: torch.Tensor, right: torch.Tensor) -> bool:
    integer = torch.int32 if left.dtype == torch.float32 else torch.int16
    return bool(((left.view(integer).long() - right.view(integer).long()).abs() <= 1).all()) if left.numel() else True


def run_both(problem: Problem, implementation):
    """pack, then scale_unpack of what a collective might have left in the buffer."""
    mine, right = problem.copy(), problem.copy()
    for side, module in ((mine, implementation), (right, reference)):
        module.pack(side.segments, side.tensors, side.buffer)
    packed = same(mine.buffer, right.buffer)
    for side, module in ((mine, implementation), (right, reference)):
        side.buffer.mul_(1.5)
        module.scale_unpack(side.segments, side.tensors, side.buffer)
    assert same(mine.buffer, right.buffer), "scale_unpack must leave the buffer as it is"
    return packed, mine.tensors, right.tensors


@every_implementation
@settings(max_examples=25, deadline=None)
@given(problem=problems(powers_of_two=True))
def test_powers_of_two_agree_bit_for_bit(implementation, problem):
    packed, mine, right = run_both(problem, implementation)
    assert packed
    assert all(same(*pair) for pair in zip(mine, right, strict=True))


@every_implementation
@settings(max_examples=25, deadline=None)
@given(problem=problems(powers_of_two=False))
def test_any_factor_agrees_within_one_ulp(implementation, problem):
    packed, mine, right = run_both(problem, implementation)
    assert packed
    assert all(within_one_ulp(*pair) for pair in zip(mine, right, strict=True))


@every_implementation
@settings(max_examples=25, deadline=None)
@given(problem=problems(powers_of_two=True))
def test_sums_agree(implementation, problem):
    mine = implementation.squares_and_zeros(problem.segments, problem.tensors)
    right = reference.squares_and_zeros(problem.segments, problem.tensors)
    assert torch.equal(mine[1], right[1])
    assert torch.allclose(mine[0], right[0], rtol=1e-6 if "avx" in implementation.NAME else 1e-12, atol=0.0)


@every_implementation
@settings(max_examples=25, deadline=None)
@given(problem=problems(powers_of_two=True))
def test_checksums_are_the_same_everywhere(implementation, problem):
    mine = implementation.checksums(problem.segments, problem.tensors)
    assert torch.equal(mine, reference.checksums(problem.segments, problem.tensors))


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("position", [0, 1, 2047, 2048, 2999])
def test_a_checksum_sees_one_unit_in_the_last_place_and_a_swap(implementation, dtype, position):
    tensor = _values(3000, dtype, torch.Generator().manual_seed(3)) + 1
    other, swapped = tensor.clone(), tensor.clone()
    other.view(torch.int32 if dtype == torch.float32 else torch.int16)[position] ^= 1
    swapped[[position, (position + 7) % 3000]] = tensor[[(position + 7) % 3000, position]]
    tensors = [tensor, other, swapped]
    first, *rest = implementation.checksums(Segments.of(tensors), tensors).tolist()
    assert first not in rest


# The interpreter takes seconds for the larger ones.
SIZES = [(each, size) for each in implementations() for size in (1, 511, 512, 1027, 70_000, 300_001) if each is not gpu or size < 2000]


@pytest.mark.parametrize(("implementation", "size"), SIZES, ids=[f"{each.NAME}-{size}" for each, size in SIZES])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-30, 1e30, 0.0])
def test_sums_keep_their_digits_at_any_size_and_scale(implementation, dtype, size, scale):
    """fp32 squares of the smallest and largest values would vanish or overflow; runs of zeros are counted."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)).double() * scale
    tensor = values.to(dtype)
    tensor[size // 3 : size // 2] = -0.0
    if dtype == torch.float16:
        tensor.nan_to_num_(posinf=1.0, neginf=1.0)
    squares, zeros = implementation.squares_and_zeros(Segments.of([tensor]), [tensor])[:, 0].tolist()
    assert squares == pytest.approx(tensor.double().square().sum().item(), rel=1e-6, abs=0.0)
    assert zeros == (tensor == 0).sum().item()


def written_out(tensor: torch.Tensor) -> tuple[float, int]:
    values = tensor.double().flatten().tolist()
    return math.fsum(value * value for value in values), values.count(0.0)


def test_the_reference_itself_against_plain_arithmetic():
    tensors = [_values(1000, dtype, torch.Generator().manual_seed(7)) for dtype in DTYPES]
    segments = Segments.of(tensors, offsets=[0, IN_PLACE, 1008], factors=[0.5, 1 / 3, 0.25])
    buffer = torch.full((2100,), 9.0)
    before = [tensor.clone() for tensor in tensors]
    reference.pack(segments, tensors, buffer)
    assert torch.equal(buffer[:1000], before[0]) and torch.equal(buffer[1008:2008], before[2].float())
    assert (buffer[1000:1008] == 9.0).all() and (buffer[2008:] == 9.0).all()
    buffer.add_(1.0)
    reference.scale_unpack(segments, tensors, buffer)
    assert torch.equal(tensors[0], (before[0] + 1.0) * 0.5)
    assert torch.equal(tensors[1], (before[1].float() * torch.tensor(1 / 3)).bfloat16())
    assert torch.equal(tensors[2], ((before[2].float() + 1.0) * 0.25).half())
    squares, zeros = reference.squares_and_zeros(segments, tensors).tolist()
    for tensor, square, zero in zip(tensors, squares, zeros, strict=True):
        assert square == pytest.approx(written_out(tensor)[0], rel=1e-13)
        assert zero == written_out(tensor)[1]


SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 1e-40, 6e-8, 5.9e-8, 6.1e-5, 65504.0, 65519.9, 65520.0, 3.4e38]


@pytest.mark.parametrize("implementation", list(map(_Build, cpu.runnable_builds())), ids=lambda it: it.NAME)
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_round_as_torch_does(implementation, dtype):
    """Infinities, NaN, subnormals, ties and the ends of each range; twice, for the vector loop and the tail."""
    ties = [(1 + n * 2.0**-9) * sign for n in range(64) for sign in (1, -1)] + [2.0**-25 * n for n in range(40)]
    source = torch.tensor((SPECIAL + [-value for value in SPECIAL] + ties) * 2 + SPECIAL[:5])
    target, right = torch.zeros(len(source), dtype=dtype), torch.zeros(len(source), dtype=dtype)
    segments = Segments.of([target], offsets=[0])
    implementation.scale_unpack(segments, [target], source)
    reference.scale_unpack(segments, [right], source)
    assert torch.equal(target.isnan(), right.isnan())
    assert same(target.nan_to_num(nan=0.0), right.nan_to_num(nan=0.0))
    widened = torch.zeros(len(source))
    implementation.pack(segments, [right], widened)
    assert torch.equal(widened.nan_to_num(nan=1.0), right.float().nan_to_num(nan=1.0))


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("position", [0, 20, 36])
def test_a_sum_is_finite_exactly_when_its_elements_are(implementation, dtype, value, position):
    broken, large = torch.ones(37, dtype=dtype), torch.full((37,), torch.finfo(dtype).max, dtype=dtype)
    broken[position] = value
    squares = implementation.squares_and_zeros(Segments.of([broken, large]), [broken, large])[0]
    assert not squares[0].isfinite()
    assert squares[1].isfinite()


def test_threads_do_not_change_results():
    tensors = [_values(count, torch.bfloat16, torch.Generator().manual_seed(count)) for count in (3_000_001, 70_000, 5)]
    segments = Segments.of(tensors, offsets=[0, 3_000_016, IN_PLACE], factors=[1 / 3, 0.5, 0.7])
    buffer = torch.randn(3_100_000, generator=torch.Generator().manual_seed(1))
    threads, outcomes = torch.get_num_threads(), []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            written = [tensor.clone() for tensor in tensors]
            cpu.scale_unpack(segments, written, buffer)
            outcomes.append((written, cpu.squares_and_zeros(segments, tensors)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(*pair) for pair in zip(outcomes[0][0], outcomes[1][0], strict=True))
    assert torch.equal(outcomes[0][1], outcomes[1][1])


@every_implementation
@pytest.mark.parametrize(
    ("tensor", "buffer", "words"),
    [
        (torch.zeros(8, dtype=torch.float64), torch.zeros(8), "float64"),
        (torch.zeros(9), torch.zeros(16), "9 elements"),
        (torch.zeros(4, 4).t()[:, :2], torch.zeros(8), "not contiguous"),
        (torch.zeros(8), torch.zeros(7), "at least 8"),
        (torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16), "contiguous float32"),
    ],
)
def test_bad_memory_is_refused_before_it_is_touched(implementation, tensor, buffer, words):
    segments = Segments((8,), (0,), (1.0,))
    for call in (implementation.pack, implementation.scale_unpack):
        with pytest.raises(ValueError, match=words):
            call(segments, [tensor], buffer)
    with pytest.raises(ValueError, match="0 tensors for 1 segments"):
        implementation.pack(segments, [], buffer)


def test_triton_takes_the_wide_path_where_memory_is_aligned():
    """Packed or in place, each dtype; a masked path everywhere would be right and slow."""
    base = [torch.zeros(4096 + 8, dtype=dtype) for dtype in DTYPES for _ in range(2)]
    tensors = [tensor[8:] if index % 2 else tensor[1:] for index, tensor in enumerate(base)]
    for offsets in ([IN_PLACE] * 6, [4112 * index for index in range(6)]):
        segments = Segments.of(tensors, offsets)
        buffer = torch.zeros(4112 * 6)
        _, kinds = gpu._Tables(segments, torch.device("cpu")).address_and_kind(tensors, buffer)
        assert [bool(kind & gpu.kernels.ALIGNED) for kind in kinds.tolist()] == [False, True] * 3
        assert [kind & 3 for kind in kinds.tolist()] == [0, 0, 1, 1, 2, 2]
    odd = Segments.of(tensors, [4112 * index + 1 for index in range(6)])
    _, kinds = gpu._Tables(odd, torch.device("cpu")).address_and_kind(tensors, torch.zeros(4112 * 7))
    assert not any(kind & gpu.kernels.ALIGNED for kind in kinds.tolist())


def test_device_chooses_and_the_variable_overrides(monkeypatch):
    assert choose_ops(torch.device("cpu")) is cpu
    monkeypatch.setenv(ops.ENVIRONMENT_VARIABLE, "reference")
    assert choose_ops(torch.device("cpu")) is reference
    monkeypatch.setenv(ops.ENVIRONMENT_VARIABLE, "triton")
    assert choose_ops(torch.device("cpu")) is gpu  # interpreted: see conftest.py
    monkeypatch.setenv(ops.ENVIRONMENT_VARIABLE, "cuda")
    with pytest.raises(ConfigError, match="DEEPSPEED_AUTOEP_OPS='cuda': legal are auto, reference, cpp, triton"):
        choose_ops(torch.device("cpu"))


@pytest.fixture
def fresh_choice():
    for cache in (ops._try, ops._warn_once):
        cache.cache_clear()
    yield
    for cache in (ops._try, ops._warn_once):
        cache.cache_clear()


def test_a_missing_library_falls_back_with_one_warning(monkeypatch, caplog, fresh_choice):
    monkeypatch.setattr(cpu, "_LIBRARY", None)
    for _ in range(3):
        assert choose_ops(torch.device("cpu")) is reference
    assert len(caplog.records) == 1 and "'cpp' cannot run on cpu" in caplog.text and "not built" in caplog.text


def test_an_outdated_library_falls_back(monkeypatch, caplog, fresh_choice):
    """Built from older sources: a function is missing."""
    old = ctypes.CDLL(None)  # has none of ours
    monkeypatch.setattr(cpu, "load_library", lambda *_: old)
    monkeypatch.setattr(cpu, "_LIBRARY", cpu._load())
    assert choose_ops(torch.device("cpu")) is reference
    assert "outdated" in caplog.text


@pytest.mark.parametrize("fault", ["import", "launch", "result"])
def test_a_triton_that_does_not_work_falls_back_with_one_warning(monkeypatch, caplog, fresh_choice, fault):
    def broken(*_):
        raise OSError("no compiler")

    if fault == "import":
        monkeypatch.setattr(ops.importlib, "import_module", broken)
    elif fault == "launch":
        monkeypatch.setattr(gpu, "pack", broken)
    else:
        monkeypatch.setattr(gpu, "scale_unpack", lambda *_: None)
    monkeypatch.setenv(ops.ENVIRONMENT_VARIABLE, "triton")
    for _ in range(3):
        assert choose_ops(torch.device("cpu")) is reference
    assert len(caplog.records) == 1
    assert ("a trial computed" if fault == "result" else "no compiler") in caplog.text


def test_without_the_interpreter_triton_does_not_run_on_the_cpu(monkeypatch, caplog, fresh_choice):
    monkeypatch.setenv(ops.ENVIRONMENT_VARIABLE, "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert choose_ops(torch.device("cpu")) is reference
    assert "TRITON_INTERPRET=1" in caplog.text


def test_libraries_have_a_plain_c_interface():
    """Loadable by ctypes without torch: nothing but the three functions and the C++ runtime."""
    for stem in (cpu._PORTABLE, cpu._AVX2, cpu._AVX512):
        library = load_library(stem)
        if library is not None:
            assert all(isinstance(getattr(library, name), ctypes._CFuncPtr) for name in ("autoep_pack", "autoep_scale_unpack"))
