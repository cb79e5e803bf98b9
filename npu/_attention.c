/* The attention runtime: cuts a step into units of work and lets its threads take them one by one. */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "../hostcache/_isa.h"
#include "_attention_tile.h"
#include "_threads.h"

struct rp_attention {
    rp_threads threads;
    const rp_kernel *kernel;
    rp_scratch scratch[]; /* one per thread */
};

/* One call of rp_attend, as its threads see it. */
typedef struct {
    rp_attention *runtime;
    const rp_attention_step *step;
    const float *q;
    float *out;
    atomic_int next;
} attend_call;

/* The best kernel first. NULL for an isa that this machine or head_dim does not allow. */
static const rp_kernel *choose_kernel(const char *isa, int32_t head_dim)
{
    const rp_kernel *kernels[3];
    int count = 0;
#if RP_AVX2
    if (rp_has_avx512() && head_dim % 16 == 0) /* it reads whole vectors */
        kernels[count++] = &rp_kernel_avx512;
    if (rp_has_avx2())
        kernels[count++] = &rp_kernel_avx2;
#elif RP_NEON
    kernels[count++] = &rp_kernel_neon;
#endif
    kernels[count++] = &rp_kernel_plain;
    for (int i = 0; i < count; i++)
        if (!strcmp(isa, "auto") || !strcmp(isa, kernels[i]->name))
            return kernels[i];
    return NULL;
}

rp_attention *rp_attention_open(int32_t threads, int32_t head_dim, const char *isa)
{
    const rp_kernel *kernel = choose_kernel(isa, head_dim);
    if (!kernel) {
        errno = ENOTSUP;
        return NULL;
    }
    /* A multiple of the alignment, as aligned_alloc wants; scratch rows are 64-byte aligned within. */
    rp_attention *self = aligned_alloc(_Alignof(rp_attention), sizeof *self + (size_t)threads * sizeof(rp_scratch));
    if (!self) {
        errno = ENOMEM;
        return NULL;
    }
    self->kernel = kernel;
    const int error = rp_threads_start(&self->threads, threads);
    if (error) {
        free(self);
        errno = error;
        return NULL;
    }
    return self;
}

const char *rp_attention_isa(const rp_attention *self)
{
    return self->kernel->name;
}

/* Rows of a sequence for one KV head. */
static int32_t rows_of(const rp_attention_step *step, int32_t sequence)
{
    return (step->query_starts[sequence + 1] - step->query_starts[sequence]) * step->group;
}

/* Segments that threads may compute apart: of a single token's rows, which all look into the same blocks. */
static int32_t segments_of(const rp_attention_step *step, int32_t sequence)
{
    if (step->threads == 1 || rows_of(step, sequence) != step->group || step->group > RP_TILE_ROWS)
        return 1;
    const int32_t tokens = step->context_lens[sequence];
    const int32_t sinks = step->sinks[sequence] < tokens ? step->sinks[sequence] : tokens;
    const int32_t oldest = rp_oldest(tokens - 1, step->windows[sequence], sinks);
    const int32_t blocks = rp_block_count(tokens, step->block_tokens) - rp_skipped(oldest, sinks, step->block_tokens);
    return rp_block_count(blocks, rp_segment_blocks(step->block_tokens));
}

/* KV heads of a sequence that a unit of work takes together, for they lie side by side in a block. One, where there are
 * rows of several tokens, or where more would leave threads without work. */
static int32_t heads_of(const rp_attention_step *step, int32_t sequence, int32_t segments)
{
    const bool scarce = step->threads > 1 && (int64_t)step->sequences * segments < 4 * (int64_t)step->threads;
    if (scarce || rows_of(step, sequence) != step->group)
        return 1;
    const int32_t codec = step->codecs[sequence];
    const int32_t span_bytes = 2 * RP_SPAN * step->layouts[codec].token_bytes;
    const int32_t by_bytes = (codec == RP_FP16 ? RP_FP16_SPAN_BYTES : RP_LEVELS_SPAN_BYTES) / span_bytes;
    const int32_t by_rows = RP_TILE_ROWS / step->group, most = by_bytes < by_rows ? by_bytes : by_rows;
    if (most <= 1)
        return 1;
    const int32_t units = (step->kv_heads + most - 1) / most;
    return (step->kv_heads + units - 1) / units;
}

