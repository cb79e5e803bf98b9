/* What the AVX2 and the AVX-512 kernel share; compiled for the including file's target. */

/* 16 bytes of int4 codes become the 32 levels of a group. */
static inline void i_unpack(const uint8_t *codes, int8_t *levels)
{
    const __m128i table = _mm_loadu_si128((const __m128i *)rp_int4_levels);
    const __m128i both = _mm_loadu_si128((const __m128i *)codes), four = _mm_set1_epi8(15);
    _mm_storeu_si128((__m128i *)levels, _mm_shuffle_epi8(table, _mm_and_si128(both, four)));
    _mm_storeu_si128((__m128i *)(levels + 16), _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(both, 4), four)));
}
