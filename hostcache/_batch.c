/* What a step does to each decoding sequence: integers in arrays, a few for each. */
#include <stdint.h>
#include <string.h>

#include "_batch.h"

/* Blocks that row `place` has let go of. */
static int64_t gap_blocks(const rp_batch *batch, int64_t place)
{
    return batch->windowing[place * batch->windowing_width] / batch->block_tokens;
}

/* Tell of the block with this number in a sequence's table, as entry `nth`. */
static void tell_filled(rp_batch *batch, int64_t nth, int64_t place, int32_t number)
{
    const int32_t size = batch->block_tokens;
    int32_t *row = batch->filled + nth * 3;
    row[0] = (int32_t)place;
    row[1] = number;
    row[2] = batch->tables[place * batch->table_width + number - gap_blocks(batch, place)];

    const int64_t kept = place * batch->kept_blocks + number % batch->kept_blocks;
    memcpy(batch->texts + nth * size, batch->newest + kept * size, (size_t)size * sizeof(int32_t));
}

int64_t rp_batch_advance(rp_batch *batch, const int64_t *places, int64_t n)
{
    const int32_t size = batch->block_tokens, kept = batch->kept_blocks * size;
    int64_t filled = 0;
    batch->ended_count = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t place = places ? places[i] : i;
        const int32_t position = ++batch->positions[place];
        batch->tokens[place] = batch->sampled[i];
        batch->newest[place * kept + position % kept] = batch->sampled[i];
        batch->slots[place]++;
        batch->in_flight[place] = 0;
        if (position % size == 0)
            tell_filled(batch, filled++, place, position / size - 1);
        if (position == batch->limits[place])
            batch->ended[batch->ended_count++] = i;
    }
    return filled;
}

int64_t rp_batch_width_to_grow(const rp_batch *batch, const int64_t *places, int64_t n)
{
    int64_t width = 0;
    for (int64_t i = 0; i < n; i++) {
        const int32_t position = batch->positions[places[i]];
        if (position % batch->block_tokens)
            return -1;
        const int64_t needed = position / batch->block_tokens - gap_blocks(batch, places[i]) + 1;
        width = needed > width ? needed : width;
    }
    return width;
}

void rp_batch_grow(rp_batch *batch, const int64_t *places, int64_t n)
{
    const int32_t size = batch->block_tokens;
    for (int64_t i = 0; i < n; i++) {
        const int64_t place = places[i];
        const int64_t held = batch->positions[place] / size - gap_blocks(batch, place);
        batch->tables[place * batch->table_width + held] = batch->fresh[i];
        batch->slots[place] = (int64_t)batch->fresh[i] * size;
        batch->own_until[place] += size;
    }
}
