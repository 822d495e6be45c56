/* Products of rows with weights as they are stored: out = x @ weights' (+ bias).

   Letters: N rows, O outputs, I inputs; x is [N, I], weights are [O, I], out is [N, O]. Both
   factors have their inputs side by side, so sums run along vectors and nothing is transposed.

   OUTPUT_GROUP rows of weights meet all rows of a block, ROW_GROUP of them at a time, which lie in
   the second-level cache with their vectors taking turns; meanwhile the weights of the next outputs
   are fetched. Weights are widened in registers, where they are stored, or become a tile in the
   first-level cache first: once a block, their vectors taking turns, too. Few rows wait for memory,
   so nothing is made for them; codes that few rows meet are multiplied where they are decoded.

   What is multiplied is float32; or pairs of bfloat16, if all is bfloat16 and the processor adds
   products of pairs. Sums are float32 always. Which numbers are summed together depends neither on
   N, nor on threads, nor on other rows.

   Several products are one work: a thread that finds nothing left to do of one goes on with the
   next, and waits only for the one that the next is made of. So experts of few rows keep all
   threads busy, which are started and awaited once. Rows may lie anywhere, are gated with those of
   a second matrix or activated, or are weighed and put in their places: what comes before an expert's products
   and after them needs no way through memory of its own. */

/* Rows and outputs whose sums, and what these are made of, stay in registers: in 32, in 16, and in
   16 where products take one as well. */
#if defined(__AVX512F__) || defined(__ARM_NEON)
#define ROW_GROUP 4
#define OUTPUT_GROUP 6
#elif defined(__FMA__)
#define ROW_GROUP 3
#define OUTPUT_GROUP 4
#else
#define ROW_GROUP 2
#define OUTPUT_GROUP 4
#endif
#define SUMS (ROW_GROUP * OUTPUT_GROUP)

/* Rows for which no plain weights become tiles. */
#define FEW_ROWS (4 * ROW_GROUP)

/* Rows of a block, for which a tile costs little. Blocks of fewer take more than half of a small
   second-level cache (Zen 3, 512 KiB, one core, bfloat16 by AVX2: 70, 128 or 256 rows take 1 to 6 %
   longer by half of it). */
#define ENOUGH_ROWS 96

/* Bytes of a row of a tile. */
#define BLOCK_BYTES 4096

/* Outputs that a thread takes at a time: where rows of a block are longer than what is kept, they
   are packed for each time, which costs as much as seven outputs. */
#define LEAST_OUTPUTS 48
#define MOST_OUTPUTS 504

/* Packed rows of a block that are kept from one time to the next (Zen 3, two cores, bfloat16, 72 rows
   of 4,096 inputs, which are 1.2 MB: 8 % faster than when they are packed anew). */
#define KEPT_BYTES (1 << 21)

/* Rows whose places are on their way while others are put in theirs. */
#define ROWS_AHEAD 4

/* x in a register: compilers would rather read it again for each sum, as if reading were free. */
#if defined(__AVX512F__)
#define IN_REGISTER(x) __asm__("" : "+v"(x))
#elif defined(__SSE2__)
#define IN_REGISTER(x) __asm__("" : "+x"(x))
#else
#define IN_REGISTER(x)
#endif

/* The same as MatrixWork in products.py. */
struct matrix {
    const char *weights; /* without gaps; NULL if they are CODED */
    const char *bias;    /* [O], or NULL */
    struct coding coding;
};

/* What becomes of sums. */
enum { PUT, PUT_GATED, PUT_GATED_CLAMPED, PUT_RELU, PUT_SQUARED_RELU };

/* The same as ProductWork in products.py. */
struct product_work {
    const char *x;         /* rows x_row numbers apart */
    const int64_t *x_rows; /* [N] of them; NULL for the first N */
    char *out;             /* rows out_row numbers apart */
    const int64_t *out_rows, *choices; /* [N]: a row goes to the place of a choice; or NULL */
    const float *choice_weights; /* by place, of which each row has num_choices */
    int64_t num_choices;
    int64_t num_rows, num_outputs, num_inputs;
    int64_t x_row, out_row;
    int64_t out_part, out_part_row; /* outputs of a row that lie side by side, and from one such part
                                       to the next */
    int64_t num_threads;
    int64_t cache_bytes;  /* of the second-level cache */
    int64_t num_products; /* this one, and those that lie behind it */
    int64_t after;        /* how many before this one x is made, or 0 */
    int64_t next_item;    /* taken by whichever thread is free */
    int64_t num_done;     /* items */
    int32_t dtype, weight_dtype; /* of x, bias and out; of weights */
    int32_t has_failed;    /* for want of memory */
    int32_t widens_beside; /* whether the processor widens numbers beside multiplying others */
    int32_t puts;
    struct clamping clamping;
    struct matrix matrix, up; /* the latter is multiplied with what the former makes, if they are
                                 gated */
};

