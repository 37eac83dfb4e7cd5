// One head of one run of sequences, for two number formats. attention.c includes this file twice:
//   PAIRS 0: one float32 per word. Any input type, any width.
//   PAIRS 1: two bfloat16 per word, multiplied and added two at a time (AVX512-BF16), or on tiles (AMX).
// A "step" is one word along the axis over which a product sums: two elements with PAIRS, else one.

#if PAIRS
#define NAME(name) name##_of_pairs
#define NUMBERS 2
#else
#define NAME(name) name##_of_floats
#define NUMBERS 1
#endif

#include "layout.h"

#if PAIRS && defined __AMX_TILE__  // product_of_pairs is in tiles.h
// steps: of the product with V. Those of Q are whole tiles, because the width of its heads is a multiple of 32.
#define BEGIN_TILES(rows, steps) shape_tiles(rows, (steps) % TILE_STEPS)
#define END_TILES() _tile_release()
// Columns begin at whole tiles of steps, so that the sums of a row do not depend on the rows beside it.
#define COLUMNS_TOGETHER (2 * TILE_STEPS)
#else
#define BEGIN_TILES(rows, steps) (void)0
#define END_TILES() (void)0
#define COLUMNS_TOGETHER LANES

// Return sum + a . b in every lane; all lanes use the same word a.
INLINE floats NAME(multiplied)(floats sum, const char *a, words b) {
#if PAIRS
    int32_t pair;
    memcpy(&pair, a, 4);
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)(__m512i)b);
#else
    float factor;
    memcpy(&factor, a, 4);
    return sum + factor * (floats)b;
#endif
}

// out[row][0 : 16 vectors] = a[row][steps] @ b[steps][...] for ROWS rows; `vectors` (1 or 2) is a constant. adds: a
// constant, whether to add to what `out` holds.
// A tile of more than one row has ROWS rows: rows beyond `rows` repeat the last row, and their results are not
// used. `most` is the constant 1 or ROWS.
INLINE void NAME(tile)(const char *a, size_t a_bytes, int rows, const words *b, size_t b_row, int steps,
                       float *out, size_t out_row, const int vectors, const int most, const int adds) {
    floats sum[ROWS][2];
    const char *from[ROWS];
    for (int r = 0; r < most; r++) {
        from[r] = a + (size_t)(r < rows ? r : rows - 1) * a_bytes;
        for (int c = 0; c < vectors; c++)
            sum[r][c] = adds ? *(const floats *)(out + (size_t)r * out_row + c * LANES) : every(0);
    }
    for (int step = 0; step < steps; step++) {
        const words *line = (const words *)((const int32_t *)b + (size_t)step * b_row);
        for (int c = 0; c < vectors; c++) {
            const words right = line[c];
            for (int r = 0; r < most; r++) sum[r][c] = NAME(multiplied)(sum[r][c], from[r] + 4 * step, right);
        }
    }
    for (int r = 0; r < most; r++)
        for (int c = 0; c < vectors; c++) *(floats *)(out + (size_t)r * out_row + c * LANES) = sum[r][c];
}

INLINE void NAME(product_of)(const char *a, size_t a_bytes, int rows, const int32_t *b, int b_row, int steps,
                             float *out, int out_row, int columns, const int most, const int adds) {
    int column = 0;
    for (; column + 2 * LANES <= columns; column += 2 * LANES)
        NAME(tile)(a, a_bytes, rows, (const words *)(b + column), b_row, steps, out + column, out_row, 2, most,
                   adds);
    if (column < columns)
        NAME(tile)(a, a_bytes, rows, (const words *)(b + column), b_row, steps, out + column, out_row, 1, most,
                   adds);
}

INLINE void NAME(product)(const char *a, size_t a_bytes, int rows, const int32_t *b, int b_row, int steps,
                          float *out, int out_row, int columns, const int adds) {
    if (rows == 1) NAME(product_of)(a, a_bytes, rows, b, b_row, steps, out, out_row, columns, 1, adds);
    else NAME(product_of)(a, a_bytes, rows, b, b_row, steps, out, out_row, columns, ROWS, adds);
}
#endif

INLINE void NAME(store_weights)(char *weights, int at, floats weight) {
#if PAIRS
    *(halves *)(weights + 2 * at) = narrowed(weight);
#else
    *(floats *)(weights + 4 * at) = weight;
#endif
}

