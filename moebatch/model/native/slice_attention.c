/* Causal attention of several new tokens of a sequence to a KV cache of flat rows.

   Letters: H query heads, G KV heads, C head size, V that of values, R cache rows; keys are
   [R, G, C] and values [R, G, V], or with a scale behind each head where they are codes. Codes of
   values that are fewer are the first of their keys' codes, at one KV head.
   Queries of the heads that share a KV head are rows of one product. They are taken in groups of
   SIDE, which lie side by side in all that is computed of them, so that a softmax goes down columns
   and its weights are at once what the second product multiplies: scores are K Q', sums are V' P
   (' for transposed). Keys are taken SIDE at a time; scores of the next ones are computed by the
   tiles while those of the last ones become weights. The softmax is corrected as larger scores come
   (Dao et al., FlashAttention, 2022), but not before they are SLACK larger: weights may exceed one.

   What is multiplied is bfloat16 if it comes so and there are tiles for it, and float32 elsewhere;
   scores and sums are float32 always. Which keys are taken together does not depend on how work is
   divided, so neither does a bit of the result. */

#define SLACK 8.0f

/* 2^x, within 8e-8 of it for float32 and 3e-6 otherwise; NaN for NaN. Polynomials that differ least
   from it, relatively, between 0 and 1. */
INLINE Floats power_of_two(Floats x, int dtype) {
#if defined(__AVX512DQ__)
    Floats f = (Floats)_mm512_reduce_ps((__m512)x, 1); /* x - floor(x) */
    Floats y;
    if (dtype == FLOAT32) {
        y = f * 1.8775767e-3f + 8.9893397e-3f;
        y = y * f + 5.5826318e-2f;
        y = y * f + 2.4015361e-1f;
        y = y * f + 6.9315308e-1f;
        y = y * f + 0.99999994f;
    } else {
        y = f * 1.3534168e-2f + 5.2011460e-2f;
        y = y * f + 2.4144275e-1f;
        y = y * f + 6.9300383e-1f;
        y = y * f + 1.0000026f;
    }
    return (Floats)_mm512_scalef_ps((__m512)y, (__m512)x);
#else
    Words is_nothing = (Words)(x < -126.0f);
    return (Floats)((Words)exp_of(x * 0.693147181f) & ~is_nothing);
#endif
}

INLINE void score_keys(SliceRoom room, int64_t group, int64_t key, int dtype) {
    const uint32_t *keys = room.keys + key * room.words;
    Left left = {keys, keys + TILE * room.words, room.words, TILE};
    add_product(room.scores + key / SIDE % 2 * SIDE * SIDE, left,
                room.queries + group * room.words * SIDE, room.words / TILE, 1, dtype);
}

/* Nothing for those of SIDE positions, from `start` on, that a row does not see. */
INLINE void hide(float *scores, const Group *group, int64_t start) {
    const Ints zero = {0};
    int is_late = start < group->first[SIDE - 1];
    for (int64_t t = is_late ? 0 : larger(0, group->last[0] + 1 - start); t < SIDE; t++)
        for (int v = 0; v < VECTORS; v++) {
            float *score = scores + t * SIDE + v * LANES;
            Ints first, last, position = zero + (int32_t)(start + t);
            memcpy(&first, group->first + v * LANES, sizeof first);
            memcpy(&last, group->last + v * LANES, sizeof last);
            Words is_hidden = (Words)((position < first) | (position > last));
            Words seen = (Words)read_floats(score) & ~is_hidden;
            write_floats(score, (Floats)(seen | (is_hidden & 0xff800000u))); /* less than any */
        }
}

/* Adds the values of keys that have their weights. */
INLINE void add_values(SliceRoom room, int64_t group, int64_t first, int64_t stop, int dtype) {
    if (first == stop)
        return;
    const int64_t tiles = words_of(KEYS, dtype) / TILE, square = TILE * TILE;
    int64_t word = words_of(first, dtype), num_steps = words_of(stop - first, dtype) / TILE;
    float *sums = room.sums + group * room.value_width * SIDE;
    for (int64_t c = 0; c < room.value_width; c += SIDE) {
        const uint32_t *values = room.values + (c / TILE * tiles + word / TILE) * square;
        Left left = {values, values + tiles * square, TILE, square};
        add_product(sums + c * SIDE, left, room.weights + word * SIDE, num_steps,
                    !room.groups[group].has_sums, dtype);
    }
    room.groups[group].has_sums = 1;
}

