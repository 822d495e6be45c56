/* Weights as codes of four or eight bits, with scales for blocks: see formats/coded.py.

   Codes become float32 a lot at a time. Those of four bits are looked up in a table of what the
   sixteen of them stand for, which is made, and rounded, once a step; even ones are in the first
   vector and odd ones in the second, as with bfloat16, since two neighbours lie in one byte. Where
   a table is two vectors, integers that are not rounded are computed, and signs of e2m1 put beside
   their sizes. Those of eight bits are computed, in their order. Scales and zero points are looked
   up once for STEP_INPUTS inputs of a row.

   In ggml's blocks, codes and scales lie side by side, and codes in parts: such codes get a byte
   each first, and are computed then as those of eight bits are.

   Words of GPTQ and AWQ lie across: a word's neighbours are those of other outputs. So the codes of
   some outputs are put in rows first, near the core that decodes them. */

/* Beside the types of numbers: what weights are that have a coding. */
enum { CODED = 5 };
enum { NIBBLE_CODE, INT8_CODE, UINT8_CODE, E4M3_CODE, INT4_CODE, E2M1_CODE };
/* Blocks of ggml, in which the scales are as well: of 32 inputs, then of 256. */
enum { Q8_0_CODE = 6, Q4_0_CODE, Q4_1_CODE, Q5_0_CODE, Q5_1_CODE, IQ4_NL_CODE, MXFP4_CODE };
enum { Q2_K_CODE = MXFP4_CODE + 1, Q3_K_CODE, Q4_K_CODE, Q5_K_CODE, Q6_K_CODE, IQ4_XS_CODE };
/* Of these, codes are places in a grid. */
enum { IQ3_S_CODE = IQ4_XS_CODE + 1, IQ3_XXS_CODE, IQ2_S_CODE, IQ2_XS_CODE, IQ2_XXS_CODE };
enum { IQ1_M_CODE = IQ2_XXS_CODE + 1, IQ1_S_CODE };
/* E4M3 whose steps have a power that is missing in the numbers, and of which none is NaN. A byte
   each: codes of blocks, with a sign, and without one but with an offset; codes of which each has
   a step of its own. */
enum { E4M3_SHIFTED_CODE = IQ1_S_CODE + 1, SPREAD_CODE, OFFSET_CODE, GROUPED_CODE };
/* Scales have one of the three types of numbers, or one of these. */
enum { E4M3_SCALE = 3, E8M0_SCALE };
/* How codes lie: in rows; words of inputs, a row of words for each of them (GPTQ); words of outputs,
   in an order of theirs, a row for each input (AWQ). */
enum { IN_ROWS, INPUT_WORDS, OUTPUT_WORDS };

/* The same as Coding in codes.py. */
struct coding {
    const char *codes;  /* rows, or rows of words, code_row bytes apart */
    const char *scales; /* rows scale_row numbers apart; NULL if they lie among the codes */
    const char *zeros;  /* rows zero_row words apart, or NULL */
    const void *values; /* float [16] of what has four bits; int8 of blocks that look codes up */
    const int32_t *groups; /* of each input; NULL where neighbours share one */
    int64_t code_row, scale_row, zero_row;
    int64_t scale_column, zero_column; /* from one block to the next */
    int64_t block_rows, block_columns; /* a multiple of STEP_INPUTS, or at least a row */
    int64_t num_groups; /* of a row, if inputs name theirs; MOST_GROUPS at most */
    float factor, zero; /* the latter where there are no zeros */
    int32_t divides; /* scales by the factor */
    int32_t numbers, scale_dtype;
    int32_t rounds_to; /* FLOAT32 if it does not */
    int32_t is_high_first; /* of two neighbours in a byte */
    int32_t lies; /* how codes do, and in words of outputs zero points as well */
    int32_t zero_added; /* to zero points, in as many bits as they have */
};

#define STEP_INPUTS 16
/* Inputs of a row that are decoded at a time. */
#define MOST_CODES 2048
#define MOST_STEPS (MOST_CODES / STEP_INPUTS)
/* The same as in codes.py. */
#define MOST_GROUPS 1024
/* Rows from codes that are decoded to those that are fetched: as many as become a tile at the most.
   Each fetches a little, as a processor waits for many lines at once (Zen 3, two cores, codes from
   memory: one row is multiplied by Q4_K 1.25 and by Q8_0 1.2 times as fast as where all lines of the
   next rows are fetched together, and 16 rows as fast; twice as far ahead makes no difference). */
#define FETCHED_ROWS 6

/* Of some inputs of a row: (number - zero) * step, of the (i >> shift)-th step. */
typedef struct {
    float steps[MOST_GROUPS], zeros[MOST_GROUPS]; /* MOST_STEPS, or those of all groups of a row */
    const int32_t *groups; /* of each input, if they name theirs */
    int64_t num_groups;
    int shift;
} Steps;

/* The same of blocks of ggml: number * step - zero. */
typedef struct {
    float steps[MOST_STEPS], zeros[MOST_STEPS];
} BlockSteps;

/* Rows that are decoded side by side, at most; and rows of blocks. */
#define MOST_BESIDE 2
#define MOST_BLOCKS_BESIDE 6
/* Rows with which they may be multiplied then. */
#define MOST_ROWS_BESIDE 4

/* Where vectors of a row go, one after the other: into memory, or to the sums of rows by which they
   are multiplied where they are, in a register. */
typedef struct {
    char *to;       /* the next place, others `step` bytes apart */
    int64_t step;
    const float *x; /* the same inputs of these rows, side by side; then x_step numbers on */
    int64_t x_step;
    int num_rows;   /* 0: into memory */
    Floats sums[MOST_ROWS_BESIDE]; /* of num_rows */
} Sink;

INLINE void multiply_vector(Sink *sink, int row, Floats vector, int is_pairs) {
    if (row >= sink->num_rows)
        return;
    const Floats x = read_floats(sink->x + row * LANES), sum = sink->sums[row];
    sink->sums[row] = (is_pairs ? add_pairs : add_product_of)(sum, x, vector);
}

/* A vector of floats, or of pairs. */
INLINE void put(Sink *sink, Floats vector, int is_pairs) {
    if (!sink->num_rows) {
        memcpy(sink->to, &vector, sizeof vector);
        sink->to += sink->step;
        return;
    }
    /* No loop: compilers would leave the sums of one in memory. */
    multiply_vector(sink, 0, vector, is_pairs);
    multiply_vector(sink, 1, vector, is_pairs);
    multiply_vector(sink, 2, vector, is_pairs);
    multiply_vector(sink, 3, vector, is_pairs);
    sink->x += sink->x_step;
}

INLINE int bits_of(int numbers) {
    return numbers == NIBBLE_CODE || numbers == INT4_CODE || numbers == E2M1_CODE ? 4 : 8;
}

/* Inputs and bytes of a block of ggml; none of other numbers. */
INLINE int block_inputs(int numbers) {
    return numbers < Q8_0_CODE || numbers > IQ1_S_CODE ? 0 : numbers < Q2_K_CODE ? 32 : 256;
}

INLINE int block_bytes(int numbers) {
    const int sizes[] = {34,  18,  20,  22,  24, 18, 17, 84, 110, 144,
                         176, 210, 136, 110, 98, 82, 74, 66, 56,  50};
    return block_inputs(numbers) ? sizes[numbers - Q8_0_CODE] : 0;
}

/* Those of so many inputs of a row, which are whole blocks. */
INLINE int64_t code_bytes(int numbers, int64_t num) {
    if (block_inputs(numbers))
        return num / block_inputs(numbers) * block_bytes(numbers);
    return (num * bits_of(numbers) + 7) / 8;
}

/* Those of a row from an input on. */
INLINE const char *codes_at(const struct coding *c, int64_t row, int64_t first) {
    return c->codes + row * c->code_row + code_bytes(c->numbers, first);
}

