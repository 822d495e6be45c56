/* Weights as codes of four or eight bits, with scales for blocks: see formats/coded.py.

   Codes become float32 a lot at a time, the even ones in the first vector and the odd ones in the
   second, as bfloat16 do: two neighbours lie in one byte, or in one word of two. Scales and zero
   points are looked up once for STEP_INPUTS inputs of a row. */

/* Beside the types of numbers: what weights are that have a coding. */
enum { CODED = 5 };
enum { INT4_CODE, E2M1_CODE, INT8_CODE, UINT8_CODE, E4M3_CODE };
/* The last of which steps have a power that is missing in the numbers, and there is no NaN. */
enum { E4M3_SHIFTED_CODE = 5 };
/* Scales have one of the three types of numbers, or one of these. */
enum { E4M3_SCALE = 3, E8M0_SCALE };

/* The same as Coding in codes.py. */
struct coding {
    const char *codes;  /* rows code_row bytes apart */
    const char *scales; /* rows scale_row numbers apart */
    const char *zeros;  /* rows zero_row words apart, or NULL */
    int64_t code_row, scale_row, zero_row;
    int64_t block_rows, block_columns; /* a multiple of STEP_INPUTS, or at least a row */
    float factor;
    int32_t divides; /* scales by the factor */
    int32_t numbers, scale_dtype;
    int32_t rounds_to; /* FLOAT32 if it does not */
};

#define STEP_INPUTS 16
/* Inputs of a row that are decoded at a time. */
#define MOST_CODES 2048
#define MOST_STEPS (MOST_CODES / STEP_INPUTS)

/* Of some inputs of a row: (number - zero) * step, of the (i >> shift)-th step. */
typedef struct {
    float steps[MOST_STEPS], zeros[MOST_STEPS];
    int shift;
} Steps;

INLINE int bits_of(int numbers) { return numbers == INT4_CODE || numbers == E2M1_CODE ? 4 : 8; }

INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* --- scales and zero points --------------------------------------------------------------------*/

INLINE void widen_scales(float *out, const struct coding *c, int64_t place, int64_t num) {
    const uint8_t *bytes = (const uint8_t *)c->scales + place;
    const char *numbers = c->scales + place * 2;
    switch (c->scale_dtype) {
    case E8M0_SCALE:
        for (int64_t i = 0; i < num; i++) {
            uint32_t bits = bytes[i] ? (uint32_t)bytes[i] << 23 : 1u << 22;
            out[i] = float_of(bytes[i] == 255 ? 0x7fc00000u : bits);
        }
        break;
    case E4M3_SCALE:
        for (int64_t i = 0; i < num; i++) {
            uint32_t size = bytes[i] & 127u, bits = (bytes[i] & 128u) << 24 | size << 20;
            out[i] = float_of(size == 127 ? 0x7fc00000u : bits) * 0x1p120f;
        }
        break;
    case FLOAT32:
        memcpy(out, c->scales + place * 4, num * 4);
        break;
    case BFLOAT16:
        for (int64_t i = 0; i < num; i++) {
            uint16_t bits;
            memcpy(&bits, numbers + 2 * i, sizeof bits);
            out[i] = float_of((uint32_t)bits << 16);
        }
        break;
    default:
#if defined(__FLT16_MAX__)
        for (int64_t i = 0; i < num; i++) {
            _Float16 half;
            memcpy(&half, numbers + 2 * i, sizeof half);
            out[i] = (float)half;
        }
#endif
        break;
    }
}

/* Codes that stand for nothing, for numbers that are offset. */
INLINE void find_zeros(float *out, const struct coding *c, int64_t row, int64_t column,
                       int64_t num) {
    const int bits = bits_of(c->numbers), of_word = 32 / bits;
    const char *words = c->zeros + (row / of_word * c->zero_row + column) * 4;
    for (int64_t i = 0; i < num; i++) {
        uint32_t word = 0;
        if (c->zeros)
            memcpy(&word, words + 4 * i, sizeof word);
        word = word >> (row % of_word * bits) & ((1u << bits) - 1);
        out[i] = c->zeros ? (float)(int32_t)word : bits == 4 ? 8 : 128;
    }
}

