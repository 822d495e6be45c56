/* What is done with each number by itself, or with its row: once through memory each.

   Sums and products are in float32, and rounded wherever the steps of torch round. All tensors are
   rows of numbers of one type, float32 or bfloat16, without gaps unless there is a stride. */

/* Numbers of an item: few enough for the first-level cache. */
#define ITEM_NUMBERS 8192
/* Bytes, a page: the processor's own look ahead ends with the page. Saves a third of the time after
   a matrix product, which leaves what it made in the caches of other cores. */
#define AHEAD 4096

/* The same as Clamping in rows.py. */
struct clamping {
    float most_gate, most_activated, limit, alpha, added;
};

/* The same as RowWork in rows.py; each kernel says what it makes of these. */
struct row_work {
    char *out;
    const char *first, *second, *third;
    const int64_t *rows, *choices;
    const float *weights;
    int64_t num_rows, num_parts, width;
    int64_t stride; /* numbers from one row to the next, where they may lie apart: of third if there
                       is one, else of out */
    int64_t part_stride; /* the same from one part of a row to the next */
    int64_t next_row; /* taken by whichever thread is free */
    int32_t dtype;
    int32_t is_exact; /* second is float32, and its product rounded once */
    float eps, scale;
    struct clamping clamping;
};

INLINE Lot lot_at(const char *p, int64_t i, int64_t width, int dtype) {
    p += i * size_of(dtype);
    prefetch(p + AHEAD, dtype);
    return width - i < LOT ? load_part(p, width - i, dtype) : load(p, dtype);
}

INLINE void put_lot(char *p, int64_t i, int64_t width, Lot lot, int dtype) {
    store_part(p + i * size_of(dtype), lot, width - i, dtype);
}

INLINE Lot rounded_lot(Lot x, int dtype) {
    if (dtype != BFLOAT16)
        return x;
    return (Lot){(Floats)(rounded(x.first) & 0xffff0000u),
                 (Floats)(rounded(x.second) & 0xffff0000u)};
}

INLINE Lot sum(Lot x, Lot y) { return (Lot){x.first + y.first, x.second + y.second}; }

INLINE Lot product(Lot x, Lot y) { return (Lot){x.first * y.first, x.second * y.second}; }

INLINE Lot scaled(Lot x, float factor) { return (Lot){x.first * factor, x.second * factor}; }

INLINE Floats silu(Floats x) { return x / (1.0f + exp_of(-x)); }

/* What is no number stays so. */
INLINE Floats relu(Floats x) { return (Floats)((Words)x & ~(Words)(x < (Floats){0})); }

/* silu(gate) * up */
INLINE Lot gated(Lot gate, Lot up, int dtype) {
    return product(rounded_lot((Lot){silu(gate.first), silu(gate.second)}, dtype), up);
}

INLINE Floats at_most(Floats x, float limit) {
    const Words is_larger = (Words)(x > limit), most = (Words)((Floats){0} + limit);
    return (Floats)((most & is_larger) | ((Words)x & ~is_larger));
}

INLINE Lot below(Lot x, float limit) {
    return (Lot){at_most(x.first, limit), at_most(x.second, limit)};
}

INLINE Lot minus(Lot x) { return (Lot){-x.first, -x.second}; }

/* (up + added) * silu(alpha * gate) / alpha, of numbers that are clamped as ClampedGate says. */
INLINE Lot gated_clamped(Lot gate, Lot up, const struct clamping *c, int dtype) {
    const Floats added = (Floats){0} + c->added;
    Lot x = rounded_lot(below(gate, c->most_gate), dtype);
    up = rounded_lot(minus(below(minus(below(up, c->limit)), c->limit)), dtype);
    up = rounded_lot(sum(up, (Lot){added, added}), dtype);
    x = rounded_lot(scaled(x, c->alpha), dtype);
    x = rounded_lot((Lot){silu(x.first), silu(x.second)}, dtype);
    x = rounded_lot((Lot){x.first / c->alpha, x.second / c->alpha}, dtype);
    return product(rounded_lot(below(x, c->most_activated), dtype), up);
}

