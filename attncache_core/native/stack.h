// The compiled stack: the layers of a model on packed rows, in one call.
//
//   project    rows -> norm -> V of all heads, Q and K of the computed heads; Q and K of the reused heads only
//              for rows of misses -> norm of each head, rotary positions
//   attend     maps @ V, head by head, with maps that are computed or given
//   finish     output projection, residual, norm; then the feed-forward half
//   pool       one vector for each sequence (pooling.h, states.h), behind the last layer
//
// The work of the stack is partitioned in one of three ways (partitioning.h):
//   blocks     many rows: a block of some whole sequences passes through all layers on one thread
//   rows       long sequences: every thread takes some rows, or some heads, of each part of a layer
//   columns    few rows: every thread takes some columns of each product, or some heads
// The numbers of a row do not depend on the partitioning, because no sum is ever split.
#pragma once

typedef struct {
    // The attention half. `heads` is 0 if the layer has none.
    matrix always;                // rows -> V of all value heads, Q and K of the computed heads
    matrix misses;                // rows -> Q and K of the reused heads; outputs is 0 without reused heads
    matrix output;                // context -> width
    norm before, branch, after;   // of the rows, of the half's output, of the sum with the residual
    norm query, key;              // of each head
    const float *bias;            // see `attention`; or null
    distance_term query_term, key_term;  // see `attention`; without trees
    const int32_t *key_heads;     // [heads] the key head of each head, in the product that its Q is in; or null
    const int32_t *value_heads;   // [heads], or null
    // The feed-forward half. `up.outputs` is 0 if the layer has none.
    matrix gate, up, down;        // gate.outputs is 0 without a gate
    // Weights of `output` and `down` for refitted rows; their outputs are 0 if there are none.
    matrix refitted_output, refitted_down;
    norm forward_before, forward_branch, forward_after;
    float scale;
    int32_t heads, reused;        // the first `reused` heads take reused maps for hits
    int32_t keys_always, keys_misses, values;  // numbers of key heads in the two products, and of value heads
    int32_t width, value_width;   // of a head of Q and K, and of V
    int32_t half, angles;         // half the rotary dimensions, and the number of their table; -1: no rotation
    int32_t reach_before, reach_after, bias_positions;
    int32_t activation;
    int32_t maps_before;          // heads of earlier layers in a record
    int32_t number;               // of the layer, in the slots of its keys and values
} stack_layer;

// The input of the first layer: norm(scale words[id] + added[place]).
typedef struct {
    const char *words, *added;    // [word_count, width], [place_count, width] or null, both of `type`
    norm norm;
    int64_t word_count, place_count;
    int64_t padding;              // see place_tokens; -1: places count from 0
    int32_t has_positions;        // whether a place depends on the position of the token
    int32_t types;                // places of each position, one for each type of a token
    int32_t type;
    float scale;
} embedding;