/* Weights become relative to larger scores. */
INLINE void raise_largest(SliceRoom room, int64_t index, const Floats *highest, int dtype) {
    Group *group = room.groups + index;
    float *sums = room.sums + index * room.value_width * SIDE;
    for (int v = 0; v < VECTORS; v++) {
        Floats before = read_floats(group->largest + v * LANES);
        Floats largest = larger_of(highest[v], before);
        Floats factor = power_of_two(before - largest, dtype);
        write_floats(group->largest + v * LANES, largest);
        write_floats(group->totals + v * LANES, read_floats(group->totals + v * LANES) * factor);
        if (group->has_sums)
            for (int64_t c = 0; c < room.value_width; c++) {
                float *sum = sums + c * SIDE + v * LANES;
                write_floats(sum, read_floats(sum) * factor);
            }
    }
}

/* The highest scores of SIDE keys, scaled. Returns whether one is too large for its row. */
INLINE int find_highest(const float *scores, float scale, const Group *group, Floats *highest) {
    const Floats zero = {0};
    int is_too_large = 0;
    for (int v = 0; v < VECTORS; v++) {
        Floats high = zero - INFINITY;
        for (int t = 0; t < SIDE; t++)
            high = larger_of(read_floats(scores + t * SIDE + v * LANES), high);
        highest[v] = high * scale;
        Floats limit = read_floats(group->largest + v * LANES) + SLACK;
        is_too_large |= is_any_larger(highest[v], limit);
    }
    return is_too_large;
}

/* Weights from the scores of SIDE keys. */
INLINE void weigh_keys(const float *scores, float scale, Group *group, uint32_t *weights,
                       int dtype) {
    for (int v = 0; v < VECTORS; v++) {
        const float *p = scores + v * LANES;
        uint32_t *to = weights + v * LANES;
        Floats largest = read_floats(group->largest + v * LANES);
        Floats total = read_floats(group->totals + v * LANES);
        for (int t = 0; t < SIDE; t += 2) {
            Floats even = read_floats(p + t * SIDE) * scale - largest;
            Floats odd = read_floats(p + (t + 1) * SIDE) * scale - largest;
            even = power_of_two(even, dtype);
            odd = power_of_two(odd, dtype);
            total += even + odd;
            if (dtype == FLOAT32) {
                write_floats((float *)(to + t * SIDE), even);
                write_floats((float *)(to + (t + 1) * SIDE), odd);
            } else {
                write_floats((float *)(to + t / 2 * SIDE), (Floats)paired(even, odd));
            }
        }
        write_floats(group->totals + v * LANES, total);
    }
}

/* What a group sees of `num` positions from `start` on, which have been copied. */
INLINE void attend_group(const AttentionWork *w, SliceRoom room, int64_t index, int64_t start,
                         int64_t num, int dtype) {
    float scale = w->scale * LOG2_E;
    Group *group = room.groups + index;
    int64_t first = larger(0, group->first[0] - start) / SIDE * SIDE;
    int64_t stop = smaller(num, group->last[SIDE - 1] + 1 - start), added = first;
    if (first >= stop)
        return;
    score_keys(room, index, first, dtype);
    for (int64_t key = first; key < stop; key += SIDE) {
        float *scores = room.scores + key / SIDE % 2 * SIDE * SIDE;
        Floats highest[VECTORS];
        fetch_ahead(w, room.ahead);
        if (key + SIDE < stop)
            score_keys(room, index, key + SIDE, dtype);
        if (start + key < group->first[SIDE - 1] || start + key + SIDE > group->last[0] + 1)
            hide(scores, group, start + key);
        if (find_highest(scores, scale, group, highest)) {
            add_values(room, index, added, key, dtype);
            added = key;
            raise_largest(room, index, highest, dtype);
        }
        weigh_keys(scores, scale, group, room.weights + words_of(key, dtype) * SIDE, dtype);
    }
    add_values(room, index, added, up_to(stop, SIDE), dtype);
}

