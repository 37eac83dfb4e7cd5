// Products of rows with packed weights: rows @ weights + bias, an activation, a factor, a residual.
//
// A tile is up to TILE rows of one panel of weights, whose sums stay in registers for all steps. Every sum adds its
// steps in the same order, whatever the number of rows, so a row of a batch equals the row alone. The rows of a tile
// are finished (scales, bias, activation, residual) between the steps of the next tile, one row at a time: the
// processor overlaps both. Finishing single vectors, or two rows, between steps is slower, and so is finishing tiles
// by themselves. With AMX, tiles of PAIRS and LEVELS have up to MAX_TILE rows, sums stay in its registers, and rows are
// finished between its products.
#pragma once

#include "operands.h"

// What becomes of the sums: out = factor * activation(sum + bias) + residual.
typedef struct {
    char *out;                // [rows, outputs] of `type`; column 0 is the first output of the matrix
    const float *residual;    // [rows, outputs], or null
    size_t out_row, residual_row;  // strides in elements
    number_type type;
    activation_type activation;
    int32_t multiply;         // whether to multiply by what `out` holds
} finish;

// One step of a tile. The instructions of AVX-512 are written as assembly, because the compiler otherwise
// moves broadcasts out of loops and spills sums to memory.
#ifdef __AVX512F__
#define LOAD_VECTOR(to, from) __asm__ volatile("vmovups %1, %0" : "=v"(to) : "m"(*(const vector *)(from)))
#define BROADCAST(to, from) \
    __asm__ volatile("vbroadcastss %1, %0" : "=v"(to) : "m"(*(const float *)(from)))
#define MULTIPLY_ADD(sum, x, w) __asm__ volatile("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w))
#define MULTIPLY_PAIRS(sum, x, w) __asm__ volatile("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w))
#ifdef __AVX512VNNI__
#define LOAD_LEVELS LOAD_VECTOR
#define MULTIPLY_LEVELS(sum, x, w) __asm__ volatile("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w))
#else
#define LOAD_LEVELS(to, from) \
    __asm__ volatile("vpmovsxbw %1, %0" : "=v"(to) : "m"(*(const int16s *)(from)))
#define MULTIPLY_LEVELS(sum, x, w)                                                      \
    do {                                                                                \
        int_vector product;                                                             \
        __asm__ volatile("vpmaddwd %2, %1, %0" : "=v"(product) : "v"(x), "v"(w));       \
        __asm__ volatile("vpaddd %1, %0, %0" : "+v"(sum) : "v"(product));               \
    } while (0)
#endif
#else
#define LOAD_VECTOR(to, from) to = *(const vector *)(from)
#define BROADCAST(to, from)                                  \
    do {                                                     \
        int32_t word;                                        \
        memcpy(&word, from, 4);                              \
        to = (vector)((int_vector){0} + word);               \
    } while (0)
#define MULTIPLY_ADD(sum, x, w) sum += x * w
#define MULTIPLY_PAIRS MULTIPLY_ADD  // never used: without AVX512-BF16, weights are not packed as pairs
#ifdef __AVXVNNI__
#define LOAD_LEVELS LOAD_VECTOR
#define MULTIPLY_LEVELS(sum, x, w) \
    sum = (vector)_mm256_dpbusd_avx_epi32((__m256i)(sum), (__m256i)(x), (__m256i)(w))
#else
typedef signed char sixteen_bytes __attribute__((vector_size(16)));
#define LOAD_LEVELS(to, from) to = (vector)__builtin_convertvector(*(const sixteen_bytes *)(from), int16s)
#ifdef __AVX2__
#define MULTIPLY_LEVELS(sum, x, w) \
    sum = (vector)((int_vector)sum + (int_vector)_mm256_madd_epi16((__m256i)(x), (__m256i)(w)))
#else
#define MULTIPLY_LEVELS(sum, x, w)                                                             \
    sum = (vector)((int_vector)sum + ((int_vector)(x) << 16 >> 16) * ((int_vector)(w) << 16 >> 16) + \
                   ((int_vector)(x) >> 16) * ((int_vector)(w) >> 16))