typedef struct {
    const stack_layer *layers;
    float *hidden;                // [rows, width], input and output; null: only pooled vectors are wanted
    const embedding *embedding;   // null: the input of the first layer is in `hidden`
    const int64_t *ids, *types;   // [rows] for the embedding; `types` is null if all tokens have the first type
    const int64_t *places;        // [rows] set by place_tokens
    const int64_t *offsets;       // [runs + 1] first row of each run
    // Trees of runs (text/prefix_tree.py): the first run of each tree [trees + 1], and the position of the first
    // token of each run [runs]. Null: every run is a sequence, and a tree of its own.
    const int64_t *trees, *starts;
    const int64_t *positions;     // [rows]; null: each sequence begins at 0
    int64_t max_tokens;          // of a sequence
    const float *const *angles;   // [tables, 2] the cosines and sines [positions, half] of each table
    const char *const *maps;      // [hits] the record of each hit, in 16 bits
    int32_t first, last;          // the layers from first to last - 1
    int32_t width, count, hits;   // number of trees; the first `hits` of them are sequences with reused maps
    int32_t type, map_type;       // number_type of Q, K, V and context, and of reused maps
    int32_t packed, threads;
    int32_t widest;               // the largest width of an operand or of a feed-forward half
    int32_t refitted;             // the first `refitted` of the hits take the refitted weights
    // Keys and values of the tokens in front of the roots of trees, and places for the keys and values of rows,
    // in slots of one layer and token (attention.c). Every layer has the same heads of K and V, and no reused
    // heads.
    int32_t block_tokens;         // tokens of a block
    const char *const *given;     // [blocks] first slot of each block in layer 0; or null
    const int64_t *given_blocks;  // [trees + 1] first block of each tree; after join_trees, without the end
    char *const *kept;            // [kept_count] slots in layer 0 that rows are written to; or null
    const int64_t *kept_rows;     // [kept_count] the row of each of these slots, rising
    const int64_t *kept_starts;   // [rows + 1] set by place_slots: the first slot of each row
    int64_t kept_count;
    int64_t slot_bytes, layer_bytes;  // from a slot to that of the next token, and of the next layer
    atomic_int *ready;            // the number of layers whose given slots are filled, plus one if given states are; or null: all
    atomic_int *written;          // [layers] the number of rows whose keys and values are kept; or null
    // Whether every tree is one run of rows at any rising positions, which attend to the given tokens up to their
    // own position. The kept slots of the rows are among the given ones.
    int32_t scattered;
    int32_t only_slots;           // whether to keep the slots of the rows in one layer, and to compute nothing else
    const pooling *pooling;       // of the sequences, behind the last layer; null: none
    const tree_pooling *tree_pooling;  // with `pooling`, for trees
    // Results. Nanoseconds are summed over threads: of attention, and of all units.
    atomic_llong multiplications, map_rows, attention_nanoseconds, busy_nanoseconds;
} stack_job;

// The first row of a tree; for the number of trees, the number of rows.
INLINE int64_t first_row(const stack_job *job, int tree) {
    return job->offsets[job->trees ? job->trees[tree] : tree];
}

// Some whole trees, and the memory of their projections.
typedef struct {
    stack_job *job;
    int64_t first_row;
    int32_t first, trees, rows;
    int32_t miss;                 // the first row of a miss; all later rows belong to misses
    int32_t refitted;             // the first row without refitted weights; no later row has them
    int32_t always_row, misses_row, context_row;  // elements
    char *always, *misses, *context;
} block;

// Memory of a thread for the units of a job.
static char *stack_space(size_t bytes) {
    static _Thread_local growing memory;
    return thread_memory(&memory, bytes);
}

INLINE size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

static void count_product(stack_job *job, const matrix *m, int rows, int from, int to) {
    const int64_t outputs = smaller(to * PANEL, m->outputs) - from * PANEL;
    if (rows > 0 && outputs > 0) atomic_fetch_add(&job->multiplications, (int64_t)rows * outputs * m->inputs);
}

// Multiply rows of an operand by a part of a matrix's panels; `part` of `parts`.
static void multiply_part(stack_job *job, const matrix *m, operand x, int rows, int part, int parts, finish end) {
    const int panels = panels_of(m), from = panels * part / parts, to = panels * (part + 1) / parts;
    multiply(m, x, rows, from, to, &end);
    count_product(job, m, rows, from, to);
}

INLINE finish to_floats(float *out, int row, const float *residual) {
    return (finish){(char *)out, residual, (size_t)row, (size_t)row, FLOAT32, NO_ACTIVATION, 0};
}

INLINE operand from_row(operand x, int row) {
    x.rows += (size_t)row * x.row_bytes;
    if (x.scales) x.scales += row, x.zeros += row;
    return x;
}

