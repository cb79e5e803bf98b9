/* Quantised rows of K and V, one token at a time, in plain C: the definition that every faster path follows bit for bit.
 *
 * A row of `head_dim` floats is first rotated (rp_rotate), then cut into groups, each of which becomes one fp16 scale
 * and as many codes:  value = scale * level(code).  Where the bytes lie is said in block_layout.py, which codec does
 * what in codec.py.
 *
 * Whoever includes this compiles with -ffp-contract=off: a product and a sum that become one are rounded otherwise. */
#ifndef RP_CODEC_H
#define RP_CODEC_H

#include <stdint.h>
#include <string.h>

#include "_fp16.h"

enum { RP_FP16 = 0, RP_INT8 = 1, RP_INT4 = 2 };

/* The largest level of every codec. In int8 the largest element of a group becomes that; int4 may cut it off. */
#define RP_TOP 127

/* Most elements of a head that is quantised. Source: our choice; models have at most 256. */
#define RP_MOST_HEAD_DIM 1024

/* What a code of int4 stands for: the levels that suit a normal distribution best (Lloyd 1957, Max 1960, for 16
 * levels), which rotated rows come close to; 2.733 standard deviations are 127. */
static const int8_t rp_int4_levels[16] = {-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127};

/* Level |n| of the positive half is nearest to what is above n - 1 of these, of values rounded to -127..127. */
static const int8_t rp_int4_bounds[7] = {12, 24, 37, 51, 66, 85, 111};

/* Elements that share a scale. */
static inline int32_t rp_codec_group(int32_t codec, int32_t head_dim)
{
    return codec == RP_INT4 && head_dim % 32 == 0 ? 32 : head_dim;
}

/* Elements that are rotated together, a power of two; 1: none. */
static inline int32_t rp_codec_rotation(int32_t codec, int32_t head_dim)
{
    return codec == RP_FP16 ? 1 : head_dim & -head_dim;
}

/* Sums and differences of elements that are `from`, 2 * from, .. and at last to / 2 apart (powers of two): one part of
 * what multiplies runs of `to` elements by the Walsh-Hadamard matrix. `n` is a multiple of `to`. */
static inline void rp_mix(float *x, int32_t n, int32_t from, int32_t to)
{
    for (int32_t half = from; half < to; half *= 2)
        for (int32_t start = 0; start < n; start += 2 * half)
            for (int32_t i = start; i < start + half; i++) {
                const float low = x[i], high = x[i + half];
                x[i] = low + high;
                x[i + half] = low - high;
            }
}

/* What makes the Walsh-Hadamard matrix of so many rows its own inverse. */
static inline float rp_norm(int32_t piece)
{
    return 1.0f / __builtin_sqrtf((float)piece);
}

/* Multiply each run of `piece` elements (a power of two) by the normalised Walsh-Hadamard matrix. `n` is a multiple of
 * `piece`. Sums in a fixed tree, so that every vector width gives the same bits. */
static inline void rp_rotate(float *x, int32_t n, int32_t piece)
{
    if (piece == 1)
        return;
    rp_mix(x, n, 1, piece);
    const float norm = rp_norm(piece);
    for (int32_t i = 0; i < n; i++)
        x[i] *= norm;
}

/* Unpack the codes of one token, not yet scaled nor rotated back. Codes are `head_dim` bytes (int8) or half of it. */
static inline void rp_unpack(int32_t codec, const uint8_t *codes, int32_t head_dim, int8_t *levels)
{
    if (codec == RP_INT8) {
        for (int32_t i = 0; i < head_dim; i++)
            levels[i] = (int8_t)codes[i];
        return;
    }
    const int32_t group = rp_codec_group(codec, head_dim), half = group / 2;
    for (int32_t start = 0; start < head_dim; start += group, codes += half)
        for (int32_t i = 0; i < half; i++) {
            levels[start + i] = rp_int4_levels[codes[i] & 15];
            levels[start + half + i] = rp_int4_levels[codes[i] >> 4];
        }
}

/* Elements that are rotated together and share a scale: levels of so many may be mixed before they are scaled, as
 * integers of at most RP_TOP times as much. */
static inline int32_t rp_codec_inner(int32_t codec, int32_t head_dim)
{
    const int32_t group = rp_codec_group(codec, head_dim), piece = rp_codec_rotation(codec, head_dim);
    return piece < group ? piece : group;
}

/* One token of a row of int8 or int4 in float32, rotated back; whoever wants fp16 rounds it.
 *
 * codes   the token's
 * scales  fp16, its own */
static inline void rp_decode_token(int32_t codec, const uint8_t *codes, const uint8_t *scales, int32_t head_dim,
                                   float *x)
{
    int8_t levels[RP_MOST_HEAD_DIM];
    const int32_t group = rp_codec_group(codec, head_dim), inner = rp_codec_inner(codec, head_dim);
    const int32_t piece = rp_codec_rotation(codec, head_dim);

    rp_unpack(codec, codes, head_dim, levels);
    for (int32_t i = 0; i < head_dim; i++)
        x[i] = levels[i];
    rp_mix(x, head_dim, 1, inner); /* exact */
    for (int32_t start = 0; start < head_dim; start += group, scales += 2) {
        uint16_t half;
        memcpy(&half, scales, sizeof half);
        const float factor = rp_f32_from_f16(half) * rp_norm(piece);
        for (int32_t i = start; i < start + group; i++)
            x[i] *= factor;
    }
    rp_mix(x, head_dim, inner, piece);
}

#endif
