/* Declarations of _batch.c. cffi parses this file, so it holds no preprocessor line. */

/* The decoding sequences of `DecodeBatch`, one row of each array for each of them. The arrays are numpy's. */
typedef struct {
    int32_t block_tokens;
    int32_t kept_blocks;  /* of newest */
    int64_t table_width;  /* ids from one row of tables to the next */
    int32_t *tokens;      /* [capacity] the newest one */
    int32_t *positions;   /* [capacity] where it stands */
    int32_t *limits;      /* [capacity] the position of the last token that has a place */
    int64_t *slots;       /* [capacity] where the newest token's K and V go */
    uint8_t *in_flight;   /* [capacity] whether a step computes it */
    int32_t *own_until;   /* [capacity] the first position that has no room in the table */
    int64_t *windowing;   /* [capacity][windowing_width] the tokens in the table's gap, and what is not looked at here */
    int64_t windowing_width;
    int32_t *newest;      /* [capacity][kept_blocks][block_tokens] the newest tokens, position p at p % all of a row */
    int32_t *tables;      /* [capacity][table_width] block ids */
    int32_t *sampled;     /* [capacity] in: each one's next token, in the order of places */
    int32_t *fresh;       /* [capacity] in: ids of new blocks, in the order of places */
    int32_t *filled;      /* [capacity][3] out: place, number of the block that it has filled, the block's id */
    int32_t *texts;       /* [capacity][block_tokens] out: that block's tokens */
    int64_t *ended;       /* [capacity] out: which of the places have no place for a further token */
    int64_t ended_count;  /* out: entries of `ended` */
} rp_batch;

/* Each of these has computed its newest token, and gets the next one of `sampled`.
 *
 * places  [n] rows, each once; NULL: the first n
 *
 * Returns how many blocks have been filled. */
int64_t rp_batch_advance(rp_batch *batch, const int64_t *places, int64_t n);

/* How wide the tables must be for a further block of each of these; -1: the last block of one is not full, so that what
 * it needs is a copy of that. */
int64_t rp_batch_width_to_grow(const rp_batch *batch, const int64_t *places, int64_t n);

/* Put a block of `fresh` behind those of each of these, all of which are full, and its next token at the beginning. */
void rp_batch_grow(rp_batch *batch, const int64_t *places, int64_t n);
