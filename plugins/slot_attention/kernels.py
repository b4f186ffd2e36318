"""Slot attention and the append to memory as Triton-language kernels.

The visibility rule (reference.py) is evaluated in registers; there are no mask tensors. A program
holds a tile of query rows of one key head: row m of the packed queries is position m // G, query
head m % G of the group. What the tile can see of the memory is numbered u = 0, 1, ... without
gaps, so nothing else is read and key tiles that no query sees do not exist:

    sinks | slots born by the tile's last time | ring entries alive at its first time, in time order

Sinks and the slots born by the tile's *first* time come first and need no mask. Then come the new
positions of the block itself. All key tiles may be shared out among parts, whose outputs a second
kernel merges. Scores are in base 2: `lse` is log2 of the sum of exponentials.

Tensors, contiguous unless strides are given, last dimension contiguous always:
    q (B, H, N, D); k_new, v_new (B, Hkv, N, D), strided; memory_k, memory_v (rows, Hkv, M, D)
    rows, fed (B,) int32; times (B, N) int; kind (B, N) uint8; out (B, N, H, D)
    partial (B, N, H, parts, D) float32; lse (B, N, H, parts) float32
Rule scalars: sink S, window W, ring W + R, interval r (0: none), delay from a slot's boundary to
its birth. DOT is the type that products are made of; it is float32 for bfloat16 in Triton's
interpreter, which cannot multiply that type.
"""

import triton
import triton.language as tl

PADDING, RAW, SLOT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
NEVER = tl.constexpr(2**31 - 1)
RULE = ["sink", "window", "ring", "interval", "delay"]


@triton.jit
def _slots_born(time, fed, sink, interval, delay):
    """Number of stored slots that a query at `time` sees."""
    stored = tl.maximum(fed - sink, 0) // tl.maximum(interval, 1)
    born = tl.maximum(time - delay - sink + 1, 0) // tl.maximum(interval, 1)
    return tl.where(interval > 0, tl.minimum(born, stored), 0)


