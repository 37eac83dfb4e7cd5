// How the work of the stack is partitioned: by blocks, rows or columns (stack.h). Each partitioning is a job of a team
// (team.h): its data, and its units.
#pragma once

typedef struct {
    block whole;                  // all trees, or for `blocks` only the widths
    const int32_t *starts;        // [blocks + 1] first tree of each block
    int32_t parts, threads;       // parts of the rows, and the threads that compute them
} stack_run;

static void run_one_block(void *data, int phase_number, int unit) {
    (void)phase_number;
    const stack_run *run = data;
    block b = run->whole;
    const int64_t started = nanoseconds();
    const int rows = (int)(first_row(b.job, run->starts[unit + 1]) - first_row(b.job, run->starts[unit]));
    const size_t rows_bytes = rows_space(b.job, smaller(rows, rows_together));
    char *space = stack_space(rows_bytes + block_space(&b, rows));
    place_block(&b, run->starts[unit], run->starts[unit + 1], space + rows_bytes);
    run_block(&b, space);
    atomic_fetch_add(&b.job->busy_nanoseconds, nanoseconds() - started);
}

// Phases of a layer: project, attend, finish.
static void run_some_rows(void *data, int phase_number, int unit) {
    const stack_run *run = data;
    const block *b = &run->whole;
    stack_job *job = b->job;
    const stack_layer *layer = job->layers + job->first + phase_number / 3;
    const int part = phase_number % 3;
    const int64_t started = nanoseconds();
    if (part == 1) {
        const int together = heads_together(job, layer, run->threads), units = layer->heads / together;
        attend_heads(b, layer, unit / units, unit % units * together, together);
    } else {
        const int first = (int)((int64_t)b->rows * unit / run->parts);
        const int rows = (int)((int64_t)b->rows * (unit + 1) / run->parts) - first;
        char *space = stack_space(rows_space(job, rows));
        if (part == 2) finish_rows(b, layer, first, rows, space);
        else project_rows(b, layer, first, rows, space);
    }
    const int64_t elapsed = nanoseconds() - started;
    if (part < 2) atomic_fetch_add(&job->attention_nanoseconds, elapsed);
    atomic_fetch_add(&job->busy_nanoseconds, elapsed);
}

// The memory of one layer when it is run by columns. Its units are repeatable, so every layer has its own.
typedef struct {
    char *projections;            // see place_block
    float *half, *output;         // hidden states after each half, without the norm that ends the half
    float *before, *between;      // hidden states before each half, with the norm that ends the half before
    char *inner;                  // states inside the feed-forward half, of `inner_type`
} layer_memory;

// What a unit computed. Every unit has its own counts, because adding to counts is not repeatable.
typedef struct {
    int64_t multiplications, map_rows, attention_nanoseconds, busy_nanoseconds;
} unit_counts;

// A job that is run by columns, with copies of all that its units read.
typedef struct {
    stack_job job;
    block whole;
    int32_t parts;
    unit_counts *counts;          // of all units
    const int32_t *first_units;   // [phases] the index of the first unit of each phase among all units
    layer_memory *layers;         // of layer job.first, and so on; the one before it holds the input in `output`
} columns_run;

// The norm that ends the half before a half of layer `number`; null if there is none.
static const norm *norm_before(const stack_job *job, int number, int is_second) {
    const stack_layer *layer = job->layers + number;
    const norm *last = is_second ? &layer->after : number > job->first ? &layer[-1].forward_after : 0;
    return last && last->kind ? last : 0;
}

// The hidden states before a half of a layer. Every unit of the half's first product computes them for itself
// in `space`, and keeps its part of the columns for the half's last product.
static const float *states_before(const columns_run *run, int number, int is_second, int unit, char *space) {
    const stack_job *job = &run->job;
    const layer_memory *memory = run->layers + (number - job->first);
    const float *states = is_second ? memory->half : memory[-1].output;
    const norm *last = norm_before(job, number, is_second);
    if (!last) return states;
    norm_rows(last, states, (float *)space, run->whole.rows, job->width);
    float *kept = is_second ? memory->between : memory->before;
    const int from = job->width * unit / run->parts, to = job->width * (unit + 1) / run->parts;
    for (int r = 0; r < run->whole.rows; r++) {
        const size_t at = (size_t)r * job->width + from;
        memcpy(kept + at, (float *)space + at, (size_t)(to - from) * 4);
    }
    return (const float *)space;
}