/* In place: numbers for blocks become such for STEP_INPUTS inputs. */
INLINE void repeat_blocks(float *numbers, int64_t before, int64_t block, int64_t num) {
    for (int64_t i = num - 1; i >= 0; i--)
        numbers[i] = numbers[(before + i * STEP_INPUTS) / block];
}

/* Those of so many inputs, from a multiple of STEP_INPUTS on. Returns the largest step. */
INLINE float find_steps(const struct coding *c, int64_t row, int64_t first, int64_t num,
                        Steps *found) {
    const int64_t block = c->block_columns, column = first / block, before = first - column * block;
    const int64_t num_blocks = (before + num - 1) / block + 1;
    widen_scales(found->steps, c, row / c->block_rows * c->scale_row + column, num_blocks);
    float largest = 0;
    for (int64_t i = 0; i < num_blocks; i++) {
        float step = found->steps[i];
        step = c->divides ? step / c->factor : step * c->factor;
        found->steps[i] = step == step ? step : NAN; /* of which rounding leaves a NaN */
        largest = step > largest ? step : -step > largest ? -step : largest;
    }
    find_zeros(found->zeros, c, row, column, num_blocks);
    found->shift = 63;
    if (num_blocks == 1)
        return largest;
    found->shift = __builtin_ctzll(block);
    if (before || block >> found->shift != 1) {
        const int64_t num_steps = (num + STEP_INPUTS - 1) / STEP_INPUTS;
        repeat_blocks(found->steps, before, block, num_steps);
        repeat_blocks(found->zeros, before, block, num_steps);
        found->shift = 4;
    }
    return largest;
}

/* What is said for the inputs of a lot. */
INLINE Floats over_lot(const float *steps, int shift, int64_t i) {
    const Floats zero = {0};
    Floats first = steps[i >> shift] - zero; /* not a sum, which would turn -0 over */
#if LANES == 16
    Floats second = steps[(i + STEP_INPUTS) >> shift] - zero;
    return (Floats)_mm512_mask_blend_ps(0xff00, (__m512)first, (__m512)second);
#else
    return first;
#endif
}

/* --- codes -------------------------------------------------------------------------------------*/

INLINE Floats floats_of(Words x) { return __builtin_convertvector((Ints)x, Floats); }

/* Four bits at the upper end of each word, other ones below. */
INLINE Floats e2m1_of(Words upper) {
#if defined(__AVX512F__)
    const __m512 values = (__m512)(Floats){0,    .5f,   1,   1.5f,   2,   3,   4,   6,
                                           -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    return (Floats)_mm512_permutexvar_ps((__m512i)(upper >> 28), values);
#elif defined(__AVX2__)
    const __m256 values = (__m256)(Floats){0, .5f, 1, 1.5f, 2, 3, 4, 6};
    Words sizes = (Words)_mm256_permutevar8x32_ps(values, (__m256i)(upper >> 28));
    return (Floats)(sizes | (upper & 0x80000000u));
#else
    return (Floats)((Words)((Ints)upper >> 6) & 0x81c00000u) * 0x1p126f;
#endif
}

/* Eight bits at the upper end of each word, other ones below: 2^120 times too small. */
INLINE Floats shifted_e4m3_of(Words upper) {
    return (Floats)((Words)((Ints)upper >> 4) & 0x87f00000u);
}

INLINE Floats e4m3_of(Words upper) {
    Words bits = (Words)shifted_e4m3_of(upper);
    Words is_nan = (Words)((bits & 0x07f00000u) == 0x07f00000u);
    return (Floats)((Words)((Floats)bits * 0x1p120f) | (is_nan & 0x7fc00000u));
}

/* One lot; the even codes of each pair are in the lower half of `pairs`. */
INLINE Lot numbers_of(Words pairs, int numbers) {
    const int bits = bits_of(numbers);
    const Words even = pairs << (32 - bits), odd = pairs << (32 - 2 * bits);
    switch (numbers) {
    case E2M1_CODE:
        return (Lot){e2m1_of(even), e2m1_of(odd)};
    case E4M3_CODE:
        return (Lot){e4m3_of(even), e4m3_of(odd)};
    case E4M3_SHIFTED_CODE:
        return (Lot){shifted_e4m3_of(even), shifted_e4m3_of(odd)};
    case INT8_CODE:
        return (Lot){floats_of((Words)((Ints)even >> 24)), floats_of((Words)((Ints)odd >> 24))};
    default:
        return (Lot){floats_of(pairs & ((1u << bits) - 1)), floats_of(pairs >> bits)};
    }
}

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

/* A word for each two bytes. */
INLINE Words shorts_at(const char *p) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
#else
    uint16_t shorts[LANES];
    Words words;
    memcpy(shorts, p, sizeof shorts);
    for (int i = 0; i < LANES; i++)
        words[i] = shorts[i];
    return words;
#endif
}