#endif
#endif
#endif

// The sums of a tile, which are not finished yet: rows of one panel of `weights`.
typedef struct {
    const float *sums;        // [rows][PANEL]
    const matrix *weights;
    const finish *end;
    operand x;
    int first_row, rows, first;  // first: the first output of the panel
} unfinished;

#define PARTS (PANEL / LANES)
#define EACH_PART UNROLLED for (int v = 0; v < PARTS; v++)
static const floats no_bias[PARTS];
#define ACTIVATE(activation) \
    case activation: EACH_PART sum[v] = activated(sum[v], activation); break;

// Return sum + a * b for both halves of each word: signed integers of 16 bits.
INLINE words plus_halves(words sum, words a, int32_t b) {
#ifdef __AVX512VNNI__
    return (words)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, _mm512_set1_epi32(b));
#elif defined __AVX512BW__
    return sum + (words)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi32(b));
#elif defined __AVX2__
    union { words all; __m256i half[2]; } product = {.all = a};
    UNROLLED for (int h = 0; h < 2; h++) product.half[h] = _mm256_madd_epi16(product.half[h], _mm256_set1_epi32(b));
    return sum + product.all;
#else
    return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Apply the scales, the bias and the rest of `end` to a row of the sums of a tile. whole: whether the panel has PANEL
// outputs.
INLINE void finish_tile_row(const unfinished *tile, int row, const matrix_kind kind, const int whole) {
    const matrix *m = tile->weights;
    const finish *end = tile->end;
    const int first = tile->first, count = whole ? PANEL : m->outputs - first;
    floats sum[PARTS];
    EACH_PART sum[v] = ((const floats *)(tile->sums + row * PANEL))[v];
    row += tile->first_row;
    const floats *bias = m->bias ? (const floats *)(m->bias + first) : no_bias;
    if (kind == LEVELS) {
        const int32_t zero = tile->x.zeros[row];
        const float scale = tile->x.scales[row];
        const words *sums = (const words *)(m->sums + first);
        const floats *scales = (const floats *)(m->scales + first);
        EACH_PART {
            const words levels = plus_halves((words)sum[v], sums[v], zero);
            sum[v] = __builtin_convertvector(levels, floats) * (scales[v] * scale) + bias[v];
        }
    } else {
        EACH_PART sum[v] += bias[v];
    }
    switch (end->activation) {
        ACTIVATE(GELU) ACTIVATE(GELU_TANH) ACTIVATE(RELU) ACTIVATE(SILU) ACTIVATE(ROUNDED_GELU)
        case NO_ACTIVATION: break;
    }
    const number_type type = end->type;
    const size_t bytes = number_bytes(type);
    char *out = end->out + ((size_t)row * end->out_row + (size_t)first) * bytes;
    const size_t residual_at = (size_t)row * end->residual_row + (size_t)first;
    EACH_PART {
        const int left = whole ? LANES : count - v * LANES;
        if (left <= 0) break;
        if (end->multiply) sum[v] *= load_some(out + v * LANES * bytes, type, left);
        if (end->residual) sum[v] += load_some((const char *)(end->residual + residual_at + v * LANES), FLOAT32, left);
        store_some(out + v * LANES * bytes, type, sum[v], left);
    }
}

