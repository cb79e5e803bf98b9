/* Scores and sums over K and V of small integers behind scales, in integers. A part of _attention_body.h.
 *
 * Queries, and weights times V's scales, become int16 behind a scale of their own: of a row's query once, of its
 * weights for each piece. Products of them with levels (int8) and their sums fit int32: 2^15 * 128 * 256 < 2^31. What a
 * row must not see has weight 0, and a level times 0 is 0, whatever a slot holds. */

/* Vectors of tokens in a piece; sums of a row and vector that are formed apart, which hides the latency of AVX-512's
 * multiply-add; vectors of columns whose sums are formed together: half of what fp16 has, for where there is no such
 * instruction the product needs a register. */
enum { VECTORS = RP_PIECE / LANES, CHAINS = LANES == 16 ? 2 : 1, LEVELS_WIDE = LANES == 16 ? 4 : 2 };

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

/* Turn a row of query, rotated, into int16, in pairs of elements as i_transpose has them. NaN or infinity in it stays in
 * the scale. */
static void narrow_query(rp_scratch *s, int32_t row, int64_t head_dim)
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
    for (int64_t d = 0; d < stride; d += 2 * PAIR)
        for (int i = 0; i < PAIR; i++) {
            *pair++ = narrow[d + i];
            *pair++ = narrow[d + i + PAIR];
        }
    s->query_scale[row] = highest * (1 / 32767.0f);
}

/* Widen the scales of a piece's K or V to s->scales, [group][token]; behind `size` they are 0. */
ALWAYS_INLINE void load_scales(rp_scratch *s, const rp_codec_layout *layout, const uint8_t *levels,
                               const rp_piece *piece)
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
            v_store(s->scales[0] + t, v_load_f16(from + t));
        return;
    }
    float wide[RP_PIECE * RP_MAX_GROUPS];
    for (int32_t i = 0; i < RP_PIECE * groups; i += LANES)
        v_store(wide + i, v_load_f16(from + i));
    for (int32_t g = 0; g < groups; g++)
        for (int t = 0; t < RP_PIECE; t++)
            s->scales[g][t] = wide[t * groups + g];
}

/* The levels of a piece's tokens, head_dim apart: as they lie, or unpacked to s->levels. */
static const int8_t *levels_of(rp_scratch *s, int32_t codec, const rp_codec_layout *layout, int64_t head_dim,
                               const uint8_t *row, int32_t size)
{
    if (codec == RP_INT8)
        return (const int8_t *)row;
    if (rp_codec_group(codec, (int32_t)head_dim) == 32)
        for (int32_t byte = 0; byte < size * layout->token_bytes; byte += 16)
            i_unpack(row + byte, s->levels + 2 * byte);
    else
        for (int32_t t = 0; t < size; t++)
            rp_unpack(codec, row + t * layout->token_bytes, (int32_t)head_dim, s->levels + t * head_dim);
    return s->levels;
}

