/* A STUB of the vendor's librknnrt.so, for tests: nothing of it says how a board's runtime or NPU behaves inside.
 *
 * It has the nine functions that rknn-toolkit-lite2 2.5.0 looks up, with argument layouts as that wheel's ctypes classes
 * have them, and computes attention in float32 from fp16 operands, rounded to fp16. Its "model file" is text, see
 * read_graph; tests/npu/stub_graphs.py writes it. Like the library whose place it takes, it raises the priority of the
 * process if it may. Unlike it, perhaps, it refuses operands of a wrong size.
 *
 * Faults come from the environment: ROCKPAGE_STUB_FAULTS holds items FUNCTION@WHEN=WHAT, separated by blanks. WHEN is the
 * number of a call of that function, counted from 1 since stub_count_anew(); or `core` and a number from 0: every call for
 * a context of that core; or `all`. WHAT is one of
 *
 *   -5          fail at once with this code
 *   timeout:N   do nothing for N milliseconds, then fail with RKNN_ERR_TIMEOUT
 *   late:N      work, N milliseconds late
 *   stale       report success and do nothing
 *   garbage     report success and hand out, or take in, what is wrong
 */
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <sys/resource.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

enum { OK = 0, FAIL = -1, TIMEOUT = -2, MALLOC_FAIL = -4, PARAM_INVALID = -5, MODEL_INVALID = -6, CTX_INVALID = -7,
       INPUT_INVALID = -8, OUTPUT_INVALID = -9 };
enum { QUERY_IN_OUT_NUM = 0, QUERY_INPUT_ATTR = 1, QUERY_OUTPUT_ATTR = 2, QUERY_SDK_VERSION = 5,
       QUERY_INPUT_DYNAMIC_RANGE = 13 };
enum { NCHW = 0, NHWC = 1 };
enum { FLOAT16 = 1 };
enum { DIMS = 16, NAME = 256, RANGES = 512, MOST_CONTEXTS = 64 };

typedef struct {
    uint32_t index, n_dims, dims[DIMS];
    char name[NAME];
    uint32_t n_elems, size;
    int32_t fmt, type, qnt_type;
    int8_t fl;
    int32_t zp;
    float scale;
    uint32_t w_stride, size_with_stride;
    uint8_t pass_through;
    uint32_t h_stride;
} tensor_attr;

typedef struct {
    uint32_t index;
    void *buf;
    uint32_t size;
    uint8_t pass_through;
    int32_t type, fmt;
} input;

typedef struct {
    uint8_t want_float, is_prealloc;
    uint32_t index;
    void *buf;
    uint32_t size;
} output;

typedef struct {
    uint32_t index, shape_number;
    int32_t fmt;
    char name[NAME];
    uint32_t dyn_range[RANGES][DIMS], n_dims;
} input_range;

typedef struct { uint32_t n_input, n_output; } in_out_num;
typedef struct { char api_version[256], drv_version[256]; } sdk_version;

_Static_assert(sizeof(tensor_attr) == 376 && offsetof(tensor_attr, n_elems) == 328 &&
               offsetof(tensor_attr, scale) == 356 && offsetof(tensor_attr, h_stride) == 372, "tensor_attr");
_Static_assert(sizeof(input) == 32 && offsetof(input, fmt) == 28, "input");
_Static_assert(sizeof(output) == 24 && offsetof(output, buf) == 8, "output");
_Static_assert(sizeof(input_range) == 33040 && offsetof(input_range, n_dims) == 33036, "input_range");

/* ---- Faults ---- */

enum call { INIT, RUN, DESTROY, QUERY, INPUTS_SET, OUTPUTS_GET, OUTPUTS_RELEASE, SET_CORE_MASK, SET_INPUT_SHAPES, CALLS };

static const char *const NAMES[CALLS] = {
    "rknn_init", "rknn_run", "rknn_destroy", "rknn_query", "rknn_inputs_set", "rknn_outputs_get",
    "rknn_outputs_release", "rknn_set_core_mask", "rknn_set_input_shapes",
};

typedef struct {
    enum { WORK, REFUSE, STALE, GARBAGE } deed;
    int code;
} fault;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned calls[CALLS];

