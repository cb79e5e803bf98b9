/* IEEE 754 binary16 <-> binary32, one value at a time, with the results of F16C and ASIMD bit for bit. */
#ifndef RP_FP16_H
#define RP_FP16_H

#include <stdint.h>
#include <string.h>

/* Rounds to nearest even; from 65520 up the result is infinity; NaN stays NaN and becomes quiet. */
static inline uint16_t rp_f16_from_f32(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;

    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
    if (magnitude >= 0x47800000u) /* 65536 and beyond */
        return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) { /* below 2^-14 the result is subnormal: a multiple of 2^-24, the ulp of 0.5f */
        float sum;
        memcpy(&sum, &magnitude, sizeof sum);
        sum += 0.5f;
        memcpy(&bits, &sum, sizeof bits);
        return (uint16_t)(sign | (bits - 0x3f000000u));
    }
    /* Rebias the exponent from 127 to 15; a carry out of the mantissa rightly moves on to the exponent. */
    const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return (uint16_t)(sign | (rounded - 0x38000000u) >> 13);
}

static inline float rp_f32_from_f16(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    const uint32_t magnitude = half & 0x7fffu;
    uint32_t bits;
    float value;

    if (magnitude < 0x0400u) { /* zero or subnormal: exact in float32 */
        value = (float)magnitude * 0x1p-24f;
        memcpy(&bits, &value, sizeof bits);
    } else if (magnitude < 0x7c00u) {
        bits = (magnitude << 13) + 0x38000000u;
    } else { /* infinity, or NaN made quiet as the hardware does */
        bits = 0x7f800000u | (magnitude & 0x3ffu) << 13 | (magnitude > 0x7c00u ? 0x00400000u : 0u);
    }
    bits |= sign;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#endif
