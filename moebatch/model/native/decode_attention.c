/* Attention of single query tokens to a KV cache of flat rows, read where it lies.

   Letters: H query heads, G KV heads, C head size, V that of values, R cache rows; keys are
   [R, G, C] and values [R, G, V], or with a scale behind each head where they are codes. Values may
   be the first numbers of their keys, where there is one KV head.
   A query sees the rows that are listed for it, BLOCK positions at a time. The first of them are
   sinks, if there are such, which it meets as another query. Everything is summed in
   float32; the softmax is corrected as larger scores come (Milakov and Gimelshein, Online
   normalizer calculation for softmax, 2018). While one KV head of a block is computed, the next
   one is fetched into the second-level cache.

   Queries and sums have the order of numbers that a lot of the cache has. Where the processor
   multiplies pairs of 16 bits, and queries have no more, neighbours of queries and keys are `paired`,
   as bfloat16 or, with a cache of CACHED_INT8, as whole numbers: codes are exact, and of queries all
   but the last bits of numbers that are small beside the largest of their head. Weights meet values
   as float32: were they rounded, answers would go on otherwise after a stop, when what is known of
   them is computed as a prompt. */

#if defined(__AVX512F__)
#define MOST_SUMS 16
#define TOTALS 16
#else
#define MOST_SUMS 8
#define TOTALS 4
#endif

#define BLOCK 16

/* Of two, by which a query is multiplied that is to be whole numbers. Were the power infinite, it
   would be divided by with nothing left, and nothing times the score of a hidden position is NaN. */
#define MOST_POWER 100

INLINE float largest_of(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float largest = x[0];
    for (int i = 1; i < LANES; i++)
        largest = x[i] > largest ? x[i] : largest;
    return largest;
#endif
}

/* Of bits that are whole numbers or not. */
INLINE Floats added(Floats a, Floats b, int is_whole) {
    return is_whole ? (Floats)((Ints)a + (Ints)b) : a + b;
}

INLINE Floats as_floats(Floats x, int is_whole) {
    return is_whole ? __builtin_convertvector((Ints)x, Floats) : x;
}

/* totals[i] is the sum of all lanes of sums[i], of which there are TOTALS. */
#if defined(__AVX512F__)
INLINE __m512 add_four(const Floats *x, int is_whole) {
    __m512 a = (__m512)x[0], b = (__m512)x[1], c = (__m512)x[2], d = (__m512)x[3];
    Floats ab = added((Floats)_mm512_unpacklo_ps(a, b), (Floats)_mm512_unpackhi_ps(a, b), is_whole);
    Floats cd = added((Floats)_mm512_unpacklo_ps(c, d), (Floats)_mm512_unpackhi_ps(c, d), is_whole);
    Floats low = (Floats)_mm512_unpacklo_pd((__m512d)ab, (__m512d)cd);
    return (__m512)added(low, (Floats)_mm512_unpackhi_pd((__m512d)ab, (__m512d)cd), is_whole);
}

INLINE Floats add_quarters(__m512 a, __m512 b, int is_whole) {
    Floats low = (Floats)_mm512_shuffle_f32x4(a, b, 0x88);
    return added(low, (Floats)_mm512_shuffle_f32x4(a, b, 0xdd), is_whole);
}

INLINE void add_lanes(const Floats *sums, float *totals, int is_whole) {
    __m512 fours[4];
    for (int i = 0; i < 4; i++)
        fours[i] = add_four(sums + 4 * i, is_whole);
    __m512 low = (__m512)add_quarters(fours[0], fours[1], is_whole);
    __m512 high = (__m512)add_quarters(fours[2], fours[3], is_whole);
    write_floats(totals, as_floats(add_quarters(low, high, is_whole), is_whole));
}
#elif defined(__AVX__)
INLINE void add_lanes(const Floats *sums, float *totals, int is_whole) {
    __m256 a = (__m256)sums[0], b = (__m256)sums[1], c = (__m256)sums[2], d = (__m256)sums[3];
    Floats ab = added((Floats)_mm256_unpacklo_ps(a, b), (Floats)_mm256_unpackhi_ps(a, b), is_whole);
    Floats cd = added((Floats)_mm256_unpacklo_ps(c, d), (Floats)_mm256_unpackhi_ps(c, d), is_whole);
    Floats low = (Floats)_mm256_shuffle_ps((__m256)ab, (__m256)cd, 0x44);
    Floats high = (Floats)_mm256_shuffle_ps((__m256)ab, (__m256)cd, 0xee);
    __m256 halves = (__m256)added(low, high, is_whole);
    Floats swapped = (Floats)_mm256_permute2f128_ps(halves, halves, 1);
    Floats all = as_floats(added((Floats)halves, swapped, is_whole), is_whole);
    memcpy(totals, &all, TOTALS * sizeof *totals);
}
#else
INLINE void add_lanes(const Floats *sums, float *totals, int is_whole) {
    for (int i = 0; i < TOTALS; i++) {
        float lanes[LANES];
        write_floats(lanes, as_floats(sums[i], is_whole));
        for (int half = LANES / 2; half > 0; half /= 2)
            for (int lane = 0; lane < half; lane++)
                lanes[lane] += lanes[lane + half];
        totals[i] = lanes[0];
    }
}
#endif

