/* The attention runtime: cuts a step into tiles and lets its threads take them one by one. */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "../hostcache/_isa.h"
#include "_attention_tile.h"
#include "_threads.h"

struct rp_attention {
    rp_threads threads;
    rp_tile_kernel *attend_tile;
    const char *isa;
    rp_scratch scratch[]; /* one per thread */
};

/* One call of rp_attend, as its threads see it. */
typedef struct {
    rp_attention *runtime;
    const rp_attention_step *step;
    int64_t layer_offset;
    const float *q;
    float *out;
    int32_t units; /* tiles times KV heads */
    atomic_int next;
} attend_call;

static int choose_kernel(rp_attention *self, const char *isa)
{
    const bool automatic = !strcmp(isa, "auto");
#if RP_AVX2
    if ((automatic || !strcmp(isa, "avx2")) && rp_has_avx2()) {
        self->isa = "avx2";
        self->attend_tile = rp_attend_tile_avx2;
        return 0;
    }
#elif RP_NEON
    if (automatic || !strcmp(isa, "neon")) {
        self->isa = "neon";
        self->attend_tile = rp_attend_tile_neon;
        return 0;
    }
#endif
    if (automatic || !strcmp(isa, "plain")) {
        self->isa = "plain";
        self->attend_tile = rp_attend_tile_plain;
        return 0;
    }
    return ENOTSUP;
}

rp_attention *rp_attention_open(int32_t threads, const char *isa)
{
    /* A multiple of the alignment, as aligned_alloc wants; scratch rows are 64-byte aligned within. */
    rp_attention *self = aligned_alloc(_Alignof(rp_attention), sizeof *self + (size_t)threads * sizeof(rp_scratch));
    if (!self) {
        errno = ENOMEM;
        return NULL;
    }
    int error = choose_kernel(self, isa);
    if (!error)
        error = rp_threads_start(&self->threads, threads);
    if (error) {
        free(self);
        errno = error;
        return NULL;
    }
    return self;
}

const char *rp_attention_isa(const rp_attention *self)
{
    return self->isa;
}

/* The sequence whose tiles include `tile`: the last with tile_starts[i] <= tile, for sequences without rows have none. */
static int32_t sequence_of(const rp_attention_step *step, int32_t tile)
{
    int32_t low = 0;
    int32_t high = step->sequences;
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        if (step->tile_starts[middle] <= tile)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static void attend_units(void *argument, int32_t thread)
{
    attend_call *call = argument;
    const rp_attention_step *step = call->step;

    for (;;) {
        const int32_t unit = atomic_fetch_add_explicit(&call->next, 1, memory_order_relaxed);
        if (unit >= call->units)
            return;
        const int32_t tile = unit / step->kv_heads;
        const int32_t i = sequence_of(step, tile);
        const int32_t first = (tile - step->tile_starts[i]) * RP_TILE_ROWS;
        const int32_t rows = (step->query_starts[i + 1] - step->query_starts[i]) * step->group - first;
        const rp_tile work = {
            .sequence = i,
            .kv_head = unit % step->kv_heads,
            .first = first,
            .rows = rows < RP_TILE_ROWS ? rows : RP_TILE_ROWS,
        };
        call->runtime->attend_tile(step, &work, call->layer_offset, call->q, call->out,
                                   &call->runtime->scratch[thread]);
    }
}

void rp_attend(rp_attention *self, const rp_attention_step *step, int64_t layer_offset, const float *q, float *out)
{
    attend_call call = {
        .runtime = self,
        .step = step,
        .layer_offset = layer_offset,
        .q = q,
        .out = out,
        .units = step->tile_starts[step->sequences] * step->kv_heads,
    };
    const int32_t threads = step->threads < call.units ? step->threads : call.units;
    rp_threads_run(&self->threads, attend_units, &call, threads - 1);
}

void rp_attention_close(rp_attention *self)
{
    rp_threads_stop(&self->threads);
    free(self);
}
