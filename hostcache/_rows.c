/* Rows of floats into fp16, int8 and int4: every instruction set gives the bits of the plain path. */
#include "_rows.h"

#include <string.h>

#include "_codec.h"
#include "_isa.h"

static void convert_plain(const float *src, uint16_t *dst, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = rp_f16_from_f32(src[i]);
}

static uint32_t magnitude_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits & 0x7fffffffu;
}

/* Positive floats are in the order of their bits, so integers find the largest, and NaN above all. */
static uint32_t peak_plain(const float *x, int32_t n)
{
    uint32_t peak = 0;
    for (int32_t i = 0; i < n; i++) {
        const uint32_t bits = magnitude_bits(x[i]);
        peak = bits > peak ? bits : peak;
    }
    return peak;
}

static void round_plain(const float *x, int32_t n, float factor, int8_t *rounded)
{
    for (int32_t i = 0; i < n; i++) {
        float value = x[i] * factor;
        value = value > RP_TOP ? RP_TOP : value < -RP_TOP ? -RP_TOP : value;
        rounded[i] = (int8_t)(int32_t)((value + 0x1.8p23f) - 0x1.8p23f); /* at 2^23 a float's last bit is 1 */
    }
}

static uint8_t code_of(int8_t rounded)
{
    const int32_t magnitude = rounded < 0 ? -rounded : rounded;
    int32_t code = 8;
    for (int32_t i = 0; i < 7; i++)
        code += magnitude > rp_int4_bounds[i];
    return (uint8_t)(rounded < 0 ? 15 - code : code);
}

static void pack_plain(const int8_t *rounded, int32_t n, uint8_t *codes)
{
    for (int32_t i = 0; i < n / 2; i++)
        codes[i] = (uint8_t)(code_of(rounded[i]) | code_of(rounded[i + n / 2]) << 4);
}

static inline __attribute__((always_inline)) void combine(const float *x, const float *matrix, int32_t n, float *y)
{
    memset(y, 0, (size_t)n * sizeof *y);
    for (int32_t i = 0; i < n; i++, matrix += n)
        for (int32_t j = 0; j < n; j++)
            y[j] += x[i] * matrix[j];
}

static void combine_plain(const float *restrict x, const float *restrict matrix, int32_t n, float *restrict y)
{
    combine(x, matrix, n, y);
}

static const rp_row_ops plain_ops = {convert_plain, rp_rotate, peak_plain, round_plain, pack_plain, combine_plain};

#if RP_AVX2
#define AVX2 __attribute__((target("avx2,f16c")))

AVX2 static void convert_avx2(const float *src, uint16_t *dst, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(dst + i), _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
    convert_plain(src + i, dst + i, n - i);
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
    const uint32_t peak = (uint32_t)_mm_cvtsi128_si32(half), rest = peak_plain(x + i, n - i);
    return peak > rest ? peak : rest;
}

AVX2 static void round_avx2(const float *x, int32_t n, float factor, int8_t *rounded)
{
    const __m256 factors = _mm256_set1_ps(factor), top = _mm256_set1_ps(RP_TOP), bottom = _mm256_set1_ps(-RP_TOP);
    int32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 value = _mm256_mul_ps(_mm256_loadu_ps(x + i), factors);
        const __m256i whole = _mm256_cvtps_epi32(_mm256_max_ps(_mm256_min_ps(value, top), bottom));
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
        _mm_storel_epi64((__m128i *)(rounded + i), _mm_packs_epi16(words, words));
    }
    round_plain(x + i, n - i, factor, rounded + i);
}

AVX2 static void pack_avx2(const int8_t *rounded, int32_t n, uint8_t *codes)
{
    if (n != 32) {
        pack_plain(rounded, n, codes);
        return;
    }
    const __m256i values = _mm256_loadu_si256((const __m256i *)rounded), magnitude = _mm256_abs_epi8(values);
    __m256i code = _mm256_set1_epi8(8);
    for (int32_t i = 0; i < 7; i++)
        code = _mm256_sub_epi8(code, _mm256_cmpgt_epi8(magnitude, _mm256_set1_epi8(rp_int4_bounds[i])));
    const __m256i negative = _mm256_cmpgt_epi8(_mm256_setzero_si256(), values); /* -1 there: 15 - code is its inverse */
    code = _mm256_and_si256(_mm256_xor_si256(code, negative), _mm256_set1_epi8(15));
    const __m128i low = _mm256_castsi256_si128(code), high = _mm256_extracti128_si256(code, 1);
    _mm_storeu_si128((__m128i *)codes, _mm_or_si128(low, _mm_slli_epi16(high, 4)));
}

AVX2 static void combine_avx2(const float *restrict x, const float *restrict matrix, int32_t n, float *restrict y)
{
    combine(x, matrix, n, y);
}

static const rp_row_ops avx2_ops = {convert_avx2, rotate_avx2, peak_avx2, round_avx2, pack_avx2, combine_avx2};
#elif RP_NEON
static void convert_neon(const float *src, uint16_t *dst, int64_t n)
{
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        vst1_u16(dst + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(src + i))));
    convert_plain(src + i, dst + i, n - i);
}

static float32x4_t negated(float32x4_t x, uint32x4_t sign)
{
    return vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(x), sign));
}

