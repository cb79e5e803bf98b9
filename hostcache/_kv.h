/* Declarations of _kv.c. cffi parses this file, so it holds no preprocessor line. */

/* Scatter `rows` float32 rows of K and V into one layer of their blocks.
 *
 * pool        byte 0 of the region; block b begins at b * unit_bytes, and is [layer][k|v][kv_head] rows
 * row_bytes   [3] bytes of a row, by the codec's number: block_tokens tokens' codes, then their scales (_codec.h)
 * slots       [rows] block * block_tokens + offset; a negative slot marks a padding row, which is skipped
 * codecs      [rows] each one's codec; NULL: all are fp16
 * k, v        [rows] rows of kv_heads * head_dim floats; a stride is the floats from one row to the next
 * feedback    [kv_heads][head_dim][head_dim] of K in int4: rp_encode_keys' (_rows.h); NULL: none
 *
 * fp16 rounds to nearest even; what exceeds it becomes infinity. The caller has checked every range. */
void rp_kv_write(uint8_t *pool, int64_t unit_bytes, const int64_t *row_bytes, int32_t layer, int32_t block_tokens,
                 int32_t kv_heads, int32_t head_dim, const int64_t *slots, const uint8_t *codecs, int64_t rows,
                 const float *k, int64_t k_stride, const float *v, int64_t v_stride, const float *feedback);

/* The first row whose slot or codec does not fit, or -1. A negative slot fits.
 *
 * spans  [3] units that a block takes, by the codec's number: its id is a multiple of that; 0: such blocks there are not
 * units  how many there are, a multiple of each of the spans */
int64_t rp_kv_misfit(const int64_t *slots, const uint8_t *codecs, int64_t rows, int32_t block_tokens,
                     const int64_t *spans, int64_t units);

/* Read the first `tokens` tokens of one layer of a table, as fp16, rotated back.
 *
 * blocks  [ceil(tokens / block_tokens)]
 * k, v    [tokens][kv_heads][head_dim] */
void rp_kv_read(const uint8_t *pool, int64_t unit_bytes, int64_t row_bytes, int32_t codec, int32_t layer,
                int32_t block_tokens, int32_t kv_heads, int32_t head_dim, const int64_t *blocks, int64_t tokens,
                uint16_t *k, uint16_t *v);

/* Bring the rows of one codec into the form that it stores, and copy the others.
 *
 * x, y      [rows][heads][head_dim]; of a row of `codec`, y = (x - offset) * matrix for each head
 * share     heads in a row that have the same offset and matrix
 * offsets   [heads / share][head_dim]; NULL: zero
 * matrices  [heads / share][head_dim][head_dim]
 *
 * A row's bits depend neither on the other rows nor on the instruction set. */
void rp_kv_combine(const uint8_t *codecs, int32_t codec, int64_t rows, int32_t heads, int32_t head_dim, int32_t share,
                   const float *offsets, const float *matrices, const float *x, float *y);

/* Note rows of one layer that are about to be written. A block's tokens are written in order: one that is written again
 * takes back those behind it.
 *
 * slots     [rows] as above
 * written   [blocks] tokens of each block up to the last one written in this layer
 * rewrites  [blocks] raised by one for each row whose token was written before */
void rp_kv_note(const int64_t *slots, int64_t rows, int32_t block_tokens, int32_t *written, int64_t *rewrites);

/* Copy the first `tokens` tokens of block `src` to block `dst` of the same codec; the rest of `dst` keeps what it held,
 * and a whole block is one copy. A block is `runs` = layers * 2 * kv_heads rows of row_bytes each. */
void rp_kv_copy_block(uint8_t *pool, int64_t unit_bytes, int64_t row_bytes, int64_t runs, int32_t codec,
                      int32_t block_tokens, int32_t head_dim, int64_t src, int64_t dst, int64_t tokens);

/* Choose how rows are converted in this process: "plain", "avx2", "neon", or "auto" for the best one here (the default).
 * Returns 0, or -1 when this machine cannot run it; then nothing changes. For tests and for diagnosis. */
int rp_kv_use_isa(const char *isa);