/* Where each of BLOCK positions begins, in bytes; that of values is that of keys where rows of both
   are as far apart. */
typedef struct {
    int64_t keys[BLOCK], values[BLOCK];
} Offsets;

/* Keys and values of some positions at one KV head. */
typedef struct {
    const char *keys, *values; /* of cache row 0 */
    const int64_t *key_offsets, *value_offsets; /* of each of BLOCK positions, in bytes */
    int num; /* of positions; those beyond repeat the last one */
} Unit;

/* Whether a cache is multiplied in pairs with queries of a type. */
INLINE int are_paired(int dtype, int queries) {
    if (dtype == CACHED_INT8)
        return HAS_WHOLE_PAIRS && queries != FLOAT32;
    return HAS_PAIRS && dtype == BFLOAT16 && queries == BFLOAT16;
}

INLINE int are_whole(int dtype, int is_paired) { return is_paired && dtype == CACHED_INT8; }

/* A vector of cached pairs; zeros behind the last number. */
INLINE Floats cached_pairs(const char *p, int64_t num, int dtype) {
    if (dtype == BFLOAT16)
        return load_pairs(p, num);
    char room[LOT];
    if (num < LOT)
        p = memcpy(memset(room, 0, LOT), p, num);
#if defined(__AVX512BW__)
    return (Floats)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
#elif HAS_WHOLE_PAIRS
    return (Floats)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
#else
    return (Floats){0};
#endif
}

INLINE Floats add_cached_pairs(Floats sum, Floats x, Floats y, int dtype) {
#if HAS_WHOLE_PAIRS
    if (dtype == CACHED_INT8)
        return (Floats)add_whole_pairs((Ints)sum, (Ints)x, (Ints)y);
#endif
    return add_pairs(sum, x, y);
}

/* Bits of which the lower 16 are those of the nearest whole number. */
INLINE Words whole_of(Floats x) { return (Words)(x + 0x1.8p23f); }

#if HAS_WHOLE_PAIRS
/* Whether there is a NaN or an infinite number. */
INLINE int is_any_broken(Floats x) {
    x *= 0;
#if LANES == 16
    return _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q) != 0;
#else
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, (__m256)x, _CMP_UNORD_Q)) != 0;
#endif
}
#endif

/* sums[h][t] += queries[h] * keys[t] for the lot at c, of which `num` numbers count. */
INLINE void multiply(Floats *sums, const float *queries, int64_t width, Unit unit, Unit next,
                     int first, int64_t c, int64_t num, int heads, int at_once, int dtype,
                     int is_paired) {
#pragma GCC unroll 16
    for (int t = 0; t < at_once; t++) {
        const char *p = unit.keys + unit.key_offsets[first + t] + c * size_of(dtype);
        prefetch(next.keys + next.key_offsets[first + t] + c * size_of(dtype), dtype);
        if (is_paired) {
            Floats pairs = cached_pairs(p, num, dtype);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) {
                Floats query = read_floats(queries + h * width + c / 2);
                Floats *sum = sums + h * at_once + t;
                *sum = add_cached_pairs(*sum, pairs, query, dtype);
            }
            continue;
        }
        Lot key = num < LOT ? load_part(p, num, dtype) : load(p, dtype);
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            const float *query = queries + h * width + c;
            sums[h * at_once + t] += key.first * read_floats(query);
            sums[h * at_once + t] += key.second * read_floats(query + LANES);
        }
    }
}

