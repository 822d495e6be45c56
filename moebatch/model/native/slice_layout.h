/* What attention of slices computes with: queries, keys and values in the order in which products
   want them, from where they lie, and back. slice_attention.c says what they are for. */

#define KEYS 256 /* copied at a time */
#define LOG2_E 1.44269504f
/* Of what rows have met: what is infinitely little differs from itself by no number. */
#define LEAST -3e38f

/* Narrower vectors have not been found faster than torch. */
OF_THE_REST int moebatch_supports_slices(int dtype) {
    return LANES >= 8 && moebatch_supports(dtype);
}

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
    float *sums;       /* [groups, value_width, SIDE] */
    uint32_t *keys;    /* [KEYS, words] */
    uint32_t *values;  /* [value_width / TILE, words of KEYS / TILE, TILE, TILE], transposed */
    uint32_t *weights; /* [words of KEYS, SIDE] */
    float *scores;     /* two of [SIDE, SIDE] */
    int64_t width, words, value_width;
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

/* Of `num` numbers of a cached token at one KV head, which has `size` of them, TILE words from c
   on; zeros if it is not there. */
INLINE void copy_cached(uint32_t *to, const char *head, int64_t c, int64_t num, int64_t size,
                        const AttentionWork *w, int dtype) {
    if (!head)
        memset(to, 0, 4 * TILE);
    else if (is_cached_code(w->cache_dtype))
        widen_cached((float *)to, head, c, c + TILE, size, w->cache_dtype);
    else
        copy_words(to, head + c * size_of(w->cache_dtype), num - c, w->cache_dtype, dtype);
}

/* Where the rows of a group are. */
INLINE void place_group(const AttentionWork *w, Item item, int64_t index, Group *group) {
    int64_t shared = w->num_heads / w->num_kv_heads, num = item.num - index * SIDE;
    int64_t token = (item.first + index * SIDE) / shared;
    int64_t head = (item.first + index * SIDE) % shared;
    for (int i = 0; i < SIDE; i++) {
        group->tokens[i] = w->tokens[item.slice] + token;
        group->heads[i] = item.head * shared + head;
        float largest = w->sink_scores ? w->sink_scores[group->heads[i]] * LOG2_E : LEAST;
        group->largest[i] = largest < LEAST ? LEAST : largest;
        group->totals[i] = w->sink_scores != NULL;
        if (i + 1 < num && ++head == shared) {
            head = 0;
            token++;
        }
    }
    group->has_sums = 0;
}

/* What each row of a group sees: sinks, or what comes behind them. */
INLINE void limit_group(const AttentionWork *w, Item item, Group *group, int are_sinks) {
    int64_t context = w->starts[item.slice + 1] - w->starts[item.slice] - w->counts[item.slice];
    for (int i = 0; i < SIDE; i++) {
        int64_t last = context + group->tokens[i] - w->tokens[item.slice];
        int64_t first = are_sinks ? 0 : larger(w->num_sinks, last + 1 - w->window);
        group->first[i] = (int32_t)first;
        group->last[i] = (int32_t)(are_sinks ? smaller(last, w->num_sinks - 1) : last);
    }
}

