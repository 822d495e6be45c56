/* The gated delta rule (Yang et al. 2024, Gated Delta Networks, equation 10), and the recurrence of
   Mamba-2 (Dao & Gu 2024), token by token, on matrices where they lie.

   Letters: T tokens, G key heads, H value heads, K size of a key, V size of a value, F one or K. The
   matrices of a sequence are [H, K, V], of float32 or float16; all other numbers are float32. With
   the newest token's key k, value v, query q, rate b and what fading leaves, f, a matrix S becomes
   f S + k x d, where d = b (v - f S'k), and it puts out S'q of the new one, which is f S'q of the old
   one and (q'k) d. So all of S is read, and then all of it changed: columns by columns, so that they
   are in the nearest cache in between. Mamba-2 looks nothing up: its d is b v, and one way through S
   does. In Kimi Delta Attention f is a number for each channel of keys, by which rows of S are
   multiplied: S'(f k) is looked up there, and S'(f q) read. */

#define STRIP_LOTS (LANES == 16 ? 4 : 2)
#define STRIP (STRIP_LOTS * LOT)

/* The same as DeltaWork in delta_rule.py. */
struct delta_work {
    char *matrices;             /* of all rows of the state */
    const int64_t *rows;        /* of each sequence */
    const int64_t *firsts;      /* its first token here */
    const int64_t *counts;      /* and how many it has */
    const int64_t *befores;     /* and how many it had before */
    const float *queries, *keys; /* [T, G, K] */
    const float *values;        /* [T, H, V] */
    const float *rates, *left;   /* [T, H], [T, H, F] */
    float *out;                 /* [T, H, V] */
    int64_t num_sequences, num_key_heads, num_value_heads, key_dim, value_dim;
    int64_t next_item; /* a head of a sequence; taken by whichever thread is free */
    int32_t dtype;     /* of matrices */
    int32_t corrects;  /* whether it looks up what keys give */
    int32_t by_channel; /* whether F is K */
};

/* What is added to the 13 bits that float16 lacks before they are cut off, so that a number becomes
   either neighbour as often as it is near: one that hardly changes from token to token would else
   be rounded back each time, and never fade. The same as NOISE_STEPS in delta_rule.py,
   which a compiler has to know: from memory they take 1.7 times as long. */
#define TOKEN_STEP 0xdb4f0b91u
#define HEAD_STEP 0xbbe05633u
#define KEY_STEP 0xa0f2ec75u
#define VALUE_STEP 0x89e18285u

#if defined(__AVX512F__) || defined(__F16C__)
/* Not a variable: compilers want a constant here, of which clang's are stricter. */
enum { CUT = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC };
#endif

/* Stores numbers as float16, with that noise; too large ones as the largest. */
INLINE void store_halves(char *p, Lot lot, Words noise) {
    lot.first = (Floats)((Words)lot.first + (noise >> 19));
    lot.second = (Floats)((Words)lot.second + ((noise + LANES * VALUE_STEP) >> 19));
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)lot.first, CUT));
    _mm256_storeu_si256((__m256i *)p + 1, _mm512_cvtps_ph((__m512)lot.second, CUT));
#elif defined(__F16C__)
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)lot.first, CUT));
    _mm_storeu_si128((__m128i *)p + 1, _mm256_cvtps_ph((__m256)lot.second, CUT));
#else
    const float largest = 65504;
    lot.first = (Floats)((Words)lot.first & 0xffffe000u);
    lot.second = (Floats)((Words)lot.second & 0xffffe000u);
    lot.first = clamped(lot.first, -largest, largest);
    lot.second = clamped(lot.second, -largest, largest);
    store(p, lot, FLOAT16);
#endif
}

/* Stores the first numbers of a lot, of which the first one has that noise. */
INLINE void store_state(char *p, Lot lot, int64_t num, uint32_t noise, int dtype) {
    if (dtype == FLOAT32) {
        store_part(p, lot, num, dtype);
        return;
    }
    Words lanes;
    for (uint32_t i = 0; i < LANES; i++)
        lanes[i] = i * VALUE_STEP;
    char room[2 * LOT], *to = num < LOT ? room : p;
    store_halves(to, lot, lanes + noise);
    if (num < LOT)
        memcpy(p, room, num * size_of(dtype));
}