/* As `dtype` would keep it. NaN stays only if its lower half is nothing. */
INLINE Floats rounded_to(Floats x, int dtype) {
    if (dtype == BFLOAT16) {
        Words bits = (Words)x;
        return (Floats)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
    }
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(
        _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__FLT16_MAX__)
    for (int i = 0; i < LANES; i++)
        x[i] = (float)(_Float16)x[i];
    return x;
#else
    return x;
#endif
}

/* A lot of weights, the first of them the i-th of those that have these steps. */
INLINE Lot load_coded(const char *codes, const Steps *s, int64_t i, int numbers, int rounds_to) {
    Lot lot = numbers_of(bits_of(numbers) == 4 ? bytes_at(codes) : shorts_at(codes), numbers);
    if (numbers == INT4_CODE || numbers == UINT8_CODE) {
        Floats zeros = over_lot(s->zeros, s->shift, i);
        lot = (Lot){lot.first - zeros, lot.second - zeros};
    }
    Floats steps = over_lot(s->steps, s->shift, i);
    lot = (Lot){lot.first * steps, lot.second * steps};
    if (rounds_to == FLOAT32)
        return lot;
    return (Lot){rounded_to(lot.first, rounds_to), rounded_to(lot.second, rounds_to)};
}

/* --- rows --------------------------------------------------------------------------------------*/

/* One lot; vectors `step` bytes apart, two of them, or one of pairs of bfloat16. */
INLINE void decode_lot(char *to, int64_t step, const char *codes, const Steps *s, int64_t i,
                       int numbers, int rounds_to, int is_pairs) {
    Lot lot = load_coded(codes, s, i, numbers, rounds_to);
    if (is_pairs) {
        Words pairs = paired(lot.first, lot.second);
        memcpy(to, &pairs, sizeof pairs);
        return;
    }
    memcpy(to, &lot.first, sizeof lot.first);
    memcpy(to + step, &lot.second, sizeof lot.second);
}

/* A row; any numbers behind its end, up to a whole lot. */
INLINE void decode_lots(char *to, int64_t step, const char *codes, const Steps *s, int64_t num,
                        int numbers, int rounds_to, int is_pairs) {
    const int64_t lot_bytes = LOT * bits_of(numbers) / 8, lot_step = is_pairs ? step : 2 * step;
    int64_t i = 0;
    for (; i + LOT <= num; i += LOT, codes += lot_bytes, to += lot_step)
        decode_lot(to, step, codes, s, i, numbers, rounds_to, is_pairs);
    if (i == num)
        return;
    char room[LOT] = {0};
    memcpy(room, codes, ((num - i) * bits_of(numbers) + 7) / 8);
    decode_lot(to, step, room, s, i, numbers, rounds_to, is_pairs);
}

