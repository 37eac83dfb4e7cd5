// Weights and rows in the forms that products.h multiplies.
//
// Three kinds of weights, each with its own kind of operand (the left side):
//   WHOLE    float32 weights, float32 rows
//   PAIRS    bfloat16 weights and rows, multiplied two at a time (AVX512-BF16, AMX)
//   LEVELS   8-bit weights with a scale per output; rows of levels 0 to 255 with a scale and a zero per row,
//            multiplied as integers. Every processor computes the same integers.
//
// Weights are packed [panels][steps][PANEL outputs][numbers of a step].
#pragma once

#ifdef __AVX512F__
#define VECTOR_LANES 16
#define VECTORS 3
#define TILE 8
#else
#define VECTOR_LANES 8
#define VECTORS 2
#define TILE 6
#endif
#define PANEL (VECTOR_LANES * VECTORS)

// The numbers of a row that are multiplied in one step by LEVELS, and the type in which a level is stored.
#if defined __AVX512VNNI__ || defined __AVXVNNI__
#define LEVELS_OF_STEP 4
typedef uint8_t level_type;
#else
#define LEVELS_OF_STEP 2
typedef int16_t level_type;
#endif

// Whether a kind is multiplied on the tiles of AMX (tiles.h), and the number of steps that are multiplied together.
#ifdef __AMX_TILE__
#define ON_TILES(kind) ((kind) != WHOLE)
#define STEPS_TOGETHER TILE_STEPS
#else
#define ON_TILES(kind) 0
#define STEPS_TOGETHER 1
#endif

typedef float vector __attribute__((vector_size(VECTOR_LANES * 4)));
typedef int32_t int_vector __attribute__((vector_size(VECTOR_LANES * 4)));

typedef enum { WHOLE = 0, PAIRS_OF_BFLOAT16 = 1, LEVELS = 2 } matrix_kind;

typedef struct {
    const char *weights;      // packed, padded with zeros to whole panels and whole steps
    const float *bias;        // [panels * PANEL], or null
    const float *scales;      // [panels * PANEL], of LEVELS
    const int32_t *sums;      // [panels * PANEL], minus the sum of the levels of each output, of LEVELS: s in the low
                              // half and t in the high half of a word, for s + 128 t, which is below 2^22
    const float *smoothing;   // [inputs], factors of the inputs before they are rounded to levels; or null
    int32_t inputs, outputs, kind;
} matrix;

// Rows in the form that a kind of weights is multiplied with.
typedef struct {
    const char *rows;
    size_t row_bytes;
    const float *scales;      // [rows], of LEVELS
    const int32_t *zeros;     // [rows], of LEVELS: the level of 0 in the low half of a word, times 128 in the high half
} operand;

INLINE int steps_of(const matrix *m) {
    const int numbers = m->kind == WHOLE ? 1 : m->kind == LEVELS ? LEVELS_OF_STEP : 2;
    const int steps = (m->inputs + numbers - 1) / numbers;
    return m->kind == WHOLE ? steps : rounded_up(steps, STEPS_TOGETHER);
}

// Bytes of one row of the operand of a matrix, whole vectors.
INLINE size_t operand_row_bytes(const matrix *m) {
    const size_t bytes = m->kind == WHOLE ? 4 : m->kind == LEVELS ? sizeof(level_type) : 2;
    return ((size_t)rounded_up(m->inputs, LANES) * bytes + 63) / 64 * 64;
}

// Bytes that `prepared` may write for this number of rows.
INLINE size_t operand_bytes(const matrix *m, int rows) {
    return (size_t)rows * operand_row_bytes(m) + ((size_t)rows * 8 + 127) / 64 * 64;
}

typedef int16_t int16s __attribute__((vector_size(32)));
typedef int16_t int16s_twice __attribute__((vector_size(64)));
typedef int16_t int16s_twice_unaligned __attribute__((vector_size(64), aligned(2)));
typedef int16_t int16s_unaligned __attribute__((vector_size(32), aligned(2)));

INLINE words clamped(words x, int32_t least, int32_t most) {
    const words low = (words){0} + least, high = (words){0} + most;
    x = ((x < low) & low) | (~(x < low) & x);
    return ((x > high) & high) | (~(x > high) & x);
}

