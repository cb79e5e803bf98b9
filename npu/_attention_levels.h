/* Scores and sums over K and V of small integers behind scales, in integers. A part of _attention_body.h.
 *
 * Queries, and weights times V's scales, become int16 behind a scale of their own: of a row's query once, of its
 * weights for each span. Products of them with levels (int8) and their sums fit int32: 2^15 * 128 * 256 < 2^31. What a
 * row must not see has weight 0, and a level times 0 is 0, whatever a slot holds. */

/* Vectors of tokens in a piece; sums of a row and vector that are formed apart, which hides the latency of AVX-512's
 * multiply-add; vectors of columns whose sums are formed together: half of what fp16 has, for where there is no such
 * instruction the product needs a register. */
enum { VECTORS = RP_PIECE / LANES, CHAINS = LANES == 16 ? 2 : 1, LEVELS_WIDE = LANES == 16 ? 4 : 2 };

/* Rows that share the loads of levels which are widened as they are loaded. */
enum { LEVELS_ROWS = 6 };

/* Whether K's levels are multiplied as they lie, and not transposed: see _attention_dots.h. */
ALWAYS_INLINE bool scored_as_they_lie(const rp_codec_layout *layout)
{
#ifdef RP_DOTS
    return layout->groups == 1;
#else
    (void)layout;
    return false;
#endif
}

/* Elements of query16 from a row to the next; behind head_dim they are 0. */
ALWAYS_INLINE int64_t query16_stride(int64_t head_dim)
{
    return (head_dim + RP_SLACK - 1) / RP_SLACK * RP_SLACK;
}

/* What turns values of at most `most` into int16. */
ALWAYS_INLINE float to_int16(float most)
{
    return most > 0 ? 32767.0f / most : 0.0f;
}

/* Multiply a row by the Walsh-Hadamard matrix, as rp_rotate does. */
ALWAYS_INLINE void rotate_row(float *x, int64_t head_dim, int32_t piece)
{
    for (int32_t half = 1; half < piece && half < LANES; half *= 2) {
        vec sign;
        for (int i = 0; i < LANES; i++)
            sign[i] = i & half ? -1.0f : 1.0f;
        for (int64_t d = 0; d < head_dim; d += LANES) {
            const vec v = v_load(x + d);
            v_store(x + d, v_swap(v, half) + v * sign);
        }
    }
    for (int64_t half = LANES; half < piece; half *= 2)
        for (int64_t start = 0; start < head_dim; start += 2 * half)
            for (int64_t d = start; d < start + half; d += LANES) {
                const vec low = v_load(x + d), high = v_load(x + d + half);
                v_store(x + d, low + high);
                v_store(x + d + half, low - high);
            }
    const vec norm = v_splat(1.0f / __builtin_sqrtf((float)piece));
    for (int64_t d = 0; d < head_dim; d += LANES)
        v_store(x + d, v_load(x + d) * norm);
}

/* Turn a row of query, rotated, into int16, in pairs of elements as i_transpose has them, or in order where K is not
 * transposed. NaN or infinity in it stays in the scale. */
static void narrow_query(rp_scratch *s, const rp_codec_layout *layout, int32_t row, int64_t head_dim)
{
    const float *query = s->query + row * head_dim;
    int16_t narrow[RP_MAX_HEAD_DIM + RP_SLACK];
    vec most = v_splat(0.0f);
    for (int64_t d = 0; d < head_dim; d += LANES)
        most = v_larger(most, v_load(query + d));
    const float highest = v_largest(most);
    const vec factor = v_splat(to_int16(highest));
    for (int64_t d = 0; d < head_dim; d += LANES)
        v_store_i16(narrow + d, v_load(query + d) * factor);
    const int64_t stride = query16_stride(head_dim);
    memset(narrow + head_dim, 0, (size_t)(stride - head_dim) * sizeof *narrow);
    int16_t *pair = s->query16 + row * stride;
    s->query_scale[row] = highest * (1 / 32767.0f);
    if (scored_as_they_lie(layout)) {
        memcpy(pair, narrow, (size_t)stride * sizeof *pair);
        return;
    }
    for (int64_t d = 0; d < stride; d += 2 * PAIR)
        for (int i = 0; i < PAIR; i++) {
            *pair++ = narrow[d + i];
            *pair++ = narrow[d + i + PAIR];
        }
}