/* Inputs that are decoded together start at a multiple of it. */
INLINE int64_t decoded_unit(int numbers) { return larger(block_inputs(numbers), STEP_INPUTS); }

/* The order in a lot is that of this type. */
INLINE int order_of(const struct coding *c) {
    return bits_of(c->numbers) == 4 && !c->groups ? BFLOAT16 : FLOAT32;
}

INLINE float half_at(const char *p) {
    uint16_t half;
    memcpy(&half, p, sizeof half);
    return float_of_half(half);
}

/* --- scales and zero points --------------------------------------------------------------------*/

/* A word for each byte. Compilers take vectors apart where they convert so. */
INLINE Words bytes_at(const char *p) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    uint8_t bytes[LANES];
    Words words;
    memcpy(bytes, p, sizeof bytes);
    for (int i = 0; i < LANES; i++)
        words[i] = bytes[i];
    return words;
#endif
}

/* E8M0_SCALE; writes LANES of them at least. The last vector overlaps the one before. */
INLINE void widen_powers(float *out, const char *bytes, int64_t num) {
    char room[LANES] = {0};
    if (num < LANES)
        bytes = memcpy(room, bytes, num);
    for (int64_t i = 0; i < num; i += LANES) {
        const int64_t first = smaller(i, larger(num - LANES, 0));
        const Words exponents = bytes_at(bytes + first);
        const Words none = (Words)(exponents == 0), all = (Words)(exponents == 255);
        const Words bits = exponents << 23 | (none & 1u << 22) | (all & 0x7fc00000u);
        write_floats(out + first, (Floats)bits);
    }
}

INLINE int64_t scale_bytes(int scale_dtype) {
    return scale_dtype == FLOAT32 ? 4 : scale_dtype == E4M3_SCALE || scale_dtype == E8M0_SCALE ? 1 : 2;
}

INLINE void widen_scales(float *out, const struct coding *c, int64_t row, int64_t column,
                         int64_t num) {
    const int64_t size = scale_bytes(c->scale_dtype);
    const char *scales = c->scales + (row * c->scale_row + column * c->scale_column) * size;
    char near[MOST_GROUPS * sizeof(float)];
    if (c->scale_column != 1) {
        for (int64_t i = 0; i < num; i++)
            for (int64_t byte = 0; byte < size; byte++)
                near[i * size + byte] = scales[i * c->scale_column * size + byte];
        scales = near;
    }
    switch (c->scale_dtype) {
    case E8M0_SCALE:
        widen_powers(out, scales, num);
        break;
    case E4M3_SCALE:
        for (int64_t i = 0; i < num; i++) {
            const uint32_t code = (uint8_t)scales[i], size_bits = code & 127u;
            const uint32_t bits = (code & 128u) << 24 | size_bits << 20;
            out[i] = float_of(size_bits == 127 ? 0x7fc00000u : bits) * 0x1p120f;
        }
        break;
    case FLOAT32:
        memcpy(out, scales, num * 4);
        break;
    case BFLOAT16:
        for (int64_t i = 0; i < num; i++) {
            uint16_t bits;
            memcpy(&bits, scales + 2 * i, sizeof bits);
            out[i] = float_of((uint32_t)bits << 16);
        }
        break;
    default:
        for (int64_t i = 0; i < num; i++)
            out[i] = half_at(scales + 2 * i);
        break;
    }
}

/* Where AWQ has the code of an output among the eight of its word. */
INLINE int place_in_word(int64_t output) { return output % 2 * 4 + output % 8 / 2; }

/* Codes that stand for nothing, for numbers that are offset. */
INLINE void find_zeros(float *out, const struct coding *c, int64_t row, int64_t column,
                       int64_t num) {
    const int bits = bits_of(c->numbers), of_word = 32 / bits;
    if (!c->zeros) {
        for (int64_t i = 0; i < num; i++)
            out[i] = c->zero;
        return;
    }
    const char *words = c->zeros + (row / of_word * c->zero_row + column * c->zero_column) * 4;
    const int64_t place = c->lies == OUTPUT_WORDS ? place_in_word(row) : row % of_word;
    const uint32_t shift = place * bits, mask = (1u << bits) - 1;
    for (int64_t i = 0; i < num; i++) {
        uint32_t word;
        memcpy(&word, words + 4 * i * c->zero_column, sizeof word);
        out[i] = (float)(int32_t)(((word >> shift) + c->zero_added) & mask);
    }
}

/* In place: numbers for blocks become such for STEP_INPUTS inputs. */
INLINE void repeat_blocks(float *numbers, int64_t before, int64_t block, int64_t num) {
    for (int64_t i = num - 1; i >= 0; i--)
        numbers[i] = numbers[(before + i * STEP_INPUTS) / block];
}

/* Those of so many blocks of a row. */
INLINE void find_block_numbers(const struct coding *c, int64_t row, int64_t column, int64_t num,
                               float *steps, float *zeros) {
    widen_scales(steps, c, row / c->block_rows, column, num);
    const float factor = c->factor;
    if (c->divides)
        for (int64_t i = 0; i < num; i++)
            steps[i] /= factor;
    else if (factor != 1)
        for (int64_t i = 0; i < num; i++)
            steps[i] *= factor;
    for (int64_t i = 0; i < num; i++) /* rounding leaves a NaN of this one */
        steps[i] = steps[i] == steps[i] ? steps[i] : NAN;
    find_zeros(zeros, c, row, column, num);
}

/* Those of so many inputs, from a multiple of STEP_INPUTS on. */
INLINE void find_steps(const struct coding *c, int64_t row, int64_t first, int64_t num,
                       Steps *found) {
    const int64_t block = c->block_columns, column = first / block, before = first - column * block;
    const int64_t num_blocks = (before + num - 1) / block + 1;
    find_block_numbers(c, row, column, num_blocks, found->steps, found->zeros);
    found->shift = 63;
    if (num_blocks == 1)
        return;
    found->shift = __builtin_ctzll(block);
    if (before || block >> found->shift != 1) {
        const int64_t num_steps = (num + STEP_INPUTS - 1) / STEP_INPUTS;
        repeat_blocks(found->steps, before, block, num_steps);
        repeat_blocks(found->zeros, before, block, num_steps);
        found->shift = 4;
    }
    /* The last lot may reach a step farther. Zeros are multiplied there, by numbers that must not be
       NaN. */
    const int64_t num_steps = ((num - 1) >> found->shift) + 1;
    if (num_steps < MOST_STEPS)
        found->steps[num_steps] = found->zeros[num_steps] = 0;
}

/* Whether all of these steps can have 2^120 as a factor. */
INLINE int are_small(const Steps *s, int64_t num) {
    int are = 1;
    for (int64_t i = 0; i < num; i++)
        are &= s->steps[i] < 128 && s->steps[i] > -128;
    return are;
}

/* As `dtype` would keep it. NaN stays only if its lower half is nothing. */
INLINE Floats rounded_to(Floats x, int dtype) {
    if (dtype == FLOAT32)
        return x;
    if (dtype == BFLOAT16) {
        Words bits = (Words)x;
        return (Floats)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
    }
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(
        _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < LANES; i++)
        x[i] = float_of_half(half_of(x[i]));
    return x;
#endif
}

/* --- codes of four bits ------------------------------------------------------------------------*/

#define NUM_NIBBLES 16

/* What they stand for. */
typedef struct {
    Floats numbers[NUM_NIBBLES / LANES];
} Table;

/* Of the i-th of the inputs that have these steps. */
INLINE Table table_of(const struct coding *c, const Steps *s, int64_t i, int rounds_to) {
    const float step = s->steps[i >> s->shift], zero = s->zeros[i >> s->shift];
    Table table;
#pragma GCC unroll 4
    for (int v = 0; v < NUM_NIBBLES / LANES; v++) {
        Floats number = read_floats((const float *)c->values + v * LANES) - zero;
        table.numbers[v] = rounded_to(number * step, rounds_to);
    }
    return table;
}