#define ROWS_ROUNDED 4

// Vectors that are stored as levels together.
#if LEVELS_OF_STEP == 4 && defined __AVX512BW__
#define ROUNDED_TOGETHER 4
#else
#define ROUNDED_TOGETHER 1
#endif

// Write `vectors` (1 or ROUNDED_TOGETHER) vectors of integers, limited to 0 to 255, as levels.
INLINE void store_levels(const words *level, level_type *to, const int vectors) {
#if ROUNDED_TOGETHER == 4
    if (vectors == 4) {
        // Packing narrows with limits, and interleaves the quarters of the vectors.
        const __m512i first = _mm512_packs_epi32((__m512i)level[0], (__m512i)level[1]);
        const __m512i second = _mm512_packs_epi32((__m512i)level[2], (__m512i)level[3]);
        const words order = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
        _mm512_storeu_si512(to, _mm512_permutexvar_epi32((__m512i)order, _mm512_packus_epi16(first, second)));
        return;
    }
#endif
    (void)vectors;
    const words limited = clamped(*level, 0, 255);
#if LEVELS_OF_STEP == 4
    *(bytes_unaligned *)to = __builtin_convertvector(limited, bytes);
#else
    *(int16s_unaligned *)to = __builtin_convertvector(limited, int16s);
#endif
}

// Part of a row of `type`, times its factors, if there are any.
INLINE floats smoothed(const char *x, number_type type, const float *smoothing, int at, int left) {
    const floats part = load_some(x + (size_t)at * number_bytes(type), type, left);
    return smoothing ? part * load_some((const char *)(smoothing + at), FLOAT32, left) : part;
}

// See round_to_levels. rows: how many rows are rounded side by side. whole: whether the width is a whole number of
// four vectors.
INLINE void round_rows(const char *x, size_t x_bytes, const number_type type, const int rows, int width,
                       const float *smoothing, char *levels, size_t level_bytes, float *scales, int32_t *zeros,
                       const int whole) {
    // Numbers are compared by their bits: as signed integers, positive numbers keep their order; as unsigned integers,
    // the largest are the negative numbers, those of the largest size first. NaN and infinity are beyond all others.
    words most[ROWS_ROUNDED];
    unsigned_words least[ROWS_ROUNDED];
    UNROLLED for (int r = 0; r < rows; r++) most[r] = (words){0}, least[r] = (unsigned_words){0};
    if (whole && type == BFLOAT16 && !smoothing) {
        int16s_twice high[ROWS_ROUNDED];
        halves_twice low[ROWS_ROUNDED];
        UNROLLED for (int r = 0; r < rows; r++) high[r] = (int16s_twice){0}, low[r] = (halves_twice){0};
        for (int i = 0; i < width; i += 2 * LANES)
            UNROLLED for (int r = 0; r < rows; r++) {
                const int16s_twice part = *(const int16s_twice_unaligned *)(x + r * x_bytes + 2 * i);
                high[r] = __builtin_elementwise_max(high[r], part);
                low[r] = __builtin_elementwise_max(low[r], (halves_twice)part);
            }
        UNROLLED for (int r = 0; r < rows; r++) {
            most[r] = larger_word((words)high[r] << 16, (words)high[r] & ~0xffff);
            least[r] = larger_unsigned((unsigned_words)low[r] << 16, (unsigned_words)low[r] & ~0xffffu);
        }
    } else {
        for (int i = 0; i < width; i += LANES)
            UNROLLED for (int r = 0; r < rows; r++) {
                const floats part = smoothed(x + r * x_bytes, type, smoothing, i, whole ? LANES : width - i);
                most[r] = larger_word(most[r], (words)part);
                least[r] = larger_unsigned(least[r], (unsigned_words)part);
            }
    }
    floats steps[ROWS_ROUNDED];
    words to_zero[ROWS_ROUNDED];
    UNROLLED for (int r = 0; r < rows; r++) {
        FOLD(most[r], larger_word)
        FOLD(least[r], larger_unsigned)
        const int finite = most[r][0] < 0x7f800000 && least[r][0] < 0xff800000;
        const float high = ((floats)most[r])[0], low = least[r][0] >> 31 ? ((floats)least[r])[0] : 0.0f;
        float scale = (high - low) / 255.0f;
        if (!(scale >= 1e-30f)) scale = 1e-30f;
        steps[r] = every(1.0f / scale);
        const int32_t zero = finite ? (int32_t)__builtin_rintf(-low * steps[r][0]) : 0;
        zeros[r] = zero * 0x00800001;
        to_zero[r] = (words){0} + (zero - 0x4b400000);
        scales[r] = finite ? scale : __builtin_nanf("");
    }
    // Adding 12582912 = 1.5 * 2^23 rounds to an integer and leaves the integer in the lowest bits.
    const float magic = 12582912.0f;
    const int together = whole ? ROUNDED_TOGETHER : 1;
    for (int i = 0; i < width; i += together * LANES)
        UNROLLED for (int r = 0; r < rows; r++) {
            words level[ROUNDED_TOGETHER] = {0};
            UNROLLED for (int v = 0; v < together; v++) {
                const int at = i + v * LANES;
                const floats part = smoothed(x + r * x_bytes, type, smoothing, at, whole ? LANES : width - at);
                level[v] = (words)(part * steps[r] + magic) + to_zero[r];
            }
            store_levels(level, (level_type *)(levels + r * level_bytes) + i, together);
        }
}

