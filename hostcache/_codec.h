/* Quantised rows of K and V, one token at a time, in plain C: the definition that every faster path follows bit for bit.
 *
 * A row of `head_dim` floats is first rotated (rp_rotate), then cut into groups, each of which becomes one fp16 scale
 * and as many codes:  value = scale * level(code).  Where the bytes lie is said in block_layout.py, which codec does
 * what in codec.py. */
#ifndef RP_CODEC_H
#define RP_CODEC_H

#include <stdint.h>

enum { RP_FP16 = 0, RP_INT8 = 1, RP_INT4 = 2 };

/* Largest code of int8, and the largest level of int4. */
#define RP_INT8_TOP 127

static const int8_t rp_int4_levels[16] = {-112, -96, -80, -64, -48, -32, -16, 0, 16, 32, 48, 64, 80, 96, 112, 127};

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

/* Multiply each run of `piece` elements (a power of two) by the normalised Walsh-Hadamard matrix, which is its own
 * inverse. `n` is a multiple of `piece`. Sums in a fixed tree, so that every vector width gives the same bits. */
static inline void rp_rotate(float *x, int32_t n, int32_t piece)
{
    if (piece == 1)
        return;
    for (int32_t half = 1; half < piece; half *= 2)
        for (int32_t start = 0; start < n; start += 2 * half)
            for (int32_t i = start; i < start + half; i++) {
                const float low = x[i], high = x[i + half];
                x[i] = low + high;
                x[i + half] = low - high;
            }
    const float norm = 1.0f / __builtin_sqrtf((float)piece);
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

#endif
