/* Writing K and V into the pool's blocks, reading them back, and copying a block. */
#include <stdint.h>
#include <string.h>

#include "_codec.h"
#include "_kv.h"
#include "_rows.h"

/* Set when the module is loaded, before any thread can write. */
static const rp_row_ops *row_ops;

__attribute__((constructor)) static void choose_row_ops(void)
{
    row_ops = rp_row_ops_named("auto");
}

int rp_kv_use_isa(const char *isa)
{
    const rp_row_ops *named = rp_row_ops_named(isa);
    if (!named)
        return -1;
    row_ops = named;
    return 0;
}

/* Bytes of one token's codes in a row, and of its scales. */
static int64_t token_bytes_of(int32_t codec, int32_t head_dim)
{
    return codec == RP_FP16 ? 2 * (int64_t)head_dim : codec == RP_INT8 ? head_dim : head_dim / 2;
}

static int64_t scale_bytes_of(int32_t codec, int32_t head_dim)
{
    return codec == RP_FP16 ? 0 : 2 * (int64_t)(head_dim / rp_codec_group(codec, head_dim));
}

/* Write one token of a row. Rows and tokens are at even addresses but for int8 heads of an odd size. */
static void write_token(int32_t codec, const float *src, uint8_t *row, int64_t offset, int32_t block_tokens,
                        int32_t head_dim)
{
    const int64_t token_bytes = token_bytes_of(codec, head_dim);
    uint8_t *codes = row + offset * token_bytes;
    if (codec == RP_FP16) {
        row_ops->convert(src, (uint16_t *)codes, head_dim);
        return;
    }
    uint16_t *scales = (uint16_t *)(row + block_tokens * token_bytes + offset * scale_bytes_of(codec, head_dim));
    rp_encode_row(row_ops, codec, src, head_dim, codes, scales);
}

/* Write one token's keys of all heads in int4, `step` bytes apart. */
static void write_keys(const float *src, const float *feedback, uint8_t *row, int64_t step, int64_t offset,
                       int32_t block_tokens, int32_t kv_heads, int32_t head_dim)
{
    const int64_t token_bytes = token_bytes_of(RP_INT4, head_dim);
    uint8_t *codes = row + offset * token_bytes;
    uint8_t *scales = row + block_tokens * token_bytes + offset * scale_bytes_of(RP_INT4, head_dim);
    for (int32_t h = 0; h < kv_heads; h += RP_TOGETHER, codes += RP_TOGETHER * step, scales += RP_TOGETHER * step) {
        const int32_t n = kv_heads - h < RP_TOGETHER ? kv_heads - h : RP_TOGETHER;
        const float *of_heads = feedback + (int64_t)h * head_dim * head_dim;
        rp_encode_keys(row_ops, src + (int64_t)h * head_dim, n, head_dim, of_heads, codes, scales, step);
    }
}

void rp_kv_write(uint8_t *pool, int64_t unit_bytes, const int64_t *row_bytes, int32_t layer, int32_t block_tokens,
                 int32_t kv_heads, int32_t head_dim, const int64_t *slots, const uint8_t *codecs, int64_t rows,
                 const float *k, int64_t k_stride, const float *v, int64_t v_stride, const float *feedback)
{
    for (int64_t r = 0; r < rows; r++) {
        if (slots[r] < 0)
            continue;
        const int32_t codec = codecs ? codecs[r] : RP_FP16;
        const int64_t block = slots[r] / block_tokens, offset = slots[r] % block_tokens;
        const int64_t step = row_bytes[codec], v_offset = kv_heads * step;
        uint8_t *to = pool + block * unit_bytes + 2 * layer * v_offset;
        const float *key = k + r * k_stride, *value = v + r * v_stride;
        const int fed = codec == RP_INT4 && feedback;
        if (fed)
            write_keys(key, feedback, to, step, offset, block_tokens, kv_heads, head_dim);
        for (int32_t h = 0; h < kv_heads; h++, to += step, key += head_dim, value += head_dim) {
            if (!fed)
                write_token(codec, key, to, offset, block_tokens, head_dim);
            write_token(codec, value, to + v_offset, offset, block_tokens, head_dim);
        }
    }
}

