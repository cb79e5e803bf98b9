/* Rows by AVX2 and F16C. */
#include "_codec.h"
#include "_isa.h"
#include "_rows.h"

#if RP_AVX2
#define AVX2 __attribute__((target("avx2,f16c")))

AVX2 static inline void store_halves(uint16_t *dst, __m256 x)
{
    _mm_storeu_si128((__m128i *)dst, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

AVX2 static void convert_avx2(const float *src, uint16_t *dst, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        store_halves(dst + i, _mm256_loadu_ps(src + i));
    rp_plain_rows.convert(src + i, dst + i, n - i);
}

/* Sums and differences of lanes that are 1, 2 and 4 apart: x + swapped where the lower lane is, swapped - x above. */
AVX2 static __m256 butterflies(__m256 x)
{
    const __m256 sign1 = _mm256_setr_ps(0, -0.0f, 0, -0.0f, 0, -0.0f, 0, -0.0f);
    const __m256 sign2 = _mm256_setr_ps(0, 0, -0.0f, -0.0f, 0, 0, -0.0f, -0.0f);
    const __m256 sign4 = _mm256_setr_ps(0, 0, 0, 0, -0.0f, -0.0f, -0.0f, -0.0f);
    x = _mm256_add_ps(_mm256_permute_ps(x, 0xB1), _mm256_xor_ps(x, sign1));
    x = _mm256_add_ps(_mm256_permute_ps(x, 0x4E), _mm256_xor_ps(x, sign2));
    return _mm256_add_ps(_mm256_permute2f128_ps(x, x, 1), _mm256_xor_ps(x, sign4));
}

AVX2 static void rotate_avx2(float *x, int32_t n, int32_t piece)
{
    if (piece < 8) {
        rp_rotate(x, n, piece);
        return;
    }
    const __m256 norm = _mm256_set1_ps(1.0f / __builtin_sqrtf((float)piece));
    for (int32_t i = 0; i < n; i += 8)
        _mm256_storeu_ps(x + i, butterflies(_mm256_loadu_ps(x + i)));
    for (int32_t half = 8; half < piece; half *= 2)
        for (int32_t start = 0; start < n; start += 2 * half)
            for (int32_t i = start; i < start + half; i += 8) {
                const __m256 low = _mm256_loadu_ps(x + i), high = _mm256_loadu_ps(x + i + half);
                _mm256_storeu_ps(x + i, _mm256_add_ps(low, high));
                _mm256_storeu_ps(x + i + half, _mm256_sub_ps(low, high));
            }
    for (int32_t i = 0; i < n; i += 8)
        _mm256_storeu_ps(x + i, _mm256_mul_ps(_mm256_loadu_ps(x + i), norm));
}

/* Elements of a head that is decoded in vectors, at most: sums of as many levels fit int16. */
enum { MOST_IN_VECTORS = 256 };

/* Sixteen levels of a row, by their place in it; codes of int4 are of groups of 32. */
AVX2 static inline __m256i sixteen_levels(int32_t codec, const uint8_t *codes, int32_t i)
{
    if (codec == RP_INT8)
        return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(codes + i)));
    __m128i both = _mm_loadu_si128((const __m128i *)(codes + i / 32 * 16));
    if (i % 32)
        both = _mm_srli_epi16(both, 4);
    const __m128i table = _mm_loadu_si128((const __m128i *)rp_int4_levels);
    return _mm256_cvtepi8_epi16(_mm_shuffle_epi8(table, _mm_and_si128(both, _mm_set1_epi8(15))));
}

