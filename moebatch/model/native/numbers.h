/* Vectors of numbers in any of five types; the other files are compiled behind this one.

   Numbers are handled in lots of 2 * LANES, as two vectors. Two neighbouring bfloat16 are one
   word: its upper half, and its lower half shifted up, are float32 already. So there the first
   vector of a lot has its even numbers and the second its odd ones.

   The 8 bits of CACHED_INT8 and CACHED_FP8 (e4m3) are codes: numbers but for a scale, which is a
   bfloat16 behind the codes that it is for. Only keys and values come so.

   No -ffast-math: it would swallow NaN, and some compilers then change the rounding of the whole
   process. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__SSSE3__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#define LOT (2 * LANES)

/* Whether products of pairs of bfloat16 are added. */
#if defined(__AVX512BF16__)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

/* Whether products of pairs of whole numbers of 16 bits are added. */
#if defined(__AVX512BW__) || (defined(__AVX2__) && LANES == 8)
#define HAS_WHOLE_PAIRS 1
#else
#define HAS_WHOLE_PAIRS 0
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

typedef struct {
    Floats first, second;
} Lot;

enum { FLOAT32, BFLOAT16, FLOAT16, CACHED_INT8, CACHED_FP8 };

/* As instruction_set.py names them. */
OF_THE_REST const char *moebatch_instruction_set(void) {
#if defined(__AMX_BF16__)
    return "amx";
#elif defined(__AVX512BF16__)
    return "avx512bf16";
#elif defined(__AVX512F__)
    return "avx512";
#elif defined(__AVX2__) && defined(__FMA__)
    return "avx2";
#else
    return "portable";
#endif
}

OF_THE_REST int moebatch_supports(int dtype) { return dtype >= FLOAT32 && dtype <= FLOAT16; }

INLINE int is_cached_code(int dtype) { return dtype == CACHED_INT8 || dtype == CACHED_FP8; }

INLINE int64_t size_of(int dtype) { return dtype == FLOAT32 ? 4 : is_cached_code(dtype) ? 1 : 2; }

/* So many numbers, with the scale of codes. */
INLINE int64_t cached_bytes(int64_t num, int dtype) {
    return num * size_of(dtype) + 2 * is_cached_code(dtype);
}

INLINE Floats read_floats(const float *p) {
    Floats x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE void write_floats(float *p, Floats x) { memcpy(p, &x, sizeof x); }

INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* A float16 as a number. Compilers know a type for it on some processors only, GCC before 12 and
   Clang before 15 not on x86; and what they do there without instructions for it, they leave to a
   library that may not have it. */
INLINE float float_of_half(uint16_t half) {
#if defined(__F16C__)
    return _cvtsh_ss(half);
#elif defined(__aarch64__)
    _Float16 x;
    memcpy(&x, &half, sizeof x);
    return x;
#else
    const uint32_t size = half & 0x7fffu, sign = (half & 0x8000u) << 16;
    if (size >= 0x7c00)
        return float_of(sign | 0x7f800000u | size << 13);
    return float_of(sign | size << 13) * 0x1p112f;
#endif
}

/* The nearest float16. */
INLINE uint16_t half_of(float x) {
#if defined(__F16C__)
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
    _Float16 half = x;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
#else
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) /* NaN */
        return sign | 0x7e00u;
    if (size >= 0x477ff000u) /* rounds to 2^16 at least */
        return sign | 0x7c00u;
    if (size < 0x38800000u) { /* 2^-14: the last place of 0.5 is that of what is smaller */
        const float rounded = float_of(size) + 0.5f;
        memcpy(&bits, &rounded, sizeof bits);
        return sign | (bits - 0x3f000000u);
    }
    return sign | (size - 0x38000000u + 0xfff + (size >> 13 & 1)) >> 13;
#endif
}

/* sum + x * y, rounded once where processors do: what a compiler makes of the plain expression
   depends on what it stands among. */
INLINE Floats add_product_of(Floats sum, Floats x, Floats y) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum);
#elif defined(__AVX__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)y);
#else
    return sum + x * y;
#endif
}

/* The same of both numbers of pairs. */
INLINE Floats add_pairs(Floats sum, Floats x, Floats y) {
#if HAS_PAIRS
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
#else
    return sum;
#endif
}