// The hidden states that the last product of a half is added to.
static const float *states_kept(const columns_run *run, int number, int is_second) {
    const layer_memory *memory = run->layers + (number - run->job.first);
    if (norm_before(&run->job, number, is_second)) return is_second ? memory->between : memory->before;
    return is_second ? memory->half : memory[-1].output;
}

// Write a part of the columns of the last product of a half, plus the residual x, to `out`. input: rows of
// `row` numbers. Rows with refitted weights come first. space: memory of this thread.
static void multiply_last(const block *b, const matrix *original, const matrix *refitted, const char *input,
                          number_type type, int row, int part, int parts, const float *x, float *out, char *space) {
    stack_job *job = b->job;
    const int refitted_count = refitted_rows(b, 0, b->rows);
    for (int r = 1; r >= 0; r--) {
        const int first = r ? 0 : refitted_count, rows = r ? refitted_count : b->rows - refitted_count;
        if (!rows) continue;
        const matrix *weights = chosen(original, refitted, r);
        const char *from = input + (size_t)first * row * number_bytes(type);
        const operand left = prepared(weights, from, type, (size_t)row, rows, space);
        const size_t at = (size_t)first * job->width;
        multiply_part(job, weights, left, rows, part, parts, to_floats(out + at, job->width, x + at));
    }
}

// Phases of a layer: project, place, attend, output, up, down.
static void run_some_columns(void *data, int phase_number, int unit) {
    columns_run *run = data;
    stack_job unit_job, *job = &unit_job;  // with the counts of this unit
    memcpy(job, &run->job, sizeof *job);
    const int number = job->first + phase_number / 6, part = phase_number % 6, width = job->width;
    const stack_layer *layer = job->layers + number;
    const layer_memory *memory = run->layers + phase_number / 6;
    block b = run->whole;
    b.job = job;
    place_block(&b, 0, job->count, memory->projections);
    const int rows = b.rows;
    const number_type type = (number_type)job->type;
    const size_t states_bytes = whole_lines((size_t)rows * width * 4);
    char *space = stack_space(rows_space(job, rows) + 2 * states_bytes);
    char *other = space + states_bytes, *rest = other + states_bytes;
    const int64_t started = nanoseconds();
    if (part == 0 || part == 4) {
        const float *x = states_before(run, number, part == 4, unit, space);
        const norm *before = part == 4 ? &layer->forward_before : &layer->before;
        if (before->kind) {
            norm_rows(before, x, (float *)other, rows, width);
            x = (const float *)other;
        }
        const matrix *first = part == 4 ? &layer->up : &layer->always;
        const operand left = prepared(first, (const char *)x, FLOAT32, (size_t)width, rows, rest);
        if (part == 0) {
            project_part(&b, layer, left, 0, rows, unit, run->parts);
        } else {
            open_part(job, layer, left, rows, unit, run->parts, memory->inner);
        }
    } else if (part == 1) {
        const int first = rows * unit / run->parts;
        place_rows(&b, layer, first, rows * (unit + 1) / run->parts - first);
    } else if (part == 2) {
        const int together = heads_together(job, layer, run->parts), units = layer->heads / together;
        attend_heads(&b, layer, unit / units, unit % units * together, together);
    } else if (part == 3) {
        const float *x = states_kept(run, number, 0);
        multiply_last(&b, &layer->output, &layer->refitted_output, b.context, type, b.context_row, unit, run->parts,
                      x, memory->half, rest);
    } else {
        const float *x = states_kept(run, number, 1);
        multiply_last(&b, &layer->down, &layer->refitted_down, memory->inner, inner_type(layer), layer->up.outputs,
                      unit, run->parts, x, memory->output, rest);
    }
    const int64_t elapsed = nanoseconds() - started;
    run->counts[run->first_units[phase_number] + unit] =
        (unit_counts){job->multiplications, job->map_rows, part < 3 ? elapsed : 0, elapsed};
}

// Whether every layer is computed whole, and without norms of a half's output, which need whole rows.
static int has_plain_layers(const stack_job *job) {
    if (job->only_slots) return 0;
    for (int n = job->first; n < job->last; n++) {
        const stack_layer *layer = job->layers + n;
        if (!layer->heads || !layer->up.outputs || layer->branch.kind || layer->forward_branch.kind) return 0;
    }
    return 1;
}

// Whether a unit of columns may be computed twice. Rotations, norms of heads and gates change numbers in place,
// and reused maps may be unmapped after the call.
static int is_repeatable(const stack_job *job) {
    if (job->hits || job->given || job->kept) return 0;
    for (int n = job->first; n < job->last; n++) {
        const stack_layer *layer = job->layers + n;
        if (layer->angles >= 0 || layer->query.kind || layer->key.kind || layer->gate.outputs) return 0;
    }
    return 1;
}

