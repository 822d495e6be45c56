"""What a GPU computes in one launch each: what goes through rows between products, choices of
experts, their tokens, experts of few rows together, and attention of tokens that decode.

Numbers are rounded where torch's operators round them, so that results are theirs but for the order
of sums. `table` has a row for each tile of an expert, of `TILE` numbers: for each of its matrices
`MATRIX` addresses, those that a `Described` has; from `ROWS` on, the addresses of the rows of the
pass and of the choices that the tile is for, how many those are, and where what the tile makes
stands among the rows of the group. `coding` is a `Coding`, `formula` a `Formula`.

Shape letters: M rows of a tile, N outputs of a block, I inputs of a block, H codes of them that are
decoded together, G groups that share a scale, S codes of a group, D hidden, F expert width; of
choices, G groups of experts, S experts of a group, K experts per token.
"""

import triton
import triton.language as tl

MATRIX = tl.constexpr(6)
ROWS = tl.constexpr(18)
TILE = tl.constexpr(22)


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
def norm_gated(out, x, weight, z, z_stride, eps, width, block: tl.constexpr):
    """The norm of the parts of a row, in float32, times silu(z); rounded before either is
    multiplied."""
    row, part, places = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, block)
    start, is_there = (row * tl.num_programs(1) + part) * width, places < width
    wide = tl.load(x + start + places, mask=is_there, other=0.0)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    numbers = tl.load(z + row * z_stride + part * width + places, mask=is_there, other=0.0)
    kind = numbers.dtype
    gate = numbers.to(tl.float32)
    scales = tl.load(weight + places, mask=is_there, other=0.0).to(tl.float32)
    normed = (normed.to(kind).to(tl.float32) * scales).to(kind).to(tl.float32)
    through = gate / (1.0 + tl.exp(-gate)) * normed
    tl.store(out + start + places, through.to(kind), mask=is_there)


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
def gated(gate, up, kind: tl.constexpr, clamping, is_clamped: tl.constexpr):
    """What a gate lets through, of `kind`, from float32 that holds numbers of it."""
    most_gate, most_activated, limit, alpha, added = clamping
    if is_clamped:
        gate = tl.where(gate > most_gate, most_gate, gate)  # what is no number stays so
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        up = (up.to(kind).to(tl.float32) + added).to(kind).to(tl.float32)
        gate = (gate.to(kind).to(tl.float32) * alpha).to(kind).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    if is_clamped:
        gate = (gate / alpha).to(kind).to(tl.float32)
        gate = tl.where(gate > most_activated, most_activated, gate).to(kind).to(tl.float32)
    return (gate * up).to(kind)


@triton.jit
def gate_rows(
    gate,
    up,
    count,
    most_gate,
    most_activated,
    limit,
    alpha,
    added,
    is_clamped: tl.constexpr,
    block: tl.constexpr,
):
    """SwiGLU in place of the gate."""
    clamping = most_gate, most_activated, limit, alpha, added
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    is_there = places < count
    numbers = tl.load(gate + places, mask=is_there, other=0.0)
    others = tl.load(up + places, mask=is_there, other=0.0).to(tl.float32)
    kind = numbers.dtype
    through = gated(numbers.to(tl.float32), others, kind, clamping, is_clamped)
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
def comparable(numbers):
    """What is no number is the largest one, as torch has it."""
    return tl.where(numbers != numbers, float("inf"), numbers)


@triton.jit
def best_of(numbers, is_left, places, axis: tl.constexpr):
    """The place of the largest number that is left along an axis, None being all; the first one of
    equal ones."""
    left = tl.where(is_left, numbers, float("-inf"))
    if axis is None:
        found = tl.min(tl.where(is_left & (left == tl.max(left)), places, 2**30))
    else:
        best = tl.max(left, axis=axis, keep_dims=True)
        is_best = is_left & (left == best)
        found = tl.min(tl.where(is_best, places, 2**30), axis=axis, keep_dims=True)
    return found