// sums[rows][PANEL] = rows of x @ one panel; `rows` and `kind` are constants. A step of x has four bytes, and
// so has a step of a weight in registers; only the loads of 8-bit weights differ. next: memory to load into the
// cache meanwhile, `next_bytes` at each step. before: a tile of a whole panel that is finished meanwhile, row by row,
// because the processor finishes a row while it still multiplies the steps before.
INLINE void tile(const char *x, size_t x_bytes, const char *panel, int steps, float *sums, const char *next,
                 size_t next_bytes, const unfinished *before, const int rows, const matrix_kind kind) {
    const size_t step_bytes = kind == LEVELS ? (size_t)PANEL * LEVELS_OF_STEP : (size_t)PANEL * 4;
    vector sum[TILE][VECTORS];
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < VECTORS; v++) sum[r][v] = (vector){0};
    const int stride = steps / (before->rows + 1);
    // Rows of the second half have a pointer of their own, or their addresses would need additions in each step.
    const char *second = x + (size_t)(rows / 2) * x_bytes;
    __asm__("" : "+r"(second));
    for (int step = 0, row = 0; step < steps || row < before->rows;) {
        const int stop = row < before->rows ? smaller(step + stride, steps) : steps;
        for (; step < stop; step++, panel += step_bytes, x += 4, second += 4, next += next_bytes) {
            __builtin_prefetch(next, 0, 2);
            if (step_bytes > 64) __builtin_prefetch(next + 64, 0, 2);
            if (step_bytes > 128 && next_bytes > 128) __builtin_prefetch(next + 128, 0, 2);
            vector weight[VECTORS];
            UNROLLED for (int v = 0; v < VECTORS; v++) {
                if (kind == LEVELS) LOAD_LEVELS(weight[v], panel + (size_t)v * step_bytes / VECTORS);
                else LOAD_VECTOR(weight[v], panel + (size_t)v * step_bytes / VECTORS);
            }
            UNROLLED for (int r = 0; r < rows; r++) {
                vector left;
                BROADCAST(left, r < rows / 2 ? x + (size_t)r * x_bytes : second + (size_t)(r - rows / 2) * x_bytes);
                UNROLLED for (int v = 0; v < VECTORS; v++) {
                    if (kind == LEVELS) MULTIPLY_LEVELS(sum[r][v], left, weight[v]);
                    else if (kind == WHOLE) MULTIPLY_ADD(sum[r][v], left, weight[v]);
                    else MULTIPLY_PAIRS(sum[r][v], left, weight[v]);
                }
            }
        }
        if (row < before->rows) finish_tile_row(before, row++, kind, 1);
    }
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < VECTORS; v++) ((vector *)sums)[r * VECTORS + v] = sum[r][v];
}

#define TILE_CASE(count) \
    case count: tile(x, x_bytes, panel, steps, sums, next, next_bytes, before, count, kind); break;

INLINE void tile_of(const char *x, size_t x_bytes, const char *panel, int steps, float *sums, const char *next,
                    size_t next_bytes, const unfinished *before, int rows, const matrix_kind kind) {
    switch (rows) {
        TILE_CASE(1) TILE_CASE(2) TILE_CASE(3) TILE_CASE(4) TILE_CASE(5) TILE_CASE(6)
#if TILE == 8
        TILE_CASE(7) TILE_CASE(8)
#endif
    }
}

#ifdef __AMX_TILE__
#define MAX_TILE (2 * TILE_ROWS)

#define LOAD_LEFT(from) _tile_loadd(LEFT, from, x_bytes)
#define LOAD_RIGHT(column) _tile_loadd(RIGHT, panel + (column) * TILE_BYTES, PANEL * 4)
// Multiply two tiles, and finish rows of the tile before in proportion to the products that are done.
#define MULTIPLY_TILES(sum)                                                                                     \
    do {                                                                                                        \
        if (kind == LEVELS) _tile_dpbusd(sum, LEFT, RIGHT);                                                     \
        else _tile_dpbf16ps(sum, LEFT, RIGHT);                                                                  \
        for (due += before->rows; due >= products; due -= products) finish_tile_row(before, row++, kind, 1);    \
    } while (0)
#define STORE_SUMS(sum, row, column) _tile_stored(sum, sums + (row) * PANEL + (column) * LANES, PANEL * 4)