/* Whether any of these e4m3 is. */
INLINE int has_nan(const char *codes, int64_t num) {
    uint8_t any = 0;
    for (int64_t i = 0; i < num; i++)
        any |= (codes[i] & 127) == 127;
    return any;
}

/* Up to MOST_CODES inputs of a row, of which the first is a multiple of STEP_INPUTS. */
INLINE void decode_row(char *to, int64_t step, const struct coding *c, int64_t row, int64_t first,
                       int64_t num, int is_pairs) {
    const char *codes = c->codes + row * c->code_row + first * bits_of(c->numbers) / 8;
    Steps s;
    const float largest = find_steps(c, row, first, num, &s);
    switch (c->numbers) {
    case INT4_CODE:
        decode_lots(to, step, codes, &s, num, INT4_CODE, c->rounds_to, is_pairs);
        break;
    case E2M1_CODE:
        decode_lots(to, step, codes, &s, num, E2M1_CODE, c->rounds_to, is_pairs);
        break;
    case INT8_CODE:
        decode_lots(to, step, codes, &s, num, INT8_CODE, c->rounds_to, is_pairs);
        break;
    case UINT8_CODE:
        decode_lots(to, step, codes, &s, num, UINT8_CODE, c->rounds_to, is_pairs);
        break;
    case E4M3_CODE:
        if (!(largest < 128) || has_nan(codes, num)) {
            decode_lots(to, step, codes, &s, num, E4M3_CODE, c->rounds_to, is_pairs);
            break;
        }
        for (int64_t i = 0; i <= (num - 1) >> s.shift; i++)
            s.steps[i] *= 0x1p120f;
        decode_lots(to, step, codes, &s, num, E4M3_SHIFTED_CODE, c->rounds_to, is_pairs);
        break;
    }
}

static __attribute__((noinline)) void decode_floats(char *to, int64_t step, const struct coding *c, int64_t row,
                          int64_t first, int64_t num) {
    decode_row(to, step, c, row, first, num, 0);
}

#if HAS_PAIRS
static __attribute__((noinline)) void decode_pairs(char *to, int64_t step, const struct coding *c, int64_t row,
                         int64_t first, int64_t num) {
    decode_row(to, step, c, row, first, num, 1);
}
#else
#define decode_pairs decode_floats
#endif

/* --- whole matrices ----------------------------------------------------------------------------*/

/* The same as DecodeWork in codes.py. */
struct decode_work {
    char *out; /* [O, I] without gaps */
    int64_t num_outputs, num_inputs;
    int64_t next_row; /* taken by whichever thread is free */
    int32_t dtype;    /* of out */
    struct coding coding;
};

#define DECODED_ROWS 8

INLINE void decode_into(const struct decode_work *w, int64_t row, int64_t first, int dtype) {
    Lot room[MOST_CODES / LOT];
    const int64_t num = smaller(MOST_CODES, w->num_inputs - first);
    char *out = w->out + (row * w->num_inputs + first) * size_of(dtype);
    decode_floats((char *)room, sizeof(Floats), &w->coding, row, first, num);
    for (int64_t i = 0; i < num; i += LOT)
        store_part(out + i * size_of(dtype), reordered(room[i / LOT], BFLOAT16, dtype), num - i,
                   dtype);
}

/* Decodes rows until none is left. Several threads may share the same work. */
void moebatch_decode(struct decode_work *w) {
    for (;;) {
        int64_t row = __atomic_fetch_add(&w->next_row, DECODED_ROWS, __ATOMIC_RELAXED);
        if (row >= w->num_outputs)
            return;
        const int64_t end = smaller(row + DECODED_ROWS, w->num_outputs);
        for (; row < end; row++)
            for (int64_t first = 0; first < w->num_inputs; first += MOST_CODES)
                switch (w->dtype) {
                case FLOAT32:
                    decode_into(w, row, first, FLOAT32);
                    break;
                case BFLOAT16:
                    decode_into(w, row, first, BFLOAT16);
                    break;
                default:
                    decode_into(w, row, first, FLOAT16);
                }
    }
}
