/* Declarations of _limits.c. cffi parses this file, so it holds no preprocessor line. */

/* One memcpy of so many bytes. */
void rp_limit_copy(const uint8_t *src, uint8_t *dst, int64_t nbytes);

/* n memcpys. runs is int64 [n, 3]: source offset, destination offset, bytes. */
void rp_limit_copy_runs(const uint8_t *src, uint8_t *dst, const int64_t *runs, int64_t n);

/* Load every byte once, by the widest vectors; the sum says that it was done: of the 64-bit words, modulo 2^64.
 * nbytes is a multiple of 256. */
uint64_t rp_limit_read(const uint8_t *src, int64_t nbytes);

/* The same so many times over: where nbytes stay in a core's own caches, what the core can do and memory has no part in. */
uint64_t rp_limit_reread(const uint8_t *src, int64_t nbytes, int64_t times);
