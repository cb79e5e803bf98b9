/* The attention kernel in GNU C alone: four lanes, no intrinsics. */
#include "../hostcache/_fp16.h"
#include "_attention_tile.h"

typedef float vec __attribute__((vector_size(16)));
typedef uint32_t uvec __attribute__((vector_size(16)));
typedef int32_t ivec __attribute__((vector_size(16)));
typedef int16_t hvec __attribute__((vector_size(16)));
enum { LANES = 4 };
#define RP_ROWS 3
enum { PAIR = 2 }; /* elements i and i + PAIR of a query are multiplied together */

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

/* Beyond 2^22 in magnitude a float has at most one bit behind the point, and as a score is not worth rounding. */
static inline vec v_round(vec v)
{
    for (int i = 0; i < LANES; i++)
        if (v[i] > -0x1p22f && v[i] < 0x1p22f)
            v[i] = (v[i] + 0x1.8p23f) - 0x1.8p23f;
    return v;
}

/* Lane i gets lane i ^ half. */
static inline vec v_swap(vec v, int half)
{
    return half == 2 ? (vec){v[2], v[3], v[0], v[1]} : (vec){v[1], v[0], v[3], v[2]};
}

static inline vec v_from_int(ivec v)
{
    return __builtin_convertvector(v, vec);
}

/* LANES values of at most 32767 in magnitude, rounded to nearest. */
static inline void v_store_i16(int16_t *p, vec v)
{
    for (int i = 0; i < LANES; i++)
        p[i] = v[i] >= -32767.5f && v[i] < 32767.5f ? (int16_t)((v[i] + 0x1.8p23f) - 0x1.8p23f) : 0;
}

/* The larger magnitude of each lane. Compared as integers, NaN is larger than anything. */
static inline vec v_larger(vec a, vec b)
{
    uvec left = (uvec)a & 0x7fffffff;
    const uvec right = (uvec)b & 0x7fffffff;
    for (int i = 0; i < LANES; i++)
        left[i] = left[i] > right[i] ? left[i] : right[i];
    return (vec)left;
}

/* The largest of magnitudes. */
static inline float v_largest(vec v)
{
    for (int i = 1; i < LANES; i++)
        v = v_larger(v, v_splat(v[i]));
    return v[0];
}

static inline ivec i_zero(void)
{
    return (ivec){0};
}

static inline hvec i_load(const int16_t *p)
{
    hvec v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline ivec i_add(ivec a, ivec b)
{
    return a + b;
}

/* Levels of a piece, head_dim apart, become int16 with tokens side by side: [pair of elements][token][2]. Tokens behind
 * `size` are stand-ins. */
static inline void i_transpose(const int8_t *levels, int64_t head_dim, int32_t size, int16_t *to)
{
    for (int64_t d = 0; d < head_dim; d++)
        for (int32_t t = 0; t < RP_PIECE; t++) {
            const int64_t pair = d / 4 * 2 + d % 2;
            to[pair * 2 * RP_PIECE + t * 2 + d % 4 / 2] = levels[(t < size ? t : size - 1) * head_dim + d];
        }
}

/* LANES levels of two tokens, such that i_multiply_add adds up each column's. */
static inline hvec i_load_pairs(const int8_t *p, const int8_t *other)
{
    return (hvec){p[0], other[0], p[1], other[1], p[2], other[2], p[3], other[3]};
}

/* The weights of two tokens for all columns. */
static inline hvec i_splat_pair(const int16_t *p)
{
    return (hvec){p[0], p[1], p[0], p[1], p[0], p[1], p[0], p[1]};
}

/* Products of a and b, two of them added to each lane of sum. */
static inline ivec i_multiply_add(ivec sum, hvec a, hvec b)
{
    for (int i = 0; i < LANES; i++)
        sum[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
    return sum;
}

/* 16 bytes of int4 codes become the 32 levels of a group. */
static inline void i_unpack(const uint8_t *codes, int8_t *levels)
{
    rp_unpack(RP_INT4, codes, 32, levels);
}

#define RP_KERNEL rp_kernel_plain
#define RP_NAME "plain"
#include "_attention_body.h"
