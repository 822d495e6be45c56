/* What attention is given, the same as AttentionWork in attention_work.py: single queries, or slices
   of queries of a sequence. Rows of a tensor lie so many of its numbers apart, their heads side by
   side. */
typedef struct {
    const char *queries;      /* [tokens, H, C], query_row apart */
    const char *sink_queries; /* the same as they meet sinks, sink_query_row apart */
    char *out;                /* [tokens, H, V], out_row apart */
    const char *keys, *values;
    const int64_t *tokens; /* row of each query, or of each slice's first one, in queries and out */
    const int64_t *counts; /* queries of each slice; single ones have none */
    const int64_t *starts; /* of what each sees, in rows; and the end of the last */
    const int64_t *rows;   /* the first ones are sinks, if there are such; the last ones of a slice
                              are those of its queries themselves */
    const float *sink_scores; /* [H], each one more score of a head's softmax without a value; or
                                 NULL */
    int64_t num_slices; /* or single queries */
    int64_t num_heads, num_kv_heads, num_sinks, head_dim, value_dim;
    int64_t value_head; /* numbers of the cached head in which values are the first ones */
    int64_t query_row, sink_query_row, out_row, key_row, value_row;
    int64_t window; /* positions that a query of a slice sees, with its own */
    int64_t kv_heads_per_item; /* divides num_kv_heads; a single query is one item or several */
    int64_t rows_per_item; /* of slices, at most, divisible by SIDE; a row is a query at a head */
    int64_t next_item; /* taken by whichever thread is free */
    int32_t dtype, cache_dtype; /* of queries and out; of keys and values */
    float scale;
    int32_t has_failed; /* for want of memory */
} AttentionWork;
