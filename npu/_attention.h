/* Declarations of _attention.c. cffi parses this file, so it holds no preprocessor line. */

enum {
    RP_TILE_ROWS = 24,      /* query rows of one KV head that share one pass over its K and V */
    RP_MAX_HEAD_DIM = 256,  /* what a thread's scratch is sized for */
    RP_SEGMENT = 512        /* tokens whose sums are merged with those before them; threads may compute each */
};

/* Where a codec puts things in a block. */
typedef struct {
    int64_t row_bytes;     /* one head's K or V of one layer; rows lie [layer][k|v][kv_head] */
    int64_t payload_bytes; /* of it; scales are behind */
    int32_t token_bytes;   /* of the payload */
    int32_t groups;        /* scales of a token, fp16; 0: none */
    int32_t rotation;      /* elements that were rotated together; 1: none */
} rp_codec_layout;

/* One step: what the batch and the cache look like, the same for every layer but for layer, windows and what rp_plan
 * writes. The caller owns every array and keeps it alive and unchanged during a call. */
typedef struct {
    const uint8_t *pool;           /* byte 0 of the region */
    int64_t unit_bytes;            /* block b starts at b * unit_bytes */
    int32_t block_tokens;
    int32_t kv_heads;
    int32_t group;                 /* query heads per KV head */
    int32_t head_dim;              /* a multiple of 8, at most RP_MAX_HEAD_DIM */
    float scale;                   /* of the scores: head_dim ** -0.5 */
    int32_t threads;               /* to use for a call, the caller's included; at most the runtime's */
    int32_t layer;
    int32_t sequences;
    int32_t table_width;           /* block ids in a row of tables */
    rp_codec_layout layouts[3];    /* by a codec's number */
    const int32_t *query_starts;   /* [sequences + 1] rows of q before sequence i */
    const int32_t *context_lens;   /* [sequences] tokens, this step's own included */
    const int32_t *windows;        /* [sequences] newest tokens that a row sees, its own included; 0: all */
    const int32_t *sinks;          /* [sequences] first tokens that a row sees besides */
    const uint8_t *codecs;         /* [sequences] numbers */
    const int32_t *tables;         /* [sequences][table_width] */
    int32_t *unit_starts;          /* [sequences + 1] units of work before sequence i */
    int64_t *part_starts;          /* [sequences + 1] floats of parts before sequence i */
    float *parts;                  /* [part_starts[sequences]] scratch: results of segments; NULL while that is 0 */
    int32_t *finished;             /* [sequences * kv_heads] segments computed so far; 0 between calls */
} rp_attention_step;

typedef struct rp_attention rp_attention;

/* Start a runtime of `threads` threads, the caller's included, that computes heads of head_dim elements with `isa`:
 * "plain", "avx2", "avx512", "neon" or "auto". Returns NULL and sets errno: ENOTSUP for an isa that this machine or
 * head_dim does not allow, ENOMEM, or what pthread_create said. */
rp_attention *rp_attention_open(int32_t threads, int32_t head_dim, const char *isa);

/* The isa that "auto" became. The string is static. */
const char *rp_attention_isa(const rp_attention *self);

/* Write unit_starts and part_starts of a step whose other fields, but for layer and parts, are set. */
void rp_plan(const rp_attention_step *step);

/* Attend q over one layer: q and out are float32 [rows][kv_heads * group][head_dim]. One call at a time per runtime.
 * The caller has checked every range. */
void rp_attend(rp_attention *self, const rp_attention_step *step, const float *q, float *out);

/* Merge softmax sums over two sets of tokens into those over both. Each is head_dim floats, the sum of 2^(s - h) * V over
 * tokens of score s; then the sum of 2^(s - h); then h, an integer that is at least max(s) - 1/2. The sum of nothing
 * is 0, 0 and -2^100. The powers of 2 are exact, so each element is rounded once, by its addition. */
void rp_merge(float *into, const float *part, int32_t head_dim);

/* Join the threads and free everything. */
void rp_attention_close(rp_attention *self);