/* Of the four lowest bits of each word. */
INLINE Floats looked_up(const Table *table, Words nibbles) {
#if defined(__AVX512F__)
    return (Floats)_mm512_permutexvar_ps((__m512i)nibbles, (__m512)table->numbers[0]);
#elif defined(__AVX2__)
    __m256 lower = _mm256_permutevar8x32_ps((__m256)table->numbers[0], (__m256i)nibbles);
    __m256 upper = _mm256_permutevar8x32_ps((__m256)table->numbers[1], (__m256i)nibbles);
    return (Floats)_mm256_blendv_ps(lower, upper, (__m256)(nibbles << 28));
#else
    Floats found;
    for (int i = 0; i < LANES; i++)
        found[i] = ((const float *)table)[nibbles[i] & 15];
    return found;
#endif
}

/* Tables of a lot: those of its first and of its last STEP_INPUTS inputs. */
typedef struct {
    Table first, second;
    Words pairs; /* both, as bfloat16 */
} Tables;

INLINE Tables tables_of(const struct coding *c, const Steps *s, int64_t i, int rounds_to,
                        int has_two_steps) {
    Tables tables;
    tables.first = tables.second = table_of(c, s, i, rounds_to);
    if (has_two_steps)
        tables.second = table_of(c, s, i + STEP_INPUTS, rounds_to);
#if HAS_PAIRS
    tables.pairs = (Words)_mm512_cvtne2ps_pbh((__m512)tables.second.numbers[0],
                                              (__m512)tables.first.numbers[0]);
#endif
    return tables;
}

/* A lot, of one step or of two. */
INLINE void decode_nibbles(Sink *sink, const char *codes, const Tables *tables, int has_two_steps,
                           int is_high_first, int is_pairs) {
    Words bytes = bytes_at(codes);
    if (is_high_first)
        bytes = bytes >> 4 | (bytes & 15) << 4;
#if HAS_PAIRS
    if (is_pairs) {
        const Words upper = {0,        0,        0,        0,        0,        0,
                             0,        0,        0x100010, 0x100010, 0x100010, 0x100010,
                             0x100010, 0x100010, 0x100010, 0x100010};
        Words places = (bytes | bytes << 12) & 0x000f000f;
        if (has_two_steps)
            places |= upper;
        Words pairs = (Words)_mm512_permutexvar_epi16((__m512i)places, (__m512i)tables->pairs);
        put(sink, (Floats)pairs, 1);
        return;
    }
#endif
    Floats even = looked_up(&tables->first, bytes), odd = looked_up(&tables->first, bytes >> 4);
#if LANES == 16
    if (has_two_steps) {
        Floats later_even = looked_up(&tables->second, bytes);
        Floats later_odd = looked_up(&tables->second, bytes >> 4);
        even = (Floats)_mm512_mask_blend_ps(0xff00, (__m512)even, (__m512)later_even);
        odd = (Floats)_mm512_mask_blend_ps(0xff00, (__m512)odd, (__m512)later_odd);
    }
#endif
    put(sink, even, 0);
    put(sink, odd, 0);
}

/* sizes[word & 7], with a sign. */
INLINE Floats with_sign(Floats sizes, Words words, Words signs) {
#if defined(__AVX2__) && LANES == 8
    sizes = (Floats)_mm256_permutevar8x32_ps((__m256)sizes, (__m256i)words);
#endif
    return (Floats)((Words)sizes ^ (signs & 0x80000000u));
}

/* A lot, all of one step, of codes that are looked up otherwise: INT4_CODE, or E2M1_CODE. */
INLINE void compute_nibbles(Sink *sink, const struct coding *c, const char *codes, const Steps *s,
                            int64_t i, int numbers, int rounds_to) {
    const float size = s->steps[i >> s->shift], zero = s->zeros[i >> s->shift];
    Words bytes = bytes_at(codes);
    if (c->is_high_first)
        bytes = bytes >> 4 | (bytes & 15) << 4;
    Floats even, odd;
    if (numbers == INT4_CODE) {
        even = (__builtin_convertvector((Ints)(bytes & 15), Floats) - zero) * size;
        odd = (__builtin_convertvector((Ints)(bytes >> 4), Floats) - zero) * size;
    } else {
        const Floats sizes = rounded_to(read_floats(c->values) * size, rounds_to);
        even = with_sign(sizes, bytes, bytes << 28);
        odd = with_sign(sizes, bytes >> 4, bytes << 24);
    }
    put(sink, even, 0);
    put(sink, odd, 0);
}

/* --- codes of eight bits -----------------------------------------------------------------------*/

/* LANES of them; e4m3 of E4M3_SHIFTED_CODE are 2^120 times too small. */
INLINE Floats numbers_at(const char *codes, int numbers) {
    if (numbers == UINT8_CODE || numbers == OFFSET_CODE || numbers == GROUPED_CODE)
        return __builtin_convertvector((Ints)bytes_at(codes), Floats);
    const Words bytes = (Words)read_whole(codes);
    if (numbers == INT8_CODE || numbers == SPREAD_CODE)
        return __builtin_convertvector((Ints)bytes, Floats);
    const Words bits = (bytes << 20) & 0x87f00000u;
    if (numbers == E4M3_SHIFTED_CODE)
        return (Floats)bits;
    const Words is_nan = (Words)((bits & 0x07f00000u) == 0x07f00000u);
    return (Floats)((Words)((Floats)bits * 0x1p120f) | (is_nan & 0x7fc00000u));
}

/* LANES of the numbers. */
INLINE Floats picked(const float *numbers, const int32_t *places, int64_t num) {
#if defined(__AVX512F__)
    const __m512i wanted = _mm512_loadu_si512(places);
    if (num <= 64) { /* Zen 4: a product of one row takes 2.6 ms instead of 7.1 */
        __m512 found = _mm512_permutex2var_ps(_mm512_loadu_ps(numbers), wanted,
                                              _mm512_loadu_ps(numbers + 16));
        if (num <= 32)
            return (Floats)found;
        __m512 later = _mm512_permutex2var_ps(_mm512_loadu_ps(numbers + 32), wanted,
                                              _mm512_loadu_ps(numbers + 48));
        const __mmask16 is_later = _mm512_test_epi32_mask(wanted, _mm512_set1_epi32(32));
        return (Floats)_mm512_mask_blend_ps(is_later, found, later);
    }
    return (Floats)_mm512_i32gather_ps(wanted, numbers, 4);
#elif defined(__AVX2__)
    return (Floats)_mm256_i32gather_ps(numbers, _mm256_loadu_si256((const __m256i *)places), 4);
#else
    Floats found;
    for (int i = 0; i < LANES; i++)
        found[i] = numbers[places[i]];
    return found;
#endif
}

/* A lot, the first of them the i-th of those that have these steps. */
INLINE void decode_bytes(Sink *sink, const char *codes, const Steps *s, int64_t i, int numbers,
                         int rounds_to, int is_pairs) {
    Floats halves[2];
    float size = 0, zero = 0;
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++, i += LANES) {
        Floats number = numbers_at(codes + half * LANES, numbers);
        if (numbers != GROUPED_CODE && (half == 0 || LOT > STEP_INPUTS)) {
            size = s->steps[i >> s->shift];
            zero = s->zeros[i >> s->shift];
        }
        if (numbers == UINT8_CODE)
            number -= zero;
        if (numbers == GROUPED_CODE)
            number = (number - picked(s->zeros, s->groups + i, s->num_groups)) *
                     picked(s->steps, s->groups + i, s->num_groups);
        else
            number *= size;
        halves[half] = rounded_to(number, rounds_to);
        if (!is_pairs)
            put(sink, halves[half], 0);
    }
#if HAS_PAIRS
    if (is_pairs) {
        __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)halves[1], (__m512)halves[0]);
        put(sink, (Floats)pairs, 1);
    }
#endif
}