/* Either of out and first, in place of out. */
INLINE void gate_numbers(const struct row_work *w, int64_t row, int dtype, int is_clamped) {
    int64_t width = w->width, start = row * width * size_of(dtype);
    char *out = w->out + start;
    const char *first = w->first + start;
    for (int64_t i = 0; i < width; i += LOT) {
        Lot gate = lot_at(out, i, width, dtype), up = lot_at(first, i, width, dtype);
        gate = is_clamped ? gated_clamped(gate, up, &w->clamping, dtype) : gated(gate, up, dtype);
        put_lot(out, i, width, gate, dtype);
    }
}

INLINE void gate_row(const struct row_work *w, int64_t row, int dtype) {
    gate_numbers(w, row, dtype, 0);
}

INLINE void gate_clamped_row(const struct row_work *w, int64_t row, int dtype) {
    gate_numbers(w, row, dtype, 1);
}

/* Puts rows of first in their places: part choices[row] of the num_parts in row rows[row] of out.
   Each is multiplied by the weight that has the same place. */
INLINE void place_row(const struct row_work *w, int64_t row, int dtype) {
    int64_t place = w->rows[row] * w->num_parts + w->choices[row];
    int64_t width = w->width, row_bytes = width * size_of(dtype);
    char *out = w->out + place * row_bytes;
    const char *first = w->first + row * row_bytes;
    for (int64_t i = 0; i < width; i += LOT) {
        Lot x = scaled(lot_at(first, i, width, dtype), w->weights[place]);
        put_lot(out, i, width, x, dtype);
    }
}

/* out += scale times the sum of the num_parts parts of first, and of second, where there is one. */
INLINE void add_row(const struct row_work *w, int64_t row, int dtype) {
    int64_t width = w->width, row_bytes = width * size_of(dtype);
    char *out = w->out + row * row_bytes;
    const char *first = w->first + row * w->num_parts * row_bytes;
    for (int64_t i = 0; i < width; i += LOT) {
        Lot x = lot_at(first, i, width, dtype);
        for (int64_t part = 1; part < w->num_parts; part++)
            x = sum(x, lot_at(first + part * row_bytes, i, width, dtype));
        if (w->second)
            x = sum(x, lot_at(w->second + row * row_bytes, i, width, dtype));
        x = rounded_lot(x, dtype);
        if (w->scale != 1.0f)
            x = rounded_lot(scaled(x, w->scale), dtype);
        put_lot(out, i, width, sum(lot_at(out, i, width, dtype), x), dtype);
    }
}

/* 1 / sqrt(mean(x^2) + eps) */
INLINE float norm_scale(const char *x, int64_t width, float eps, int dtype) {
    Lot squares = {{0}, {0}};
    for (int64_t i = 0; i < width; i += LOT) {
        Lot lot = lot_at(x, i, width, dtype);
        squares = sum(squares, product(lot, lot));
    }
    return 1 / sqrtf(sum_of(squares.first + squares.second) / width + eps);
}

/* out = first / sqrt(mean(first^2) + eps) * second, which is one part for all. */
INLINE void norm_part(const struct row_work *w, int64_t start, int dtype) {
    int64_t width = w->width;
    char *out = w->out + start * size_of(dtype);
    const char *first = w->first + start * size_of(dtype);
    float scale = norm_scale(first, width, w->eps, dtype);
    for (int64_t i = 0; i < width; i += LOT) {
        Lot x = scaled(lot_at(first, i, width, dtype), scale);
        if (w->is_exact)
            x = product(x, reordered(lot_at(w->second, i, width, FLOAT32), FLOAT32, dtype));
        else
            x = product(rounded_lot(x, dtype), lot_at(w->second, i, width, dtype));
        put_lot(out, i, width, x, dtype);
    }
}

