/* A STUB of the vendor's librknnrt.so, for tests: nothing of it says how a board's runtime or NPU behaves inside.
 *
 * It has the nine functions that rknn-toolkit-lite2 2.5.0 looks up, with argument layouts as that wheel's ctypes classes
 * have them, and three for operands in dma-bufs, as rknn_api.h 2.3.2 has them. It computes attention in float32 from fp16
 * operands, rounded to fp16. Its "model file" is text, see read_graph; tests/npu/stub_graphs.py writes it. Like the
 * library whose place it takes, it raises the priority of the process if it may. Unlike it, perhaps, it refuses operands
 * of a wrong size, or in another order than the NPU's own.
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
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

enum { OK = 0, FAIL = -1, TIMEOUT = -2, MALLOC_FAIL = -4, PARAM_INVALID = -5, MODEL_INVALID = -6, CTX_INVALID = -7,
       INPUT_INVALID = -8, OUTPUT_INVALID = -9 };
enum { QUERY_IN_OUT_NUM = 0, QUERY_INPUT_ATTR = 1, QUERY_OUTPUT_ATTR = 2, QUERY_SDK_VERSION = 5,
       QUERY_INPUT_DYNAMIC_RANGE = 13, QUERY_CURRENT_NATIVE_INPUT_ATTR = 16, QUERY_CURRENT_NATIVE_OUTPUT_ATTR = 17 };
enum { NCHW = 0, NHWC = 1, NC1HWC2 = 2 };
enum { FLOAT16 = 1 };
enum { NO_HIGH_PRIORITY = 0x2000, NO_FLUSHES = 0x4000 | 0x8000 }; /* at rknn_init; neither of inputs nor of outputs */
enum { DIMS = 16, NAME = 256, RANGES = 512, MOST_CONTEXTS = 64, MOST_SHADOWS = 256, TILE = 8 };

typedef _Float16 half;

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

typedef struct {
    void *virt_addr;
    uint64_t phys_addr;
    int32_t fd, offset;
    uint32_t size, flags;
    void *priv_data;
} tensor_mem;

typedef struct { uint32_t n_input, n_output; } in_out_num;
typedef struct { char api_version[256], drv_version[256]; } sdk_version;

_Static_assert(sizeof(tensor_attr) == 376 && offsetof(tensor_attr, n_elems) == 328 &&
               offsetof(tensor_attr, scale) == 356 && offsetof(tensor_attr, h_stride) == 372, "tensor_attr");
_Static_assert(sizeof(input) == 32 && offsetof(input, fmt) == 28, "input");
_Static_assert(sizeof(output) == 24 && offsetof(output, buf) == 8, "output");
_Static_assert(sizeof(tensor_mem) == 40 && offsetof(tensor_mem, fd) == 16 && offsetof(tensor_mem, priv_data) == 32, "mem");
_Static_assert(sizeof(input_range) == 33040 && offsetof(input_range, n_dims) == 33036, "input_range");

/* ---- Faults ---- */

enum call { INIT, RUN, DESTROY, QUERY, INPUTS_SET, OUTPUTS_GET, OUTPUTS_RELEASE, SET_CORE_MASK, SET_INPUT_SHAPES,
            CREATE_MEM, DESTROY_MEM, SET_IO_MEM, CALLS };

static const char *const NAMES[CALLS] = {
    "rknn_init", "rknn_run", "rknn_destroy", "rknn_query", "rknn_inputs_set", "rknn_outputs_get",
    "rknn_outputs_release", "rknn_set_core_mask", "rknn_set_input_shapes",
    "rknn_create_mem_from_fd", "rknn_destroy_mem", "rknn_set_io_mem",
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
    tensor_mem tensor; /* first: what the caller is given */
    uint8_t *view;     /* the device's, of the whole dma-buf */
    size_t view_bytes;
} memory;

