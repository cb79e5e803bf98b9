/* One tile of attention: causal, grouped-query, straight through the block table, with online softmax; where a sequence
 * has a window, over the tokens in it and the sinks in front.
 *
 * Included once per instruction set, after the including file has defined vec (float32 lanes), uvec (as many uint32
 * lanes), ivec (as many int32), hvec (twice as many int16), LANES, RP_ROWS, the v_ and i_ functions and
 * RP_KERNEL and RP_NAME, the kernel's symbol and its name.
 *
 * Everything is summed in float32, but for products of small integers within a piece. What one row computes, and in
 * which order, depends on its query, its position and its tokens alone: rows are only ever grouped to share a load.
 * Scores are exponents of 2 and a row's maximum is rounded to an integer, so that weights taken relative to one maximum
 * or another differ by an exact power of 2: how many pieces are weighed at once changes no bit. Every fused
 * multiply-add is written out and the compiler is told to form no others (-ffp-contract=off). So the bits of a row are
 * the same in any batch, chunk or thread. */

/* Rows that share the loads of K and V, and vectors of columns: 12 sums on 16 registers, 24 on 32, which leaves some for
 * operands and hides the latency of the multiply-add. Grouped heads are commonly multiples of 3. */
enum { ROWS = RP_ROWS, WIDE = 4 };

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

/* Call f with the number of rows, 1..3 or 1..6, as a constant in front of its other arguments. */
#define BY_ROWS3(count, f, ...)                                                                                        \
    do {                                                                                                               \
        if ((count) == 3) f(3, __VA_ARGS__);                                                                           \
        else if ((count) == 2) f(2, __VA_ARGS__);                                                                      \
        else f(1, __VA_ARGS__);                                                                                        \
    } while (0)
#define BY_ROWS6(count, f, ...)                                                                                        \
    do {                                                                                                               \
        if ((count) == 6) f(6, __VA_ARGS__);                                                                           \
        else if ((count) == 5) f(5, __VA_ARGS__);                                                                      \
        else if ((count) == 4) f(4, __VA_ARGS__);                                                                      \
        else BY_ROWS3(count, f, __VA_ARGS__);                                                                          \
    } while (0)
#if RP_ROWS == 3
#define BY_ROWS BY_ROWS3
#else
#define BY_ROWS BY_ROWS6
#endif

#include "_attention_walk.h"
#include "_attention_ahead.h"
#include "_attention_fp16.h"
#include "_attention_levels.h"

/* 2^(x - highest), for x at most highest + 1/2, with a relative error below 1.1e-7; 0 where that is below 2^-126. NaN
 * stays NaN.
 *
 * x is split into an integer n and f in [-0.5, 0.5]. 2^f is a minimax polynomial (relative error 2e-9) fitted with
 * 2^0 = 1 exact. Adding 1.5 * 2^23 + 127 to n - highest leaves a float's exponent field in the lowest bits. */
ALWAYS_INLINE vec exp2_beside(vec x, vec highest)
{
    const vec n = v_round(x);
    const vec f = x - n;
    const vec biased = v_at_least(n - highest, -127.0f) + v_splat(0x1.8p23f + 127);

    vec p = v_splat(0x1.41fbbcp-13f);
    p = v_fma(p, f, v_splat(0x1.5f3e52p-10f));
    p = v_fma(p, f, v_splat(0x1.3b2d4cp-7f));
    p = v_fma(p, f, v_splat(0x1.c6aee8p-5f));
    p = v_fma(p, f, v_splat(0x1.ebfbdcp-3f));
    p = v_fma(p, f, v_splat(0x1.62e430p-1f));
    p = v_fma(p, f, v_splat(1.0f));
    return p * (vec)((uvec)biased << 23);
}

/* Turn a row's scores of a span into weights relative to the row's highest score so far. When that rises, what was
 * summed under the old one shrinks accordingly. */