// What `tile` does, for up to MAX_TILE rows, after shape_tiles. halves: a constant, 1 or 2. half_rows: the rows of a
// half; two halves may have a row in common, which is the same in both.
INLINE void tile_by_halves(const char *x, size_t x_bytes, const char *panel, int steps, float *sums, const char *next,
                           size_t next_bytes, const unfinished *before, int rows, int half_rows, const int halves,
                           const matrix_kind kind) {
    const char *second = x + (size_t)(rows - half_rows) * x_bytes;
    _tile_zero(0), _tile_zero(1), _tile_zero(2);
    if (halves == 2) _tile_zero(3), _tile_zero(4), _tile_zero(5);
    const int products = steps / TILE_STEPS * PARTS * halves;
    int row = 0, due = 0;
    for (int step = 0; step < steps; step += TILE_STEPS) {
        LOAD_LEFT(x);
        LOAD_RIGHT(0);
        MULTIPLY_TILES(0);
        LOAD_RIGHT(1);
        MULTIPLY_TILES(1);
        LOAD_RIGHT(2);
        MULTIPLY_TILES(2);
        if (halves == 2) {
            LOAD_LEFT(second);
            MULTIPLY_TILES(5);
            LOAD_RIGHT(1);
            MULTIPLY_TILES(4);
            LOAD_RIGHT(0);
            MULTIPLY_TILES(3);
        }
        for (const char *end = next + TILE_STEPS * next_bytes; next < end; next += 64) __builtin_prefetch(next, 0, 2);
        panel += TILE_STEPS * PANEL * 4, x += TILE_BYTES, second += TILE_BYTES;
    }
    STORE_SUMS(0, 0, 0), STORE_SUMS(1, 0, 1), STORE_SUMS(2, 0, 2);
    if (halves == 1) return;
    const int at = rows - half_rows;
    STORE_SUMS(3, at, 0), STORE_SUMS(4, at, 1), STORE_SUMS(5, at, 2);
}
#else
#define MAX_TILE TILE
#endif

INLINE void multiply_panels(const matrix *m, operand x, int rows, int from, int to, const finish *end,
                            const matrix_kind kind) {
    const int steps = steps_of(m), most = ON_TILES(kind) ? MAX_TILE : TILE, tiles = (rows + most - 1) / most;
    const size_t panel_bytes = (size_t)steps * (kind == LEVELS ? PANEL * LEVELS_OF_STEP : PANEL * 4);
    // The tiles of a panel together load the next panel. The processor loads wide panels faster by itself for few rows.
    const int loads_next = rows > 3 || VECTORS < 3 || ON_TILES(kind);
    const size_t next_bytes = loads_next ? (panel_bytes / (size_t)steps + (size_t)tiles - 1) / (size_t)tiles : 0;
    float sums[2][MAX_TILE * PANEL] __attribute__((aligned(64)));
    unfinished before = {.rows = 0};
#ifdef __AMX_TILE__
    // All tiles compute as many rows as the largest, so that the registers keep their shapes. The last row of a
    // smaller tile is the first row of the next.
    const int size = (rows + tiles - 1) / tiles, halves = size > TILE_ROWS ? 2 : 1, half = (size + halves - 1) / halves;
    if (ON_TILES(kind)) shape_tiles(half, 0);
#endif
    for (int panel = from; panel < to; panel++)
        for (int t = 0; t < tiles; t++) {
            // Tiles of nearly equal numbers of rows keep the multipliers busier than full tiles and a rest.
            const int first = (int)((int64_t)rows * t / tiles), count = (int)((int64_t)rows * (t + 1) / tiles) - first;
            const char *weights = m->weights + (size_t)panel * panel_bytes;
            float *const now = before.sums == sums[0] ? sums[1] : sums[0];
            const char *left = x.rows + (size_t)first * x.row_bytes;
            const char *next = weights + loads_next * panel_bytes + (size_t)t * steps * next_bytes;
#ifdef __AMX_TILE__
#define BY_HALVES(halves) \
    tile_by_halves(left, x.row_bytes, weights, steps, now, next, next_bytes, &before, size, half, halves, kind)
            if (ON_TILES(kind)) {
                if (halves == 2) BY_HALVES(2);
                else BY_HALVES(1);
            } else
#undef BY_HALVES
#endif
            tile_of(left, x.row_bytes, weights, steps, now, next, next_bytes, &before, count, kind);
            before = (unfinished){now, m, end, x, first, count, panel * PANEL};
            if (m->outputs - before.first >= PANEL) continue;
            // The last panel, if it is not whole, is finished at once.
            for (int row = 0; row < count; row++) finish_tile_row(&before, row, kind, 0);
            before.rows = 0;
        }
    for (int row = 0; row < before.rows; row++) finish_tile_row(&before, row, kind, 1);
#ifdef __AMX_TILE__
    if (ON_TILES(kind)) _tile_release();
#endif
}

