// Pooling of trees: the sequences that end in a tree share the states of their common tokens.
//
// state in front of a tree -> rows of its runs, one by one -> states after chosen rows, vectors of sequences
//
// A state is what every pooling needs to know of some tokens. Rows are added to it one by one, so it does not depend
// on how many of the tokens are in front of the tree.
#pragma once

typedef enum { STATE_SUM = 0, STATE_WEIGHTED = 1, STATE_MAXIMUM = 2, STATE_FIRST = 3, STATE_LAST = 4, STATE_ROWS = 5 } state_row;

typedef struct {
    const int64_t *parents;      // [runs] the run that each run continues, or -1
    const int64_t *ends;         // [sequences] the last run of each sequence, or -1 if all its tokens are given
    const int64_t *lengths;      // [sequences] tokens of each sequence, given tokens too
    // [sequences] the state [STATE_ROWS, width] after the given tokens of each sequence, or null without such tokens.
    // The sequences of a tree have the same given tokens, and `pooling.skipped` is the same for all of them.
    const float *const *given;
    const int64_t *kept_rows;    // [kept_count] rows after which the state is kept, rising
    float *const *kept;          // [kept_count] where each of these states goes
    int64_t count, kept_count;   // of sequences and of kept states
} tree_pooling;

// What is known of a run while its tree is pooled.
typedef struct {
    const float *given;          // the state in front of the tree, if the run is its root
    int64_t depth, skipped;
    int64_t sequence;            // one of the sequences that end with the run, or -1
    int32_t is_finite;           // whether all rows up to the end of the run are finite
} pooled_run;

// Add a row to a state.
static void add_row(float *restrict state, const float *restrict row, int64_t width, int64_t position, int64_t skipped) {
    float *restrict sum = state + STATE_SUM * width, *restrict weighted = state + STATE_WEIGHTED * width;
    float *restrict maximum = state + STATE_MAXIMUM * width;
    const float weight = (float)(position + 1);
    if (position >= skipped)
        for (int64_t i = 0; i < width; i++) {
            sum[i] += row[i];
            weighted[i] += weight * row[i];
            maximum[i] = larger_number(row[i], maximum[i]);
        }
    if (position == skipped) memcpy(state + STATE_FIRST * width, row, (size_t)width * sizeof(float));
}

// Write the vector of a sequence whose `count` tokens have this state.
static void pool_state(const pooling *by, int64_t sequence, const float *state, int64_t count, int width, int is_finite) {
    static const state_row row_of[] = {STATE_FIRST, STATE_LAST, STATE_MAXIMUM, STATE_SUM, STATE_SUM, STATE_WEIGHTED};
    const int64_t skipped = by->skipped ? by->skipped[sequence] : 0;
    float *to = by->vectors + sequence * by->modes * width;
    for (int m = 0; m < by->modes; m++) {
        const pooling_mode mode = mode_for((pooling_mode)by->mode[m], count, skipped);
        const float *from = state + row_of[mode] * width, divisor = pooling_divisor(mode, count, skipped);
        for (int i = 0; i < width; i++) to[m * width + i] = from[i] / divisor;
    }
    by->finite[sequence] = (char)(is_finite && all_finite(to, (int64_t)by->modes * width));
}

// Pool the sequences of trees. hidden: rows of the output of the last layer; offsets, starts: see stack_job.
static void pool_trees(const pooling *by, const tree_pooling *trees, const float *hidden, const int64_t *offsets,
                       const int64_t *starts, int64_t run_count, int width) {
    static _Thread_local growing memory, of_states;
    const size_t state_bytes = (size_t)(STATE_ROWS * width) * sizeof(float), row_bytes = (size_t)width * sizeof(float);
    const size_t run_bytes = (size_t)run_count * sizeof(pooled_run);
    pooled_run *runs = (pooled_run *)thread_memory(&memory, run_bytes + (size_t)trees->count * sizeof(int64_t));
    int64_t *others = (int64_t *)((char *)runs + run_bytes);  // [sequences] another sequence that ends with the same run
    int64_t depth = 0, kept = 0;
    for (int64_t r = 0; r < run_count; r++) {
        runs[r] = (pooled_run){.sequence = -1, .depth = trees->parents[r] < 0 ? 0 : runs[trees->parents[r]].depth + 1};
        if (runs[r].depth > depth) depth = runs[r].depth;
    }
    // A run comes behind the runs that it continues, so a state for each run of one path is enough.
    float *normed = (float *)thread_memory(&of_states, row_bytes + (size_t)(depth + 1) * state_bytes);
    float *states = normed + width;
    for (int64_t n = 0; n < trees->count; n++) {
        int64_t run = trees->ends[n];
        if (run < 0) {
            pool_state(by, n, trees->given[n], trees->lengths[n], width, 1);
            continue;
        }
        others[n] = runs[run].sequence;
        runs[run].sequence = n;
        while (trees->parents[run] >= 0) run = trees->parents[run];
        runs[run].given = trees->given[n];
        runs[run].skipped = by->skipped ? by->skipped[n] : 0;
    }
    const int reads_all = trees->kept_count || !reads_last_only(by);
    for (int64_t r = 0; r < run_count; r++) {
        pooled_run *run = runs + r;
        float *state = states + run->depth * STATE_ROWS * width;
        run->is_finite = all_finite(hidden + offsets[r] * width, (offsets[r + 1] - offsets[r]) * width);
        if (run->depth) {
            const pooled_run *parent = runs + trees->parents[r];
            run->skipped = parent->skipped;
            run->is_finite &= parent->is_finite;
            memcpy(state, state - STATE_ROWS * width, state_bytes);
        } else if (run->given) {
            memcpy(state, run->given, state_bytes);
        } else {
            memset(state, 0, state_bytes);
            for (int i = 0; i < width; i++) state[STATE_MAXIMUM * width + i] = -__builtin_inff();
        }
        const int64_t end = offsets[r + 1];
        for (int64_t n = reads_all ? offsets[r] : run->sequence < 0 ? end : end - 1; n < end; n++) {
            const float *row = hidden + n * width;
            if (by->last.kind) {
                norm_rows(&by->last, row, normed, 1, width);
                row = normed;
            }
            if (reads_all) add_row(state, row, width, starts[r] + n - offsets[r], run->skipped);
            memcpy(state + STATE_LAST * width, row, row_bytes);
            for (; kept < trees->kept_count && trees->kept_rows[kept] == n; kept++)
                memcpy(trees->kept[kept], state, state_bytes);
        }
        for (int64_t n = run->sequence; n >= 0; n = others[n])
            pool_state(by, n, state, trees->lengths[n], width, run->is_finite);
    }
}