#if HAS_WHOLE_PAIRS
/* The same of whole numbers of 16 bits. */
INLINE Ints add_whole_pairs(Ints sum, Ints x, Ints y) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)x, (__m512i)y);
#elif defined(__AVX512BW__)
    return sum + (Ints)_mm512_madd_epi16((__m512i)x, (__m512i)y);
#else
    return sum + (Ints)_mm256_madd_epi16((__m256i)x, (__m256i)y);
#endif
}
#endif

/* LANES bytes with a sign. Compilers take such conversions apart where they are not told how. */
INLINE Ints read_whole(const char *p) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    Ints whole;
    for (int i = 0; i < LANES; i++)
        whole[i] = (int8_t)p[i];
    return whole;
#endif
}

#define FP8_FACTOR 256

/* LANES codes as numbers, yet without their scale, and those of e4m3 without that factor. */
INLINE Floats code_numbers(const char *p, int dtype) {
    if (dtype == CACHED_INT8)
        return __builtin_convertvector(read_whole(p), Floats);
    /* As float16, e4m3 is FP8_FACTOR times as small. */
#if defined(__AVX512F__)
    __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
    codes = _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16((short)0xbf80));
    return (Floats)_mm512_cvtph_ps(codes);
#elif defined(__AVX2__) && defined(__F16C__)
    __m128i codes = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p));
    codes = _mm_and_si128(_mm_slli_epi16(codes, 7), _mm_set1_epi16((short)0xbf80));
    return (Floats)_mm256_cvtph_ps(codes);
#else
    /* As float32, exponents begin 120 lower. */
    Words whole = (Words)read_whole(p);
    Words bits = (whole & 0x80000000u) | (whole & 0x7fu) << 20;
    return (Floats)bits * 0x1p112f;
#endif
}

INLINE float read_cached_scale(const char *p, int dtype) {
    uint16_t half;
    memcpy(&half, p, sizeof half);
    uint32_t bits = (uint32_t)half << 16;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return dtype == CACHED_FP8 ? scale * FP8_FACTOR : scale;
}

INLINE Lot load(const char *p, int dtype) {
    Lot lot;
    if (is_cached_code(dtype)) {
        lot.first = code_numbers(p, dtype);
        lot.second = code_numbers(p + LANES, dtype);
        return lot;
    }
    if (dtype == FLOAT32) {
        memcpy(&lot.first, p, sizeof lot.first);
        memcpy(&lot.second, p + sizeof lot.first, sizeof lot.second);
        return lot;
    }
    if (dtype == BFLOAT16) {
        Words pairs;
        memcpy(&pairs, p, sizeof pairs);
        lot.first = (Floats)(pairs << 16);
        lot.second = (Floats)(pairs & 0xffff0000u);
        return lot;
    }
#if defined(__AVX512F__)
    lot.first = (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
    lot.second = (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p + 1));
#elif defined(__F16C__)
    lot.first = (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
    lot.second = (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p + 1));
#else
    uint16_t halves[LOT];
    float numbers[LOT];
    memcpy(halves, p, sizeof halves);
    for (int i = 0; i < LOT; i++)
        numbers[i] = float_of_half(halves[i]);
    memcpy(&lot, numbers, sizeof lot);
#endif
    return lot;
}