ALWAYS_INLINE void weigh(rp_scratch *s, int32_t row, int64_t head_dim, const rp_piece *piece, int32_t pieces)
{
    float *weight = s->weight[row];
    for (int32_t i = 0; i < pieces; i++) {
        if (piece[i].whole)
            continue;
        float *score = weight + i * RP_PIECE;
        for (int t = piece[i].hidden_from[row]; t < piece[i].hidden_to[row]; t++)
            score[t] = RP_UNSEEN;
        for (int t = piece[i].visible[row] > 0 ? piece[i].visible[row] : 0; t < RP_PIECE; t++)
            score[t] = RP_UNSEEN;
    }

    const int32_t slots = pieces * RP_PIECE;
    vec best = v_load(weight);
    for (int32_t t = LANES; t < slots; t += LANES)
        best = v_max(best, v_load(weight + t));
    const float highest = v_highest(v_round(best));
    vec total = v_load(s->total[row]);
    if (highest > s->highest[row]) {
        const vec shrink = v_splat(rp_exp2(s->highest[row] - highest));
        float *sum = s->sum + row * head_dim;
        for (int64_t d = 0; d < head_dim; d += LANES)
            v_store(sum + d, v_load(sum + d) * shrink);
        total *= shrink;
        s->highest[row] = highest;
    }
    const vec beside = v_splat(s->highest[row]);
    for (int32_t t = 0; t < slots; t += LANES) {
        const vec w = exp2_beside(v_load(weight + t), beside);
        v_store(weight + t, w);
        total += w;
    }
    v_store(s->total[row], total);
}

/* Attend the rows of one of the tile's heads over `pieces` pieces, while what lies ahead is fetched. `next_k` is the K
 * that comes behind their V; NULL: none does. */
static void attend_span(const tile_view *view, rp_scratch *s, int32_t head, const rp_piece *piece, int32_t pieces,
                        const uint8_t *const *next_k, rows_ahead *ahead)
{
    const int64_t head_dim = view->step->head_dim;
    const int32_t head_rows = view->rows / view->heads, first = head * head_rows, end = first + head_rows;
    for (int32_t i = 0; i < pieces; i++) {
        const uint8_t *row = next_row(view, ahead);
        if (view->codec == RP_FP16)
            score_piece_fp16(s, first, end, head_dim, piece + i, i * RP_PIECE, (fetches){piece[i].v, row});
        else
            score_piece_levels(s, view->codec, view->layout, first, end, head_dim, piece + i, i * RP_PIECE, row);
    }
    for (int32_t r = first; r < end; r++)
        weigh(s, r, head_dim, piece, pieces);
    const uint8_t *row[RP_SPAN_PIECES];
    for (int32_t i = 0; i < pieces; i++)
        row[i] = next_row(view, ahead);
    if (view->codec == RP_FP16)
        for (int32_t i = 0; i < pieces; i++)
            add_piece_fp16(s, first, end, head_dim, piece + i, i * RP_PIECE, (fetches){next_k[i], row[i]});
    else
        add_span_levels(s, view->codec, view->layout, first, end, head_dim, piece, pieces, row);
}

/* Attend all heads over `pieces` pieces, before the `laters` pieces behind them. Afterwards `piece` is the last head's. */
static void attend_heads(const tile_view *view, rp_scratch *s, rp_piece *piece, int32_t pieces, const rp_piece *later,
                         int32_t laters)
{
    rows_ahead ahead = begin_ahead(view, later, laters);
    for (int32_t head = 0;; head++) {
        const bool last = head + 1 == view->heads;
        const uint8_t *next_k[RP_SPAN_PIECES];
        for (int32_t i = 0; i < pieces; i++)
            next_k[i] = !last ? piece[i].k + view->layout->row_bytes : i < laters ? later[i].k : NULL;
        attend_span(view, s, head, piece, pieces, next_k, &ahead);
        if (last)
            return;
        for (int32_t i = 0; i < pieces; i++) {
            piece[i].k += view->layout->row_bytes;
            piece[i].v += view->layout->row_bytes;
        }
    }
}

