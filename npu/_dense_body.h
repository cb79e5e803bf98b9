/* The kernels of _dense_kernel.h, included once for each instruction set, which has defined
 *
 *   LANES                    16, 8 or 4 outputs that are computed at a time
 *   ints dot_unsigned(acc, codes, x)  lane by lane, acc plus the products of 4 codes 0..15 and the 4 int8 of x
 *   ints dot_signed(acc, codes, x)    the same of int8 codes plus SIGNED_BIAS
 *   SIGNED_BIAS              128 where the hardware multiplies unsigned bytes only, else 0
 *   floats load_f16(p)       LANES fp16 as float32
 *   MOST_POWER               2 to the power of it is how many rows' sums the registers hold, at most 8
 *   KERNEL, NAME             the symbol of the table, and what the instruction set is called
 *
 * Everything else is plain C that the compiler turns into vectors. Sums of integers are exact, sums of floats are taken
 * in an order that is written down here, and nothing is contracted: so all instruction sets give the same bits, however
 * many rows a step has. */
#include <math.h>
#include <string.h>

/* How far in front of what is multiplied memory is asked for: of 1 to 8 KiB the best by a hair on an EPYC 9005. What the
 * hardware fetches by itself leaves a fifth of the speed. */
enum { FETCHED_AHEAD = 4096 };

static inline bytes load_codes(const uint8_t *p)
{
    bytes codes;
    memcpy(&codes, p, sizeof codes);
    return codes;
}

static inline int32_t load_four(const int8_t *p)
{
    int32_t four;
    memcpy(&four, p, sizeof four);
    return four;
}

/* The codes of one block of LANES outputs, four columns in each of 8 vectors. */
__attribute__((always_inline)) static inline void load_block(const uint8_t *packed, bytes *codes, bool four_bits)
{
    if (four_bits) {
        for (int j = 0; j < 4; j++) {
            const bytes pairs = load_codes(packed + j * RP_LANES * 4);
            codes[j] = pairs & 0x0f;
            codes[4 + j] = pairs >> 4;
        }
    } else {
        for (int j = 0; j < 8; j++)
            codes[j] = load_codes(packed + j * RP_LANES * 4);
    }
}

/* The products of one block of LANES outputs, and of one input row. */
__attribute__((always_inline)) static inline ints block_products(const bytes *codes, const int8_t *x, ints acc,
                                                                 bool four_bits)
{
    if (four_bits) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            acc = dot_unsigned(acc, codes[j], load_four(x + 4 * j));
            acc = dot_unsigned(acc, codes[4 + j], load_four(x + 16 + 4 * j));
        }
    } else {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            acc = dot_signed(acc, codes[j], load_four(x + 4 * j));
    }
    return acc;
}

/* LANES outputs of `rows` input rows. Called with constants: the compiler makes a loop of its own of each. */
__attribute__((always_inline)) static inline void multiply_rows(const rp_matrix *matrix, int32_t group, int32_t lane,
                                                                const rp_inputs *inputs, int32_t first, int rows,
                                                                int parts, bool four_bits, bool offsets, floats *acc)
{
    const int32_t blocks = matrix->columns / RP_BLOCK;
    const int32_t zero = four_bits ? matrix->zero : SIGNED_BIAS;
    const int64_t packed_bytes = four_bits ? 16 : 32; /* of a block and an output */
    const int64_t tile = (int64_t)group * blocks;
    const uint8_t *packed = matrix->codes + tile * RP_LANES * packed_bytes + lane * 4;
    const uint16_t *scales = matrix->scales + tile * RP_LANES + lane;
    const uint16_t *shifts = offsets ? matrix->offsets + tile * RP_LANES + lane : NULL;

#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        acc[r] = (floats){0};
    for (int32_t b = 0; b < blocks; b++) {
        bytes codes[8];
        if (lane == 0)
            for (int line = 0; line < (four_bits ? 4 : 8); line++)
                __builtin_prefetch(packed + FETCHED_AHEAD + 64 * line);
        load_block(packed, codes, four_bits);
        const floats scale = load_f16(scales);
        const floats offset = offsets ? load_f16(shifts) + scale * (float)zero : (floats){0};
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const int64_t row = (int64_t)(first + r);
#pragma GCC unroll 2
            for (int part = 0; part < parts; part++) {
                const int64_t at = (row * parts + part) * blocks + b;
                const ints start = (ints){0} - zero * inputs->sums[at];
                const ints sum = block_products(codes, inputs->codes + at * RP_BLOCK, start, four_bits);
                acc[r] += __builtin_convertvector(sum, floats) * (scale * inputs->steps[at]);
            }
            if (offsets)
                acc[r] += offset * inputs->totals[row * blocks + b];
        }
        packed += RP_LANES * packed_bytes;
        scales += RP_LANES;
        if (offsets)
            shifts += RP_LANES;
    }
}