/* Widen the scales of a piece's K or V, [group][token]; behind `size` they are 0. */
ALWAYS_INLINE void load_scales(const rp_codec_layout *layout, const uint8_t *levels, const rp_piece *piece,
                               float (*scales)[RP_PIECE])
{
    const int32_t groups = layout->groups;
    const uint8_t *row = levels - piece->before * layout->token_bytes;
    const uint16_t *from = (const uint16_t *)(row + layout->payload_bytes) + piece->before * groups;
    uint16_t half[RP_PIECE * RP_MAX_GROUPS];
    if (piece->size < RP_PIECE) {
        memset(half, 0, sizeof half);
        from = memcpy(half, from, (size_t)(piece->size * groups) * sizeof *half);
    }
    if (groups == 1) {
        for (int t = 0; t < RP_PIECE; t += LANES)
            v_store(scales[0] + t, v_load_f16(from + t));
        return;
    }
    float wide[RP_PIECE * RP_MAX_GROUPS];
    for (int32_t i = 0; i < RP_PIECE * groups; i += LANES)
        v_store(wide + i, v_load_f16(from + i));
    for (int32_t g = 0; g < groups; g++)
        for (int t = 0; t < RP_PIECE; t++)
            scales[g][t] = wide[t * groups + g];
}

/* The levels of a piece's tokens, head_dim apart: as they lie, or unpacked. */
static const int8_t *levels_of(int32_t codec, const rp_codec_layout *layout, int64_t head_dim, const uint8_t *row,
                               int32_t size, int8_t *unpacked)
{
    if (codec == RP_INT8)
        return (const int8_t *)row;
    if (head_dim / layout->groups == 32)
        for (int32_t byte = 0; byte < size * layout->token_bytes; byte += 16)
            i_unpack(row + byte, unpacked + 2 * byte);
    else
        for (int32_t t = 0; t < size; t++)
            rp_unpack(codec, row + t * layout->token_bytes, (int32_t)head_dim, unpacked + t * head_dim);
    return unpacked;
}

#ifdef RP_DOTS
#include "_attention_dots.h"
#endif

/* Scores of `rows` queries against all tokens of a piece, transposed. `ahead` is a row that is fetched meanwhile,
 * bit by bit; it has 2^-shift bytes for an element. */
ALWAYS_INLINE void score_levels(const int rows, const int16_t *keys, const uint8_t *ahead, const int shift,
                                int64_t head_dim, int64_t groups,
                                const int16_t *query, const float *query_scale, float (*scales)[RP_PIECE],
                                float (*score)[RP_SPAN], int32_t slot)
{
    const int64_t stride = query16_stride(head_dim), pairs = (groups == 1 ? (head_dim + 15) / 16 * 16 : head_dim / groups) / 2;
    vec sum[ROWS][VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++)
            sum[r][v] = v_splat(0.0f);
    for (int64_t g = 0; g < groups; g++) {
        ivec dot[ROWS][VECTORS][CHAINS];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < VECTORS; v++)
                UNROLL for (int c = 0; c < CHAINS; c++)
                    dot[r][v][c] = i_zero();
        for (int64_t pair = g * pairs; pair < (g + 1) * pairs; pair += CHAINS)
            UNROLL for (int c = 0; c < CHAINS; c++) {
                if (c == 0)
                    __builtin_prefetch(ahead + (pair * 2 * RP_PIECE >> shift));
                hvec key[VECTORS];
                UNROLL for (int v = 0; v < VECTORS; v++)
                    key[v] = i_load(keys + (pair + c) * 2 * RP_PIECE + v * 2 * LANES);
                UNROLL for (int r = 0; r < rows; r++) {
                    const hvec q = i_splat_pair(query + r * stride + (pair + c) * 2);
                    UNROLL for (int v = 0; v < VECTORS; v++)
                        dot[r][v][c] = i_multiply_add(dot[r][v][c], q, key[v]);
                }
            }
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < VECTORS; v++) {
                const ivec both = CHAINS == 2 ? i_add(dot[r][v][0], dot[r][v][CHAINS - 1]) : dot[r][v][0];
                sum[r][v] += v_from_int(both) * v_load(scales[g] + v * LANES);
            }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++)
            v_store(score[r] + slot + v * LANES, sum[r][v] * v_splat(query_scale[r]));
}

