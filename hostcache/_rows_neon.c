/* Rows by ASIMD, which every aarch64 has. */
#include "_codec.h"
#include "_isa.h"
#include "_rows.h"

#if RP_NEON
static void convert_neon(const float *src, uint16_t *dst, int64_t n)
{
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        vst1_u16(dst + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(src + i))));
    rp_plain_rows.convert(src + i, dst + i, n - i);
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

/* Elements of a head that is decoded in vectors, at most: sums of as many levels fit int16. */
enum { MOST_IN_VECTORS = 256 };

/* Eight levels of a row, by their place in it; codes of int4 are of groups of 32. */
static inline int16x8_t eight_levels(int32_t codec, const uint8_t *codes, int32_t i)
{
    if (codec == RP_INT8)
        return vmovl_s8(vld1_s8((const int8_t *)codes + i));
    const uint8x8_t both = vld1_u8(codes + i / 32 * 16 + i % 16);
    const uint8x8_t code = i % 32 < 16 ? vand_u8(both, vdup_n_u8(15)) : vshr_n_u8(both, 4);
    return vmovl_s8(vqtbl1_s8(vld1q_s8(rp_int4_levels), code));
}

/* As `butterflies`, of integers and lanes that are 1, 2 and 4 apart. */
static inline int16x8_t integer_butterflies(int16x8_t x)
{
    static const int16_t signs[3][8] = {
        {1, -1, 1, -1, 1, -1, 1, -1}, {1, 1, -1, -1, 1, 1, -1, -1}, {1, 1, 1, 1, -1, -1, -1, -1}};
    x = vmlaq_s16(vrev32q_s16(x), x, vld1q_s16(signs[0]));
    x = vmlaq_s16(vreinterpretq_s16_s32(vrev64q_s32(vreinterpretq_s32_s16(x))), x, vld1q_s16(signs[1]));
    return vmlaq_s16(vextq_s16(x, x, 4), x, vld1q_s16(signs[2]));
}

/* Whole vectors of 8 share a scale and are rotated together. Constants make of loops and arrays instructions and
 * registers. */
static inline __attribute__((always_inline)) void decode_vectors(int32_t codec, const uint8_t *codes,
                                                                 const uint8_t *scales, int32_t head_dim,
                                                                 int32_t group, int32_t inner, int32_t piece,
                                                                 uint16_t *dst)
{
    if (head_dim < 8 || head_dim > MOST_IN_VECTORS)
        __builtin_unreachable();
    int16x8_t sums[MOST_IN_VECTORS / 8];
    float32x4_t x[MOST_IN_VECTORS / 4];
#pragma GCC unroll 32
    for (int32_t i = 0; i < head_dim / 8; i++)
        sums[i] = integer_butterflies(eight_levels(codec, codes, 8 * i));
#pragma GCC unroll 8
    for (int32_t half = 1; half < inner / 8; half *= 2)
#pragma GCC unroll 32
        for (int32_t i = 0; i < head_dim / 8; i++)
            if (!(i & half)) {
                const int16x8_t low = sums[i], high = sums[i + half];
                sums[i] = vaddq_s16(low, high);
                sums[i + half] = vsubq_s16(low, high);
            }
#pragma GCC unroll 32
    for (int32_t i = 0; i < head_dim / 8; i++) {
        uint16_t scale;
        memcpy(&scale, scales + 8 * i / group * 2, sizeof scale);
        const float factor = rp_f32_from_f16(scale) * rp_norm(piece);
        x[2 * i] = vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(sums[i]))), factor);
        x[2 * i + 1] = vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(sums[i]))), factor);
    }
#pragma GCC unroll 8
    for (int32_t half = inner / 4; half < piece / 4; half *= 2)
#pragma GCC unroll 64
        for (int32_t i = 0; i < head_dim / 4; i++)
            if (!(i & half)) {
                const float32x4_t low = x[i], high = x[i + half];
                x[i] = vaddq_f32(low, high);
                x[i + half] = vsubq_f32(low, high);
            }
#pragma GCC unroll 64
    for (int32_t i = 0; i < head_dim / 4; i++)
        vst1_u16(dst + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x[i])));
}

#define TARGET
#define DECODE decode_neon
#define WHOLE 8
#include "_rows_decode.h"