INLINE Lot part_of(const float *p, int64_t num) {
    return num < LOT ? load_part((const char *)p, num, FLOAT32) : load((const char *)p, FLOAT32);
}

/* One token at `width` columns of a matrix, of which `lots` lots hold numbers. */
INLINE void delta_columns(char *matrix, const float *query, const float *key, const float *value,
                          float rate, const float *left, float met, float *out, uint32_t noise,
                          int64_t key_dim, int64_t row_bytes, int64_t width, int lots, int dtype,
                          int by_channel) {
    int64_t lot_bytes = LOT * size_of(dtype);
    const float fading = by_channel ? 1 : *left;
    Lot found[STRIP_LOTS], answer[STRIP_LOTS];
    for (int n = 0; n < lots; n++)
        found[n] = answer[n] = (Lot){{0}, {0}};
    for (int64_t i = 0; i < key_dim; i++) {
        const float k = by_channel ? key[i] * left[i] : key[i];
        const float q = by_channel ? query[i] * left[i] : query[i];
#pragma GCC unroll 4
        for (int n = 0; n < lots; n++) {
            Lot x = load_part(matrix + i * row_bytes + n * lot_bytes, width - n * LOT, dtype);
            found[n] = (Lot){found[n].first + x.first * k, found[n].second + x.second * k};
            answer[n] = (Lot){answer[n].first + x.first * q, answer[n].second + x.second * q};
        }
    }
    for (int n = 0; n < lots; n++) {
        Lot v = part_of(value + n * LOT, width - n * LOT);
        found[n] = (Lot){(v.first - found[n].first * fading) * rate,
                         (v.second - found[n].second * fading) * rate};
        answer[n] = (Lot){answer[n].first * fading + found[n].first * met,
                          answer[n].second * fading + found[n].second * met};
        store_part((char *)(out + n * LOT), answer[n], width - n * LOT, FLOAT32);
    }
    for (int64_t i = 0; i < key_dim; i++) {
        const float stays = by_channel ? left[i] : fading;
#pragma GCC unroll 4
        for (int n = 0; n < lots; n++) {
            char *p = matrix + i * row_bytes + n * lot_bytes;
            Lot x = load_part(p, width - n * LOT, dtype);
            x = (Lot){x.first * stays + found[n].first * key[i],
                      x.second * stays + found[n].second * key[i]};
            store_state(p, x, width - n * LOT, noise + n * LOT * VALUE_STEP, dtype);
        }
        noise += KEY_STEP;
    }
}

/* The same of Mamba-2. */
INLINE void adding_columns(char *matrix, const float *query, const float *key, const float *value,
                           float rate, float fading, float *out, uint32_t noise, int64_t key_dim,
                           int64_t row_bytes, int64_t width, int lots, int dtype) {
    int64_t lot_bytes = LOT * size_of(dtype);
    Lot added[STRIP_LOTS], answer[STRIP_LOTS];
    for (int n = 0; n < lots; n++) {
        Lot v = part_of(value + n * LOT, width - n * LOT);
        added[n] = (Lot){v.first * rate, v.second * rate};
        answer[n] = (Lot){{0}, {0}};
    }
    for (int64_t i = 0; i < key_dim; i++) {
#pragma GCC unroll 4
        for (int n = 0; n < lots; n++) {
            char *p = matrix + i * row_bytes + n * lot_bytes;
            Lot x = load_part(p, width - n * LOT, dtype);
            x = (Lot){x.first * fading + added[n].first * key[i],
                      x.second * fading + added[n].second * key[i]};
            answer[n] = (Lot){answer[n].first + x.first * query[i],
                              answer[n].second + x.second * query[i]};
            store_state(p, x, width - n * LOT, noise + n * LOT * VALUE_STEP, dtype);
        }
        noise += KEY_STEP;
    }
    for (int n = 0; n < lots; n++)
        store_part((char *)(out + n * LOT), answer[n], width - n * LOT, FLOAT32);
}