static void pause_for(long milliseconds)
{
    struct timespec left = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    nanosleep(&left, NULL);
}

static bool matches(const char *when, unsigned number, int core)
{
    if (!strcmp(when, "all"))
        return true;
    if (!strncmp(when, "core", 4))
        return atoi(when + 4) == core;
    return strtoul(when, NULL, 10) == number;
}

/* Counts a call and says what is to go wrong in it. */
static fault begin(enum call call, int core)
{
    char items[512], when[16], what[32], pattern[64];
    const char *wanted = getenv("ROCKPAGE_STUB_FAULTS");
    unsigned number;

    pthread_mutex_lock(&lock);
    number = ++calls[call];
    pthread_mutex_unlock(&lock);
    snprintf(items, sizeof items, "%s", wanted ? wanted : "");
    snprintf(pattern, sizeof pattern, "%s@%%15[^=]=%%31s", NAMES[call]);
    for (char *rest, *item = strtok_r(items, " ", &rest); item; item = strtok_r(NULL, " ", &rest)) {
        if (sscanf(item, pattern, when, what) != 2 || !matches(when, number, core))
            continue;
        if (!strcmp(what, "stale"))
            return (fault){STALE, OK};
        if (!strcmp(what, "garbage"))
            return (fault){GARBAGE, OK};
        if (!strncmp(what, "timeout:", 8)) {
            pause_for(atol(what + 8));
            return (fault){REFUSE, TIMEOUT};
        }
        if (!strncmp(what, "late:", 5)) {
            pause_for(atol(what + 5));
            return (fault){WORK, OK};
        }
        return (fault){REFUSE, atoi(what)};
    }
    return (fault){WORK, OK};
}

static void scribble(void *bytes, size_t count)
{
    static unsigned seed = 1;
    for (uint8_t *byte = bytes; count--; byte++)
        *byte = (seed = seed * 1103515245 + 12345) >> 16;
}

/* Numbers that are wrong and not wild: counts, dimensions, types are off by one. */
static void falsify(void *words, size_t count)
{
    for (uint32_t *word = words; count >= sizeof *word; count -= sizeof *word)
        *word++ ^= 1;
}

/* ---- Graphs ---- */

enum { Q, K, V, MASK, INPUTS };
static const char *const INPUT_NAMES[INPUTS] = {"q", "k", "v", "mask"};

typedef struct { unsigned heads, tokens; } launch;

typedef struct {
    unsigned rows, key_channels, head_dim, inputs, launches, current; /* `current` indexes `launch` */
    launch launch[RANGES];
    int core;                  /* -1: any */
    __fp16 *in[INPUTS], *out;  /* in: [N, H, W, C]; out: [heads, head_dim, 1, rows] */
    float *handed_out;         /* by rknn_outputs_get, until it is released */
} context;

/* "rockpage-stub ROWS KEY_CHANNELS HEAD_DIM MASKED", then a line "HEADS TOKENS" for each launch. */
static bool read_graph(context *c, const char *text)
{
    unsigned masked;
    int used;
    if (sscanf(text, "rockpage-stub %u %u %u %u %n", &c->rows, &c->key_channels, &c->head_dim, &masked, &used) != 4)
        return false;
    c->inputs = masked ? INPUTS : MASK;
    for (text += used; c->launches < RANGES; text += used, c->launches++)
        if (sscanf(text, "%u %u %n", &c->launch[c->launches].heads, &c->launch[c->launches].tokens, &used) != 2)
            break;
    return c->launches > 0;
}

/* An input's shape in one launch, channels last, and its elements. */
static uint32_t shape_of(const context *c, unsigned index, unsigned number, uint32_t dims[4])
{
    launch l = c->launch[number];
    uint32_t shapes[INPUTS][4] = {
        [Q] = {l.heads, 1, c->rows, c->key_channels},
        [K] = {l.heads, 1, l.tokens, c->key_channels},
        [V] = {l.heads, 1, l.tokens, c->head_dim},
        [MASK] = {1, 1, c->rows, l.tokens},
    };
    memcpy(dims, shapes[index], sizeof shapes[index]);
    return dims[0] * dims[1] * dims[2] * dims[3];
}

