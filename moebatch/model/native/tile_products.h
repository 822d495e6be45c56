/* Products of small matrices: of bfloat16 by the tiles of AMX, of float32 by vectors.

   The numbers that are multiplied lie along words: one float32, or two neighbouring bfloat16. A
   left factor has rows of words; a right one has SIDE columns of them, so that one of its rows is
   SIDE words. Sums are float32, [SIDE, SIDE]. */

#define TILE 16
#define SIDE (2 * TILE)
#define VECTORS (SIDE / LANES)

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

INLINE int64_t words_of(int64_t num, int dtype) { return num * size_of(dtype) / 4; }

/* SIDE rows, which are two tiles, of any number of steps of TILE words. */
typedef struct {
    const uint32_t *upper, *lower;
    int64_t row, step; /* in words: from one to the next */
} Left;

#if HAS_TILES
/* Whether this process may use tiles; the kernel wants to be asked. */
INLINE int may_use_tiles(void) {
    const long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

INLINE void open_tiles(void) {
    struct {
        uint8_t palette, first_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 4 * TILE;
        config.rows[i] = TILE;
    }
    _tile_loadconfig(&config);
}

INLINE void close_tiles(void) { _tile_release(); }

/* The compiler does not know that tiles are loaded from memory. */
#define WRITTEN __asm__ volatile("" ::: "memory")

INLINE void add_by_tiles(float *sums, Left left, const uint32_t *right, int64_t num_steps,
                         int is_first) {
    const int64_t row_bytes = 4 * SIDE;
    WRITTEN;
    if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, row_bytes);
        _tile_loadd(1, sums + TILE, row_bytes);
        _tile_loadd(2, sums + TILE * SIDE, row_bytes);
        _tile_loadd(3, sums + TILE * SIDE + TILE, row_bytes);
    }
    for (int64_t step = 0; step < num_steps; step++) {
        _tile_loadd(4, left.upper + step * left.step, 4 * left.row);
        _tile_loadd(6, right + step * TILE * SIDE, row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right + step * TILE * SIDE + TILE, row_bytes);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, left.lower + step * left.step, 4 * left.row);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, row_bytes);
    _tile_stored(1, sums + TILE, row_bytes);
    _tile_stored(2, sums + TILE * SIDE, row_bytes);
    _tile_stored(3, sums + TILE * SIDE + TILE, row_bytes);
    WRITTEN;
}
#else
INLINE int may_use_tiles(void) { return 0; }
INLINE void open_tiles(void) {}
INLINE void close_tiles(void) {}
INLINE void add_by_tiles(float *sums, Left left, const uint32_t *right, int64_t num_steps,
                         int is_first) {}
#endif

#define ROWS_AT_ONCE (LANES == 16 ? 8 : LANES == 8 ? 2 : 1)

INLINE void add_by_vectors(float *sums, Left left, const uint32_t *right, int64_t num_steps,
                           int is_first) {
    for (int first = 0; first < SIDE; first += ROWS_AT_ONCE) {
        const float *rows = (const float *)(first < TILE ? left.upper : left.lower);
        rows += first % TILE * left.row;
        Floats parts[ROWS_AT_ONCE][VECTORS];
#pragma GCC unroll 16
        for (int i = 0; i < ROWS_AT_ONCE * VECTORS; i++) {
            const Floats zero = {0};
            Floats before = read_floats(sums + first * SIDE + i * LANES);
            parts[i / VECTORS][i % VECTORS] = is_first ? zero : before;
        }
        for (int64_t step = 0; step < num_steps; step++)
            for (int64_t i = 0; i < TILE; i++) {
                const float *words = (const float *)right + (step * TILE + i) * SIDE;
                const float *column = rows + step * left.step + i;
#pragma GCC unroll 16
                for (int r = 0; r < ROWS_AT_ONCE; r++)
#pragma GCC unroll 16
                    for (int v = 0; v < VECTORS; v++)
                        parts[r][v] += column[r * left.row] * read_floats(words + v * LANES);
            }
#pragma GCC unroll 16
        for (int i = 0; i < ROWS_AT_ONCE * VECTORS; i++)
            write_floats(sums + first * SIDE + i * LANES, parts[i / VECTORS][i % VECTORS]);
    }
}

/* sums += left @ right, or = if this is the first part of them. */
INLINE void add_product(float *sums, Left left, const uint32_t *right, int64_t num_steps,
                        int is_first, int dtype) {
    if (dtype == BFLOAT16)
        add_by_tiles(sums, left, right, num_steps, is_first);
    else
        add_by_vectors(sums, left, right, num_steps, is_first);
}

/* to[i][j] = from[j][i] for TILE by TILE words; rows are so many words apart. */
#if defined(__AVX512F__)
INLINE void transpose(uint32_t *to, int64_t to_row, const uint32_t *from, int64_t from_row) {
    __m512i a[TILE], b[TILE];
#pragma GCC unroll 16
    for (int i = 0; i < TILE; i++)
        a[i] = _mm512_loadu_si512(from + i * from_row);
#pragma GCC unroll 8
    for (int i = 0; i < TILE; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    /* Quarter q of a[4 i + k] will be column 4 q + k of rows 4 i to 4 i + 3. */
#pragma GCC unroll 4
    for (int i = 0; i < TILE; i += 4)
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
            a[i + 2 * k] = _mm512_unpacklo_epi64(b[i + k], b[i + 2 + k]);
            a[i + 2 * k + 1] = _mm512_unpackhi_epi64(b[i + k], b[i + 2 + k]);
        }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        __m512i even_up = _mm512_shuffle_i32x4(a[k], a[4 + k], 0x88);
        __m512i even_low = _mm512_shuffle_i32x4(a[8 + k], a[12 + k], 0x88);
        __m512i odd_up = _mm512_shuffle_i32x4(a[k], a[4 + k], 0xdd);
        __m512i odd_low = _mm512_shuffle_i32x4(a[8 + k], a[12 + k], 0xdd);
        _mm512_storeu_si512(to + k * to_row, _mm512_shuffle_i32x4(even_up, even_low, 0x88));
        _mm512_storeu_si512(to + (4 + k) * to_row, _mm512_shuffle_i32x4(odd_up, odd_low, 0x88));
        _mm512_storeu_si512(to + (8 + k) * to_row, _mm512_shuffle_i32x4(even_up, even_low, 0xdd));
        _mm512_storeu_si512(to + (12 + k) * to_row, _mm512_shuffle_i32x4(odd_up, odd_low, 0xdd));
    }
}
#else
INLINE void transpose(uint32_t *to, int64_t to_row, const uint32_t *from, int64_t from_row) {
    for (int i = 0; i < TILE; i++)
        for (int j = 0; j < TILE; j++)
            to[i * to_row + j] = from[j * from_row + i];
}
#endif
