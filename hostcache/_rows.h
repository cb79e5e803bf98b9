/* What is done to a row of floats on its way into a block, by the best instructions there are. */
#ifndef RP_ROWS_H
#define RP_ROWS_H

#include <stdint.h>
#include <string.h>

#include "_codec.h"

/* Beyond this, in sixteenths of a level's unit, an element counts as if it were there: the squares of 1024 such errors
 * add up to an int32. */
#define RP_FINE_TOP 2944

/* Rows that are rounded onward together. */
enum { RP_TOGETHER = 4 };

typedef struct {
    /* fp16, to nearest even. */
    void (*convert)(const float *src, uint16_t *dst, int64_t n);
    /* As rp_rotate. */
    void (*rotate)(float *x, int32_t n, int32_t piece);
    /* As rp_decode_token, and to fp16. */
    void (*decode)(int32_t codec, const uint8_t *codes, const uint8_t *scales, int32_t head_dim, uint16_t *dst);
    /* The largest magnitude, as the bits of a float: above 0x7f7fffff if there is NaN or infinity. */
    uint32_t (*peak)(const float *x, int32_t n);
    /* x * factor, to nearest even, at most 127 and at least -127. None is NaN. */
    void (*round)(const float *x, int32_t n, float factor, int8_t *rounded);
    /* How far x * factor is from its levels of int4: the sum of squares, of sixteenths of a level's unit. */
    int32_t (*misfit)(const float *x, int32_t n, float factor);
    /* A group's codes of int4, n / 2 bytes. */
    void (*pack)(const int8_t *rounded, int32_t n, uint8_t *codes);
    /* y = x * matrix, [n][n], a row of it to each element of x in their order. */
    void (*combine)(const float *x, const float *matrix, int32_t n, float *y);
    /* As `round` with 1 / steps[r], elements from..to - 1 of each of up to RP_TOGETHER rows one after the other: each
     * takes its error in int4, times its row of feedback, [n][head_dim][head_dim], from the elements behind it. Where
     * a step is 0 a row stays as it is, and `rounded` too. */
    void (*round_onward)(float *rows, int32_t n, int32_t from, int32_t to, int32_t head_dim, const float *steps,
                         const float *feedback, int8_t *rounded);
} rp_row_ops;

extern const rp_row_ops rp_plain_rows, rp_avx2_rows, rp_neon_rows;

/* What `combine` does, for each instruction set to compile. */
static inline __attribute__((always_inline)) void rp_combine(const float *restrict x, const float *restrict matrix,
                                                             int32_t n, float *restrict y)
{
    memset(y, 0, (size_t)n * sizeof *y);
    for (int32_t i = 0; i < n; i++, matrix += n)
        for (int32_t j = 0; j < n; j++)
            y[j] += x[i] * matrix[j];
}

/* To nearest even, at most `most` and at least -most; NaN is `most`. */
static inline int32_t rp_rounded_within(float value, float most)
{
    value = value < most ? value : most;
    value = value > -most ? value : -most;
    return (int32_t)((value + 0x1.8p23f) - 0x1.8p23f); /* at 2^23 a float's last bit is 1 */
}

/* The code of int4 for what was rounded to -127..127. */
static inline uint8_t rp_int4_code(int32_t rounded)
{
    const int32_t magnitude = rounded < 0 ? -rounded : rounded;
    int32_t code = 8;
    for (int32_t i = 0; i < 7; i++)
        code += magnitude > rp_int4_bounds[i];
    return (uint8_t)(rounded < 0 ? 15 - code : code);
}

/* What `round_onward` does, for each instruction set to compile. An element waits for the one before it, so that several
 * rows take little longer than one. */
static inline __attribute__((always_inline)) void rp_round_onward(float *restrict rows, int32_t n, int32_t from,
                                                                  int32_t to, int32_t head_dim,
                                                                  const float *restrict steps,
                                                                  const float *restrict feedback,
                                                                  int8_t *restrict rounded)
{
    /* By magnitude, as rp_int4_bounds have it: a load does not keep the next element as long as comparisons do. */
    static const float nearest[RP_TOP + 1] = {
        [0 ... 12] = 6,   [13 ... 24] = 18, [25 ... 37] = 31, [38 ... 51] = 44,
        [52 ... 66] = 58, [67 ... 85] = 75, [86 ... 111] = 96, [112 ... 127] = 127};
    float factors[RP_TOGETHER];
    for (int32_t r = 0; r < n; r++)
        factors[r] = 1.0f / steps[r];
    for (int32_t i = from; i < to; i++)
        for (int32_t r = 0; r < n; r++) {
            if (steps[r] == 0)
                continue;
            float *row = rows + (int64_t)r * head_dim;
            const int32_t whole = rp_rounded_within(row[i] * factors[r], RP_TOP);
            rounded[(int64_t)r * head_dim + i] = (int8_t)whole;
            const float level = whole < 0 ? -nearest[-whole] : nearest[whole];
            const float error = row[i] - steps[r] * level;
            const float *weights = feedback + ((int64_t)r * head_dim + i) * head_dim;
            for (int32_t j = i / 8 * 8; j < head_dim; j++) /* whole vectors: weights up to i are 0 */
                row[j] -= error * weights[j];
        }
}

/* By name: "plain", "avx2", "neon", or "auto" for the best one here. NULL where this machine cannot run it. */
const rp_row_ops *rp_row_ops_named(const char *isa);

/* Quantise a row.
 *
 * codes   head_dim bytes for int8, half of them for int4
 * scales  fp16, one a group. A group that holds NaN or infinity, or is beyond every scale, has scale NaN and codes 0:
 *         it is NaN to whoever reads it, and its token's neighbours are what they are. */
void rp_encode_row(const rp_row_ops *ops, int32_t codec, const float *src, int32_t head_dim, uint8_t *codes,
                   uint16_t *scales);

/* Quantise the keys of up to RP_TOGETHER heads of one token in int4, [n][head_dim], as rp_encode_row does but that an
 * element is rounded when those before it have taken their errors from it.
 *
 * feedback  [n][head_dim][head_dim], how much of an element's error, in the rotated row, is taken from each of those
 *           behind it; 0 up to the element itself
 * step      bytes from a head's codes, and scales, to those of the next */
void rp_encode_keys(const rp_row_ops *ops, const float *src, int32_t n, int32_t head_dim, const float *feedback,
                    uint8_t *codes, uint8_t *scales, int64_t step);

#endif
