/* Rows by AVX2 and F16C. */
#include "_codec.h"
#include "_isa.h"
#include "_rows.h"

#if RP_AVX2
#define AVX2 __attribute__((target("avx2,f16c")))

AVX2 static void convert_avx2(const float *src, uint16_t *dst, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(dst + i), _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
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

AVX2 static void round_onward_avx2(float *row, int32_t from, int32_t to, int32_t head_dim, float scale,
                             const float *feedback, int8_t *rounded)
{
    rp_round_onward(row, from, to, head_dim, scale, feedback, rounded);
}

const rp_row_ops rp_avx2_rows = {convert_avx2, rotate_avx2, peak_avx2,   round_avx2,
                                    misfit_avx2,  pack_avx2,   combine_avx2, round_onward_avx2};
#endif
