/* Scores and sums over K and V of small integers behind scales, in integers. A part of _attention_body.h.
 *
 * Queries, and weights times V's scales, become int16 behind a scale of their own: of a row's query once, of its
 * weights for each piece. Products of them with levels (int8) and their sums fit int32: 2^15 * 128 * 256 < 2^31. What a
 * row must not see has weight 0, and a level times 0 is 0, whatever a slot holds. */

/* Elements of query16 from a row to the next; behind head_dim they are 0. */
ALWAYS_INLINE int64_t query16_stride(int64_t head_dim)
{
    return (head_dim + RP_SLACK - 1) / RP_SLACK * RP_SLACK;
}

/* What turns values of at most `most` into int16 */
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

/* Turn a row of query, rotated, into int16. NaN or infinity in it makes the scale NaN. */
static void narrow_query(rp_scratch *s, int32_t row, int64_t head_dim)
{
    const float *query = s->query + row * head_dim;
    int16_t *narrow = s->query16 + row * query16_stride(head_dim);
    vec most = v_splat(0.0f), fault = v_splat(0.0f);
    for (int64_t d = 0; d < head_dim; d += LANES) {
        const vec v = v_load(query + d);
        most = v_max(most, v_max(v, -v));
        fault += v * v_splat(0.0f);
    }
    const float highest = v_highest(most);
    const vec factor = v_splat(to_int16(highest));
    for (int64_t d = 0; d < head_dim; d += LANES)
        v_store_i16(narrow + d, v_load(query + d) * factor);
    memset(narrow + head_dim, 0, (size_t)(query16_stride(head_dim) - head_dim) * sizeof *narrow);
    s->query_scale[row] = highest / 32767.0f + v_sum(fault);
}

/* Widen the scales of a piece's K or V to s->scales, [group][token]; behind `size` they are 0. */
static void load_scales(rp_scratch *s, const rp_codec_layout *layout, const uint8_t *row, const rp_piece *piece)
{
    const int32_t groups = layout->groups;
    const uint8_t *from = row + layout->payload_bytes - piece->before * layout->token_bytes + piece->before * groups * 2;
    _Alignas(64) uint16_t half[RP_PIECE * RP_MAX_GROUPS] = {0};
    memcpy(half, from, (size_t)(piece->size * groups) * sizeof *half);
    if (groups == 1) {
        for (int t = 0; t < RP_PIECE; t += LANES)
            v_store(s->scales[0] + t, v_load_f16(half + t));
        return;
    }
    _Alignas(64) float wide[RP_PIECE * RP_MAX_GROUPS];
    for (int32_t i = 0; i < RP_PIECE * groups; i += LANES)
        v_store(wide + i, v_load_f16(half + i));
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

/* Scores of `rows` queries against tokens 0..n-1 of a piece, as score_fp16. */
ALWAYS_INLINE void score_levels(const int rows, const int8_t *k, const uint8_t *ahead, int32_t ahead_bytes,
                                int64_t head_dim, int32_t groups, const int16_t *query, const float *query_scale,
                                float (*scales)[RP_PIECE], int32_t n, float (*score)[RP_SPAN], int32_t slot)
{
    const int64_t stride = query16_stride(head_dim), group = head_dim / groups;
    for (int32_t t = 0; t < n; t += 4) {
        const int8_t *token[4];
        UNROLL for (int i = 0; i < 4; i++)
            token[i] = k + (t + i < n ? t + i : n - 1) * head_dim;
        if (ahead)
            for (int32_t byte = 0; byte < 4 * ahead_bytes; byte += LINE)
                __builtin_prefetch(ahead + t * ahead_bytes + byte);

        quad sum[ROWS];
        UNROLL for (int r = 0; r < rows; r++)
            sum[r] = (quad){0};
        for (int32_t g = 0; g < groups; g++) {
            ivec dot[ROWS][4];
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int i = 0; i < 4; i++)
                    dot[r][i] = i_zero();
            for (int64_t d = g * group; d < (g + 1) * group; d += 2 * LANES) {
                hvec key[4];
                UNROLL for (int i = 0; i < 4; i++)
                    key[i] = i_load_levels(token[i] + d);
                UNROLL for (int r = 0; r < rows; r++) {
                    const hvec q = i_load(query + r * stride + d);
                    UNROLL for (int i = 0; i < 4; i++)
                        dot[r][i] = i_multiply_add(dot[r][i], q, key[i]);
                }
            }
            quad scale;
            memcpy(&scale, scales[g] + t, sizeof scale);
            UNROLL for (int r = 0; r < rows; r++)
                sum[r] += i_sums(dot[r]) * scale;
        }
        UNROLL for (int r = 0; r < rows; r++) {
            sum[r] *= query_scale[r];
            memcpy(score[r] + slot + t, &sum[r], sizeof sum[r]);
        }
    }
}