// Project rows first .. first + rows - 1 of a block. x: the operand of these rows.
static void project_part(const block *b, const stack_layer *layer, operand x, int first, int rows, int part,
                         int parts) {
    stack_job *job = b->job;
    const number_type type = (number_type)job->type;
    const size_t bytes = number_bytes(type);
    finish end = {b->always + (size_t)first * b->always_row * bytes, 0, (size_t)b->always_row, 0, type,
                  NO_ACTIVATION, 0};
    multiply_part(job, &layer->always, x, rows, part, parts, end);
    const int skipped = b->miss > first ? smaller(b->miss - first, rows) : 0;
    if (!layer->misses.outputs || skipped == rows) return;
    end.out = b->misses + (size_t)(first + skipped) * b->misses_row * bytes;
    end.out_row = (size_t)b->misses_row;
    multiply_part(job, &layer->misses, from_row(x, skipped), rows - skipped, part, parts, end);
}

// Copy `bytes` bytes of a row of a block to all slots of the row in a layer, at `at` bytes from the slot's first.
static void keep(const block *b, const stack_layer *layer, int row, size_t at, const char *from, size_t bytes) {
    const stack_job *job = b->job;
    if (!job->kept) return;
    const int64_t *starts = job->kept_starts + b->first_row + row;
    at += (size_t)(layer->number * job->layer_bytes);
    for (int64_t k = starts[0]; k < starts[1]; k++) memcpy(job->kept[k] + at, from, bytes);
}

// Norm and rotate the heads of Q and K in rows of one product, of which `at` is the first number. Normed keys
// are kept before they are rotated.
static void place_heads(const block *b, const stack_layer *layer, char *at, int row_elements, int queries, int keys,
                        int first, int rows) {
    const number_type type = (number_type)b->job->type;
    const size_t bytes = number_bytes(type), head_bytes = (size_t)layer->width * bytes;
    const float *const *table = layer->angles < 0 ? 0 : b->job->angles + 2 * layer->angles;
    for (int r = first; r < first + rows; r++) {
        const int64_t angles = b->job->positions[b->first_row + r] * layer->half;
        char *head = at + (size_t)r * row_elements * bytes;
        for (int h = 0; h < queries + keys; h++, head += head_bytes) {
            const norm *head_norm = h < queries ? &layer->query : &layer->key;
            if (head_norm->kind) norm_row(head_norm, head, head, layer->width, type);
            if (h >= queries) keep(b, layer, r, (size_t)(h - queries) * head_bytes, head, head_bytes);
            if (table) rotate_head(head, table[0] + angles, table[1] + angles, layer->half, type);
        }
    }
}

// Whether rows of a layer are changed or copied between the projections and attention.
static int has_places(const stack_job *job, const stack_layer *layer) {
    return job->kept || layer->angles >= 0 || layer->query.kind || layer->key.kind;
}

static void place_rows(const block *b, const stack_layer *layer, int first, int rows) {
    if (!has_places(b->job, layer)) return;
    const size_t bytes = number_bytes((number_type)b->job->type);
    const size_t value_bytes = (size_t)layer->values * layer->value_width * bytes;
    place_heads(b, layer, b->always + value_bytes, b->always_row, layer->heads - layer->reused, layer->keys_always,
                first, rows);
    for (int r = first; r < first + rows; r++)
        keep(b, layer, r, (size_t)layer->keys_always * layer->width * bytes,
             b->always + (size_t)r * b->always_row * bytes, value_bytes);
    if (b->job->written) atomic_fetch_add(b->job->written + layer->number, rows);
    const int skipped = b->miss > first ? smaller(b->miss - first, rows) : 0;
    if (layer->misses.outputs)
        place_heads(b, layer, b->misses, b->misses_row, layer->reused, layer->keys_misses, first + skipped,
                    rows - skipped);
}

// Wait until a part of what is given is there: the slots of a layer, or behind those of all layers the states.
static void wait_for_part(const stack_job *job, int part) {
    while (job->ready && atomic_load_explicit(job->ready, memory_order_acquire) <= part)
        nanosleep(&(struct timespec){0, 20000}, 0);
}