INLINE int panels_of(const matrix *m) { return (m->outputs + PANEL - 1) / PANEL; }

// Multiply rows by panels from .. to - 1 of a matrix.
static void multiply(const matrix *m, operand x, int rows, int from, int to, const finish *end) {
    if (rows <= 0) return;
    switch ((matrix_kind)m->kind) {
        case WHOLE: multiply_panels(m, x, rows, from, to, end, WHOLE); break;
        case LEVELS: multiply_panels(m, x, rows, from, to, end, LEVELS); break;
        case PAIRS_OF_BFLOAT16:
#ifdef __AVX512BF16__
            multiply_panels(m, x, rows, from, to, end, PAIRS_OF_BFLOAT16);
#endif
            break;
    }
}

// One product on the threads of torch's pool. The threads take ranges of panels or of rows.
typedef struct {
    const matrix *weights;
    const char *x;            // [rows, inputs] of `type`
    finish end;
    int64_t x_row, rows;
    int32_t type, threads;
    // Set by `run_product`, for the pool.
    int32_t row_parts, panel_parts;
    atomic_int next;
} product_job;

static void work_product(void *data) {
    product_job *job = data;
    const matrix *m = job->weights;
    const int panels = panels_of(m), parts = job->row_parts * job->panel_parts;
    for (int part; (part = atomic_fetch_add(&job->next, 1)) < parts;) {
        const int row_part = part / job->panel_parts, panel_part = part % job->panel_parts;
        const int64_t first = job->rows * row_part / job->row_parts;
        const int rows = (int)(job->rows * (row_part + 1) / job->row_parts - first);
        finish end = job->end;
        end.out += (size_t)first * end.out_row * number_bytes(end.type);
        if (end.residual) end.residual += (size_t)first * end.residual_row;
        const operand x = prepared(m, job->x + (size_t)(first * job->x_row) * number_bytes(job->type), job->type,
                                   (size_t)job->x_row, rows, scratch_of(operand_bytes(m, rows)));
        multiply(m, x, rows, panels * panel_part / job->panel_parts, panels * (panel_part + 1) / job->panel_parts,
                 &end);
    }
}

// Rows of one part, so that its operand stays in the processor's cache.
static const int64_t rows_at_once = 96;

void run_product(product_job *job) {
    atomic_init(&job->next, 0);
    const int threads = parallel ? job->threads : 1;
    job->row_parts = (int32_t)((job->rows + rows_at_once - 1) / rows_at_once);
    if (job->row_parts > 1 && threads > 1) job->row_parts = (job->row_parts + threads - 1) / threads * threads;
    job->panel_parts = job->row_parts < threads ? threads : 1;
    if (threads < 2 || job->rows * job->weights->inputs * job->weights->outputs < worth_a_thread) {
        job->panel_parts = 1;
        work_product(job);
        return;
    }
    parallel(work_product, job, (unsigned)threads, 0);
}

// The form of packed weights, for the binding.
typedef struct {
    int32_t panel, levels_of_step, steps_together, has_pairs;
} packing;

void describe_packing(packing *form) {
    form->panel = PANEL;
    form->levels_of_step = LEVELS_OF_STEP;
    form->steps_together = STEPS_TOGETHER;
#ifdef __AVX512BF16__
    form->has_pairs = 1;
#else
    form->has_pairs = 0;
#endif
}
