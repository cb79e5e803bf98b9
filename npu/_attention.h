/* Declarations of _attention.c. cffi parses this file, so it holds no preprocessor line. */

enum {
    RP_TILE_ROWS = 24,     /* query rows of one KV head that share one pass over its K and V */
    RP_MAX_HEAD_DIM = 256  /* what a thread's scratch is sized for */
};

/* One step: what the batch and the cache look like, the same for every layer but for the windows. The caller owns every array and keeps
 * it alive and unchanged during a call. */
typedef struct {
    const uint8_t *pool;           /* byte 0 of the region; a block is [layer][k|v][kv_head][token][head_dim] fp16 */
    int64_t block_bytes;           /* from a block to the next */
    int64_t kv_bytes;              /* from a layer's K to its V */
    int32_t block_tokens;
    int32_t kv_heads;
    int32_t group;                 /* query heads per KV head */
    int32_t head_dim;              /* a multiple of 8, at most RP_MAX_HEAD_DIM */
    float scale;                   /* of the scores: head_dim ** -0.5 */
    int32_t threads;               /* to use for a call, the caller's included; at most the runtime's */
    int32_t sequences;
    int32_t table_width;           /* block ids in a row of tables */
    const int32_t *query_starts;   /* [sequences + 1] rows of q before sequence i */
    const int32_t *tile_starts;    /* [sequences + 1] tiles before sequence i: ceil(its rows * group / RP_TILE_ROWS) each */
    const int32_t *context_lens;   /* [sequences] tokens, this step's own included */
    const int32_t *windows;        /* [sequences] newest tokens that a row sees, its own included; 0: all */
    const int32_t *sinks;          /* [sequences] first tokens that a row sees besides */
    const int32_t *tables;         /* [sequences][table_width] */
} rp_attention_step;

typedef struct rp_attention rp_attention;

/* Start a runtime of `threads` threads, the caller's included, that computes with `isa`: "plain", "avx2", "neon" or
 * "auto". Returns NULL and sets errno: ENOTSUP for an isa this machine cannot run, ENOMEM, or what pthread_create said. */
rp_attention *rp_attention_open(int32_t threads, const char *isa);

/* The isa that "auto" became. The string is static. */
const char *rp_attention_isa(const rp_attention *self);

/* Attend q over one layer: q and out are float32 [rows][kv_heads * group][head_dim], layer_offset is in bytes from the
 * start of a block. One call at a time per runtime. The caller has checked every range. */
void rp_attend(rp_attention *self, const rp_attention_step *step, int64_t layer_offset, const float *q, float *out);

/* Join the threads and free everything. */
void rp_attention_close(rp_attention *self);