/* How a product is divided. */
typedef struct {
    int64_t block_rows, num_blocks;
    int64_t item_outputs, num_items; /* of a block */
    int64_t block_inputs;
    int64_t kept_blocks; /* of inputs, whose packed rows are kept: all, or one */
} Division;

/* Scratch of a thread. */
typedef struct {
    char *rows;  /* [blocks of inputs, block_rows / ROW_GROUP, vectors, ROW_GROUP, LANES] */
    char *tile;  /* [vectors, OUTPUT_GROUP, LANES] */
    char *codes; /* [item_outputs, bytes] of codes that lie across */
    float *sums; /* [matrices, block_rows, item_outputs] */
    int64_t packed; /* block of rows whose inputs are all there, or -1 */
} ProductRoom;

/* Some inputs of some rows with some outputs. */
typedef struct {
    const char *rows;
    int64_t num_rows, num_vectors;
    const char *weights; /* plain ones; so many bytes from one row to the next */
    int64_t row_bytes, num_inputs;
    const struct coding *coding; /* of others */
    int64_t first_output, first_input;
    float *sums;
    int64_t sums_row, num_outputs;
    int is_first; /* inputs of these sums */
} Patch;

#define VECTOR_BYTES ((int64_t)sizeof(Floats))

INLINE int64_t parts_of(int64_t num, int64_t size) { return (num + size - 1) / size; }

INLINE Lot load_up_to(const char *p, int64_t num, int dtype) {
    return num < LOT ? load_part(p, num, dtype) : load(p, dtype);
}

INLINE void total_sums(const Floats *sums, float *totals) {
    Floats padded[(SUMS + TOTALS - 1) / TOTALS * TOTALS] = {{0}};
    float all[(SUMS + TOTALS - 1) / TOTALS * TOTALS];
#pragma GCC unroll 32
    for (int i = 0; i < SUMS; i++)
        padded[i] = sums[i];
#pragma GCC unroll 4
    for (int i = 0; i < SUMS; i += TOTALS)
        add_lanes(padded + i, all + i, 0);
    memcpy(totals, all, SUMS * sizeof(float));
}

/* Adds what ROW_GROUP rows have made of these inputs. */
INLINE void keep(Patch patch, int64_t row, const Floats *parts) {
    float totals[SUMS];
    total_sums(parts, totals);
    const int is_whole = patch.num_outputs == OUTPUT_GROUP && row + ROW_GROUP <= patch.num_rows;
    if (is_whole && patch.is_first) { /* as nearly always: sizes that are known are copied faster */
#pragma GCC unroll 8
        for (int r = 0; r < ROW_GROUP; r++)
            memcpy(patch.sums + (row + r) * patch.sums_row, totals + r * OUTPUT_GROUP,
                   OUTPUT_GROUP * sizeof(float));
        return;
    }
    for (int64_t r = 0; r < ROW_GROUP && row + r < patch.num_rows; r++) {
        float *sums = patch.sums + (row + r) * patch.sums_row;
        for (int64_t o = 0; o < patch.num_outputs; o++)
            sums[o] = totals[r * OUTPUT_GROUP + o] + (patch.is_first ? 0 : sums[o]);
    }
}

/* --- in place ----------------------------------------------------------------------------------*/

/* parts += a lot of so many inputs of rows, which are `num_rows`, and of OUTPUT_GROUP outputs. */
INLINE void add_stored_lot(Floats *parts, const char *rows, Patch patch, int64_t i, int64_t num,
                           int num_rows, int dtype, int is_pairs) {
    const float *x = (const float *)rows + (is_pairs ? i / 2 : i) * ROW_GROUP;
#pragma GCC unroll 8
    for (int o = 0; o < OUTPUT_GROUP; o++) {
        /* Outputs that are not there repeat the first. */
        int64_t place = (o < patch.num_outputs ? o : 0) * patch.row_bytes;
        const char *p = patch.weights + place + i * size_of(dtype);
        prefetch(p + OUTPUT_GROUP * patch.row_bytes, dtype);
        Floats *sums = parts + o;
        if (is_pairs) {
            Floats pairs = load_pairs(p, num);
#pragma GCC unroll 8
            for (int r = 0; r < num_rows; r++) {
                Floats *sum = sums + r * OUTPUT_GROUP;
                *sum = add_pairs(*sum, read_floats(x + r * LANES), pairs);
            }
            continue;
        }
        Lot lot = load_up_to(p, num, dtype);
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; r++) {
            Floats *sum = sums + r * OUTPUT_GROUP;
            *sum = add_product_of(*sum, lot.first, read_floats(x + r * LANES));
            *sum = add_product_of(*sum, lot.second, read_floats(x + (ROW_GROUP + r) * LANES));
        }
    }
}

