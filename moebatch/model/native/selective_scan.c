/* The recurrence of Mamba-1 (Gu & Dao 2023, Mamba, algorithm 2), token by token, on matrices where
   they lie.

   Letters: T tokens, K size of a key, V channels. The matrix of a sequence is [K, V], of float32 or
   float16; all other numbers are float32. With the newest token's key k, query q, and of a channel
   value v and length of the time step l, a number s of row i becomes e^(l a) s + l v k[i], where a is
   how fast it fades, and the channel puts out the sum of s q[i] over its rows. All tokens take some
   channels before others, whose numbers stay in the nearest cache meanwhile. */

/* Channels of an item. */
#define SCAN_CHANNELS (4 * LOT)

/* The same as ScanWork in selective_scan.py. */
struct scan_work {
    char *matrices;                         /* of all rows of the state */
    const int64_t *rows, *firsts, *counts, *befores; /* as in delta_work */
    const float *queries, *keys;            /* [T, K] */
    const float *values, *lengths;          /* [T, V] */
    const float *decays;                    /* [K, V] */
    float *out;                             /* [T, V] */
    int64_t num_sequences, key_dim, channels;
    int64_t next_item; /* some channels of a sequence; taken by whichever thread is free */
    int32_t dtype;     /* of matrices */
};

/* All tokens of a sequence at a lot of channels, of which `num` are there. */
INLINE void scan_lot(const struct scan_work *w, int64_t sequence, int64_t c, int64_t num,
                     int dtype) {
    int64_t keys = w->key_dim, width = w->channels, row_bytes = width * size_of(dtype);
    char *matrix = w->matrices + (w->rows[sequence] * keys * width + c) * size_of(dtype);
    int64_t token = w->firsts[sequence], stop = token + w->counts[sequence];
    uint32_t noise = (uint32_t)w->befores[sequence] * TOKEN_STEP + (uint32_t)c * VALUE_STEP;
    for (; token < stop; token++, noise += TOKEN_STEP) {
        const float *query = w->queries + token * keys, *key = w->keys + token * keys;
        Lot length = part_of(w->lengths + token * width + c, num);
        Lot added = part_of(w->values + token * width + c, num), answer = {{0}, {0}};
        added = (Lot){added.first * length.first, added.second * length.second};
        for (int64_t i = 0; i < keys; i++) {
            char *p = matrix + i * row_bytes;
            Lot x = load_part(p, num, dtype), decay = part_of(w->decays + i * width + c, num);
            x.first = x.first * exp_of(decay.first * length.first) + added.first * key[i];
            x.second = x.second * exp_of(decay.second * length.second) + added.second * key[i];
            answer.first += x.first * query[i];
            answer.second += x.second * query[i];
            store_state(p, x, num, noise + (uint32_t)i * KEY_STEP, dtype);
        }
        store_part((char *)(w->out + token * width + c), answer, num, FLOAT32);
    }
}

/* Whole lots, whose numbers are read as they lie, and the last channels. */
INLINE void scan_channels(const struct scan_work *w, int64_t sequence, int64_t c, int dtype) {
    int64_t stop = c + SCAN_CHANNELS < w->channels ? c + SCAN_CHANNELS : w->channels;
    for (; c + LOT <= stop; c += LOT)
        scan_lot(w, sequence, c, LOT, dtype);
    if (c < stop)
        scan_lot(w, sequence, c, stop - c, dtype);
}

/* Does channels of sequences until none is left. Several threads may share a work. */
OF_THE_REST void moebatch_selective_scan(struct scan_work *w) {
    int64_t parts = (w->channels + SCAN_CHANNELS - 1) / SCAN_CHANNELS, item;
    while ((item = __atomic_fetch_add(&w->next_item, 1, __ATOMIC_RELAXED)) <
           w->num_sequences * parts) {
        int64_t sequence = item / parts, c = item % parts * SCAN_CHANNELS;
        if (w->dtype == FLOAT32)
            scan_channels(w, sequence, c, FLOAT32);
        else
            scan_channels(w, sequence, c, FLOAT16);
    }
}