/* Sums and differences of lanes that are 1 and 2 apart: x + swapped where the lower lane is, swapped - x above. */
static float32x4_t butterflies(float32x4_t x)
{
    static const uint32_t signs[2][4] = {{0, 1u << 31, 0, 1u << 31}, {0, 0, 1u << 31, 1u << 31}};
    x = vaddq_f32(vrev64q_f32(x), negated(x, vld1q_u32(signs[0])));
    return vaddq_f32(vextq_f32(x, x, 2), negated(x, vld1q_u32(signs[1])));
}

static void rotate_neon(float *x, int32_t n, int32_t piece)
{
    if (piece < 4) {
        rp_rotate(x, n, piece);
        return;
    }
    const float32x4_t norm = vdupq_n_f32(1.0f / __builtin_sqrtf((float)piece));
    for (int32_t i = 0; i < n; i += 4)
        vst1q_f32(x + i, butterflies(vld1q_f32(x + i)));
    for (int32_t half = 4; half < piece; half *= 2)
        for (int32_t start = 0; start < n; start += 2 * half)
            for (int32_t i = start; i < start + half; i += 4) {
                const float32x4_t low = vld1q_f32(x + i), high = vld1q_f32(x + i + half);
                vst1q_f32(x + i, vaddq_f32(low, high));
                vst1q_f32(x + i + half, vsubq_f32(low, high));
            }
    for (int32_t i = 0; i < n; i += 4)
        vst1q_f32(x + i, vmulq_f32(vld1q_f32(x + i), norm));
}

static uint32_t peak_neon(const float *x, int32_t n)
{
    uint32x4_t most = vdupq_n_u32(0);
    int32_t i = 0;
    for (; i + 4 <= n; i += 4)
        most = vmaxq_u32(most, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + i)), vdupq_n_u32(0x7fffffffu)));
    const uint32_t peak = vmaxvq_u32(most), rest = peak_plain(x + i, n - i);
    return peak > rest ? peak : rest;
}

static int16x4_t round_four(const float *x, float factor)
{
    const float32x4_t value = vmulq_n_f32(vld1q_f32(x), factor);
    return vqmovn_s32(vcvtnq_s32_f32(vmaxq_f32(vminq_f32(value, vdupq_n_f32(RP_TOP)), vdupq_n_f32(-RP_TOP))));
}

static void round_neon(const float *x, int32_t n, float factor, int8_t *rounded)
{
    int32_t i = 0;
    for (; i + 8 <= n; i += 8)
        vst1_s8(rounded + i, vqmovn_s16(vcombine_s16(round_four(x + i, factor), round_four(x + i + 4, factor))));
    round_plain(x + i, n - i, factor, rounded + i);
}

static uint8x16_t codes_of(int8x16_t values)
{
    const int8x16_t magnitude = vabsq_s8(values);
    uint8x16_t code = vdupq_n_u8(8);
    for (int32_t i = 0; i < 7; i++)
        code = vsubq_u8(code, vcgtq_s8(magnitude, vdupq_n_s8(rp_int4_bounds[i])));
    return vandq_u8(veorq_u8(code, vcltzq_s8(values)), vdupq_n_u8(15)); /* of a negative one the inverse: 15 - code */
}

static void pack_neon(const int8_t *rounded, int32_t n, uint8_t *codes)
{
    if (n != 32) {
        pack_plain(rounded, n, codes);
        return;
    }
    const uint8x16_t low = codes_of(vld1q_s8(rounded)), high = codes_of(vld1q_s8(rounded + 16));
    vst1q_u8(codes, vorrq_u8(low, vshlq_n_u8(high, 4)));
}

static const rp_row_ops neon_ops = {convert_neon, rotate_neon, peak_neon, round_neon, pack_neon, combine_plain};
#endif

const rp_row_ops *rp_row_ops_named(const char *isa)
{
    const int any = !strcmp(isa, "auto");
#if RP_AVX2
    if ((any || !strcmp(isa, "avx2")) && rp_has_avx2())
        return &avx2_ops;
#elif RP_NEON
    if (any || !strcmp(isa, "neon"))
        return &neon_ops;
#endif
    return any || !strcmp(isa, "plain") ? &plain_ops : NULL;
}

/* The scale of a group whose largest magnitude has these bits. */
static uint16_t scale_of(uint32_t peak)
{
    float largest;
    memcpy(&largest, &peak, sizeof largest);
    const uint16_t scale = rp_f16_from_f32(largest / RP_TOP);
    return scale < 0x7c00u ? scale : 0x7e00u;
}

void rp_encode_row(const rp_row_ops *ops, int32_t codec, const float *src, int32_t head_dim, uint8_t *codes,
                   uint16_t *scales)
{
    const int32_t group = rp_codec_group(codec, head_dim);
    float row[RP_MOST_HEAD_DIM];
    int8_t rounded[RP_MOST_HEAD_DIM];

    memcpy(row, src, (size_t)head_dim * sizeof *row);
    ops->rotate(row, head_dim, rp_codec_rotation(codec, head_dim));
    for (int32_t start = 0; start < head_dim; start += group) {
        const uint16_t scale = scale_of(ops->peak(row + start, group));
        *scales++ = scale;
        if (scale == 0 || scale == 0x7e00u) /* the levels are of no account */
            memset(rounded + start, 0, (size_t)group);
        else /* by the scale as it is stored, so that its own rounding costs nothing */
            ops->round(row + start, group, 1.0f / rp_f32_from_f16(scale), rounded + start);
        if (codec == RP_INT4)
            ops->pack(rounded + start, group, codes + start / 2);
    }
    if (codec == RP_INT8)
        memcpy(codes, rounded, (size_t)head_dim);
}
