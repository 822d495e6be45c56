/* Causal attention of several new tokens of a sequence to a KV cache of flat rows.

   Letters: H query heads, G KV heads, C head size, R cache rows; keys and values are [R, G, C].
   Queries of the heads that share a KV head are rows of one product. They are taken in groups of
   SIDE, which lie side by side in all that is computed of them, so that a softmax goes down columns
   and its weights are at once what the second product multiplies: scores are K Q', sums are V' P
   (' for transposed). Keys are taken SIDE at a time; scores of the next ones are computed by the
   tiles while those of the last ones become weights. The softmax is corrected as larger scores come
   (Dao et al., FlashAttention, 2022), but not before they are SLACK larger: weights may exceed one.

   What is multiplied is bfloat16 if it comes so and there are tiles for it, and float32 elsewhere;
   scores and sums are float32 always. Which keys are taken together does not depend on how work is
   divided, so neither does a bit of the result. */

#define KEYS 256 /* copied at a time */
#define SLACK 8.0f

/* The same as SliceWork in query_slices.py. */
struct slice_work {
    const char *queries; /* [tokens, H, C], tokens query_row numbers apart */
    char *out;
    const char *keys, *values;
    const int64_t *tokens; /* row of each slice's first query in queries and out */
    const int64_t *counts; /* of its queries */
    const int64_t *starts; /* of what it sees, in rows; and the end of the last */
    const int64_t *rows;   /* the last ones are those of its queries themselves */
    int64_t num_slices, num_heads, num_kv_heads, head_dim;
    int64_t query_row, out_row, key_row, value_row;
    int64_t window;       /* positions that a query sees, with its own */
    int64_t rows_per_item; /* at most, divisible by SIDE; a row is a query at a head */
    int64_t next_item;     /* taken by whichever thread is free */
    int32_t dtype, cache_dtype; /* of queries and out; of keys and values */
    float scale;
    int32_t has_failed; /* for want of memory */
};

/* Narrower vectors have not been found faster than torch. */
int moebatch_supports_slices(int dtype) { return LANES >= 8 && moebatch_supports(dtype); }

/* SIDE rows of an item. */
typedef struct {
    float largest[SIDE], totals[SIDE]; /* of scores, in powers of two; of weights */
    int32_t first[SIDE], last[SIDE];   /* positions that each sees */
    int64_t tokens[SIDE], heads[SIDE]; /* where each is; rows that are not there repeat the last */
    int has_sums;
} Group;

/* Positions that will be copied next. */
typedef struct {
    const int64_t *rows, *end;
    int64_t num_at_once, head;
} Ahead;

/* Scratch of a thread. Widths are multiples of SIDE, with zeros behind the last number. */
typedef struct {
    Group *groups;
    uint32_t *queries; /* [groups, words, SIDE] */
    float *sums;       /* [groups, width, SIDE] */
    uint32_t *keys;    /* [KEYS, words] */
    uint32_t *values;  /* [width / TILE, words of KEYS / TILE, TILE, TILE], transposed */
    uint32_t *weights; /* [words of KEYS, SIDE] */
    float *scores;     /* two of [SIDE, SIDE] */
    int64_t width, words;
    Ahead *ahead;
} SliceRoom;