@triton.jit
def in_kept_groups(wanted_GS, is_there_GS, formula: tl.constexpr, G: tl.constexpr, S: tl.constexpr):
    """Experts of the groups whose best experts have the largest sums."""
    g, s = tl.arange(0, G)[:, None], tl.arange(0, S)[None, :]
    is_left_GS, total_G1 = is_there_GS, tl.zeros([G, 1], tl.float32)
    for _ in range(formula.num_scored):
        is_it_GS = s == best_of(comparable(wanted_GS), is_left_GS, s, 1)
        total_G1 += tl.sum(tl.where(is_it_GS, wanted_GS, 0.0), axis=1, keep_dims=True)
        is_left_GS = is_left_GS & ~is_it_GS
    total_G1, is_left_G1 = comparable(total_G1), g < formula.num_groups
    is_kept_G1 = g < 0
    for _ in range(formula.num_kept):
        group = best_of(total_G1, is_left_G1, g, None)
        is_kept_G1 = is_kept_G1 | (g == group)
        is_left_G1 = is_left_G1 & (g != group)
    return is_there_GS & is_kept_G1


@triton.jit
def places_by(numbers_K, before_K, num_choices, K: tl.constexpr):
    """Where each stands in descending order; of equal ones those first that stood so before."""
    is_there_K = tl.arange(0, K) < num_choices
    numbers_K = tl.where(is_there_K, comparable(numbers_K), float("-inf"))
    is_equal_KK = numbers_K[None, :] == numbers_K[:, None]
    is_ahead_KK = is_equal_KK & (before_K[None, :] < before_K[:, None])
    is_ahead_KK = is_ahead_KK | (numbers_K[None, :] > numbers_K[:, None])
    return tl.sum((is_ahead_KK & is_there_K[None, :]).to(tl.int32), axis=1)


@triton.jit
def norm_of(numbers_K, order: tl.constexpr):
    """Of what is not negative."""
    if order == 1.0:
        norm = tl.sum(numbers_K)
    else:
        is_none_K = numbers_K == 0.0
        powers_K = tl.exp2(tl.log2(tl.where(is_none_K, 1.0, numbers_K)) * order)
        norm = tl.exp2(tl.log2(tl.sum(tl.where(is_none_K, 0.0, powers_K))) / order)
    return norm


@triton.jit(do_not_specialize=("weights", "experts"))  # rows of a pass begin anywhere
def choose(
    weights,
    experts,
    logits,
    correction,
    expert_weights,
    formula: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    K: tl.constexpr,
):
    """Weights and experts of a token, from the logits of a gate."""
    row, num_choices = tl.program_id(0).to(tl.int64), formula.num_choices
    g, s, k = tl.arange(0, G)[:, None], tl.arange(0, S)[None, :], tl.arange(0, K)
    expert_GS = g * formula.group_size + s
    is_there_GS = (g < formula.num_groups) & (s < formula.group_size)
    logits += row * formula.num_groups * formula.group_size
    logits_GS = tl.load(logits + expert_GS, mask=is_there_GS, other=0.0)
    logits_GS = logits_GS.to(tl.float32)
    if formula.scores == "sigmoid":
        scores_GS = 1.0 / (1.0 + tl.exp(-logits_GS))
    else:
        top = tl.max(tl.where(is_there_GS, logits_GS, float("-inf")))
        scores_GS = tl.exp(tl.where(is_there_GS, logits_GS - top, float("-inf")))
        scores_GS = scores_GS / tl.sum(scores_GS)
    wanted_GS = logits_GS if formula.wants_logits else scores_GS
    if formula.has_correction:
        wanted_GS += tl.load(correction + expert_GS, mask=is_there_GS, other=0.0)
    is_left_GS = is_there_GS
    if formula.num_kept < formula.num_groups:
        is_kept_GS = in_kept_groups(wanted_GS, is_there_GS, formula, G, S)
        if formula.others_are_zero:
            wanted_GS = tl.where(is_kept_GS, wanted_GS, 0.0)
        else:
            is_left_GS = is_kept_GS
    wanted_GS = comparable(wanted_GS)
    weights_K, experts_K = tl.zeros([K], tl.float32), tl.zeros([K], tl.int32)
    for number in range(num_choices):
        expert = best_of(wanted_GS, is_left_GS, expert_GS, None)
        is_it_GS = is_there_GS & (expert_GS == expert)
        if formula.scores == "sparsemixer":
            best = tl.sum(tl.where(is_it_GS, logits_GS, 0.0))
            size_GS = tl.where(is_left_GS, tl.abs(logits_GS), 1.0)
            below_GS = (best - logits_GS) / tl.where(size_GS < best, best, size_GS)
            is_met_GS = is_left_GS & ~(below_GS > formula.near)
            met_GS = tl.exp(tl.where(is_met_GS, logits_GS - best, float("-inf")))
            weight = 1.0 / tl.sum(met_GS)
        else:
            weight = tl.sum(tl.where(is_it_GS, scores_GS, 0.0))
        weights_K = tl.where(k == number, weight, weights_K)
        experts_K = tl.where(k == number, expert, experts_K)
        is_left_GS = is_left_GS & (expert_GS != expert)
    place_K = k
    if formula.is_sorted:
        place_K = places_by(weights_K, place_K, num_choices, K)
    if formula.norm_order > 0.0:
        norm = norm_of(weights_K, formula.norm_order)
        norm = tl.where(norm < formula.least_norm, formula.least_norm, norm)
        weights_K = weights_K / (norm + formula.added_to_norm)
    weights_K = weights_K * formula.scale
    if formula.weighs_experts:
        weights_K *= tl.load(expert_weights + experts_K)
        place_K = places_by(weights_K, place_K, num_choices, K)
    if formula.rounds_to == "bfloat16":
        weights_K = weights_K.to(tl.bfloat16)
    elif formula.rounds_to == "float16":
        weights_K = weights_K.to(tl.float16)
    first, is_choice_K = row * num_choices, k < num_choices
    tl.store(weights + first + place_K, weights_K.to(tl.float32), mask=is_choice_K)
    tl.store(experts + first + place_K, experts_K.to(tl.int64), mask=is_choice_K)