@triton.jit
def _add_keys(
    q, k, v, seen, acc, top, total,
    SCALE: tl.constexpr, DOT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of online softmax over a tile of keys; rows that see none stay as they are."""
    scores = tl.dot(q, tl.trans(k.to(DOT)), input_precision="ieee") * SCALE
    if MASKED:
        scores = tl.where(seen, scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    finite = tl.where(new_top == -float("inf"), 0.0, new_top)
    weights = tl.exp2(scores - finite[:, None])
    shrink = tl.exp2(top - finite)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(DOT), v.to(DOT), acc * shrink[:, None], input_precision="ieee")
    return acc, new_top, total


@triton.jit
def _query_rows(times, kind, batch, tile, positions, G: tl.constexpr, BLOCK_M: tl.constexpr):
    """Position, head in the group, time, and whether it is a query, of each row of a tile."""
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    position, head = m // G, m % G
    inside = position < positions
    at = batch * positions + position
    time = tl.load(times + at, mask=inside, other=0).to(tl.int32)
    is_query = inside & (tl.load(kind + at, mask=inside, other=0) != PADDING)
    return position, head, time, is_query


@triton.jit
def _load_rows(base, row, d, keep, stride, D: tl.constexpr, D_PAD: tl.constexpr):
    """(rows, D_PAD) values at base + row * stride; zeros beyond D and where not `keep`.

    keep None: all rows.
    """
    at, columns = base + row[:, None] * stride + d[None, :], (d < D)[None, :]
    if keep is None:
        values = tl.load(at) if D == D_PAD else tl.load(at, mask=columns, other=0.0)
    elif D == D_PAD:
        values = tl.load(at, mask=keep[:, None], other=0.0)
    else:
        values = tl.load(at, mask=keep[:, None] & columns, other=0.0)
    return values


@triton.jit
def _attend(
    q, k_new, v_new, memory_k, memory_v, rows, fed, times, kind,
    batch, kv_head, tile, part, parts, positions, capacity,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    sink, window, ring, interval, delay,
    G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr, DOT: tl.constexpr, UNMASKED: tl.constexpr,
):  # fmt: skip
    """Attention of one tile over its share of the keys.

    The tiles of memory keys, then those of new positions, are shared out among the parts.
    UNMASKED: give keys that all rows see a loop without a mask. Returns the rows' position, head
    and `is_query`, and accumulator, maximum and sum of the online softmax.
    """
    position, head, time, is_query = _query_rows(times, kind, batch, tile, positions, G, BLOCK_M)
    length = tl.load(fed + batch).to(tl.int32)
    # Times of the tile's first and last query. Without the loop for them bounds will do, and the
    # first keys need not wait for the times to arrive.
    first, last = length, length + positions - 1
    if UNMASKED:
        first = tl.min(tl.where(is_query, time, NEVER), 0)
        last = tl.max(tl.where(is_query, time, -1), 0)
    d = tl.arange(0, D_PAD)
    wide = batch.to(tl.int64)
    q_offset = (kv_head * G + head) * q_h + position * q_n
    query = _load_rows(q + wide * q_b, q_offset, d, is_query, 1, D, D_PAD).to(DOT)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    # What the tile sees of the memory.
    sinks = tl.where(last < 0, 0, tl.minimum(length, sink))
    slots = _slots_born(last, length, sink, interval, delay)
    oldest = tl.maximum(first - window + 1, sink)  # time of the first ring entry that is seen
    in_ring = tl.maximum(length - oldest, 0)
    place = (oldest - sink) % tl.maximum(ring, 1)
    keys = sinks + slots + in_ring
    base = (tl.load(rows + batch).to(tl.int64) * tl.num_programs(1) + kv_head) * capacity * D

    # The new positions up to the tile's last; without slots only those in some query's window.
    begin = tl.where((interval == 0) & (length >= sink), oldest - length, 0)
    begin = tl.maximum(begin, 0) // BLOCK_N * BLOCK_N
    end = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // G + 1, positions)
    end = tl.where(last < 0, begin, end)

    memory_tiles = tl.cdiv(keys, BLOCK_N)
    share = tl.cdiv(memory_tiles + tl.cdiv(end - begin, BLOCK_N), parts)
    start, stop = part * share * BLOCK_N, tl.minimum(keys, (part + 1) * share * BLOCK_N)
    lane = tl.arange(0, BLOCK_N)

    if UNMASKED:
        certain = sinks + _slots_born(first, length, sink, interval, delay)
        even = tl.maximum(tl.minimum(certain // BLOCK_N * BLOCK_N, stop), start)
        for at in tl.range(start, even, BLOCK_N):
            u = at + lane
            entry = tl.where(u < sinks, u, u - sinks + sink + ring)
            k = _load_rows(memory_k + base, entry, d, None, D, D, D_PAD)
            v = _load_rows(memory_v + base, entry, d, None, D, D, D_PAD)
            acc, top, total = _add_keys(query, k, v, None, acc, top, total, SCALE, DOT, False)
        start = even

    for at in tl.range(start, stop, BLOCK_N):
        u = at + lane
        slot, age = u - sinks, u - sinks - slots
        turned = place + age
        ring_entry = sink + turned - tl.where(turned >= ring, ring, 0)
        entry = tl.where(slot < 0, u, tl.where(age < 0, sink + ring + slot, ring_entry))
        birth = tl.where((slot >= 0) & (age < 0), sink + (slot + 1) * interval - 1 + delay, 0)
        expiry = tl.where(age >= 0, oldest + age + window, NEVER)
        expiry = tl.where(u < stop, expiry, 0)
        k = _load_rows(memory_k + base, entry, d, u < stop, D, D, D_PAD)
        v = _load_rows(memory_v + base, entry, d, u < stop, D, D, D_PAD)
        seen = (birth[None, :] <= time[:, None]) & (time[:, None] < expiry[None, :])
        acc, top, total = _add_keys(query, k, v, seen, acc, top, total, SCALE, DOT, True)

    first_new = begin + tl.maximum(part * share - memory_tiles, 0) * BLOCK_N
    after_new = begin + tl.maximum((part + 1) * share - memory_tiles, 0) * BLOCK_N
    for at in tl.range(first_new, tl.minimum(end, after_new), BLOCK_N):
        n = at + lane
        inside = n < end
        key_time = tl.load(times + batch * positions + n, mask=inside, other=0).to(tl.int32)
        key_kind = tl.load(kind + batch * positions + n, mask=inside, other=0)
        is_slot = key_kind == SLOT
        birth = tl.where(is_slot, key_time + delay, key_time)
        expiry = tl.where(is_slot | (key_time < sink), NEVER, key_time + window)
        expiry = tl.where(key_kind == PADDING, 0, expiry)
        k = _load_rows(k_new + wide * k_b + kv_head * k_h, n, d, inside, k_n, D, D_PAD)
        v = _load_rows(v_new + wide * v_b + kv_head * v_h, n, d, inside, v_n, D, D_PAD)
        seen = (birth[None, :] <= time[:, None]) & (time[:, None] < expiry[None, :])
        seen = seen | (n[None, :] == position[:, None])
        acc, top, total = _add_keys(query, k, v, seen, acc, top, total, SCALE, DOT, True)
    return position, head, is_query, acc, top, total


@triton.jit(do_not_specialize=["positions", "capacity", "parts", *RULE])
def partial_kernel(
    q, k_new, v_new, memory_k, memory_v, rows, fed, times, kind,
    positions, capacity, parts,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    sink, window, ring, interval, delay,
    partial, lse,
    G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr, DOT: tl.constexpr, UNMASKED: tl.constexpr,
):  # fmt: skip
    """Attention of every tile over one part of its keys. Grid (tiles * parts, Hkv, B)."""
    tile, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    kv_head, batch = tl.program_id(1), tl.program_id(2)
    position, head, is_query, acc, top, total = _attend(
        q, k_new, v_new, memory_k, memory_v, rows, fed, times, kind,
        batch, kv_head, tile, part, parts, positions, capacity,
        q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
        sink, window, ring, interval, delay,
        G, D, D_PAD, BLOCK_M, BLOCK_N, SCALE, DOT, UNMASKED,
    )  # fmt: skip
    heads = tl.num_programs(1) * G
    row = (batch.to(tl.int64) * positions + position) * heads + kv_head * G + head
    row, inside = row * parts + part, position < positions
    something = is_query & (total > 0)
    total = tl.where(something, total, 1.0)
    tl.store(lse + row, tl.where(something, top + tl.log2(total), -float("inf")), mask=inside)
    d = tl.arange(0, D_PAD)
    tl.store(
        partial + row[:, None] * D + d[None, :],
        tl.where(something[:, None], acc / total[:, None], 0.0),
        mask=inside[:, None] & (d < D)[None, :],
    )


@triton.jit
def dense_partial_kernel(
    q, k_new, v_new, memory_k, memory_v, rows, fed, times, kind,
    positions, capacity, parts,
    partial, lse,
    KV_HEADS: tl.constexpr,
    SINK: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr,
    INTERVAL: tl.constexpr, DELAY: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr, DOT: tl.constexpr, UNMASKED: tl.constexpr,
):  # fmt: skip
    """`partial_kernel` over contiguous tensors of one model and rule: what TensorRT launches.

    q (B, H, N, D), k_new and v_new (B, Hkv, N, D) contiguous. Grid (tiles * parts, Hkv, B).
    """
    head = positions * D  # values of one head
    partial_kernel(
        q, k_new, v_new, memory_k, memory_v, rows, fed, times, kind,
        positions, capacity, parts,
        KV_HEADS * G * head, head, D, KV_HEADS * head, head, D, KV_HEADS * head, head, D,
        SINK, WINDOW, RING, INTERVAL, DELAY,
        partial, lse,
        G, D, D_PAD, BLOCK_M, BLOCK_N, SCALE, DOT, UNMASKED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["parts"])
def merge_kernel(
    partial, lse, parts, out, D: tl.constexpr, D_PAD: tl.constexpr, PARTS_PAD: tl.constexpr
):
    """Joins the parts of one row, weighted by their sums. Grid (B * N * H,)."""
    row = tl.program_id(0).to(tl.int64)
    part, d = tl.arange(0, PARTS_PAD), tl.arange(0, D_PAD)
    inside = part < parts
    sums = tl.load(lse + row * parts + part, mask=inside, other=-float("inf"))
    values = tl.load(
        partial + (row * parts + part)[:, None] * D + d[None, :],
        mask=inside[:, None] & (d < D)[None, :],
        other=0.0,
    )
    top = tl.max(sums, 0)
    weights = tl.exp2(sums - tl.where(top == -float("inf"), 0.0, top))
    total = tl.sum(weights, 0)
    mean = tl.sum(values * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * D + d, mean.to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["positions", "capacity", *RULE])
def whole_kernel(
    q, k_new, v_new, memory_k, memory_v, rows, fed, times, kind,
    positions, capacity,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    sink, window, ring, interval, delay,
    out,
    G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr, DOT: tl.constexpr, UNMASKED: tl.constexpr,
):  # fmt: skip
    """Attention of every tile over all of its keys. Grid (tiles, Hkv, B)."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles have the most keys
    kv_head, batch = tl.program_id(1), tl.program_id(2)
    position, head, is_query, acc, _top, total = _attend(
        q, k_new, v_new, memory_k, memory_v, rows, fed, times, kind,
        batch, kv_head, tile, 0, 1, positions, capacity,
        q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
        sink, window, ring, interval, delay,
        G, D, D_PAD, BLOCK_M, BLOCK_N, SCALE, DOT, UNMASKED,
    )  # fmt: skip
    heads = tl.num_programs(1) * G
    row = (batch.to(tl.int64) * positions + position) * heads + kv_head * G + head
    d = tl.arange(0, D_PAD)
    tl.store(
        out + row[:, None] * D + d[None, :],
        tl.where(is_query[:, None], acc / tl.where(is_query, total, 1.0)[:, None], 0.0).to(
            out.dtype.element_ty
        ),
        mask=(position < positions)[:, None] & (d < D)[None, :],
    )


@triton.jit(do_not_specialize=["batch_size", "memory_rows", "positions", "capacity", *RULE[:4]])
def append_kernel(
    k_new, v_new, rows, lengths, times, kind,
    batch_size, memory_rows, positions, capacity,
    sink, window, ring, interval,
    memory_k, memory_v,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes new keys and values of all layers to their entries. Grid (tiles, Hkv, L * B).

    k_new, v_new (L, B, Hkv, N, D); memory_k, memory_v (L, rows, Hkv, M, D), contiguous. lengths
    (B,) int32: fed length after the block. Raw tokens that a later one of the block overwrites
    are left out, so no entry is written twice.
    """
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kv_head, kv_heads = tl.program_id(1), tl.num_programs(1)
    layer, batch = tl.program_id(2) // batch_size, tl.program_id(2) % batch_size
    inside, d = n < positions, tl.arange(0, D_PAD)
    time = tl.load(times + batch * positions + n, mask=inside, other=0).to(tl.int32)
    what = tl.load(kind + batch * positions + n, mask=inside, other=0)
    length = tl.load(lengths + batch).to(tl.int32)

    late = tl.maximum(time - sink, 0)
    raw_entry = tl.where(time < sink, time, sink + late % tl.maximum(ring, 1))
    entry = tl.where(what == SLOT, sink + ring + late // tl.maximum(interval, 1), raw_entry)
    overwritten = (time >= sink) & (time < length - ring)
    keep = (what == SLOT) | ((what == RAW) & (overwritten == 0))
    mask = keep[:, None] & (d < D)[None, :]

    source = ((layer.to(tl.int64) * batch_size + batch) * kv_heads + kv_head) * positions * D
    row = layer.to(tl.int64) * memory_rows + tl.load(rows + batch)
    target = (row * kv_heads + kv_head) * capacity * D
    read, write = n[:, None] * D + d[None, :], entry[:, None] * D + d[None, :]
    tl.store(memory_k + target + write, tl.load(k_new + source + read, mask=mask), mask=mask)
    tl.store(memory_v + target + write, tl.load(v_new + source + read, mask=mask), mask=mask)