// The keys and values of a head for the `tokens` tokens in front of a tree. Waits until they are there.
static given_tokens given_to(const stack_job *job, const stack_layer *layer, int tree, int head, int tokens) {
    if (!tokens) return (given_tokens){0};
    wait_for_part(job, layer->number);
    const size_t bytes = number_bytes((number_type)job->type);
    const size_t of_layer = (size_t)(layer->number * job->layer_bytes);
    const size_t keys = (size_t)layer->keys_always * layer->width * bytes;
    const float *const *table = layer->angles < 0 ? 0 : job->angles + 2 * layer->angles;
    return (given_tokens){.blocks = job->given + job->given_blocks[tree], .slot = (size_t)job->slot_bytes,
                          .key = of_layer + (size_t)layer->key_heads[head] * layer->width * bytes,
                          .value = of_layer + keys + (size_t)layer->value_heads[head] * layer->value_width * bytes,
                          .cosine = table ? table[0] : 0, .sine = table ? table[1] : 0, .tokens = tokens,
                          .block_tokens = job->block_tokens, .half = table ? layer->half : 0};
}

// A distance term of one head. Heads with such terms are computed one by one.
INLINE distance_term term_of_head(distance_term term, int head) {
    if (term.table) term.table += (size_t)head * (size_t)term.head_words;
    return term;
}

// How many neighbouring heads a unit computes together: those of one key and value head, whose layouts are made
// once. Fewer if that would leave threads without a unit; always a divisor of the number of heads.
static int heads_together(const stack_job *job, const stack_layer *layer, int threads) {
    if (!job->trees || layer->reused || !layer->heads) return 1;
    if (layer->query_term.table || layer->key_term.table) return 1;
    int count = 1;
    while (count < layer->heads && layer->key_heads[count] == layer->key_heads[0]) count++;
    for (int head = 0; head < layer->heads; head++) {
        const int first = head / count * count;
        if (layer->heads % count || layer->key_heads[head] != layer->key_heads[first] ||
            layer->value_heads[head] != layer->value_heads[first])
            return 1;
    }
    while (threads > 1 && count > 1 && job->count * (layer->heads / count) < 2 * threads) {
        int divisor = 2;
        while (count % divisor) divisor++;
        count /= divisor;
    }
    return count;
}

// Compute the context of `heads` heads of one tree of a block, from `head` on.
static void attend_heads(const block *b, const stack_layer *layer, int number, int head, int heads) {
    stack_job *job = b->job;
    const int tree = b->first + number;
    const size_t bytes = number_bytes((number_type)job->type);
    const int is_reused = head < layer->reused, is_given = is_reused && tree < job->hits;
    const int queries = is_reused ? layer->reused : layer->heads - layer->reused;
    const int row = is_reused ? b->misses_row : b->always_row;
    char *query = is_reused ? b->misses : b->always + (size_t)layer->values * layer->value_width * bytes;
    char *key = query + (size_t)queries * layer->width * bytes;
    const int place = is_reused ? head : head - layer->reused;
    const int64_t length = first_row(job, tree + 1) - first_row(job, tree), offsets[2] = {0, length},
                  runs[2] = {0, 1};
    // Where row 0 of the task is: the first row of the sequence, or for trees the first row of the job.
    const int64_t at = job->trees ? -b->first_row : first_row(job, tree) - b->first_row;
    attention task = {
        .query = {query + (at * row + place * layer->width) * (int64_t)bytes, row, layer->width},
        .key = {key + (at * row + layer->key_heads[head] * layer->width) * (int64_t)bytes, row, 0},
        .value = {b->always + (at * b->always_row + layer->value_heads[head] * layer->value_width) * (int64_t)bytes,
                  b->always_row, 0},
        .context = {b->context + (at * b->context_row + head * layer->value_width) * (int64_t)bytes,
                    b->context_row, layer->value_width},
        .offsets = job->trees ? job->offsets : offsets, .runs = runs, .run_count = 1, .heads = heads,
        .positions = job->scattered ? job->positions : 0,
        .key_width = layer->width, .width = layer->value_width, .type = job->type, .map_type = job->map_type,
        .before = layer->reach_before, .after = layer->reach_after, .packed = job->packed, .scale = layer->scale,
        .bias = layer->bias ? layer->bias + (size_t)head * (2 * layer->bias_positions - 1) : 0,
        .bias_positions = layer->bias_positions,
        .query_term = term_of_head(layer->query_term, head), .key_term = term_of_head(layer->key_term, head)};
    if (!is_given) atomic_fetch_add(&job->map_rows, length * heads);
    if (job->trees) {
        const int first = (int)job->trees[tree];
        const given_tokens given = given_to(job, layer, tree, head, (int)job->starts[first]);
        run_tree(&task, given.tokens ? &given : 0, job->starts, first, (int)job->trees[tree + 1]);
        return;
    }
    const char *map = 0;
    if (is_given) {
        const int64_t cells = job->packed ? length * (length + 1) / 2 : length * length;
        map = job->maps[tree] + 2 * (layer->maps_before + head) * cells;
        task.maps = &map;
    }
    run_task(&task, 0, 0);
}

