// What comes before and after products with quantised weights, each in one pass over the rows.
//
// quantize_row     numbers of a row -> levels of 8 bits and their scale
// finish_row       product of levels -> times the row's scale, plus bias, activation, plus residual
// unpack_8_bits    a weight's row in 8 bits -> numbers, before a product with numbers
// unpack_4_bits    the same of 4 bits
#pragma once

typedef enum { QUANTIZE = 0, FINISH = 1, UNPACK_8_BITS = 2, UNPACK_4_BITS = 3 } pass;

typedef enum { NO_ACTIVATION = 0, GELU = 1, GELU_TANH = 2, RELU = 3, SILU = 4 } activation_type;

typedef struct {
    const char *x;         // [rows, width] of `type`, to be quantised
    uint8_t *levels;       // [rows, width] 128 + level; of a weight in 8 bits, the level itself, signed;
                           // of one in 4 bits, [rows, groups, 16] input i and, four bits higher, i + 16
    float *scales;         // [rows]; of 4 bits, none
    const char *steps;     // [rows, groups, 2] in bfloat16, of 4 bits: the step and the least of 32 inputs
    const float *product;  // [rows, width]
    const float *bias;     // [width], or null
    const char *residual;  // [rows, width] of `type`, or null
    char *result;          // [rows, width] of `type`; may be `product`
    int64_t rows, width;
    int64_t x_row, residual_row;  // numbers from one row to the next
    int32_t pass, type, activation, threads;
    // The pool's.
    int32_t chunk;
    atomic_int next;
} rows_job;

typedef int8_t signed_bytes __attribute__((vector_size(LANES)));
typedef int8_t signed_bytes_unaligned __attribute__((vector_size(LANES), aligned(1)));
typedef uint8_t bytes __attribute__((vector_size(LANES)));
typedef uint8_t bytes_unaligned __attribute__((vector_size(LANES), aligned(1)));

static const float least_scale = 1e-30f / 127.0f;  // scales are divided by: a row of zeros has this one

INLINE void quantize_row(const rows_job *job, int64_t row, number_type type) {
    const size_t number = number_bytes(type);
    const char *x = job->x + (size_t)(row * job->x_row) * number;
    const int width = (int)job->width;
    floats largest = every(0.0f);
    for (int i = 0; i < width; i += LANES) {
        const words sign = {0};
        floats part = load_some(x + i * number, type, width - i);
        largest = larger_size(largest, (floats)((words)part & (sign + 0x7fffffff)));
    }
    float scale = largest_size(largest) / 127.0f;
    if (scale < least_scale) scale = least_scale;
    // Levels cannot tell NaN and infinity: a row that holds any has the scale NaN, and so has all made of it.
    job->scales[row] = scale - scale == 0.0f ? scale : __builtin_nanf("");
    const float steps = 1.0f / scale;
    uint8_t *levels = job->levels + row * width;
    for (int i = 0; i < width; i += LANES) {
        // 1.5 * 2^23: adding it rounds to a whole number, which then stands in the lowest bits.
        floats moved = load_some(x + i * number, type, width - i) * steps + (12582912.0f + 128.0f);
        bytes part = __builtin_convertvector((words)moved & 0xff, bytes);
        if (width - i >= LANES) *(bytes_unaligned *)(levels + i) = part;
        else memcpy(levels + i, &part, (size_t)(width - i));
    }
}

// 1 / (1 + e^-x)
INLINE floats sigmoid(floats x) {
    const floats power = exponential(either(x > 0.0f, -x, x));
    return either(x > 0.0f, every(1.0f), power) / (power + 1.0f);
}

// x times the normal distribution's share below x. The error function is approximated to 1.5e-7
// (Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26).
INLINE floats gelu(floats x) {
    const floats size = either(x > 0.0f, x, -x);
    const floats t = 1.0f / (size * (0.3275911f * 0.70710678f) + 1.0f);
    floats sum = every(1.061405429f);
    sum = sum * t - 1.453152027f;
    sum = sum * t + 1.421413741f;
    sum = sum * t - 0.284496736f;
    sum = sum * t + 0.254829592f;
    const floats beyond = sum * t * exponential(x * x * -0.5f) * 0.5f;  // the share beyond |x|
    return x * either(x > 0.0f, 1.0f - beyond, beyond);
}

INLINE floats activated(floats x, activation_type activation) {
    switch (activation) {
        case GELU: return gelu(x);
        case GELU_TANH: return x * sigmoid((x * x * x * 0.044715f + x) * 1.59576912f);
        case RELU: return either(x < 0.0f, every(0.0f), x);  // not larger(x, 0), which makes 0 of a NaN
        case SILU: return x * sigmoid(x);
        default: return x;
    }
}