typedef struct {
    unsigned rows, key_channels, head_dim, inputs, launches, current; /* `current` indexes `launch` */
    launch launch[RANGES];
    int core;                  /* -1: any */
    half *in[INPUTS], *out;  /* in: [N, H, W, C]; out: [heads, head_dim, 1, rows] */
    float *handed_out;         /* by rknn_outputs_get, until it is released */
    uint32_t flags;            /* of rknn_init */
    memory *io[INPUTS + 1];    /* where the inputs and the output lie, if somewhere else; forgotten with the shapes */
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

/* The output's shape, channels last. */
static void out_shape_of(const context *c, uint32_t dims[4])
{
    uint32_t shape[4] = {c->launch[c->current].heads, 1, c->rows, c->head_dim};
    memcpy(dims, shape, sizeof shape);
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
    memset(c->io, 0, sizeof c->io);
    for (unsigned i = 0; i < c->inputs; i++) {
        free(c->in[i]);
        c->in[i] = calloc(shape_of(c, i, c->current, dims), sizeof(half));
        whole = whole && c->in[i];
    }
    free(c->out);
    c->out = calloc(out_elements(c), sizeof(half));
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
    const half *q = c->in[Q] + ((size_t)head * c->rows + row) * c->key_channels;
    float most = -INFINITY, total = 0;
    for (unsigned t = 0; t < l.tokens; t++) {
        const half *k = c->in[K] + ((size_t)head * l.tokens + t) * c->key_channels;
        float score = c->inputs > MASK ? (float)c->in[MASK][row * l.tokens + t] : 0;
        for (unsigned i = 0; i < c->key_channels; i++)
            score += (float)q[i] * (float)k[i];
        weights[t] = score;
        most = score > most ? score : most;
    }
    memset(sum, 0, c->head_dim * sizeof *sum);
    for (unsigned t = 0; t < l.tokens; t++) {
        const half *v = c->in[V] + ((size_t)head * l.tokens + t) * c->head_dim;
        float weight = expf(weights[t] - most);
        total += weight;
        for (unsigned i = 0; i < c->head_dim; i++)
            sum[i] += weight * (float)v[i];
    }
    for (unsigned i = 0; i < c->head_dim; i++)
        c->out[((size_t)head * c->head_dim + i) * c->rows + row] = (half)(sum[i] / total);
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

/* ---- Operands in dma-bufs ---- */

/* Moves an operand of `dims` elements, channels last, to or from tiles of channels: [N, C / 8, H, W, 8]. */
static void move_tiles(half *flat, half *tiles, const uint32_t dims[4], bool to_tiles)
{
    uint32_t pixels = dims[1] * dims[2], channels = dims[3];
    for (uint32_t n = 0; n < dims[0]; n++)
        for (uint32_t pixel = 0; pixel < pixels; pixel++)
            for (uint32_t c = 0; c < channels; c++) {
                half *own = flat + ((size_t)n * pixels + pixel) * channels + c;
                half *tile = tiles + (((size_t)n * (channels / TILE) + c / TILE) * pixels + pixel) * TILE + c % TILE;
                *(to_tiles ? tile : own) = *(to_tiles ? own : tile);
            }
}

static half *lies_at(const memory *m)
{
    return (half *)(m->view + m->tensor.offset);
}

static bool reads_in_place(const context *c)
{
    return c->io[INPUTS] != NULL;
}

/* Brings inputs from where they lie. The NPU would read them there; what counts is that it sees no others. */
static bool fetch(context *c)
{
    uint32_t dims[4];
    for (unsigned i = 0; i < c->inputs; i++) {
        if (!c->io[i])
            return false;
        shape_of(c, i, c->current, dims);
        move_tiles(c->in[i], lies_at(c->io[i]), dims, false);
    }
    return true;
}

/* out is [heads, head_dim, 1, rows]: of tiles of channels, too. */
static void deliver(const context *c)
{
    half *tiles = lies_at(c->io[INPUTS]);
    for (unsigned head = 0; head < c->launch[c->current].heads; head++)
        for (unsigned d = 0; d < c->head_dim; d++)
            for (unsigned row = 0; row < c->rows; row++)
                tiles[(((size_t)head * (c->head_dim / TILE) + d / TILE) * c->rows + row) * TILE + d % TILE] =
                    c->out[((size_t)head * c->head_dim + d) * c->rows + row];
}

/* A dma-buf's bytes as the device sees them, where a test keeps them apart from the CPU's: see stub_shadow. */
static struct { int fd, shadow; } shadows[MOST_SHADOWS];
static unsigned shadow_count;
static int memories;

static int seen_by_device(int fd)
{
    int seen = fd;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < shadow_count; i++)
        if (shadows[i].fd == fd)
            seen = shadows[i].shadow;
    pthread_mutex_unlock(&lock);
    return seen;
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

/* For tests: let the device see a dma-buf as another file has it, until the next call with the same descriptor. */
EXPORT void stub_shadow(int fd, int shadow)
{
    unsigned at = 0;
    pthread_mutex_lock(&lock);
    while (at < shadow_count && shadows[at].fd != fd)
        at++;
    if (at < MOST_SHADOWS) {
        shadows[at].fd = fd;
        shadows[at].shadow = shadow;
        shadow_count += at == shadow_count;
    }
    pthread_mutex_unlock(&lock);
}

/* For tests: how many memories are alive. */
EXPORT int stub_memories(void)
{
    return memories;
}

/* For tests: how often a call came since stub_count_anew(). */
EXPORT unsigned stub_calls(const char *name)
{
    for (int call = 0; call < CALLS; call++)
        if (!strcmp(NAMES[call], name))
            return calls[call];
    return 0;
}

/* ---- The library's functions ---- */

EXPORT int rknn_init(uint64_t *ctx, void *model, uint32_t size, uint32_t flag, void *extend)
{
    (void)extend;
    fault f = begin(INIT, -1);
    if (f.deed == REFUSE)
        return f.code;
    if (!(flag & NO_HIGH_PRIORITY))
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
    c->flags = flag;
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
    attr->size = attr->size_with_stride = attr->n_elems * sizeof(half);
    attr->fmt = fmt;
    attr->type = FLOAT16;
    attr->scale = 1;
    attr->w_stride = dims[2];
}

/* In tiles of channels; or in another way that ROCKPAGE_STUB_NATIVE names. */
static void describe_native(tensor_attr *attr, const char *name, const uint32_t dims[4])
{
    const char *other = getenv("ROCKPAGE_STUB_NATIVE");
    uint32_t tiles[5] = {dims[0], dims[3] / TILE, dims[1], dims[2], TILE};
    describe(attr, name, NHWC, dims);
    if (other && !strcmp(other, "nhwc"))
        return;
    attr->fmt = NC1HWC2;
    attr->n_dims = 5;
    memcpy(attr->dims, tiles, sizeof tiles);
    if (other && !strcmp(other, "stride"))
        attr->size_with_stride += 64;
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
    } else if (cmd == QUERY_CURRENT_NATIVE_INPUT_ATTR && size == sizeof(tensor_attr) && index < c->inputs) {
        shape_of(c, index, c->current, dims);
        describe_native(info, INPUT_NAMES[index], dims);
    } else if (cmd == QUERY_CURRENT_NATIVE_OUTPUT_ATTR && size == sizeof(tensor_attr) && index == 0) {
        out_shape_of(c, dims);
        describe_native(info, "out", dims);
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
            memset(c->io, 0, sizeof c->io);
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
            in->size != shape_of(c, i, c->current, dims) * sizeof(half))
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
        scribble(reads_in_place(c) ? lies_at(c->io[INPUTS]) : c->out, out_elements(c) * sizeof(half));
        return OK;
    }
    if (!reads_in_place(c))
        return attend(c);
    if ((c->flags & NO_FLUSHES) != NO_FLUSHES) /* of an import, the driver refuses them */
        return FAIL;
    if (!fetch(c))
        return INPUT_INVALID;
    int status = attend(c);
    if (status == OK)
        deliver(c);
    return status;
}