@triton.jit(do_not_specialize=("experts", "first_row", "count"))  # for the same reason
def group(
    rows, choices, counts, experts, first_row, count, num_choices: tl.constexpr, block: tl.constexpr
):
    """The tokens of an expert, behind those of all experts before it: a stable sort by counting.
    Each program counts by itself what stands before, since others may not have begun."""
    expert, places = tl.program_id(0), tl.arange(0, block)
    before = tl.zeros([block], tl.int32)
    for first in range(0, count, block):
        is_there = first + places < count
        chosen = tl.load(experts + first + places, mask=is_there, other=2**30)
        before += (chosen < expert).to(tl.int32)
    start = tl.sum(before)
    stop = start
    for first in range(0, count, block):
        place = first + places
        is_own = tl.load(experts + place, mask=place < count, other=2**30) == expert
        number = is_own.to(tl.int32)
        to = stop + tl.cumsum(number) - 1
        tl.store(rows + to, (first_row + place // num_choices).to(tl.int64), mask=is_own)
        tl.store(choices + to, (place % num_choices).to(tl.int64), mask=is_own)
        stop += tl.sum(number)
    tl.store(counts + expert, (stop - start).to(tl.int64))


@triton.jit
def matrix_at(tile, role: tl.constexpr, coding: tl.constexpr):
    """Where the parts of the matrix of a role lie, and its codebook."""
    entry = tile + role * MATRIX
    codes, scales, zeros = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    values = tl.load(entry + 4)
    if coding.numbers == "codebook":
        values = tl.load(values.to(tl.pointer_type(tl.float32)) + tl.arange(0, 16))
    return codes, scales, zeros, tl.load(entry + 3), values, tl.load(entry + 5)


@triton.jit
def of_e4m3(codes):
    """Its numbers, by their bits: not every GPU knows them. Float16 has eight powers of two less
    for the same exponent."""
    bits = codes.to(tl.int16)
    half = ((bits & 127) << 7 | (bits & 128) << 8).to(tl.float16, bitcast=True)
    return tl.where((bits & 127) == 127, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def of_e8m0(codes):
    """2^(code - 127); the last code is no number."""
    bits = codes.to(tl.int32)
    bits = tl.where(bits == 0, 1 << 22, tl.where(bits == 255, 0x7FC00000, bits << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def floats_at(address, places, is_there, type: tl.constexpr):
    """Numbers of a type, in float32."""
    if type == "e4m3" or type == "e8m0":
        bytes = address.to(tl.pointer_type(tl.uint8))
        codes = tl.load(bytes + places, mask=is_there, other=0)
        floats = of_e4m3(codes) if type == "e4m3" else of_e8m0(codes)
    else:
        if type == "bfloat16":
            numbers = address.to(tl.pointer_type(tl.bfloat16))
        elif type == "float16":
            numbers = address.to(tl.pointer_type(tl.float16))
        else:
            numbers = address.to(tl.pointer_type(tl.float32))
        floats = tl.load(numbers + places, mask=is_there, other=0.0).to(tl.float32)
    return floats


@triton.jit
def numbers_of(codes, values, numbers: tl.constexpr):
    """What codes stand for, in float32, before zero points are taken off."""
    if numbers == "codebook":
        places = tl.reshape(codes, [codes.numel]).to(tl.int32)
        found = tl.reshape(tl.gather(values, places, 0), codes.shape)
    elif numbers == "e2m1":
        bits = codes.to(tl.int16)
        half = ((bits & 7) << 9 | (bits & 8) << 12).to(tl.float16, bitcast=True)
        found = half.to(tl.float32) * 16384.0
    elif numbers == "e4m3":
        found = of_e4m3(codes)
    elif numbers == "int8":
        found = codes.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        found = codes.to(tl.float32)
    return found


@triton.jit
def steps_at(matrix, n, first, num_outputs, num_inputs, coding: tl.constexpr, G: tl.constexpr):
    """Steps and zero points of some groups of inputs, [G, N]."""
    i = first + tl.arange(0, G) * coding.alike
    is_there_GN = (i < num_inputs)[:, None] & (n < num_outputs)[None, :]
    column_G1 = (i // coding.block_columns)[:, None]
    places_GN = (n // coding.block_rows * coding.scale_row)[None, :] + column_G1
    steps_GN = floats_at(matrix[1], places_GN, is_there_GN, coding.scales)
    if coding.factor == "times":
        steps_GN = steps_GN * tl.load(matrix[3].to(tl.pointer_type(tl.float32)))
    elif coding.factor == "over":
        factor = tl.load(matrix[3].to(tl.pointer_type(tl.float32)))
        steps_GN = tl.div_rn(steps_GN, tl.broadcast_to(factor, steps_GN.shape))
    if coding.has_zeros:
        of_word: tl.constexpr = 32 // coding.bits
        places_GN = (n // of_word * coding.zero_row)[None, :] + column_G1
        words = matrix[2].to(tl.pointer_type(tl.int32))
        words_GN = tl.load(words + places_GN, mask=is_there_GN, other=0)
        codes_GN = words_GN >> (n % of_word * coding.bits)[None, :] & ((1 << coding.bits) - 1)
        zeros_GN = codes_GN.to(tl.float32)
    else:
        zeros_GN = tl.full(steps_GN.shape, coding.zero, tl.float32)
    return steps_GN, zeros_GN


@triton.jit
def decoded(codes_HN, matrix, steps_GN, zeros_GN, kind: tl.constexpr, coding: tl.constexpr):
    """Weights of `kind`, rounded as the format wants before."""
    G: tl.constexpr = steps_GN.shape[0]
    N: tl.constexpr = steps_GN.shape[1]
    H: tl.constexpr = codes_HN.shape[0]
    numbers_GSN = numbers_of(tl.reshape(codes_HN, [G, H // G, N]), matrix[4], coding.numbers)
    weights_GSN = (numbers_GSN - zeros_GN[:, None, :]) * steps_GN[:, None, :]
    if coding.rounds_to == "bfloat16":
        weights_GSN = weights_GSN.to(tl.bfloat16)
    elif coding.rounds_to == "float16":
        weights_GSN = weights_GSN.to(tl.float16)
    return tl.reshape(weights_GSN.to(kind), [H, N])


@triton.jit
def times(
    made_MN,
    in_MI,
    matrix,
    n,
    first,
    num_outputs,
    num_inputs,
    coding: tl.constexpr,
    precision: tl.constexpr,
):
    """What has been made, and the product of inputs from `first` on with a part of a matrix. Codes
    are decoded where they have been read to: half of the inputs at a time, the even ones first,
    where two codes lie in a byte."""
    kind: tl.constexpr = in_MI.dtype
    M: tl.constexpr = in_MI.shape[0]
    I: tl.constexpr = in_MI.shape[1]
    of_byte: tl.constexpr = 2 if coding.bits == 4 else 1
    H: tl.constexpr = I // of_byte
    h = tl.arange(0, H)
    # Addresses and sizes out of a table tell nothing of themselves: 16 bytes are read at a time.
    left = (num_inputs - first) // of_byte
    left = tl.multiple_of(left, 8 if coding.bits == 0 else 16)
    is_there_HN = (h < left)[:, None] & (n < num_outputs)[None, :]
    places_HN = n[None, :] * coding.row + (first // of_byte + h)[:, None]
    if coding.bits == 0:
        plain = matrix[0].to(tl.pointer_type(kind))
        plain_HN = tl.multiple_of(plain + places_HN, (16, 1))
        weights_HN = tl.load(plain_HN, mask=is_there_HN, other=0.0)
        made_MN = tl.dot(in_MI, weights_HN, made_MN, input_precision=precision)
    else:
        G: tl.constexpr = I // coding.alike
        steps_GN, zeros_GN = steps_at(matrix, n, first, num_outputs, num_inputs, coding, G)
        codes = matrix[0].to(tl.pointer_type(tl.uint8))
        codes_HN = tl.multiple_of(codes + places_HN, (16, 1))
        codes_HN = tl.load(codes_HN, mask=is_there_HN, other=0)
        if of_byte == 1:
            weights_HN = decoded(codes_HN, matrix, steps_GN, zeros_GN, kind, coding)
            weights_HN = tl.where(is_there_HN, weights_HN, 0.0)
            made_MN = tl.dot(in_MI, weights_HN, made_MN, input_precision=precision)
        else:
            even_MH, odd_MH = tl.split(tl.reshape(in_MI, [M, H, 2]))
            low: tl.constexpr = 4 if coding.is_high_first else 0
            even_HN, odd_HN = codes_HN >> low & 15, codes_HN >> (4 - low) & 15
            weights_HN = decoded(even_HN, matrix, steps_GN, zeros_GN, kind, coding)
            weights_HN = tl.where(is_there_HN, weights_HN, 0.0)
            made_MN = tl.dot(even_MH, weights_HN, made_MN, input_precision=precision)
            weights_HN = decoded(odd_HN, matrix, steps_GN, zeros_GN, kind, coding)
            weights_HN = tl.where(is_there_HN, weights_HN, 0.0)
            made_MN = tl.dot(odd_MH, weights_HN, made_MN, input_precision=precision)
    return made_MN


@triton.jit
def with_bias(made_MN, matrix, n, num_outputs, kind: tl.constexpr, coding: tl.constexpr):
    """What a product has made, and the biases of outputs, rounded to `kind`; in float32."""
    if coding.bias != "none":
        bias_N = floats_at(matrix[5], n * coding.bias_row, n < num_outputs, coding.bias)
        made_MN += bias_N.to(kind).to(tl.float32)[None, :]
    return made_MN.to(kind).to(tl.float32)


@triton.jit
def experts_in(
    inner,
    x,
    table,
    stride,
    D,
    F,
    most_gate,
    most_activated,
    limit,
    alpha,
    added,
    is_clamped: tl.constexpr,
    power: tl.constexpr,
    coding: tl.constexpr,
    precision: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    I: tl.constexpr,
):
    """Rows gathered, both products of the gate, and the gate itself: [rows of the group, F]. Where
    there is no gate, one product, and that `power` of what of it is above zero; else it is 0."""
    kind = inner.dtype.element_ty
    tile = table + tl.program_id(0) * TILE  # tiles of an expert share its weights
    gate, up = matrix_at(tile, 0, coding), matrix_at(tile, 1, coding)
    rows = tl.load(tile + ROWS).to(tl.pointer_type(tl.int64))
    num_rows, start = tl.load(tile + ROWS + 2), tl.load(tile + ROWS + 3)
    m, i = tl.arange(0, M), tl.arange(0, I)
    n = tl.program_id(1) * N + tl.arange(0, N)
    row = tl.load(rows + m, mask=m < num_rows, other=0)
    x_MI = x + row[:, None] * stride + i[None, :]
    gate_MN, up_MN = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
    for first in range(0, D, I):
        is_input = i < D - first
        in_MI = tl.load(x_MI + first, mask=(m < num_rows)[:, None] & is_input[None, :], other=0.0)
        gate_MN = times(gate_MN, in_MI, gate, n, first, F, D, coding, precision)
        if power == 0:
            up_MN = times(up_MN, in_MI, up, n, first, F, D, coding, precision)
    gate_MN = with_bias(gate_MN, gate, n, F, kind, coding)
    if power == 0:
        up_MN = with_bias(up_MN, up, n, F, kind, coding)
        clamping = most_gate, most_activated, limit, alpha, added
        through = gated(gate_MN, up_MN, kind, clamping, is_clamped)
    else:
        above_MN = tl.where(gate_MN < 0.0, 0.0, gate_MN)  # what is no number stays so
        through = (above_MN * above_MN if power == 2 else above_MN).to(kind)
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
    coding: tl.constexpr,
    precision: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    I: tl.constexpr,
):
    """The last product, weighed, each row where its choice stands."""
    kind = inner.dtype.element_ty
    tile = table + tl.program_id(0) * TILE  # tiles of an expert share its weights
    down = matrix_at(tile, 2, coding)
    rows = tl.load(tile + ROWS).to(tl.pointer_type(tl.int64))
    choices = tl.load(tile + ROWS + 1).to(tl.pointer_type(tl.int64))
    num_rows, start = tl.load(tile + ROWS + 2), tl.load(tile + ROWS + 3)
    m, i = tl.arange(0, M), tl.arange(0, I)
    n = tl.program_id(1) * N + tl.arange(0, N)
    in_MI = inner + (start + m)[:, None] * F + i[None, :]
    made_MN = tl.zeros([M, N], tl.float32)
    for first in range(0, F, I):
        mask_MI = (m < num_rows)[:, None] & (i < F - first)[None, :]
        inner_MI = tl.load(in_MI + first, mask=mask_MI, other=0.0)
        made_MN = times(made_MN, inner_MI, down, n, first, D, F, coding, precision)
    is_there = m < num_rows
    row = tl.load(rows + m, mask=is_there, other=0)
    choice = row * num_choices + tl.load(choices + m, mask=is_there, other=0)
    weight = tl.load(weights + choice, mask=is_there, other=0.0)
    weighed = with_bias(made_MN, down, n, D, kind, coding) * weight[:, None]
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
    value_dim,
    scale,
    has_sink_scores: tl.constexpr,
    precision: tl.constexpr,
    H: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
):
    """A token's queries that share a head of keys and values, and all that they see of the cache:
    block by block, the softmax so far kept as its largest score and its sum (Dao et al. 2022)."""
    number, kv_head = tl.program_id(0), tl.program_id(1)
    kind = q.dtype.element_ty
    token, start = tl.load(tokens + number), tl.load(starts + number)
    count = (tl.load(starts + number + 1) - start).to(tl.int32)
    h, s, c, v = tl.arange(0, H), tl.arange(0, S), tl.arange(0, C), tl.arange(0, V)
    head = kv_head * num_shared + h
    is_there_HC = (h < num_shared)[:, None] & (c < head_dim)[None, :]
    places_HC = head[:, None] * head_dim + c[None, :]
    q_HC = tl.load(q + token * q_row + places_HC, mask=is_there_HC, other=0.0)
    largest_H, total_H = tl.full([H], float("-inf"), tl.float32), tl.zeros([H], tl.float32)
    if has_sink_scores:
        largest_H = tl.load(sink_scores + head, mask=h < num_shared, other=0.0)
        total_H += 1.0
    made_HV = tl.zeros([H, V], tl.float32)
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
        values_SV = values + row[:, None] * value_row + (kv_head * value_dim + v)[None, :]
        is_value_SV = is_seen[:, None] & (v < value_dim)[None, :]
        v_SV = tl.load(values_SV, mask=is_value_SV, other=0.0)
        made_HV = made_HV * fading_H[:, None]
        made_HV = tl.dot(weights_HS.to(kind), v_SV, made_HV, input_precision=precision)
        total_H = total_H * fading_H + tl.sum(weights_HS, axis=1)
        largest_H = now_H
    made_HV = (made_HV / total_H[:, None]).to(kind)
    is_there_HV = (h < num_shared)[:, None] & (v < value_dim)[None, :]
    places_HV = head[:, None] * value_dim + v[None, :]
    tl.store(out + token * out_row + places_HV, made_HV, mask=is_there_HV)


@triton.jit
def half_state(numbers, noise):
    """Numbers of which a state in float16 holds the nearer one or the other, as often as they are
    near."""
    bits = (numbers.to(tl.uint32, bitcast=True) + (noise >> 19)) & 0xFFFFE000
    cut = bits.to(tl.float32, bitcast=True)
    cut = tl.where(cut > 65504.0, 65504.0, tl.where(cut < -65504.0, -65504.0, cut))
    return cut.to(tl.float16)


@triton.jit
def delta_step(
    out,
    q,
    k,
    v,
    rates,
    fading,
    matrices,
    rows,
    tokens,
    befores,
    num_heads,
    num_shared,
    key_dim,
    value_dim,
    is_half: tl.constexpr,
    corrects: tl.constexpr,
    by_channel: tl.constexpr,
    token_step: tl.constexpr,
    head_step: tl.constexpr,
    key_step: tl.constexpr,
    value_step: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """The newest token of a sequence at some columns of a head's matrix, which fades, as a
    whole or each channel of keys by itself, is corrected by what its key gives or added to (Yang et
    al. 2024, equation 10), and puts out what its query reads."""
    number, head = tl.program_id(0), tl.program_id(1)
    row, token = tl.load(rows + number), tl.load(tokens + number)
    key, column = tl.arange(0, K), tl.program_id(2) * V + tl.arange(0, V)
    is_key, is_column = key < key_dim, column < value_dim
    is_there = is_key[:, None] & is_column[None, :]
    place = row * num_heads + head
    numbers = matrices + place * key_dim * value_dim + key[:, None] * value_dim + column[None, :]
    x = tl.load(numbers, mask=is_there, other=0.0).to(tl.float32)
    own, others = token * num_heads + head, token * (num_heads // num_shared) + head // num_shared
    key_K = tl.load(k + others * key_dim + key, mask=is_key, other=0.0)
    query_K = tl.load(q + others * key_dim + key, mask=is_key, other=0.0)
    value_V = tl.load(v + own * value_dim + column, mask=is_column, other=0.0)
    if by_channel:
        left_K = tl.exp(tl.load(fading + own * key_dim + key, mask=is_key, other=0.0))
        x = x * left_K[:, None]
    else:
        x = x * tl.exp(tl.load(fading + own))
    if corrects:
        value_V -= tl.sum(x * key_K[:, None], axis=0)
    change_V = value_V * tl.load(rates + own)
    x = x + key_K[:, None] * change_V[None, :]
    put_out_V = tl.sum(x * query_K[:, None], axis=0)
    tl.store(out + own * value_dim + column, put_out_V, mask=is_column)
    if is_half:
        noise = tl.load(befores + number).to(tl.uint32) * token_step
        noise += head.to(tl.uint32) * head_step
        noise = noise + key.to(tl.uint32)[:, None] * key_step
        noise = noise + column.to(tl.uint32)[None, :] * value_step
        tl.store(numbers, half_state(x, noise), mask=is_there)
    else:
        tl.store(numbers, x, mask=is_there)


@triton.jit
def scan_steps(
    out,
    q,
    k,
    v,
    lengths,
    decays,
    matrices,
    rows,
    firsts,
    counts,
    befores,
    key_dim,
    num_channels,
    is_half: tl.constexpr,
    token_step: tl.constexpr,
    key_step: tl.constexpr,
    value_step: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """All tokens of a sequence at some channels of its matrix, each number of which fades by
    itself, is added to, and put out as queries read it (Gu & Dao 2023, algorithm 2)."""
    number = tl.program_id(0)
    row, first = tl.load(rows + number), tl.load(firsts + number)
    key, channel = tl.arange(0, K), tl.program_id(1) * V + tl.arange(0, V)
    is_key, is_channel = key < key_dim, channel < num_channels
    is_there = is_key[:, None] & is_channel[None, :]
    places = key[:, None] * num_channels + channel[None, :]
    numbers = matrices + row * key_dim * num_channels + places
    x = tl.load(numbers, mask=is_there, other=0.0).to(tl.float32)
    decay = tl.load(decays + places, mask=is_there, other=0.0)
    noise = tl.load(befores + number).to(tl.uint32) * token_step
    noise = noise + key.to(tl.uint32)[:, None] * key_step
    noise = noise + channel.to(tl.uint32)[None, :] * value_step
    for token in range(first, first + tl.load(counts + number)):
        key_K = tl.load(k + token * key_dim + key, mask=is_key, other=0.0)
        query_K = tl.load(q + token * key_dim + key, mask=is_key, other=0.0)
        value_V = tl.load(v + token * num_channels + channel, mask=is_channel, other=0.0)
        length_V = tl.load(lengths + token * num_channels + channel, mask=is_channel, other=0.0)
        x = x * tl.exp(decay * length_V[None, :]) + key_K[:, None] * (value_V * length_V)[None, :]
        put_out_V = tl.sum(x * query_K[:, None], axis=0)
        tl.store(out + token * num_channels + channel, put_out_V, mask=is_channel)
        if is_half:
            x = half_state(x, noise).to(tl.float32)
            noise += token_step
    tl.store(numbers, x.to(matrices.dtype.element_ty), mask=is_there)
