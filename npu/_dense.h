/* Declarations of _dense.c. cffi parses this file, so it holds no preprocessor line. */

enum {
    RP_LANES = 16,          /* outputs of a matrix that lie side by side */
    RP_BLOCK = 32           /* weights of one output that share a scale */
};

/* A block-quantised matrix that maps `columns` inputs to `rows` outputs; both are whole multiples, see tiles.py.
 *
 *   weight(r, c) = scale * (code - zero) + offset
 *
 * codes   [rows / 16][columns / 32][4 | 8][16][4] bytes. Of 8 bits, group j of 4 holds columns 4j..4j+3 as int8. Of 4
 *         bits, it holds columns 4j..4j+3 in the low halves and 16+4j..16+4j+3 in the high ones, 0..15.
 * scales  fp16 [rows / 16][columns / 32][16]
 * offsets fp16, likewise; NULL: all are 0 */
typedef struct {
    const uint8_t *codes;
    const uint16_t *scales;
    const uint16_t *offsets;
    int32_t rows;
    int32_t columns;
    int32_t bits;           /* 4 or 8 */
    int32_t zero;           /* of 4-bit codes; 0 for 8 bits */
} rp_matrix;

/* One decoder layer. Vectors are float32; NULL where the model's family has none. */
typedef struct {
    const float *attention_norm; /* [hidden] */
    const float *ffn_norm;       /* [hidden] */
    const float *q_bias;
    const float *k_bias;
    const float *v_bias;
    const float *q_norm;         /* [head_dim], shared by all heads */
    const float *k_norm;
    rp_matrix q, k, v, output, gate, up, down;
} rp_layer;

typedef struct {
    int32_t hidden;
    int32_t heads;
    int32_t kv_heads;
    int32_t head_dim;
    int32_t ffn;
    int32_t vocab;
    int32_t interleaved;         /* whether a rotated pair is (2i, 2i + 1) instead of (i, i + head_dim / 2) */
    float eps;                   /* of every RMSNorm */
    const float *norm;           /* [hidden] in front of the head */
    rp_matrix head;
} rp_model;

typedef struct rp_dense rp_dense;

/* Start a runtime of `threads` threads, the caller's included, for steps of up to max_rows rows. `isa` is "plain",
 * "avx2", "avx512", "neon" or "auto". The runtime keeps `model`. Returns NULL and sets errno: ENOTSUP for an isa this
 * machine cannot run, ENOMEM, or what pthread_create said. */
rp_dense *rp_dense_open(const rp_model *model, int32_t max_rows, int32_t threads, const char *isa);

/* The isa that "auto" became. The string is static. */
const char *rp_dense_isa(const rp_dense *self);

/* From the residual stream [m][hidden] to what attention takes: q [m][heads][head_dim] and k [m][kv_heads][head_dim],
 * rotated by cos and sin [m][head_dim / 2], and v. One call at a time per runtime; the caller has checked every range. */
void rp_dense_before(rp_dense *self, const rp_layer *layer, int32_t m, const float *residual, const float *cosine,
                     const float *sine, float *q, float *k, float *v);

/* From attention's output [m][heads][head_dim] to the residual stream behind the layer, which is updated in place. */
void rp_dense_after(rp_dense *self, const rp_layer *layer, int32_t m, const float *attended, float *residual);

/* Logits [m][vocabulary] of rows of the residual stream behind the last layer. */
void rp_dense_head(rp_dense *self, int32_t m, const float *residual, float *logits);

/* Join the threads and free everything. */
void rp_dense_close(rp_dense *self);
