/* Declarations of _gather.c. cffi parses this file, so it holds no preprocessor line. */

/* How the tokens of an operand lie in memory; all values are bytes but `pieces`. A token's channels are `pieces`
 * pieces, back to back in the source. Where mark_bytes is not 0, that many bytes follow as one piece more: the same
 * for every token of a call. */
typedef struct {
    int64_t head_stride;
    int64_t token_stride;
    int64_t piece_stride;
    int64_t piece_bytes;
    int64_t pieces;
    int64_t mark_bytes;
} rp_place;

/* Copy n runs of tokens. runs is int64 [n, 4]: source offset, head, first token, tokens. A run is read at
 * src + src_shift + source offset, so that one plan serves every layer. Source and destination never overlap.
 * mark is read only where place->mark_bytes is not 0. */
void rp_gather(const uint8_t *src, int64_t src_shift, uint8_t *dst, const rp_place *place, const int64_t *runs,
               int64_t n, const uint8_t *mark);

/* Zero n runs of tokens, and mark them. runs is int64 [n, 3]: head, first token, tokens. */
void rp_clear(uint8_t *dst, const rp_place *place, const int64_t *runs, int64_t n, const uint8_t *mark);