// Round rows to levels between their least and their largest number, of which one is 0 or below and the other 0
// or above. The scale of a row with NaN or infinity is NaN. The usual cases are compiled one by one.
INLINE void round_to_levels(const char *x, size_t x_bytes, number_type type, const int rows, int width,
                            const float *smoothing, char *levels, size_t level_bytes, float *scales, int32_t *zeros) {
#define ROUND(type, smoothing, whole) \
    round_rows(x, x_bytes, type, rows, width, smoothing, levels, level_bytes, scales, zeros, whole)
    if (width % (4 * LANES) || type == FLOAT16) ROUND(type, smoothing, 0);
    else if (type == BFLOAT16 && smoothing) ROUND(BFLOAT16, smoothing, 1);
    else if (type == BFLOAT16) ROUND(BFLOAT16, 0, 1);
    else if (smoothing) ROUND(FLOAT32, smoothing, 1);
    else ROUND(FLOAT32, 0, 1);
#undef ROUND
}

// Bring rows x [rows, inputs] of `type` into the form that `m` is multiplied with. The result is in `space`
// (operand_bytes), or is x itself if x has this form.
static operand prepared(const matrix *m, const char *x, number_type type, size_t x_row, int rows, char *space) {
    const size_t bytes = number_bytes(type), row_bytes = operand_row_bytes(m);
    if ((m->kind == WHOLE && type == FLOAT32) ||
        (m->kind == PAIRS_OF_BFLOAT16 && type == BFLOAT16 && m->inputs % (2 * STEPS_TOGETHER) == 0))
        return (operand){x, x_row * bytes, 0, 0};
    float *scales = (float *)(space + (size_t)rows * row_bytes);
    int32_t *zeros = (int32_t *)(scales + rows);
    if (m->kind == LEVELS) {
        int r = 0;
        for (; rows - r >= ROWS_ROUNDED; r += ROWS_ROUNDED)
            round_to_levels(x + (size_t)r * x_row * bytes, x_row * bytes, type, ROWS_ROUNDED, m->inputs, m->smoothing,
                            space + (size_t)r * row_bytes, row_bytes, scales + r, zeros + r);
        for (; r < rows; r++)
            round_to_levels(x + (size_t)r * x_row * bytes, 0, type, 1, m->inputs, m->smoothing,
                            space + (size_t)r * row_bytes, 0, scales + r, zeros + r);
        return (operand){space, row_bytes, scales, zeros};
    }
    for (int r = 0; r < rows; r++, x += x_row * bytes) {
        char *to = space + (size_t)r * row_bytes;
        for (int i = 0; i < steps_of(m) * (m->kind == WHOLE ? 1 : 2); i += LANES) {
            const floats part = i < m->inputs ? load_some(x + i * bytes, type, m->inputs - i) : every(0);
            if (m->kind == WHOLE) *(floats *)(to + 4 * i) = part;
            else *(halves *)(to + 2 * i) = narrowed(part);
        }
    }
    return (operand){space, row_bytes, scales, zeros};
}