// Write weights = exp(scale (score - row's largest score)) for columns from .. to - 1, and 0 for the other
// columns, in the number format of the product with V. Return the sum of the weights, which is NaN if a score
// is NaN or the largest score is infinite. Only the first and the last vector of columns may lie entirely
// outside from .. to - 1, because the rows of a tile are adjacent, or several vectors on the tiles of AMX.
INLINE float NAME(weigh)(const float *scores, int from, int to, int columns, float scale, char *weights) {
    const int start = from / LANES * LANES, last = (to - 1) / LANES * LANES;
    const words behind = ~lanes_below(from - start), before = lanes_below(to - last);
    const floats lowest = every(-__builtin_inff());
    floats most = lowest;
    for (int at = start; at <= last; at += LANES) {
        floats score = *(const floats *)(scores + at);
        if (at == start) score = either(behind, score, lowest);
        if (at == last) score = either(before, score, lowest);
        most = larger(most, score);
    }
    const float largest = largest_lane(most);
    floats sum = every(0);
    if (COLUMNS_TOGETHER == LANES) {
        NAME(store_weights)(weights, 0, sum);
        NAME(store_weights)(weights, columns - LANES, sum);
    } else {
        for (int at = 0; at < start; at += LANES) NAME(store_weights)(weights, at, sum);
        for (int at = last + LANES; at < columns; at += LANES) NAME(store_weights)(weights, at, sum);
    }
    for (int at = start; at <= last; at += LANES) {
        floats weight = exponential((*(const floats *)(scores + at) - largest) * scale);
        if (at == start) weight = either(behind, weight, every(0));
        if (at == last) weight = either(before, weight, every(0));
        sum += weight;
        NAME(store_weights)(weights, at, weight);
    }
    return sum_of_lanes(sum);
}

// Write a row of the map to `kept`, as `length` elements of `type`: weights times `share` (1 / sum of the
// weights) for columns from .. to - 1, and zeros for the other columns.
static void NAME(keep_row)(const char *weights, float share, int from, int to, int length, char *kept,
                           number_type type) {
    const size_t bytes = number_bytes(type);
    memset(kept, 0, (size_t)from * bytes);
    for (int at = from; at < to; at += LANES, weights += LANES * 4 / NUMBERS) {
        const floats weight = load(weights, PAIRS ? BFLOAT16 : FLOAT32);
        store_some(kept + (size_t)at * bytes, type, weight * share, to - at);
    }
    memset(kept + (size_t)to * bytes, 0, (size_t)(length - to) * bytes);
}

// One head of one run, and the locations of its layouts in the scratch memory.
typedef struct {
    int head, first_sequence, sequences, length, columns, value_columns;
    size_t value_words;               // words of V's layout, per sequence
    int64_t first_token;
    float *result, *scores;           // [ROWS, value_columns], [ROWS, columns]
    int32_t *weights, *query;         // [ROWS, columns], [ROWS, key columns]
    int32_t *key, *value;             // [key steps, columns], [sequences, map steps, value_columns]
    // Products with the tables of distance terms: of Q [ROWS, columns of the table], and of K [columns, of_key_row],
    // of which sixteen columns are transposed at a time [LANES, columns + LANES]. LANES more per row keep rows in
    // different sets of the processor's cache.
    float *of_query, *of_key, *transposed;
    int of_key_row;
} NAME(task);

// At most ROWS rows of the map. Columns that no row of the tile uses are left out.
typedef struct {
    int row, rows, first, columns;    // the columns are a whole number of vectors, beginning at `first`
    int steps;                        // words per row in the product with V
    const char *left;                 // [rows, steps]
    size_t left_bytes;                // from one row to the next
    float share[ROWS];                // factor for each row of the product with V
} NAME(tile_of_map);

// Add the bias of each distance to a row of scores, divided by the scale that the scores are multiplied by.
// first: the distance of the first column. count: the number of columns.
static void NAME(add_bias)(const attention *job, int head, int first, int count, float *scores) {
    const int distances = 2 * job->bias_positions - 1;
    const float *bias = job->bias + (size_t)head * distances + job->bias_positions - 1 + first;
    for (int at = 0; at < count; at++) scores[at] += bias[at] / job->scale;
}

// Multiply K of a sequence by the rows of the second distance term.
static void NAME(multiply_key_term)(const attention *job, const NAME(task) *task) {
    const distance_term *term = &job->key_term;
    const int key_columns = rounded_up(job->key_width, LANES), length = task->length;
    const size_t bytes = number_bytes(job->type);
    const int first = columns_within(term, length).first;
    for (int token = 0; token < length; token += ROWS) {
        const int count = smaller(length - token, ROWS);
        const column_range range = columns_of(term, 1 - token - count, length - 1 - token);
        NAME(copy_rows)(head_of(job->key, task->first_token + token, task->head, bytes),
                        (size_t)job->key.token * bytes, job->type, count, job->key_width, task->query, key_columns);
        BEGIN_TILES(count, 0);
        NAME(product)((const char *)task->query, (size_t)key_columns * 4, count, term->table + range.first,
                      term->columns, job->key_width / NUMBERS,
                      task->of_key + (size_t)token * task->of_key_row + (range.first - first), task->of_key_row,
                      range.count, 0);
    }
}

