// The tiles of AMX: registers of up to 16 rows of 64 bytes. One instruction multiplies two of them. A row of the left
// one holds the numbers of 16 steps, which are pairs of bfloat16 or four levels; a row of the right one is one step of
// 16 columns.
#pragma once

#define TILE_STEPS 16
#define TILE_ROWS 16              // the most rows of a left side
#define TILE_BYTES 64

// Registers 0 to 3 hold sums, and 4 and 5 too if no steps are left over, or else the sides of the steps left over.
#define LEFT_REST 4
#define RIGHT_REST 5
#define LEFT 6
#define RIGHT 7

// See LDTILECFG in the manual of the instructions.
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

// Give the registers their shapes, for this number of rows (1 to 16) and of steps left over (0 to 15), of 4 bytes each.
// All are zero afterwards.
static void shape_tiles(int rows, int rest) {
    tile_shapes shapes = {.palette = 1};
    for (int t = 0; t <= RIGHT; t++) {
        shapes.row_bytes[t] = (uint16_t)(t == LEFT_REST && rest ? 4 * rest : TILE_BYTES);
        shapes.rows[t] = (uint8_t)(t == RIGHT ? TILE_STEPS : t == RIGHT_REST && rest ? rest : rows);
    }
    _tile_loadconfig(&shapes);
}

#define MULTIPLY_STEPS(left, right)                           \
    do {                                                      \
        _tile_loadd(left, a + 4 * step, a_bytes);             \
        _tile_loadd(right, from, b_row * 4);                  \
        _tile_dpbf16ps(0, left, right);                       \
        if (!two) break;                                      \
        _tile_loadd(right, from + LANES, b_row * 4);          \
        _tile_dpbf16ps(1, left, right);                       \
    } while (0)

// out[row][columns] = a[row][steps] @ b[steps][columns] of pairs of bfloat16, after shape_tiles for this number of
// rows, and for the rest of the steps unless they are whole tiles. adds: a constant, whether to add to what `out`
// holds.
INLINE void product_of_pairs(const char *a, size_t a_bytes, int rows, const int32_t *b, int b_row, int steps,
                             float *out, int out_row, int columns, const int adds) {
    (void)rows;
    for (int column = 0; column < columns; column += 2 * LANES, b += 2 * LANES, out += 2 * LANES) {
        const int two = column + LANES < columns;
        _tile_zero(0), _tile_zero(1);
        if (adds) _tile_loadd(0, out, out_row * 4);
        if (adds && two) _tile_loadd(1, out + LANES, out_row * 4);
        for (int step = 0; step < steps; step += TILE_STEPS) {
            const int32_t *from = b + (size_t)step * b_row;
            if (step + TILE_STEPS <= steps) MULTIPLY_STEPS(LEFT, RIGHT);
            else MULTIPLY_STEPS(LEFT_REST, RIGHT_REST);
        }
        _tile_stored(0, out, out_row * 4);
        if (two) _tile_stored(1, out + LANES, out_row * 4);
    }
}