/* scores[h][t] of some query heads with the keys of a unit, not scaled yet. Positions beyond its
   last one get any number. */
INLINE void score(const float *queries, int64_t width, Unit unit, Unit next, int64_t head_dim,
                  float scores[][BLOCK], int heads, int dtype, int is_paired) {
    const int at_once = MOST_SUMS / heads;
    for (int first = 0; first < unit.num; first += at_once) {
        Floats sums[MOST_SUMS] = {{0}};
        int64_t c = 0;
        for (; c + LOT <= head_dim; c += LOT)
            multiply(sums, queries, width, unit, next, first, c, LOT, heads, at_once, dtype,
                     is_paired);
        if (c < head_dim)
            multiply(sums, queries, width, unit, next, first, c, head_dim - c, heads, at_once,
                     dtype, is_paired);
        float totals[MOST_SUMS];
        for (int i = 0; i < MOST_SUMS; i += TOTALS)
            add_lanes(sums + i, totals + i, are_whole(dtype, is_paired));
        for (int h = 0; h < heads; h++)
            memcpy(&scores[h][first], totals + h * at_once, at_once * sizeof(float));
    }
}

/* What is kept of the scores of a head: the largest, the sum of the weights by lanes, and by what
   products of its query are multiplied. */
typedef struct {
    Floats total;
    float largest, scale;
} Softmax;

/* Scores become weights relative to the largest score so far; returns by what earlier sums are to
   be multiplied. */
INLINE float weigh(float *scores, int num, Softmax *softmax) {
    for (int t = num; t < BLOCK; t++)
        scores[t] = -INFINITY;
    Floats parts[BLOCK / LANES];
    float largest = softmax->largest;
    for (int i = 0; i < BLOCK / LANES; i++) {
        parts[i] = read_floats(scores + i * LANES) * softmax->scale;
        float highest = largest_of(parts[i]);
        largest = highest > largest ? highest : largest;
    }
    const Floats zero = {0};
    Floats correction = exp_of(zero + (softmax->largest - largest));
    Floats total = softmax->total * correction;
    for (int i = 0; i < BLOCK / LANES; i++) {
        parts[i] = exp_of(parts[i] - largest);
        write_floats(scores + i * LANES, parts[i]);
        total += parts[i];
    }
    for (int t = num; t < BLOCK; t++) /* tiny, but not nothing */
        scores[t] = 0;
    softmax->largest = largest;
    softmax->total = total;
    return correction[0];
}

/* sums[h] = sums[h] * corrections[h] + weights[h] @ values for the lot at c, of which `num` numbers
   count. */
INLINE void add_lot(float *sums, int64_t width, float weights[][BLOCK], const float *corrections,
                    Unit unit, Unit next, int64_t c, int64_t num, int heads, int dtype) {
    Lot lots[4];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++) {
        lots[h].first = read_floats(sums + h * width + c) * corrections[h];
        lots[h].second = read_floats(sums + h * width + c + LANES) * corrections[h];
    }
    for (int t = 0; t < unit.num; t++) {
        const char *p = unit.values + unit.value_offsets[t] + c * size_of(dtype);
        Lot value = num < LOT ? load_part(p, num, dtype) : load(p, dtype);
        prefetch(next.values + next.value_offsets[t] + c * size_of(dtype), dtype);
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            lots[h].first += value.first * weights[h][t];
            lots[h].second += value.second * weights[h][t];
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++) {
        write_floats(sums + h * width + c, lots[h].first);
        write_floats(sums + h * width + c + LANES, lots[h].second);
    }
}

/* Scratch of a thread, for the query heads of an item: queries padded to `width` numbers each, and
   sums to `value_width`. */
typedef struct {
    float *queries, *sums;
    Softmax *softmax;
    int64_t num_heads, width, value_width;
} Room;

