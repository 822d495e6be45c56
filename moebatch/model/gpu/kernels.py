"""What a GPU computes in one launch each: what goes through rows between products, experts of few
rows together, and attention of tokens that decode.

Numbers are rounded where torch's operators round them, so that results are theirs but for the order
of sums. `table` has a row for each tile of an expert, of `TILE` numbers: the addresses of its three
matrices, of the rows of the pass and of the choices that it is for, how many those are, and where
what the tile makes stands among the rows of the group.

Shape letters: M rows of a tile, N outputs of a block, I inputs of a block, D hidden, F expert
width.
"""

import triton
import triton.language as tl

TILE = tl.constexpr(7)


@triton.jit
def norm(out, x, weight, stride, eps, width, is_exact: tl.constexpr, block: tl.constexpr):
    """Root-mean-square norm of the parts of a row, each of so many numbers; exact weights are
    multiplied before it is rounded."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, places = row * stride + part * width, tl.arange(0, block)
    is_there = places < width
    numbers = tl.load(x + start + places, mask=is_there, other=0.0)
    wide = numbers.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    scales = tl.load(weight + places, mask=is_there, other=0.0).to(tl.float32)
    if not is_exact:
        normed = normed.to(numbers.dtype).to(tl.float32)
    tl.store(out + start + places, (normed * scales).to(numbers.dtype), mask=is_there)


@triton.jit
def rotate(x, cos, sin, stride, part_stride, width, block: tl.constexpr):
    """Rotates pairs of the first numbers of a head in place."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = tl.arange(0, block)
    is_there = places < width
    first = x + row * stride + head * part_stride + places
    c = tl.load(cos + row * width + places, mask=is_there, other=0.0).to(tl.float32)
    s = tl.load(sin + row * width + places, mask=is_there, other=0.0).to(tl.float32)
    a = tl.load(first, mask=is_there, other=0.0)
    b = tl.load(first + width, mask=is_there, other=0.0)
    kind = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    a_sin, b_sin = (a * s).to(kind).to(tl.float32), (b * s).to(kind).to(tl.float32)
    a_cos, b_cos = (a * c).to(kind).to(tl.float32), (b * c).to(kind).to(tl.float32)
    tl.store(first, (a_cos - b_sin).to(kind), mask=is_there)
    tl.store(first + width, (b_cos + a_sin).to(kind), mask=is_there)


@triton.jit
def gated(gate, up, kind: tl.constexpr, limit, alpha, is_clamped: tl.constexpr):
    """What a gate lets through, of `kind`, from float32 that holds numbers of it."""
    if is_clamped:
        gate = tl.where(gate > limit, limit, gate)  # what is no number stays so
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        up = (up + 1.0).to(kind).to(tl.float32)
        gate = (gate * alpha).to(kind).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    if is_clamped:
        gate = (gate / alpha).to(kind).to(tl.float32)
    return (gate * up).to(kind)


@triton.jit
def gate_rows(gate, up, count, limit, alpha, is_clamped: tl.constexpr, block: tl.constexpr):
    """SwiGLU in place of the gate."""
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    is_there = places < count
    numbers = tl.load(gate + places, mask=is_there, other=0.0)
    others = tl.load(up + places, mask=is_there, other=0.0).to(tl.float32)
    kind = numbers.dtype
    through = gated(numbers.to(tl.float32), others, kind, limit, alpha, is_clamped)
    tl.store(gate + places, through, mask=is_there)


@triton.jit
def place(outputs, y, weights, rows, choices, num_choices, width, block: tl.constexpr):
    """Weighs a row that an expert has made, and puts it where its choice stands."""
    number, places = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    is_there = places < width
    choice = tl.load(rows + number) * num_choices + tl.load(choices + number)
    made = tl.load(y + number * width + places, mask=is_there, other=0.0)
    weighed = made.to(tl.float32) * tl.load(weights + choice)
    tl.store(outputs + choice * width + places, weighed.to(made.dtype), mask=is_there)