INLINE void multiply_stored(Patch patch, int64_t row, int num_rows, int dtype, int is_pairs) {
    const char *rows = patch.rows + row * patch.num_vectors * VECTOR_BYTES;
    Floats parts[SUMS];
#pragma GCC unroll 32
    for (int i = 0; i < SUMS; i++)
        parts[i] = (Floats){0};
    int64_t i = 0;
    for (; i + LOT <= patch.num_inputs; i += LOT)
        add_stored_lot(parts, rows, patch, i, LOT, num_rows, dtype, is_pairs);
    if (i < patch.num_inputs)
        add_stored_lot(parts, rows, patch, i, patch.num_inputs - i, num_rows, dtype, is_pairs);
    keep(patch, row, parts);
}

INLINE void multiply_in_place(Patch patch, int dtype, int is_pairs) {
    for (int64_t row = 0; row < patch.num_rows; row += ROW_GROUP)
        switch (patch.num_rows - row) {
        case 1:
            multiply_stored(patch, row, 1, dtype, is_pairs);
            break;
        case 2:
            multiply_stored(patch, row, 2, dtype, is_pairs);
            break;
        default:
            multiply_stored(patch, row, ROW_GROUP, dtype, is_pairs);
        }
}

/* --- by tiles ----------------------------------------------------------------------------------*/

/* Of some rows from `row` on. */
INLINE void multiply_tile(const Patch *patch, const char *tile, int64_t row, int num_rows,
                          int is_pairs) {
    const float *x = (const float *)(patch->rows + row * patch->num_vectors * VECTOR_BYTES);
    const float *y = (const float *)tile;
    Floats parts[SUMS];
#pragma GCC unroll 32
    for (int i = 0; i < SUMS; i++)
        parts[i] = (Floats){0};
    /* Vectors are even in number but for pairs. Where another program runs in the other half of a
       core, instructions bind, so counting is shared (Zen 3, two such cores, bfloat16, 72 to 444
       rows: 4 to 8 % faster in the median, 0 to 11 % in the fastest tenth of the calls). */
#pragma GCC unroll 2
    for (int64_t v = 0; v < patch->num_vectors; v++) {
        Floats xs[ROW_GROUP];
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; r++, x += LANES) {
            xs[r] = read_floats(x);
            IN_REGISTER(xs[r]);
        }
        x += (ROW_GROUP - num_rows) * LANES;
#pragma GCC unroll 8
        for (int o = 0; o < OUTPUT_GROUP; o++, y += LANES) {
            Floats weights = read_floats(y);
            IN_REGISTER(weights);
#pragma GCC unroll 8
            for (int r = 0; r < num_rows; r++) {
                Floats *sum = parts + r * OUTPUT_GROUP + o;
                *sum = (is_pairs ? add_pairs : add_product_of)(*sum, xs[r], weights);
            }
        }
    }
    keep(*patch, row, parts);
}

/* Functions of their own: compilers give registers away in large ones. */
#define TILE_OF(name, num_rows, is_pairs)                                                         \
    static __attribute__((noinline)) void name(const Patch *patch, const char *tile,              \
                                               int64_t row) {                                     \
        multiply_tile(patch, tile, row, num_rows, is_pairs);                                      \
    }
TILE_OF(multiply_rows, ROW_GROUP, 0)
TILE_OF(multiply_last_row, 1, 0)
#if HAS_PAIRS
TILE_OF(multiply_rows_of_pairs, ROW_GROUP, 1)
TILE_OF(multiply_last_row_of_pairs, 1, 1)
#else
#define multiply_rows_of_pairs multiply_rows
#define multiply_last_row_of_pairs multiply_last_row
#endif

/* A row of stored numbers, its vectors `step` bytes apart: as float32 in the order that numbers of
   another type have when they are widened, or as pairs. */
INLINE void spread(char *to, int64_t step, const char *from, int64_t num, int from_dtype, int order,
                   int is_pairs) {
    for (int64_t i = 0; i < num; i += LOT, to += step) {
        const char *p = from + i * size_of(from_dtype);
        if (is_pairs) {
            Floats pairs = load_pairs(p, num - i);
            memcpy(to, &pairs, VECTOR_BYTES);
            continue;
        }
        Lot lot = reordered(load_up_to(p, num - i, from_dtype), from_dtype, order);
        memcpy(to, &lot.first, VECTOR_BYTES);
        to += step;
        memcpy(to, &lot.second, VECTOR_BYTES);
    }
}