/* The scales of a cached head at LANES positions, where its numbers are codes. */
INLINE Floats cached_scales(const char *head, const int64_t *offsets, int64_t head_dim, int dtype) {
    Floats scales;
#if defined(__AVX512F__)
    const void *base = head + head_dim - 2; /* the last codes, and a bfloat16 behind them */
    __m256i first = _mm512_i64gather_epi32(_mm512_loadu_si512(offsets), base, 1);
    __m256i second = _mm512_i64gather_epi32(_mm512_loadu_si512(offsets + 8), base, 1);
    Words words = (Words)_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
    scales = (Floats)(words & 0xffff0000u);
#else
    for (int t = 0; t < LANES; t++)
        scales[t] = read_cached_scale(head + offsets[t] + head_dim, BFLOAT16);
#endif
    return dtype == CACHED_FP8 ? scales * FP8_FACTOR : scales;
}

/* numbers[h][t] times the scale of position t, where those of a cached head are codes. */
INLINE void scale_codes(float numbers[][BLOCK], const char *head, const int64_t *offsets,
                        int64_t head_dim, int heads, int dtype) {
    if (!is_cached_code(dtype))
        return;
    for (int t = 0; t < BLOCK; t += LANES) {
        Floats scales = cached_scales(head, offsets + t, head_dim, dtype);
        for (int h = 0; h < heads; h++)
            write_floats(numbers[h] + t, read_floats(numbers[h] + t) * scales);
    }
}

/* What some query heads that share a KV head see in a unit. */
INLINE void attend_unit(const AttentionWork *w, Room room, int64_t head, Unit unit, Unit next,
                        int heads, int dtype, int is_paired) {
    float scores[4][BLOCK], corrections[4], *sums = room.sums + head * room.value_width;
    score(room.queries + head * room.width, room.width, unit, next, w->head_dim, scores, heads,
          dtype, is_paired);
    scale_codes(scores, unit.keys, unit.key_offsets, w->head_dim, heads, dtype);
    for (int h = 0; h < heads; h++)
        corrections[h] = weigh(scores[h], unit.num, &room.softmax[head + h]);
    scale_codes(scores, unit.values, unit.value_offsets, w->value_head, heads, dtype);
    int64_t c = 0, width = room.value_width;
    for (; c + LOT <= w->value_dim; c += LOT)
        add_lot(sums, width, scores, corrections, unit, next, c, LOT, heads, dtype);
    if (c < w->value_dim)
        add_lot(sums, width, scores, corrections, unit, next, c, w->value_dim - c, heads, dtype);
}

/* Places of a block of the positions [first, stop); returns how many there are. */
INLINE int locate(const AttentionWork *w, int64_t first, int64_t stop, int dtype, int are_apart,
                  Offsets *offsets) {
    const int64_t key_bytes = w->key_row * size_of(dtype);
    int num = stop - first < BLOCK ? (int)(stop - first) : BLOCK;
    for (int t = 0; t < BLOCK; t++)
        offsets->keys[t] = w->rows[first + (t < num ? t : num - 1)] * key_bytes;
    const int64_t value_bytes = w->value_row * size_of(dtype);
    for (int t = 0; are_apart && t < BLOCK; t++)
        offsets->values[t] = w->rows[first + (t < num ? t : num - 1)] * value_bytes;
    return num;
}

/* Some query heads, of which `head` is the first. */
INLINE void begin(const AttentionWork *w, Room room, int64_t head) {
    memset(room.sums, 0, room.num_heads * room.value_width * sizeof(float));
    for (int64_t h = 0; h < room.num_heads; h++) {
        room.softmax[h] = (Softmax){.total = {0}, .largest = -INFINITY};
        if (w->sink_scores)
            room.softmax[h] = (Softmax){.total = {1}, .largest = w->sink_scores[head + h]};
    }
}

/* A lot of a query, in the order of numbers of a type. */
INLINE Lot query_lot(const AttentionWork *w, const char *query, int64_t c, int dtype) {
    const char *p = query + c * size_of(w->dtype);
    int64_t num = w->head_dim - c;
    Lot lot = num < LOT ? load_part(p, num, w->dtype) : load(p, w->dtype);
    return reordered(lot, w->dtype, dtype);
}

#if HAS_WHOLE_PAIRS
/* A query as pairs of whole numbers, so small that no sum of products with codes overflows; returns
   by what they are to be multiplied. */