@triton.jit
def add(x, first, second, num_parts, width, scale, has_second: tl.constexpr, block: tl.constexpr):
    """Adds the scaled sum of the parts of a row to it."""
    row, places = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    is_there = places < width
    total = tl.zeros([block], tl.float32)
    for part in range(num_parts):
        start = first + (row * num_parts + part) * width
        total += tl.load(start + places, mask=is_there, other=0.0).to(tl.float32)
    if has_second:
        total += tl.load(second + row * width + places, mask=is_there, other=0.0).to(tl.float32)
    before = tl.load(x + row * width + places, mask=is_there, other=0.0)
    kind = before.dtype
    added = (total.to(kind).to(tl.float32) * scale).to(kind).to(tl.float32)
    tl.store(x + row * width + places, (before.to(tl.float32) + added).to(kind), mask=is_there)


@triton.jit
def experts_in(
    inner,
    x,
    table,
    stride,
    D,
    F,
    precision: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    I: tl.constexpr,
):
    """Rows gathered, both products of the gate, and the gate itself: [rows of the group, F]."""
    kind = inner.dtype.element_ty
    tile = table + tl.program_id(0) * TILE  # tiles of an expert share its weights
    gate = tl.load(tile).to(tl.pointer_type(kind))
    up = tl.load(tile + 1).to(tl.pointer_type(kind))
    rows = tl.load(tile + 3).to(tl.pointer_type(tl.int64))
    num_rows, start = tl.load(tile + 5), tl.load(tile + 6)
    m, i = tl.arange(0, M), tl.arange(0, I)
    n = tl.program_id(1) * N + tl.arange(0, N)
    row = tl.load(rows + m, mask=m < num_rows, other=0)
    x_MI = x + row[:, None] * stride + i[None, :]
    places_IN = n[None, :] * D + i[:, None]
    gate_MN, up_MN = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
    for first in range(0, D, I):
        is_input = i < D - first
        in_MI = tl.load(x_MI + first, mask=(m < num_rows)[:, None] & is_input[None, :], other=0.0)
        is_weight = is_input[:, None] & (n < F)[None, :]
        # Addresses out of a table tell nothing of themselves: 16 bytes are read at a time.
        gates_IN = tl.multiple_of(gate + places_IN + first, (16, 1))
        ups_IN = tl.multiple_of(up + places_IN + first, (16, 1))
        gate_IN = tl.load(gates_IN, mask=is_weight, other=0.0)
        up_IN = tl.load(ups_IN, mask=is_weight, other=0.0)
        gate_MN = tl.dot(in_MI, gate_IN, gate_MN, input_precision=precision)
        up_MN = tl.dot(in_MI, up_IN, up_MN, input_precision=precision)
    gate_MN, up_MN = gate_MN.to(kind).to(tl.float32), up_MN.to(kind).to(tl.float32)
    through = gated(gate_MN, up_MN, kind, 0.0, 1.0, False)
    out = inner + (start + m)[:, None] * F + n[None, :]
    tl.store(out, through, mask=(m < num_rows)[:, None] & (n < F)[None, :])


