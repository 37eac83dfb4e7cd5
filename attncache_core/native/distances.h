// Terms of the scores that depend on the distance between two tokens, as in DeBERTa:
//
//   Q[p] . table[row of q - p]  +  K[q] . table[row of p - q]
//
// A table is the same for every text. The rows that occur for a range of distances are adjacent, so the products of
// Q or K with a table are products with some adjacent columns of the table's layout. Then each score takes its
// product. In the first term, the products of a token become scores of its own row. In the second term, they become
// scores of its own column, and blocks of sixteen rows and columns are transposed. Included by attention.c.
#pragma once

typedef struct {
    const int32_t *table;      // [heads, steps, columns], each head laid out like K; null without this term
    // The row of each distance. `rows` points to distance 0. From a distance to the next, the row grows by 0 or 1.
    // LANES - 1 distances beyond the longest sequence are there too.
    const int32_t *rows;
    int32_t columns;           // rows of the table, whole vectors
    int32_t head_words;        // words from one head to the next
} distance_term;

// Adjacent columns of a table's layout, whole vectors.
typedef struct {
    int first, count;
} column_range;

// The columns of the distances from .. to.
INLINE column_range columns_of(const distance_term *term, int from, int to) {
    const int first = term->rows[from] / LANES * LANES;
    return (column_range){first, rounded_up(term->rows[to] + 1 - first, LANES)};
}

// All columns that occur in a sequence of this length.
INLINE column_range columns_within(const distance_term *term, int length) {
    return columns_of(term, 1 - length, length - 1);
}

// Return whether every distance from .. to has a row of its own.
INLINE int has_own_rows(const distance_term *term, int from, int to) {
    return term->rows[to] - term->rows[from] == to - from;
}

// Return the products of a token at sixteen distances from `distance` on. products: of the token with row 0 on.
INLINE floats products_at(const distance_term *term, const float *products, int distance, const int has_own) {
    const int32_t *rows = term->rows + distance;
    const float *first = products + rows[0];
    if (has_own) return *(const floats_unaligned *)first;
    const words index = *(const words_unaligned *)rows - rows[0];  // at most 15, because rows grow by 0 or 1
#ifdef __AVX512F__
    return (floats)_mm512_permutexvar_ps((__m512i)index, (__m512)*(const floats_unaligned *)first);
#else
    floats found;
    for (int lane = 0; lane < LANES; lane++) found[lane] = first[index[lane]];
    return found;
#endif
}

// Begin the scores [rows, columns] of the tokens from `row` on with the first term, for columns from `first` on, added
// to what `other` holds, rows of `other_row`; or null. products: [rows, range.count], of Q with the columns `range`.
static void begin_with_query_term(const distance_term *term, const float *products, column_range range, int row, int rows,
                                  int first, int columns, const float *other, int other_row, float *scores) {
    for (int at = 0; at < columns; at += LANES) {
        const int distance = first + at - row;
        const int has_own = has_own_rows(term, distance - rows + 1, distance + LANES - 1);
        for (int r = 0; r < rows; r++) {
            const float *of_row = products + (size_t)r * range.count - range.first;
            floats score = has_own ? products_at(term, of_row, distance - r, 1)
                                   : products_at(term, of_row, distance - r, 0);
            if (other) score += *(const floats *)(other + (size_t)r * other_row + at);
            *(floats *)(scores + (size_t)r * columns + at) = score;
        }
    }
}

INLINE void transpose_products(const distance_term *term, const float *products, int products_row, int distance,
                               float *to, int to_row, const int has_own) {
    words block[LANES];
    UNROLLED for (int i = 0; i < LANES; i++)
        block[i] = (words)products_at(term, products + (size_t)i * products_row, distance - i, has_own);
    transpose(block);
    UNROLLED for (int i = 0; i < LANES; i++) *(words *)(to + (size_t)i * to_row) = block[i];
}

// Write the second term of sixteen rows of scores from `row` on to `to` [LANES, to_row], for `columns` columns.
// products: [columns, products_row], of K with the columns of the table from `first` on.
static void transpose_key_term(const distance_term *term, const float *products, int products_row, int first, int row,
                               int columns, float *to, int to_row) {
    products -= first;
    for (int at = 0; at < columns; at += LANES, products += (size_t)LANES * products_row) {
        const int distance = row - at;
        if (has_own_rows(term, distance - LANES + 1, distance + LANES - 1))
            transpose_products(term, products, products_row, distance, to + at, to_row, 1);
        else
            transpose_products(term, products, products_row, distance, to + at, to_row, 0);
    }
}