static uint32_t peak_neon(const float *x, int32_t n)
{
    uint32x4_t most = vdupq_n_u32(0);
    int32_t i = 0;
    for (; i + 4 <= n; i += 4)
        most = vmaxq_u32(most, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + i)), vdupq_n_u32(0x7fffffffu)));
    const uint32_t peak = vmaxvq_u32(most), rest = rp_plain_rows.peak(x + i, n - i);
    return peak > rest ? peak : rest;
}

/* Products as integers, to nearest even, at most `most` and at least -most. */
static int16x4_t rounded_four(const float *x, float factor, float most)
{
    const float32x4_t value = vmulq_n_f32(vld1q_f32(x), factor);
    return vqmovn_s32(vcvtnq_s32_f32(vmaxq_f32(vminq_f32(value, vdupq_n_f32(most)), vdupq_n_f32(-most))));
}

static int16x8_t rounded_eight(const float *x, float factor, float most)
{
    return vcombine_s16(rounded_four(x, factor, most), rounded_four(x + 4, factor, most));
}

static void round_neon(const float *x, int32_t n, float factor, int8_t *rounded)
{
    int32_t i = 0;
    for (; i + 8 <= n; i += 8)
        vst1_s8(rounded + i, vqmovn_s16(rounded_eight(x + i, factor, RP_TOP)));
    rp_plain_rows.round(x + i, n - i, factor, rounded + i);
}

static uint8x16_t codes_of(int8x16_t values)
{
    const int8x16_t magnitude = vabsq_s8(values);
    uint8x16_t code = vdupq_n_u8(8);
    for (int32_t i = 0; i < 7; i++)
        code = vsubq_u8(code, vcgtq_s8(magnitude, vdupq_n_s8(rp_int4_bounds[i])));
    return vandq_u8(veorq_u8(code, vcltzq_s8(values)), vdupq_n_u8(15)); /* of a negative one the inverse: 15 - code */
}

static int32x4_t squares(int32x4_t sum, int16x8_t fine, int8x8_t levels)
{
    const int16x8_t error = vsubq_s16(fine, vshlq_n_s16(vmovl_s8(levels), 4));
    sum = vmlal_s16(sum, vget_low_s16(error), vget_low_s16(error));
    return vmlal_s16(sum, vget_high_s16(error), vget_high_s16(error));
}

static int32_t misfit_neon(const float *x, int32_t n, float factor)
{
    if (n != 32)
        return rp_plain_rows.misfit(x, n, factor);
    int32x4_t sum = vdupq_n_s32(0);
    for (int32_t i = 0; i < 32; i += 16) {
        const int8x8_t low = vqmovn_s16(rounded_eight(x + i, factor, RP_TOP));
        const int8x8_t high = vqmovn_s16(rounded_eight(x + i + 8, factor, RP_TOP));
        const int8x16_t levels = vqtbl1q_s8(vld1q_s8(rp_int4_levels), codes_of(vcombine_s8(low, high)));
        sum = squares(sum, rounded_eight(x + i, 16 * factor, RP_FINE_TOP), vget_low_s8(levels));
        sum = squares(sum, rounded_eight(x + i + 8, 16 * factor, RP_FINE_TOP), vget_high_s8(levels));
    }
    return vaddvq_s32(sum);
}

static void pack_neon(const int8_t *rounded, int32_t n, uint8_t *codes)
{
    if (n != 32) {
        rp_plain_rows.pack(rounded, n, codes);
        return;
    }
    const uint8x16_t low = codes_of(vld1q_s8(rounded)), high = codes_of(vld1q_s8(rounded + 16));
    vst1q_u8(codes, vorrq_u8(low, vshlq_n_u8(high, 4)));
}

/* Vector instructions are part of every aarch64, so the compiler uses them by itself. */
static void combine_neon(const float *x, const float *matrix, int32_t n, float *y)
{
    rp_combine(x, matrix, n, y);
}

static void round_onward_neon(float *rows, int32_t n, int32_t from, int32_t to, int32_t head_dim,
                              const float *steps, const float *feedback, int8_t *rounded)
{
    rp_round_onward(rows, n, from, to, head_dim, steps, feedback, rounded);
}

const rp_row_ops rp_neon_rows = {convert_neon, rotate_neon, decode_neon, peak_neon, round_neon,
                                    misfit_neon,  pack_neon,   combine_neon, round_onward_neon};
#endif