/* Decodes a row of a tile, and fetches that of the next one. */
INLINE void make_coded_row(Patch patch, int64_t o, char *to, int64_t step, int is_pairs) {
    (is_pairs ? decode_pairs : decode_floats)(to, step, patch.coding, patch.first_output + o,
                                              patch.first_input, patch.num_inputs);
}

/* Multiplies outputs of codes, as many as are decoded beside one another, with few rows, where they
   are decoded, and returns how many: sums of one output wait for one another. */
_Static_assert(OUTPUT_GROUP <= MOST_BLOCKS_BESIDE, "all outputs of a tile are decoded beside");
#define CODED_OF(name, count, beside, decode, is_pairs)                                           \
    static __attribute__((noinline)) int64_t name(const Patch *patch, int64_t o, Floats *parts) { \
        const float *x = (const float *)patch->rows;                                              \
        const int64_t last = patch->num_outputs - 1;                                              \
        int64_t outputs[beside];                                                                  \
        Sink sinks[beside];                                                                       \
        _Pragma("GCC unroll 6") for (int i = 0; i < beside; i++) {                                \
            /* An output that is not there repeats the last one. */                               \
            outputs[i] = patch->first_output + smaller(o + i, last);                              \
            sinks[i] = (Sink){.x = x, .x_step = ROW_GROUP * LANES, .num_rows = count};            \
        }                                                                                         \
        decode(sinks, beside, patch->coding, outputs, patch->first_input, patch->num_inputs,      \
               is_pairs);                                                                         \
        for (int r = 0; r < count; r++)                                                           \
            for (int i = 0; i < beside; i++)                                                      \
                parts[r * OUTPUT_GROUP + o + i] = sinks[i].sums[r];                               \
        return beside;                                                                            \
    }
CODED_OF(multiply_coded_row, 1, 2, decode_beside, 0)
CODED_OF(multiply_block_row, 1, OUTPUT_GROUP, decode_blocks, 0)
CODED_OF(multiply_two_block_rows, 2, 2, decode_blocks, 0)
CODED_OF(multiply_block_rows, ROW_GROUP, 2, decode_blocks, 0)
#if HAS_PAIRS
CODED_OF(multiply_coded_row_of_pairs, 1, 2, decode_beside, 1)
CODED_OF(multiply_block_row_of_pairs, 1, OUTPUT_GROUP, decode_blocks, 1)
CODED_OF(multiply_two_block_rows_of_pairs, 2, 2, decode_blocks, 1)
CODED_OF(multiply_block_rows_of_pairs, ROW_GROUP, 2, decode_blocks, 1)
#else
#define multiply_coded_row_of_pairs multiply_coded_row
#define multiply_block_row_of_pairs multiply_block_row
#define multiply_two_block_rows_of_pairs multiply_two_block_rows
#define multiply_block_rows_of_pairs multiply_block_rows
#endif

/* OUTPUT_GROUP rows of weights, as `spread` leaves them. */
INLINE void make_tile(Patch patch, char *tile, int dtype, int is_pairs) {
    const int64_t step = OUTPUT_GROUP * VECTOR_BYTES;
    for (int64_t o = 0; o < patch.num_outputs; o++, tile += VECTOR_BYTES)
        if (dtype == CODED)
            make_coded_row(patch, o, tile, step, is_pairs);
        else
            spread(tile, step, patch.weights + o * patch.row_bytes, patch.num_inputs, dtype, dtype,
                   is_pairs);
}

/* Lines of the weights of the next tile that have not been fetched yet; none of codes, which are
   fetched as others are decoded. */
typedef struct {
    const char *output;
    int64_t line, num_lines; /* of an output */
    int64_t num_outputs;
} NextTile;

INLINE NextTile next_tile(Patch patch, int dtype) {
    if (dtype == CODED)
        return (NextTile){.num_outputs = 0};
    return (NextTile){.output = patch.weights + OUTPUT_GROUP * patch.row_bytes,
                      .num_lines = parts_of(patch.num_inputs * size_of(dtype), 64),
                      .num_outputs = OUTPUT_GROUP};
}

/* Into the second-level cache. */
INLINE void fetch_lines(NextTile *next, int64_t num, int64_t row_bytes) {
    for (int64_t i = 0; i < num && next->num_outputs; i++) {
        __builtin_prefetch(next->output + next->line * 64, 0, 2);
        if (++next->line < next->num_lines)
            continue;
        next->line = 0;
        next->output += row_bytes;
        next->num_outputs--;
    }
}

