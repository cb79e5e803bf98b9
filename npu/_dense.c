/* The dense parts of a decoder on the CPU: everything but attention, on block-quantised weights as they lie. */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "../hostcache/_isa.h"
#include "_dense_kernel.h"
#include "_threads.h"
#if RP_NEON
#include <sys/auxv.h>
#endif

/* Outputs that a thread takes at a time: inputs of a few rows stay in the first-level cache meanwhile. */
enum { UNIT_OUTPUTS = 64, ALIGNMENT = 64 };

/* Multiply-adds that pay for waking a thread: about 10 us of work, where a wake-up costs about 5. */
static const int64_t worth_a_thread = 1 << 20;

struct rp_dense {
    rp_threads threads;
    const rp_model *model;
    const rp_dense_kernel *kernel;
    int32_t thread_count;
    rp_inputs inputs; /* of the product at hand */
    float *rows;      /* [max_rows][widest]: normed, or gate */
    float *up;        /* [max_rows][ffn] */
};

typedef struct {
    const rp_matrix *matrix;
    float *out;
    int32_t width; /* columns of out */
    bool add;
} product;

/* What threads share: units of work, taken one by one. */
typedef struct {
    rp_dense *self;
    void (*unit)(rp_dense *self, const void *argument, int32_t number);
    const void *argument;
    int32_t units;
    atomic_int next;
} shared_work;

static void take_units(void *argument, int32_t thread)
{
    shared_work *work = argument;
    (void)thread;
    for (;;) {
        const int32_t number = atomic_fetch_add_explicit(&work->next, 1, memory_order_relaxed);
        if (number >= work->units)
            return;
        work->unit(work->self, work->argument, number);
    }
}

static void share(rp_dense *self, void (*unit)(rp_dense *, const void *, int32_t), const void *argument, int32_t units,
                  int64_t multiply_adds)
{
    shared_work work = {.self = self, .unit = unit, .argument = argument, .units = units};
    int64_t threads = 1 + multiply_adds / worth_a_thread;
    if (threads > self->thread_count)
        threads = self->thread_count;
    if (threads > units)
        threads = units;
    rp_threads_run(&self->threads, take_units, &work, (int32_t)threads - 1);
}

/* Products of the same inputs. */
typedef struct {
    const product *products;
    int32_t count;
    int32_t m;
} products;

static int32_t units_of(const product *one)
{
    return (one->matrix->rows + UNIT_OUTPUTS - 1) / UNIT_OUTPUTS;
}

static void multiply_unit(rp_dense *self, const void *argument, int32_t number)
{
    const products *all = argument;
    const product *one = all->products;
    while (number >= units_of(one))
        number -= units_of(one++);
    /* A few rows at a time, so that they stay in the cache for all outputs of the unit. */
    enum { ROWS = 8 };
    const int32_t first = number * UNIT_OUTPUTS;
    const int32_t end = first + UNIT_OUTPUTS < one->matrix->rows ? first + UNIT_OUTPUTS : one->matrix->rows;
    for (int32_t i = 0; i < all->m; i += ROWS) {
        const int64_t blocks = self->inputs.columns / RP_BLOCK, parts = self->inputs.parts;
        const rp_inputs inputs = {
            .codes = self->inputs.codes + i * parts * self->inputs.columns,
            .steps = self->inputs.steps + i * parts * blocks,
            .sums = self->inputs.sums + i * parts * blocks,
            .totals = self->inputs.totals + i * blocks,
            .columns = self->inputs.columns,
            .parts = self->inputs.parts,
        };
        const int32_t rows = all->m - i < ROWS ? all->m - i : ROWS;
        for (int32_t output = first; output < end; output += RP_LANES)
            self->kernel->multiply(one->matrix, output, &inputs, rows, one->out + (int64_t)i * one->width, one->width,
                                   one->add);
    }
}