// The type of the states inside the feed-forward half: that of the operand of the product that follows, unless
// a gate is still to be multiplied by them.
INLINE number_type inner_type(const stack_layer *layer) {
    return layer->down.kind == PAIRS_OF_BFLOAT16 && !layer->gate.outputs ? BFLOAT16 : FLOAT32;
}

// Write a part of the columns inside the feed-forward half to `opened` [rows, inner] of `inner_type`.
static void open_part(stack_job *job, const stack_layer *layer, operand x, int rows, int part, int parts,
                      char *opened) {
    finish end = {opened, 0, (size_t)layer->up.outputs, 0, inner_type(layer), NO_ACTIVATION, 0};
    activation_type activation = (activation_type)layer->activation;
    if (activation == GELU && layer->down.kind != WHOLE) activation = ROUNDED_GELU;
    if (!layer->gate.outputs) end.activation = activation;
    multiply_part(job, &layer->up, x, rows, part, parts, end);
    if (!layer->gate.outputs) return;
    end.activation = activation;
    end.multiply = 1;
    multiply_part(job, &layer->gate, x, rows, part, parts, end);
}

// Add the output of a half of a layer to the hidden states x: the last product of the half, with a norm of the
// product and a norm of the sum, if there are such norms. space: as large as x.
static void add_half(stack_job *job, const matrix *last, operand left, int rows, const norm *branch,
                     const norm *after, float *x, float *space) {
    const int width = job->width;
    if (branch->kind) {
        multiply_part(job, last, left, rows, 0, 1, to_floats(space, width, 0));
        norm_rows(branch, space, space, rows, width);
        for (int i = 0; i < rows * width; i++) x[i] += space[i];
    } else {
        multiply_part(job, last, left, rows, 0, 1, to_floats(x, width, x));
    }
    if (after->kind) norm_rows(after, x, x, rows, width);
}