static uint32_t out_elements(const context *c)
{
    return c->launch[c->current].heads * c->head_dim * c->rows;
}

/* Buffers hold zeros after the shapes changed, and what the last run left until then. */
static bool allocate(context *c)
{
    uint32_t dims[4];
    bool whole = true;
    for (unsigned i = 0; i < c->inputs; i++) {
        free(c->in[i]);
        c->in[i] = calloc(shape_of(c, i, c->current, dims), sizeof(__fp16));
        whole = whole && c->in[i];
    }
    free(c->out);
    c->out = calloc(out_elements(c), sizeof(__fp16));
    return whole && c->out;
}

static void discard(context *c)
{
    for (unsigned i = 0; i < INPUTS; i++)
        free(c->in[i]);
    free(c->out);
    free(c->handed_out);
    free(c);
}

static void attend_row(const context *c, launch l, unsigned head, unsigned row, float *weights, float *sum)
{
    const __fp16 *q = c->in[Q] + ((size_t)head * c->rows + row) * c->key_channels;
    float most = -INFINITY, total = 0;
    for (unsigned t = 0; t < l.tokens; t++) {
        const __fp16 *k = c->in[K] + ((size_t)head * l.tokens + t) * c->key_channels;
        float score = c->inputs > MASK ? (float)c->in[MASK][row * l.tokens + t] : 0;
        for (unsigned i = 0; i < c->key_channels; i++)
            score += (float)q[i] * (float)k[i];
        weights[t] = score;
        most = score > most ? score : most;
    }
    memset(sum, 0, c->head_dim * sizeof *sum);
    for (unsigned t = 0; t < l.tokens; t++) {
        const __fp16 *v = c->in[V] + ((size_t)head * l.tokens + t) * c->head_dim;
        float weight = expf(weights[t] - most);
        total += weight;
        for (unsigned i = 0; i < c->head_dim; i++)
            sum[i] += weight * (float)v[i];
    }
    for (unsigned i = 0; i < c->head_dim; i++)
        c->out[((size_t)head * c->head_dim + i) * c->rows + row] = (__fp16)(sum[i] / total);
}

static int attend(context *c)
{
    launch l = c->launch[c->current];
    float *scratch = malloc((l.tokens + c->head_dim) * sizeof(float));
    if (!scratch)
        return MALLOC_FAIL;
    for (unsigned head = 0; head < l.heads; head++)
        for (unsigned row = 0; row < c->rows; row++)
            attend_row(c, l, head, row, scratch, scratch + l.tokens);
    free(scratch);
    return OK;
}

/* ---- Contexts ---- */

static context *alive[MOST_CONTEXTS];

static context *find(uint64_t ctx)
{
    context *found = NULL;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST_CONTEXTS; i++)
        if (ctx && alive[i] == (context *)(uintptr_t)ctx)
            found = alive[i];
    pthread_mutex_unlock(&lock);
    return found;
}

/* Puts `now` in the place of `before`, either of which may be NULL. */
static bool replace(context *before, context *now)
{
    bool done = false;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST_CONTEXTS && !done; i++)
        if (alive[i] == before) {
            alive[i] = now;
            done = true;
        }
    pthread_mutex_unlock(&lock);
    return done;
}

/* For tests: count calls anew; how many contexts are alive. */
EXPORT void stub_count_anew(void)
{
    pthread_mutex_lock(&lock);
    memset(calls, 0, sizeof calls);
    pthread_mutex_unlock(&lock);
}

EXPORT int stub_contexts(void)
{
    int count = 0;
    for (int i = 0; i < MOST_CONTEXTS; i++)
        count += alive[i] != NULL;
    return count;
}

/* ---- The nine functions ---- */