static void multiply_all(rp_dense *self, const product *list, int32_t count, int32_t m)
{
    const products all = {.products = list, .count = count, .m = m};
    int32_t units = 0;
    int64_t multiply_adds = 0;
    for (int32_t i = 0; i < count; i++) {
        units += units_of(&list[i]);
        multiply_adds += (int64_t)list[i].matrix->rows * list[i].matrix->columns * m;
    }
    share(self, multiply_unit, &all, units, multiply_adds);
}

/* How rows become the inputs of a product. */
typedef struct {
    const float *values; /* [m][columns] */
    const float *norm;   /* weights of an RMSNorm in front, or NULL */
    float *gate;         /* or [m][columns] that SiLU opens for `values`, or NULL */
} preparation;

static void prepare_row(rp_dense *self, const void *argument, int32_t i)
{
    const preparation *how = argument;
    const int32_t columns = self->inputs.columns;
    const float *values = how->values + (int64_t)i * columns;
    if (how->norm) {
        float *normed = self->rows + (int64_t)i * columns;
        self->kernel->norm(values, how->norm, self->model->eps, columns, normed);
        values = normed;
    } else if (how->gate) {
        float *gated = how->gate + (int64_t)i * columns;
        self->kernel->gate(gated, values, columns);
        values = gated;
    }
    self->kernel->quantise(values, &self->inputs, i);
}

static void prepare(rp_dense *self, preparation how, int32_t columns, int32_t parts, int32_t m)
{
    self->inputs.columns = columns;
    self->inputs.parts = parts;
    share(self, prepare_row, &how, m, (int64_t)m * columns * 8);
}

/* Queries or keys of one row: bias, norm of each head, rotation. */
static void finish_heads(const rp_dense *self, float *x, int32_t heads, const float *bias, const float *norm,
                         const float *cosine, const float *sine)
{
    const int32_t d = self->model->head_dim, half = d / 2;
    const int32_t stride = self->model->interleaved ? 2 : 1, mate = self->model->interleaved ? 1 : half;
    for (int32_t head = 0; head < heads; head++, x += d) {
        for (int32_t i = 0; bias && i < d; i++)
            x[i] += bias[head * d + i];
        if (norm)
            self->kernel->norm(x, norm, self->model->eps, d, x);
        for (int32_t i = 0; i < half; i++) {
            const float a = x[i * stride], b = x[i * stride + mate];
            x[i * stride] = a * cosine[i] - b * sine[i];
            x[i * stride + mate] = b * cosine[i] + a * sine[i];
        }
    }
}

void rp_dense_before(rp_dense *self, const rp_layer *layer, int32_t m, const float *residual, const float *cosine,
                     const float *sine, float *q, float *k, float *v)
{
    const rp_model *model = self->model;
    const int32_t d = model->head_dim, q_width = model->heads * d, kv_width = model->kv_heads * d;
    /* K and V outlive their step: every later token reads them. So their inputs get 15 bits instead of 8. */
    prepare(self, (preparation){.values = residual, .norm = layer->attention_norm}, model->hidden, 2, m);
    const product list[] = {
        {.matrix = &layer->q, .out = q, .width = q_width},
        {.matrix = &layer->k, .out = k, .width = kv_width},
        {.matrix = &layer->v, .out = v, .width = kv_width},
    };
    multiply_all(self, list, 3, m);
    for (int32_t i = 0; i < m; i++) {
        const float *turn_cosine = cosine + (int64_t)i * d / 2, *turn_sine = sine + (int64_t)i * d / 2;
        finish_heads(self, q + (int64_t)i * q_width, model->heads, layer->q_bias, layer->q_norm, turn_cosine, turn_sine);
        finish_heads(self, k + (int64_t)i * kv_width, model->kv_heads, layer->k_bias, layer->k_norm, turn_cosine,
                     turn_sine);
        for (int32_t j = 0; layer->v_bias && j < kv_width; j++)
            v[(int64_t)i * kv_width + j] += layer->v_bias[j];
    }
}