/* Begin the sums of a row's next segment. */
ALWAYS_INLINE void begin_segment(rp_scratch *s, int32_t row, int64_t head_dim)
{
    memset(s->sum + row * head_dim, 0, (size_t)head_dim * sizeof *s->sum);
    memset(s->total[row], 0, sizeof s->total[row]);
    s->highest[row] = RP_NOTHING;
}

/* End a row's segment: merge its sums into those of the segments before it. */
ALWAYS_INLINE void end_segment(rp_scratch *s, int32_t row, int32_t head_dim)
{
    float segment[RP_MAX_HEAD_DIM + 2];
    memcpy(segment, s->sum + row * head_dim, (size_t)head_dim * sizeof *segment);
    segment[head_dim] = v_sum(v_load(s->total[row]));
    segment[head_dim + 1] = s->highest[row];
    rp_merge(s->part + row * (head_dim + 2), segment, head_dim);
    begin_segment(s, row, head_dim);
}

static void attend_blocks(const tile_view *view, rp_scratch *s, walk at)
{
    const int32_t block_tokens = view->step->block_tokens;
    rp_piece pieces[2][RP_SPAN_PIECES];
    int32_t now = 0, count = next_span(view, s, &at, pieces[0]);
    fetch_span(view, pieces[0], count);
    while (count) {
        const int32_t later = next_span(view, s, &at, pieces[!now]);
        rp_piece *first = pieces[now];
        if (first->before == 0 && segment_ends(&at, first->position / block_tokens, block_tokens))
            for (int32_t r = 0; r < view->rows; r++)
                end_segment(s, r, view->step->head_dim);
        attend_heads(view, s, first, count, pieces[!now], later);
        count = later;
        now = !now;
    }
}

/* Read a row of q, in the space that K lies in. */
ALWAYS_INLINE void begin_row(const tile_view *view, rp_scratch *s, int32_t row, const float *q)
{
    const int64_t head_dim = view->step->head_dim;
    const vec scale = v_splat(view->step->scale * 1.44269504f); /* log2(e): weights are powers of 2 */
    float *query = s->query + row * head_dim;
    for (int64_t d = 0; d < head_dim; d += LANES)
        v_store(query + d, v_load(q + d) * scale);
    if (view->codec != RP_FP16) {
        rotate_row(query, head_dim, view->layout->rotation);
        narrow_query(s, view->layout, row, head_dim);
    }
    float *part = s->part + row * (head_dim + 2);
    memset(part, 0, (size_t)(head_dim + 1) * sizeof *part);
    part[head_dim + 1] = RP_NOTHING;
    begin_segment(s, row, head_dim);
}

/* Write a row of out: all segments are merged. */
ALWAYS_INLINE void finish_row(const tile_view *view, float *part, float *out)
{
    const int32_t head_dim = view->step->head_dim;
    if (view->layout->rotation > 1)
        rotate_row(part, head_dim, view->layout->rotation);
    const vec share = v_splat(1.0f / part[head_dim]);
    for (int64_t d = 0; d < head_dim; d += LANES)
        v_store(out + d, v_load(part + d) * share);
}

static tile_view view_of(const rp_attention_step *step, const rp_tile *tile)
{
    const int32_t codec = step->codecs[tile->sequence];
    const rp_codec_layout *layout = &step->layouts[codec];
    const int64_t kv = step->kv_heads * layout->row_bytes;
    return (tile_view){
        .step = step,
        .layout = layout,
        .codec = codec,
        .heads = tile->heads,
        .rows = tile->rows,
        .k = step->layer * 2 * kv + tile->kv_head * layout->row_bytes,
        .kv = kv,
        .table = step->tables + (int64_t)tile->sequence * step->table_width,
    };
}

/* Which of the sequence's tokens of this step a row of a tile is for. */
static int32_t token_of(const rp_attention_step *step, const rp_tile *tile, int32_t row)
{
    return tile->heads > 1 ? 0 : (tile->first + row) / step->group;
}

/* Its position in the context. */
static int32_t position_of(const rp_attention_step *step, const rp_tile *tile, int32_t row)
{
    const int32_t asking = step->query_starts[tile->sequence + 1] - step->query_starts[tile->sequence];
    return step->context_lens[tile->sequence] - asking + token_of(step, tile, row);
}