/* A lot that was loaded as one type, in the order of another. */
INLINE Lot reordered(Lot lot, int from, int to) {
    if ((from == BFLOAT16) == (to == BFLOAT16))
        return lot;
#if defined(__AVX512F__)
    const __m512i from_even = {0x0000000200000000, 0x0000000600000004, 0x0000000a00000008,
                               0x0000000e0000000c, 0x0000001200000010, 0x0000001600000014,
                               0x0000001a00000018, 0x0000001e0000001c};
    const __m512i from_lower = {0x0000001000000000, 0x0000001100000001, 0x0000001200000002,
                                0x0000001300000003, 0x0000001400000004, 0x0000001500000005,
                                0x0000001600000006, 0x0000001700000007};
    const int64_t next = to == BFLOAT16 ? 1 : 8;
    const __m512i first = to == BFLOAT16 ? from_even : from_lower;
    const __m512i second = first + (next | next << 32);
    __m512 a = (__m512)lot.first, b = (__m512)lot.second;
    return (Lot){(Floats)_mm512_permutex2var_ps(a, first, b),
                 (Floats)_mm512_permutex2var_ps(a, second, b)};
#elif defined(__AVX2__)
    __m256 a = (__m256)lot.first, b = (__m256)lot.second;
    if (to == BFLOAT16) {
        __m256d even = (__m256d)_mm256_shuffle_ps(a, b, 0x88);
        __m256d odd = (__m256d)_mm256_shuffle_ps(a, b, 0xdd);
        return (Lot){(Floats)_mm256_permute4x64_pd(even, 0xd8),
                     (Floats)_mm256_permute4x64_pd(odd, 0xd8)};
    }
    __m256 lower = _mm256_unpacklo_ps(a, b), upper = _mm256_unpackhi_ps(a, b);
    return (Lot){(Floats)_mm256_permute2f128_ps(lower, upper, 0x20),
                 (Floats)_mm256_permute2f128_ps(lower, upper, 0x31)};
#else
    float before[LOT], after[LOT];
    write_floats(before, lot.first);
    write_floats(before + LANES, lot.second);
    for (int i = 0; i < LANES; i++)
        for (int odd = 0; odd < 2; odd++)
            if (to == BFLOAT16)
                after[odd * LANES + i] = before[2 * i + odd];
            else
                after[2 * i + odd] = before[odd * LANES + i];
    return (Lot){read_floats(after), read_floats(after + LANES)};
#endif
}

/* Bits of numbers whose upper halves are the nearest bfloat16. */
INLINE Words rounded(Floats x) {
    Words bits = (Words)x;
    Words even = bits + 0x7fff + ((bits >> 16) & 1);
#if defined(__AVX512F__)
    __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
    return (Words)_mm512_mask_mov_epi32((__m512i)even, is_nan, (__m512i)(bits | 0x400000));
#else
    Words is_nan = (Words)(x != x);
    return (even & ~is_nan) | ((bits | 0x400000) & is_nan);
#endif
}

/* The nearest bfloat16, neighbours along words. */
INLINE Words paired(Floats even, Floats odd) {
#if defined(__AVX512BF16__)
    const __m512i order = (__m512i)(Words){
        0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
        0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f};
    __m512bh halves = _mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    return (Words)_mm512_permutexvar_epi16(order, (__m512i)halves);
#else
    return (rounded(even) >> 16) | (rounded(odd) & 0xffff0000u);
#endif
}

/* The nearest float16, in lower halves. */
INLINE Words halves_of(Floats x) {
    const Words zero = {0};
#if defined(__AVX512F__)
    __m256i halves = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return zero + (Words)_mm512_cvtepu16_epi32(halves);
#else
    Words words = zero;
    for (int i = 0; i < LANES; i++)
        words[i] = half_of(x[i]);
    return words;
#endif
}

/* A vector of pairs; zeros behind the last number. */
INLINE Floats load_pairs(const char *p, int64_t num) {
    Floats pairs = {0};
    if (num >= LOT)
        memcpy(&pairs, p, sizeof pairs);
    else
        memcpy(&pairs, p, 2 * num);
    return pairs;
}

INLINE void store(char *p, Lot lot, int dtype) {
    if (dtype == FLOAT32) {
        memcpy(p, &lot.first, sizeof lot.first);
        memcpy(p + sizeof lot.first, &lot.second, sizeof lot.second);
    } else if (dtype == BFLOAT16) {
        Words pairs = (rounded(lot.first) >> 16) | (rounded(lot.second) & 0xffff0000u);
        memcpy(p, &pairs, sizeof pairs);
    } else {
#if defined(__AVX512F__)
        __m256i first = _mm512_cvtps_ph((__m512)lot.first, _MM_FROUND_TO_NEAREST_INT);
        __m256i second = _mm512_cvtps_ph((__m512)lot.second, _MM_FROUND_TO_NEAREST_INT);
        _mm256_storeu_si256((__m256i *)p, first);
        _mm256_storeu_si256((__m256i *)p + 1, second);
#elif defined(__F16C__)
        __m128i first = _mm256_cvtps_ph((__m256)lot.first, _MM_FROUND_TO_NEAREST_INT);
        __m128i second = _mm256_cvtps_ph((__m256)lot.second, _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i *)p, first);
        _mm_storeu_si128((__m128i *)p + 1, second);
#else
        uint16_t halves[LOT];
        float numbers[LOT];
        memcpy(numbers, &lot, sizeof lot);
        for (int i = 0; i < LOT; i++)
            halves[i] = half_of(numbers[i]);
        memcpy(p, halves, sizeof halves);
#endif
    }
}