// Begin the scores of a tile, whose rows of Q are laid out, with the distance terms.
static void NAME(begin_scores)(const attention *job, const NAME(task) *task, const NAME(tile_of_map) *tile) {
    const int key_columns = rounded_up(job->key_width, LANES), length = task->length;
    const distance_term *by_query = &job->query_term, *by_key = &job->key_term;
    const float *other = 0;
    if (by_key->table) {
        if (tile->row % LANES == 0)
            transpose_key_term(by_key, task->of_key, task->of_key_row, columns_within(by_key, length).first, tile->row,
                               task->columns, task->transposed, task->columns + LANES);
        other = task->transposed + (size_t)(tile->row % LANES) * (task->columns + LANES) + tile->first;
    }
    if (by_query->table) {
        const int last = smaller(tile->first + tile->columns, length) - 1;
        const column_range range = columns_of(by_query, tile->first - tile->row - tile->rows + 1, last - tile->row);
        NAME(product)((const char *)task->query, (size_t)key_columns * 4, tile->rows, by_query->table + range.first,
                      by_query->columns, job->key_width / NUMBERS, task->of_query, range.count, range.count, 0);
        begin_with_query_term(by_query, task->of_query, range, tile->row, tile->rows, tile->first, tile->columns, other,
                              task->columns + LANES, task->scores);
        return;
    }
    for (int r = 0; r < tile->rows; r++)
        memcpy(task->scores + r * tile->columns, other + (size_t)r * (task->columns + LANES),
               (size_t)tile->columns * 4);
}

// The token that a row of a task belongs to.
INLINE int NAME(token_of)(const attention *job, const NAME(task) *task, int row) {
    return job->positions ? (int)job->positions[task->first_token + row] : row;
}

static void NAME(compute_rows)(const attention *job, const NAME(task) *task, NAME(tile_of_map) *tile) {
    const int key_columns = rounded_up(job->key_width, LANES), length = task->length;
    const size_t bytes = number_bytes(job->type);
    NAME(copy_rows)(head_of(job->query, task->first_token + tile->row, task->head, bytes),
                    (size_t)job->query.token * bytes, job->type, tile->rows, job->key_width, task->query,
                    key_columns);
    const char *query = (const char *)task->query;
    const size_t query_bytes = (size_t)key_columns * 4;
    const int32_t *key = task->key + tile->first;
    const int steps = job->key_width / NUMBERS, columns = tile->columns;
    if (job->query_term.table || job->key_term.table) {
        NAME(begin_scores)(job, task, tile);
        NAME(product)(query, query_bytes, tile->rows, key, task->columns, steps, task->scores, columns, columns, 1);
    } else {
        NAME(product)(query, query_bytes, tile->rows, key, task->columns, steps, task->scores, columns, columns, 0);
    }
    tile->left = (const char *)task->weights;
    tile->left_bytes = (size_t)tile->columns * 4 / NUMBERS;
    for (int r = 0; r < tile->rows; r++) {
        const int token = NAME(token_of)(job, task, tile->row + r);
        const int from = band_start(job, token), to = band_end(job, token, length);
        char *weights = (char *)task->weights + (size_t)r * tile->left_bytes;
        if (job->positions) memset(weights, 0, tile->left_bytes);  // the rows of the tile may be far apart
        const int start = from - tile->first, stop = to - tile->first;
        float *scores = task->scores + r * tile->columns;
        if (job->bias)
            NAME(add_bias)(job, task->head, tile->first - token, smaller(tile->columns, length - tile->first),
                           scores);
        tile->share[r] = 1 / NAME(weigh)(scores, start, stop, tile->columns, job->scale, weights);
        if (job->kept) {
            char *kept = job->kept[task->first_sequence] + map_row(job, task->head, token, length) * bytes;
            weights += (size_t)start * 4 / NUMBERS;
            NAME(keep_row)(weights, tile->share[r], from, to, length, kept, job->type);
        }
    }
}

