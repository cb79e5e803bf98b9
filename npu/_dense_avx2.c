/* The dense kernels for AVX2 and F16C: eight lanes. Empty on other architectures. */
#include "../hostcache/_isa.h"

#if RP_AVX2
#include "_dense_kernel.h"

/* The file is compiled for any x86-64; only what follows may use more. _dense.c asks the CPU before it calls. */
#pragma GCC target("avx2,f16c")

typedef float floats __attribute__((vector_size(32)));
typedef int32_t ints __attribute__((vector_size(32)));
typedef uint8_t bytes __attribute__((vector_size(32)));
enum { LANES = 8, SIGNED_BIAS = 0, MOST_POWER = 2 };

/* Two products of 15 * 127, or of 128 * 127, fit in the 16 bits that the instruction saturates to. */
static inline ints dot_pairs(ints acc, __m256i codes, __m256i x)
{
    const __m256i pairs = _mm256_maddubs_epi16(codes, x);
    return acc + (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

static inline ints dot_unsigned(ints acc, bytes codes, int32_t x)
{
    return dot_pairs(acc, (__m256i)codes, _mm256_set1_epi32(x));
}

/* |code| * (x with the code's sign). */
static inline ints dot_signed(ints acc, bytes codes, int32_t x)
{
    const __m256i signed_codes = (__m256i)codes;
    return dot_pairs(acc, _mm256_abs_epi8(signed_codes), _mm256_sign_epi8(_mm256_set1_epi32(x), signed_codes));
}

static inline floats load_f16(const uint16_t *p)
{
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

#define KERNEL rp_dense_avx2
#define NAME "avx2"
#include "_dense_body.h"
#endif