INLINE float take_whole_query(const AttentionWork *w, const char *query, float *to) {
    Floats highest = {0};
    int is_broken = 0;
    for (int64_t c = 0; c < w->head_dim; c += LOT) {
        Lot lot = query_lot(w, query, c, BFLOAT16);
        Floats first = (Floats)((Words)lot.first & 0x7fffffffu);
        Floats second = (Floats)((Words)lot.second & 0x7fffffffu);
        is_broken |= is_any_broken(first) | is_any_broken(second);
        highest = larger_of(highest, larger_of(first, second));
    }
    /* A power of two leaves numbers of few bits as they are. */
    int exponent, most = 15;
    while (most > 0 && ((128 * w->head_dim) << most) > INT32_MAX)
        most--;
    frexpf(largest_of(highest), &exponent);
    const int power = most - exponent < MOST_POWER ? most - exponent : MOST_POWER;
    const float factor = ldexpf(1, power);
    for (int64_t c = 0; c < w->head_dim; c += LOT) {
        Lot lot = query_lot(w, query, c, BFLOAT16);
        Words even = whole_of(lot.first * factor), odd = whole_of(lot.second * factor);
        write_floats(to + c / 2, (Floats)((even & 0xffff) | odd << 16));
    }
    return is_broken ? NAN : 1 / factor;
}
#endif

/* From `queries` on, those of the first head of the item. */
INLINE void take_queries(const AttentionWork *w, const char *queries, Room room,
                         int dtype, int is_paired) {
    for (int64_t h = 0; h < room.num_heads; h++) {
        const char *query = queries + h * w->head_dim * size_of(w->dtype);
        float *to = room.queries + h * room.width;
        room.softmax[h].scale = w->scale;
#if HAS_WHOLE_PAIRS
        if (are_whole(dtype, is_paired)) {
            room.softmax[h].scale *= take_whole_query(w, query, to);
            continue;
        }
#endif
        for (int64_t c = 0; c < w->head_dim; c += LOT) {
            Lot lot = query_lot(w, query, c, dtype);
            if (is_paired) {
                write_floats(to + c / 2, (Floats)paired(lot.first, lot.second));
                continue;
            }
            write_floats(to + c, lot.first);
            write_floats(to + c + LANES, lot.second);
        }
    }
}

/* To `out`, that of the first head of the item. */
INLINE void finish(const AttentionWork *w, Room room, char *out, int dtype) {
    for (int64_t h = 0; h < room.num_heads; h++) {
        const float *sums = room.sums + h * room.value_width;
        float factor = 1 / sum_of(room.softmax[h].total);
        for (int64_t c = 0; c < w->value_dim; c += LOT) {
            Lot lot = {read_floats(sums + c) * factor, read_floats(sums + c + LANES) * factor};
            lot = reordered(lot, dtype, w->dtype);
            char *p = out + (h * w->value_dim + c) * size_of(w->dtype);
            store_part(p, lot, w->value_dim - c, w->dtype);
        }
    }
}

/* One query for some KV heads. `next_item` is what this thread will compute after it. Whether rows
   of keys and values are apart is known when this is compiled: places of both would take registers
   (two cores of a Zen 4, bfloat16, 128 sequences of 800 positions in the mean: 5 to 9 % slower). */
