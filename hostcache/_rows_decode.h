/* The heads that models have get code of their own, in which all loops of decode_vectors are unrolled.
 *
 * Whoever includes this names the function (DECODE), how it is compiled (TARGET), and how many elements a vector of
 * levels holds (WHOLE), and has MOST_IN_VECTORS and decode_vectors. */
TARGET static void DECODE(int32_t codec, const uint8_t *codes, const uint8_t *scales, int32_t head_dim, uint16_t *dst)
{
    const int32_t group = rp_codec_group(codec, head_dim), piece = rp_codec_rotation(codec, head_dim);
    if (codec == RP_INT8 && head_dim == 64)
        decode_vectors(RP_INT8, codes, scales, 64, 64, 64, 64, dst);
    else if (codec == RP_INT8 && head_dim == 128)
        decode_vectors(RP_INT8, codes, scales, 128, 128, 128, 128, dst);
    else if (codec == RP_INT4 && head_dim == 64)
        decode_vectors(RP_INT4, codes, scales, 64, 32, 32, 64, dst);
    else if (codec == RP_INT4 && head_dim == 128)
        decode_vectors(RP_INT4, codes, scales, 128, 32, 32, 128, dst);
    else if (piece >= WHOLE && head_dim <= MOST_IN_VECTORS && (codec == RP_INT8 || group == 32))
        decode_vectors(codec, codes, scales, head_dim, group, rp_codec_inner(codec, head_dim), piece, dst);
    else
        rp_plain_rows.decode(codec, codes, scales, head_dim, dst);
}
