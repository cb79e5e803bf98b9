/* The dense kernels for AVX-512 with VNNI: sixteen lanes. Empty on other architectures. */
#include "../hostcache/_isa.h"

#if RP_AVX2
#include "_dense_kernel.h"

/* The file is compiled for any x86-64; only what follows may use more. _dense.c asks the CPU before it calls. */
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,f16c,prefer-vector-width=512")

typedef float floats __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint8_t bytes __attribute__((vector_size(64)));
enum { LANES = 16, SIGNED_BIAS = 128, MOST_POWER = 3 };

static inline ints dot_unsigned(ints acc, bytes codes, int32_t x)
{
    return (ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, _mm512_set1_epi32(x));
}

static inline ints dot_signed(ints acc, bytes codes, int32_t x)
{
    return dot_unsigned(acc, codes ^ 0x80, x);
}

static inline floats load_f16(const uint16_t *p)
{
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

#define KERNEL rp_dense_avx512
#define NAME "avx512"
#include "_dense_body.h"
#endif