static void NAME(read_rows)(const attention *job, const NAME(task) *task, NAME(tile_of_map) *tile) {
    const int length = task->length, end = tile->row + tile->rows;
    const size_t bytes = number_bytes(job->map_type);
    const size_t row_bytes = (size_t)(job->packed ? tile->row + 1 : length) * bytes;
    const char *map = job->maps[task->first_sequence] +
                      (map_row(job, task->head, tile->row, length) + tile->first) * bytes;
    for (int r = 0; r < tile->rows; r++) tile->share[r] = 1;
    // Read rows in place, unless they have another type or the last word would extend beyond the record.
    if (PAIRS && !job->packed && (tile->first + tile->steps * NUMBERS <= length || end < length)) {
        tile->left = map;
        tile->left_bytes = row_bytes;
        return;
    }
    tile->left = (const char *)task->weights;
    tile->left_bytes = (size_t)tile->columns * 4 / NUMBERS;
    const int count = (job->packed ? tile->row + 1 : band_end(job, end - 1, length)) - tile->first;
    NAME(copy_map_rows)(map, row_bytes, job->map_type, job->packed, tile->rows, count, tile->columns,
                        (char *)task->weights);
}

// Take memory for the layouts of `sequences` sequences of at most `most` tokens.
static NAME(task) NAME(task_for)(const attention *job, int head, int most, int sequences) {
    const int columns = rounded_up(most, LANES), value_columns = rounded_up(job->width, LANES);
    const int key_steps = job->key_width / NUMBERS, key_columns = rounded_up(job->key_width, LANES);
    const size_t value_words = (size_t)rounded_up(most, NUMBERS) / NUMBERS * value_columns;
    NAME(task) task = {.head = head, .sequences = sequences, .columns = columns,
                       .value_columns = value_columns, .value_words = value_words};
    const int computes = !job->maps;
    const int of_query = computes && job->query_term.table ? columns_within(&job->query_term, most).count : 0;
    const int of_key = computes && job->key_term.table ? columns_within(&job->key_term, most).count + LANES : 0;
    // Products at sixteen distances may be read from behind the last one.
    const size_t query_products = (size_t)ROWS * of_query + 2 * LANES, key_products = (size_t)columns * of_key + LANES;
    const size_t transposed = of_key ? (size_t)LANES * (columns + LANES) : 0;
    // Every part is a whole number of vectors, so every part is aligned to vectors.
    task.result = (float *)scratch_of(4 * ((size_t)ROWS * (value_columns + 2 * columns + key_columns) +
                                           (size_t)key_steps * columns + (size_t)sequences * value_words +
                                           query_products + key_products + transposed));
    task.scores = task.result + ROWS * value_columns;
    task.weights = (int32_t *)(task.scores + ROWS * columns);
    task.query = task.weights + ROWS * columns;
    task.value = task.query + ROWS * key_columns;
    task.key = task.value + (size_t)sequences * value_words;
    task.of_query = (float *)(task.key + (size_t)key_steps * columns);
    task.of_key = task.of_query + query_products;
    task.transposed = task.of_key + key_products;
    task.of_key_row = of_key;
    return task;
}

// Lay out K and V of `count` tokens from token `start` of a sequence on. `row` is the row of the first of them.
static void NAME(lay_out)(const attention *job, NAME(task) *task, int sequence, int start, int count,
                          int64_t row) {
    const size_t bytes = number_bytes(job->type);
    if (!job->maps && !sequence)
        NAME(lay_out_key)(head_of(job->key, row, task->head, bytes), (size_t)job->key.token * bytes, job->type,
                          count, job->key_width, task->key + start, task->columns);
    NAME(lay_out_value)(head_of(job->value, row, task->head, bytes), (size_t)job->value.token * bytes,
                        job->type, start, count, job->width, task->value + sequence * task->value_words,
                        task->value_columns);
}

// Compute the context of the rows from `start` to `end` - 1 of a task's sequences.
static void NAME(context_of)(const attention *job, const NAME(task) *task, int start, int end) {
    const size_t bytes = number_bytes(job->type), context_bytes = (size_t)job->context.token * bytes;
    for (int row = start; row < end; row += ROWS) {
        const int rows = smaller(end - row, ROWS);
        const int first = band_start(job, NAME(token_of)(job, task, row)) / COLUMNS_TOGETHER * COLUMNS_TOGETHER;
        const int count = band_end(job, NAME(token_of)(job, task, row + rows - 1), task->length) - first;
        NAME(tile_of_map) tile = {row, rows, first, rounded_up(count, LANES),
                                  rounded_up(count, NUMBERS) / NUMBERS};
        BEGIN_TILES(rows, tile.steps);
        if (job->maps) NAME(read_rows)(job, task, &tile);
        else NAME(compute_rows)(job, task, &tile);
        for (int s = 0; s < task->sequences; s++) {
            const int32_t *value =
                task->value + s * task->value_words + (size_t)first / NUMBERS * task->value_columns;
            NAME(product)(tile.left, tile.left_bytes, rows, value, task->value_columns, tile.steps,
                          task->result, task->value_columns, task->value_columns, 0);
            char *to = head_of(job->context, task->first_token + s * task->length + row, task->head, bytes);
            for (int r = 0; r < rows; r++, to += context_bytes)
                for (int at = 0; at < job->width; at += LANES)
                    store_some(to + at * bytes, job->type,
                               *(floats *)(task->result + r * task->value_columns + at) * tile.share[r],
                               job->width - at);
        }
    }
    END_TILES();
}

