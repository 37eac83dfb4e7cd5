// Products of PAIRS and LEVELS on the tiles of AMX: registers of up to 16 rows of 64 bytes, which one instruction
// multiplies with each other. A tile of weights is 16 steps of 16 outputs, and lies in a panel as the steps do.
#pragma once

#define TILE_STEPS 16
#define TILE_BYTES 64
#define HALF_ROWS 16              // the most rows of a tile
#define PAIR_OF_TILES (2 * HALF_ROWS)

// The registers: the sums of the first half of the rows are 0 to 2, of the second half 3 to 5.
#define ROWS_REGISTER 6
#define WEIGHTS_REGISTER 7

// See LDTILECFG in the manual of the instructions.
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

// Give the tiles of sums and of x this number of rows. All tiles are zero afterwards.
static void shape_tiles(int rows) {
    tile_shapes shapes = {.palette = 1};
    for (int t = 0; t <= WEIGHTS_REGISTER; t++) {
        shapes.row_bytes[t] = TILE_BYTES;
        shapes.rows[t] = (uint8_t)(t == WEIGHTS_REGISTER ? TILE_STEPS : rows);
    }
    _tile_loadconfig(&shapes);
}

#define LOAD_ROWS(from) _tile_loadd(ROWS_REGISTER, from, x_bytes)
#define LOAD_WEIGHTS(column) _tile_loadd(WEIGHTS_REGISTER, panel + (column) * TILE_BYTES, PANEL * 4)
#define MULTIPLY_TILES(sum)                                                         \
    do {                                                                            \
        if (kind == LEVELS) _tile_dpbusd(sum, ROWS_REGISTER, WEIGHTS_REGISTER);     \
        else _tile_dpbf16ps(sum, ROWS_REGISTER, WEIGHTS_REGISTER);                  \
    } while (0)
#define STORE_SUMS(sum, row, column) _tile_stored(sum, sums + (row) * PANEL + (column) * LANES, PANEL * 4)

// What `tile` does, for up to 32 rows, after shape_tiles. halves: a constant, 1 or 2. half_rows: the rows of a half;
// two halves may have a row in common, which is the same in both.
INLINE void tile_by_halves(const char *x, size_t x_bytes, const char *panel, int steps, float *sums, const char *next,
                           size_t next_bytes, const unfinished *before, int rows, int half_rows, const int halves,
                           const matrix_kind kind) {
    const char *second = x + (size_t)(rows - half_rows) * x_bytes;
    _tile_zero(0), _tile_zero(1), _tile_zero(2);
    if (halves == 2) _tile_zero(3), _tile_zero(4), _tile_zero(5);
    for (int step = 0, row = 0; step < steps; panel += TILE_STEPS * PANEL * 4, x += TILE_BYTES, second += TILE_BYTES) {
        LOAD_ROWS(x);
        LOAD_WEIGHTS(0);
        MULTIPLY_TILES(0);
        LOAD_WEIGHTS(1);
        MULTIPLY_TILES(1);
        LOAD_WEIGHTS(2);
        MULTIPLY_TILES(2);
        if (halves == 2) {
            LOAD_ROWS(second);
            MULTIPLY_TILES(5);
            LOAD_WEIGHTS(1);
            MULTIPLY_TILES(4);
            LOAD_WEIGHTS(0);
            MULTIPLY_TILES(3);
        }
        for (const char *end = next + TILE_STEPS * next_bytes; next < end; next += 64) __builtin_prefetch(next, 0, 2);
        step += TILE_STEPS;
        for (const int stop = before->rows * step / steps; row < stop; row++) finish_tile_row(before, row, kind, 1);
    }
    STORE_SUMS(0, 0, 0), STORE_SUMS(1, 0, 1), STORE_SUMS(2, 0, 2);
    if (halves == 1) return;
    const int at = rows - half_rows;
    STORE_SUMS(3, at, 0), STORE_SUMS(4, at, 1), STORE_SUMS(5, at, 2);
}