// The output projection, the residual and the norm, for rows of a block; then the feed-forward half. The
// block's hidden states are changed in place. output, down: the weights of these rows. space: memory of this
// thread.
static void finish_rows_with(const block *b, const stack_layer *layer, const matrix *output, const matrix *down,
                             int first, int rows, char *space) {
    stack_job *job = b->job;
    const int width = job->width;
    const number_type type = (number_type)job->type;
    float *x = job->hidden + (size_t)(b->first_row + first) * width;
    float *other = (float *)space;
    char *rest = space + whole_lines((size_t)rows * width * 4);
    if (layer->heads) {
        const char *context = b->context + (size_t)first * b->context_row * number_bytes(type);
        const operand left = prepared(output, context, type, (size_t)b->context_row, rows, rest);
        add_half(job, output, left, rows, &layer->branch, &layer->after, x, other);
    }
    if (!layer->up.outputs) return;
    const float *input = x;
    if (layer->forward_before.kind) {
        norm_rows(&layer->forward_before, x, other, rows, width);
        input = other;
    }
    const operand left = prepared(&layer->up, (const char *)input, FLOAT32, (size_t)width, rows, rest);
    const int inner = layer->up.outputs;
    char *opened = rest + whole_lines(operand_bytes(&layer->up, rows));
    open_part(job, layer, left, rows, 0, 1, opened);
    const operand back =
        prepared(down, opened, inner_type(layer), (size_t)inner, rows, opened + whole_lines((size_t)rows * inner * 4));
    add_half(job, down, back, rows, &layer->forward_branch, &layer->forward_after, x, other);
}

// The weights of the last product of a half, for rows with refitted weights or for other rows.
INLINE const matrix *chosen(const matrix *original, const matrix *refitted, int is_refitted) {
    return is_refitted && refitted->outputs ? refitted : original;
}

// The number of rows with refitted weights among the `rows` rows from `first`.
INLINE int refitted_rows(const block *b, int first, int rows) {
    return b->refitted > first ? smaller(b->refitted - first, rows) : 0;
}

// See finish_rows_with. Rows with refitted weights come first.
static void finish_rows(const block *b, const stack_layer *layer, int first, int rows, char *space) {
    const int refitted_count = refitted_rows(b, first, rows);
    for (int r = 1; r >= 0; r--) {
        const int from = r ? first : first + refitted_count, count = r ? refitted_count : rows - refitted_count;
        if (count) finish_rows_with(b, layer, chosen(&layer->output, &layer->refitted_output, r),
                                    chosen(&layer->down, &layer->refitted_down, r), from, count, space);
    }
}

// Bytes that `finish_rows` and `project_rows` use.
static size_t rows_space(const stack_job *job, int rows) {
    // The hidden states, two operands, and the inner states.
    return whole_lines((size_t)rows * job->width * 4) + whole_lines((size_t)rows * job->widest * 4) +
           2 * ((size_t)rows * (rounded_up(job->widest, LANES) * 4 + 64 + 8) + 256) + 4096;
}

// What is wrong with the tokens of a job.
typedef enum { DONE = 0, NO_SUCH_ROW = 1, TOO_MANY_TOKENS = 2 } token_error;

// Set the positions of a job, if the caller has not, and the places of its tokens in the second table of the
// embedding. With padding, places count from padding + 1 and skip padding tokens, whose place is `padding` (RoBERTa,
// MPNet). positions, places: memory for one number per row.
static token_error place_tokens(stack_job *job, int64_t *positions, int64_t *places) {
    const embedding *by = job->embedding;
    for (int n = 0; n < job->count; n++) {
        const int64_t first = first_row(job, n), end = first_row(job, n + 1);
        int64_t counted = 0;
        for (int64_t r = first; r < end; r++) {
            positions[r] = job->positions ? job->positions[r] : r - first;
            if (positions[r] >= job->max_tokens) return TOO_MANY_TOKENS;
            if (!by) continue;
            int64_t place = by->has_positions ? positions[r] : 0;
            if (by->has_positions && by->padding >= 0)
                place = by->padding + (job->ids[r] == by->padding ? 0 : ++counted);
            places[r] = place * by->types + (job->types ? job->types[r] : 0);
            // As unsigned numbers, negative numbers are the largest.
            if (job->types && (uint64_t)job->types[r] >= (uint64_t)by->types) return NO_SUCH_ROW;
            if ((uint64_t)job->ids[r] >= (uint64_t)by->word_count) return NO_SUCH_ROW;
            if (by->added && (uint64_t)places[r] >= (uint64_t)by->place_count) return NO_SUCH_ROW;
        }
    }
    job->positions = positions;
    job->places = places;
    return DONE;
}