static void score_piece_levels(rp_scratch *s, int32_t codec, const rp_codec_layout *layout, int32_t first,
                               int32_t end, int64_t head_dim, const rp_piece *piece, int32_t slot,
                               const uint8_t *ahead)
{
    if (!ahead)
        ahead = piece->k; /* it is there: that does nothing */
    load_scales(layout, piece->k, piece, s->scales[0]);
    const int8_t *levels = levels_of(codec, layout, head_dim, piece->k, piece->size, s->levels[0]);
#ifdef RP_DOTS
    if (scored_as_they_lie(layout)) {
        score_piece_dots(s, first, end, levels, ahead, head_dim, piece->size, slot);
        return;
    }
#endif
    i_transpose(levels, head_dim, piece->size, s->keys16);
    for (int32_t r = first; r < end; r += ROWS) {
        const int32_t count = end - r < ROWS ? end - r : ROWS;
        const int16_t *query = s->query16 + r * query16_stride(head_dim);
        if (layout->groups == 1) /* as a constant: it saves a loop */
            BY_ROWS(count, score_levels, s->keys16, ahead, codec == RP_INT4, head_dim, 1, query, s->query_scale + r,
                    s->scales[0], s->weight + r, slot);
        else
            BY_ROWS(count, score_levels, s->keys16, ahead, 1, head_dim, layout->groups, query, s->query_scale + r,
                    s->scales[0], s->weight + r, slot);
    }
}

/* Turn a row's weights of a span, times V's scales of one group, into int16. What it must not see becomes 0. */
ALWAYS_INLINE void narrow_weights(rp_scratch *s, int32_t row, const rp_piece *piece, int32_t pieces, int32_t group)
{
    _Alignas(64) float product[RP_SPAN];
    vec most = v_splat(0.0f);
    for (int32_t i = 0; i < pieces; i++) {
        float *part = product + i * RP_PIECE;
        for (int t = 0; t < RP_PIECE; t += LANES)
            v_store(part + t, v_load(s->weight[row] + i * RP_PIECE + t) * v_load(s->scales[i][group] + t));
        if (!piece[i].whole) { /* a scale that it must not see may be NaN */
            for (int t = piece[i].hidden_from[row]; t < piece[i].hidden_to[row]; t++)
                part[t] = 0.0f;
            for (int t = piece[i].visible[row]; t < RP_PIECE; t++)
                part[t] = 0.0f;
        }
        for (int t = 0; t < RP_PIECE; t += LANES)
            most = v_larger(most, v_load(part + t));
    }
    const float highest = v_largest(most);
    const vec factor = v_splat(to_int16(highest));
    for (int32_t t = 0; t < pieces * RP_PIECE; t += LANES)
        v_store_i16(s->weight16[row] + t, v_load(product + t) * factor);
    s->weight_scale[row] = highest * (1 / 32767.0f);
}

/* V of a span. */
typedef struct {
    const int8_t *levels[RP_SPAN_PIECES];
    const uint8_t *ahead[RP_SPAN_PIECES]; /* rows that are fetched meanwhile */
    int32_t size[RP_SPAN_PIECES];
    int32_t pieces;
    bool full; /* every piece has RP_PIECE tokens */
} span_values;

