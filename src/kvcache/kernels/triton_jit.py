"""The device code of the Triton kernel: attention over tiles of work, the merge of split ranges, and writing rows.

    item  = some rows of one segment x one range of its slots          grid (items, programs per row)
    merge = the partial results of one row and one head                 grid (rows that were split, query heads)

A program of `attend_items` holds BLOCK_M queries: the rows of its item times the CHUNK query heads that share one
key/value head, so that keys and values are loaded once for all of them. It walks its slots BLOCK_N at a time: the edges
with masks, the middle, where every row sees every slot, without. Softmax runs as it goes (Milakov and Gimelshein 2018;
FlashAttention), in powers of two; what several items hold of one row is merged afterwards (flash-decoding).

Stored rows are decoded in registers. `q4_0` keeps value j of a group in the low and value j + 16 in the high half of
one byte; here both stay side by side (one `join`, no shuffle), and queries and outputs follow that order instead:

    place in registers   0  1   2  3  ...  30 31  | 32 33 ...
    value of the row     0 16   1 17  ...  15 31  | 32 48 ...            `value_of`

Nothing is loaded from a slot that no row of the item sees: the host cuts items where what their rows see has a gap,
so [seen_begin, seen_end) says it, and NaN in an empty slot cannot reach a product.

More than 300 lines: programs that share device functions share a file.
Strides of the storage are compile-time numbers, because the width of quantised rows (136 bytes for 128 values of q8_0)
says how many bytes one load may take. No `from __future__ import annotations` here: Triton reads the annotations.
"""

import triton
import triton.language as tl

__all__ = ["attend_items", "merge_items", "put_rows", "shift_rows"]

LOG2E = tl.constexpr(1.4426950408889634)
BELOW_HALF = tl.constexpr(0.5 - 2.0**-25)  # as in formats/reference.py

# --- formats ----------------------------------------------------------------------------------------------------------


@triton.jit
def value_of(place, FORMAT: tl.constexpr):
    """Which value of the row stands at a place of the registers."""
    if FORMAT == "q4_0":
        place = place - place % 32 + (place % 32) // 2 + (place % 2) * 16
    return place


