/* Which vector instructions a kernel may use; decided when it runs, so that one binary serves every machine.
 *
 * RP_AVX2   x86-64: code for AVX2 + FMA + F16C can be compiled; rp_has_avx2() says whether this CPU runs it.
 *           rp_has_avx512() asks for AVX-512 F, BW, DQ, VL and VNNI besides.
 * RP_NEON   aarch64: ASIMD with fp16 conversion is part of ARMv8.0, so it always runs.
 * Neither   GNU C only. That "plain" path exists everywhere and can be forced.
 */
#ifndef RP_ISA_H
#define RP_ISA_H

#include <stdbool.h>

#if defined(__x86_64__)
#define RP_AVX2 1
#include <cpuid.h>
#include <immintrin.h>

static inline bool rp_has_avx2(void)
{
    unsigned int eax, ebx, ecx, edx;
    __builtin_cpu_init();
    /* gcc 10 has no __builtin_cpu_supports("f16c"), so its CPUID bit is read here. */
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) &&
           (ecx & bit_F16C);
}

static inline bool rp_has_avx512(void)
{
    return rp_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}
#elif defined(__aarch64__)
#define RP_NEON 1
#include <arm_neon.h>
#endif

#endif