/* Sinks, or what comes behind them. */
INLINE void attend_part(const AttentionWork *w, Item item, SliceRoom room, int64_t num_groups,
                        int are_sinks, int dtype) {
    const int64_t *rows = w->rows + w->starts[item.slice];
    for (int64_t i = 0; i < num_groups; i++) {
        limit_group(w, item, room.groups + i, are_sinks);
        copy_queries(w, i, room, are_sinks, dtype);
    }
    int64_t first = room.groups[0].first[0] / SIDE * SIDE;
    int64_t stop = room.groups[num_groups - 1].last[SIDE - 1] + 1;
    Ahead ahead = {.num_at_once = (SIDE + num_groups - 1) / num_groups, .head = item.head};
    room.ahead = &ahead;
    for (; first < stop; first += KEYS) {
        int64_t num = smaller(KEYS, stop - first);
        copy_positions(w, rows + first, num, item.head, room, dtype);
        ahead.rows = rows + first + num;
        ahead.end = rows + smaller(first + num + KEYS, stop);
        for (int64_t i = 0; i < num_groups; i++)
            attend_group(w, room, i, first, num, dtype);
    }
}

INLINE void attend_item(const AttentionWork *w, Item item, SliceRoom room, int dtype) {
    int64_t num_groups = up_to(item.num, SIDE) / SIDE;
    for (int64_t i = 0; i < num_groups; i++)
        place_group(w, item, i, room.groups + i);
    for (int are_sinks = w->num_sinks > 0; are_sinks >= 0; are_sinks--)
        attend_part(w, item, room, num_groups, are_sinks, dtype);
    for (int64_t i = 0; i < num_groups; i++)
        finish_group(w, item, i, room, dtype);
}

/* Those of one slice after those of another; in each those that see most come first. */
INLINE void attend_items(AttentionWork *w, SliceRoom room, int dtype) {
    int64_t shared = w->num_heads / w->num_kv_heads, before = 0, slice = 0;
    for (;;) {
        int64_t index = __atomic_fetch_add(&w->next_item, 1, __ATOMIC_RELAXED) - before;
        int64_t num_rows, num_blocks;
        for (;; slice++) {
            if (slice == w->num_slices)
                return;
            num_rows = w->counts[slice] * shared;
            num_blocks = (num_rows + w->rows_per_item - 1) / w->rows_per_item;
            if (index < num_blocks * w->num_kv_heads)
                break;
            index -= num_blocks * w->num_kv_heads;
            before += num_blocks * w->num_kv_heads;
        }
        int64_t rows = up_to((num_rows + num_blocks - 1) / num_blocks, SIDE);
        int64_t first = (num_blocks - 1 - index / w->num_kv_heads) * rows;
        Item item = {slice, index % w->num_kv_heads, first, smaller(rows, num_rows - first)};
        if (item.num > 0)
            attend_item(w, item, room, dtype);
    }
}

static __attribute__((noinline)) void attend_by_tiles(AttentionWork *w, SliceRoom room) {
    open_tiles();
    attend_items(w, room, BFLOAT16);
    close_tiles();
}

static __attribute__((noinline)) void attend_by_vectors(AttentionWork *w, SliceRoom room) {
    attend_items(w, room, FLOAT32);
}

/* Computes items until none is left. Several threads may share the same work. */
OF_THE_REST void moebatch_attend_slices(AttentionWork *w) {
    SliceRoom room;
    int is_bfloat16 = w->dtype == BFLOAT16 && w->cache_dtype == BFLOAT16;
    int dtype = is_bfloat16 && may_use_tiles() ? BFLOAT16 : FLOAT32;
    char *memory = aligned_alloc(64, divide(w, dtype, &room, NULL));
    if (!memory) {
        __atomic_store_n(&w->has_failed, 1, __ATOMIC_RELAXED);
        return;
    }
    divide(w, dtype, &room, memory);
    if (dtype == BFLOAT16)
        attend_by_tiles(w, room);
    else
        attend_by_vectors(w, room);
    free(memory);
}
