/* The attention kernel for AVX2, FMA and F16C: eight lanes. Empty on other architectures. */
#include "../hostcache/_isa.h"

#if RP_AVX2
#include "_attention_tile.h"

/* The file is compiled for any x86-64; only what follows may use more. _attention.c asks the CPU before it calls. */
#pragma GCC target("avx2,fma,f16c")

typedef __m256 vec;
typedef uint32_t uvec __attribute__((vector_size(32)));
enum { LANES = 8 };

static inline vec v_splat(float x)
{
    return _mm256_set1_ps(x);
}

static inline vec v_load(const float *p)
{
    return _mm256_loadu_ps(p);
}

static inline void v_store(float *p, vec v)
{
    _mm256_storeu_ps(p, v);
}

static inline vec v_load_f16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

static inline vec v_fma(vec a, vec b, vec c)
{
    return _mm256_fmadd_ps(a, b, c);
}

/* A NaN in x stays: the instruction returns its second operand then. */
static inline vec v_at_least(vec x, float floor)
{
    return _mm256_max_ps(v_splat(floor), x);
}

static inline vec v_max(vec a, vec b)
{
    return _mm256_max_ps(a, b);
}

static inline float v_highest(vec v)
{
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

static inline float v_sum(vec v)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

/* p[i] = the sum of v[i]'s lanes. */
static inline void v_store_sums(float *p, const vec v[4])
{
    const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}

#define RP_ATTEND_TILE rp_attend_tile_avx2
#include "_attention_body.h"
#endif