/* Into the second-level cache: the codes of a later row that lie below these. They need not exist. */
INLINE void fetch_codes(const struct coding *c, const char *codes) {
    __builtin_prefetch(codes + FETCHED_ROWS * c->code_row, 0, 2);
}

/* --- blocks of ggml ----------------------------------------------------------------------------*/

/* A part of the codes: so many bits of each byte, from a place on; none of no bits. */
typedef struct {
    const char *bytes;
    int place, bits;
} Part;

INLINE uint8_t bits_in(Part part, int i) {
    return (uint8_t)part.bytes[i] >> part.place & ((1 << part.bits) - 1);
}

/* A byte for each of so many codes: its low part, above it the high one; less `zero`. */
INLINE void spread_codes(uint8_t *restrict to, Part low, Part high, int zero, int num) {
#pragma omp simd
    for (int i = 0; i < num; i++) {
        const uint8_t upper = high.bits ? bits_in(high, i) << low.bits : 0;
        to[i] = (bits_in(low, i) | upper) - zero;
    }
}

/* 32 codes of four bits: all low ones of 16 bytes, then all high ones. */
INLINE void spread_halves(uint8_t *to, const char *bytes, int zero) {
    spread_codes(to, (Part){bytes, 0, 4}, (Part){}, zero, 16);
    spread_codes(to + 16, (Part){bytes, 4, 4}, (Part){}, zero, 16);
}

typedef int8_t Eight __attribute__((vector_size(8)));
typedef float EightFloats __attribute__((vector_size(32)));

/* All bits of each place whose bit is set. */
INLINE Eight spread_bits(int bits) {
    const Eight each = {1, 2, 4, 8, 16, 32, 64, -128};
    return (((Eight){} + (int8_t)bits) & each) == each;
}

/* The same with a fifth bit, which are 32 in a row. */
INLINE void spread_fives(uint8_t *to, const char *fifths, const char *bytes, int zero) {
    char high[32];
    for (int i = 0; i < 4; i++) {
        const Eight eight = spread_bits(fifths[i]);
        memcpy(high + 8 * i, &eight, sizeof eight);
    }
    spread_codes(to, (Part){bytes, 0, 4}, (Part){high, 0, 1}, zero, 16);
    spread_codes(to + 16, (Part){bytes, 4, 4}, (Part){high + 16, 0, 1}, zero, 16);
}

/* What 32 codes of four bits stand for, in whole numbers. */
INLINE void look_up_halves(uint8_t *to, const char *bytes, const int8_t *values) {
    spread_halves(to, bytes, 0);
#if defined(__SSSE3__)
    const __m128i table = _mm_loadu_si128((const __m128i *)values);
    for (__m128i *half = (__m128i *)to; half < (__m128i *)to + 2; half++)
        _mm_storeu_si128(half, _mm_shuffle_epi8(table, _mm_loadu_si128(half)));
#else
    for (int i = 0; i < 32; i++)
        to[i] = values[to[i]];
#endif
}

/* The codes of a block of 32, a byte each. */
INLINE void spread_short_block(uint8_t *to, const char *block, const int8_t *values, int numbers) {
    switch (numbers) {
    case Q8_0_CODE:
        memcpy(to, block + 2, 32);
        break;
    case Q4_0_CODE:
        spread_halves(to, block + 2, 8);
        break;
    case Q4_1_CODE:
        spread_halves(to, block + 4, 0);
        break;
    case Q5_0_CODE:
        spread_fives(to, block + 2, block + 6, 16);
        break;
    case Q5_1_CODE:
        spread_fives(to, block + 4, block + 8, 0);
        break;
    case IQ4_NL_CODE:
        look_up_halves(to, block + 2, values);
        break;
    case MXFP4_CODE:
        look_up_halves(to, block + 1, values);
        break;
    }
}

/* Those of the run-th 32 of a block of 256. Codes of four bits lie in pairs of runs, and so do the
   lower ones of Q6_K, 64 bytes for two pairs; those of two bits in fours. */
INLINE void spread_run(uint8_t *to, const char *block, int run, const int8_t *values,
                       int numbers) {
    const int pair = run / 2 * 32, four = run / 4 * 32;
    const int nibble = run % 2 * 4, crumb = run % 4 * 2;
    switch (numbers) {
    case Q2_K_CODE:
        spread_codes(to, (Part){block + 16 + four, crumb, 2}, (Part){}, 0, 32);
        break;
    case Q3_K_CODE:
        spread_codes(to, (Part){block + 32 + four, crumb, 2}, (Part){block, run, 1}, 4, 32);
        break;
    case Q4_K_CODE:
        spread_codes(to, (Part){block + 16 + pair, nibble, 4}, (Part){}, 0, 32);
        break;
    case Q5_K_CODE:
        spread_codes(to, (Part){block + 48 + pair, nibble, 4}, (Part){block + 16, run, 1}, 0, 32);
        break;
    case Q6_K_CODE:
        spread_codes(to, (Part){block + 2 * four + run % 2 * 32, run % 4 / 2 * 4, 4},
                     (Part){block + 128 + four, crumb, 2}, 32, 32);
        break;
    case IQ4_XS_CODE:
        look_up_halves(to, block + 8 + 16 * run, values);
        break;
    }
}

/* Eight numbers of a grid, whose bits say which of them are negative. */
INLINE void put_signed(uint8_t *to, Eight eight, int negative) {
    const Eight signs = spread_bits(negative);
    eight = (eight ^ signs) - signs;
    memcpy(to, &eight, sizeof eight);
}

/* Eight eighths of a grid, each with one more, or one less. */
INLINE void put_shifted(uint8_t *to, Eight eight, int is_less) {
    eight += (int8_t)(is_less ? -1 : 1);
    memcpy(to, &eight, sizeof eight);
}

INLINE Eight eight_at(const int8_t *grid, int place) {
    Eight eight;
    memcpy(&eight, grid + 8 * place, sizeof eight);
    return eight;
}

/* Of two places of a grid of fours. */
INLINE Eight twice_four_at(const int8_t *grid, int first, int second) {
    Eight eight;
    memcpy(&eight, grid + 4 * first, 4);
    memcpy((char *)&eight + 4, grid + 4 * second, 4);
    return eight;
}

INLINE int byte_at(const char *p) { return (uint8_t)*p; }

INLINE int half_word_at(const char *p) { return byte_at(p) | byte_at(p + 1) << 8; }

/* Seven signs of which the eighth makes their number even. */
INLINE int all_signs(uint32_t seven) { return seven | __builtin_parity(seven) << 7; }

/* The k-th eight codes of the run-th 32 of a block, of whole numbers of a grid. */
INLINE void spread_eight(uint8_t *to, const char *block, int run, int k, const int8_t *grid,
                         int numbers) {
    const int i = 4 * run + k;
    uint32_t word;
    int place, third;
    switch (numbers) {
    case IQ3_S_CODE:
        third = byte_at(block + 66 + run) >> 2 * k;
        place = byte_at(block + 2 + 2 * i) | (third & 1) << 8;
        put_signed(to, twice_four_at(grid, place, byte_at(block + 3 + 2 * i) | (third & 2) << 7),
                   block[74 + i]);
        break;
    case IQ3_XXS_CODE:
        memcpy(&word, block + 66 + 4 * run, sizeof word);
        put_signed(to, twice_four_at(grid, byte_at(block + 2 + 2 * i), byte_at(block + 3 + 2 * i)),
                   all_signs(word >> 7 * k & 127));
        break;
    case IQ2_S_CODE:
        place = byte_at(block + 2 + i) | (byte_at(block + 66 + run) >> 2 * k & 3) << 8;
        put_signed(to, eight_at(grid, place), block[34 + i]);
        break;
    case IQ2_XS_CODE:
        place = half_word_at(block + 2 + 2 * i);
        put_signed(to, eight_at(grid, place & 511), all_signs(place >> 9));
        break;
    case IQ2_XXS_CODE:
        memcpy(&word, block + 6 + 8 * run, sizeof word);
        put_signed(to, eight_at(grid, byte_at(block + 2 + 8 * run + k)),
                   all_signs(word >> 7 * k & 127));
        break;
    case IQ1_M_CODE:
        third = byte_at(block + 32 + i / 2) >> k % 2 * 4;
        put_shifted(to, eight_at(grid, byte_at(block + i) | (third & 7) << 8), third & 8);
        break;
    case IQ1_S_CODE:
        third = half_word_at(block + 34 + 2 * run);
        put_shifted(to, eight_at(grid, byte_at(block + 2 + i) | (third >> 3 * k & 7) << 8),
                    third & 0x8000);
        break;
    }
}