/* Queries of a group, transposed. */
INLINE void copy_queries(const AttentionWork *w, int64_t index, SliceRoom room, int are_sinks,
                         int dtype) {
    const Group *group = room.groups + index;
    const char *from = are_sinks ? w->sink_queries : w->queries;
    int64_t query_row = are_sinks ? w->sink_query_row : w->query_row;
    uint32_t rows[TILE][TILE], *queries = room.queries + index * room.words * SIDE;
    for (int side = 0; side < SIDE; side += TILE)
        for (int64_t word = 0; word < room.words; word += TILE) {
            int64_t c = 4 * word / size_of(dtype);
            for (int i = 0; i < TILE; i++) {
                int64_t place = group->tokens[side + i] * query_row + c;
                place += group->heads[side + i] * w->head_dim;
                copy_words(rows[i], from + place * size_of(w->dtype), w->head_dim - c,
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
INLINE void copy_positions(const AttentionWork *w, const int64_t *rows, int64_t num,
                           int64_t head, SliceRoom room, int dtype) {
    const int64_t bytes = size_of(w->cache_dtype), padded = up_to(num, SIDE);
    const int64_t at_once = 4 * TILE / size_of(dtype), to_next = words_of(KEYS, dtype) * TILE;
    const int64_t before = head * cached_bytes(w->head_dim, w->cache_dtype);
    const int64_t values_before = head * cached_bytes(w->value_head, w->cache_dtype);
    for (int64_t t = 0; t < padded; t++)
        for (int64_t c = 0; c < room.width; c += at_once) {
            const char *key = t < num ? w->keys + rows[t] * w->key_row * bytes + before : NULL;
            copy_cached(room.keys + t * room.words + words_of(c, dtype), key, c, w->head_dim,
                        w->head_dim, w, dtype);
        }
    for (int64_t t = 0; t < padded; t += at_once)
        for (int64_t c = 0; c < room.value_width; c += at_once) {
            uint32_t lines[SIDE][TILE];
            for (int64_t i = 0; i < at_once; i++) {
                const char *value = w->values + values_before;
                value = t + i < num ? value + rows[t + i] * w->value_row * bytes : NULL;
                copy_cached(lines[i], value, c, w->value_dim, w->value_head, w, dtype);
            }
            uint32_t *tile = room.values + c / TILE * to_next + words_of(t, dtype) * TILE;
            transpose_values(tile, to_next, lines, dtype);
        }
}

/* Into the second-level cache, some at a time. */
INLINE void fetch_ahead(const AttentionWork *w, Ahead *ahead) {
    const int64_t bytes = size_of(w->cache_dtype);
    const int64_t of_head = cached_bytes(w->head_dim, w->cache_dtype);
    const int64_t of_values = cached_bytes(w->value_head, w->cache_dtype);
    for (int64_t i = 0; i < ahead->num_at_once && ahead->rows < ahead->end; i++, ahead->rows++) {
        const char *key = w->keys + *ahead->rows * w->key_row * bytes + ahead->head * of_head;
        const char *value = w->values + *ahead->rows * w->value_row * bytes + ahead->head * of_values;
        for (int64_t offset = 0; offset < of_head; offset += 64)
            __builtin_prefetch(key + offset, 0, 2);
        for (int64_t offset = 0; offset < of_values; offset += 64)
            __builtin_prefetch(value + offset, 0, 2);
    }
}

/* Sums over totals, transposed, for the rows that are there. */
INLINE void finish_group(const AttentionWork *w, Item item, int64_t index, SliceRoom room,
                         int dtype) {
    const Group *group = room.groups + index;
    const int64_t bytes = size_of(w->dtype), num = smaller(SIDE, item.num - index * SIDE);
    /* From a sum to the next one that begins a word, and to the other one in the same word. */
    const int64_t step = size_of(w->dtype) == size_of(dtype) ? SIDE : 2 * SIDE;
    const int64_t to_odd = dtype == BFLOAT16 ? TILE * SIDE : SIDE;
    uint32_t words[TILE][SIDE], rows[SIDE][TILE];
    for (int64_t c = 0; c < w->value_dim; c += 4 * TILE / bytes) {
        const float *sums = room.sums + (index * room.value_width + c) * SIDE;
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
            int64_t place = group->tokens[i] * w->out_row + group->heads[i] * w->value_dim + c;
            int64_t num_bytes = (w->value_dim - c) * bytes;
            if (num_bytes >= 4 * TILE)
                copy_line(w->out + place * bytes, rows[i]);
            else
                memcpy(w->out + place * bytes, rows[i], num_bytes);
        }
    }
}

/* A part of the scratch, unless it is only to be measured. */
INLINE void *taken(char *memory, int64_t *offset, int64_t num_bytes) {
    char *part = memory ? memory + *offset : NULL;
    *offset += up_to(num_bytes, 64);
    return part;
}

/* Parts of the memory, if any; returns how many bytes they are. */
INLINE int64_t divide(const AttentionWork *w, int dtype, SliceRoom *room, char *memory) {
    int64_t num_groups = w->rows_per_item / SIDE, offset = 0;
    room->width = up_to(w->head_dim, SIDE);
    room->words = words_of(room->width, dtype);
    room->value_width = up_to(w->value_dim, SIDE);
    room->groups = taken(memory, &offset, num_groups * sizeof(Group));
    room->queries = taken(memory, &offset, num_groups * room->words * SIDE * 4);
    room->sums = taken(memory, &offset, num_groups * room->value_width * SIDE * 4);
    room->keys = taken(memory, &offset, KEYS * room->words * 4);
    room->values = taken(memory, &offset, KEYS * words_of(room->value_width, dtype) * 4);
    room->weights = taken(memory, &offset, words_of(KEYS, dtype) * SIDE * 4);
    room->scores = taken(memory, &offset, 2 * SIDE * SIDE * 4);
    return offset;
}
