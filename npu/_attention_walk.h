/* The way through a block table: which tokens come together, and what a tile's rows see of them. A part of
 * _attention_body.h. */

/* What is the same for every span of a tile. */
typedef struct {
    const rp_attention_step *step;
    const rp_codec_layout *layout;
    int32_t codec;
    int32_t heads;
    int32_t rows; /* of all of them */
    int32_t sinks;
    int64_t k;  /* bytes from a block to the K of the tile's first KV head; the next one's lies behind */
    int64_t kv; /* from that to its V */
    const int32_t *table;
} tile_view;

/* Walks the pieces that some row sees: of the sinks' blocks, then from the window on. */
typedef struct {
    int32_t block;  /* the next */
    int32_t offset; /* tokens of it that are behind */
    int32_t end;    /* block to stop at */
    int32_t sink_blocks;
    int32_t skipped; /* blocks from there to the window's first */
} walk;

/* Whether a segment ends where a block begins: after so many blocks that the rows look into. */
static bool segment_ends(const walk *at, int32_t block, int32_t block_tokens)
{
    const int32_t index = block < at->sink_blocks ? block : block - at->skipped;
    return index > 0 && index % rp_segment_blocks(block_tokens) == 0;
}

static void look_at(const tile_view *view, const rp_scratch *s, int32_t block, int32_t offset, rp_piece *piece)
{
    const rp_attention_step *step = view->step;
    const int32_t room = step->block_tokens - offset;
    const uint8_t *row = step->pool + view->table[block] * step->unit_bytes + view->k;
    piece->k = row + offset * view->layout->token_bytes;
    piece->v = piece->k + view->kv;
    piece->before = offset;
    piece->size = room < RP_PIECE ? room : RP_PIECE;
    piece->position = block * step->block_tokens + offset;

    const int32_t end = piece->position + piece->size, last = view->rows - 1;
    piece->whole = piece->size == RP_PIECE && end <= s->position[0] + 1 &&
                   (s->oldest[last] <= piece->position || end <= view->sinks);
    if (piece->whole)
        return;
    for (int32_t r = 0; r <= last; r++) {
        const int32_t visible = s->position[r] + 1 - piece->position;
        const int32_t from = view->sinks > piece->position ? view->sinks - piece->position : 0;
        const int32_t oldest = s->oldest[r] - piece->position;
        const int32_t to = oldest < piece->size ? oldest : piece->size;
        piece->visible[r] = (int8_t)(visible < 0 ? 0 : visible < piece->size ? visible : piece->size);
        piece->hidden_from[r] = (int8_t)(from < to ? from : 0);
        piece->hidden_to[r] = (int8_t)(from < to ? to : 0);
    }
}

/* Take the next pieces, up to RP_SPAN_PIECES and to where a segment ends. Returns how many. */
static int32_t next_span(const tile_view *view, const rp_scratch *s, walk *at, rp_piece *piece)
{
    int32_t pieces = 0;
    while (pieces < RP_SPAN_PIECES && at->block < at->end) {
        if (pieces && at->offset == 0 && segment_ends(at, at->block, view->step->block_tokens))
            break;
        look_at(view, s, at->block, at->offset, &piece[pieces++]);
        at->offset += RP_PIECE;
        if (at->offset < view->step->block_tokens)
            continue;
        at->offset = 0;
        at->block++;
        if (at->block == at->sink_blocks)
            at->block += at->skipped;
    }
    return pieces;
}