/* Each group of rows fetches its share of what the next tile is made of: all at once would be
   waited for. */
INLINE void multiply_by_tile(Patch patch, char *tile, int dtype, int is_pairs) {
    NextTile next = next_tile(patch, dtype);
    const int64_t share =
        parts_of(OUTPUT_GROUP * next.num_lines, parts_of(patch.num_rows, ROW_GROUP));
    make_tile(patch, tile, dtype, is_pairs);
    for (int64_t row = 0; row < patch.num_rows; row += ROW_GROUP) {
        fetch_lines(&next, share, patch.row_bytes);
        if (patch.num_rows - row == 1)
            (is_pairs ? multiply_last_row_of_pairs : multiply_last_row)(&patch, tile, row);
        else
            (is_pairs ? multiply_rows_of_pairs : multiply_rows)(&patch, tile, row);
    }
}

/* Whether codes are multiplied where they are decoded: with few rows, a tile is written and read for
   little. Of two and three it pays in blocks (Zen 3, two cores, thousand million weights a second of
   a product of 768 x 2048, medians of calls in turns: Q4_K 5.1 without and 6.2 with it, Q6_K 5.2 and
   5.9; four bits in rows 4.3 and 4.2; one row of Q4_K 5.6 and 8.4, of four bits 4.2 and 4.9). */
INLINE int decodes_in_registers(const struct product_work *w) {
    const int in_blocks = block_inputs(w->matrix.coding.numbers) > 0;
    return w->num_rows <= (in_blocks ? ROW_GROUP : 1);
}

INLINE int64_t multiply_beside(const Patch *patch, int64_t o, Floats *parts, int is_pairs) {
    if (!block_inputs(patch->coding->numbers))
        return (is_pairs ? multiply_coded_row_of_pairs : multiply_coded_row)(patch, o, parts);
    switch (patch->num_rows) {
    case 1:
        return (is_pairs ? multiply_block_row_of_pairs : multiply_block_row)(patch, o, parts);
    case 2:
        return (is_pairs ? multiply_two_block_rows_of_pairs : multiply_two_block_rows)(patch, o,
                                                                                       parts);
    default:
        return (is_pairs ? multiply_block_rows_of_pairs : multiply_block_rows)(patch, o, parts);
    }
}

INLINE void multiply_coded(Patch patch, int is_pairs) {
    Floats parts[SUMS] = {{0}};
    for (int64_t o = 0; o < patch.num_outputs;)
        o += multiply_beside(&patch, o, parts, is_pairs);
    keep(patch, 0, parts);
}

/* --- all of it ---------------------------------------------------------------------------------*/

/* Some inputs of the rows of a block; rows up to ROW_GROUP that are not there may hold
   anything. */
INLINE void pack_rows(const struct product_work *w, int64_t first_row, int64_t first_input,
                      Patch patch, char *room, int order, int is_pairs) {
    const int64_t bytes = size_of(w->dtype);
    for (int64_t row = 0; row < patch.num_rows; row++) {
        int64_t group = row / ROW_GROUP * ROW_GROUP, member = row - group;
        char *to = room + (group * patch.num_vectors + member) * VECTOR_BYTES;
        const int64_t place = w->x_rows ? w->x_rows[first_row + row] : first_row + row;
        const char *from = w->x + (place * w->x_row + first_input) * bytes;
        spread(to, ROW_GROUP * VECTOR_BYTES, from, patch.num_inputs, w->dtype, order, is_pairs);
    }
}

/* A lot of sums, with the bias. */
INLINE Lot made(const struct product_work *w, const struct matrix *matrix, const float *sums,
                int64_t output, int64_t num) {
    Lot lot = reordered(load_up_to((const char *)sums, num, FLOAT32), FLOAT32, w->dtype);
    if (!matrix->bias)
        return lot;
    return sum(lot, load_up_to(matrix->bias + output * size_of(w->dtype), num, w->dtype));
}

/* A lot of what a row makes; sums of the second matrix lie behind those of the first. */
INLINE Lot finished(const struct product_work *w, const float *sums, int64_t beside, int64_t output,
                    int64_t num, const float *weight) {
    Lot lot = made(w, &w->matrix, sums, output, num);
    if (weight)
        return scaled(rounded_lot(lot, w->dtype), *weight);
    if (w->puts == PUT)
        return lot;
    Lot gate = rounded_lot(lot, w->dtype);
    if (w->puts == PUT_RELU || w->puts == PUT_SQUARED_RELU) {
        gate = (Lot){relu(gate.first), relu(gate.second)};
        return w->puts == PUT_RELU ? gate : product(gate, gate);
    }
    Lot up = rounded_lot(made(w, &w->up, sums + beside, output, num), w->dtype);
    if (w->puts == PUT_GATED)
        return gated(gate, up, w->dtype);
    return gated_clamped(gate, up, &w->clamping, w->dtype);
}

