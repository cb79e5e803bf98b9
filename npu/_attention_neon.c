/* The attention kernel for aarch64 ASIMD, as far as every ARMv8.0 CPU has it: four lanes. Empty elsewhere. */
#include "../hostcache/_isa.h"

#if RP_NEON
#include "_attention_tile.h"

typedef float32x4_t vec;
typedef uint32x4_t uvec;
enum { LANES = 4 };

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

#define RP_ATTEND_TILE rp_attend_tile_neon
#include "_attention_body.h"
#endif
