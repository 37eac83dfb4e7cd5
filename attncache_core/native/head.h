// One head of one run of sequences, written once for two number formats (included twice by attention.c):
//   PAIRS 0: one float32 a word. Any input type, any width.
//   PAIRS 1: two bfloat16 a word, multiplied and added two at a time (AVX512-BF16).
// "Steps" are the words along which a product sums: two numbers each with PAIRS, else one.

#if PAIRS
#define NAME(name) name##_of_pairs
#define NUMBERS 2
#else
#define NAME(name) name##_of_floats
#define NUMBERS 1
#endif

// Rows of a tile: sixteen sums, in registers. Two vectors of columns.
#ifdef __AVX512F__
#define ROWS 8
#else
#define ROWS 2
#endif

// sum + a . b in every lane, a the same word for all.
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

// out[row][0 : 16 vectors] = a[row][steps] @ b[steps][...] for ROWS rows, `vectors` (1 or 2) a constant.
// Rows beyond `rows` repeat the last one: what they give is not used.
INLINE void NAME(tile)(const char *a, size_t a_bytes, int rows, const words *b, size_t b_row, int steps,
                       float *out, size_t out_row, const int vectors) {
    floats sum[ROWS][2];
    const char *from[ROWS];
    for (int r = 0; r < ROWS; r++) {
        from[r] = a + (size_t)(r < rows ? r : rows - 1) * a_bytes;
        sum[r][0] = sum[r][1] = every(0);
    }
    for (int step = 0; step < steps; step++) {
        const words *line = (const words *)((const int32_t *)b + (size_t)step * b_row);
        for (int c = 0; c < vectors; c++) {
            const words right = line[c];
            for (int r = 0; r < ROWS; r++) sum[r][c] = NAME(multiplied)(sum[r][c], from[r] + 4 * step, right);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < vectors; c++) *(floats *)(out + (size_t)r * out_row + c * LANES) = sum[r][c];
}

INLINE void NAME(product)(const char *a, size_t a_bytes, int rows, const int32_t *b, int b_row, int steps,
                          float *out, int columns) {
    int column = 0;
    for (; column + 2 * LANES <= columns; column += 2 * LANES)
        NAME(tile)(a, a_bytes, rows, (const words *)(b + column), b_row, steps, out + column, columns, 2);
    if (column < columns)
        NAME(tile)(a, a_bytes, rows, (const words *)(b + column), b_row, steps, out + column, columns, 1);
}

// Rows [rows, width numbers] of Q, each of whole words.
static void NAME(copy_rows)(const char *from, size_t from_bytes, number_type type, int rows, int width,
                            int32_t *to, int to_row) {
    for (int r = 0; r < rows; r++, from += from_bytes, to += to_row) {
#if PAIRS
        (void)type;
        memcpy(to, from, (size_t)width * 2);
#else
        for (int at = 0; at < width; at += LANES)
            *(floats *)(to + at) = load_some(from + (size_t)at * number_bytes(type), type, width - at);
#endif
    }
}

// K [length, width] -> [steps, columns]: a step's words of all tokens side by side.
static void NAME(lay_out_key)(const char *from, size_t from_bytes, number_type type, int length, int width,
                              int32_t *to, int columns) {
    const int steps = width / NUMBERS;
    for (int token = 0; token < length; token += LANES)
        for (int step = 0; step < steps; step += LANES) {
            words block[LANES];
            for (int i = 0; i < LANES; i++) {
                if (token + i >= length) {
                    block[i] = (words){0};
                    continue;
                }
                const char *at = from + (size_t)(token + i) * from_bytes + (size_t)step * (PAIRS ? 4 : number_bytes(type));
#if PAIRS
                block[i] = *(const words_unaligned *)at;
#else
                block[i] = (words)load_some(at, type, steps - step);
#endif
            }
            transpose(block);
            for (int i = 0; i < LANES && step + i < steps; i++)
                *(words *)(to + (size_t)(step + i) * columns + token) = block[i];
        }
}

// V [length, width] -> [steps, columns]: with PAIRS, two tokens' numbers interleaved, the last one's with 0.
static void NAME(lay_out_value)(const char *from, size_t from_bytes, number_type type, int length, int width,
                                int32_t *to, int columns) {
#if PAIRS
    (void)type;
    for (int token = 0; token < length; token += 2, to += columns) {
        const char *first = from + (size_t)token * from_bytes, *second = first + from_bytes;
        for (int at = 0; at < width; at += LANES) {
            const words low = __builtin_convertvector(*(const halves_unaligned *)(first + 2 * at), words);
            words both = low;
            if (token + 1 < length)
                both |= __builtin_convertvector(*(const halves_unaligned *)(second + 2 * at), words) << 16;
            *(words *)(to + at) = both;
        }
    }
#else
    NAME(copy_rows)(from, from_bytes, type, length, width, to, columns);
#endif
}

// exp(scale (score - the row's largest)) as words that multiply V; returns their sum.
INLINE float NAME(weigh)(const float *scores, int length, int columns, float scale, char *weights) {
    floats most = every(-__builtin_inff());
    const words last = lanes_below(length - (columns - LANES));
    for (int at = 0; at < columns - LANES; at += LANES) most = larger(most, *(const floats *)(scores + at));
    most = larger(most, either(last, *(const floats *)(scores + columns - LANES), most));
    const float largest = largest_lane(most);
    floats sum = every(0);
    for (int at = 0; at < columns; at += LANES) {
        floats weight = exponential((*(const floats *)(scores + at) - largest) * scale);
        if (at == columns - LANES) weight = either(last, weight, every(0));
        sum += weight;
#if PAIRS
        *(__m256bh *)(weights + 2 * at) = _mm512_cvtneps_pbh((__m512)weight);
#else
        *(floats *)(weights + 4 * at) = weight;
#endif
    }
    return sum_of_lanes(sum);
}

// A row of weights, each its share of their sum: a row of the map, as numbers of `type`.
static void NAME(keep_row)(const char *weights, float share, int length, char *to, number_type type) {
    for (int at = 0; at < length; at += LANES) {
        const floats weight = load(weights + 4 / NUMBERS * at, PAIRS ? BFLOAT16 : FLOAT32);
        store_some(to + (size_t)at * number_bytes(type), type, weight * share, length - at);
    }
}

// Rows of a record's maps as words; whole rows only, so that nothing beyond the record is read.
static void NAME(copy_maps)(const char *from, number_type type, int rows, int length, int row_words,
                            int32_t *to) {
    const size_t row_bytes = (size_t)length * number_bytes(type);
#if PAIRS
    for (int r = 0; r < rows; r++) {
        to[r * row_words + length / 2] = 0;
        memcpy(to + r * row_words, from + r * row_bytes, row_bytes);
    }
#else
    NAME(copy_rows)(from, row_bytes, type, rows, length, to, row_words);
#endif
}

static void NAME(head)(const attention *job, int run, int head) {
    const int first_sequence = (int)job->runs[run], sequences = (int)job->runs[run + 1] - first_sequence;
    const int length = (int)(job->offsets[first_sequence + 1] - job->offsets[first_sequence]);
    const int width = job->width, columns = rounded_up(length, LANES), value_columns = rounded_up(width, LANES);
    const int steps = rounded_up(width, NUMBERS) / NUMBERS, map_steps = rounded_up(length, NUMBERS) / NUMBERS;
    const int weight_words = columns / NUMBERS;
    const size_t bytes = number_bytes(job->type), head_bytes = (size_t)head * width * bytes;
    const size_t query_bytes = (size_t)job->query_row * bytes, value_bytes = (size_t)job->value_row * bytes;
    const size_t value_words = (size_t)map_steps * value_columns;

    // Every part is a whole number of vectors, so each begins on a vector's border.
    float *result = (float *)scratch_of(4 * ((size_t)ROWS * (value_columns + 2 * columns + value_columns) +
                                             (size_t)steps * columns + (size_t)sequences * value_words));
    float *scores = result + ROWS * value_columns;
    int32_t *weights = (int32_t *)(scores + ROWS * columns);
    int32_t *query = weights + ROWS * columns;
    int32_t *value = query + ROWS * value_columns;
    int32_t *key = value + (size_t)sequences * value_words;

    const int64_t first_token = job->offsets[first_sequence];
    if (!job->maps)
        NAME(lay_out_key)((const char *)job->key + (size_t)first_token * query_bytes + head_bytes, query_bytes,
                          job->type, length, width, key, columns);
    for (int s = 0; s < sequences; s++)
        NAME(lay_out_value)((const char *)job->value + (size_t)(first_token + s * length) * value_bytes + head_bytes,
                            value_bytes, job->type, length, width, value + s * value_words, value_columns);

    const size_t map_bytes = number_bytes(job->map_type);
    for (int row = 0; row < length; row += ROWS) {
        const int rows = length - row < ROWS ? length - row : ROWS;
        const char *left = (const char *)weights;
        size_t left_bytes = (size_t)weight_words * 4;
        float share[ROWS];
        if (job->maps) {
            const char *map = job->maps[first_sequence] + ((size_t)head * length + row) * length * map_bytes;
            // In place, unless the rows are of another type or the last word would reach beyond the record.
            if (PAIRS && (length % 2 == 0 || row + rows < length)) {
                left = map;
                left_bytes = (size_t)length * 2;
            } else {
                NAME(copy_maps)(map, job->map_type, rows, length, weight_words, weights);
            }
            for (int r = 0; r < rows; r++) share[r] = 1;
        } else {
            NAME(copy_rows)((const char *)job->query + (size_t)(first_token + row) * query_bytes + head_bytes,
                            query_bytes, job->type, rows, width, query, value_columns);
            NAME(product)((const char *)query, (size_t)value_columns * 4, rows, key, columns, steps, scores, columns);
            for (int r = 0; r < rows; r++) {
                char *row_weights = (char *)(weights + r * weight_words);
                share[r] = 1 / NAME(weigh)(scores + r * columns, length, columns, job->scale, row_weights);
                if (job->kept)
                    NAME(keep_row)(row_weights, share[r], length,
                                   job->kept[first_sequence] + ((size_t)head * length + row + r) * length * bytes,
                                   job->type);
            }
        }
        for (int s = 0; s < sequences; s++) {
            NAME(product)(left, left_bytes, rows, value + s * value_words, value_columns, map_steps, result, value_columns);
            char *to = (char *)job->context + ((size_t)(first_token + s * length + row) * job->context_row) * bytes + head_bytes;
            for (int r = 0; r < rows; r++, to += (size_t)job->context_row * bytes)
                for (int at = 0; at < width; at += LANES)
                    store_some(to + at * bytes, job->type, *(floats *)(result + r * value_columns + at) * share[r],
                               width - at);
        }
    }
}

#undef NAME
#undef NUMBERS
#undef ROWS
