// Pooling that continues: sums, maxima, first and last rows over the tokens of each sequence of a tree.
//
// state after a run's parent -> rows of the run, one by one -> state after the run; states after chosen rows
#pragma once

typedef enum { STATE_SUM = 0, STATE_WEIGHTED = 1, STATE_MAXIMUM = 2, STATE_FIRST = 3, STATE_LAST = 4, STATE_ROWS = 5 } state_row;

typedef struct {
    const float *hidden;     // [rows, width]
    const int64_t *offsets;  // [runs + 1] first row of each run
    const int64_t *parents;  // [runs] the run that each run continues, or -1
    const int64_t *starts;   // [runs] position of the first row
    const int64_t *skipped;  // [runs] the first position that pooling includes
    const float *before;     // [trees, STATE_ROWS, width], for the runs without a parent, in order
    const int64_t *chosen;   // [rows] index in `found` of the state after each row, or -1
    float *ends;             // [runs, STATE_ROWS, width], the state after each run
    float *found;            // [chosen rows, STATE_ROWS, width]
    int64_t runs, width;
} states_job;

// Add a row to a state.
static void add_row(float *restrict state, const float *restrict row, int64_t width, int64_t position, int64_t skipped) {
    float *restrict sum = state + STATE_SUM * width, *restrict weighted = state + STATE_WEIGHTED * width;
    float *restrict maximum = state + STATE_MAXIMUM * width;
    const float weight = (float)(position + 1);
    if (position >= skipped)
        for (int64_t i = 0; i < width; i++) {
            sum[i] += row[i];
            weighted[i] += weight * row[i];
            maximum[i] = row[i] > maximum[i] ? row[i] : maximum[i];
        }
    if (position == skipped) memcpy(state + STATE_FIRST * width, row, (size_t)width * sizeof(float));
}

void run_states(const states_job *job) {
    const int64_t width = job->width;
    const size_t bytes = (size_t)(STATE_ROWS * width) * sizeof(float);
    const float *before = job->before;
    for (int64_t run = 0; run < job->runs; run++) {
        float *state = job->ends + run * STATE_ROWS * width;
        const int64_t parent = job->parents[run];
        if (parent < 0) {
            memcpy(state, before, bytes);
            before += STATE_ROWS * width;
        } else memcpy(state, job->ends + parent * STATE_ROWS * width, bytes);
        for (int64_t row = job->offsets[run]; row < job->offsets[run + 1]; row++) {
            const float *own = job->hidden + row * width;
            add_row(state, own, width, job->starts[run] + row - job->offsets[run], job->skipped[run]);
            const int is_last = row + 1 == job->offsets[run + 1];
            if (job->chosen[row] < 0 && !is_last) continue;
            memcpy(state + STATE_LAST * width, own, (size_t)width * sizeof(float));
            if (job->chosen[row] >= 0) memcpy(job->found + job->chosen[row] * STATE_ROWS * width, state, bytes);
        }
    }
}