/* All tokens of a sequence at some columns. */
INLINE void delta_strip(const struct delta_work *w, int64_t sequence, int64_t head, int64_t column,
                        int64_t width, int lots, int dtype, int corrects, int by_channel) {
    int64_t keys = w->key_dim, values = w->value_dim, heads = w->num_value_heads;
    int64_t key_head = head / (heads / w->num_key_heads);
    int64_t place_of_head = (w->rows[sequence] * heads + head) * keys * values;
    char *matrix = w->matrices + (place_of_head + column) * size_of(dtype);
    int64_t token = w->firsts[sequence], stop = token + w->counts[sequence];
    uint32_t noise = (uint32_t)w->befores[sequence] * TOKEN_STEP + (uint32_t)head * HEAD_STEP +
                     (uint32_t)column * VALUE_STEP;
    for (; token < stop; token++) {
        const float *query = w->queries + (token * w->num_key_heads + key_head) * keys;
        const float *key = w->keys + (token * w->num_key_heads + key_head) * keys;
        int64_t place = token * heads + head, row_bytes = values * size_of(dtype);
        const float *value = w->values + place * values + column;
        const float *left = w->left + place * (by_channel ? keys : 1);
        float rate = w->rates[place], met = 0, *out = w->out + place * values + column;
        if (corrects) {
            for (int64_t i = 0; i < keys; i++)
                met += query[i] * key[i];
            delta_columns(matrix, query, key, value, rate, left, met, out, noise, keys, row_bytes,
                          width, lots, dtype, by_channel);
        } else
            adding_columns(matrix, query, key, value, rate, *left, out, noise, keys, row_bytes,
                           width, lots, dtype);
        noise += TOKEN_STEP;
    }
}

INLINE void delta_head(const struct delta_work *w, int64_t sequence, int64_t head, int dtype,
                       int corrects, int by_channel) {
    int64_t column = 0, width = w->value_dim;
    for (; column + STRIP <= width; column += STRIP)
        delta_strip(w, sequence, head, column, STRIP, STRIP_LOTS, dtype, corrects, by_channel);
    /* Heads of Mamba-2 are 64 wide. Code for the delta rule would be laid out worse with it. */
    for (; !corrects && column + STRIP / 2 <= width; column += STRIP / 2)
        delta_strip(w, sequence, head, column, STRIP / 2, STRIP_LOTS / 2, dtype, corrects,
                    by_channel);
    for (; column < width; column += LOT) {
        int64_t left = width - column;
        delta_strip(w, sequence, head, column, left < LOT ? left : LOT, 1, dtype, corrects,
                    by_channel);
    }
}

/* A head of Mamba-2. */
static void adding_head(const struct delta_work *w, int64_t sequence, int64_t head) {
    if (w->dtype == FLOAT32)
        delta_head(w, sequence, head, FLOAT32, 0, 0);
    else
        delta_head(w, sequence, head, FLOAT16, 0, 0);
}

/* One of Kimi Delta Attention. */
static void channel_head(const struct delta_work *w, int64_t sequence, int64_t head) {
    if (w->dtype == FLOAT32)
        delta_head(w, sequence, head, FLOAT32, 1, 1);
    else
        delta_head(w, sequence, head, FLOAT16, 1, 1);
}

/* Does heads of sequences until none is left. Several threads may share a work. */
OF_THE_REST void moebatch_delta_rule(struct delta_work *w) {
    int64_t heads = w->num_value_heads, num_items = w->num_sequences * heads, item;
    while ((item = __atomic_fetch_add(&w->next_item, 1, __ATOMIC_RELAXED)) < num_items)
        if (!w->corrects)
            adding_head(w, item / heads, item % heads);
        else if (w->by_channel)
            channel_head(w, item / heads, item % heads);
        else if (w->dtype == FLOAT32)
            delta_head(w, item / heads, item % heads, FLOAT32, 1, 0);
        else
            delta_head(w, item / heads, item % heads, FLOAT16, 1, 0);
}

