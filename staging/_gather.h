/* Declarations of _gather.c. cffi parses this file, so it holds no preprocessor line. */

/* Copy n runs of bytes. rows is int64 [n, 3]: source offset, destination offset, bytes. A run is read at
 * src + src_shift + source offset, so that one plan serves every layer. Source and destination never overlap. */
void rp_gather(const uint8_t *src, int64_t src_shift, uint8_t *dst, const int64_t *rows, int64_t n);

/* Zero n runs of bytes. runs is int64 [n, 2]: destination offset, bytes. */
void rp_zero(uint8_t *dst, const int64_t *runs, int64_t n);
