/* Scores and sums over fp16 K and V, widened on load. A part of _attention_body.h. */

/* Rows that are fetched meanwhile, to the first cache and to the second; NULL: none. */
typedef struct {
    const uint8_t *soon;
    const uint8_t *ahead;
} fetches;

/* A line or two at a time: more than a core can wait for at once would hold it up. */
ALWAYS_INLINE void fetch_lines(fetches rows, int64_t from, int bytes)
{
    if (rows.soon)
        UNROLL for (int byte = 0; byte < bytes; byte += LINE)
            FETCH_SOON(rows.soon + from + byte);
    if (rows.ahead)
        UNROLL for (int byte = 0; byte < bytes; byte += LINE)
            FETCH_AHEAD(rows.ahead + from + byte);
}

/* Call f as BY_ROWS does, with what it fetches; as a constant that there is nothing to fetch ahead, for the check is
 * felt. */
#define BY_ROWS_FETCHING(count, rows, f, ...)                                                                          \
    do {                                                                                                               \
        if ((rows).ahead) BY_ROWS(count, f, rows, __VA_ARGS__);                                                        \
        else BY_ROWS(count, f, ((fetches){(rows).soon, NULL}), __VA_ARGS__);                                           \
    } while (0)

/* Scores of `rows` queries against tokens from..n-1 of a piece, `from` a multiple of 4. Slots up to the next multiple of
 * 4 get the score of token n-1, so that no unwritten slot is read. */
ALWAYS_INLINE void score_fp16(const int rows, fetches fetched, const uint16_t *k, int64_t head_dim, const float *query,
                              int32_t from, int32_t n, float (*score)[RP_SPAN], int32_t slot)
{
    for (int32_t t = from; t < n; t += 4) {
        const uint16_t *token[4];
        UNROLL for (int i = 0; i < 4; i++)
            token[i] = k + (t + i < n ? t + i : n - 1) * head_dim;

        vec dot[ROWS][4];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int i = 0; i < 4; i++)
                dot[r][i] = v_splat(0.0f);
        for (int64_t d = 0; d < head_dim; d += LANES) {
            fetch_lines(fetched, (t * head_dim + 4 * d) * 2, 4 * LANES * 2);
            vec q[ROWS];
            UNROLL for (int r = 0; r < rows; r++)
                q[r] = v_load(query + r * head_dim + d);
            UNROLL for (int i = 0; i < 4; i++) {
                const vec key = v_load_f16(token[i] + d);
                UNROLL for (int r = 0; r < rows; r++)
                    dot[r][i] = v_fma(q[r], key, dot[r][i]);
            }
        }
        UNROLL for (int r = 0; r < rows; r++)
            v_store_sums(score[r] + slot + t, dot[r]);
    }
}

/* sum += weight * V for `rows` rows, `wide` vectors of columns from column d on, tokens from..to-1 in order. */
ALWAYS_INLINE void add_columns_fp16(const int rows, const int wide, fetches fetched, const uint16_t *v,
                                    int64_t head_dim, float *sum, int64_t d, float (*weight)[RP_SPAN], int32_t slot,
                                    int32_t from, int32_t to)
{
    vec s[ROWS][WIDE];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < wide; c++)
            s[r][c] = v_load(sum + r * head_dim + d + c * LANES);
    for (int32_t t = from; t < to; t++) {
        const int64_t at = t * head_dim + d;
        fetch_lines(fetched, at * 2, wide * LANES * 2);
        vec w[ROWS];
        UNROLL for (int r = 0; r < rows; r++)
            w[r] = v_splat(weight[r][slot + t]);
        UNROLL for (int c = 0; c < wide; c++) {
            const vec value = v_load_f16(v + at + c * LANES);
            UNROLL for (int r = 0; r < rows; r++)
                s[r][c] = v_fma(w[r], value, s[r][c]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < wide; c++)
            v_store(sum + r * head_dim + d + c * LANES, s[r][c]);
}

ALWAYS_INLINE void add_fp16(const int rows, fetches fetched, const uint16_t *v, int64_t head_dim, float *sum,
                            float (*weight)[RP_SPAN], int32_t slot, int32_t from, int32_t to)
{
    int64_t d = 0;
    for (; d + WIDE * LANES <= head_dim; d += WIDE * LANES)
        add_columns_fp16(rows, WIDE, fetched, v, head_dim, sum, d, weight, slot, from, to);
    for (; d < head_dim; d += LANES)
        add_columns_fp16(rows, 1, fetched, v, head_dim, sum, d, weight, slot, from, to);
}

/* Scores of the rows first..end-1. */
static void score_piece_fp16(rp_scratch *s, int32_t first, int32_t end, int64_t head_dim, const rp_piece *piece,
                             int32_t slot, fetches fetched)
{
    const uint16_t *k = (const uint16_t *)piece->k;
    for (int32_t r = first; r < end; r += ROWS) {
        const int32_t count = end - r < ROWS ? end - r : ROWS;
        const float *query = s->query + r * head_dim;
        int32_t from = 0, n = RP_PIECE;
        if (!piece->whole) { /* from row to row visible never falls, and what is hidden never becomes less */
            n = piece->visible[r + count - 1];
            from = piece->hidden_from[r] == 0 ? piece->hidden_to[r] / 4 * 4 : 0;
        }
        BY_ROWS_FETCHING(count, fetched, score_fp16, k, head_dim, query, from, n, s->weight + r, slot);
        fetched = (fetches){NULL, NULL}; /* once is enough */
    }
}

static void add_row_fp16(rp_scratch *s, int32_t row, const uint16_t *v, int64_t head_dim, int32_t slot, int32_t from,
                         int32_t to)
{
    if (from < to)
        add_fp16(1, (fetches){NULL, NULL}, v, head_dim, s->sum + row * head_dim, s->weight + row, slot, from, to);
}

/* Sums of the rows first..end-1. */
static void add_piece_fp16(rp_scratch *s, int32_t first, int32_t end, int64_t head_dim, const rp_piece *piece,
                           int32_t slot, fetches fetched)
{
    const uint16_t *v = (const uint16_t *)piece->v;
    for (int32_t r = first; r < end; r += ROWS) {
        const int32_t count = end - r < ROWS ? end - r : ROWS;
        const int32_t last = r + count - 1;
        int32_t shared = 0; /* tokens that all these rows see: they go together */
        if (piece->whole)
            shared = RP_PIECE;
        else if (piece->hidden_from[last] == piece->hidden_to[last]) /* so nothing is hidden from those before it */
            shared = piece->visible[r];
        if (shared > 0) {
            BY_ROWS_FETCHING(count, fetched, add_fp16, v, head_dim, s->sum + r * head_dim, s->weight + r, slot, 0,
                             shared);
            fetched = (fetches){NULL, NULL};
        }
        for (int32_t i = r; i <= last && !piece->whole; i++) { /* what a row must not see may be NaN: it skips that */
            add_row_fp16(s, i, v, head_dim, slot, shared, piece->hidden_from[i]);
            add_row_fp16(s, i, v, head_dim, slot, shared > piece->hidden_to[i] ? shared : piece->hidden_to[i],
                         piece->visible[i]);
        }
    }
}
