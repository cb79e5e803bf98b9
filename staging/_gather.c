/* Making scattered blocks contiguous, and clearing what lies behind them. The caller has checked every range. */
#include <stdint.h>
#include <string.h>

#include "../hostcache/_codec.h"
#include "../hostcache/_rows.h"
#include "_copy.h"
#include "_gather.h"

/* A tile's share of a token; as a constant it is one load and one store. */
enum { TILE_BYTES = 16 };

/* Set when the module is loaded, before any thread can stage. */
static const rp_row_ops *ops;

__attribute__((constructor)) static void choose_ops(void)
{
    ops = rp_row_ops_named("auto");
}

/* Whether a run of tokens is one run of bytes. */
static int is_plain(const rp_place *place)
{
    return place->pieces == 1 && place->token_stride == place->piece_bytes && place->mark_bytes == 0;
}

static void put_marks(uint8_t *to, const rp_place *place, int64_t tokens, uint16_t mark)
{
    if (place->mark_bytes == 0)
        return;
    to += place->pieces * place->piece_stride;
    for (int64_t t = 0; t < tokens; t++, to += place->token_stride) {
        memset(to, 0, (size_t)place->mark_bytes);
        memcpy(to, &mark, sizeof mark);
    }
}

/* Where a run's rows of one layer begin, with its first token's place in the block. */
static inline const uint8_t *run_start(const rp_rows *rows, const int64_t *run, int64_t token_bytes,
                                       const uint8_t *layer)
{
    return layer + run[0] + (int32_t)run[2] % rows->block_tokens * token_bytes;
}

/* Copy one head's tokens from `at` on of the block that is read. */
static inline __attribute__((always_inline)) void put_tokens(uint8_t *to, const rp_place *place, int plain,
                                                             const reading *from, int64_t at, int64_t tokens)
{
    const int64_t piece_bytes = place->piece_bytes, token_bytes = place->pieces * piece_bytes;
    if (plain) {
        copy_ahead(to, from, at, tokens * token_bytes);
        return;
    }
    if (place->pieces == 1) {
        for (int64_t t = 0; t < tokens; t++, at += token_bytes)
            copy_ahead(to + t * place->token_stride, from, at, token_bytes);
    } else {
        /* Piece by piece: the writes of one piece are neighbours in tiles, and the source run lies in L1. */
        const uint8_t *src = from->here + at;
        for (int64_t piece = 0; piece < place->pieces; piece++, src += piece_bytes) {
            uint8_t *tile = to + piece * place->piece_stride;
            for (int64_t t = 0; t < tokens; t++)
                memcpy(tile + t * place->token_stride, src + t * token_bytes, TILE_BYTES);
        }
        look_ahead(from, at, tokens * token_bytes);
    }
    put_marks(to, place, tokens, 0);
}

/* Copy all heads' rows of K, or of V, of one run: from `at` on of the block that is read. */
static inline __attribute__((always_inline)) void put_heads(uint8_t *operand, const rp_place *place, int plain,
                                                            const rp_rows *rows, const reading *from, int64_t at,
                                                            const int64_t *run)
{
    uint8_t *to = operand + run[1] * rows->kv_heads * place->head_stride + run[2] * place->token_stride;
    for (int32_t head = 0; head < rows->kv_heads; head++, to += place->head_stride, at += rows->row_bytes)
        put_tokens(to, place, plain, from, at, run[3]);
}