/* Row of out into which a row goes. */
INLINE int64_t place_of(const struct product_work *w, int64_t row) {
    return w->out_rows ? w->out_rows[row] * w->num_choices + w->choices[row] : row;
}

/* Lines that will be written. */
INLINE void fetch_place(const struct product_work *w, int64_t row, int64_t column,
                        int64_t num_outputs) {
    const int64_t bytes = size_of(w->dtype);
    const char *place = w->out + (place_of(w, row) * w->out_row + column) * bytes;
    for (int64_t i = 0; i < num_outputs * bytes; i += 64)
        __builtin_prefetch(place + i, 1, 3);
}

/* Outputs that lie side by side. */
INLINE void put_part(const struct product_work *w, const float *sums, int64_t beside, int64_t output,
                     int64_t first, int64_t end, const float *weight, char *to) {
    const int64_t bytes = size_of(w->dtype);
    for (int64_t o = first; o < end; o += LOT, to += LOT * bytes) {
        Lot lot = finished(w, sums + o, beside, output + o, end - o, weight);
        store_part(to, lot, end - o, w->dtype);
    }
}

/* What rows make into its places. These lie apart, and stores wait for one another, so that of some
   rows is fetched beforehand (128 experts of width 768, 2,048 tokens, two cores of a Zen 4: all of
   their products take 424 ms without and 403 with it at one time, 388 and 387 at another). */
INLINE void put_sums(const struct product_work *w, int64_t row, int64_t output, Patch patch,
                     int64_t num_outputs, int64_t beside) {
    const int64_t bytes = size_of(w->dtype), within = output % w->out_part;
    const int64_t first = output / w->out_part * w->out_part_row + within;
    for (int64_t r = 0; r < smaller(ROWS_AHEAD, patch.num_rows); r++)
        fetch_place(w, row + r, first, num_outputs);
    for (int64_t r = 0; r < patch.num_rows; r++) {
        if (r + ROWS_AHEAD < patch.num_rows)
            fetch_place(w, row + r + ROWS_AHEAD, first, num_outputs);
        const int64_t place = place_of(w, row + r);
        const float *weight = w->out_rows ? w->choice_weights + place : NULL;
        char *to = w->out + place * w->out_row * bytes;
        const float *sums = patch.sums + r * patch.sums_row;
        if (w->out_part == w->num_outputs) { /* as nearly always */
            put_part(w, sums, beside, output, 0, num_outputs, weight, to + output * bytes);
            continue;
        }
        for (int64_t o = 0, end, column = first; o < num_outputs; o = end) {
            end = smaller(num_outputs, o + w->out_part - (o ? 0 : within));
            put_part(w, sums, beside, output, o, end, weight, to + column * bytes);
            column += end - o + w->out_part_row - w->out_part;
        }
    }
}

/* Whether weights stay where they are. With many rows, numbers of 16 bits are faster without tiles,
   where there are 32 registers (Zen 4, one core, GFLOP/s of 104 rows: 213 instead of 182 in pairs,
   105 instead of 97 widened; with 16 registers 81 instead of 97). Intel's processors multiply by the
   units that widen. */
INLINE int is_in_place(const struct product_work *w, int weight_dtype, int is_pairs) {
#if defined(__AVX512F__)
    if (is_pairs || (weight_dtype != FLOAT32 && w->widens_beside))
        return weight_dtype != CODED;
#endif
    return weight_dtype != CODED && w->num_rows <= FEW_ROWS;
}

INLINE int64_t num_matrices(const struct product_work *w) {
    return w->puts == PUT_GATED || w->puts == PUT_GATED_CLAMPED ? 2 : 1;
}

