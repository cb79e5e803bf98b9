/* The attention kernel for aarch64 ASIMD, as far as every ARMv8.0 CPU has it: four lanes. Empty elsewhere. */
#include "../hostcache/_isa.h"

#if RP_NEON
#include "_attention_tile.h"

typedef float32x4_t vec;
typedef uint32x4_t uvec;
typedef int32x4_t ivec;
typedef int16x8_t hvec;
enum { LANES = 4 };
#define RP_ROWS 6
enum { PAIR = 4 }; /* elements i and i + PAIR of a query are multiplied together */

static inline vec v_splat(float x)
{
    return vdupq_n_f32(x);
}

static inline vec v_load(const float *p)
{
    return vld1q_f32(p);
}

static inline void v_store(float *p, vec v)
{
    vst1q_f32(p, v);
}

static inline vec v_load_f16(const uint16_t *p)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}

static inline vec v_fma(vec a, vec b, vec c)
{
    return vfmaq_f32(c, a, b);
}

/* A NaN in x stays. */
static inline vec v_at_least(vec x, float floor)
{
    return vmaxq_f32(x, v_splat(floor));
}

static inline vec v_max(vec a, vec b)
{
    return vmaxq_f32(a, b);
}

static inline float v_highest(vec v)
{
    return vmaxvq_f32(v);
}

static inline float v_sum(vec v)
{
    return vaddvq_f32(v);
}

/* p[i] = the sum of v[i]'s lanes. */
static inline void v_store_sums(float *p, const vec v[4])
{
    vst1q_f32(p, vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3])));
}

static inline vec v_round(vec v)
{
    return vrndnq_f32(v);
}

/* Lane i gets lane i ^ half. */
static inline vec v_swap(vec v, int half)
{
    return half == 2 ? vextq_f32(v, v, 2) : vrev64q_f32(v);
}

static inline vec v_from_int(ivec v)
{
    return vcvtq_f32_s32(v);
}

/* LANES values, rounded to nearest. */
static inline void v_store_i16(int16_t *p, vec v)
{
    vst1_s16(p, vqmovn_s32(vcvtnq_s32_f32(v)));
}

/* The larger magnitude of each lane. Compared as integers, NaN is larger than anything. */
static inline vec v_larger(vec a, vec b)
{
    return vreinterpretq_f32_u32(vmaxq_u32(vreinterpretq_u32_f32(vabsq_f32(a)), vreinterpretq_u32_f32(vabsq_f32(b))));
}

/* The largest of magnitudes. */
static inline float v_largest(vec v)
{
    return vgetq_lane_f32(vreinterpretq_f32_u32(vdupq_n_u32(vmaxvq_u32(vreinterpretq_u32_f32(v)))), 0);
}

static inline ivec i_zero(void)
{
    return vdupq_n_s32(0);
}

static inline hvec i_load(const int16_t *p)
{
    return vld1q_s16(p);
}

static inline ivec i_add(ivec a, ivec b)
{
    return vaddq_s32(a, b);
}

/* Levels of a piece, head_dim apart, become int16 with tokens side by side: [pair of elements][4 tokens][2][4]. Tokens
 * behind `size` are stand-ins. */
static inline void i_transpose(const int8_t *levels, int64_t head_dim, int32_t size, int16_t *to)
{
    for (int32_t first = 0; first < RP_PIECE; first += 4) {
        const int8_t *token[4];
        for (int32_t i = 0; i < 4; i++)
            token[i] = levels + (first + i < size ? first + i : size - 1) * head_dim;
        for (int64_t d = 0; d < head_dim; d += 8) {
            const int16x8_t row[4] = {vmovl_s8(vld1_s8(token[0] + d)), vmovl_s8(vld1_s8(token[1] + d)),
                                      vmovl_s8(vld1_s8(token[2] + d)), vmovl_s8(vld1_s8(token[3] + d))};
            const int32x4_t even[2] = {vreinterpretq_s32_s16(vtrn1q_s16(row[0], row[1])),
                                       vreinterpretq_s32_s16(vtrn1q_s16(row[2], row[3]))};
            const int32x4_t odd[2] = {vreinterpretq_s32_s16(vtrn2q_s16(row[0], row[1])),
                                      vreinterpretq_s32_s16(vtrn2q_s16(row[2], row[3]))};
            int16_t *pairs = to + d * RP_PIECE + first * 2; /* elements i of four tokens, then i + 4 of them */
            vst1q_s16(pairs, vreinterpretq_s16_s32(vtrn1q_s32(even[0], even[1])));
            vst1q_s16(pairs + 2 * RP_PIECE, vreinterpretq_s16_s32(vtrn1q_s32(odd[0], odd[1])));
            vst1q_s16(pairs + 4 * RP_PIECE, vreinterpretq_s16_s32(vtrn2q_s32(even[0], even[1])));
            vst1q_s16(pairs + 6 * RP_PIECE, vreinterpretq_s16_s32(vtrn2q_s32(odd[0], odd[1])));
        }
    }
}

/* LANES levels of two tokens, such that i_multiply_add adds up each column's: one token's, then the other's. */
static inline hvec i_load_pairs(const int8_t *p, const int8_t *other)
{
    uint32_t four[2];
    memcpy(&four[0], p, sizeof four[0]);
    memcpy(&four[1], other, sizeof four[1]);
    return vmovl_s8(vreinterpret_s8_u32(vset_lane_u32(four[1], vdup_n_u32(four[0]), 1)));
}

/* The weights of two tokens for all columns. */
static inline hvec i_splat_pair(const int16_t *p)
{
    return vcombine_s16(vdup_n_s16(p[0]), vdup_n_s16(p[1]));
}

/* Products of a and b, two of them added to each lane of sum. */
static inline ivec i_multiply_add(ivec sum, hvec a, hvec b)
{
    return vmlal_high_s16(vmlal_s16(sum, vget_low_s16(a), vget_low_s16(b)), a, b);
}

/* 16 bytes of int4 codes become the 32 levels of a group. */
static inline void i_unpack(const uint8_t *codes, int8_t *levels)
{
    const int8x16_t table = vld1q_s8(rp_int4_levels);
    const uint8x16_t both = vld1q_u8(codes);
    vst1q_s8(levels, vqtbl1q_s8(table, vandq_u8(both, vdupq_n_u8(15))));
    vst1q_s8(levels + 16, vqtbl1q_s8(table, vshrq_n_u8(both, 4)));
}

#define RP_KERNEL rp_kernel_neon
#define RP_NAME "neon"
#include "_attention_body.h"
#endif
