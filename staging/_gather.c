/* Making scattered runs contiguous, and clearing what lies behind them. The caller has checked every range. */
#include <stdint.h>
#include <string.h>

#include "_gather.h"

/* A tile's share of a token; as a constant it is one load and one store. */
enum { TILE_BYTES = 16 };

/* Whether a run of tokens is one run of bytes. */
static int is_plain(const rp_place *place)
{
    return place->pieces == 1 && place->token_stride == place->piece_bytes && place->mark_bytes == 0;
}

static void put_marks(uint8_t *dst, const rp_place *place, int64_t tokens, const uint8_t *mark)
{
    if (place->mark_bytes == 0)
        return;
    dst += place->pieces * place->piece_stride;
    for (int64_t t = 0; t < tokens; t++, dst += place->token_stride)
        memcpy(dst, mark, (size_t)place->mark_bytes);
}

void rp_gather(const uint8_t *src, int64_t src_shift, uint8_t *dst, const rp_place *place, const int64_t *runs,
               int64_t n, const uint8_t *mark)
{
    const rp_place p = *place; /* a copy: bytes written through dst cannot change it */
    const int64_t token_bytes = p.pieces * p.piece_bytes;
    const int plain = is_plain(&p);
    for (int64_t i = 0; i < n; i++, runs += 4) {
        const uint8_t *from = src + src_shift + runs[0];
        uint8_t *to = dst + runs[1] * p.head_stride + runs[2] * p.token_stride;
        const int64_t tokens = runs[3];
        if (plain) {
            memcpy(to, from, (size_t)(tokens * token_bytes));
            continue;
        }
        /* Piece by piece: the writes of one piece are neighbours in tiles, and the source run lies in L1. */
        for (int64_t piece = 0; piece < p.pieces; piece++) {
            const uint8_t *s = from + piece * p.piece_bytes;
            uint8_t *d = to + piece * p.piece_stride;
            if (p.piece_bytes == TILE_BYTES)
                for (int64_t t = 0; t < tokens; t++)
                    memcpy(d + t * p.token_stride, s + t * token_bytes, TILE_BYTES);
            else
                for (int64_t t = 0; t < tokens; t++)
                    memcpy(d + t * p.token_stride, s + t * token_bytes, (size_t)p.piece_bytes);
        }
        put_marks(to, &p, tokens, mark);
    }
}

void rp_clear(uint8_t *dst, const rp_place *place, const int64_t *runs, int64_t n, const uint8_t *mark)
{
    const rp_place p = *place;
    const int plain = is_plain(&p);
    for (int64_t i = 0; i < n; i++, runs += 3) {
        uint8_t *to = dst + runs[0] * p.head_stride + runs[1] * p.token_stride;
        const int64_t tokens = runs[2];
        if (plain) {
            memset(to, 0, (size_t)(tokens * p.piece_bytes));
            continue;
        }
        for (int64_t piece = 0; piece < p.pieces; piece++)
            for (int64_t t = 0; t < tokens; t++)
                memset(to + piece * p.piece_stride + t * p.token_stride, 0, (size_t)p.piece_bytes);
        put_marks(to, &p, tokens, mark);
    }
}
