/* What _attention.c and the kernels of each instruction set share. */
#ifndef RP_ATTENTION_TILE_H
#define RP_ATTENTION_TILE_H

#include <stdint.h>

#include "_attention.h"

/* Tokens whose scores are weighed at once. Spans start at fixed positions of the context (a block holds whole spans, or
 * is one), so a row's arithmetic is the same however the prompt was cut into chunks. */
enum { RP_SPAN = 16 };

/* A unit of work. The rows of a sequence for one KV head are numbered token by token, `group` heads each. */
typedef struct {
    int32_t sequence;
    int32_t kv_head;
    int32_t first;
    int32_t rows; /* at most RP_TILE_ROWS */
} rp_tile;

/* A thread's own memory. Rows of query and sum are head_dim floats apart. */
typedef struct {
    _Alignas(64) float query[RP_TILE_ROWS * RP_MAX_HEAD_DIM]; /* times scale and log2(e) */
    _Alignas(64) float sum[RP_TILE_ROWS * RP_MAX_HEAD_DIM];   /* of weight * V so far */
    _Alignas(64) float weight[RP_TILE_ROWS][RP_SPAN];         /* first the scores of a span, then its weights */
    _Alignas(64) float total[RP_TILE_ROWS][8];                /* of the weights so far, one partial sum per lane */
    float highest[RP_TILE_ROWS];                              /* score so far; weights are relative to it */
    int32_t oldest[RP_TILE_ROWS];                             /* token of a row's window; 0 if nothing is hidden */
    int32_t visible[RP_TILE_ROWS];                            /* tokens of the span up to the last that a row may see */
    int32_t hidden_from[RP_TILE_ROWS];                        /* of these, from here .. */
    int32_t hidden_to[RP_TILE_ROWS];                          /* .. to here (exclusive) it does not; equal: it sees all */
} rp_scratch;

/* Compute one tile: read its rows of q, write the same rows of out. */
typedef void rp_tile_kernel(const rp_attention_step *step, const rp_tile *tile, int64_t layer_offset, const float *q,
                            float *out, rp_scratch *scratch);

rp_tile_kernel rp_attend_tile_plain;
rp_tile_kernel rp_attend_tile_avx2;
rp_tile_kernel rp_attend_tile_neon;

#endif