/* The codes of a block, a byte each. */
INLINE void spread_block(uint8_t *to, const char *block, const int8_t *values, int numbers) {
    if (block_inputs(numbers) == 32) {
        spread_short_block(to, block, values, numbers);
        return;
    }
#pragma GCC unroll 8
    for (int run = 0; run < 8; run++, to += 32)
        if (numbers < IQ3_S_CODE)
            spread_run(to, block, run, values, numbers);
        else
            for (int k = 0; k < 4; k++)
                spread_eight(to + 8 * k, block, run, k, values, numbers);
}

/* So many bytes, as many as vectors hold, as numbers. */
INLINE void widen_bytes(float *numbers, const uint8_t *bytes, int num) {
    for (int i = 0; i < num; i += LANES) {
        const Words whole = bytes_at((const char *)bytes + i);
        write_floats(numbers + i, __builtin_convertvector((Ints)whole, Floats));
    }
}

/* Eight numbers times a factor. Of a loop over them compilers make eight products. */
INLINE void put_times(float *to, const float *numbers, float factor) {
    EightFloats eight;
    memcpy(&eight, numbers, sizeof eight);
    eight *= factor;
    memcpy(to, &eight, sizeof eight);
}

/* The steps of Q4_K and Q5_K, and what is taken off: 8 of each, in six bits of 12 bytes. */
INLINE void find_offset_steps(float *steps, float *zeros, const char *block) {
    uint32_t words[3], split[4];
    float numbers[16];
    memcpy(words, block + 4, sizeof words);
    for (int i = 0; i < 2; i++) {
        split[2 * i] = words[i] & 0x3f3f3f3fu;
        split[2 * i + 1] = (words[2] >> 4 * i & 0x0f0f0f0fu) | (words[i] >> 2 & 0x30303030u);
    }
    widen_bytes(numbers, (const uint8_t *)split, 16);
    put_times(steps, numbers, half_at(block));
    put_times(zeros, numbers + 8, half_at(block + 2));
}

/* Those of Q2_K: 16 of each, in four bits. */
INLINE void find_nibble_steps(float *steps, float *zeros, const char *block) {
    const float scale = half_at(block + 80), offset = half_at(block + 82);
    for (int i = 0; i < 16; i += LANES) {
        const Words both = bytes_at(block + i);
        write_floats(steps + i, __builtin_convertvector((Ints)(both & 15), Floats) * scale);
        write_floats(zeros + i, __builtin_convertvector((Ints)(both >> 4), Floats) * offset);
    }
}

/* The 16 of Q3_K, in six bits: four of eight bytes, two of four. */
INLINE void find_split_steps(float *steps, const char *block) {
    uint32_t words[3], whole[4];
    memcpy(words, block + 96, sizeof words);
    for (int i = 0; i < 4; i++)
        whole[i] = (words[i % 2] >> i / 2 * 4 & 0x0f0f0f0fu) | (words[2] >> 2 * i & 0x03030303u) << 4;
    const float scale = half_at(block + 108);
    widen_bytes(steps, (const uint8_t *)whole, 16);
    for (int i = 0; i < 16; i++)
        steps[i] = (steps[i] - 32) * scale;
}

/* The 8 of IQ4_XS: four bits of four bytes, two of a half word. */
INLINE void find_curved_steps(float *steps, const char *block) {
    uint16_t high;
    memcpy(&high, block + 2, sizeof high);
    const float scale = half_at(block);
    for (int i = 0; i < 8; i++) {
        const int low = (uint8_t)block[4 + i / 2] >> i % 2 * 4 & 15;
        steps[i] = ((low | (high >> 2 * i & 3) << 4) - 32) * scale;
    }
}

/* Those of codes in a grid, in three or four bits; returns how many they are. */
INLINE int find_grid_steps(float *steps, const char *block, int numbers) {
    float scale = half_at(block);
    uint32_t word;
    switch (numbers) {
    case IQ3_S_CODE:
        for (int i = 0; i < 8; i++)
            steps[i] = (1 + 2 * (byte_at(block + 106 + i / 2) >> i % 2 * 4 & 15)) * scale;
        return 8;
    case IQ3_XXS_CODE:
    case IQ2_XXS_CODE:
        for (int i = 0; i < 8; i++) {
            const int place = numbers == IQ3_XXS_CODE ? 66 + 4 * i : 6 + 8 * i;
            memcpy(&word, block + place, sizeof word);
            const float half_steps = scale * (0.5f + (float)(word >> 28));
            steps[i] = half_steps * (numbers == IQ3_XXS_CODE ? 0.5f : 0.25f);
        }
        return 8;
    case IQ2_S_CODE:
    case IQ2_XS_CODE:
        for (int i = 0; i < 16; i++) {
            const char *both = block + (numbers == IQ2_S_CODE ? 74 : 66) + i / 2;
            steps[i] = scale * (0.5f + (float)(byte_at(both) >> i % 2 * 4 & 15)) * 0.25f;
        }
        return 16;
    case IQ1_S_CODE:
        for (int i = 0; i < 8; i++) {
            const int whole = half_word_at(block + 34 + 2 * i) >> 12 & 7;
            steps[i] = scale * (float)(2 * whole + 1) * 0.125f;
        }
        return 8;
    default: { /* IQ1_M, whose scale lies above those of its quarters */
        uint16_t words[4];
        memcpy(words, block + 48, sizeof words);
        const uint16_t half = words[0] >> 12 | (words[1] >> 8 & 0xf0) | (words[2] >> 4 & 0xf00) |
                              (words[3] & 0xf000);
        scale = half_at((const char *)&half);
        for (int i = 0; i < 16; i++) {
            const int whole = words[i / 4] >> i % 4 * 3 & 7;
            steps[i] = scale * (float)(2 * whole + 1) * 0.125f;
        }
        return 16;
    }
    }
}

/* Half a power of two, by its exponent. */
INLINE float half_power(uint8_t exponent) {
    return float_of(exponent < 2 ? 0x00200000u << exponent : (uint32_t)(exponent - 1) << 23);
}

/* Those of a block; returns how many they are. */
INLINE int find_block_steps(float *steps, float *zeros, const char *block, int numbers) {
    if (numbers >= IQ3_S_CODE)
        return find_grid_steps(steps, block, numbers);
    switch (numbers) {
    case Q2_K_CODE:
        find_nibble_steps(steps, zeros, block);
        return 16;
    case Q3_K_CODE:
        find_split_steps(steps, block);
        return 16;
    case Q4_K_CODE:
    case Q5_K_CODE:
        find_offset_steps(steps, zeros, block);
        return 8;
    case Q6_K_CODE:
        for (int i = 0; i < 16; i += LANES) {
            const Ints whole = read_whole(block + 192 + i);
            const Floats numbers_of = __builtin_convertvector(whole, Floats);
            write_floats(steps + i, numbers_of * half_at(block + 208));
        }
        return 16;
    case IQ4_XS_CODE:
        find_curved_steps(steps, block);
        return 8;
    case MXFP4_CODE:
        *steps = half_power(*block);
        return 1;
    default:
        *steps = half_at(block);
        *zeros = numbers == Q4_1_CODE || numbers == Q5_1_CODE ? -half_at(block + 2) : 0;
        return 1;
    }
}

