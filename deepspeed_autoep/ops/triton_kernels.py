"""Triton kernels of the bucket ops: one launch for all segments, whatever their sizes, dtypes and factors.

A program works on one block of one segment and finds both in a table, which beats a search over the segments. A full block
whose memory is aligned takes unmasked loads and stores, 16 bytes wide (a mask makes them scalar). Offsets are 64-bit;
arithmetic is fp32, sums of squares are fp64. :mod:`deepspeed_autoep.ops.gpu` builds the tables and launches.
"""

import triton
import triton.language as tl

# Elements of a block, and threads of a program: each thread holds 8, which is 16 bytes of bf16 and two times 16 of fp32.
BLOCK = 2048
NUM_WARPS = 8
# A segment's entry in the table of kinds: its dtype's index in ops.segments.DTYPES, plus this where its first element and
# its place in the buffer are at multiples of 16 bytes.
ALIGNED = 4


@triton.jit
def _wide(anchor, address, dtype: tl.constexpr, start, BLOCK: tl.constexpr):
    """Pointers to a full block of an aligned segment, as an aligned kernel argument plus a multiple of 16 bytes: the
    compiler then knows the alignment, which it cannot see in an address that was loaded from a table."""
    per_unit: tl.constexpr = 128 // dtype.primitive_bitwidth
    units = (address - anchor.to(tl.int64)) >> 4
    return anchor.to(tl.pointer_type(dtype), bitcast=True) + units * per_unit + start + tl.arange(0, BLOCK)


@triton.jit
def _wide_in_buffer(buffer, place, start, BLOCK: tl.constexpr):
    return buffer + (place >> 2) * 4 + start + tl.arange(0, BLOCK)


@triton.jit
def _pack_block(address, dtype: tl.constexpr, start, buffer, place, left, full, BLOCK: tl.constexpr):
    # Each branch makes its own pointers: shared ones would give both the layout of the masked branch.
    if full:
        value = tl.load(_wide(buffer, address, dtype, start, BLOCK))
        tl.store(_wide_in_buffer(buffer, place, start, BLOCK), value.to(tl.float32))
    else:
        index = start + tl.arange(0, BLOCK)
        inside = tl.arange(0, BLOCK) < left
        value = tl.load(address.to(tl.pointer_type(dtype)) + index, mask=inside, other=0.0)
        tl.store(buffer + place + index, value.to(tl.float32), mask=inside)


@triton.jit
def _scale_block(address, dtype: tl.constexpr, start, buffer, place, left, full, factor, BLOCK: tl.constexpr):
    if full:
        if place >= 0:
            value = tl.load(_wide_in_buffer(buffer, place, start, BLOCK))
            tl.store(_wide(buffer, address, dtype, start, BLOCK), (value * factor).to(dtype))
        else:
            value = tl.load(_wide(buffer, address, dtype, start, BLOCK)).to(tl.float32)
            tl.store(_wide(buffer, address, dtype, start, BLOCK), (value * factor).to(dtype))
    else:
        index = start + tl.arange(0, BLOCK)
        inside = tl.arange(0, BLOCK) < left
        target = address.to(tl.pointer_type(dtype)) + index
        if place >= 0:
            value = tl.load(buffer + place + index, mask=inside, other=0.0)
            tl.store(target, (value * factor).to(dtype), mask=inside)
        else:
            value = tl.load(target, mask=inside, other=0.0).to(tl.float32)
            tl.store(target, (value * factor).to(dtype), mask=inside)


@triton.jit
def pack_kernel(block_segment, block_number, address, kind, count, offset, buffer, BLOCK: tl.constexpr):
    """buffer[offset + i] = segment[i] in fp32, for segments that have an offset."""
    segment = tl.load(block_segment + tl.program_id(0))
    start = tl.load(block_number + tl.program_id(0)) * BLOCK
    place = tl.load(offset + segment)
    if place >= 0:
        base = tl.load(address + segment)
        bits = tl.load(kind + segment)
        left = tl.load(count + segment) - start
        full = (left >= BLOCK) & ((bits & 4) != 0)
        dtype = bits & 3
        if dtype == 0:
            _pack_block(base, tl.float32, start, buffer, place, left, full, BLOCK)
        elif dtype == 1:
            _pack_block(base, tl.bfloat16, start, buffer, place, left, full, BLOCK)
        else:
            _pack_block(base, tl.float16, start, buffer, place, left, full, BLOCK)