typedef struct {
    int64_t slice, head, first, num; /* KV head; rows */
} Item;

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t up_to(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/* TILE words. In one piece if that can be: they are often read so, and soon. */
INLINE void copy_line(void *to, const void *from) {
#if defined(__AVX512F__)
    _mm512_storeu_si512(to, _mm512_loadu_si512(from));
#else
    memcpy(to, from, 4 * TILE);
#endif
}

/* TILE numbers of two bytes, as float32. */
INLINE void widen(uint32_t *to, const char *from, int dtype) {
#if defined(__AVX512F__)
    __m256i halves = _mm256_loadu_si256((const __m256i *)from);
    __m512i words = _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
    if (dtype == FLOAT16)
        words = (__m512i)_mm512_cvtph_ps(halves);
    _mm512_storeu_si512(to, words);
#else
    for (int i = 0; i < TILE; i += LOT) {
        Lot lot = reordered(load(from + 2 * i, dtype), dtype, FLOAT32);
        write_floats((float *)to + i, lot.first);
        write_floats((float *)to + i + LANES, lot.second);
    }
#endif
}

/* TILE words of numbers of which so many are there: as they are or as float32. */
INLINE void copy_words(uint32_t *to, const char *from, int64_t num, int from_dtype, int dtype) {
    char room[4 * TILE] = {0};
    if (num < 4 * TILE / size_of(dtype)) {
        if (num > 0)
            memcpy(room, from, num * size_of(from_dtype));
        from = room;
    }
    if (from_dtype == dtype)
        copy_line(to, from);
    else
        widen(to, from, from_dtype);
}

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

/* Where the rows of a group are, and what each sees. */
INLINE void place_group(const struct slice_work *w, Item item, int64_t index, Group *group) {
    int64_t shared = w->num_heads / w->num_kv_heads, num = item.num - index * SIDE;
    int64_t context = w->starts[item.slice + 1] - w->starts[item.slice] - w->counts[item.slice];
    int64_t token = (item.first + index * SIDE) / shared;
    int64_t head = (item.first + index * SIDE) % shared;
    for (int i = 0; i < SIDE; i++) {
        group->tokens[i] = w->tokens[item.slice] + token;
        group->heads[i] = item.head * shared + head;
        group->last[i] = (int32_t)(context + token);
        group->first[i] = (int32_t)larger(0, context + token + 1 - w->window);
        group->largest[i] = -3e38f;
        group->totals[i] = 0;
        if (i + 1 < num && ++head == shared) {
            head = 0;
            token++;
        }
    }
    group->has_sums = 0;
}

/* Queries of a group, transposed. */
INLINE void begin_group(const struct slice_work *w, Item item, int64_t index, SliceRoom room,
                        int dtype) {
    Group *group = room.groups + index;
    place_group(w, item, index, group);
    uint32_t rows[TILE][TILE], *queries = room.queries + index * room.words * SIDE;
    for (int side = 0; side < SIDE; side += TILE)
        for (int64_t word = 0; word < room.words; word += TILE) {
            int64_t c = 4 * word / size_of(dtype);
            for (int i = 0; i < TILE; i++) {
                int64_t place = group->tokens[side + i] * w->query_row + c;
                place += group->heads[side + i] * w->head_dim;
                copy_words(rows[i], w->queries + place * size_of(w->dtype), w->head_dim - c,
                           w->dtype, dtype);
            }
            transpose(queries + word * SIDE + side, SIDE, rows[0], TILE);
        }
}

/* Values of some positions at as many numbers as TILE words have, transposed: one tile of float32,
   or two of which the second has the odd numbers. */
INLINE void transpose_values(uint32_t *tile, int64_t to_next, uint32_t lines[][TILE], int dtype) {
    if (dtype == FLOAT32) {
        transpose(tile, TILE, lines[0], TILE);
        return;
    }
    uint32_t even[TILE][TILE], odd[TILE][TILE];
    for (int i = 0; i < TILE; i++)
        for (int j = 0; j < TILE; j++) {
            uint32_t first = lines[2 * i][j], second = lines[2 * i + 1][j];
            even[i][j] = (first & 0xffff) | second << 16;
            odd[i][j] = first >> 16 | (second & 0xffff0000u);
        }
    transpose(tile, TILE, even[0], TILE);
    transpose(tile + to_next, TILE, odd[0], TILE);
}

/* Keys as they are, values transposed; zeros behind the last position. */
INLINE void copy_positions(const struct slice_work *w, const int64_t *rows, int64_t num,
                           int64_t head, SliceRoom room, int dtype) {
    const int64_t bytes = size_of(w->cache_dtype), padded = up_to(num, SIDE);
    const int64_t at_once = 4 * TILE / size_of(dtype), to_next = words_of(KEYS, dtype) * TILE;
    const char *keys = w->keys + head * w->head_dim * bytes;
    const char *values = w->values + head * w->head_dim * bytes;
    for (int64_t t = 0; t < padded; t++)
        for (int64_t c = 0; c < room.width; c += at_once) {
            const char *key = t < num ? keys + (rows[t] * w->key_row + c) * bytes : NULL;
            copy_words(room.keys + t * room.words + words_of(c, dtype), key,
                       t < num ? w->head_dim - c : 0, w->cache_dtype, dtype);
        }
    for (int64_t t = 0; t < padded; t += at_once)
        for (int64_t c = 0; c < room.width; c += at_once) {
            uint32_t lines[SIDE][TILE];
            for (int64_t i = 0; i < at_once; i++) {
                int is_there = t + i < num;
                const char *value =
                    is_there ? values + (rows[t + i] * w->value_row + c) * bytes : NULL;
                copy_words(lines[i], value, is_there ? w->head_dim - c : 0, w->cache_dtype, dtype);
            }
            uint32_t *tile = room.values + c / TILE * to_next + words_of(t, dtype) * TILE;
            transpose_values(tile, to_next, lines, dtype);
        }
}

/* Into the second-level cache, some at a time. */
INLINE void fetch_ahead(const struct slice_work *w, Ahead *ahead) {
    const int64_t bytes = size_of(w->cache_dtype), first = ahead->head * w->head_dim;
    for (int64_t i = 0; i < ahead->num_at_once && ahead->rows < ahead->end; i++, ahead->rows++) {
        const char *key = w->keys + (*ahead->rows * w->key_row + first) * bytes;
        const char *value = w->values + (*ahead->rows * w->value_row + first) * bytes;
        for (int64_t offset = 0; offset < w->head_dim * bytes; offset += 64) {
            __builtin_prefetch(key + offset, 0, 2);
            __builtin_prefetch(value + offset, 0, 2);
        }
    }
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
    float *sums = room.sums + group * room.width * SIDE;
    for (int64_t c = 0; c < room.width; c += SIDE) {
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
    float *sums = room.sums + index * room.width * SIDE;
    for (int v = 0; v < VECTORS; v++) {
        Floats before = read_floats(group->largest + v * LANES);
        Floats largest = larger_of(highest[v], before);
        Floats factor = power_of_two(before - largest, dtype);
        write_floats(group->largest + v * LANES, largest);
        write_floats(group->totals + v * LANES, read_floats(group->totals + v * LANES) * factor);
        if (group->has_sums)
            for (int64_t c = 0; c < room.width; c++) {
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
INLINE void weigh_keys(const float *scores, float scale, Group *group, uint32_t *weights, int dtype) {
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
INLINE void attend_group(const struct slice_work *w, SliceRoom room, int64_t index, int64_t start,
                         int64_t num, int dtype) {
    float scale = w->scale * 1.44269504f;
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

/* Sums over totals, transposed, for the rows that are there. */
INLINE void finish_group(const struct slice_work *w, Item item, int64_t index, SliceRoom room,
                         int dtype) {
    const Group *group = room.groups + index;
    const int64_t bytes = size_of(w->dtype), num = smaller(SIDE, item.num - index * SIDE);
    /* From a sum to the next one that begins a word, and to the other one in the same word. */
    const int64_t step = size_of(w->dtype) == size_of(dtype) ? SIDE : 2 * SIDE;
    const int64_t to_odd = dtype == BFLOAT16 ? TILE * SIDE : SIDE;
    uint32_t words[TILE][SIDE], rows[SIDE][TILE];
    for (int64_t c = 0; c < w->head_dim; c += 4 * TILE / bytes) {
        const float *sums = room.sums + (index * room.width + c) * SIDE;
        for (int v = 0; v < SIDE; v += LANES) {
            Floats factor = 1 / read_floats(group->totals + v);
            for (int i = 0; i < TILE; i++) {
                const float *p = sums + i * step + v;
                Floats even = read_floats(p) * factor, made = even;
                if (w->dtype != FLOAT32) {
                    Floats odd = read_floats(p + to_odd) * factor;
                    made = (Floats)(w->dtype == BFLOAT16 ? paired(even, odd)
                                                         : halves_of(even) | halves_of(odd) << 16);
                }
                write_floats((float *)words[i] + v, made);
            }
        }
        transpose(rows[0], TILE, words[0], SIDE);
        transpose(rows[TILE], TILE, words[0] + TILE, SIDE);
        for (int64_t i = 0; i < num; i++) {
            int64_t place = group->tokens[i] * w->out_row + group->heads[i] * w->head_dim + c;
            int64_t num_bytes = (w->head_dim - c) * bytes;
            if (num_bytes >= 4 * TILE)
                copy_line(w->out + place * bytes, rows[i]);
            else
                memcpy(w->out + place * bytes, rows[i], num_bytes);
        }
    }
}

INLINE void attend_item(const struct slice_work *w, Item item, SliceRoom room, int dtype) {
    const int64_t *rows = w->rows + w->starts[item.slice];
    int64_t num_groups = up_to(item.num, SIDE) / SIDE;
    for (int64_t i = 0; i < num_groups; i++)
        begin_group(w, item, i, room, dtype);
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
    for (int64_t i = 0; i < num_groups; i++)
        finish_group(w, item, i, room, dtype);
}

/* Those of one slice after those of another; in each those that see most come first. */
INLINE void attend_items(struct slice_work *w, SliceRoom room, int dtype) {
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

static __attribute__((noinline)) void attend_by_tiles(struct slice_work *w, SliceRoom room) {
    open_tiles();
    attend_items(w, room, BFLOAT16);
    close_tiles();
}

static __attribute__((noinline)) void attend_by_vectors(struct slice_work *w, SliceRoom room) {
    attend_items(w, room, FLOAT32);
}

/* A part of the scratch, unless it is only to be measured. */
INLINE void *taken(char *memory, int64_t *offset, int64_t num_bytes) {
    char *part = memory ? memory + *offset : NULL;
    *offset += up_to(num_bytes, 64);
    return part;
}

/* Parts of the memory, if any; returns how many bytes they are. */
INLINE int64_t divide(const struct slice_work *w, int dtype, SliceRoom *room, char *memory) {
    int64_t num_groups = w->rows_per_item / SIDE, offset = 0;
    room->width = up_to(w->head_dim, SIDE);
    room->words = words_of(room->width, dtype);
    room->groups = taken(memory, &offset, num_groups * sizeof(Group));
    room->queries = taken(memory, &offset, num_groups * room->words * SIDE * 4);
    room->sums = taken(memory, &offset, num_groups * room->width * SIDE * 4);
    room->keys = taken(memory, &offset, KEYS * room->words * 4);
    room->values = taken(memory, &offset, KEYS * room->words * 4);
    room->weights = taken(memory, &offset, words_of(KEYS, dtype) * SIDE * 4);
    room->scores = taken(memory, &offset, 2 * SIDE * SIDE * 4);
    return offset;
}

/* Computes items until none is left. Several threads may share the same work. */
void moebatch_attend_slices(struct slice_work *w) {
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