/* Scores of `rows` queries against all tokens of a piece, transposed. */
ALWAYS_INLINE void score_levels(const int rows, const int16_t *keys, int64_t head_dim, int64_t groups,
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

static void score_piece_levels(rp_scratch *s, int32_t codec, const rp_codec_layout *layout, int32_t rows,
                               int64_t head_dim, const rp_piece *piece, int32_t slot, const rp_piece *later)
{
    if (later)
        for (int32_t byte = 0; byte < RP_PIECE * layout->token_bytes; byte += LINE)
            __builtin_prefetch(later->k + byte);
    load_scales(s, layout, piece->k, piece);
    i_transpose(levels_of(s, codec, layout, head_dim, piece->k, piece->size), head_dim, piece->size, s->keys16);
    for (int32_t r = 0; r < rows; r += ROWS) {
        const int32_t count = rows - r < ROWS ? rows - r : ROWS;
        const int16_t *query = s->query16 + r * query16_stride(head_dim);
        if (layout->groups == 1) /* as a constant: it saves a loop */
            BY_ROWS(count, score_levels, s->keys16, head_dim, 1, query, s->query_scale + r, s->scales, s->weight + r,
                    slot);
        else
            BY_ROWS(count, score_levels, s->keys16, head_dim, layout->groups, query, s->query_scale + r, s->scales,
                    s->weight + r, slot);
    }
}

/* Turn a row's weights of a piece, times V's scales of one group, into int16. What it must not see becomes 0. */
ALWAYS_INLINE void narrow_weights(rp_scratch *s, int32_t row, const rp_piece *piece, int32_t slot, const float *scales)
{
    _Alignas(64) float product[RP_PIECE];
    for (int t = 0; t < RP_PIECE; t += LANES)
        v_store(product + t, v_load(s->weight[row] + slot + t) * v_load(scales + t));
    if (!piece->whole) { /* a scale that it must not see may be NaN */
        for (int t = piece->hidden_from[row]; t < piece->hidden_to[row]; t++)
            product[t] = 0.0f;
        for (int t = piece->visible[row] > 0 ? piece->visible[row] : 0; t < RP_PIECE; t++)
            product[t] = 0.0f;
    }
    vec most = v_splat(0.0f);
    for (int t = 0; t < RP_PIECE; t += LANES)
        most = v_larger(most, v_load(product + t));
    const float highest = v_largest(most);
    const vec factor = v_splat(to_int16(highest));
    for (int t = 0; t < RP_PIECE; t += LANES)
        v_store_i16(s->weight16[row] + t, v_load(product + t) * factor);
    s->weight_scale[row] = highest * (1 / 32767.0f);
}

/* sum += weight * V for `rows` rows and columns from..to-1, two tokens at a time. */
ALWAYS_INLINE void add_columns_levels(const int rows, const int wide, const int8_t *v, int64_t head_dim, float *sum,
                                      int64_t d, int16_t (*weight)[RP_PIECE], const float *scale, int32_t n)
{
    ivec s[ROWS][LEVELS_WIDE];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < wide; c++)
            s[r][c] = i_zero();
    UNROLL for (int32_t t = 0; t < n; t += 2) {
        const int8_t *token = v + t * head_dim + d;
        const int8_t *other = token + (t + 1 < n ? head_dim : 0); /* weighs 0 where it is but a stand-in */
        hvec w[ROWS];
        UNROLL for (int r = 0; r < rows; r++)
            w[r] = i_splat_pair(weight[r] + t);
        UNROLL for (int c = 0; c < wide; c++) {
            const hvec pairs = i_load_pairs(token + c * LANES, other + c * LANES);
            UNROLL for (int r = 0; r < rows; r++)
                s[r][c] = i_multiply_add(s[r][c], pairs, w[r]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < wide; c++) {
            float *to = sum + r * head_dim + d + c * LANES;
            v_store(to, v_fma(v_from_int(s[r][c]), v_splat(scale[r]), v_load(to)));
        }
}

ALWAYS_INLINE void add_levels(const int rows, const int8_t *v, int64_t head_dim, float *sum, int64_t from, int64_t to,
                              int16_t (*weight)[RP_PIECE], const float *scale, int32_t n)
{
    int64_t d = from;
    for (; d + LEVELS_WIDE * LANES <= to; d += LEVELS_WIDE * LANES)
        add_columns_levels(rows, LEVELS_WIDE, v, head_dim, sum, d, weight, scale, n);
    for (; d < to; d += LANES)
        add_columns_levels(rows, 1, v, head_dim, sum, d, weight, scale, n);
}

static void add_piece_levels(rp_scratch *s, int32_t codec, const rp_codec_layout *layout, int32_t rows,
                             int64_t head_dim, const rp_piece *piece, int32_t slot, const rp_piece *later)
{
    load_scales(s, layout, piece->v, piece);
    const int8_t *v = levels_of(s, codec, layout, head_dim, piece->v, piece->size);
    if (later)
        for (int32_t byte = 0; byte < RP_PIECE * layout->token_bytes; byte += LINE)
            __builtin_prefetch(later->v + byte);
    const int64_t group = head_dim / layout->groups;
    for (int32_t g = 0; g < layout->groups; g++) {
        for (int32_t r = 0; r < rows; r++)
            narrow_weights(s, r, piece, slot, s->scales[g]);
        for (int32_t r = 0; r < rows; r += ROWS) {
            const int32_t count = rows - r < ROWS ? rows - r : ROWS;
            float *sum = s->sum + r * head_dim;
            if (piece->size == RP_PIECE) /* as a constant: a loop of few steps is slow */
                BY_ROWS(count, add_levels, v, head_dim, sum, g * group, (g + 1) * group, s->weight16 + r,
                        s->weight_scale + r, RP_PIECE);
            else
                BY_ROWS(count, add_levels, v, head_dim, sum, g * group, (g + 1) * group, s->weight16 + r,
                        s->weight_scale + r, piece->size);
        }
    }
}