/* As `butterflies`, of integers and lanes that are 1, 2, 4 and 8 apart. */
AVX2 static inline __m256i integer_butterflies(__m256i x)
{
    const __m256i neighbours = _mm256_set1_epi64x(0x0504070601000302) /* of bytes */;
    const __m256i swap = _mm256_add_epi8(neighbours, _mm256_setr_epi64x(0, 0x0808080808080808, 0, 0x0808080808080808));
    const __m256i ones = _mm256_set1_epi16(1), none = _mm256_setzero_si256();
    const __m256i sign1 = _mm256_set1_epi32((int32_t)0xffff0001);
    const __m256i sign2 = _mm256_set1_epi64x((int64_t)0xffffffff00010001);
    const __m256i sign4 = _mm256_unpacklo_epi64(ones, _mm256_sub_epi16(none, ones));
    const __m256i sign8 = _mm256_permute4x64_epi64(sign4, 0xD8);
    x = _mm256_add_epi16(_mm256_shuffle_epi8(x, swap), _mm256_sign_epi16(x, sign1));
    x = _mm256_add_epi16(_mm256_shuffle_epi32(x, 0xB1), _mm256_sign_epi16(x, sign2));
    x = _mm256_add_epi16(_mm256_shuffle_epi32(x, 0x4E), _mm256_sign_epi16(x, sign4));
    return _mm256_add_epi16(_mm256_permute4x64_epi64(x, 0x4E), _mm256_sign_epi16(x, sign8));
}

/* Whole vectors of 16 share a scale and are rotated together. Constants make of loops and arrays instructions and
 * registers. */
AVX2 static inline __attribute__((always_inline)) void decode_vectors(int32_t codec, const uint8_t *codes,
                                                                      const uint8_t *scales, int32_t head_dim,
                                                                      int32_t group, int32_t inner, int32_t piece,
                                                                      uint16_t *dst)
{
    if (head_dim < 16 || head_dim > MOST_IN_VECTORS)
        __builtin_unreachable();
    __m256i sums[MOST_IN_VECTORS / 16];
    __m256 x[MOST_IN_VECTORS / 8];
#pragma GCC unroll 16
    for (int32_t i = 0; i < head_dim / 16; i++)
        sums[i] = integer_butterflies(sixteen_levels(codec, codes, 16 * i));
#pragma GCC unroll 4
    for (int32_t half = 1; half < inner / 16; half *= 2)
#pragma GCC unroll 16
        for (int32_t i = 0; i < head_dim / 16; i++)
            if (!(i & half)) {
                const __m256i low = sums[i], high = sums[i + half];
                sums[i] = _mm256_add_epi16(low, high);
                sums[i + half] = _mm256_sub_epi16(low, high);
            }
#pragma GCC unroll 16
    for (int32_t i = 0; i < head_dim / 16; i++) {
        uint16_t scale;
        memcpy(&scale, scales + 16 * i / group * 2, sizeof scale);
        const __m256 factor = _mm256_set1_ps(_cvtsh_ss(scale) * rp_norm(piece));
        const __m128i low = _mm256_castsi256_si128(sums[i]), high = _mm256_extracti128_si256(sums[i], 1);
        x[2 * i] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(low)), factor);
        x[2 * i + 1] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(high)), factor);
        if (inner == piece) {
            store_halves(dst + 16 * i, x[2 * i]);
            store_halves(dst + 16 * i + 8, x[2 * i + 1]);
        }
    }
    if (inner == piece)
        return;
#pragma GCC unroll 4
    for (int32_t half = inner / 8; half < piece / 8; half *= 2)
#pragma GCC unroll 32
        for (int32_t i = 0; i < head_dim / 8; i++)
            if (!(i & half)) {
                const __m256 low = x[i], high = x[i + half];
                x[i] = _mm256_add_ps(low, high);
                x[i + half] = _mm256_sub_ps(low, high);
            }
#pragma GCC unroll 32
    for (int32_t i = 0; i < head_dim / 8; i++)
        store_halves(dst + 8 * i, x[i]);
}

#define TARGET AVX2
#define DECODE decode_avx2
#define WHOLE 16
#include "_rows_decode.h"

AVX2 static uint32_t peak_avx2(const float *x, int32_t n)
{
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i most = _mm256_setzero_si256();
    int32_t i = 0;
    for (; i + 8 <= n; i += 8)
        most = _mm256_max_epu32(most, _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(x + i)), magnitude));
    __m128i half = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4E));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0xB1));
    const uint32_t peak = (uint32_t)_mm_cvtsi128_si32(half), rest = rp_plain_rows.peak(x + i, n - i);
    return peak > rest ? peak : rest;
}

