// Pooling: from the states of the tokens of a sequence to one vector, and whether all numbers are finite.
#pragma once

typedef enum { NO_NORM = 0, LAYER_NORM = 1, RMS_NORM = 2 } norm_kind;

typedef struct {
    const float *weight, *bias;   // [width]; the bias may be null
    float epsilon;
    int32_t kind;
} norm;

typedef enum {
    POOL_FIRST = 0, POOL_LAST = 1, POOL_MAXIMUM = 2, POOL_MEAN = 3, POOL_MEAN_OF_ROOT = 4, POOL_WEIGHTED_MEAN = 5
} pooling_mode;

#define MAX_POOLING_MODES 6
#define ROWS_OF_NORM 4

typedef struct {
    norm last;                    // of each token, before pooling
    const int64_t *skipped;       // [sequences] tokens at the front that pooling leaves out; null: none
    float *vectors;               // [sequences, modes * width]
    char *finite;                 // [sequences] whether all states and vectors are finite
    int32_t modes, mode[MAX_POOLING_MODES];
} pooling;

// See norm_rows. rows: how many neighbouring rows are computed side by side, which hides that each sum waits for the
// one before. whole: whether the width is a whole number of vectors.
INLINE void norm_rows_as(const norm by, const char *from, char *to, const int rows, int width,
                         const number_type type, const int whole) {
    const size_t bytes = number_bytes(type), row_bytes = (size_t)width * bytes;
    floats sum[ROWS_OF_NORM], squares[ROWS_OF_NORM];
    float mean[ROWS_OF_NORM], factor[ROWS_OF_NORM];
    UNROLLED for (int r = 0; r < rows; r++) sum[r] = squares[r] = every(0), mean[r] = 0;
    if (by.kind == LAYER_NORM) {
        for (int i = 0; i < width; i += LANES)
            UNROLLED for (int r = 0; r < rows; r++)
                sum[r] += load_some(from + r * row_bytes + i * bytes, type, whole ? LANES : width - i);
        UNROLLED for (int r = 0; r < rows; r++) mean[r] = sum_of_lanes(sum[r]) / (float)width;
    }
    for (int i = 0; i < width; i += LANES)
        UNROLLED for (int r = 0; r < rows; r++) {
            floats part = load_some(from + r * row_bytes + i * bytes, type, whole ? LANES : width - i) - mean[r];
            if (!whole && width - i < LANES) part = either(lanes_below(width - i), part, every(0));
            squares[r] += part * part;
        }
    UNROLLED for (int r = 0; r < rows; r++) {
        const float all = sum_of_lanes(squares[r]);
        // all - all is 0, and NaN for a sum that overflows: the factor would be 0, and every such row the bias.
        factor[r] = 1.0f / __builtin_sqrtf(all / (float)width + by.epsilon) + (all - all);
    }
    for (int i = 0; i < width; i += LANES) {
        const int left = whole ? LANES : width - i;
        const floats weight = load_some((const char *)(by.weight + i), FLOAT32, left);
        const floats bias = by.bias ? load_some((const char *)(by.bias + i), FLOAT32, left) : every(0);
        UNROLLED for (int r = 0; r < rows; r++) {
            const size_t at = r * row_bytes + i * bytes;
            const floats part = (load_some(from + at, type, left) - mean[r]) * factor[r];
            store_some(to + at, type, part * weight + bias, left);
        }
    }
}

// Write the norm of a row of `type` to a row of the same type; `to` may be `from`. The usual case is compiled
// by itself.
static void norm_row(const norm *by, const char *from, char *to, int width, number_type type) {
    if (type == FLOAT32 && width % LANES == 0) norm_rows_as(*by, from, to, 1, width, FLOAT32, 1);
    else norm_rows_as(*by, from, to, 1, width, type, 0);
}

static void norm_rows(const norm *by, const float *from, float *to, int rows, int width) {
    const size_t step = (size_t)width * ROWS_OF_NORM;
    if (width % LANES == 0)
        for (; rows >= ROWS_OF_NORM; rows -= ROWS_OF_NORM, from += step, to += step)
            norm_rows_as(*by, (const char *)from, (char *)to, ROWS_OF_NORM, width, FLOAT32, 1);
    for (; rows > 0; rows--, from += width, to += width) norm_row(by, (const char *)from, (char *)to, width, FLOAT32);
}

void run_norm(const norm *by, const float *from, float *to, int64_t rows, int64_t width) {
    norm_rows(by, from, to, (int)rows, (int)width);
}

// The larger of two numbers, or NaN if one of them is NaN.
INLINE float larger_number(float a, float b) { return a > b || a != a ? a : b; }