static void score_piece_levels(rp_scratch *s, int32_t codec, const rp_codec_layout *layout, int32_t rows,
                               int64_t head_dim, const rp_piece *piece, int32_t slot, const rp_piece *later)
{
    load_scales(s, layout, piece->k, piece);
    const int8_t *k = levels_of(s, codec, layout, head_dim, piece->k, piece->size);
    const uint8_t *ahead = later ? later->k : NULL;
    for (int32_t r = 0; r < rows; r += ROWS) {
        const int32_t count = rows - r < ROWS ? rows - r : ROWS;
        const int32_t n = piece->whole ? RP_PIECE : piece->visible[r + count - 1];
        BY_ROWS(count, score_levels, k, ahead, layout->token_bytes, head_dim, layout->groups,
                s->query16 + r * query16_stride(head_dim), s->query_scale + r, s->scales, n, s->weight + r, slot);
        ahead = NULL;
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
    vec most = v_splat(0.0f), fault = v_splat(0.0f);
    for (int t = 0; t < RP_PIECE; t += LANES) {
        const vec v = v_load(product + t);
        most = v_max(most, v_max(v, -v));
        fault += v * v_splat(0.0f);
    }
    const float highest = v_highest(most);
    const vec factor = v_splat(to_int16(highest));
    for (int t = 0; t < RP_PIECE; t += LANES)
        v_store_i16(s->weight16[row] + t, v_load(product + t) * factor);
    s->weight_scale[row] = highest / 32767.0f + v_sum(fault);
}

/* sum += weight * V for `rows` rows and columns from..to-1, two tokens at a time. */
ALWAYS_INLINE void add_columns_levels(const int rows, const int wide, const int8_t *v, int64_t head_dim, float *sum,
                                      int64_t d, int16_t (*weight)[RP_PIECE], const float *scale, int32_t n)
{
    ivec s[ROWS][WIDE];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < wide; c++)
            s[r][c] = i_zero();
    for (int32_t t = 0; t < n; t += 2) {
        const int8_t *token = v + t * head_dim + d;
        const int8_t *other = token + (t + 1 < n ? head_dim : 0); /* weighs 0 where it is but a stand-in */
        hvec pairs[WIDE];
        UNROLL for (int c = 0; c < wide; c++)
            pairs[c] = i_load_pairs(token + c * LANES, other + c * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            const hvec w = i_splat_pair(weight[r] + t);
            UNROLL for (int c = 0; c < wide; c++)
                s[r][c] = i_multiply_add(s[r][c], pairs[c], w);
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
    for (; d + WIDE * LANES <= to; d += WIDE * LANES)
        add_columns_levels(rows, WIDE, v, head_dim, sum, d, weight, scale, n);
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
            BY_ROWS(count, add_levels, v, head_dim, s->sum + r * head_dim, g * group, (g + 1) * group,
                    s->weight16 + r, s->weight_scale + r, piece->size);
        }
    }
}
