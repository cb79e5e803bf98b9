/* The attention kernel for AVX-512 with VNNI: sixteen lanes. Empty on other architectures. */
#include "../hostcache/_isa.h"

#if RP_AVX2
#include "_attention_tile.h"

/* The file is compiled for any x86-64; only what follows may use more. _attention.c asks the CPU before it calls. */
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")

typedef __m512 vec;
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef __m512i ivec;
typedef __m512i hvec;
enum { LANES = 16 };
#define RP_ROWS 6
enum { PAIR = 2 }; /* elements i and i + PAIR of a query are multiplied together */

static inline vec v_splat(float x)
{
    return _mm512_set1_ps(x);
}

static inline vec v_load(const float *p)
{
    return _mm512_loadu_ps(p);
}

static inline void v_store(float *p, vec v)
{
    _mm512_storeu_ps(p, v);
}

static inline vec v_load_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

static inline vec v_fma(vec a, vec b, vec c)
{
    return _mm512_fmadd_ps(a, b, c);
}

/* A NaN in x stays: the instruction returns its second operand then. */
static inline vec v_at_least(vec x, float floor)
{
    return _mm512_max_ps(v_splat(floor), x);
}

static inline vec v_max(vec a, vec b)
{
    return _mm512_max_ps(a, b);
}

static inline vec v_round(vec v)
{
    return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline float v_highest(vec v)
{
    return _mm512_reduce_max_ps(v);
}

static inline float v_sum(vec v)
{
    return _mm512_reduce_add_ps(v);
}

/* Lane i gets lane i ^ half. */
static inline vec v_swap(vec v, int half)
{
    if (half >= 4)
        return half == 8 ? _mm512_shuffle_f32x4(v, v, 0x4e) : _mm512_shuffle_f32x4(v, v, 0xb1);
    return half == 2 ? _mm512_permute_ps(v, 0x4e) : _mm512_permute_ps(v, 0xb1);
}

/* The upper half of a vector, added to the lower. */
static inline __m256 v_fold(vec v)
{
    return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
}

/* p[i] = the sum of v[i]'s lanes. */
static inline void v_store_sums(float *p, const vec v[4])
{
    const vec low = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    const vec high = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    const __m256 pairs = v_fold(_mm512_add_ps(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee)));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}

static inline vec v_from_int(ivec v)
{
    return _mm512_cvtepi32_ps(v);
}

/* LANES values, rounded to nearest. */
static inline void v_store_i16(int16_t *p, vec v)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(v)));
}

/* The larger magnitude of each lane. Compared as integers, NaN is larger than anything. */
static inline vec v_larger(vec a, vec b)
{
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(_mm512_abs_ps(a)),
                                                _mm512_castps_si512(_mm512_abs_ps(b))));
}

/* The largest of magnitudes. */
static inline float v_largest(vec v)
{
    const int32_t bits = _mm512_reduce_max_epi32(_mm512_castps_si512(v));
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    return largest;
}

static inline ivec i_zero(void)
{
    return _mm512_setzero_si512();
}

static inline hvec i_load(const int16_t *p)
{
    return _mm512_loadu_si512(p);
}

static inline ivec i_add(ivec a, ivec b)
{
    return _mm512_add_epi32(a, b);
}

/* 16 elements of tokens 0, 4, 8 and 12. */
static inline __m512i i_load_four(const int8_t *const *token, int64_t d)
{
    const __m256i low = _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(token[0] + d))),
        _mm_loadu_si128((const __m128i *)(token[4] + d)), 1);
    const __m256i high = _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(token[8] + d))),
        _mm_loadu_si128((const __m128i *)(token[12] + d)), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

/* Levels of a piece, head_dim apart, become int16 with tokens side by side: [pair of elements][token][2]. Tokens behind
 * `size` are stand-ins. */
static inline void i_transpose(const int8_t *levels, int64_t head_dim, int32_t size, int16_t *to)
{
    const int8_t *token[RP_PIECE];
    for (int32_t i = 0; i < RP_PIECE; i++)
        token[i] = levels + (i < size ? i : size - 1) * head_dim;
    for (int64_t d = 0; d < head_dim; d += 16) {
        __m512i four[4];
        for (int i = 0; i < 4; i++)
            four[i] = i_load_four(token + i, d);
        const __m512i low[2] = {_mm512_unpacklo_epi32(four[0], four[1]), _mm512_unpacklo_epi32(four[2], four[3])};
        const __m512i high[2] = {_mm512_unpackhi_epi32(four[0], four[1]), _mm512_unpackhi_epi32(four[2], four[3])};
        const __m512i words[4] = {/* elements 4i..4i+3 of all tokens */
            _mm512_unpacklo_epi64(low[0], low[1]), _mm512_unpackhi_epi64(low[0], low[1]),
            _mm512_unpacklo_epi64(high[0], high[1]), _mm512_unpackhi_epi64(high[0], high[1])};
        __m512i *pairs = (__m512i *)(to + d * RP_PIECE);
        for (int i = 0; i < 4; i++) {
            _mm512_store_si512(pairs + 2 * i, _mm512_srai_epi16(_mm512_slli_epi16(words[i], 8), 8));
            _mm512_store_si512(pairs + 2 * i + 1, _mm512_srai_epi16(words[i], 8));
        }
    }
}

/* LANES levels of two tokens, such that i_multiply_add adds up each column's. */
static inline hvec i_load_pairs(const int8_t *p, const int8_t *other)
{
    const __m128i a = _mm_loadu_si128((const __m128i *)p), b = _mm_loadu_si128((const __m128i *)other);
    return _mm512_cvtepi8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b)));
}

/* The weights of two tokens for all columns. */
static inline hvec i_splat_pair(const int16_t *p)
{
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
}

/* Products of a and b, two of them added to each lane of sum. */
static inline ivec i_multiply_add(ivec sum, hvec a, hvec b)
{
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); /* gcc 12 copies the sum before and after the intrinsic */
    return sum;
}

#include "_attention_x86.h"
#define RP_KERNEL rp_kernel_avx512
#define RP_NAME "avx512"
#include "_attention_body.h"
#endif
