/* The dense kernels in GNU C alone, for any machine: four lanes. */
#include "../hostcache/_fp16.h"
#include "_dense_kernel.h"

typedef float floats __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(16)));
typedef uint8_t bytes __attribute__((vector_size(16)));
enum { LANES = 4, SIGNED_BIAS = 0, MOST_POWER = 2 };

static inline ints dot_signed(ints acc, bytes codes, int32_t x)
{
    const int8_t four[4] = {(int8_t)x, (int8_t)(x >> 8), (int8_t)(x >> 16), (int8_t)(x >> 24)};
    for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 4; i++)
            acc[lane] += (int8_t)codes[4 * lane + i] * four[i];
    return acc;
}

static inline ints dot_unsigned(ints acc, bytes codes, int32_t x)
{
    return dot_signed(acc, codes, x); /* codes of 4 bits are the same with a sign */
}

static inline floats load_f16(const uint16_t *p)
{
    floats values;
    for (int lane = 0; lane < LANES; lane++)
        values[lane] = rp_f32_from_f16(p[lane]);
    return values;
}

#define KERNEL rp_dense_plain
#define NAME "plain"
#include "_dense_body.h"