// The mode by which a sequence of `count` tokens is pooled: if all tokens are left out, its last token is its vector.
INLINE pooling_mode mode_for(pooling_mode mode, int64_t count, int64_t skipped) {
    return skipped >= count ? POOL_LAST : mode;
}

// What the sum of a mode is divided by.
static float pooling_divisor(pooling_mode mode, int64_t count, int64_t skipped) {
    if (mode == POOL_MEAN) return (float)(count - skipped);
    if (mode == POOL_MEAN_OF_ROOT) return __builtin_sqrtf((float)(count - skipped));
    if (mode == POOL_WEIGHTED_MEAN) return (float)((count * (count + 1) - skipped * (skipped + 1)) / 2);
    return 1;
}

// Whether no token is read but the last one.
static int reads_last_only(const pooling *by) {
    for (int m = 0; m < by->modes; m++) if (by->mode[m] != POOL_LAST) return 0;
    return 1;
}

// Write the pooled vector of one mode to `to`. rows: of the `count` tokens of a sequence.
static void pool_rows(pooling_mode mode, const float *rows, int64_t count, int64_t skipped, int width,
                      float *restrict to) {
    mode = mode_for(mode, count, skipped);
    const float *first = rows + (mode == POOL_LAST ? count - 1 : skipped) * width;
    memcpy(to, first, (size_t)width * sizeof(float));
    if (mode == POOL_FIRST || mode == POOL_LAST) return;
    if (mode == POOL_WEIGHTED_MEAN) for (int i = 0; i < width; i++) to[i] *= (float)(skipped + 1);
    for (int64_t r = skipped + 1; r < count; r++) {
        const float *row = rows + r * width, weight = (float)(r + 1);
        if (mode == POOL_MAXIMUM) for (int i = 0; i < width; i++) to[i] = larger_number(row[i], to[i]);
        else if (mode == POOL_WEIGHTED_MEAN) for (int i = 0; i < width; i++) to[i] += weight * row[i];
        else for (int i = 0; i < width; i++) to[i] += row[i];
    }
    if (mode == POOL_MAXIMUM) return;
    const float divisor = pooling_divisor(mode, count, skipped);
    for (int i = 0; i < width; i++) to[i] /= divisor;
}

static int all_finite(const float *numbers, int64_t count) {
    // Infinity and NaN times 0 are NaN, and NaN stays in a sum.
    floats sum = every(0);
    for (int64_t i = 0; i < count; i += LANES)
        sum += load_some((const char *)(numbers + i), FLOAT32, (int)(count - i < LANES ? count - i : LANES)) * 0.0f;
    return sum_of_lanes(sum) == 0;
}

// Pool a sequence. rows: [count, width] the output of the last layer. space: as large as the rows, if
// there is a norm.
static void pool_sequence(const pooling *by, int64_t sequence, const float *rows, int64_t count, int width,
                          float *space) {
    const int is_finite = all_finite(rows, count * width);
    const int64_t skipped = by->skipped ? by->skipped[sequence] : 0;
    if (by->last.kind) {
        const int64_t first = skipped >= count || reads_last_only(by) ? count - 1 : skipped;
        norm_rows(&by->last, rows + first * width, space + first * width, (int)(count - first), width);
        rows = space;
    }
    float *to = by->vectors + sequence * by->modes * width;
    for (int m = 0; m < by->modes; m++) pool_rows((pooling_mode)by->mode[m], rows, count, skipped, width, to + m * width);
    by->finite[sequence] = (char)(is_finite && all_finite(to, (int64_t)by->modes * width));
}

// Pool sequences. rows: the output of the last layer; offsets: [count + 1] first row of each sequence.
void pool_states(const pooling *by, const float *rows, const int64_t *offsets, int64_t count, int64_t width) {
    for (int64_t n = 0; n < count; n++)
        pool_sequence(by, n, rows + offsets[n] * width, offsets[n + 1] - offsets[n], (int)width, 0);
}

// Scale rows [count, width] to unit length; a row of zeros stays zero. `to` may be `from`.
void scale_to_unit_length(const float *from, float *to, int64_t count, int64_t width) {
    for (int64_t r = 0; r < count; r++, from += width, to += width) {
        double squares = 0;
        for (int64_t i = 0; i < width; i++) squares += (double)from[i] * from[i];
        // Finite numbers may have a length that no float32 has. Such a row is made smaller, which is exact.
        const float scale = squares > (double)__FLT_MAX__ * __FLT_MAX__ ? 0x1p-64f : 1.0f;
        const float length = (float)(__builtin_sqrt(squares) * scale);
        const float divisor = length > 1e-12f ? length : 1e-12f;
        for (int64_t i = 0; i < width; i++) to[i] = scale * from[i] / divisor;
    }
}