/* Most tokens that a convolution sees. */
#define MOST_TAPS 16
/* Channels of an item. */
#define CONV_CHANNELS 1024

/* The same as ConvWork in delta_rule.py. */
struct conv_work {
    char *seen;         /* [rows of the state, taps - 1, channels]: the last inputs */
    const char *inputs; /* of all tokens, rows of `stride` numbers */
    float *out;         /* [tokens, channels] */
    const float *taps;  /* [taps, channels] */
    const float *bias;  /* [channels], or NULL */
    const int64_t *rows, *firsts, *counts; /* as in delta_work */
    int64_t num_sequences, num_taps, channels, stride;
    int64_t next_item; /* some channels of a sequence; taken by whichever thread is free */
    int32_t dtype;     /* of inputs */
    int32_t activates; /* whether silu follows */
};

INLINE Lot stored_lot(Lot x, int dtype) {
    if (dtype != FLOAT16)
        return rounded_lot(x, dtype);
    char room[4 * LOT];
    store(room, x, dtype);
    return load(room, dtype);
}

/* A causal convolution over the lot of channels at c, and silu. */
INLINE void convolve_lot(const struct conv_work *w, int64_t sequence, int64_t c, int dtype) {
    int64_t width = w->channels, num = width - c, taps = w->num_taps;
    char *seen = w->seen + (w->rows[sequence] * (taps - 1) * width + c) * size_of(dtype);
    Lot weights[MOST_TAPS], last[MOST_TAPS], bias = {{0}, {0}};
    if (w->bias)
        bias = reordered(part_of(w->bias + c, num), FLOAT32, dtype);
    for (int64_t i = 0; i < taps; i++)
        weights[i] = reordered(part_of(w->taps + i * width + c, num), FLOAT32, dtype);
    for (int64_t i = 0; i + 1 < taps; i++)
        last[i] = load_part(seen + i * width * size_of(dtype), num, dtype);
    int64_t token = w->firsts[sequence], stop = token + w->counts[sequence];
    for (; token < stop; token++) {
        last[taps - 1] = load_part(w->inputs + (token * w->stride + c) * size_of(dtype), num, dtype);
        Lot x = product(last[0], weights[0]);
        for (int64_t i = 1; i < taps; i++)
            x = sum(x, product(last[i], weights[i]));
        x = stored_lot(sum(x, bias), dtype);
        if (w->activates)
            x = stored_lot((Lot){silu(x.first), silu(x.second)}, dtype);
        store_part((char *)(w->out + token * width + c), reordered(x, dtype, FLOAT32), num, FLOAT32);
        for (int64_t i = 0; i + 1 < taps; i++)
            last[i] = last[i + 1];
    }
    for (int64_t i = 0; i + 1 < taps; i++)
        store_part(seen + i * width * size_of(dtype), last[i], num, dtype);
}

INLINE void convolve_channels(const struct conv_work *w, int64_t sequence, int64_t c, int dtype) {
    int64_t stop = c + CONV_CHANNELS < w->channels ? c + CONV_CHANNELS : w->channels;
    for (; c < stop; c += LOT)
        convolve_lot(w, sequence, c, dtype);
}

/* Does channels of sequences until none is left. Several threads may share a work. */
OF_THE_REST void moebatch_convolve(struct conv_work *w) {
    int64_t parts = (w->channels + CONV_CHANNELS - 1) / CONV_CHANNELS, item;
    while ((item = __atomic_fetch_add(&w->next_item, 1, __ATOMIC_RELAXED)) <
           w->num_sequences * parts) {
        int64_t sequence = item / parts, c = item % parts * CONV_CHANNELS;
        if (w->dtype == FLOAT32)
            convolve_channels(w, sequence, c, FLOAT32);
        else if (w->dtype == BFLOAT16)
            convolve_channels(w, sequence, c, BFLOAT16);
        else
            convolve_channels(w, sequence, c, FLOAT16);
    }
}