@triton.jit
def scale_unpack_kernel(block_segment, block_number, address, kind, count, offset, factor, buffer, BLOCK: tl.constexpr):
    """segment[i] = (buffer[offset + i], or segment[i] where there is no offset) * factor."""
    segment = tl.load(block_segment + tl.program_id(0))
    start = tl.load(block_number + tl.program_id(0)) * BLOCK
    place = tl.load(offset + segment)
    base = tl.load(address + segment)
    bits = tl.load(kind + segment)
    left = tl.load(count + segment) - start
    scale = tl.load(factor + segment)
    full = (left >= BLOCK) & ((bits & 4) != 0)
    dtype = bits & 3
    if dtype == 0:
        _scale_block(base, tl.float32, start, buffer, place, left, full, scale, BLOCK)
    elif dtype == 1:
        _scale_block(base, tl.bfloat16, start, buffer, place, left, full, scale, BLOCK)
    else:
        _scale_block(base, tl.float16, start, buffer, place, left, full, scale, BLOCK)


@triton.jit
def _sums(anchor, address, dtype: tl.constexpr, start, left, full, BLOCK: tl.constexpr):
    """Sum of squares in fp64 and number of zeros of one block."""
    if full:
        value = tl.load(_wide(anchor, address, dtype, start, BLOCK)).to(tl.float32)
        square = tl.sum(value.to(tl.float64) * value.to(tl.float64))
        zeros = tl.sum((value == 0.0).to(tl.int32))
    else:
        inside = tl.arange(0, BLOCK) < left
        pointers = address.to(tl.pointer_type(dtype)) + start + tl.arange(0, BLOCK)
        value = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
        square = tl.sum(value.to(tl.float64) * value.to(tl.float64))
        zeros = tl.sum((inside & (value == 0.0)).to(tl.int32))
    return square, zeros


@triton.jit
def block_sums_kernel(block_segment, block_number, address, kind, count, squares, zeros, BLOCK: tl.constexpr):
    """squares[program] and zeros[program] of each block, both fp64."""
    segment = tl.load(block_segment + tl.program_id(0))
    start = tl.load(block_number + tl.program_id(0)) * BLOCK
    base = tl.load(address + segment)
    bits = tl.load(kind + segment)
    left = tl.load(count + segment) - start
    full = (left >= BLOCK) & ((bits & 4) != 0)
    dtype = bits & 3
    if dtype == 0:
        square, zero = _sums(squares, base, tl.float32, start, left, full, BLOCK)
    elif dtype == 1:
        square, zero = _sums(squares, base, tl.bfloat16, start, left, full, BLOCK)
    else:
        square, zero = _sums(squares, base, tl.float16, start, left, full, BLOCK)
    tl.store(squares + tl.program_id(0), square)
    tl.store(zeros + tl.program_id(0), zero.to(tl.float64))


@triton.jit
def segment_sums_kernel(first_block, squares, zeros, result, segments, BLOCK: tl.constexpr):
    """result[0 | 1, segment] = sum over the segment's blocks, in a fixed order: the same bits in every run."""
    segment = tl.program_id(0)
    first = tl.load(first_block + segment)
    last = tl.load(first_block + segment + 1)
    index = tl.arange(0, BLOCK)
    square = tl.zeros([BLOCK], dtype=tl.float64)
    zero = tl.zeros([BLOCK], dtype=tl.float64)
    for block in range(first, last, BLOCK):
        inside = block + index < last
        square += tl.load(squares + block + index, mask=inside, other=0.0)
        zero += tl.load(zeros + block + index, mask=inside, other=0.0)
    tl.store(result + segment, tl.sum(square))
    tl.store(result + segments + segment, tl.sum(zero))


@triton.jit
def _checksum(anchor, address, dtype: tl.constexpr, start, left, full, BLOCK: tl.constexpr):
    """``dtype`` is the unsigned integer of the element's width. The position's product wraps in 32 bits, the rest in 64."""
    position = (start + tl.arange(0, BLOCK)).to(tl.uint32)
    weights = ((position * 0x9E3779B9) | 1).to(tl.uint64)
    if full:
        bits = tl.load(_wide(anchor, address, dtype, start, BLOCK)).to(tl.uint64)
        result = tl.sum(bits * weights)
    else:
        pointers = address.to(tl.pointer_type(dtype)) + start + tl.arange(0, BLOCK)
        bits = tl.load(pointers, mask=tl.arange(0, BLOCK) < left, other=0).to(tl.uint64)
        result = tl.sum(bits * weights)
    return result


@triton.jit
def block_checksums_kernel(block_segment, block_number, address, kind, count, result, BLOCK: tl.constexpr):
    """result[program]: checksum of the block, see ops.reference.checksums."""
    segment = tl.load(block_segment + tl.program_id(0))
    start = tl.load(block_number + tl.program_id(0)) * BLOCK
    base = tl.load(address + segment)
    bits = tl.load(kind + segment)
    left = tl.load(count + segment) - start
    full = (left >= BLOCK) & ((bits & 4) != 0)
    if (bits & 3) == 0:
        value = _checksum(result, base, tl.uint32, start, left, full, BLOCK)
    else:
        value = _checksum(result, base, tl.uint16, start, left, full, BLOCK)
    tl.store(result + tl.program_id(0), value.to(tl.int64))