__attribute__((always_inline)) static inline void multiply_some(const rp_matrix *matrix, int32_t group, int32_t lane,
                                                                const rp_inputs *inputs, int32_t first, int rows,
                                                                int parts, floats *acc)
{
    if (matrix->bits == 8)
        multiply_rows(matrix, group, lane, inputs, first, rows, parts, false, false, acc);
    else if (matrix->offsets)
        multiply_rows(matrix, group, lane, inputs, first, rows, parts, true, true, acc);
    else
        multiply_rows(matrix, group, lane, inputs, first, rows, parts, true, false, acc);
}

/* The loop for so many rows and parts. More rows share what was unpacked of a block; more than the registers hold would
 * not be faster. */
typedef void row_loop(const rp_matrix *matrix, int32_t group, int32_t lane, const rp_inputs *inputs, int32_t first,
                      floats *acc);

#define ROW_LOOP(ROWS, PARTS)                                                                                      \
    static void multiply_##ROWS##_by_##PARTS(const rp_matrix *matrix, int32_t group, int32_t lane,                 \
                                             const rp_inputs *inputs, int32_t first, floats *acc)                  \
    {                                                                                                              \
        multiply_some(matrix, group, lane, inputs, first, ROWS, PARTS, acc);                                       \
    }
ROW_LOOP(1, 1)
ROW_LOOP(2, 1)
ROW_LOOP(4, 1)
ROW_LOOP(8, 1)
ROW_LOOP(1, 2)
ROW_LOOP(2, 2)
ROW_LOOP(4, 2)
#undef ROW_LOOP

enum { MOST_ROWS = 8 };
static row_loop *const one_part[] = {multiply_1_by_1, multiply_2_by_1, multiply_4_by_1, multiply_8_by_1};
static row_loop *const two_parts[] = {multiply_1_by_2, multiply_2_by_2, multiply_4_by_2};

static void store(const floats *acc, int rows, float *out, int32_t limit, int32_t column, bool add)
{
    const int32_t count = limit - column < LANES ? limit - column : LANES; /* the rest is padding */
    for (int r = 0; r < rows; r++) {
        float *to = out + (int64_t)r * limit + column;
        for (int32_t i = 0; i < count; i++)
            to[i] = add ? to[i] + acc[r][i] : acc[r][i];
    }
}

static void multiply(const rp_matrix *matrix, int32_t first, const rp_inputs *inputs, int32_t m, float *out,
                     int32_t limit, bool add)
{
    row_loop *const *loops = inputs->parts == 1 ? one_part : two_parts;
    const int highest_power = inputs->parts == 1 ? MOST_POWER : MOST_POWER - 1;
    for (int32_t lane = 0; lane < RP_LANES && first + lane < limit; lane += LANES) {
        for (int32_t i = 0; i < m;) {
            floats acc[MOST_ROWS];
            int power = highest_power;
            while (1 << power > m - i)
                power--;
            loops[power](matrix, first / RP_LANES, lane, inputs, i, acc);
            store(acc, 1 << power, out + (int64_t)i * limit, limit, first + lane, add);
            i += 1 << power;
        }
    }
}

