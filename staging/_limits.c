/* What one thread can do at most: copying memory and reading it. Benchmarks hold our work against these, called as it is
 * called, so that the way through Python costs both the same. */
#include <stdint.h>
#include <string.h>

#include "../hostcache/_isa.h"
#include "_limits.h"

void rp_limit_copy(const uint8_t *src, uint8_t *dst, int64_t nbytes)
{
    memcpy(dst, src, (size_t)nbytes);
}

void rp_limit_copy_runs(const uint8_t *src, uint8_t *dst, const int64_t *runs, int64_t n)
{
    for (int64_t i = 0; i < n; i++, runs += 3)
        memcpy(dst + runs[1], src + runs[0], (size_t)runs[2]);
}

/* Eight vectors are added up apart from each other: one sum would wait for each addition. */
enum { LANES = 4, VECTORS = 8 };
typedef uint64_t words __attribute__((vector_size(LANES * sizeof(uint64_t)), aligned(1), may_alias));

static inline __attribute__((always_inline)) uint64_t sum_words(const uint8_t *src, int64_t nbytes)
{
    words sums[VECTORS] = {{0}};
    for (int64_t at = 0; at < nbytes; at += (int64_t)sizeof sums)
        for (int v = 0; v < VECTORS; v++)
            sums[v] += *(const words *)(src + at + v * (int64_t)sizeof(words));
    uint64_t sum = 0;
    for (int v = 0; v < VECTORS; v++)
        for (int lane = 0; lane < LANES; lane++)
            sum += sums[v][lane];
    return sum;
}

static uint64_t sum_words_plain(const uint8_t *src, int64_t nbytes)
{
    return sum_words(src, nbytes);
}

#if RP_AVX2
__attribute__((target("avx2"))) static uint64_t sum_words_avx2(const uint8_t *src, int64_t nbytes)
{
    return sum_words(src, nbytes);
}
#endif

static uint64_t (*sum_words_here)(const uint8_t *src, int64_t nbytes);

/* When the module is loaded: where a hypervisor answers CPUID, asking takes as long as reading 500 KiB. */
__attribute__((constructor)) static void choose(void)
{
    sum_words_here = sum_words_plain;
#if RP_AVX2
    if (rp_has_avx2())
        sum_words_here = sum_words_avx2;
#endif
}

uint64_t rp_limit_read(const uint8_t *src, int64_t nbytes)
{
    return sum_words_here(src, nbytes);
}

uint64_t rp_limit_reread(const uint8_t *src, int64_t nbytes, int64_t times)
{
    uint64_t sum = 0;
    for (int64_t i = 0; i < times; i++)
        sum += sum_words_here(src, nbytes); /* through a pointer: no compiler reads once and multiplies */
    return sum;
}