@triton.jit
def decode_fp8(code, NATIVE: tl.constexpr):
    """f32 of E4M3 codes (u8): by the GPU's own conversion, or as f16 with another exponent bias (exact)."""
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = code.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def load_rows(
    base, row_offsets, seen,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr, DOT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """Rows [BLOCK_N,BLOCK_D] in element type DOT, in the order of `value_of`; zeros where not `seen` and past D."""
    place = tl.arange(0, BLOCK_D)
    if FORMAT == "q4_0":
        byte = tl.arange(0, BLOCK_D // 2)
        mask = seen[:, None] & (byte < D // 2)[None, :]
        codes = tl.load(base + row_offsets[:, None] + byte[None, :], mask=mask, other=0)
        rows = tl.reshape(tl.join(codes & 0x0F, codes >> 4), [BLOCK_N, BLOCK_D]).to(tl.float32) - 8.0
    else:
        if D == BLOCK_D:
            mask = tl.broadcast_to(seen[:, None], [BLOCK_N, BLOCK_D])
        else:
            mask = seen[:, None] & (place < D)[None, :]
        raw = tl.load(base + row_offsets[:, None] + place[None, :], mask=mask, other=0)
        if FORMAT == "fp8_e4m3":
            rows = decode_fp8(raw, NATIVE_FP8)
        elif FORMAT == "q8_0":
            rows = raw.to(tl.int8, bitcast=True).to(tl.float32)
        else:
            rows = raw
    if FORMAT == "q4_0" or FORMAT == "q8_0":
        QUANTS: tl.constexpr = D if FORMAT == "q8_0" else D // 2
        group = tl.arange(0, BLOCK_D // 32)
        scales = tl.load(
            (base + row_offsets[:, None] + QUANTS).to(tl.pointer_type(tl.float16)) + group[None, :],
            mask=seen[:, None] & (group < D // 32)[None, :],
            other=0.0,
        ).to(tl.float32)
        groups = tl.reshape(rows, [BLOCK_N, BLOCK_D // 32, 32]) * scales[:, :, None]
        rows = tl.reshape(groups, [BLOCK_N, BLOCK_D])
    return rows.to(DOT)


# --- attention --------------------------------------------------------------------------------------------------------


@triton.jit
def tanh(x):
    """Tanh to about 1 ulp of 1: by its series near 0, where 1 - exp(-2x) cancels."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    power = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    size = (1 - power) / (1 + power)
    return tl.where(square < 0.0625, series, tl.where(x < 0, -size, size))


@triton.jit
def walk(
    q, acc, total, highest, first, last, hi, keys, values, tables, positions, table_at, positions_at, is_irregular,
    first_position, seen_begin, seen_end, begin, end, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, K_BLOCK: tl.constexpr, K_SLOT: tl.constexpr, V_BLOCK: tl.constexpr,
    V_SLOT: tl.constexpr, K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr, K_DOT: tl.constexpr, V_DOT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, NATIVE_FP8: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Slots [first, last) in steps of BLOCK_N. MASKED: some rows do not see some of them, and `hi` cuts them off."""
    for start in range(first, last, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        if MASKED:
            irregular = tl.load(positions + positions_at + slot, mask=(slot < hi) & is_irregular, other=-1)
            position = tl.where(is_irregular, irregular, first_position + slot)
            seen = (slot < hi) & (position >= seen_begin) & (position < seen_end)
        else:
            seen = tl.full([BLOCK_N], 1, tl.int1)
        if BLOCK_SIZE % BLOCK_N == 0:  # steps begin at multiples of BLOCK_N: one block, and one address
            block = tl.load(tables + table_at + start // BLOCK_SIZE).to(tl.int64)
            inside = start % BLOCK_SIZE + tl.arange(0, BLOCK_N)
            k_rows = block * K_BLOCK + inside.to(tl.int64) * K_SLOT
            v_rows = block * V_BLOCK + inside.to(tl.int64) * V_SLOT
        else:
            blocks = tl.load(tables + table_at + slot // BLOCK_SIZE, mask=slot < hi, other=0).to(tl.int64)
            inside = (slot % BLOCK_SIZE).to(tl.int64)
            k_rows = blocks * K_BLOCK + inside * K_SLOT
            v_rows = blocks * V_BLOCK + inside * V_SLOT
        k = load_rows(keys, k_rows, seen, D, BLOCK_N, BLOCK_D, K_FORMAT, K_DOT, NATIVE_FP8)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_SOFTCAP:
            scores = tanh(scores * (scale / softcap)) * (softcap * LOG2E)
        else:
            scores = scores * (scale * LOG2E)
        if MASKED:
            visible = seen[None, :] & (position[None, :] >= begin[:, None]) & (position[None, :] < end[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        reference = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
        weights = tl.exp2(scores - reference[:, None])
        rescale = tl.exp2(highest - reference)
        total = total * rescale + tl.sum(weights, 1)
        v = load_rows(values, v_rows, seen, DV, BLOCK_N, BLOCK_DV, V_FORMAT, V_DOT, NATIVE_FP8)
        acc = tl.dot(weights.to(V_DOT), v, acc * rescale[:, None], input_precision="ieee")
        highest = higher
    return acc, total, highest


@triton.jit
def with_sink(total, highest, sink):
    """The sum and the reference after one more column with the score `sink` (in powers of two) and no value."""
    higher = tl.maximum(highest, sink)
    reference = tl.where(higher == float("-inf"), 0.0, higher)
    rescale = tl.exp2(highest - reference)
    return total * rescale + tl.exp2(sink - reference), rescale


@triton.jit
def attend_items(
    queries, keys, values, out, sinks, partials, statistics, items, rows, begins, ends, tables, positions, q_row,
    q_head, scale, softcap,
    GROUP: tl.constexpr, CHUNK: tl.constexpr, NUM_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, K_BLOCK: tl.constexpr, K_HEAD: tl.constexpr, K_SLOT: tl.constexpr,
    V_BLOCK: tl.constexpr, V_HEAD: tl.constexpr, V_SLOT: tl.constexpr, K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr, K_DOT: tl.constexpr, V_DOT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, NATIVE_FP8: tl.constexpr, ITEM: tl.constexpr,
):  # fmt: skip
    """One item for one key/value head and CHUNK of its query heads: the result, or a partial one where rows are split.

    NUM_HEADS counts key/value heads. The fields of an item are listed in `triton_plan.py`.
    """
    item = items + tl.program_id(0) * ITEM
    num_rows = tl.load(item + 1)
    if num_rows == 0:  # room for items that this pass has not
        return
    CHUNKS: tl.constexpr = (GROUP + CHUNK - 1) // CHUNK
    kv_head = tl.program_id(1) // CHUNKS
    rows_at = tl.load(item)
    lo = tl.load(item + 2)
    full_lo = tl.load(item + 3)
    full_hi = tl.load(item + 4)
    hi = tl.load(item + 5)
    seen_begin = tl.load(item + 6)
    seen_end = tl.load(item + 7)
    table_at = tl.load(item + 8)
    positions_at = tl.load(item + 9)
    is_irregular = tl.load(item + 10) != 0
    first_position = tl.load(item + 11)
    partial = tl.load(item + 12)

    m = tl.arange(0, BLOCK_M)
    row_of_m = m // CHUNK
    head_in_group = m % CHUNK + (tl.program_id(1) % CHUNKS) * CHUNK
    valid = (row_of_m < num_rows) & (head_in_group < GROUP)
    head = kv_head * GROUP + head_in_group
    row = tl.load(rows + rows_at + row_of_m, mask=valid, other=0).to(tl.int64)
    begin = tl.load(begins + rows_at + row_of_m, mask=valid, other=0)
    end = tl.load(ends + rows_at + row_of_m, mask=valid, other=0)
    value = value_of(tl.arange(0, BLOCK_D), K_FORMAT)
    q = tl.load(
        queries + row[:, None] * q_row + head.to(tl.int64)[:, None] * q_head + value[None, :],
        mask=valid[:, None] & (value < D)[None, :],
        other=0.0,
    ).to(K_DOT)

    acc = tl.full([BLOCK_M, BLOCK_DV], 0.0, tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    k_base = keys + kv_head.to(tl.int64) * K_HEAD
    v_base = values + kv_head.to(tl.int64) * V_HEAD
    # fmt: off
    acc, total, highest = walk(
        q, acc, total, highest, lo, full_lo, hi, k_base, v_base, tables, positions, table_at, positions_at,
        is_irregular, first_position, seen_begin, seen_end, begin, end, scale, softcap,
        D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, BLOCK_SIZE, K_BLOCK, K_SLOT, V_BLOCK, V_SLOT,
        K_FORMAT, V_FORMAT, K_DOT, V_DOT, HAS_SOFTCAP, NATIVE_FP8, True,
    )
    acc, total, highest = walk(
        q, acc, total, highest, full_lo, full_hi, hi, k_base, v_base, tables, positions, table_at, positions_at,
        is_irregular, first_position, seen_begin, seen_end, begin, end, scale, softcap,
        D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, BLOCK_SIZE, K_BLOCK, K_SLOT, V_BLOCK, V_SLOT,
        K_FORMAT, V_FORMAT, K_DOT, V_DOT, HAS_SOFTCAP, NATIVE_FP8, False,
    )
    acc, total, highest = walk(
        q, acc, total, highest, full_hi, hi, hi, k_base, v_base, tables, positions, table_at, positions_at,
        is_irregular, first_position, seen_begin, seen_end, begin, end, scale, softcap,
        D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, BLOCK_SIZE, K_BLOCK, K_SLOT, V_BLOCK, V_SLOT,
        K_FORMAT, V_FORMAT, K_DOT, V_DOT, HAS_SOFTCAP, NATIVE_FP8, True,
    )
    # fmt: on

    place = tl.arange(0, BLOCK_DV)
    store = valid[:, None] & (place < DV)[None, :]
    if partial < 0:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
            total, rescale = with_sink(total, highest, sink)
            acc = acc * rescale[:, None]
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        target = (row * (NUM_HEADS * GROUP) + head)[:, None] * DV + value_of(place, V_FORMAT)[None, :]
        tl.store(out + target, result.to(out.dtype.element_ty), mask=store)
    else:
        index = (partial + row_of_m).to(tl.int64) * (NUM_HEADS * GROUP) + head
        tl.store(partials + index[:, None] * DV + place[None, :], acc, mask=store)
        tl.store(statistics + index * 2, highest, mask=valid)
        tl.store(statistics + index * 2 + 1, total, mask=valid)


@triton.jit
def merge_items(
    out, sinks, partials, statistics, merges,
    NUM_QUERY_HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
    V_FORMAT: tl.constexpr, HAS_SINKS: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """One row and one head: the partial results of its items, and its sink."""
    merge = merges + tl.program_id(0) * MERGE
    num_parts = tl.load(merge + 2)
    if num_parts == 0:
        return
    row = tl.load(merge).to(tl.int64)
    partial = tl.load(merge + 1)
    stride = tl.load(merge + 3)
    head = tl.program_id(1)
    place = tl.arange(0, BLOCK_DV)
    acc = tl.full([BLOCK_DV], 0.0, tl.float32)
    total = 0.0
    highest = float("-inf")
    for first in range(0, num_parts, BLOCK_S):
        part = first + tl.arange(0, BLOCK_S)
        index = (partial + part * stride).to(tl.int64) * NUM_QUERY_HEADS + head
        highs = tl.load(statistics + index * 2, mask=part < num_parts, other=float("-inf"))
        totals = tl.load(statistics + index * 2 + 1, mask=part < num_parts, other=0.0)
        mask = (part < num_parts)[:, None] & (place < DV)[None, :]
        accs = tl.load(partials + index[:, None] * DV + place[None, :], mask=mask, other=0.0)
        higher = tl.maximum(highest, tl.max(highs, 0))
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(highs - reference)
        rescale = tl.exp2(highest - reference)
        total = total * rescale + tl.sum(totals * weights, 0)
        acc = acc * rescale + tl.sum(accs * weights[:, None], 0)
        highest = higher
    if HAS_SINKS:
        total, rescale = with_sink(total, highest, tl.load(sinks + head).to(tl.float32) * LOG2E)
        acc = acc * rescale
    result = acc / tl.where(total > 0, total, 1.0)
    target = out + (row * NUM_QUERY_HEADS + head) * DV + value_of(place, V_FORMAT)
    tl.store(target, result.to(out.dtype.element_ty), mask=place < DV)


# --- writing ----------------------------------------------------------------------------------------------------------


@triton.jit
def encode_fp8(x):
    """Code of f32 values, saturating: `formats/reference.py` explains it. Adding 1.5 * 2^23 rounds to even."""
    size = tl.minimum(tl.abs(x), 448.0)
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, -6)
    steps = size * ((130 - exponent) << 23).to(tl.float32, bitcast=True)
    code = 8 * (exponent + 6) + ((steps + 12582912.0) - 12582912.0).to(tl.int32)
    code = tl.where(x != x, 0x7F, code)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def inverse_of(scale):
    """1 / scale, and 0 where that is not finite."""
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return tl.where(tl.abs(inverse) < float("inf"), inverse, 0.0)


@triton.jit
def write_q8_0(x, target, D: tl.constexpr, GROUPS: tl.constexpr):
    """One row, f32 [GROUPS,32]: D quants, then D / 32 scales."""
    group = tl.arange(0, GROUPS)
    value = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    has_nan = tl.max((x != x).to(tl.int32), 1) > 0
    scale = tl.div_rn(tl.max(tl.abs(x), 1), tl.full([GROUPS], 127.0, tl.float32))
    scale = tl.where(has_nan, float("nan"), scale)
    scaled = x * inverse_of(scale)[:, None]
    quants = (scaled + tl.where(scaled < 0, -BELOW_HALF, BELOW_HALF)).to(tl.int8)
    tl.store(target + value, quants.to(tl.uint8, bitcast=True), mask=value < D)
    tl.store((target + D).to(tl.pointer_type(tl.float16)) + group, scale.to(tl.float16), mask=group < D // 32)


@triton.jit
def first_of_largest(x, lane):
    """The largest size in each row of x [GROUPS,16], and the first value that has it."""
    size = tl.max(tl.abs(x), 1)
    first = tl.min(tl.where(tl.abs(x) == size[:, None], lane, 16), 1)
    return size, tl.sum(tl.where(lane == first[:, None], x, 0.0), 1)


@triton.jit
def write_q4_0(low, high, target, D: tl.constexpr, GROUPS: tl.constexpr):
    """One row, f32 [GROUPS,16] of the halves of its groups: D / 2 bytes of two quants each, then D / 32 scales."""
    group = tl.arange(0, GROUPS)
    lane = tl.arange(0, 16)[None, :]
    has_nan = tl.max(((low != low) | (high != high)).to(tl.int32), 1) > 0
    low_size, low_extreme = first_of_largest(low, lane)
    high_size, high_extreme = first_of_largest(high, lane)
    scale = tl.where(low_size >= high_size, low_extreme, high_extreme) * -0.125
    scale = tl.where(has_nan, float("nan"), scale)
    inverse = inverse_of(scale)[:, None]
    low_codes = tl.minimum(low * inverse + 8.5, 15.0).to(tl.uint8)
    high_codes = tl.minimum(high * inverse + 8.5, 15.0).to(tl.uint8)
    mask = (group < D // 32)[:, None]
    tl.store(target + group[:, None] * 16 + lane, low_codes | (high_codes << 4), mask=mask)
    tl.store((target + D // 2).to(tl.pointer_type(tl.float16)) + group, scale.to(tl.float16), mask=group < D // 32)


@triton.jit
def stored_at(row, value, mask, D: tl.constexpr, FORMAT: tl.constexpr):
    """Any values of one stored row, decoded, f32."""
    if FORMAT == "q4_0":
        byte = tl.load(row + (value // 32) * 16 + value % 16, mask=mask, other=0)
        x = tl.where(value % 32 < 16, byte & 0x0F, byte >> 4).to(tl.float32) - 8.0
    else:
        raw = tl.load(row + value, mask=mask, other=0)
        if FORMAT == "fp8_e4m3":
            x = decode_fp8(raw, False)
        elif FORMAT == "q8_0":
            x = raw.to(tl.int8, bitcast=True).to(tl.float32)
        else:
            x = raw.to(tl.float32)
    if FORMAT == "q4_0" or FORMAT == "q8_0":
        QUANTS: tl.constexpr = D if FORMAT == "q8_0" else D // 2
        scales = (row + QUANTS).to(tl.pointer_type(tl.float16))
        x = x * tl.load(scales + value // 32, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def turned_at(
    row, cos, sin, value,
    D: tl.constexpr, FORMAT: tl.constexpr, FIRST: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Any values of one stored row after its pairs (PAIRS, from value FIRST on) are turned; f32, zeros past D."""
    x = stored_at(row, value, value < D, D, FORMAT)
    inside = (value >= FIRST) & (value < FIRST + 2 * PAIRS)
    place = tl.where(inside, value - FIRST, 0)
    if INTERLEAVED:
        pair = place // 2
        is_second = place % 2 == 1
        partner = value + tl.where(is_second, -1, 1)
    else:
        pair = place % PAIRS
        is_second = place >= PAIRS
        partner = value + tl.where(is_second, -PAIRS, PAIRS)
    other = stored_at(row, partner, inside, D, FORMAT)
    c = tl.load(cos + pair, mask=inside, other=1.0)
    s = tl.load(sin + pair, mask=inside, other=0.0)
    turned = x * c + tl.where(is_second, other, -other) * s
    return tl.where(inside, turned, x)


@triton.jit
def put_row(source, target, D: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr):
    """Encodes the row of D values at `source` to `target`."""
    value = tl.arange(0, BLOCK_D)
    if FORMAT == "q8_0":
        value = tl.reshape(value, [BLOCK_D // 32, 32])
        write_q8_0(tl.load(source + value, mask=value < D, other=0.0).to(tl.float32), target, D, BLOCK_D // 32)
    elif FORMAT == "q4_0":
        low = tl.arange(0, BLOCK_D // 32)[:, None] * 32 + tl.arange(0, 16)[None, :]
        lows = tl.load(source + low, mask=low < D, other=0.0).to(tl.float32)
        highs = tl.load(source + low + 16, mask=low < D, other=0.0).to(tl.float32)
        write_q4_0(lows, highs, target, D, BLOCK_D // 32)
    else:
        x = tl.load(source + value, mask=value < D, other=0.0)
        if FORMAT == "fp8_e4m3":
            tl.store(target + value, encode_fp8(x.to(tl.float32)), mask=value < D)
        else:
            tl.store(target + value, x.to(target.dtype.element_ty), mask=value < D)


@triton.jit
def shift_rows(
    keys, slots, turns, cosines, sines,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, K_BLOCK: tl.constexpr, K_HEAD: tl.constexpr,
    K_SLOT: tl.constexpr, K_FORMAT: tl.constexpr, FIRST: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """One stored row and one head turned in place, by line `turns[row]` of the tables [u,PAIRS]; -1 leaves it alone.

    The row is read whole before any of it is written: the barriers order the threads of the program.
    """
    turn = tl.load(turns + tl.program_id(0))
    if turn < 0:
        return
    slot = tl.load(slots + tl.program_id(0))
    row = keys + (slot // BLOCK_SIZE) * K_BLOCK + (slot % BLOCK_SIZE) * K_SLOT
    row += tl.program_id(1).to(tl.int64) * K_HEAD
    cos = cosines + turn * PAIRS
    sin = sines + turn * PAIRS
    value = tl.arange(0, BLOCK_D)
    if K_FORMAT == "q8_0":
        value = tl.reshape(value, [BLOCK_D // 32, 32])
        x = turned_at(row, cos, sin, value, D, K_FORMAT, FIRST, PAIRS, INTERLEAVED)
        tl.debug_barrier()
        write_q8_0(x, row, D, BLOCK_D // 32)
    elif K_FORMAT == "q4_0":
        low = tl.arange(0, BLOCK_D // 32)[:, None] * 32 + tl.arange(0, 16)[None, :]
        lows = turned_at(row, cos, sin, low, D, K_FORMAT, FIRST, PAIRS, INTERLEAVED)
        highs = turned_at(row, cos, sin, low + 16, D, K_FORMAT, FIRST, PAIRS, INTERLEAVED)
        tl.debug_barrier()
        write_q4_0(lows, highs, row, D, BLOCK_D // 32)
    else:
        x = turned_at(row, cos, sin, value, D, K_FORMAT, FIRST, PAIRS, INTERLEAVED)
        tl.debug_barrier()
        if K_FORMAT == "fp8_e4m3":
            tl.store(row + value, encode_fp8(x), mask=value < D)
        else:
            tl.store(row + value, x.to(row.dtype.element_ty), mask=value < D)


@triton.jit
def put_rows(
    keys, values, new_keys, new_values, slots, nk_row, nk_head, nv_row, nv_head,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr, K_HEAD: tl.constexpr, K_SLOT: tl.constexpr, V_BLOCK: tl.constexpr, V_HEAD: tl.constexpr,
    V_SLOT: tl.constexpr, K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr,
):  # fmt: skip
    """One row and one head, keys and values; a negative slot is skipped."""
    slot = tl.load(slots + tl.program_id(0))
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    inside = slot % BLOCK_SIZE
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    put_row(
        new_keys + row * nk_row + head * nk_head,
        keys + block * K_BLOCK + head * K_HEAD + inside * K_SLOT,
        D,
        BLOCK_D,
        K_FORMAT,
    )
    put_row(
        new_values + row * nv_row + head * nv_head,
        values + block * V_BLOCK + head * V_HEAD + inside * V_SLOT,
        DV,
        BLOCK_DV,
        V_FORMAT,
    )