EXPORT int rknn_init(uint64_t *ctx, void *model, uint32_t size, uint32_t flag, void *extend)
{
    (void)flag, (void)extend;
    fault f = begin(INIT, -1);
    if (f.deed == REFUSE)
        return f.code;
    setpriority(PRIO_PROCESS, 0, -19);
    if (f.deed == STALE)
        return OK;
    if (f.deed == GARBAGE) {
        scribble(ctx, sizeof *ctx);
        return OK;
    }
    context *c = calloc(1, sizeof *c);
    char *text = strndup(model, size); /* of size 0, the real one takes it for a path */
    bool sound = c && text && read_graph(c, text) && allocate(c) && replace(NULL, c);
    free(text);
    if (!sound) {
        if (c)
            discard(c);
        return MODEL_INVALID;
    }
    c->core = -1;
    *ctx = (uintptr_t)c;
    return OK;
}

EXPORT int rknn_destroy(uint64_t ctx)
{
    context *c = find(ctx);
    fault f = begin(DESTROY, c ? c->core : -1);
    if (f.deed != WORK)
        return f.code;
    if (!c)
        return CTX_INVALID;
    replace(c, NULL);
    discard(c);
    return OK;
}

EXPORT int rknn_set_core_mask(uint64_t ctx, int mask)
{
    context *c = find(ctx);
    fault f = begin(SET_CORE_MASK, c ? c->core : -1);
    if (f.deed != WORK)
        return f.code;
    if (!c)
        return CTX_INVALID;
    if (mask != 1 && mask != 2 && mask != 4)
        return PARAM_INVALID;
    c->core = mask / 2; /* 1, 2, 4 are cores 0, 1, 2 */
    return OK;
}

static void describe(tensor_attr *attr, const char *name, int32_t fmt, const uint32_t dims[4])
{
    uint32_t index = attr->index;
    memset(attr, 0, sizeof *attr);
    attr->index = index;
    attr->n_dims = 4;
    memcpy(attr->dims, dims, 4 * sizeof *dims);
    strcpy(attr->name, name);
    attr->n_elems = dims[0] * dims[1] * dims[2] * dims[3];
    attr->size = attr->size_with_stride = attr->n_elems * sizeof(__fp16);
    attr->fmt = fmt;
    attr->type = FLOAT16;
    attr->scale = 1;
    attr->w_stride = dims[2];
}

static int answer(const context *c, int cmd, void *info, uint32_t size)
{
    uint32_t dims[4], index = *(uint32_t *)info;
    if (cmd == QUERY_IN_OUT_NUM && size == sizeof(in_out_num)) {
        *(in_out_num *)info = (in_out_num){c->inputs, 1};
    } else if (cmd == QUERY_INPUT_ATTR && size == sizeof(tensor_attr) && index < c->inputs) {
        shape_of(c, index, c->current, dims);
        describe(info, INPUT_NAMES[index], NHWC, dims);
    } else if (cmd == QUERY_OUTPUT_ATTR && size == sizeof(tensor_attr) && index == 0) {
        uint32_t shape[4] = {c->launch[c->current].heads, c->head_dim, 1, c->rows};
        describe(info, "out", NCHW, shape);
    } else if (cmd == QUERY_SDK_VERSION && size == sizeof(sdk_version)) {
        const char *version = getenv("ROCKPAGE_STUB_VERSION");
        snprintf(((sdk_version *)info)->api_version, 256, "%s (stub@build)", version ? version : "2.5.0");
        snprintf(((sdk_version *)info)->drv_version, 256, "0.9.8");
    } else if (cmd == QUERY_INPUT_DYNAMIC_RANGE && size == sizeof(input_range) && index < c->inputs) {
        input_range *range = info;
        range->shape_number = c->launches;
        range->fmt = NHWC;
        strcpy(range->name, INPUT_NAMES[index]);
        range->n_dims = 4;
        for (unsigned i = 0; i < c->launches; i++)
            shape_of(c, index, i, range->dyn_range[i]);
    } else {
        return PARAM_INVALID;
    }
    return OK;
}

EXPORT int rknn_query(uint64_t ctx, int cmd, void *info, uint32_t size)
{
    context *c = find(ctx);
    fault f = begin(QUERY, c ? c->core : -1);
    if (f.deed == REFUSE || f.deed == STALE)
        return f.code;
    if (!c)
        return CTX_INVALID;
    int status = answer(c, cmd, info, size);
    if (f.deed == GARBAGE)
        falsify(info, size);
    return status;
}

