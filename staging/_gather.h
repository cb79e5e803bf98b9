/* Declarations of _gather.c. cffi parses this file, so it holds no preprocessor line. */

/* How the tokens of an operand lie in memory; all values are bytes but `pieces`. A token's channels are `pieces`
 * pieces, back to back in the source. Where mark_bytes is not 0, that many bytes follow as one piece more: fp16, of
 * which the first says whether the token is hidden. */
typedef struct {
    int64_t head_stride;
    int64_t token_stride;
    int64_t piece_stride;
    int64_t piece_bytes;
    int64_t pieces;
    int64_t mark_bytes;
} rp_place;

/* The rows of one codec's blocks: [layer][k|v][kv_head], each of block_tokens tokens. Strides are bytes. */
typedef struct {
    int64_t layer_bytes;
    int64_t kv_bytes;
    int64_t row_bytes;
    int32_t block_tokens;
    int32_t kv_heads;
    int32_t head_dim;
    int32_t codec;
} rp_rows;

/* Blocks of one codec. runs is int64 [n, 4]: where the block lies in the pool, sequence, first token in the operand,
 * tokens. A token's place in its block is its place in the operand, modulo block_tokens. */
typedef struct {
    rp_rows rows;
    const int64_t *runs;
    int64_t n;
} rp_part;

/* What makes a launch's K and V out of the pool; the same for every layer. tails is int64 [n_tails, 3]: head, first
 * token, tokens; what is cleared, and marked as hidden. Offsets are from the start of the buffer. */
typedef struct {
    rp_place keys;
    rp_place values;
    int64_t keys_offset;
    int64_t values_offset;
    const rp_part *parts;
    int64_t n_parts;
    const int64_t *tails;
    int64_t n_tails;
    uint16_t hidden_mark;
} rp_plan;

/* Stage one layer. Pool and buffer never overlap. The caller has checked every range. */
void rp_stage(const rp_plan *plan, const uint8_t *pool, int64_t layer, uint8_t *buffer);