INLINE void attend(const AttentionWork *w, int64_t item, int64_t next_item, Room room, int dtype,
                   int is_paired, int are_apart) {
    int64_t parts = w->num_kv_heads / w->kv_heads_per_item, shared = w->num_heads / w->num_kv_heads;
    int64_t query = item / parts, part = item % parts;
    int64_t token = w->tokens[query], head = part * room.num_heads, bytes = size_of(w->dtype);
    int64_t key_bytes = cached_bytes(w->head_dim, dtype), first_head = part * w->kv_heads_per_item;
    int64_t value_bytes = cached_bytes(w->value_head, dtype), stop = w->starts[query + 1];
    Offsets both[2], *offsets = both, *others = both + 1;
    int64_t first = w->starts[query], sinks_stop = first + w->num_sinks;
    sinks_stop = sinks_stop < stop ? sinks_stop : stop;
    int num = locate(w, first, first < sinks_stop ? sinks_stop : stop, dtype, are_apart, offsets);
    begin(w, room, head);
    if (first < sinks_stop) {
        int64_t place = token * w->sink_query_row + head * w->head_dim;
        take_queries(w, w->sink_queries + place * bytes, room, dtype, is_paired);
    }
    while (first < stop) {
        int64_t next_part = part, next_first = first + num;
        int next_num = num;
        if (first == sinks_stop) {
            int64_t place = token * w->query_row + head * w->head_dim;
            take_queries(w, w->queries + place * bytes, room, dtype, is_paired);
        }
        Offsets *next_offsets = offsets;
        if (next_first < stop) {
            int64_t end = next_first < sinks_stop ? sinks_stop : stop;
            next_offsets = others;
            next_num = locate(w, next_first, end, dtype, are_apart, next_offsets);
        } else if (next_item < w->num_slices * parts) {
            const int64_t *starts = w->starts + next_item / parts;
            next_offsets = others;
            next_part = next_item % parts;
            locate(w, starts[0], starts[1], dtype, are_apart, next_offsets);
        }
        const int64_t *places = are_apart ? offsets->values : offsets->keys;
        const int64_t *next_places = are_apart ? next_offsets->values : next_offsets->keys;
        for (int64_t g = 0; g < w->kv_heads_per_item; g++) {
            const int64_t kv_head = first_head + g, next_head = next_part * w->kv_heads_per_item;
            Unit unit = {w->keys + kv_head * key_bytes, w->values + kv_head * value_bytes,
                         offsets->keys, places, num};
            Unit next = {unit.keys + key_bytes, unit.values + value_bytes, offsets->keys, places,
                         num};
            if (g + 1 == w->kv_heads_per_item)
                next = (Unit){w->keys + next_head * key_bytes, w->values + next_head * value_bytes,
                              next_offsets->keys, next_places, next_num};
            int64_t h = g * shared, end = h + shared;
#define HEADS(heads)                                                                               \
    for (; h + heads <= end; h += heads)                                                           \
        attend_unit(w, room, h, unit, next, heads, dtype, is_paired);
            HEADS(4)
            HEADS(2)
            HEADS(1)
        }
        others = offsets;
        offsets = next_offsets;
        num = next_num;
        first = next_first;
    }
    char *out = w->out + (token * w->out_row + head * w->value_dim) * bytes;
    finish(w, room, out, dtype);
}

/* Computes items until none is left. Several threads may share the same work. */
INLINE void attend_singles(AttentionWork *w, int cached) {
    int64_t parts = w->num_kv_heads / w->kv_heads_per_item;
    int64_t num_heads = w->num_heads / parts, width = (w->head_dim + LOT - 1) / LOT * LOT;
    int64_t value_width = (w->value_dim + LOT - 1) / LOT * LOT;
    size_t num_bytes = num_heads * ((width + value_width) * sizeof(float) + sizeof(Softmax));
    float *memory = aligned_alloc(64, (num_bytes + 63) / 64 * 64);
    if (!memory) {
        __atomic_store_n(&w->has_failed, 1, __ATOMIC_RELAXED);
        return;
    }
    Room room = {.queries = memory, .num_heads = num_heads};
    room.width = width;
    room.value_width = value_width;
    room.sums = room.queries + num_heads * width;
    room.softmax = (Softmax *)(room.sums + num_heads * value_width);
    int64_t item = __atomic_fetch_add(&w->next_item, 1, __ATOMIC_RELAXED);
    while (item < w->num_slices * parts) {
        int64_t next_item = __atomic_fetch_add(&w->next_item, 1, __ATOMIC_RELAXED);
        /* In pairs only where rows are not apart: each way takes seconds to compile. */
        if (w->key_row != w->value_row)
            attend(w, item, next_item, room, cached, 0, 1);
        else if (are_paired(cached, BFLOAT16) && are_paired(cached, w->dtype))
            attend(w, item, next_item, room, cached, 1, 0);
        else
            attend(w, item, next_item, room, cached, 0, 0);
        item = next_item;
    }
    free(memory);
}

/* A function for each type of what is cached. */
OF_CACHED_FLOAT32 void moebatch_attend_float32(AttentionWork *w) { attend_singles(w, FLOAT32); }
OF_CACHED_BFLOAT16 void moebatch_attend_bfloat16(AttentionWork *w) { attend_singles(w, BFLOAT16); }
OF_CACHED_FLOAT16 void moebatch_attend_float16(AttentionWork *w) { attend_singles(w, FLOAT16); }
OF_CACHED_INT8 void moebatch_attend_int8(AttentionWork *w) { attend_singles(w, CACHED_INT8); }
OF_CACHED_FP8 void moebatch_attend_fp8(AttentionWork *w) { attend_singles(w, CACHED_FP8); }
