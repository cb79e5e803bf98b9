/* One tile of attention: causal, grouped-query, straight through the block table, with online softmax; where a sequence
 * has a window, over the tokens in it and the sinks in front.
 *
 * Included once per instruction set, after the including file has defined vec (float32 lanes), uvec (as many uint32
 * lanes), LANES, the v_ functions and RP_ATTEND_TILE, the name of the kernel.
 *
 * fp16 is widened on load and everything is summed in float32. What one row computes, and in which order, depends on
 * its query, its position and its tokens alone: rows are only ever grouped to share a load. Every fused multiply-add is
 * written out and the compiler is told to form no others (-ffp-contract=off), so the bits of a row are the same in any
 * batch, chunk or thread. */

#include <math.h> /* INFINITY */
#include <stdbool.h>

/* Rows that share the loads of K and V. 3 rows by 4 vectors are 12 sums, which leaves registers of AVX2's 16 for the
 * operands and hides the latency of the multiply-add; grouped heads are commonly multiples of 3. */
enum { ROWS = 3, WIDE = 4 };

enum { LINE = 32 }; /* fp16 elements in a cache line */

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

/* 2^x for x <= 0 with a relative error below 1.1e-7; 0 from x = -126.5 down. NaN stays NaN.
 *
 * x is split into an integer n and f in [-0.5, 0.5]. Adding 1.5 * 2^23 + 127 rounds x to n and leaves n + 127, a float's
 * exponent field, in the lowest bits. 2^f is a minimax polynomial (relative error 2e-9) fitted with 2^0 = 1 exact. */
ALWAYS_INLINE vec exp2_of(vec x)
{
    const vec round = v_splat(0x1.8p23f + 127);
    const vec clamped = v_at_least(x, -127.0f);
    const vec biased = clamped + round;
    const vec f = clamped - (biased - round);

    vec p = v_splat(0x1.41fbbcp-13f);
    p = v_fma(p, f, v_splat(0x1.5f3e52p-10f));
    p = v_fma(p, f, v_splat(0x1.3b2d4cp-7f));
    p = v_fma(p, f, v_splat(0x1.c6aee8p-5f));
    p = v_fma(p, f, v_splat(0x1.ebfbdcp-3f));
    p = v_fma(p, f, v_splat(0x1.62e430p-1f));
    p = v_fma(p, f, v_splat(1.0f));
    return p * (vec)((uvec)biased << 23);
}

/* The K and V of one KV head for the tokens of one span. */
typedef struct {
    const uint16_t *k;
    const uint16_t *v;
    int64_t head_dim;
    int64_t next; /* elements from here to the next block's span, which is fetched meanwhile; 0 for none */
} span_kv;

/* Scores of `rows` queries against tokens from..n-1 of a span, `from` a multiple of 4. Slots up to the next multiple of 4
 * get the score of token n-1, so that no unwritten slot is read. */
ALWAYS_INLINE void score_rows(const int rows, span_kv kv, const float *query, int32_t from, int32_t n,
                              float (*score)[RP_SPAN])
{
    for (int32_t t = from; t < n; t += 4) {
        const uint16_t *token[4];
        UNROLL for (int i = 0; i < 4; i++)
            token[i] = kv.k + (t + i < n ? t + i : n - 1) * kv.head_dim;
        if (kv.next)
            for (int64_t d = 0; d < 4 * kv.head_dim; d += LINE)
                __builtin_prefetch(kv.k + t * kv.head_dim + d + kv.next);

        vec dot[ROWS][4];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int i = 0; i < 4; i++)
                dot[r][i] = v_splat(0.0f);
        for (int64_t d = 0; d < kv.head_dim; d += LANES) {
            vec q[ROWS];
            UNROLL for (int r = 0; r < rows; r++)
                q[r] = v_load(query + r * kv.head_dim + d);
            UNROLL for (int i = 0; i < 4; i++) {
                const vec key = v_load_f16(token[i] + d);
                UNROLL for (int r = 0; r < rows; r++)
                    dot[r][i] = v_fma(q[r], key, dot[r][i]);
            }
        }
        UNROLL for (int r = 0; r < rows; r++)
            v_store_sums(score[r] + t, dot[r]);
    }
}

