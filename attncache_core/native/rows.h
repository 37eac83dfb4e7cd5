// Weights of few bits, unpacked to the compute dtype in one pass over the rows, and the activations of products.
#pragma once

typedef enum { UNPACK_8_BITS = 0, UNPACK_4_BITS = 1 } pass;

// ROUNDED_GELU is GELU for results that are next rounded to 16 or 8 bits.
typedef enum { NO_ACTIVATION = 0, GELU = 1, GELU_TANH = 2, RELU = 3, SILU = 4, ROUNDED_GELU = 5 } activation_type;

typedef struct {
    const uint8_t *levels;  // [rows, width], signed. For 4 bits, [rows, groups, 16]: input i in the low bits, i + 16
                            // in the high bits
    const float *scales;    // [rows]; unused for 4 bits
    const char *steps;      // [rows, groups, 2] in bfloat16, only for 4 bits: step and minimum of 32 inputs
    char *result;           // [rows, width] of `type`
    int64_t rows, width;
    int32_t pass, type, threads;
    // Set by `run_rows`, for the pool.
    int32_t chunk;
    atomic_int next;
} rows_job;

typedef int8_t signed_bytes __attribute__((vector_size(LANES)));
typedef int8_t signed_bytes_unaligned __attribute__((vector_size(LANES), aligned(1)));
typedef uint8_t bytes __attribute__((vector_size(LANES)));
typedef uint8_t bytes_unaligned __attribute__((vector_size(LANES), aligned(1)));

// 1 / (1 + e^-x)
INLINE floats sigmoid(floats x) {
    const floats power = exponential(either(x > 0.0f, -x, x));
    return either(x > 0.0f, every(1.0f), power) * reciprocal(power + 1.0f);
}

// x times the normal distribution function of x. The error function is approximated to 1.5e-7
// (Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26).
INLINE floats gelu(floats x) {
    const floats size = either(x > 0.0f, x, -x);
    // From 100 on, nothing is beyond |x|.
    const floats t = reciprocal(either(size > 100.0f, every(100.0f), size) * (0.3275911f * 0.70710678f) + 1.0f);
    floats sum = every(1.061405429f * 0.5f);
    sum = sum * t - 1.453152027f * 0.5f;
    sum = sum * t + 1.421413741f * 0.5f;
    sum = sum * t - 0.284496736f * 0.5f;
    sum = sum * t + 0.254829592f * 0.5f;
    const floats beyond = sum * t * exponential(x * x * -0.5f);  // the probability beyond |x|
    return x * either(x > 0.0f, 1.0f - beyond, beyond);
}

// GELU with an absolute error of 5e-5 for |x| < 8, in a third of the instructions. The normal distribution
// function is 1/2 + x P(x^2) up to |x| = 4.5, with the polynomial of degree 8 whose largest error is the least.
INLINE floats rounded_gelu(floats x) {
#ifdef __AVX512DQ__
    const floats inside = (floats)_mm512_range_ps((__m512)x, (__m512)every(4.5f), 2);  // the nearer to 0, signed as x
#else
    const floats low = either(x < -4.5f, every(-4.5f), x), inside = either(low > 4.5f, every(4.5f), low);
#endif
    const floats square = inside * inside;
    floats sum = every(2.99993983e-11f);
    sum = sum * square - 3.2838515e-9f;
    sum = sum * square + 1.58023442e-7f;
    sum = sum * square - 4.43163924e-6f;
    sum = sum * square + 8.12091951e-5f;
    sum = sum * square - 1.03624996e-3f;
    sum = sum * square + 9.58064204e-3f;
    sum = sum * square - 6.59772517e-2f;
    sum = sum * square + 3.98708561e-1f;
    return x * (inside * sum + 0.5f);
}

INLINE floats activated(floats x, activation_type activation) {
    switch (activation) {
        case GELU: return gelu(x);
        case GELU_TANH: return x * sigmoid((x * x * x * 0.044715f + x) * 1.59576912f);
        case RELU: return either(x < 0.0f, every(0.0f), x);  // not larger(x, 0), which turns NaN into 0
        case SILU: return x * sigmoid(x);
        case ROUNDED_GELU: return rounded_gelu(x);
        default: return x;
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
        const floats step = (floats)((words){0} + (int32_t)((uint32_t)of_group[0] << 16));
        const floats least = (floats)((words){0} + (int32_t)((uint32_t)of_group[1] << 16));
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

// Always inlined with a constant type, so that the compiler makes a specialised loop for each type.
INLINE void run_row(const rows_job *job, int64_t row, number_type type) {
    if (job->pass == UNPACK_8_BITS) unpack_8_bits(job, row, type);
    else unpack_4_bits(job, row, type);
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

// With fewer elements, waking a second thread costs more than it saves.
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