// Collect trees to blocks of about `target` rows. Return the number of blocks.
static int collect_blocks(const stack_job *job, int64_t target, int32_t *starts) {
    int count = 0;
    starts[0] = 0;
    for (int t = 1; t <= job->count; t++)
        if (t == job->count || first_row(job, t + 1) - first_row(job, starts[count]) > target) starts[++count] = t;
    return count;
}

static void *taken(char **from, size_t bytes) {
    void *memory = *from;
    *from += whole_lines(bytes);
    return memory;
}

static const int64_t *copied(char **to, const int64_t *numbers, int count) {
    return memcpy(taken(to, (size_t)count * 8), numbers, (size_t)count * 8);
}

// Run a job of few rows: every thread takes some columns of each product, or some heads.
static void run_by_columns(stack_job *job, const block *widths, int rows, int threads) {
    const int layers = job->last - job->first, phases = 6 * layers, parts = threads;
    int max_units = 0;
    for (int n = 0; n < layers; n++) max_units += 5 * parts + job->count * job->layers[job->first + n].heads;
    const int runs = job->trees ? (int)job->trees[job->count] : job->count;
    const size_t states = whole_lines((size_t)rows * job->width * 4), projections = block_space(widths, rows);
    const size_t inner = whole_lines((size_t)rows * job->widest * 4);
    const size_t bytes = (size_t)(layers + 1) * (projections + 4 * states + inner) + 4096 +
                         (size_t)(layers + 2) * sizeof(layer_memory) + sizeof(columns_run) +
                         (size_t)(rows + 2 * runs + job->count + 64) * 8 + (size_t)phases * 8 +
                         (size_t)max_units * sizeof(unit_counts);
    team_job *shared = take_job(bytes);
    if (!shared) abort();
    char *memory = shared->memory.data;
    columns_run *run = taken(&memory, sizeof *run);
    int32_t *units = taken(&memory, (size_t)phases * 4), *first_units = taken(&memory, (size_t)phases * 4);
    memcpy(&run->job, job, sizeof *job);
    run->job.offsets = copied(&memory, job->offsets, runs + 1);
    run->job.positions = copied(&memory, job->positions, rows);
    if (job->trees) {
        run->job.trees = copied(&memory, job->trees, job->count + 1);
        run->job.starts = copied(&memory, job->starts, runs);
    }
    run->whole = *widths;
    run->whole.job = &run->job;
    run->whole.rows = rows;
    run->parts = parts;
    run->counts = taken(&memory, (size_t)max_units * sizeof(unit_counts));
    run->first_units = first_units;
    run->layers = (layer_memory *)taken(&memory, (size_t)(layers + 1) * sizeof(layer_memory)) + 1;
    for (int n = -1; n < layers; n++) {
        layer_memory *layer = run->layers + n;
        layer->output = taken(&memory, states);
        if (n < 0) continue;
        layer->half = taken(&memory, states);
        layer->before = taken(&memory, states);
        layer->between = taken(&memory, states);
        layer->inner = taken(&memory, inner);
        layer->projections = taken(&memory, projections);
    }
    if (job->embedding) embed_rows(job, 0, rows, run->layers[-1].output);
    else memcpy(run->layers[-1].output, job->hidden, (size_t)rows * job->width * 4);
    for (int n = 0; n < layers; n++) {
        const stack_layer *layer = job->layers + job->first + n;
        for (int p = 0; p < 6; p++) units[6 * n + p] = parts;
        if (!has_places(job, layer)) units[6 * n + 1] = 0;
        units[6 * n + 2] = job->count * (layer->heads / heads_together(job, layer, threads));
    }
    int total = 0;
    for (int p = 0; p < phases; p++) {
        first_units[p] = total;
        total += units[p];
    }
    run_team(shared, run_some_columns, run, units, phases, threads, is_repeatable(job));
    const float *output = run->layers[layers - 1].output;
    const norm *last = &job->layers[job->last - 1].forward_after;
    if (last->kind) norm_rows(last, output, job->hidden, rows, job->width);
    else memcpy(job->hidden, output, (size_t)rows * job->width * 4);
    for (int unit = 0; unit < total; unit++) {
        job->multiplications += run->counts[unit].multiplications;
        job->map_rows += run->counts[unit].map_rows;
        job->attention_nanoseconds += run->counts[unit].attention_nanoseconds;
        job->busy_nanoseconds += run->counts[unit].busy_nanoseconds;
    }
    leave_job(shared);
}