/* The same of a quantised block: as fp16, as the cache reads it. */
static void decode_heads(uint8_t *operand, const rp_place *place, const rp_rows *rows, const reading *from, int64_t at,
                         const int64_t *run)
{
    const int32_t head_dim = rows->head_dim, codec = rows->codec, first = (int32_t)run[2] % rows->block_tokens;
    const int64_t token_bytes = codec == RP_INT8 ? head_dim : head_dim / 2;
    const int64_t scale_bytes = 2 * (head_dim / rp_codec_group(codec, head_dim));
    uint8_t *to = operand + run[1] * rows->kv_heads * place->head_stride + run[2] * place->token_stride;
    uint16_t halves[RP_MOST_HEAD_DIM];
    for (int32_t head = 0; head < rows->kv_heads; head++, to += place->head_stride, at += rows->row_bytes) {
        look_ahead(from, at, rows->row_bytes);
        const uint8_t *codes = from->here + at + first * token_bytes;
        const uint8_t *scales = from->here + at + rows->block_tokens * token_bytes + first * scale_bytes;
        uint8_t *token = to;
        for (int64_t t = 0; t < run[3]; t++, token += place->token_stride) {
            uint16_t *const whole = place->pieces == 1 ? (uint16_t *)token : halves;
            ops->decode(codec, codes + t * token_bytes, scales + t * scale_bytes, head_dim, whole);
            const uint8_t *src = (const uint8_t *)halves;
            for (int64_t i = 0; whole == halves && i < place->pieces; i++, src += TILE_BYTES)
                memcpy(token + i * place->piece_stride, src, TILE_BYTES);
        }
        put_marks(to, place, run[3], 0);
    }
}

static void gather(const rp_plan *plan, const rp_part *part, const uint8_t *layer, uint8_t *buffer)
{
    /* Copies: bytes written through buffer cannot change them. */
    const rp_rows rows = part->rows;
    const rp_place keys = plan->keys, values = plan->values;
    const int keys_plain = is_plain(&keys), values_plain = is_plain(&values);
    uint8_t *const to_keys = buffer + plan->keys_offset, *const to_values = buffer + plan->values_offset;
    const int quantised = rows.codec != RP_FP16;
    const int64_t token_bytes = quantised ? 0 : keys.pieces * keys.piece_bytes; /* scales lie behind all tokens' codes */
    const int64_t *run = part->runs;
    reading from = {.bytes = rows.layer_bytes};
    from.next = from.later = run_start(&rows, run, token_bytes, layer);
    if (part->n > 1)
        from.later = run_start(&rows, run + 4, token_bytes, layer);
    for (int64_t left = part->n; left > 0; left--, run += 4) {
        from.here = from.next;
        from.next = from.later;
        if (left > 2)
            from.later = run_start(&rows, run + 8, token_bytes, layer);
        /* In the order in which the rows lie. */
        if (quantised) {
            decode_heads(to_keys, &keys, &rows, &from, 0, run);
            decode_heads(to_values, &values, &rows, &from, rows.kv_bytes, run);
            continue;
        }
        put_heads(to_keys, &keys, keys_plain, &rows, &from, 0, run);
        put_heads(to_values, &values, values_plain, &rows, &from, rows.kv_bytes, run);
    }
}

static void clear(uint8_t *operand, const rp_place *place, const int64_t *runs, int64_t n, uint16_t mark)
{
    const rp_place p = *place;
    for (int64_t i = 0; i < n; i++, runs += 3) {
        uint8_t *to = operand + runs[0] * p.head_stride + runs[1] * p.token_stride;
        const int64_t tokens = runs[2];
        if (is_plain(&p)) {
            memset(to, 0, (size_t)(tokens * p.piece_bytes));
            continue;
        }
        for (int64_t piece = 0; piece < p.pieces; piece++)
            for (int64_t t = 0; t < tokens; t++)
                memset(to + piece * p.piece_stride + t * p.token_stride, 0, (size_t)p.piece_bytes);
        put_marks(to, &p, tokens, mark);
    }
}

void rp_stage(const rp_plan *plan, const uint8_t *pool, int64_t layer, uint8_t *buffer)
{
    for (int64_t i = 0; i < plan->n_parts; i++)
        if (plan->parts[i].n > 0)
            gather(plan, &plan->parts[i], pool + layer * plan->parts[i].rows.layer_bytes, buffer);
    clear(buffer + plan->keys_offset, &plan->keys, plan->tails, plan->n_tails, plan->hidden_mark);
    clear(buffer + plan->values_offset, &plan->values, plan->tails, plan->n_tails, 0);
}
