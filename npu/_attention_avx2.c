/* The attention kernel for AVX2, FMA and F16C: eight lanes. Empty on other architectures. */
#include "../hostcache/_isa.h"

#if RP_AVX2
#include "_attention_tile.h"

/* The file is compiled for any x86-64; only what follows may use more. _attention.c asks the CPU before it calls. */
#pragma GCC target("avx2,fma,f16c")

typedef __m256 vec;
typedef uint32_t uvec __attribute__((vector_size(32)));
typedef __m256i ivec;
typedef __m256i hvec;
enum { LANES = 8 };
#define RP_DOTS /* K of small integers is not transposed */
#define RP_ROWS 3
enum { PAIR = 2 }; /* elements i and i + PAIR of a query are multiplied together */

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
    /* Shuffles and additions by themselves are four times as fast as hadd on Zen 5. */
    const __m256 low = _mm256_add_ps(_mm256_unpacklo_ps(v[0], v[1]), _mm256_unpackhi_ps(v[0], v[1]));
    const __m256 high = _mm256_add_ps(_mm256_unpacklo_ps(v[2], v[3]), _mm256_unpackhi_ps(v[2], v[3]));
    const __m256 pairs = _mm256_add_ps(_mm256_shuffle_ps(low, high, 0x44), _mm256_shuffle_ps(low, high, 0xee));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}

static inline vec v_round(vec v)
{
    return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* Lane i gets lane i ^ half. */
static inline vec v_swap(vec v, int half)
{
    if (half == 4)
        return _mm256_permute2f128_ps(v, v, 1);
    return half == 2 ? _mm256_permute_ps(v, 0x4e) : _mm256_permute_ps(v, 0xb1);
}

static inline vec v_from_int(ivec v)
{
    return _mm256_cvtepi32_ps(v);
}

/* LANES values, rounded to nearest. */
static inline void v_store_i16(int16_t *p, vec v)
{
    const __m256i wide = _mm256_cvtps_epi32(v);
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
}

/* The larger magnitude of each lane. Compared as integers, NaN is larger than anything. */
static inline vec v_larger(vec a, vec b)
{
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(a), magnitude),
                                                _mm256_and_si256(_mm256_castps_si256(b), magnitude)));
}

/* The largest of magnitudes. */
static inline float v_largest(vec v)
{
    const __m256i bits = _mm256_castps_si256(v);
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1))));
}

static inline ivec i_zero(void)
{
    return _mm256_setzero_si256();
}

static inline hvec i_load(const int16_t *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

static inline ivec i_add(ivec a, ivec b)
{
    return _mm256_add_epi32(a, b);
}

/* Levels of a piece, head_dim apart, become int16 with tokens side by side: [pair of elements][token][2]. Tokens behind
 * `size` are stand-ins. */
static inline void i_transpose(const int8_t *levels, int64_t head_dim, int32_t size, int16_t *to)
{
    for (int32_t first = 0; first < RP_PIECE; first += LANES) {
        const int8_t *token[LANES];
        for (int32_t i = 0; i < LANES; i++)
            token[i] = levels + (first + i < size ? first + i : size - 1) * head_dim;
        for (int64_t d = 0; d < head_dim; d += 16) {
            __m256i four[4]; /* 16 elements of tokens i and i + 4 */
            for (int i = 0; i < 4; i++)
                four[i] = _mm256_inserti128_si256(
                    _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(token[i] + d))),
                    _mm_loadu_si128((const __m128i *)(token[i + 4] + d)), 1);
            const __m256i low[2] = {_mm256_unpacklo_epi32(four[0], four[1]), _mm256_unpacklo_epi32(four[2], four[3])};
            const __m256i high[2] = {_mm256_unpackhi_epi32(four[0], four[1]), _mm256_unpackhi_epi32(four[2], four[3])};
            const __m256i words[4] = {/* elements 4i..4i+3 of all tokens */
                _mm256_unpacklo_epi64(low[0], low[1]), _mm256_unpackhi_epi64(low[0], low[1]),
                _mm256_unpacklo_epi64(high[0], high[1]), _mm256_unpackhi_epi64(high[0], high[1])};
            __m256i *pairs = (__m256i *)(to + d * RP_PIECE + first * 2);
            for (int i = 0; i < 4; i++) {
                _mm256_store_si256(pairs + 4 * i, _mm256_srai_epi16(_mm256_slli_epi16(words[i], 8), 8));
                _mm256_store_si256(pairs + 4 * i + 2, _mm256_srai_epi16(words[i], 8));
            }
        }
    }
}

/* 2 * LANES levels as int16. */
static inline hvec i_widen(const int8_t *p)
{
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
}

/* Sums over two tokens, of two rows each, become scores: times the tokens' scales and the row's. */
static inline void i_store_scores(float *first, float *second, const ivec a[2], const ivec b[2], const float *scales,
                                  float a_scale, float b_scale)
{
    const __m256i low = _mm256_add_epi32(_mm256_unpacklo_epi32(a[0], a[1]), _mm256_unpackhi_epi32(a[0], a[1]));
    const __m256i high = _mm256_add_epi32(_mm256_unpacklo_epi32(b[0], b[1]), _mm256_unpackhi_epi32(b[0], b[1]));
    const __m256i pairs = _mm256_add_epi32(_mm256_unpacklo_epi64(low, high), _mm256_unpackhi_epi64(low, high));
    const __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    const __m128 both = _mm_castpd_ps(_mm_loaddup_pd((const double *)scales));
    const __m128 rows = _mm_shuffle_ps(_mm_set_ss(a_scale), _mm_set_ss(b_scale), 0);
    const __m128 score = _mm_mul_ps(_mm_mul_ps(_mm_cvtepi32_ps(sums), both), rows);
    _mm_storel_pi((__m64 *)first, score);
    _mm_storeh_pi((__m64 *)second, score);
}

/* LANES levels of two tokens, such that i_multiply_add adds up each column's. */
static inline hvec i_load_pairs(const int8_t *p, const int8_t *other)
{
    return _mm256_cvtepi8_epi16(
        _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i *)p), _mm_loadl_epi64((const __m128i *)other)));
}

/* The weights of two tokens for all columns. */
static inline hvec i_splat_pair(const int16_t *p)
{
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    return _mm256_set1_epi32(pair);
}

/* Products of a and b, two of them added to each lane of sum. */
static inline ivec i_multiply_add(ivec sum, hvec a, hvec b)
{
    const __m256i products = _mm256_madd_epi16(a, b);
    /* Now: gcc puts additions off, and then has no registers for all the products. */
    __asm__("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products));
    return sum;
}

#include "_attention_x86.h"
#define RP_KERNEL rp_kernel_avx2
#define RP_NAME "avx2"
#include "_attention_body.h"
#endif
