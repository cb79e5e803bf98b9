/* Writing K and V into the pool's fp16 blocks, and copying a block. */
#include <stdint.h>
#include <string.h>

#include "_fp16.h"
#include "_isa.h"
#include "_kv.h"

typedef void row_converter(const float *src, uint16_t *dst, int64_t n);

static void convert_row_plain(const float *src, uint16_t *dst, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = rp_f16_from_f32(src[i]);
}

#if RP_AVX2
__attribute__((target("avx2,f16c"))) static void convert_row_avx2(const float *src, uint16_t *dst, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(dst + i), _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
    convert_row_plain(src + i, dst + i, n - i);
}
#elif RP_NEON
static void convert_row_neon(const float *src, uint16_t *dst, int64_t n)
{
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        vst1_u16(dst + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(src + i))));
    convert_row_plain(src + i, dst + i, n - i);
}
#endif

static row_converter *best_converter(void)
{
#if RP_AVX2
    return rp_has_avx2() ? convert_row_avx2 : convert_row_plain;
#elif RP_NEON
    return convert_row_neon;
#else
    return convert_row_plain;
#endif
}

/* Set when the module is loaded, before any thread can write. */
static row_converter *convert_row;

__attribute__((constructor)) static void choose_converter(void)
{
    convert_row = best_converter();
}

int rp_kv_use_isa(const char *isa)
{
    if (!strcmp(isa, "auto"))
        convert_row = best_converter();
    else if (!strcmp(isa, "plain"))
        convert_row = convert_row_plain;
#if RP_AVX2
    else if (!strcmp(isa, "avx2") && rp_has_avx2())
        convert_row = convert_row_avx2;
#elif RP_NEON
    else if (!strcmp(isa, "neon"))
        convert_row = convert_row_neon;
#endif
    else
        return -1;
    return 0;
}

void rp_kv_write(uint8_t *pool, int64_t block_bytes, int64_t layer_offset, int64_t kv_bytes, int32_t block_tokens,
                 int32_t kv_heads, int32_t head_dim, const int64_t *slots, int64_t rows, const float *k,
                 int64_t k_stride, const float *v, int64_t v_stride)
{
    const int64_t token_bytes = (int64_t)head_dim * (int64_t)sizeof(uint16_t);
    const int64_t head_bytes = block_tokens * token_bytes;

    for (int64_t r = 0; r < rows; r++) {
        if (slots[r] < 0)
            continue;
        const int64_t block = slots[r] / block_tokens;
        const int64_t offset = slots[r] % block_tokens;
        uint8_t *to = pool + block * block_bytes + layer_offset + offset * token_bytes;
        for (int32_t h = 0; h < kv_heads; h++, to += head_bytes) {
            convert_row(k + r * k_stride + (int64_t)h * head_dim, (uint16_t *)to, head_dim);
            convert_row(v + r * v_stride + (int64_t)h * head_dim, (uint16_t *)(to + kv_bytes), head_dim);
        }
    }
}

void rp_kv_note(const int64_t *slots, int64_t rows, int32_t block_tokens, int32_t *written, int64_t *rewrites)
{
    for (int64_t r = 0; r < rows; r++) {
        if (slots[r] < 0)
            continue;
        const int64_t block = slots[r] / block_tokens;
        const int32_t offset = (int32_t)(slots[r] % block_tokens);
        rewrites[block] += offset < written[block];
        written[block] = offset + 1;
    }
}

void rp_kv_copy_block(uint8_t *pool, int64_t block_bytes, int64_t row_bytes, int64_t runs, int64_t token_bytes,
                      int64_t src, int64_t dst, int64_t tokens)
{
    const uint8_t *from = pool + src * block_bytes;
    uint8_t *to = pool + dst * block_bytes;
    const int64_t bytes = tokens * token_bytes;

    if (bytes == row_bytes) {
        memcpy(to, from, (size_t)block_bytes);
        return;
    }
    for (int64_t run = 0; run < runs; run++)
        memcpy(to + run * row_bytes, from + run * row_bytes, (size_t)bytes);
}