/* sum += weight * V for `rows` rows, `wide` vectors of columns from column d on, tokens from..to-1 in order. */
ALWAYS_INLINE void add_columns(const int rows, const int wide, span_kv kv, float *sum, int64_t d,
                               float (*weight)[RP_SPAN], int32_t from, int32_t to)
{
    vec s[ROWS][WIDE];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < wide; c++)
            s[r][c] = v_load(sum + r * kv.head_dim + d + c * LANES);
    for (int32_t t = from; t < to; t++) {
        const uint16_t *token = kv.v + t * kv.head_dim + d;
        if (kv.next)
            __builtin_prefetch(token + kv.next);
        vec w[ROWS];
        UNROLL for (int r = 0; r < rows; r++)
            w[r] = v_splat(weight[r][t]);
        UNROLL for (int c = 0; c < wide; c++) {
            const vec value = v_load_f16(token + c * LANES);
            UNROLL for (int r = 0; r < rows; r++)
                s[r][c] = v_fma(w[r], value, s[r][c]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < wide; c++)
            v_store(sum + r * kv.head_dim + d + c * LANES, s[r][c]);
}

ALWAYS_INLINE void add_rows(const int rows, span_kv kv, float *sum, float (*weight)[RP_SPAN], int32_t from, int32_t to)
{
    int64_t d = 0;
    for (; d + WIDE * LANES <= kv.head_dim; d += WIDE * LANES)
        add_columns(rows, WIDE, kv, sum, d, weight, from, to);
    for (; d < kv.head_dim; d += LANES)
        add_columns(rows, 1, kv, sum, d, weight, from, to);
}

static void add_row(rp_scratch *s, int32_t row, span_kv kv, int32_t from, int32_t to)
{
    if (from < to)
        add_rows(1, kv, s->sum + row * kv.head_dim, s->weight + row, from, to);
}

/* Turn a row's scores of a span into weights relative to the row's highest score so far. When that rises, what was
 * summed under the old one shrinks accordingly. */
ALWAYS_INLINE void weigh(rp_scratch *s, int32_t row, int64_t head_dim)
{
    float *weight = s->weight[row];
    for (int32_t t = s->hidden_from[row]; t < s->hidden_to[row]; t++)
        weight[t] = -INFINITY;
    for (int32_t t = s->visible[row]; t < RP_SPAN; t++)
        weight[t] = -INFINITY;

    vec best = v_load(weight);
    for (int t = LANES; t < RP_SPAN; t += LANES)
        best = v_max(best, v_load(weight + t));
    const float highest = v_highest(best);
    vec total = v_load(s->total[row]);
    if (highest > s->highest[row]) {
        const vec shrink = exp2_of(v_splat(s->highest[row] - highest));
        float *sum = s->sum + row * head_dim;
        for (int64_t d = 0; d < head_dim; d += LANES)
            v_store(sum + d, v_load(sum + d) * shrink);
        total *= shrink;
        s->highest[row] = highest;
    }
    for (int t = 0; t < RP_SPAN; t += LANES) {
        const vec w = exp2_of(v_load(weight + t) - v_splat(s->highest[row]));
        v_store(weight + t, w);
        total += w;
    }
    v_store(s->total[row], total);
}

/* Hide from a row the tokens of a span of `size` from `sinks` on, up to the `oldest` of its window; both count from the
 * span's first token. False if none is left. */
ALWAYS_INLINE bool hide(rp_scratch *s, int32_t row, int32_t sinks, int32_t oldest, int32_t size)
{
    const int32_t from = sinks > 0 ? sinks : 0;
    const int32_t to = oldest < size ? oldest : size;
    const bool any = from < to;
    s->hidden_from[row] = any ? from : 0;
    s->hidden_to[row] = any ? to : 0;
    return to - from < size;
}

/* Attend rows first..end-1, each of which sees some token of the span. From row to row, `visible` never falls, and what
 * is hidden never becomes less; it starts at the same token. */
ALWAYS_INLINE void attend_span(rp_scratch *s, int32_t first, int32_t end, span_kv kv)
{
    span_kv here = kv; /* fetches ahead for the first group of rows only: once is enough */
    for (int32_t r = first; r < end; r += ROWS) {
        const int32_t count = end - r < ROWS ? end - r : ROWS;
        const float *query = s->query + r * kv.head_dim;
        const int32_t from = s->hidden_from[r] == 0 ? s->hidden_to[r] / 4 * 4 : 0;
        const int32_t seen = s->visible[r + count - 1];
        if (count == 3)
            score_rows(3, here, query, from, seen, s->weight + r);
        else if (count == 2)
            score_rows(2, here, query, from, seen, s->weight + r);
        else
            score_rows(1, here, query, from, seen, s->weight + r);
        here.next = 0;
    }

    for (int32_t r = first; r < end; r++)
        weigh(s, r, kv.head_dim);

    here = kv;
    for (int32_t r = first; r < end; r += ROWS) {
        const int32_t count = end - r < ROWS ? end - r : ROWS;
        const int32_t last = r + count - 1;
        int32_t shared = 0;
        if (s->hidden_from[last] == s->hidden_to[last]) { /* nothing is hidden from the rows before it either */
            shared = s->visible[r];
            float *sum = s->sum + r * kv.head_dim;
            if (count == 3)
                add_rows(3, here, sum, s->weight + r, 0, shared);
            else if (count == 2)
                add_rows(2, here, sum, s->weight + r, 0, shared);
            else
                add_rows(1, here, sum, s->weight + r, 0, shared);
            here.next = 0;
        }
        for (int32_t i = r; i <= last; i++) {
            add_row(s, i, here, 0, s->hidden_from[i]);
            add_row(s, i, here, shared > s->hidden_to[i] ? shared : s->hidden_to[i], s->visible[i]);
        }
    }
}

void RP_ATTEND_TILE(const rp_attention_step *step, const rp_tile *tile, int64_t layer_offset, const float *q,
                    float *out, rp_scratch *s)
{
    const int64_t head_dim = step->head_dim;
    const int32_t group = step->group;
    const int32_t start = step->query_starts[tile->sequence];
    const int32_t first_position =
        step->context_lens[tile->sequence] - (step->query_starts[tile->sequence + 1] - start);
    const int32_t *table = step->tables + (int64_t)tile->sequence * step->table_width;
    const int64_t head_offset = layer_offset + (int64_t)tile->kv_head * step->block_tokens * head_dim * 2;
    const vec scale = v_splat(step->scale * 1.44269504f); /* log2(e): weights are powers of 2 */

    const int32_t tokens = first_position + (tile->first + tile->rows - 1) / group + 1;
    const int32_t window = step->windows[tile->sequence];
    const int32_t sinks = step->sinks[tile->sequence] < tokens ? step->sinks[tile->sequence] : tokens;

    int64_t at[RP_TILE_ROWS]; /* where a row starts in q and in out */
    int32_t position[RP_TILE_ROWS];
    for (int32_t r = 0; r < tile->rows; r++) {
        const int32_t token = (tile->first + r) / group;
        const int64_t head = (int64_t)tile->kv_head * group + (tile->first + r) % group;
        at[r] = ((int64_t)(start + token) * step->kv_heads * group + head) * head_dim;
        position[r] = first_position + token;
        const int32_t oldest = window ? position[r] - window + 1 : 0;
        s->oldest[r] = oldest > sinks ? oldest : 0;
        s->hidden_from[r] = s->hidden_to[r] = 0;
        for (int64_t d = 0; d < head_dim; d += LANES) {
            v_store(s->query + r * head_dim + d, v_load(q + at[r] + d) * scale);
            v_store(s->sum + r * head_dim + d, v_splat(0.0f));
        }
        v_store(s->total[r], v_splat(0.0f));
        s->highest[r] = -INFINITY;
    }

    /* Blocks that some row sees: those of the sinks, then those from the first row's window on. */
    const int32_t blocks = (tokens + step->block_tokens - 1) / step->block_tokens;
    const int32_t sink_blocks = (sinks + step->block_tokens - 1) / step->block_tokens;
    const int32_t oldest_block = s->oldest[0] / step->block_tokens;
    int32_t next;
    for (int32_t block = sink_blocks ? 0 : oldest_block; block < blocks; block = next) {
        next = block + 1 < sink_blocks || block >= oldest_block ? block + 1 : oldest_block;
        const uint8_t *base = step->pool + table[block] * step->block_bytes + head_offset;
        const int64_t to_next = next < blocks ? (table[next] - table[block]) * step->block_bytes : 0;
        for (int32_t offset = 0; offset < step->block_tokens; offset += RP_SPAN) {
            const int32_t span = block * step->block_tokens + offset;
            const int32_t room = step->block_tokens - offset;
            const int32_t size = room < RP_SPAN ? room : RP_SPAN;
            int32_t first = 0; /* row that sees any of it: those before it come before the span.. */
            int32_t end = 0;   /* ..and windows of those from here on have left it behind */
            for (int32_t r = 0; r < tile->rows; r++) {
                const int32_t seen = position[r] + 1 - span;
                s->visible[r] = seen < size ? seen : size;
                first += seen <= 0;
                end += !window || hide(s, r, sinks - span, s->oldest[r] - span, size);
            }
            if (first >= end)
                continue;
            const uint16_t *k = (const uint16_t *)base + offset * head_dim;
            const span_kv kv = {.k = k, .v = k + step->kv_bytes / 2, .head_dim = head_dim, .next = to_next / 2};
            attend_span(s, first, end, kv);
        }
    }

    for (int32_t r = 0; r < tile->rows; r++) {
        const vec share = v_splat(1.0f / v_sum(v_load(s->total[r])));
        for (int64_t d = 0; d < head_dim; d += LANES)
            v_store(out + at[r] + d, v_load(s->sum + r * head_dim + d) * share);
    }
}
