/* What _attention.c and the kernels of each instruction set share. */
#ifndef RP_ATTENTION_TILE_H
#define RP_ATTENTION_TILE_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "../hostcache/_codec.h"
#include "_attention.h"

enum {
    RP_PIECE = 16,                         /* tokens of one block that are read together; a block holds whole pieces, or is one */
    RP_SPAN_PIECES = 4,                    /* pieces whose scores are weighed together */
    RP_SPAN = RP_SPAN_PIECES * RP_PIECE,
    RP_LANES = 16,                         /* of the widest vector */
    RP_MAX_GROUPS = RP_MAX_HEAD_DIM / 32,  /* scales of a token's row of one head */
    RP_SLACK = 32,                         /* bytes behind rows of small integers that whole vectors may read */
    RP_FP16_SPAN_BYTES = 64 << 10,         /* of K and V in a span that heads may share: two of them fit a second cache, */
    RP_LEVELS_SPAN_BYTES = 24 << 10        /* two of these nearly a first one, where what is fetched of them goes */
};

/* Scores and their maxima are exponents of 2. The second is a row's maximum before it has seen a token, the first the
 * score of a token that a row must not see: its weight is 0 even beside nothing else. */
#define RP_UNSEEN (-0x1p101f)
#define RP_NOTHING (-0x1p100f)

/* A unit of work. The rows of a sequence for one KV head are numbered token by token, `group` heads each; those for the
 * next KV head of a tile follow them. */
typedef struct {
    int32_t sequence;
    int32_t kv_head;  /* the first */
    int32_t heads;    /* KV heads; one, but for a sequence of a single token */
    int32_t first;
    int32_t rows;     /* of all its heads, at most RP_TILE_ROWS */
    float *parts;     /* NULL: all is computed and goes to out; else segments' results, [segments][rows][head_dim + 2]: */
    int32_t segment;  /* which one to compute */
    int32_t segments; /* of them */
} rp_tile;

/* The K and V of a KV head for up to RP_PIECE tokens of a block, and what a tile's rows see of them. */
typedef struct {
    const uint8_t *k;
    const uint8_t *v;
    int32_t before;   /* tokens of the block before it */
    int32_t size;     /* tokens */
    int32_t position; /* of its first token in the context */
    bool whole;       /* it is full and every row sees all of it; else: */
    int8_t visible[RP_TILE_ROWS];     /* tokens up to the last that a row may see */
    int8_t hidden_from[RP_TILE_ROWS]; /* of these, from here .. */
    int8_t hidden_to[RP_TILE_ROWS];   /* .. to here (exclusive) it does not; equal: it sees all */
} rp_piece;

/* A thread's own memory. Rows of query, sum and levels are head_dim apart. */
typedef struct {
    _Alignas(64) float query[RP_TILE_ROWS * RP_MAX_HEAD_DIM]; /* times scale and log2(e) */
    _Alignas(64) float sum[RP_TILE_ROWS * RP_MAX_HEAD_DIM];   /* of weight * V so far */
    _Alignas(64) float weight[RP_TILE_ROWS][RP_SPAN];         /* first the scores of a span, then its weights */
    _Alignas(64) float total[RP_TILE_ROWS][RP_LANES];         /* of the weights so far, one partial sum per lane */
    float highest[RP_TILE_ROWS];                              /* integer that weights are relative to */
    int32_t position[RP_TILE_ROWS];
    int32_t oldest[RP_TILE_ROWS];                             /* token of a row's window; 0 if nothing is hidden */
    float part[RP_TILE_ROWS * (RP_MAX_HEAD_DIM + 2)];         /* segments that are done, merged */

    /* Of small-integer codecs alone. */
    _Alignas(64) int16_t query16[RP_TILE_ROWS * (RP_MAX_HEAD_DIM + RP_SLACK)]; /* query by its scale */
    float query_scale[RP_TILE_ROWS];
    _Alignas(64) int16_t keys16[RP_PIECE * (RP_MAX_HEAD_DIM + RP_SLACK)];      /* a piece's K, transposed */
    _Alignas(64) int8_t levels[RP_SPAN_PIECES][RP_PIECE * RP_MAX_HEAD_DIM + RP_SLACK]; /* int4, unpacked */
    _Alignas(64) float scales[RP_SPAN_PIECES][RP_MAX_GROUPS][RP_PIECE];                /* of tokens, 0 behind a piece's */
    _Alignas(64) int16_t weight16[RP_TILE_ROWS][RP_SPAN]; /* weight * V's scale, by its own scale */
    float weight_scale[RP_TILE_ROWS];
} rp_scratch;

/* The code for one instruction set. */
typedef struct {
    const char *name;
    /* Compute a tile, or one segment of it: read its rows of q, write the same rows of out, or its part of parts. */
    void (*attend)(const rp_attention_step *step, const rp_tile *tile, const float *q, float *out, rp_scratch *scratch);
    /* Merge the segments of a tile in order, into rows of out. */
    void (*merge)(const rp_attention_step *step, const rp_tile *tile, float *out);
} rp_kernel;

extern const rp_kernel rp_kernel_plain;
extern const rp_kernel rp_kernel_avx2;
extern const rp_kernel rp_kernel_avx512;
extern const rp_kernel rp_kernel_neon;

/* 2^n for an integer n <= 0; 0 below 2^-126; NaN of NaN. */
static inline float rp_exp2(float n)
{
    if (n != n || n < -126.0f)
        return n != n ? n : 0.0f;
    const uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

static inline float *part_of(const rp_attention_step *step, const rp_tile *tile, int32_t segment, int32_t row)
{
    return tile->parts + ((int64_t)segment * tile->rows + row) * (step->head_dim + 2);
}

/* Tokens of a segment start at fixed places among the tokens that a row's window leaves it, and so do not move when
 * blocks that no row will see again are dropped from a table. */
static inline int32_t rp_segment_blocks(int32_t block_tokens)
{
    return block_tokens < RP_SEGMENT ? RP_SEGMENT / block_tokens : 1;
}

static inline int32_t rp_block_count(int32_t tokens, int32_t block_tokens)
{
    return (tokens + block_tokens - 1) / block_tokens;
}

/* First token of a row's window; 0 if that hides nothing. */
static inline int32_t rp_oldest(int32_t position, int32_t window, int32_t sinks)
{
    const int32_t oldest = window ? position - window + 1 : 0;
    return oldest > sinks ? oldest : 0;
}

/* Blocks between those of the sinks and that of the window's first token, which is behind them where it hides any. */
static inline int32_t rp_skipped(int32_t oldest, int32_t sinks, int32_t block_tokens)
{
    if (oldest <= sinks)
        return 0;
    const int32_t skipped = oldest / block_tokens - rp_block_count(sinks, block_tokens);
    return skipped > 0 ? skipped : 0;
}

#endif