/* The last lot of a row may be there in part: zeros for the rest. */
INLINE Lot load_part(const char *p, int64_t num, int dtype) {
    char room[4 * LOT] = {0};
    if (num >= LOT)
        memcpy(room, p, LOT * size_of(dtype));
    else if (num == LANES) /* sizes that are known are copied faster */
        memcpy(room, p, LANES * size_of(dtype));
    else
        memcpy(room, p, num * size_of(dtype));
    return load(room, dtype);
}

INLINE void store_part(char *p, Lot lot, int64_t num, int dtype) {
    if (num >= LOT) {
        store(p, lot, dtype);
        return;
    }
    char room[4 * LOT];
    store(room, lot, dtype);
    memcpy(p, room, num * size_of(dtype));
}

/* The numbers [first, stop) of a cached head of so many codes; zeros from its end on. A multiple of
   LANES. No part of what it is called from, of which there are many. */
static __attribute__((noinline)) void widen_cached(float *to, const char *head, int64_t first,
                                                  int64_t stop, int64_t head_dim, int dtype) {
    float scale = read_cached_scale(head + head_dim, dtype);
    for (int64_t c = first; c < stop; c += LANES) {
        char room[LANES] = {0};
        const char *codes = head + c;
        if (c + LANES > head_dim)
            codes = memcpy(room, codes, c < head_dim ? head_dim - c : 0);
        write_floats(to + c - first, code_numbers(codes, dtype) * scale);
    }
}

/* Into the second-level cache: a lot that will be read. It need not exist. */
INLINE void prefetch(const char *p, int dtype) {
    for (int64_t i = 0; i < LOT * size_of(dtype); i += 64)
        __builtin_prefetch(p + i, 0, 2);
}

INLINE float sum_of(Floats x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++)
        sum += x[i];
    return sum;
}

/* x, but neither less nor more than these; NaN for NaN. */
INLINE Floats clamped(Floats x, float lowest, float highest) {
    const Floats zero = {0};
#if defined(__AVX512F__)
    x = (Floats)_mm512_max_ps((__m512)(zero + lowest), (__m512)x);
    return (Floats)_mm512_min_ps((__m512)(zero + highest), (__m512)x);
#else
    Words is_low = (Words)(x < lowest), is_high = (Words)(x > highest);
    Words limit = ((Words)(zero + lowest) & is_low) | ((Words)(zero + highest) & is_high);
    return (Floats)(((Words)x & ~(is_low | is_high)) | limit);
#endif
}

/* The larger of each two; y where x is NaN. */
INLINE Floats larger_of(Floats x, Floats y) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)x, (__m512)y);
#else
    Words is_larger = (Words)(x > y);
    return (Floats)(((Words)x & is_larger) | ((Words)y & ~is_larger));
#endif
}

/* Whether any of x is larger than its limit. */
INLINE int is_any_larger(Floats x, Floats limit) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, (__m512)limit, _CMP_GT_OQ) != 0;
#else
    Words is_larger = (Words)(x > limit);
    uint32_t any = 0;
    for (int i = 0; i < LANES; i++)
        any |= is_larger[i];
    return any != 0;
#endif
}

/* e^x within two units in the last place, NaN for NaN; nothing or tiny below -87, infinite from 89
   on. After Cephes' expf. */
INLINE Floats exp_of(Floats x) {
    x = clamped(x, -87.0f, 89.0f);
    Floats shifted = x * 1.44269504088896341f + 12582912.0f; /* rounds to an integer */
    Floats n = shifted - 12582912.0f;
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
#if defined(__AVX512F__)
    return (Floats)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
    /* Half the power, since 2^128 is none of these numbers. */
    Words power = ((Words)shifted - 0x4b400000u + 126u) << 23;
    return y * (Floats)power * 2.0f;
#endif
}
