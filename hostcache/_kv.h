/* Declarations of _kv.c. cffi parses this file, so it holds no preprocessor line. */

/* Scatter `rows` float32 rows of K and V into fp16 blocks of one layer.
 *
 * pool          byte 0 of the region; a block is [layer][k|v][kv_head][token][head_dim]
 * layer_offset  bytes from the start of a block to the layer's K
 * kv_bytes      bytes from the layer's K to its V
 * slots         [rows] block * block_tokens + offset; a negative slot marks a padding row, which is skipped
 * k, v          [rows] rows of kv_heads * head_dim floats; a stride is the floats from one row to the next
 *
 * Rounds to nearest even; what exceeds fp16 becomes infinity. The caller has checked every range. */
void rp_kv_write(uint8_t *pool, int64_t block_bytes, int64_t layer_offset, int64_t kv_bytes, int32_t block_tokens,
                 int32_t kv_heads, int32_t head_dim, const int64_t *slots, int64_t rows, const float *k,
                 int64_t k_stride, const float *v, int64_t v_stride);

/* Note rows of one layer that are about to be written. A block's tokens are written in order: one that is written again
 * takes back those behind it.
 *
 * slots     [rows] as above
 * written   [blocks] tokens of each block up to the last one written in this layer
 * rewrites  [blocks] raised by one for each row whose token was written before */
void rp_kv_note(const int64_t *slots, int64_t rows, int32_t block_tokens, int32_t *written, int64_t *rewrites);

/* Copy the first `tokens` tokens of block `src` to block `dst`; the rest of `dst` keeps what it held, and a whole block
 * is one copy. A block is `runs` = layers * 2 * kv_heads rows of row_bytes each. */
void rp_kv_copy_block(uint8_t *pool, int64_t block_bytes, int64_t row_bytes, int64_t runs, int64_t token_bytes,
                      int64_t src, int64_t dst, int64_t tokens);

/* Choose the conversion path of this process: "plain", "avx2", "neon", or "auto" for the best one here (the default).
 * Returns 0, or -1 when this machine cannot run it; then nothing changes. For tests and for diagnosis. */
int rp_kv_use_isa(const char *isa);
