/* Scores over K of small integers as they lie, a token's elements side by side: for AVX2 that is less work than bringing
 * tokens side by side, if a token has one scale. A part of _attention_levels.h.
 *
 * Two tokens and six rows at a time: 12 sums on 16 registers. */

enum { DOT_TOKENS = 2 };

/* Sums of products of `rows` queries with DOT_TOKENS tokens; `query` has a row each `stride`. */
ALWAYS_INLINE void dot_tokens(const int rows, const int8_t *const *token, int64_t head_dim, const int16_t *query,
                              int64_t stride, ivec (*dot)[DOT_TOKENS])
{
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < DOT_TOKENS; i++)
            dot[r][i] = i_zero();
    for (int64_t d = 0; d < head_dim; d += 2 * LANES) {
        hvec key[DOT_TOKENS];
        UNROLL for (int i = 0; i < DOT_TOKENS; i++)
            key[i] = i_widen(token[i] + d);
        UNROLL for (int r = 0; r < rows; r++) {
            const hvec q = i_load(query + r * stride + d);
            UNROLL for (int i = 0; i < DOT_TOKENS; i++)
                dot[r][i] = i_multiply_add(dot[r][i], q, key[i]);
        }
    }
}

/* Scores of `rows` queries against all tokens of a piece; those behind `size` are stand-ins. `ahead` is a row that is
 * fetched meanwhile, bit by bit. */
ALWAYS_INLINE void score_dots(const int rows, const int8_t *levels, const uint8_t *ahead, int64_t head_dim,
                              int32_t size, const int16_t *query, const float *query_scale, const float *scales,
                              float (*score)[RP_SPAN], int32_t slot)
{
    const int64_t stride = query16_stride(head_dim);
    for (int32_t t = 0; t < RP_PIECE; t += DOT_TOKENS) {
        const int8_t *token[DOT_TOKENS];
        UNROLL for (int i = 0; i < DOT_TOKENS; i++)
            token[i] = levels + (t + i < size ? t + i : size - 1) * head_dim;
        for (int64_t byte = 0; byte < DOT_TOKENS * head_dim; byte += LINE)
            FETCH_SOON(ahead + t * head_dim + byte);
        ivec dot[LEVELS_ROWS][DOT_TOKENS];
        dot_tokens(rows, token, head_dim, query, stride, dot);
        UNROLL for (int r = 0; r < rows; r += 2) {
            const int other = r + 1 < rows ? r + 1 : r;
            i_store_scores(score[r] + slot + t, score[other] + slot + t, dot[r], dot[other], scales + t,
                           query_scale[r], query_scale[other]);
        }
    }
}

/* Scores of the rows first..end-1. */
static void score_piece_dots(rp_scratch *s, int32_t first, int32_t end, const int8_t *levels, const uint8_t *ahead,
                             int64_t head_dim, int32_t size, int32_t slot)
{
    for (int32_t r = first; r < end; r += LEVELS_ROWS) {
        const int32_t count = end - r < LEVELS_ROWS ? end - r : LEVELS_ROWS;
        const int16_t *query = s->query16 + r * query16_stride(head_dim);
        BY_ROWS6(count, score_dots, levels, ahead, head_dim, size, query, s->query_scale + r, s->scales[0][0],
                 s->weight + r, slot);
    }
}