void rp_dense_after(rp_dense *self, const rp_layer *layer, int32_t m, const float *attended, float *residual)
{
    const rp_model *model = self->model;
    prepare(self, (preparation){.values = attended}, model->heads * model->head_dim, 1, m);
    const product output = {.matrix = &layer->output, .out = residual, .width = model->hidden, .add = true};
    multiply_all(self, &output, 1, m);

    prepare(self, (preparation){.values = residual, .norm = layer->ffn_norm}, model->hidden, 1, m);
    const product list[] = {
        {.matrix = &layer->gate, .out = self->rows, .width = model->ffn},
        {.matrix = &layer->up, .out = self->up, .width = model->ffn},
    };
    multiply_all(self, list, 2, m);

    prepare(self, (preparation){.values = self->up, .gate = self->rows}, model->ffn, 1, m);
    const product down = {.matrix = &layer->down, .out = residual, .width = model->hidden, .add = true};
    multiply_all(self, &down, 1, m);
}

void rp_dense_head(rp_dense *self, int32_t m, const float *residual, float *logits)
{
    const rp_model *model = self->model;
    prepare(self, (preparation){.values = residual, .norm = model->norm}, model->hidden, 1, m);
    const product head = {.matrix = &model->head, .out = logits, .width = model->vocab};
    multiply_all(self, &head, 1, m);
}

/* The best kernel first. NULL for an isa that this machine cannot run. */
static const rp_dense_kernel *choose_kernel(const char *isa)
{
    const rp_dense_kernel *kernels[3];
    int count = 0;
#if RP_AVX2
    if (rp_has_avx512())
        kernels[count++] = &rp_dense_avx512;
    if (rp_has_avx2())
        kernels[count++] = &rp_dense_avx2;
#elif RP_NEON
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP)
        kernels[count++] = &rp_dense_neon;
#endif
    kernels[count++] = &rp_dense_plain;
    for (int i = 0; i < count; i++)
        if (!strcmp(isa, "auto") || !strcmp(isa, kernels[i]->name))
            return kernels[i];
    return NULL;
}

static void free_all(rp_dense *self)
{
    free(self->inputs.codes);
    free(self->inputs.steps);
    free(self->inputs.sums);
    free(self->inputs.totals);
    free(self->rows);
    free(self->up);
    free(self);
}

static void *room(int64_t count, size_t size)
{
    const size_t bytes = (size_t)count * size;
    return aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
}

static bool take_room(rp_dense *self, int64_t max_rows)
{
    const rp_model *model = self->model;
    const int64_t q_width = (int64_t)model->heads * model->head_dim;
    int64_t widest = model->hidden > model->ffn ? model->hidden : model->ffn;
    if (q_width > widest)
        widest = q_width;
    const int64_t quantised = 2 * max_rows * widest; /* two parts of each row */
    self->inputs.codes = room(quantised, 1);
    self->inputs.steps = room(quantised / RP_BLOCK, sizeof(float));
    self->inputs.sums = room(quantised / RP_BLOCK, sizeof(int32_t));
    self->inputs.totals = room(quantised / RP_BLOCK, sizeof(float));
    self->rows = room(max_rows * widest, sizeof(float));
    self->up = room(max_rows * model->ffn, sizeof(float));
    return self->inputs.codes && self->inputs.steps && self->inputs.sums && self->inputs.totals && self->rows &&
           self->up;
}

rp_dense *rp_dense_open(const rp_model *model, int32_t max_rows, int32_t threads, const char *isa)
{
    rp_dense *self = calloc(1, sizeof *self);
    if (!self) {
        errno = ENOMEM;
        return NULL;
    }
    self->model = model;
    self->thread_count = threads;
    self->kernel = choose_kernel(isa);
    int error = self->kernel ? 0 : ENOTSUP;
    if (!error && !take_room(self, max_rows))
        error = ENOMEM;
    if (!error)
        error = rp_threads_start(&self->threads, threads);
    if (error) {
        free_all(self);
        errno = error;
        return NULL;
    }
    return self;
}

const char *rp_dense_isa(const rp_dense *self)
{
    return self->kernel->name;
}

void rp_dense_close(rp_dense *self)
{
    rp_threads_stop(&self->threads);
    free_all(self);
}