/* Some outputs of a matrix with rows that have been packed. */
INLINE void multiply_matrix(const struct product_work *w, const struct matrix *matrix, Patch patch,
                            int64_t output, int64_t num_outputs, const ProductRoom *room,
                            int weight_dtype, int is_pairs) {
    const int is_coded = weight_dtype == CODED;
    struct coding coding = matrix->coding;
    if (is_coded && coding.lies != IN_ROWS)
        coding = with_rows(&matrix->coding, output, num_outputs, patch.first_input,
                           patch.num_inputs, room->codes);
    const int64_t begin = patch.first_input * size_of(weight_dtype);
    float *sums = patch.sums;
    patch.row_bytes = w->num_inputs * size_of(weight_dtype);
    patch.coding = &coding;
    for (int64_t o = 0; o < num_outputs; o += OUTPUT_GROUP) {
        patch.num_outputs = smaller(OUTPUT_GROUP, num_outputs - o);
        patch.first_output = output + o;
        if (!is_coded)
            patch.weights = matrix->weights + patch.first_output * patch.row_bytes + begin;
        patch.sums = sums + o;
        if (is_in_place(w, weight_dtype, is_pairs))
            multiply_in_place(patch, weight_dtype, is_pairs);
        else if (is_coded && decodes_in_registers(w))
            multiply_coded(patch, is_pairs);
        else
            multiply_by_tile(patch, room->tile, weight_dtype, is_pairs);
    }
}

/* Of a block of rows and a block of inputs. */
INLINE int64_t packed_bytes(Division division) {
    return division.block_rows * division.block_inputs * 4; /* half of it for pairs */
}

INLINE void multiply_item(const struct product_work *w, Division division, int64_t item,
                          ProductRoom *room, int weight_dtype, int is_pairs) {
    const int64_t block = item / division.num_items, row = block * division.block_rows;
    const int64_t output = item % division.num_items * division.item_outputs;
    const int64_t num_outputs = smaller(division.item_outputs, w->num_outputs - output);
    const int64_t beside = division.block_rows * division.item_outputs;
    const int order = weight_dtype == CODED ? order_of(&w->matrix.coding) : weight_dtype;
    const int keeps_all = division.kept_blocks * division.block_inputs >= w->num_inputs;
    const int64_t step = keeps_all ? packed_bytes(division) : 0;
    char *rows = room->rows;
    Patch patch = {.num_rows = smaller(division.block_rows, w->num_rows - row),
                   .sums_row = division.item_outputs};
    for (int64_t first = 0; first < w->num_inputs; first += division.block_inputs, rows += step) {
        patch.num_inputs = smaller(division.block_inputs, w->num_inputs - first);
        patch.is_first = first == 0;
        patch.first_input = first;
        patch.rows = rows;
        patch.num_vectors = parts_of(patch.num_inputs, LOT) * (is_pairs ? 1 : 2);
        if (room->packed != block)
            pack_rows(w, row, first, patch, rows, order, is_pairs);
        for (int64_t m = 0; m < num_matrices(w); m++) {
            patch.sums = room->sums + m * beside;
            multiply_matrix(w, m ? &w->up : &w->matrix, patch, output, num_outputs, room,
                            weight_dtype, is_pairs);
        }
    }
    room->packed = keeps_all ? block : -1;
    patch.sums = room->sums;
    put_sums(w, row, output, patch, num_outputs, beside);
}

/* Whether codes have to be put in rows. */
INLINE int lies_across(const struct product_work *w) {
    return w->weight_dtype == CODED && w->matrix.coding.lies != IN_ROWS;
}

/* Into so many items of a block, or into more if threads then have as many each: of nine equal items
   one of two threads has five (257 to 384 rows, two cores of a Zen 4: 9 to 10 % longer). */
INLINE void divide_outputs(const struct product_work *w, Division *division, int64_t num_items,
                           int64_t least) {
    const int64_t unit = lies_across(w) ? WORD_OUTPUTS : OUTPUT_GROUP;
    for (int64_t count = num_items; count < 2 * num_items; count++) {
        const int64_t outputs = up_to(parts_of(w->num_outputs, count), unit);
        const int64_t items = parts_of(w->num_outputs, outputs);
        const int is_even = items * division->num_blocks % w->num_threads == 0;
        if (count > num_items && (!is_even || outputs < least))
            continue;
        division->item_outputs = outputs;
        division->num_items = items;
        if (is_even)
            return;
    }
}