/* sum += weight * V for `rows` rows and `wide` vectors of columns from column d on, two tokens at a time. */
ALWAYS_INLINE void add_columns_levels(const int rows, const int wide, const bool full, const int shift,
                                      const span_values *v, int64_t head_dim, float *sum, int64_t d,
                                      int16_t (*weight)[RP_SPAN], const float *scale)
{
    ivec s[LEVELS_ROWS][LEVELS_WIDE];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < wide; c++)
            s[r][c] = i_zero();
    for (int32_t i = 0; i < v->pieces; i++) {
        const int32_t n = full ? RP_PIECE : v->size[i];
        for (int32_t t = 0; t < n; t += 2) {
            UNROLL for (int byte = 0; byte < 2 * wide * LANES; byte += LINE)
                __builtin_prefetch(v->ahead[i] + ((d * RP_PIECE + t * wide * LANES + byte) >> shift));
            const int8_t *token = v->levels[i] + t * head_dim + d;
            const int8_t *other = token + (t + 1 < n ? head_dim : 0); /* weighs 0 where it is but a stand-in */
            hvec pairs[LEVELS_WIDE];
            UNROLL for (int c = 0; c < wide; c++)
                pairs[c] = i_load_pairs(token + c * LANES, other + c * LANES);
            UNROLL for (int r = 0; r < rows; r++) {
                const hvec w = i_splat_pair(weight[r] + i * RP_PIECE + t);
                UNROLL for (int c = 0; c < wide; c++)
                    s[r][c] = i_multiply_add(s[r][c], pairs[c], w);
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < wide; c++) {
            float *to = sum + r * head_dim + d + c * LANES;
            v_store(to, v_fma(v_from_int(s[r][c]), v_splat(scale[r]), v_load(to)));
        }
}

ALWAYS_INLINE void add_levels(const int rows, const bool full, const int shift, const span_values *v, int64_t head_dim,
                              float *sum, int64_t from, int64_t to, int16_t (*weight)[RP_SPAN], const float *scale)
{
    int64_t d = from;
    for (; d + LEVELS_WIDE * LANES <= to; d += LEVELS_WIDE * LANES)
        add_columns_levels(rows, LEVELS_WIDE, full, shift, v, head_dim, sum, d, weight, scale);
    for (; d < to; d += LANES)
        add_columns_levels(rows, 1, full, shift, v, head_dim, sum, d, weight, scale);
}

static void add_span_levels(rp_scratch *s, int32_t codec, const rp_codec_layout *layout, int32_t first,
                            int32_t end, int64_t head_dim, const rp_piece *piece, int32_t pieces,
                            const uint8_t *const *ahead)
{
    span_values v = {.pieces = pieces, .full = true};
    for (int32_t i = 0; i < pieces; i++) {
        load_scales(layout, piece[i].v, &piece[i], s->scales[i]);
        v.levels[i] = levels_of(codec, layout, head_dim, piece[i].v, piece[i].size, s->levels[i]);
        v.ahead[i] = ahead[i] ? ahead[i] : piece[i].v;
        v.size[i] = piece[i].size;
        v.full &= piece[i].size == RP_PIECE;
    }
    const int shift = codec == RP_INT4;
    const int64_t group = head_dim / layout->groups;
    for (int32_t g = 0; g < layout->groups; g++) {
        for (int32_t r = first; r < end; r++)
            narrow_weights(s, r, piece, pieces, g);
        for (int32_t r = first; r < end; r += LEVELS_ROWS) {
            const int32_t count = end - r < LEVELS_ROWS ? end - r : LEVELS_ROWS;
            float *sum = s->sum + r * head_dim;
            if (v.full) /* as a constant: a loop of few steps is slow */
                BY_ROWS6(count, add_levels, true, shift, &v, head_dim, sum, g * group, (g + 1) * group,
                        s->weight16 + r, s->weight_scale + r);
            else
                BY_ROWS6(count, add_levels, false, shift, &v, head_dim, sum, g * group, (g + 1) * group,
                        s->weight16 + r, s->weight_scale + r);
        }
    }
}