/* Whether something is taken off what codes make. */
INLINE int has_offsets(int numbers) {
    return numbers == Q4_1_CODE || numbers == Q5_1_CODE || numbers == Q2_K_CODE ||
           numbers == Q4_K_CODE || numbers == Q5_K_CODE;
}

/* Whether inputs share a step in sixteens; in others 32 do. */
INLINE int has_short_steps(int numbers) {
    return numbers == Q2_K_CODE || numbers == Q3_K_CODE || numbers == Q6_K_CODE ||
           numbers == IQ2_S_CODE || numbers == IQ2_XS_CODE || numbers == IQ1_M_CODE;
}

/* Codes of blocks in a row, a byte each, and their steps. Every type once: what is done with the
   bytes differs by no more than has_offsets and has_short_steps. */
static __attribute__((noinline)) void spread_blocks(uint8_t *codes, BlockSteps *s,
                                                    const char *blocks, const struct coding *c,
                                                    int64_t num) {
    switch (c->numbers) {
#define SPREAD(numbers)                                                                           \
    case numbers:                                                                                 \
        for (int64_t i = 0, found = 0; i < num; i += block_inputs(numbers)) {                     \
            for (int64_t line = 0; line < block_bytes(numbers); line += 64)                       \
                fetch_codes(c, blocks + line);                                                    \
            spread_block(codes + i, blocks, c->values, numbers);                                  \
            found += find_block_steps(s->steps + found, s->zeros + found, blocks, numbers);       \
            blocks += block_bytes(numbers);                                                       \
        }                                                                                         \
        return;
        SPREAD(Q8_0_CODE)
        SPREAD(Q4_0_CODE)
        SPREAD(Q4_1_CODE)
        SPREAD(Q5_0_CODE)
        SPREAD(Q5_1_CODE)
        SPREAD(IQ4_NL_CODE)
        SPREAD(MXFP4_CODE)
        SPREAD(Q2_K_CODE)
        SPREAD(Q3_K_CODE)
        SPREAD(Q4_K_CODE)
        SPREAD(Q5_K_CODE)
        SPREAD(Q6_K_CODE)
        SPREAD(IQ4_XS_CODE)
        SPREAD(IQ3_S_CODE)
        SPREAD(IQ3_XXS_CODE)
        SPREAD(IQ2_S_CODE)
        SPREAD(IQ2_XS_CODE)
        SPREAD(IQ2_XXS_CODE)
        SPREAD(IQ1_M_CODE)
        SPREAD(IQ1_S_CODE)
#undef SPREAD
    }
}

/* Every block has a multiple of so many inputs. */
#define CHUNK 32

/* A vector of such bytes. */
INLINE Floats decoded(const char *codes, float step, float zero, int has_offsets) {
    const Floats numbers = numbers_at(codes, has_offsets ? OFFSET_CODE : SPREAD_CODE) * step;
    /* Of 22 bits, so that it is exact, fused or not. */
    return has_offsets ? numbers - zero : numbers;
}

/* Rows of them that are decoded side by side. Vectors take turns, as each finds its inputs in
   registers then. */
INLINE void decode_chunks(Sink *sinks, int count, uint8_t (*codes)[MOST_CODES],
                          const BlockSteps *s, int64_t num, int has_offsets, int has_short_steps,
                          int is_pairs) {
    for (int64_t chunk = 0; chunk < num / CHUNK; chunk++) {
        const int64_t first = has_short_steps ? 2 * chunk : chunk;
#pragma GCC unroll 8
        for (int v = 0; v < CHUNK / LANES; v += 1 + is_pairs)
#pragma GCC unroll 6
            for (int o = 0; o < count; o++) {
                const char *bytes = (const char *)codes[o] + chunk * CHUNK + v * LANES;
                const int64_t step = first + has_short_steps * (v * LANES / STEP_INPUTS);
                Floats vector = decoded(bytes, s[o].steps[step], s[o].zeros[step], has_offsets);
#if HAS_PAIRS
                if (is_pairs) {
                    const int64_t next = first + has_short_steps * ((v + 1) * LANES / STEP_INPUTS);
                    const Floats other = decoded(bytes + LANES, s[o].steps[next], s[o].zeros[next],
                                                 has_offsets);
                    vector = (Floats)_mm512_cvtne2ps_pbh((__m512)other, (__m512)vector);
                }
#endif
                put(sinks + o, vector, is_pairs);
            }
    }
}

/* Up to MOST_CODES inputs of rows of blocks, side by side, of which the first is a multiple of their
   unit. */
INLINE void decode_blocks(Sink *sinks, int count, const struct coding *c, const int64_t *rows,
                          int64_t first, int64_t num, int is_pairs) {
    uint8_t codes[MOST_BLOCKS_BESIDE][MOST_CODES];
    BlockSteps s[MOST_BLOCKS_BESIDE];
    for (int o = 0; o < count; o++)
        spread_blocks(codes[o], s + o, codes_at(c, rows[o], first), c, num);
    const int is_short = has_short_steps(c->numbers);
    if (has_offsets(c->numbers) && is_short)
        decode_chunks(sinks, count, codes, s, num, 1, 1, is_pairs);
    else if (has_offsets(c->numbers))
        decode_chunks(sinks, count, codes, s, num, 1, 0, is_pairs);
    else if (is_short)
        decode_chunks(sinks, count, codes, s, num, 0, 1, is_pairs);
    else
        decode_chunks(sinks, count, codes, s, num, 0, 0, is_pairs);
}

/* --- rows --------------------------------------------------------------------------------------*/

/* Rows of codes that are looked up, as `decode_lots` leaves them. What is the same for all of a row
   is said when compiling: with it, it takes half as many instructions. */
INLINE void look_up_lots(Sink *sinks, int count, const struct coding *c, const char **codes,
                         const Steps *s, int64_t num, int rounds_to, int has_two_steps,
                         int is_high_first, int is_pairs) {
    Tables tables[MOST_BESIDE];
    int64_t i = 0, tabled = -1; /* the step that they are of */
    for (; i + LOT <= num; i += LOT) {
        const int is_next = has_two_steps || i >> s->shift != tabled;
        tabled = i >> s->shift;
#pragma GCC unroll 2
        for (int o = 0; o < count; o++) {
            if (i % 128 == 0)
                fetch_codes(c, codes[o] + i / 2);
            if (is_next)
                tables[o] = tables_of(c, s + o, i, rounds_to, has_two_steps);
            decode_nibbles(sinks + o, codes[o] + i / 2, tables + o, has_two_steps, is_high_first,
                           is_pairs);
        }
    }
    for (int o = 0; i < num && o < count; o++) {
        char room[LOT] = {0};
        memcpy(room, codes[o] + i / 2, (num - i + 1) / 2);
        tables[o] = tables_of(c, s + o, i, rounds_to, has_two_steps);
        decode_nibbles(sinks + o, room, tables + o, has_two_steps, is_high_first, is_pairs);
    }
}

INLINE void look_up_rounded(Sink *sinks, int count, const struct coding *c, const char **codes,
                            const Steps *s, int64_t num, int rounds_to, int is_pairs) {
    if (LOT > STEP_INPUTS && s->shift == 4) {
        if (c->is_high_first)
            look_up_lots(sinks, count, c, codes, s, num, rounds_to, 1, 1, is_pairs);
        else
            look_up_lots(sinks, count, c, codes, s, num, rounds_to, 1, 0, is_pairs);
    } else if (c->is_high_first)
        look_up_lots(sinks, count, c, codes, s, num, rounds_to, 0, 1, is_pairs);
    else
        look_up_lots(sinks, count, c, codes, s, num, rounds_to, 0, 0, is_pairs);
}