/* Each half added to the other until one is left. */
__attribute__((always_inline)) static inline float sum_up(float *x, int n)
{
#pragma GCC unroll 5
    for (int width = n / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++)
            x[i] += x[i + width];
    return x[0];
}

__attribute__((always_inline)) static inline float highest(float *x, int n)
{
#pragma GCC unroll 5
    for (int width = n / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++)
            x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
    return x[0];
}

/* One block to codes and a step; what is lost goes to `rest`. */
static inline void quantise_block(const float *x, int8_t *codes, float *step, int32_t *sum, float *rest)
{
    const float round = 0x1.8p23f; /* what is added to it loses its fraction, to the nearest even */
    float magnitude[RP_BLOCK];
    for (int i = 0; i < RP_BLOCK; i++)
        magnitude[i] = fabsf(x[i]);
    const float peak = highest(magnitude, RP_BLOCK);
    const float unit = peak / 127.0f, per_unit = peak > 0x1p-100f ? 127.0f / peak : 0.0f;
    int32_t total = 0;
    for (int i = 0; i < RP_BLOCK; i++) {
        float code = x[i] * per_unit;
        code = code < 127.0f ? code : 127.0f; /* NaN as well, which has no integer; the step will say it */
        code = code > -127.0f ? code : -127.0f;
        code = (code + round) - round;
        rest[i] = x[i] - unit * code;
        codes[i] = (int8_t)(int32_t)code;
        total += (int32_t)code;
    }
    *step = unit;
    *sum = total;
}

static void quantise(const float *values, rp_inputs *inputs, int32_t i)
{
    const int32_t blocks = inputs->columns / RP_BLOCK, parts = inputs->parts;
    for (int32_t b = 0; b < blocks; b++) {
        const float *x = values + b * RP_BLOCK;
        float summed[RP_BLOCK], rest[RP_BLOCK];
        memcpy(summed, x, sizeof summed);
        const float total = sum_up(summed, RP_BLOCK);
        inputs->totals[(int64_t)i * blocks + b] = total;
        for (int32_t part = 0; part < parts; part++) {
            const int64_t at = ((int64_t)i * parts + part) * blocks + b;
            quantise_block(part ? rest : x, inputs->codes + at * RP_BLOCK, &inputs->steps[at], &inputs->sums[at], rest);
            inputs->steps[at] += total - total; /* nothing, or NaN where a value is no number: the row is broken */
        }
    }
}

static void norm(const float *x, const float *weight, float eps, int32_t n, float *out)
{
    float squares[RP_LANES] = {0};
    int32_t i = 0;
    for (; i + RP_LANES <= n; i += RP_LANES)
        for (int lane = 0; lane < RP_LANES; lane++)
            squares[lane] += x[i + lane] * x[i + lane];
    for (; i < n; i++)
        squares[i % RP_LANES] += x[i] * x[i];
    const float scale = 1.0f / sqrtf(sum_up(squares, RP_LANES) / (float)n + eps);
    for (i = 0; i < n; i++)
        out[i] = x[i] * scale * weight[i];
}

/* e^x for -87 <= x <= 87, within 2 units in the last place: 2^n e^r, |r| <= ln(2) / 2. */
static inline float exponential(float x)
{
    const float round = 0x1.8p23f;
    const float n = (x * 0x1.715476p0f + round) - round;
    const float r = (x - n * 0x1.62ep-1f) - n * 0x1.0bfbe8p-15f; /* ln(2) in two parts; the first product is exact */
    /* Taylor's series to the seventh power: what is left out is below 2^-25. */
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    union {
        int32_t bits;
        float value;
    } power = {.bits = ((int32_t)n + 127) * (1 << 23)};
    return p * power.value;
}

static void gate(float *gate, const float *up, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        float x = -gate[i];
        x = x < 87.0f ? x : 87.0f;
        x = x > -87.0f ? x : -87.0f;
        gate[i] = gate[i] / (1.0f + exponential(x)) * up[i];
    }
}

const rp_dense_kernel KERNEL = {.name = NAME, .multiply = multiply, .quantise = quantise, .norm = norm, .gate = gate};