// Set the first slot of each row. starts: memory for one number per row, and one more.
static void place_slots(stack_job *job, int64_t rows, int64_t *starts) {
    int64_t at = 0;
    for (int64_t r = 0; r <= rows; r++) {
        while (at < job->kept_count && job->kept_rows[at] < r) at++;
        starts[r] = at;
    }
    job->kept_starts = starts;
}

// Join neighbouring trees behind the same given tokens, if these are more than the rows of the second tree: the
// given tokens are laid out once for each tree. trees: memory for two numbers per tree.
static void join_trees(stack_job *job, int64_t *trees) {
    int64_t *blocks = trees + job->count + 1;
    int count = 0;
    for (int t = 0; t < job->count; t++) {
        const int64_t first = job->given_blocks[t], given = job->given_blocks[t + 1] - first;
        const int64_t before = t ? job->given_blocks[t] - job->given_blocks[t - 1] : 0;
        const int is_same = t && given == before && !job->scattered &&
            job->starts[job->trees[t]] == job->starts[job->trees[t - 1]] &&
            !memcmp(job->given + first, job->given + first - given, (size_t)given * sizeof *job->given);
        if (is_same && job->starts[job->trees[t]] > first_row(job, t + 1) - first_row(job, t)) continue;
        trees[count] = job->trees[t];
        blocks[count++] = first;
    }
    trees[count] = job->trees[job->count];
    job->trees = trees;
    job->given_blocks = blocks;
    job->count = count;
}

// Write the embedding of rows first .. first + rows - 1 of the job to `to`.
static void embed_rows(const stack_job *job, int64_t first, int rows, float *to) {
    const embedding *by = job->embedding;
    const number_type type = (number_type)by->type;
    const int width = job->width;
    const size_t bytes = number_bytes(type);
    for (int64_t r = first; r < first + rows; r++, to += width) {
        const char *word = by->words + (size_t)(job->ids[r] * width) * bytes;
        const char *added = by->added ? by->added + (size_t)(job->places[r] * width) * bytes : 0;
        // The rows of a table are far apart, so each waits for memory unless it is asked for before.
        const char *next = by->words + (size_t)(job->ids[r + 1 < first + rows ? r + 1 : r] * width) * bytes;
        for (size_t at = 0; at < (size_t)width * bytes; at += 64) __builtin_prefetch(next + at);
        for (int i = 0; i < width; i += LANES) {
            floats part = load_some(word + i * bytes, type, width - i) * by->scale;
            if (added) part += load_some(added + i * bytes, type, width - i);
            store_some((char *)(to + i), FLOAT32, part, width - i);
        }
        if (by->norm.kind) norm_row(&by->norm, (const char *)to, (char *)to, width, FLOAT32);
    }
}

static void project_rows(const block *b, const stack_layer *layer, int first, int rows, char *space) {
    stack_job *job = b->job;
    const int width = job->width;
    if (job->embedding && layer == job->layers + job->first)
        embed_rows(job, b->first_row + first, rows, job->hidden + (size_t)(b->first_row + first) * width);
    const float *x = job->hidden + (size_t)(b->first_row + first) * width;
    if (layer->before.kind) {
        norm_rows(&layer->before, x, (float *)space, rows, width);
        x = (const float *)space;
        space += whole_lines((size_t)rows * width * 4);
    }
    const operand left = prepared(&layer->always, (const char *)x, FLOAT32, (size_t)width, rows, space);
    project_part(b, layer, left, first, rows, 0, 1);
    place_rows(b, layer, first, rows);
}

// Rows that pass together through the products of a layer, so that what they become stays in the cache. The tiles of
// AMX are so fast that loading the weights takes as long as multiplying 64 rows by them.
#ifdef __AMX_TILE__
static const int rows_together = 128;
#elif defined __AVX512F__
static const int rows_together = 64;
#else
static const int rows_together = 96;
#endif

