/* Which vector instructions a kernel may use; decided when it runs, so that one binary serves every machine.
 *
 * RP_AVX2   x86-64: code for AVX2 + FMA + F16C can be compiled; rp_has_avx2() says whether this CPU runs it.
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
#elif defined(__aarch64__)
#define RP_NEON 1
#include <arm_neon.h>
#endif

#endif
