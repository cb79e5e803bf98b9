/* The attention kernel in GNU C alone: four lanes, no intrinsics. */
#include "../hostcache/_fp16.h"
#include "_attention_tile.h"

typedef float vec __attribute__((vector_size(16)));
typedef uint32_t uvec __attribute__((vector_size(16)));
enum { LANES = 4 };

static inline vec v_splat(float x)
{
    return (vec){x, x, x, x};
}

static inline vec v_load(const float *p)
{
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void v_store(float *p, vec v)
{
    memcpy(p, &v, sizeof v);
}

static inline vec v_load_f16(const uint16_t *p)
{
    return (vec){rp_f32_from_f16(p[0]), rp_f32_from_f16(p[1]), rp_f32_from_f16(p[2]), rp_f32_from_f16(p[3])};
}

static inline vec v_fma(vec a, vec b, vec c)
{
    return a * b + c;
}

/* A NaN in x stays. */
static inline vec v_at_least(vec x, float floor)
{
    for (int i = 0; i < LANES; i++)
        x[i] = x[i] < floor ? floor : x[i];
    return x;
}

static inline vec v_max(vec a, vec b)
{
    for (int i = 0; i < LANES; i++)
        a[i] = a[i] > b[i] ? a[i] : b[i];
    return a;
}

static inline float v_highest(vec v)
{
    const float low = v[0] > v[1] ? v[0] : v[1];
    const float high = v[2] > v[3] ? v[2] : v[3];
    return low > high ? low : high;
}

static inline float v_sum(vec v)
{
    return (v[0] + v[1]) + (v[2] + v[3]);
}

static inline void v_store_sums(float *p, const vec v[4])
{
    for (int i = 0; i < 4; i++)
        p[i] = v_sum(v[i]);
}

#define RP_ATTEND_TILE rp_attend_tile_plain
#include "_attention_body.h"
