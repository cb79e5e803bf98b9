/* What is fetched before it is read. A part of _attention_body.h.
 *
 * A block's K and V of one layer lie in one piece, heads side by side, and memory is fast in long runs only: on Zen 5
 * runs of 12 KiB come half again as fast as runs of 2 KiB. So a tile of several heads fetches a span ahead, in the order
 * in which things lie. */

enum { LINE = 64 }; /* bytes of a cache line */

/* To the first cache, for what is read right behind; and to the second one, which has room for more. */
#define FETCH_SOON(address) __builtin_prefetch(address, 0, 3)
#define FETCH_AHEAD(address) __builtin_prefetch(address, 0, 2)

/* Rows of K and V of a span, a piece long, that are still to be fetched. */
typedef struct {
    const rp_piece *piece;
    int32_t pieces;
    int32_t row; /* of the first of them: K of each head, then V of each */
} rows_ahead;

/* The next of them; NULL behind the last. */
static const uint8_t *next_row(const tile_view *view, rows_ahead *ahead)
{
    if (ahead->pieces == 0)
        return NULL;
    const rp_piece *piece = ahead->piece;
    const int32_t row = ahead->row, heads = view->heads;
    *ahead = row + 1 < 2 * heads ? (rows_ahead){piece, ahead->pieces, row + 1}
                                 : (rows_ahead){piece + 1, ahead->pieces - 1, 0};
    return row < heads ? piece->k + row * view->layout->row_bytes : piece->v + (row - heads) * view->layout->row_bytes;
}

/* Fetch a span that nothing was computed in front of. */
static void fetch_span(const tile_view *view, const rp_piece *piece, int32_t pieces)
{
    rows_ahead ahead = {piece, pieces, 0};
    for (const uint8_t *row; (row = next_row(view, &ahead));)
        for (int32_t byte = 0; byte < RP_PIECE * view->layout->token_bytes; byte += LINE)
            FETCH_SOON(row + byte);
}

/* What is to be fetched, bit by bit, beside the span before it. Of fp16 a head's K is fetched soon enough, from memory or
 * from where it was fetched to, beside the V in front of it, and V beside its own K. */
static rows_ahead begin_ahead(const tile_view *view, const rp_piece *piece, int32_t pieces)
{
    if (view->codec != RP_FP16 || view->heads > 1)
        return (rows_ahead){piece, pieces, 0};
    for (int32_t i = 0; i < pieces; i++) { /* their pages' addresses at least */
        FETCH_AHEAD(piece[i].k);
        FETCH_AHEAD(piece[i].v);
    }
    return (rows_ahead){piece, 0, 0};
}