// Run a job of long sequences: every thread takes some rows, or some heads, of each part of a layer.
static void run_by_rows(stack_job *job, const block *widths, int rows, int threads) {
    const int layers = job->last - job->first, turns = (rows + rows_together * threads - 1) / (rows_together * threads);
    const size_t projections = block_space(widths, rows);
    team_job *shared = take_job(projections + (size_t)layers * 12 + 64);
    if (!shared) abort();
    stack_run run = {.whole = *widths, .parts = turns * threads, .threads = threads};
    place_block(&run.whole, 0, job->count, shared->memory.data);
    int32_t *units = (int32_t *)(shared->memory.data + projections);
    for (int n = 0; n < layers; n++) {
        const stack_layer *layer = job->layers + job->first + n;
        units[3 * n] = layer->heads ? run.parts : 0;
        units[3 * n + 1] = job->only_slots ? 0 : job->count * (layer->heads / heads_together(job, layer, threads));
        units[3 * n + 2] = job->only_slots ? 0 : run.parts;
    }
    run_team(shared, run_some_rows, &run, units, 3 * layers, threads, 0);
    leave_job(shared);
}

// Fewer rows than this for each thread are split by columns.
static const int fewest_rows = 24;

static void run_layers(stack_job *job) {
    const block widths = widths_of(job);
    const int rows = (int)first_row(job, job->count), threads = free_threads(job->threads);
    if (threads > 1 && rows < fewest_rows * threads && has_plain_layers(job)) {
        run_by_columns(job, &widths, rows, threads);
        pool_sequences(job, 0, job->count);
        return;
    }
    int32_t *starts = malloc((size_t)(job->count + 2) * 4);
    if (!starts) abort();
    // As many blocks as every thread can take the same number of.
    const int turns_wanted = (rows + threads * rows_together * 4 / 3 - 1) / (threads * rows_together * 4 / 3);
    const int64_t target = (rows + threads * turns_wanted - 1) / (threads * turns_wanted);
    int64_t longest = 0;
    const int blocks = collect_blocks(job, target, starts);
    for (int n = 0; n < blocks; n++) {
        const int64_t rows = first_row(job, starts[n + 1]) - first_row(job, starts[n]);
        if (rows > longest) longest = rows;
    }
    // Blocks keep all threads busy if they are many, or if they can be shared out evenly.
    const int64_t turns = (blocks + threads - 1) / threads;
    if (threads == 1 || blocks >= 8 * threads || turns * longest * threads * 5 <= (int64_t)rows * 6) {
        stack_run run = {.whole = widths, .starts = starts};
        team_job *shared = threads > 1 && blocks > 1 ? take_job(0) : 0;
        run_team(shared, run_one_block, &run, &(int32_t){blocks}, 1, smaller(threads, blocks), 0);
        if (shared) leave_job(shared);
    } else {
        run_by_rows(job, &widths, rows, threads);
        pool_sequences(job, 0, job->count);
    }
    free(starts);
}

// Run a job. Returns DONE, or what is wrong with the tokens, and computes nothing then.
int32_t run_stack(stack_job *job) {
    static _Thread_local growing memory;
    const size_t rows = (size_t)first_row(job, job->count), states = whole_lines(rows * (size_t)job->width * 4);
    const size_t numbers = whole_lines((rows + 1) * 8), trees = whole_lines((size_t)(2 * job->count + 2) * 8);
    char *space = thread_memory(&memory, states + 3 * numbers + trees);
    int64_t *const first = (int64_t *)(space + states), *const second = first + numbers / 8;
    int64_t *const third = second + numbers / 8;
    if (!job->hidden) job->hidden = (float *)space;
    const token_error error = place_tokens(job, first, second);
    if (error) return error;
    if (job->kept) place_slots(job, (int64_t)rows, third);
    if (job->given) join_trees(job, third + numbers / 8);
    if (rows && job->first < job->last) run_layers(job);
    else if (job->embedding) embed_rows(job, 0, (int)rows, job->hidden);
    if (job->tree_pooling) {
        int layers = 0;
        for (int n = job->first; n < job->last; n++) if (job->layers[n].heads) layers = job->layers[n].number + 1;
        wait_for_part(job, layers);
        pool_trees(job->pooling, job->tree_pooling, job->hidden, job->offsets, job->starts, job->trees[job->count],
                   job->width);
    }
    return DONE;
}