/* Norms the num_parts parts of a row. The rows of first lie as those of out. */
INLINE void norm_row(const struct row_work *w, int64_t row, int dtype) {
    for (int64_t part = 0; part < w->num_parts; part++)
        norm_part(w, row * w->stride + part * w->width, dtype);
}

/* out = first / sqrt(mean(first^2) + eps) * second * silu(third), for each of num_parts parts: first
   is float32, and second one part for all. */
INLINE void norm_gated_row(const struct row_work *w, int64_t row, int dtype) {
    const int64_t width = w->width;
    for (int64_t part = 0; part < w->num_parts; part++) {
        const int64_t start = (row * w->num_parts + part) * width;
        const char *first = w->first + start * size_of(FLOAT32);
        const char *gate = w->third + (row * w->stride + part * width) * size_of(dtype);
        float scale = norm_scale(first, width, w->eps, FLOAT32);
        for (int64_t i = 0; i < width; i += LOT) {
            Lot x = reordered(lot_at(first, i, width, FLOAT32), FLOAT32, dtype);
            x = product(rounded_lot(scaled(x, scale), dtype), lot_at(w->second, i, width, dtype));
            Lot z = lot_at(gate, i, width, dtype);
            x = product((Lot){silu(z.first), silu(z.second)}, rounded_lot(x, dtype));
            put_lot(w->out + start * size_of(dtype), i, width, x, dtype);
        }
    }
}

/* Rotates the num_parts heads of a row of out: pairs of numbers, one in the first `width` numbers
   of a head, the other in the next. The cosines and sines of their angles are rows of first and second. */
INLINE void rotate_row(const struct row_work *w, int64_t row, int dtype) {
    int64_t width = w->width, half_bytes = width * size_of(dtype);
    const char *first = w->first + row * half_bytes, *second = w->second + row * half_bytes;
    for (int64_t head = 0; head < w->num_parts; head++) {
        char *low = w->out + (row * w->stride + head * w->part_stride) * size_of(dtype);
        char *high = low + half_bytes;
        for (int64_t i = 0; i < width; i += LOT) {
            Lot x = lot_at(low, i, width, dtype), y = lot_at(high, i, width, dtype);
            Lot cosine = lot_at(first, i, width, dtype), sine = lot_at(second, i, width, dtype);
            Lot minus_y_sine = rounded_lot(product(scaled(y, -1), sine), dtype);
            Lot x_sine = rounded_lot(product(x, sine), dtype);
            x = rounded_lot(product(x, cosine), dtype);
            y = rounded_lot(product(y, cosine), dtype);
            put_lot(low, i, width, sum(x, minus_y_sine), dtype);
            put_lot(high, i, width, sum(y, x_sine), dtype);
        }
    }
}

/* Each does its rows, some at a time, until none is left. Several threads may share a work. */
#define KERNEL(name, kernel_row)                                                                   \
    OF_THE_REST void name(struct row_work *w) {                                                    \
        int64_t step = ITEM_NUMBERS / (w->width * w->num_parts) + 1, num_rows = w->num_rows;       \
        int64_t row = __atomic_fetch_add(&w->next_row, step, __ATOMIC_RELAXED);                    \
        while (row < num_rows) {                                                                   \
            for (int64_t end = row + step; row < end && row < num_rows; row++)                     \
                if (w->dtype == BFLOAT16)                                                          \
                    kernel_row(w, row, BFLOAT16);                                                  \
                else                                                                               \
                    kernel_row(w, row, FLOAT32);                                                   \
            row = __atomic_fetch_add(&w->next_row, step, __ATOMIC_RELAXED);                        \
        }                                                                                          \
    }

KERNEL(moebatch_gate, gate_row)
KERNEL(moebatch_gate_clamped, gate_clamped_row)
KERNEL(moebatch_place, place_row)
KERNEL(moebatch_add, add_row)
KERNEL(moebatch_norm, norm_row)
KERNEL(moebatch_norm_gated, norm_gated_row)
KERNEL(moebatch_rotate, rotate_row)
