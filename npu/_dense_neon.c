/* The dense kernels for ASIMD with dot products (FEAT_DotProd): four lanes. Empty on other architectures. */
#include "../hostcache/_isa.h"

#if RP_NEON
#include "_dense_kernel.h"

/* The file is compiled for any aarch64; only what follows may use more. _dense.c asks the CPU before it calls. */
#pragma GCC target("arch=armv8.2-a+dotprod")

typedef float floats __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(16)));
typedef uint8_t bytes __attribute__((vector_size(16)));
enum { LANES = 4, SIGNED_BIAS = 0, MOST_POWER = 3 };

static inline ints dot_signed(ints acc, bytes codes, int32_t x)
{
    return (ints)vdotq_s32((int32x4_t)acc, (int8x16_t)codes, vreinterpretq_s8_s32(vdupq_n_s32(x)));
}

static inline ints dot_unsigned(ints acc, bytes codes, int32_t x)
{
    return dot_signed(acc, codes, x); /* codes of 4 bits are the same with a sign */
}

static inline floats load_f16(const uint16_t *p)
{
    return (floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}

#define KERNEL rp_dense_neon
#define NAME "neon"
#include "_dense_body.h"
#endif