/* A lot, of codes that are not looked up in tables. */
INLINE void decode_lot(Sink *sink, const struct coding *c, const char *codes, const Steps *s,
                       int64_t i, int numbers, int rounds_to, int is_pairs) {
    if (bits_of(numbers) == 8)
        decode_bytes(sink, codes, s, i, numbers, rounds_to, is_pairs);
    else
        compute_nibbles(sink, c, codes, s, i, numbers, rounds_to);
}

/* Rows side by side: two vectors a lot, or one of pairs of bfloat16; any numbers behind their ends,
   up to a whole lot. */
INLINE void decode_lots(Sink *sinks, int count, const struct coding *c, const char **codes,
                        const Steps *s, int64_t num, int numbers, int rounds_to, int is_pairs) {
    const int bits = bits_of(numbers);
    int64_t i = 0;
#pragma GCC unroll 2
    for (; i + LOT <= num; i += LOT)
#pragma GCC unroll 2
        for (int o = 0; o < count; o++) {
            if (numbers != GROUPED_CODE)
                fetch_codes(c, codes[o] + i * bits / 8);
            decode_lot(sinks + o, c, codes[o] + i * bits / 8, s + o, i, numbers, rounds_to,
                       is_pairs);
        }
    for (int o = 0; i < num && o < count; o++) {
        char room[LOT] = {0};
        memcpy(room, codes[o] + i * bits / 8, ((num - i) * bits + 7) / 8);
        decode_lot(sinks + o, c, room, s + o, i, numbers, rounds_to, is_pairs);
    }
}

/* Whether any of these e4m3 is. */
INLINE int has_nan(const char *codes, int64_t num) {
    uint8_t any = 0;
    for (int64_t i = 0; i < num; i++)
        any |= (codes[i] & 127) == 127;
    return any;
}

/* Rounding to bfloat16 by code of its own: what else is decided lot by lot takes as long. */
INLINE void decode_rounded(Sink *sinks, int count, const struct coding *c, const char **codes,
                           const Steps *s, int64_t num, int numbers, int rounds_to, int is_pairs) {
    if (rounds_to == BFLOAT16)
        decode_lots(sinks, count, c, codes, s, num, numbers, BFLOAT16, is_pairs);
    else
        decode_lots(sinks, count, c, codes, s, num, numbers, rounds_to, is_pairs);
}

/* Inputs of rows that name their groups. */
INLINE void decode_groups(Sink *sinks, int count, const struct coding *c, const int64_t *rows,
                          const char **codes, int64_t first, int64_t num, int rounds_to,
                          int is_pairs) {
    char room[MOST_BESIDE][MOST_CODES];
    const char *spread[MOST_BESIDE];
    Steps s[MOST_BESIDE];
    int32_t padded[MOST_CODES];
    const int32_t *groups = c->groups + first;
    if (num % LOT) {
        memcpy(padded, groups, num * sizeof *padded);
        for (int64_t i = num; i < up_to(num, LOT); i++)
            padded[i] = padded[num - 1]; /* of which NaN is met anyhow */
        groups = padded;
    }
    for (int o = 0; o < count; o++) {
        s[o].groups = groups;
        s[o].num_groups = c->num_groups;
        find_block_numbers(c, rows[o], 0, c->num_groups, s[o].steps, s[o].zeros);
        spread[o] = codes[o];
        if (bits_of(c->numbers) == 8)
            continue;
        const int first_place = c->is_high_first ? 4 : 0;
        for (int64_t i = 0; i < (num + 1) / 2; i++) {
            room[o][2 * i] = (uint8_t)codes[o][i] >> first_place & 15;
            room[o][2 * i + 1] = (uint8_t)codes[o][i] >> (4 - first_place) & 15;
        }
        spread[o] = room[o];
    }
    decode_rounded(sinks, count, c, spread, s, num, GROUPED_CODE, rounds_to, is_pairs);
}

/* Bytes with a sign and an exponent. */
INLINE void decode_e4m3(Sink *sinks, int count, const struct coding *c, const char **codes,
                        Steps *s, int64_t num, int rounds_to, int is_pairs) {
    const int64_t num_steps = ((num - 1) >> s->shift) + 1;
    int are_usual = 1;
    for (int o = 0; o < count; o++)
        are_usual &= are_small(s + o, num_steps) && !has_nan(codes[o], num);
    if (!are_usual) {
        decode_lots(sinks, count, c, codes, s, num, E4M3_CODE, rounds_to, is_pairs);
        return;
    }
    for (int o = 0; o < count; o++)
        for (int64_t i = 0; i < num_steps; i++)
            s[o].steps[i] *= 0x1p120f;
    decode_rounded(sinks, count, c, codes, s, num, E4M3_SHIFTED_CODE, rounds_to, is_pairs);
}

/* The same of codes in rows. */
INLINE void decode_beside(Sink *sinks, int count, const struct coding *c, const int64_t *rows,
                          int64_t first, int64_t num, int is_pairs) {
    /* Rounding to pairs, which comes next, is rounding to bfloat16. */
    const int is_rounded = is_pairs && c->rounds_to == BFLOAT16;
    const int rounds_to = is_rounded ? FLOAT32 : c->rounds_to;
    const char *codes[MOST_BESIDE];
    for (int o = 0; o < count; o++)
        codes[o] = codes_at(c, rows[o], first);
    if (c->groups) {
        decode_groups(sinks, count, c, rows, codes, first, num, rounds_to, is_pairs);
        return;
    }
    Steps s[MOST_BESIDE];
    for (int o = 0; o < count; o++)
        find_steps(c, rows[o], first, num, s + o);
    switch (c->numbers) {
#if LANES < 16
    case INT4_CODE:
        if (rounds_to != FLOAT32)
            look_up_rounded(sinks, count, c, codes, s, num, rounds_to, is_pairs);
        else
            decode_lots(sinks, count, c, codes, s, num, INT4_CODE, FLOAT32, is_pairs);
        break;
#endif
#if defined(__AVX2__) && LANES == 8
    case E2M1_CODE:
        decode_lots(sinks, count, c, codes, s, num, E2M1_CODE, rounds_to, is_pairs);
        break;
#endif
    default:
        if (rounds_to == FLOAT32)
            look_up_rounded(sinks, count, c, codes, s, num, FLOAT32, is_pairs);
        else
            look_up_rounded(sinks, count, c, codes, s, num, rounds_to, is_pairs);
        break;
    case INT8_CODE:
        decode_rounded(sinks, count, c, codes, s, num, INT8_CODE, rounds_to, is_pairs);
        break;
    case UINT8_CODE:
        decode_rounded(sinks, count, c, codes, s, num, UINT8_CODE, rounds_to, is_pairs);
        break;
    case E4M3_CODE:
        decode_e4m3(sinks, count, c, codes, s, num, rounds_to, is_pairs);
        break;
    }
}

/* Into memory. */
INLINE void decode_row(char *to, int64_t step, const struct coding *c, int64_t row, int64_t first,
                       int64_t num, int is_pairs) {
    Sink sink = {.to = to, .step = step};
    if (block_inputs(c->numbers))
        decode_blocks(&sink, 1, c, &row, first, num, is_pairs);
    else
        decode_beside(&sink, 1, c, &row, first, num, is_pairs);
}

/* A row, its vectors `step` bytes apart. */
static __attribute__((noinline)) void decode_floats(char *to, int64_t step, const struct coding *c,
                                                    int64_t row, int64_t first, int64_t num) {
    decode_row(to, step, c, row, first, num, 0);
}

#if HAS_PAIRS
static __attribute__((noinline)) void decode_pairs(char *to, int64_t step, const struct coding *c,
                                                   int64_t row, int64_t first, int64_t num) {
    decode_row(to, step, c, row, first, num, 1);
}
#else
#define decode_pairs decode_floats
#endif

/* --- words across ------------------------------------------------------------------------------*/

/* Outputs of which words of four neighbours are read at once, be they of inputs or of outputs, and
   whole groups of outputs that products take. */
