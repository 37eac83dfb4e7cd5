// The normalisers of a softmax over all outputs of a matrix, which are never in memory together: for each row x,
// the largest of its outputs y = x @ weights + bias, and the sum of e^(y - largest).
#pragma once

typedef struct {
    const matrix *weights;
    const char *x;            // [rows, inputs] of `type`
    float *largest, *sums;    // [rows], results
    int64_t x_row, rows;
    int32_t type, threads;
} normalizer_job;

// Rows and panels whose outputs are in memory together.
#define ROWS_NORMALIZED 32
#define PANELS_NORMALIZED 8

static void normalize_rows(void *data, int phase_number, int unit) {
    (void)phase_number;
    const normalizer_job *job = data;
    const matrix *m = job->weights;
    const int64_t first = (int64_t)unit * ROWS_NORMALIZED;
    const int rows = (int)(job->rows - first < ROWS_NORMALIZED ? job->rows - first : ROWS_NORMALIZED);
    const size_t prepared_bytes = whole_lines(operand_bytes(m, rows));
    const int width = PANELS_NORMALIZED * PANEL, panels = panels_of(m);
    char *space = stack_space(prepared_bytes + (size_t)rows * width * 4);
    float *outputs = (float *)(space + prepared_bytes);
    const char *from = job->x + (size_t)(first * job->x_row) * number_bytes((number_type)job->type);
    const operand x = prepared(m, from, (number_type)job->type, (size_t)job->x_row, rows, space);
    float *largest = job->largest + first, *sums = job->sums + first;
    for (int r = 0; r < rows; r++) largest[r] = -__builtin_inff(), sums[r] = 0;
    for (int panel = 0; panel < panels; panel += PANELS_NORMALIZED) {
        const int count = smaller(width, m->outputs - panel * PANEL);
        // Column 0 of `out` is the first output of the matrix.
        const finish end = {(char *)(outputs - (size_t)panel * PANEL), 0, (size_t)width, 0, FLOAT32, NO_ACTIVATION,
                            0};
        multiply(m, x, rows, panel, smaller(panel + PANELS_NORMALIZED, panels), &end);
        for (int r = 0; r < rows; r++) {
            const float *row = outputs + (size_t)r * width;
            floats most = every(largest[r]), sum = every(0);
            for (int at = 0; at < count; at += LANES) {
                const floats part = load_some((const char *)(row + at), FLOAT32, count - at);
                most = larger(either(lanes_below(count - at), part, most), most);
            }
            const float now = largest_lane(most);
            for (int at = 0; at < count; at += LANES) {
                const floats part = load_some((const char *)(row + at), FLOAT32, count - at);
                sum += either(lanes_below(count - at), exponential(part - now), every(0));
            }
            const float before = sums[r] == 0.0f ? 0.0f : sums[r] * exponential(every(largest[r] - now))[0];
            sums[r] = before + sum_of_lanes(sum);
            largest[r] = now;
        }
    }
}

void run_normalizers(normalizer_job *job) {
    const int32_t units = (int32_t)((job->rows + ROWS_NORMALIZED - 1) / ROWS_NORMALIZED);
    const int threads = smaller(free_threads(job->threads), units);
    team_job *shared = threads > 1 ? take_job(0) : 0;
    run_team(shared, normalize_rows, job, &units, 1, threads, 0);
    if (shared) leave_job(shared);
}