/* Blocks between those of the sinks and that of a row's window. */
static int32_t skipped_by(const rp_attention_step *step, const rp_tile *tile, int32_t row)
{
    const int32_t position = position_of(step, tile, row), sinks = step->sinks[tile->sequence];
    return rp_skipped(rp_oldest(position, step->windows[tile->sequence], sinks), sinks, step->block_tokens);
}

/* Floats of q, and of out, before a row of a tile. */
static int64_t offset_of(const rp_attention_step *step, const rp_tile *tile, int32_t row)
{
    const int32_t token = token_of(step, tile, row);
    const int32_t head = tile->kv_head * step->group + tile->first + row - token * step->group;
    return ((int64_t)(step->query_starts[tile->sequence] + token) * step->kv_heads * step->group + head) *
           step->head_dim;
}

/* Attend rows that all look into the same blocks, up to their own position. */
static void attend_rows(const rp_attention_step *step, const rp_tile *tile, const float *q, float *out, rp_scratch *s)
{
    const int32_t head_dim = step->head_dim, block_tokens = step->block_tokens;
    const int32_t tokens = position_of(step, tile, tile->rows - 1) + 1;
    const int32_t sinks = step->sinks[tile->sequence];
    tile_view view = view_of(step, tile);
    view.sinks = sinks < tokens ? sinks : tokens;

    for (int32_t r = 0; r < tile->rows; r++) {
        s->position[r] = position_of(step, tile, r);
        s->oldest[r] = rp_oldest(s->position[r], step->windows[tile->sequence], view.sinks);
        begin_row(&view, s, r, q + offset_of(step, tile, r));
    }

    const int32_t sink_blocks = rp_block_count(view.sinks, block_tokens);
    const int32_t skipped = rp_skipped(s->oldest[0], view.sinks, block_tokens);
    const int32_t segment = rp_segment_blocks(block_tokens);
    int32_t first = 0, behind = rp_block_count(tokens, block_tokens) - skipped; /* of the blocks that are looked into */
    if (tile->parts) {
        first = tile->segment * segment;
        behind = first + segment < behind ? first + segment : behind;
    }
    attend_blocks(&view, s, (walk){
        .block = first < sink_blocks ? first : first + skipped,
        .end = behind <= sink_blocks ? behind : behind + skipped,
        .sink_blocks = sink_blocks,
        .skipped = skipped,
    });

    for (int32_t r = 0; r < tile->rows; r++) {
        end_segment(s, r, head_dim);
        float *part = s->part + r * (head_dim + 2);
        if (tile->parts)
            memcpy(part_of(step, tile, tile->segment, r), part, (size_t)(head_dim + 2) * sizeof *part);
        else
            finish_row(&view, part, out + offset_of(step, tile, r));
    }
}

static void attend_tile(const rp_attention_step *step, const rp_tile *tile, const float *q, float *out, rp_scratch *s)
{
    rp_tile rows = *tile;
    for (int32_t left = tile->rows; left > 0; left -= rows.rows) { /* of most tiles there is one such run of rows */
        rows.rows = 1;
        while (rows.rows < left && skipped_by(step, &rows, rows.rows) == skipped_by(step, &rows, 0))
            rows.rows++;
        attend_rows(step, &rows, q, out, s);
        rows.first += rows.rows;
    }
}

static void merge_tile(const rp_attention_step *step, const rp_tile *tile, float *out)
{
    const tile_view view = view_of(step, tile);
    for (int32_t r = 0; r < tile->rows; r++) {
        float *part = part_of(step, tile, 0, r);
        for (int32_t segment = 1; segment < tile->segments; segment++)
            rp_merge(part, part_of(step, tile, segment, r), step->head_dim);
        finish_row(&view, part, out + offset_of(step, tile, r));
    }
}

const rp_kernel RP_KERNEL = {RP_NAME, attend_tile, merge_tile};
