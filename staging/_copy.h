/* Copying out of scattered blocks as fast as memory can be read.
 *
 * The processor prefetches by itself what follows in memory, but cannot know which block comes next: left alone, each
 * block begins with misses that nothing overlaps. So while a row is copied, what is read soon is called into L1, and the
 * block after the next into L2. On x86-64 `rep movsb` does the copying: of a whole cache line it does not read first
 * what it overwrites. Some lines at a time: fewer, and its start costs more than the copy; more, and the prefetches come
 * in bursts that the core has no buffers for. Measured on Zen 4 with 0.5 to 4 MB that lie in no cache: 0.7 to 0.9 of
 * memcpy's speed in one piece, by where the pages happen to lie; memcpy row by row has 0.4 to 0.55. */
#ifndef RP_COPY_H
#define RP_COPY_H

#include <stdint.h>
#include <string.h>

#include "../hostcache/_isa.h"

enum { VECTOR_BYTES = 16, LINE_BYTES = 64, STRIDE_BYTES = 384, AHEAD_BYTES = 8192 };

/* What is read now, and what will be: `bytes` of each block, which follow each other there. */
typedef struct {
    const uint8_t *here;
    const uint8_t *next;
    const uint8_t *later;
    int64_t bytes;
} reading;

/* Call in what is read later, while `n` bytes from `at` on are. Small blocks end before the page ahead does. */
static inline __attribute__((always_inline)) void look_ahead(const reading *from, int64_t at, int64_t n)
{
    const int64_t ahead = at + AHEAD_BYTES, beyond = ahead - from->bytes;
    const uint8_t *soon = beyond < 0 ? from->here + ahead : from->next + (beyond < from->bytes ? beyond : at);
    for (int64_t i = 0; i < n; i += LINE_BYTES)
        __builtin_prefetch(soon + i, 0, 3);
    for (int64_t i = 0; i < n; i += LINE_BYTES)
        __builtin_prefetch(from->later + at + i, 0, 2);
}

static inline void copy_stride(uint8_t *to, const uint8_t *src)
{
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) /* which does not see what assembly does */
    int64_t n = STRIDE_BYTES;
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(src), "+c"(n) : : "memory");
#else
    memcpy(to, src, STRIDE_BYTES);
#endif
}

/* Copy `n` bytes, a multiple of 16, from `at` on of the block that is read. */
static inline void copy_ahead(uint8_t *to, const reading *from, int64_t at, int64_t n)
{
    for (; n >= STRIDE_BYTES; to += STRIDE_BYTES, at += STRIDE_BYTES, n -= STRIDE_BYTES) {
        copy_stride(to, from->here + at);
        look_ahead(from, at, STRIDE_BYTES);
    }
    if (n == 0)
        return;
    for (int64_t i = 0; i < n; i += VECTOR_BYTES)
        memcpy(to + i, from->here + at + i, VECTOR_BYTES);
    look_ahead(from, at, n);
}

#endif