static void NAME(head)(const attention *job, int run, int head) {
    const int first = (int)job->runs[run], sequences = (int)job->runs[run + 1] - first;
    const int length = (int)(job->offsets[first + 1] - job->offsets[first]);
    NAME(task) task = NAME(task_for)(job, head, length, sequences);
    task.first_sequence = first;
    task.length = length;
    task.first_token = job->offsets[first];
    for (int s = 0; s < sequences; s++)
        NAME(lay_out)(job, &task, s, 0, length, task.first_token + s * length);
    if (!job->maps && job->key_term.table) NAME(multiply_key_term)(job, &task);
    NAME(context_of)(job, &task, 0, length);
}

// Lay out the given tokens in front of a tree. K is rotated in a copy.
static void NAME(lay_out_given)(const attention *job, NAME(task) *task, const given_tokens *given) {
    const size_t bytes = number_bytes(job->type), key_bytes = (size_t)job->key_width * bytes;
    char *const turned = given->half ? given_space((size_t)given->block_tokens * key_bytes) : 0;
    for (int start = 0, block = 0; start < given->tokens; start += given->block_tokens, block++) {
        const int count = smaller(given->block_tokens, given->tokens - start);
        const char *key = given->blocks[block] + given->key, *value = given->blocks[block] + given->value;
        for (int token = 0; turned && token < count; token++) {
            const size_t angles = (size_t)(start + token) * given->half;
            char *turned_key = memcpy(turned + token * key_bytes, key + token * given->slot, key_bytes);
            rotate_head(turned_key, given->cosine + angles, given->sine + angles, given->half, job->type);
        }
        NAME(lay_out_key)(turned ? turned : key, turned ? key_bytes : given->slot, job->type, count,
                          job->key_width, task->key + start, task->columns);
        NAME(lay_out_value)(value, given->slot, job->type, start, count, job->width, task->value,
                            task->value_columns);
    }
}

// The heads of the runs from .. to - 1, in which every run continues its parent or is a root. The order is
// depth first, so when a run is reached, the layouts hold its ancestors in front of it: their tokens keep their
// places, and a run takes the places of the last run that began at its position. given: the tokens in front of
// the roots, or null.
static void NAME(heads_of_tree)(const attention *job, const given_tokens *given, const int64_t *starts, int from,
                                int to) {
    int64_t most = 0;
    for (int run = from; run < to; run++) {
        const int64_t end = starts[run] + job->offsets[run + 1] - job->offsets[run];
        if (end > most) most = end;
    }
    NAME(task) task = NAME(task_for)(job, 0, (int)most + LANES, 1);
    if (given) NAME(lay_out_given)(job, &task, given);
    for (int run = from; run < to; run++) {
        const int start = (int)starts[run], count = (int)(job->offsets[run + 1] - job->offsets[run]);
        NAME(lay_out)(job, &task, 0, start, count, job->offsets[run]);
        task.length = start + count;
        task.first_token = job->offsets[run] - start;
        for (task.head = 0; task.head < job->heads; task.head++) NAME(context_of)(job, &task, start, task.length);
    }
}

// The heads of a run whose rows attend to the given tokens up to their own position. The keys and values of the
// rows themselves are among the given ones.
static void NAME(heads_of_scattered)(const attention *job, const given_tokens *given, int run) {
    NAME(task) task = NAME(task_for)(job, 0, given->tokens + LANES, 1);
    NAME(lay_out_given)(job, &task, given);
    task.length = given->tokens;
    task.first_token = job->offsets[run];
    const int rows = (int)(job->offsets[run + 1] - job->offsets[run]);
    for (task.head = 0; task.head < job->heads; task.head++) NAME(context_of)(job, &task, 0, rows);
}

#undef NAME
#undef NUMBERS
#undef BEGIN_TILES
#undef END_TILES
#undef COLUMNS_TOGETHER