INLINE Division divided(const struct product_work *w, int is_pairs) {
    Division division;
    const int64_t most_inputs = BLOCK_BYTES / (is_pairs ? 2 : 4);
    const int64_t half = w->cache_bytes / 2 / BLOCK_BYTES;
    const int64_t fitting = larger(half, smaller(half * 3 / 2, ENOUGH_ROWS));
    const int64_t most = smaller(larger(fitting, 32), 192) / ROW_GROUP * ROW_GROUP;
    /* Blocks of a size, as far as can be. */
    int64_t rows = parts_of(w->num_rows, parts_of(w->num_rows, most));
    division.block_rows = up_to(rows, ROW_GROUP);
    division.num_blocks = parts_of(w->num_rows, division.block_rows);
    int64_t inputs = parts_of(w->num_inputs, parts_of(w->num_inputs, most_inputs));
    const int64_t unit =
        w->weight_dtype == CODED ? decoded_unit(w->matrix.coding.numbers) : STEP_INPUTS;
    division.block_inputs = up_to(inputs, larger(LOT, unit));
    const int64_t num_blocks = parts_of(w->num_inputs, division.block_inputs);
    division.kept_blocks = num_blocks * packed_bytes(division) <= KEPT_BYTES ? num_blocks : 1;
    /* Several items for a thread, since threads are not equally fast, unless they would be small;
       of a size, too. */
    const int64_t all = w->num_outputs * division.num_blocks;
    int64_t least = smaller(parts_of(all, w->num_threads), LEAST_OUTPUTS);
    int64_t at_once = larger(parts_of(all, 4 * w->num_threads), least);
    divide_outputs(w, &division, parts_of(w->num_outputs, smaller(at_once, MOST_OUTPUTS)), least);
    return division;
}

/* Parts of the memory, if any; returns how many bytes they are. */
INLINE int64_t divide_room(const struct product_work *w, Division division, ProductRoom *room,
                           char *memory) {
    int64_t offset = 0, row_bytes = division.block_inputs * 4; /* half of it for pairs */
    int64_t num_sums = num_matrices(w) * division.block_rows * division.item_outputs;
    room->rows = taken(memory, &offset, division.kept_blocks * packed_bytes(division));
    room->tile = taken(memory, &offset, OUTPUT_GROUP * row_bytes);
    if (lies_across(w))
        room->codes = taken(memory, &offset,
                            division.item_outputs * near_row_bytes(division.block_inputs));
    room->sums = taken(memory, &offset, num_sums * 4);
    return offset;
}

INLINE int multiplies_pairs(const struct product_work *w) {
    const int are_pairs = w->weight_dtype == BFLOAT16 || w->weight_dtype == CODED;
    return HAS_PAIRS && w->dtype == BFLOAT16 && are_pairs;
}

INLINE int64_t items_of(Division division) { return division.num_blocks * division.num_items; }

/* Returns when all of a product has been computed, by whatever thread. A thread without memory has
   taken none of its items, so nobody is awaited in vain. */
INLINE void await(const struct product_work *w) {
    const int64_t num_items = items_of(divided(w, multiplies_pairs(w)));
    for (int64_t i = 0; __atomic_load_n(&w->num_done, __ATOMIC_ACQUIRE) < num_items; i++)
        look_again(i);
}

INLINE void multiply_items(struct product_work *w, Division division, ProductRoom room,
                           int weight_dtype, int is_pairs) {
    for (;;) {
        int64_t item = __atomic_fetch_add(&w->next_item, 1, __ATOMIC_RELAXED);
        if (item >= items_of(division))
            return;
        multiply_item(w, division, item, &room, weight_dtype, is_pairs);
        __atomic_fetch_add(&w->num_done, 1, __ATOMIC_RELEASE);
    }
}

INLINE void multiply_product(struct product_work *w, char *memory) {
    ProductRoom room = {.packed = -1};
    const int is_pairs = multiplies_pairs(w);
    Division division = divided(w, is_pairs);
    divide_room(w, division, &room, memory);
    switch (w->weight_dtype) {
    case FLOAT32:
        multiply_items(w, division, room, FLOAT32, 0);
        break;
    case BFLOAT16:
        if (is_pairs)
            multiply_items(w, division, room, BFLOAT16, 1);
        else
            multiply_items(w, division, room, BFLOAT16, 0);
        break;
    case FLOAT16:
        multiply_items(w, division, room, FLOAT16, 0);
        break;
    case CODED:
        if (is_pairs)
            multiply_items(w, division, room, CODED, 1);
        else
            multiply_items(w, division, room, CODED, 0);
        break;
    }
}

/* Computes items of one product after the other until none is left. Several threads may share the
   same work. */
OF_PRODUCTS void moebatch_multiply(struct product_work *works) {
    struct product_work *end = works + works->num_products;
    int64_t num_bytes = 0;
    for (struct product_work *w = works; w < end; w++) {
        ProductRoom room;
        num_bytes = larger(num_bytes, divide_room(w, divided(w, multiplies_pairs(w)), &room, NULL));
    }
    char *memory = aligned_alloc(64, num_bytes);
    if (!memory) {
        __atomic_store_n(&works->has_failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (struct product_work *w = works; w < end; w++) {
        if (w->after)
            await(w - w->after);
        multiply_product(w, memory);
    }
    free(memory);
}
