/* What _dense.c asks of a kernel: one for each instruction set, all with the same bits. */
#ifndef RP_DENSE_KERNEL_H
#define RP_DENSE_KERNEL_H

#include <stdbool.h>
#include <stdint.h>

#include "_dense.h"

/* Inputs of a product, quantised to int8 by blocks of 32.
 *
 * Where `parts` is 2, the second part of a row holds what the first has lost, about 15 bits together. */
typedef struct {
    int8_t *codes;   /* [m][parts][columns] */
    float *steps;    /* [m][parts][columns / 32]: a value is its step times its code */
    int32_t *sums;   /* likewise: of the codes of a block */
    float *totals;   /* [m][columns / 32]: of the values of a block, before they were quantised */
    int32_t columns;
    int32_t parts;
} rp_inputs;

typedef struct {
    const char *name; /* of the instruction set */
    /* out[i][r] = or += sum over c of weight(r, c) * input(i, c), for rows r of 16 from `first` on and i < m;
     * `limit` is how many of `out`'s columns there are, for those of a matrix are a multiple of 16. */
    void (*multiply)(const rp_matrix *matrix, int32_t first, const rp_inputs *inputs, int32_t m, float *out,
                     int32_t limit, bool add);
    /* Quantise row i: values are float32 [columns]. */
    void (*quantise)(const float *values, rp_inputs *inputs, int32_t i);
    /* out = x / rms(x) * weight, n elements, a multiple of 16 where it is not a head's. */
    void (*norm)(const float *x, const float *weight, float eps, int32_t n, float *out);
    /* gate = SiLU(gate) * up. */
    void (*gate)(float *gate, const float *up, int32_t n);
} rp_dense_kernel;

extern const rp_dense_kernel rp_dense_plain, rp_dense_avx2, rp_dense_avx512, rp_dense_neon;

#endif