EXPORT int rknn_set_input_shapes(uint64_t ctx, uint32_t n_inputs, tensor_attr *attrs)
{
    context *c = find(ctx);
    uint32_t dims[4];
    fault f = begin(SET_INPUT_SHAPES, c ? c->core : -1);
    if (f.deed == REFUSE || f.deed == STALE)
        return f.code;
    if (!c)
        return CTX_INVALID;
    if (n_inputs != c->inputs)
        return PARAM_INVALID;
    for (unsigned number = 0; number < c->launches; number++) {
        bool same = true;
        for (unsigned i = 0; i < n_inputs; i++) {
            shape_of(c, i, number, dims);
            same = same && attrs[i].n_dims == 4 && attrs[i].fmt == NHWC && !memcmp(attrs[i].dims, dims, sizeof dims);
        }
        if (same) {
            unsigned before = c->current;
            c->current = f.deed == GARBAGE ? (number + 1) % c->launches : number;
            return c->current == before || allocate(c) ? OK : MALLOC_FAIL;
        }
    }
    return PARAM_INVALID;
}

EXPORT int rknn_inputs_set(uint64_t ctx, uint32_t n_inputs, input *inputs)
{
    context *c = find(ctx);
    uint32_t dims[4];
    fault f = begin(INPUTS_SET, c ? c->core : -1);
    if (f.deed == REFUSE || f.deed == STALE)
        return f.code;
    if (!c)
        return CTX_INVALID;
    if (n_inputs != c->inputs)
        return PARAM_INVALID;
    for (unsigned i = 0; i < n_inputs; i++) {
        const input *in = &inputs[i];
        if (in->index != i || in->pass_through || in->type != FLOAT16 || in->fmt != NHWC ||
            in->size != shape_of(c, i, c->current, dims) * sizeof(__fp16))
            return INPUT_INVALID;
    }
    for (unsigned i = 0; i < n_inputs; i++)
        if (f.deed == GARBAGE)
            scribble(c->in[i], inputs[i].size);
        else
            memcpy(c->in[i], inputs[i].buf, inputs[i].size);
    return OK;
}

EXPORT int rknn_run(uint64_t ctx, void *extend)
{
    (void)extend;
    context *c = find(ctx);
    fault f = begin(RUN, c ? c->core : -1);
    if (f.deed == REFUSE || f.deed == STALE)
        return f.code;
    if (!c)
        return CTX_INVALID;
    if (f.deed == GARBAGE) {
        scribble(c->out, out_elements(c) * sizeof(__fp16));
        return OK;
    }
    return attend(c);
}

EXPORT int rknn_outputs_get(uint64_t ctx, uint32_t n_outputs, output *outputs, void *extend)
{
    (void)extend;
    context *c = find(ctx);
    fault f = begin(OUTPUTS_GET, c ? c->core : -1);
    if (f.deed == REFUSE || f.deed == STALE)
        return f.code;
    if (!c)
        return CTX_INVALID;
    uint32_t elements = out_elements(c), size = elements * sizeof(float);
    if (n_outputs != 1 || !outputs->want_float || (outputs->is_prealloc && outputs->size < size))
        return OUTPUT_INVALID;
    float *values = outputs->buf;
    if (!outputs->is_prealloc) {
        free(c->handed_out);
        outputs->buf = c->handed_out = values = malloc(size);
    }
    if (!values)
        return MALLOC_FAIL;
    outputs->size = size;
    for (uint32_t i = 0; i < elements; i++)
        values[i] = (float)c->out[i];
    if (f.deed == GARBAGE)
        scribble(values, size);
    return OK;
}

EXPORT int rknn_outputs_release(uint64_t ctx, uint32_t n_outputs, output *outputs)
{
    (void)n_outputs, (void)outputs; /* without a result, the wheel has memory of its own in them */
    context *c = find(ctx);
    fault f = begin(OUTPUTS_RELEASE, c ? c->core : -1);
    if (f.deed != WORK)
        return f.code;
    if (!c)
        return CTX_INVALID;
    free(c->handed_out);
    c->handed_out = NULL;
    return OK;
}