@triton.jit
def experts_out(
    outputs,
    inner,
    weights,
    table,
    num_choices,
    D,
    F,
    precision: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    I: tl.constexpr,
):
    """The last product, weighed, each row where its choice stands."""
    kind = inner.dtype.element_ty
    tile = table + tl.program_id(0) * TILE  # tiles of an expert share its weights
    down = tl.load(tile + 2).to(tl.pointer_type(kind))
    rows = tl.load(tile + 3).to(tl.pointer_type(tl.int64))
    choices = tl.load(tile + 4).to(tl.pointer_type(tl.int64))
    num_rows, start = tl.load(tile + 5), tl.load(tile + 6)
    m, i = tl.arange(0, M), tl.arange(0, I)
    n = tl.program_id(1) * N + tl.arange(0, N)
    in_MI = inner + (start + m)[:, None] * F + i[None, :]
    places_IN = n[None, :] * F + i[:, None]
    made_MN = tl.zeros([M, N], tl.float32)
    for first in range(0, F, I):
        is_input = i < F - first
        mask_MI = (m < num_rows)[:, None] & is_input[None, :]
        inner_MI = tl.load(in_MI + first, mask=mask_MI, other=0.0)
        is_weight = is_input[:, None] & (n < D)[None, :]
        downs_IN = tl.multiple_of(down + places_IN + first, (16, 1))
        down_IN = tl.load(downs_IN, mask=is_weight, other=0.0)
        made_MN = tl.dot(inner_MI, down_IN, made_MN, input_precision=precision)
    is_there = m < num_rows
    row = tl.load(rows + m, mask=is_there, other=0)
    choice = row * num_choices + tl.load(choices + m, mask=is_there, other=0)
    weight = tl.load(weights + choice, mask=is_there, other=0.0)
    weighed = made_MN.to(kind).to(tl.float32) * weight[:, None]
    out = outputs + choice[:, None] * D + n[None, :]
    tl.store(out, weighed.to(kind), mask=is_there[:, None] & (n < D)[None, :])


@triton.jit
def attend_single(
    out,
    q,
    keys,
    values,
    tokens,
    starts,
    rows,
    sink_scores,
    q_row,
    out_row,
    key_row,
    value_row,
    num_shared,
    head_dim,
    scale,
    has_sink_scores: tl.constexpr,
    precision: tl.constexpr,
    H: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
):
    """A token's queries that share a head of keys and values, and all that they see of the cache:
    block by block, the softmax so far kept as its largest score and its sum (Dao et al. 2022)."""
    number, kv_head = tl.program_id(0), tl.program_id(1)
    kind = q.dtype.element_ty
    token, start = tl.load(tokens + number), tl.load(starts + number)
    count = (tl.load(starts + number + 1) - start).to(tl.int32)
    h, s, c = tl.arange(0, H), tl.arange(0, S), tl.arange(0, C)
    head = kv_head * num_shared + h
    is_there_HC = (h < num_shared)[:, None] & (c < head_dim)[None, :]
    places_HC = head[:, None] * head_dim + c[None, :]
    q_HC = tl.load(q + token * q_row + places_HC, mask=is_there_HC, other=0.0)
    largest_H, total_H = tl.full([H], float("-inf"), tl.float32), tl.zeros([H], tl.float32)
    if has_sink_scores:
        largest_H = tl.load(sink_scores + head, mask=h < num_shared, other=0.0)
        total_H += 1.0
    made_HC = tl.zeros([H, C], tl.float32)
    for first in range(0, count, S):
        is_seen = s < count - first
        row = tl.load(rows + start + first + s, mask=is_seen, other=0)
        keys_CS = keys + row[None, :] * key_row + (kv_head * head_dim + c)[:, None]
        is_key_CS = (c < head_dim)[:, None] & is_seen[None, :]
        k_CS = tl.load(keys_CS, mask=is_key_CS, other=0.0)
        scores_HS = tl.dot(q_HC, k_CS, input_precision=precision) * scale
        scores_HS = tl.where(is_seen[None, :], scores_HS, float("-inf"))
        now_H = tl.maximum(largest_H, tl.max(scores_HS, axis=1))
        weights_HS, fading_H = tl.exp(scores_HS - now_H[:, None]), tl.exp(largest_H - now_H)
        values_SC = values + row[:, None] * value_row + (kv_head * head_dim + c)[None, :]
        is_value_SC = is_seen[:, None] & (c < head_dim)[None, :]
        v_SC = tl.load(values_SC, mask=is_value_SC, other=0.0)
        made_HC = made_HC * fading_H[:, None]
        made_HC = tl.dot(weights_HS.to(kind), v_SC, made_HC, input_precision=precision)
        total_H = total_H * fading_H + tl.sum(weights_HS, axis=1)
        largest_H = now_H
    made_HC = (made_HC / total_H[:, None]).to(kind)
    tl.store(out + token * out_row + places_HC, made_HC, mask=is_there_HC)