INLINE void finish_row(const rows_job *job, int64_t row, number_type type, activation_type activation) {
    const size_t number = number_bytes(type);
    const int width = (int)job->width;
    const char *product = (const char *)(job->product + row * width), *bias = (const char *)job->bias;
    const char *residual = job->residual ? job->residual + (size_t)(row * job->residual_row) * number : 0;
    char *result = job->result + (size_t)(row * width) * number;
    const float scale = job->scales[row];
    for (int i = 0; i < width; i += LANES) {
        floats sum = load_some(product + i * 4, FLOAT32, width - i) * scale;
        if (bias) sum += load_some(bias + i * 4, FLOAT32, width - i);
        sum = activated(sum, activation);
        if (residual) sum += load_some(residual + i * number, type, width - i);
        store_some(result + i * number, type, sum, width - i);
    }
}

INLINE void unpack_8_bits(const rows_job *job, int64_t row, number_type type) {
    const size_t number = number_bytes(type);
    const int width = (int)job->width;
    const int8_t *levels = (const int8_t *)job->levels + row * width;
    char *result = job->result + (size_t)(row * width) * number;
    const float scale = job->scales[row];
    for (int i = 0; i < width; i += LANES) {
        signed_bytes part = {0};
        if (width - i >= LANES) part = *(const signed_bytes_unaligned *)(levels + i);
        else memcpy(&part, levels + i, (size_t)(width - i));
        floats numbers = __builtin_convertvector(__builtin_convertvector(part, words), floats);
        store_some(result + i * number, type, numbers * scale, width - i);
    }
}

INLINE void unpack_4_bits(const rows_job *job, int64_t row, number_type type) {
    const size_t number = number_bytes(type);
    const int width = (int)job->width, groups = (width + 2 * LANES - 1) / (2 * LANES);
    const uint8_t *levels = job->levels + row * groups * LANES;
    const char *steps = job->steps + row * groups * 4;
    char *result = job->result + (size_t)(row * width) * number;
    for (int group = 0; group < groups; group++) {
        uint16_t of_group[2];
        memcpy(of_group, steps + group * 4, 4);
        const floats step = (floats)((words){0} + ((int32_t)of_group[0] << 16));
        const floats least = (floats)((words){0} + ((int32_t)of_group[1] << 16));
        const words both = __builtin_convertvector(*(const bytes_unaligned *)(levels + group * LANES), words);
        const words halves_of_bytes[2] = {both & 15, both >> 4};
        for (int half = 0; half < 2; half++) {
            const int i = (2 * group + half) * LANES;
            if (i >= width) break;
            floats numbers = __builtin_convertvector(halves_of_bytes[half], floats);
            store_some(result + i * number, type, numbers * step + least, width - i);
        }
    }
}

INLINE void finish_row_of(const rows_job *job, int64_t row, number_type type) {
    switch ((activation_type)job->activation) {
        case GELU: finish_row(job, row, type, GELU); break;
        case GELU_TANH: finish_row(job, row, type, GELU_TANH); break;
        case RELU: finish_row(job, row, type, RELU); break;
        case SILU: finish_row(job, row, type, SILU); break;
        case NO_ACTIVATION: finish_row(job, row, type, NO_ACTIVATION); break;
    }
}

// Always inlined, with a type that is known: so the compiler makes a loop of its own for each.
INLINE void run_row(const rows_job *job, int64_t row, number_type type) {
    switch ((pass)job->pass) {
        case QUANTIZE: quantize_row(job, row, type); break;
        case FINISH: finish_row_of(job, row, type); break;
        case UNPACK_8_BITS: unpack_8_bits(job, row, type); break;
        case UNPACK_4_BITS: unpack_4_bits(job, row, type); break;
    }
}

static void work_rows(void *data) {
    rows_job *job = data;
    for (int64_t first; (first = atomic_fetch_add(&job->next, job->chunk)) < job->rows;) {
        const int64_t stop = first + job->chunk < job->rows ? first + job->chunk : job->rows;
        for (int64_t row = first; row < stop; row++) {
            if (job->type == FLOAT32) run_row(job, row, FLOAT32);
            else run_row(job, row, BFLOAT16);
        }
    }
}

// Below so many numbers the work is done sooner than a second thread is awake.
static const int64_t numbers_worth_a_thread = 65536;

void run_rows(rows_job *job) {
    atomic_init(&job->next, 0);
    if (!parallel || job->threads < 2 || job->rows * job->width < numbers_worth_a_thread) {
        job->chunk = (int32_t)job->rows;
        work_rows(job);
        return;
    }
    job->chunk = (int32_t)(job->rows / (job->threads * 4));
    if (job->chunk < 1) job->chunk = 1;
    parallel(work_rows, job, (unsigned)job->threads, 0);
}