int64_t rp_kv_misfit(const int64_t *slots, const uint8_t *codecs, int64_t rows, int32_t block_tokens,
                     const int64_t *spans, int64_t units)
{
    for (int64_t r = 0; r < rows; r++) {
        const int32_t codec = codecs ? codecs[r] : RP_FP16;
        if (codec > RP_INT4 || !spans[codec])
            return r;
        const int64_t block = slots[r] / block_tokens;
        if (slots[r] >= 0 && (block % spans[codec] || block >= units))
            return r;
    }
    return -1;
}

/* One token of a row as fp16. */
static void read_token(int32_t codec, const uint8_t *row, int32_t token, int32_t block_tokens, int32_t head_dim,
                       uint16_t *to)
{
    if (codec == RP_FP16) { /* as it lies, so that not even the bits of NaN change */
        memcpy(to, row + 2 * (int64_t)token * head_dim, 2 * (size_t)head_dim);
        return;
    }
    const int64_t token_bytes = token_bytes_of(codec, head_dim);
    const uint8_t *scales = row + block_tokens * token_bytes + token * scale_bytes_of(codec, head_dim);
    row_ops->decode(codec, row + token * token_bytes, scales, head_dim, to);
}

void rp_kv_read(const uint8_t *pool, int64_t unit_bytes, int64_t row_bytes, int32_t codec, int32_t layer,
                int32_t block_tokens, int32_t kv_heads, int32_t head_dim, const int64_t *blocks, int64_t tokens,
                uint16_t *k, uint16_t *v)
{
    const int64_t v_offset = kv_heads * row_bytes;
    for (int64_t t = 0; t < tokens; t++) {
        const int32_t token = (int32_t)(t % block_tokens);
        const uint8_t *row = pool + blocks[t / block_tokens] * unit_bytes + 2 * layer * v_offset;
        for (int32_t h = 0; h < kv_heads; h++, row += row_bytes, k += head_dim, v += head_dim) {
            read_token(codec, row, token, block_tokens, head_dim, k);
            read_token(codec, row + v_offset, token, block_tokens, head_dim, v);
        }
    }
}

void rp_kv_combine(const uint8_t *codecs, int32_t codec, int64_t rows, int32_t heads, int32_t head_dim, int32_t share,
                   const float *offsets, const float *matrices, const float *x, float *y)
{
    for (int64_t r = 0; r < rows; r++)
        for (int32_t h = 0; h < heads; h++, x += head_dim, y += head_dim) {
            if (codecs[r] != codec) {
                memcpy(y, x, (size_t)head_dim * sizeof *y);
                continue;
            }
            const float *row = x;
            float shifted[RP_MOST_HEAD_DIM];
            if (offsets) {
                const float *offset = offsets + h / share * head_dim;
                for (int32_t i = 0; i < head_dim; i++)
                    shifted[i] = x[i] - offset[i];
                row = shifted;
            }
            row_ops->combine(row, matrices + (int64_t)(h / share) * head_dim * head_dim, head_dim, y);
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

void rp_kv_copy_block(uint8_t *pool, int64_t unit_bytes, int64_t row_bytes, int64_t runs, int32_t codec,
                      int32_t block_tokens, int32_t head_dim, int64_t src, int64_t dst, int64_t tokens)
{
    const int64_t token_bytes = token_bytes_of(codec, head_dim), scale_bytes = scale_bytes_of(codec, head_dim);
    const int64_t scales_offset = block_tokens * token_bytes;
    const uint8_t *from = pool + src * unit_bytes;
    uint8_t *to = pool + dst * unit_bytes;

    if (tokens == block_tokens) {
        memcpy(to, from, (size_t)(runs * row_bytes));
        return;
    }
    for (int64_t run = 0; run < runs; run++, from += row_bytes, to += row_bytes) {
        memcpy(to, from, (size_t)(tokens * token_bytes));
        memcpy(to + scales_offset, from + scales_offset, (size_t)(tokens * scale_bytes));
    }
}