// Bytes of the projections and contexts of a number of rows.
static size_t block_space(const block *b, int rows) {
    const size_t bytes = number_bytes((number_type)b->job->type);
    return whole_lines((size_t)rows * b->always_row * bytes) + whole_lines((size_t)rows * b->misses_row * bytes) +
           whole_lines((size_t)rows * b->context_row * bytes);
}

// Set the widths of the rows of projections to the largest of all layers.
static block widths_of(stack_job *job) {
    block b = {.job = job};
    for (int n = job->first; n < job->last; n++) {
        const stack_layer *layer = job->layers + n;
        if (layer->always.outputs > b.always_row) b.always_row = layer->always.outputs;
        if (layer->misses.outputs > b.misses_row) b.misses_row = layer->misses.outputs;
        if (layer->output.inputs > b.context_row) b.context_row = layer->output.inputs;
    }
    b.always_row = rounded_up(b.always_row, LANES);
    b.misses_row = rounded_up(b.misses_row, LANES);
    b.context_row = rounded_up(b.context_row, LANES);
    return b;
}

// Make `b` the block of trees from .. to - 1, with its projections in `space`.
static void place_block(block *b, int from, int to, char *space) {
    const stack_job *job = b->job;
    const size_t bytes = number_bytes((number_type)job->type);
    b->first = from;
    b->trees = to - from;
    b->first_row = first_row(job, from);
    b->rows = (int32_t)(first_row(job, to) - b->first_row);
    const int64_t miss = first_row(job, job->hits) - b->first_row;
    b->miss = miss < 0 ? 0 : miss > b->rows ? b->rows : (int32_t)miss;
    const int64_t refitted = first_row(job, job->refitted) - b->first_row;
    b->refitted = refitted < 0 ? 0 : refitted > b->rows ? b->rows : (int32_t)refitted;
    b->always = space;
    b->misses = b->always + whole_lines((size_t)b->rows * b->always_row * bytes);
    b->context = b->misses + whole_lines((size_t)b->rows * b->misses_row * bytes);
}

// Pool the sequences from .. to - 1, if the job pools sequences without trees.
static void pool_sequences(const stack_job *job, int from, int to) {
    for (int n = from; job->pooling && !job->trees && n < to; n++) {
        const int64_t first = first_row(job, n), count = first_row(job, n + 1) - first;
        float *space = (float *)stack_space((size_t)(count * job->width) * sizeof(float));
        pool_sequence(job->pooling, n, job->hidden + first * job->width, count, job->width, space);
    }
}

// All layers of a block, on this thread.
static void run_block(block *b, char *space) {
    stack_job *job = b->job;
    const int parts = (b->rows + rows_together - 1) / rows_together;
    for (int n = job->first; n < job->last; n++) {
        const stack_layer *layer = job->layers + n;
        const int64_t started = nanoseconds();
        if (layer->heads) {
            for (int p = 0; p < parts; p++) {
                const int first = (int)((int64_t)b->rows * p / parts);
                project_rows(b, layer, first, (int)((int64_t)b->rows * (p + 1) / parts) - first, space);
            }
            const int together = heads_together(job, layer, 1);
            for (int tree = 0; tree < b->trees && !job->only_slots; tree++)
                for (int head = 0; head < layer->heads; head += together)
                    attend_heads(b, layer, tree, head, together);
        }
        atomic_fetch_add(&job->attention_nanoseconds, nanoseconds() - started);
        for (int p = 0; p < parts && !job->only_slots; p++) {
            const int first = (int)((int64_t)b->rows * p / parts);
            finish_rows(b, layer, first, (int)((int64_t)b->rows * (p + 1) / parts) - first, space);
        }
    }
    pool_sequences(job, b->first, b->first + b->trees);
}
