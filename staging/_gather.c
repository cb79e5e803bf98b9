/* Making scattered runs contiguous, and clearing what lies behind them. The caller has checked every range. */
#include <stdint.h>
#include <string.h>

#include "_gather.h"

void rp_gather(const uint8_t *src, int64_t src_shift, uint8_t *dst, const int64_t *rows, int64_t n)
{
    const uint8_t *base = src + src_shift;
    for (int64_t i = 0; i < n; i++, rows += 3)
        memcpy(dst + rows[1], base + rows[0], (size_t)rows[2]);
}

void rp_zero(uint8_t *dst, const int64_t *runs, int64_t n)
{
    for (int64_t i = 0; i < n; i++, runs += 2)
        memset(dst + runs[0], 0, (size_t)runs[1]);
}