/* Units that so many heads at a time make of all. */
static int32_t units_of(const rp_attention_step *step, int32_t heads)
{
    return (step->kv_heads + heads - 1) / heads;
}

void rp_plan(const rp_attention_step *step)
{
    step->unit_starts[0] = 0;
    step->part_starts[0] = 0;
    for (int32_t i = 0; i < step->sequences; i++) {
        const int32_t rows = rows_of(step, i), segments = segments_of(step, i);
        const int32_t tiles = (rows + RP_TILE_ROWS - 1) / RP_TILE_ROWS;
        const int64_t parts = segments > 1 ? (int64_t)segments * step->kv_heads * rows * (step->head_dim + 2) : 0;
        const int32_t units = units_of(step, heads_of(step, i, segments));
        step->unit_starts[i + 1] = step->unit_starts[i] + tiles * segments * units;
        step->part_starts[i + 1] = step->part_starts[i] + parts;
    }
}

/* The sequence whose units include `unit`: the last with unit_starts[i] <= unit, for sequences without rows have none. */
static int32_t sequence_of(const rp_attention_step *step, int32_t unit)
{
    int32_t low = 0;
    int32_t high = step->sequences;
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        if (step->unit_starts[middle] <= unit)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static rp_tile tile_of(const rp_attention_step *step, int32_t unit)
{
    const int32_t i = sequence_of(step, unit);
    const int32_t segments = segments_of(step, i);
    const int32_t own = unit - step->unit_starts[i];
    const int32_t heads = heads_of(step, i, segments), units = units_of(step, heads);
    const int32_t kv_head = own / segments % units * heads;
    const int32_t first = own / (units * segments) * RP_TILE_ROWS;
    const int32_t rows = rows_of(step, i) - first, left = step->kv_heads - kv_head;
    rp_tile tile = {
        .sequence = i,
        .kv_head = kv_head,
        .heads = heads < left ? heads : left,
        .first = first,
        .rows = rows < RP_TILE_ROWS ? rows : RP_TILE_ROWS,
        .segment = own % segments,
        .segments = segments,
    };
    if (segments > 1) /* of a single tile */
        tile.parts = step->parts + step->part_starts[i] +
                     (int64_t)tile.kv_head * segments * tile.rows * (step->head_dim + 2);
    tile.rows *= tile.heads;
    return tile;
}

static void attend_units(void *argument, int32_t thread)
{
    attend_call *call = argument;
    const rp_attention_step *step = call->step;
    const rp_kernel *kernel = call->runtime->kernel;

    for (;;) {
        const int32_t unit = atomic_fetch_add_explicit(&call->next, 1, memory_order_relaxed);
        if (unit >= step->unit_starts[step->sequences])
            return;
        const rp_tile tile = tile_of(step, unit);
        kernel->attend(step, &tile, call->q, call->out, &call->runtime->scratch[thread]);
        if (!tile.parts)
            continue;
        /* Whoever computes the last segment of a tile sees the others' parts, and merges them. */
        int32_t *finished = &step->finished[tile.sequence * step->kv_heads + tile.kv_head];
        const int32_t done = __atomic_add_fetch(finished, 1, __ATOMIC_ACQ_REL);
        if (done == tile.segments) {
            *finished = 0;
            kernel->merge(step, &tile, call->out);
        }
    }
}

void rp_attend(rp_attention *self, const rp_attention_step *step, const float *q, float *out)
{
    attend_call call = {.runtime = self, .step = step, .q = q, .out = out};
    const int32_t units = step->unit_starts[step->sequences];
    const int32_t threads = step->threads < units ? step->threads : units;
    rp_threads_run(&self->threads, attend_units, &call, threads - 1);
}

void rp_merge(float *into, const float *part, int32_t head_dim)
{
    float *highest = into + head_dim + 1;
    const float both = *highest > part[head_dim + 1] ? *highest : part[head_dim + 1];
    const float shrink = rp_exp2(*highest - both), share = rp_exp2(part[head_dim + 1] - both);
    for (int32_t d = 0; d <= head_dim; d++)
        into[d] = into[d] * shrink + part[d] * share;
    *highest = both;
}

void rp_attention_close(rp_attention *self)
{
    rp_threads_stop(&self->threads);
    free(self);
}