/* Eight products as integers, to nearest even, at most `most` and at least -most. */
AVX2 static __m256i rounded_eight(const float *x, float factor, float most)
{
    const __m256 value = _mm256_mul_ps(_mm256_loadu_ps(x), _mm256_set1_ps(factor));
    return _mm256_cvtps_epi32(_mm256_max_ps(_mm256_min_ps(value, _mm256_set1_ps(most)), _mm256_set1_ps(-most)));
}

/* Sixteen of them, as int16. */
AVX2 static __m256i rounded_sixteen(const float *x, float factor, float most)
{
    const __m256i packed = _mm256_packs_epi32(rounded_eight(x, factor, most), rounded_eight(x + 8, factor, most));
    return _mm256_permute4x64_epi64(packed, 0xD8); /* packing goes by halves of a register */
}

AVX2 static void round_avx2(const float *x, int32_t n, float factor, int8_t *rounded)
{
    int32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256i whole = rounded_eight(x + i, factor, RP_TOP);
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
        _mm_storel_epi64((__m128i *)(rounded + i), _mm_packs_epi16(words, words));
    }
    rp_plain_rows.round(x + i, n - i, factor, rounded + i);
}

AVX2 static __m256i codes_of(__m256i values)
{
    const __m256i magnitude = _mm256_abs_epi8(values);
    __m256i code = _mm256_set1_epi8(8);
    for (int32_t i = 0; i < 7; i++)
        code = _mm256_sub_epi8(code, _mm256_cmpgt_epi8(magnitude, _mm256_set1_epi8(rp_int4_bounds[i])));
    const __m256i negative = _mm256_cmpgt_epi8(_mm256_setzero_si256(), values); /* -1 there: 15 - code is its inverse */
    return _mm256_and_si256(_mm256_xor_si256(code, negative), _mm256_set1_epi8(15));
}

AVX2 static __m256i squares(__m256i fine, __m128i levels)
{
    const __m256i error = _mm256_sub_epi16(fine, _mm256_slli_epi16(_mm256_cvtepi8_epi16(levels), 4));
    return _mm256_madd_epi16(error, error);
}

AVX2 static int32_t misfit_avx2(const float *x, int32_t n, float factor)
{
    if (n != 32)
        return rp_plain_rows.misfit(x, n, factor);
    const __m256i low = rounded_sixteen(x, factor, RP_TOP), high = rounded_sixteen(x + 16, factor, RP_TOP);
    const __m256i codes = codes_of(_mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8));
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)rp_int4_levels));
    const __m256i levels = _mm256_shuffle_epi8(table, codes);
    const __m256i sums = _mm256_add_epi32(
        squares(rounded_sixteen(x, 16 * factor, RP_FINE_TOP), _mm256_castsi256_si128(levels)),
        squares(rounded_sixteen(x + 16, 16 * factor, RP_FINE_TOP), _mm256_extracti128_si256(levels, 1)));
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4E));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xB1));
    return _mm_cvtsi128_si32(half);
}

AVX2 static void pack_avx2(const int8_t *rounded, int32_t n, uint8_t *codes)
{
    if (n != 32) {
        rp_plain_rows.pack(rounded, n, codes);
        return;
    }
    const __m256i code = codes_of(_mm256_loadu_si256((const __m256i *)rounded));
    const __m128i low = _mm256_castsi256_si128(code), high = _mm256_extracti128_si256(code, 1);
    _mm_storeu_si128((__m128i *)codes, _mm_or_si128(low, _mm_slli_epi16(high, 4)));
}

AVX2 static void combine_avx2(const float *x, const float *matrix, int32_t n, float *y)
{
    rp_combine(x, matrix, n, y);
}

AVX2 static void round_onward_avx2(float *rows, int32_t n, int32_t from, int32_t to, int32_t head_dim,
                              const float *steps, const float *feedback, int8_t *rounded)
{
    rp_round_onward(rows, n, from, to, head_dim, steps, feedback, rounded);
}

const rp_row_ops rp_avx2_rows = {convert_avx2, rotate_avx2, decode_avx2, peak_avx2, round_avx2,
                                    misfit_avx2,  pack_avx2,   combine_avx2, round_onward_avx2};
#endif