EXPORT tensor_mem *rknn_create_mem_from_fd(uint64_t ctx, int32_t fd, void *virt_addr, uint32_t size, int32_t offset)
{
    context *c = find(ctx);
    struct stat found;
    fault f = begin(CREATE_MEM, c ? c->core : -1);
    if (f.deed == REFUSE || !c || fstat(fd, &found) || offset < 0 || (uint64_t)offset + size > (uint64_t)found.st_size)
        return NULL;
    memory *m = calloc(1, sizeof *m);
    if (!m)
        return NULL;
    m->view_bytes = found.st_size;
    m->view = mmap(NULL, m->view_bytes, PROT_READ | PROT_WRITE, f.deed == STALE ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED,
                   f.deed == STALE ? -1 : seen_by_device(fd), 0);
    if (m->view == MAP_FAILED) {
        free(m);
        return NULL;
    }
    m->tensor = (tensor_mem){.virt_addr = virt_addr, .fd = fd, .offset = offset, .size = size};
    if (f.deed == GARBAGE)
        m->tensor.offset ^= 1;
    pthread_mutex_lock(&lock);
    memories++;
    pthread_mutex_unlock(&lock);
    return &m->tensor;
}

EXPORT int rknn_destroy_mem(uint64_t ctx, tensor_mem *tensor)
{
    context *c = find(ctx);
    memory *m = (memory *)tensor;
    fault f = begin(DESTROY_MEM, c ? c->core : -1);
    if (f.deed != WORK)
        return f.code;
    if (!c || !m)
        return PARAM_INVALID;
    for (unsigned i = 0; i <= INPUTS; i++)
        if (c->io[i] == m)
            c->io[i] = NULL;
    munmap(m->view, m->view_bytes);
    free(m);
    pthread_mutex_lock(&lock);
    memories--;
    pthread_mutex_unlock(&lock);
    return OK;
}

/* Which operand it is, its name says: inputs and outputs are both counted from 0. */
EXPORT int rknn_set_io_mem(uint64_t ctx, tensor_mem *tensor, tensor_attr *attr)
{
    context *c = find(ctx);
    uint32_t dims[4];
    fault f = begin(SET_IO_MEM, c ? c->core : -1);
    if (f.deed == REFUSE || f.deed == STALE)
        return f.code;
    if (!c)
        return CTX_INVALID;
    unsigned which = INPUTS;
    for (unsigned i = 0; i < c->inputs; i++)
        if (!strcmp(attr->name, INPUT_NAMES[i]))
            which = i;
    if (which == INPUTS)
        out_shape_of(c, dims);
    else
        shape_of(c, which, c->current, dims);
    uint32_t tiles[5] = {dims[0], dims[3] / TILE, dims[1], dims[2], TILE};
    if (which == INPUTS ? strcmp(attr->name, "out") : attr->index != which || !attr->pass_through)
        return PARAM_INVALID;
    if (attr->fmt != NC1HWC2 || attr->type != FLOAT16 || attr->n_dims != 5 || memcmp(attr->dims, tiles, sizeof tiles) ||
        tensor->size != attr->size_with_stride)
        return PARAM_INVALID;
    if (f.deed != GARBAGE)
        c->io[which] = (memory *)tensor;
    else if (which == V)
        c->io[V] = c->io[K]; /* and no other operand where it should be */
    return OK;
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