#define WORD_OUTPUTS 96
/* Words that are fetched ahead, each of other inputs. */
#define WORDS_AHEAD 16
#define NEAR_GAP 64

/* Bytes from one row of such codes to the next: not those that lie in the same places of a cache. */
INLINE int64_t near_row_bytes(int64_t num_inputs) { return up_to(num_inputs, 64) + NEAR_GAP; }

INLINE uint32_t word_at(const char *p) {
    uint32_t word;
    memcpy(&word, p, sizeof word);
    return word;
}

INLINE void put_word(char *p, uint32_t word) { memcpy(p, &word, sizeof word); }

typedef uint32_t FourWords __attribute__((vector_size(16)));

/* Four words of each of four outputs. */
INLINE void turn_words(char *to, int64_t to_row, const char *from, int64_t from_row) {
    FourWords words[4];
#pragma GCC unroll 4
    for (int w = 0; w < 4; w++)
        memcpy(&words[w], from + w * from_row, sizeof words[w]);
#pragma GCC unroll 4
    for (int o = 0; o < 4; o++) {
        const FourWords row = {words[0][o], words[1][o], words[2][o], words[3][o]};
        memcpy(to + o * to_row, &row, sizeof row);
    }
}

/* Words of inputs: so many of each of so many outputs. */
INLINE void take_input_words(char *to, int64_t to_row, const char *from, int64_t from_row,
                             int64_t num_outputs, int64_t num_words) {
    for (int64_t word = 0; word < num_words; word += 4) {
        const int is_whole = word + 4 <= num_words;
        const char *words = from + word * from_row;
        for (int64_t line = 0; line < 4 * num_outputs; line += 64)
            for (int w = 0; w < 4; w++)
                __builtin_prefetch(words + (WORDS_AHEAD + w) * from_row + line, 0, 2);
        int64_t o = 0;
        for (; is_whole && o + 4 <= num_outputs; o += 4)
            turn_words(to + o * to_row + 4 * word, to_row, words + 4 * o, from_row);
        for (; o < num_outputs; o++)
            for (int64_t w = 0; w < smaller(4, num_words - word); w++)
                put_word(to + o * to_row + 4 * (word + w), word_at(words + w * from_row + 4 * o));
    }
}

/* Of eight inputs: the j-th code of the i-th word becomes the i-th of the j-th. */
INLINE void exchange_codes(Words *words) {
    const uint32_t masks[] = {0x0000ffffu, 0x00ff00ffu, 0x0f0f0f0fu};
#pragma GCC unroll 3
    for (int round = 0; round < 3; round++) {
        const int distance = 4 >> round;
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            if (i & distance)
                continue;
            Words *first = words + i, *second = words + i + distance;
            const Words different = ((*first >> 4 * distance) ^ *second) & masks[round];
            *second ^= different;
            *first ^= different << 4 * distance;
        }
    }
}

/* Words of outputs: of so many inputs. */
INLINE void take_output_words(char *to, int64_t to_row, const char *from, int64_t from_row,
                              int64_t num_outputs, int64_t num_inputs) {
    const int64_t num_words = (num_outputs + 7) / 8, at_once = 8 * LANES;
    for (int64_t i = 0; i < num_inputs; i += at_once)
        for (int64_t first = 0; first < num_words; first += 4) {
            const char *words = from + i * from_row + 4 * first;
            const int64_t num = smaller(4, num_words - first);
            const int64_t inputs = smaller(at_once, num_inputs - i);
            uint32_t near[4][8][LANES]; /* of each word, every eighth input */
            for (int64_t r = 0; first % 16 == 0 && r < at_once; r++)
                __builtin_prefetch(words + (at_once + r) * from_row, 0, 2);
            if (num == 4 && inputs == at_once) {
                for (int64_t r = 0; r < 8; r++)
                    for (int64_t lane = 0; lane < LANES; lane += 4)
                        turn_words((char *)&near[0][r][lane], sizeof near[0],
                                   words + (8 * lane + r) * from_row, 8 * from_row);
            } else {
                memset(near, 0, sizeof near);
                for (int64_t r = 0; r < inputs; r++)
                    for (int64_t w = 0; w < num; w++)
                        near[w][r % 8][r / 8] = word_at(words + r * from_row + 4 * w);
            }
            for (int64_t w = 0; w < num; w++) {
                const int64_t output = 8 * (first + w);
                Words codes[8];
                memcpy(codes, near[w], sizeof codes);
                exchange_codes(codes);
                for (int64_t o = 0; o < smaller(8, num_outputs - output); o++)
                    memcpy(to + (output + o) * to_row + i / 2, &codes[place_in_word(o)],
                           sizeof *codes);
            }
        }
}

/* The same coding with the codes of some outputs in rows at `room`. Outputs begin with a whole word
   of theirs, inputs with one of theirs. */
static __attribute__((noinline)) struct coding with_rows(const struct coding *c, int64_t output,
                                                         int64_t num_outputs, int64_t first,
                                                         int64_t num_inputs, char *room) {
    struct coding near = *c;
    const int bits = bits_of(c->numbers);
    const int64_t of_word = 32 / bits;
    near.code_row = near_row_bytes(num_inputs);
    if (c->lies == INPUT_WORDS)
        take_input_words(room, near.code_row, c->codes + first / of_word * c->code_row + 4 * output,
                         c->code_row, num_outputs, (num_inputs + of_word - 1) / of_word);
    else
        take_output_words(room, near.code_row, c->codes + first * c->code_row + output / 8 * 4,
                          c->code_row, num_outputs, num_inputs);
    near.codes = room - (output * near.code_row + code_bytes(c->numbers, first));
    return near;
}

/* --- whole matrices ----------------------------------------------------------------------------*/

/* The same as DecodeWork in codes.py. */
struct decode_work {
    char *out; /* [O, I] without gaps */
    int64_t num_outputs, num_inputs;
    int64_t next_row; /* taken by whichever thread is free */
    int32_t dtype;    /* of out */
    struct coding coding;
};

/* Whole words of them, if they lie in words. */
#define DECODED_ROWS 16

/* So many of the inputs of a row. */
INLINE void decode_into(const struct decode_work *w, const struct coding *c, int64_t row,
                        int64_t first, int64_t num, int dtype) {
    Lot room[MOST_CODES / LOT];
    char *out = w->out + (row * w->num_inputs + first) * size_of(dtype);
    decode_floats((char *)room, sizeof(Floats), c, row, first, num);
    for (int64_t i = 0; i < num; i += LOT)
        store_part(out + i * size_of(dtype), reordered(room[i / LOT], order_of(c), dtype), num - i,
                   dtype);
}

INLINE void decode_rows(const struct decode_work *w, int64_t row, int64_t end, int64_t first) {
    char room[DECODED_ROWS * (MOST_CODES + NEAR_GAP)];
    const int64_t num = smaller(MOST_CODES, w->num_inputs - first);
    struct coding c = w->coding;
    if (c.lies != IN_ROWS)
        c = with_rows(&w->coding, row, end - row, first, num, room);
    for (; row < end; row++)
        switch (w->dtype) {
        case FLOAT32:
            decode_into(w, &c, row, first, num, FLOAT32);
            break;
        case BFLOAT16:
            decode_into(w, &c, row, first, num, BFLOAT16);
            break;
        default:
            decode_into(w, &c, row, first, num, FLOAT16);
        }
}

/* Decodes rows until none is left. Several threads may share the same work. */
OF_PRODUCTS void moebatch_decode(struct decode_work *w) {
    for (;;) {
        int64_t row = __atomic_fetch_add(&w->next_row, DECODED_ROWS, __ATOMIC_RELAXED);
        if (row >= w->num_outputs)
            return;
        const int64_t end = smaller(row + DECODED_ROWS, w->num_outputs);
        for (int64_t first = 0; first < w->num_inputs; first += MOST_CODES)
            decode_rows(w, row, end, first);
    }
}
