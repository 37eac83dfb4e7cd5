// Copy Q, K, V and rows of maps into the layouts of the products in head.h, which includes this file.

#if PAIRS
// Load the first `count` elements, at most sixteen, followed by zeros. Nothing beyond them is read.
INLINE halves halves_some(const char *at, int count) {
    const __mmask16 mask = (__mmask16)(count >= LANES ? 0xffff : count > 0 ? (1 << count) - 1 : 0);
    return (halves)_mm256_maskz_loadu_epi16(mask, at);
}
#endif

// Copy rows of Q [rows, width elements] to rows of whole words.
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

// Copy K [length, width] to [steps, columns]: for each step, the words of all tokens. Up to LANES - 1 columns
// behind the last token are overwritten.
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
                const char *at = from + (size_t)(token + i) * from_bytes +
                                 (size_t)step * (PAIRS ? 4 : number_bytes(type));
#if PAIRS
                block[i] = *(const words_unaligned *)at;
#else
                block[i] = (words)load_some(at, type, steps - step);
#endif
            }
            transpose(block);
            for (int i = 0; i < LANES && step + i < steps; i++)
                *(words_unaligned *)(to + (size_t)(step + i) * columns + token) = block[i];
        }
}

// Copy V [length, width] of the tokens from `start` on to [steps, columns]. With PAIRS, a word holds an element
// of two adjacent tokens; a last token without a partner is paired with 0, and a first token that is the second
// of its pair joins the token that is there.
static void NAME(lay_out_value)(const char *from, size_t from_bytes, number_type type, int start, int length,
                                int width, int32_t *to, int columns) {
    to += (size_t)(start / NUMBERS) * columns;
#if PAIRS
    (void)type;
    if (start % 2) {
        for (int at = 0; at < width; at += LANES) {
            const words high = __builtin_convertvector(*(const halves_unaligned *)(from + 2 * at), words) << 16;
            *(words *)(to + at) = (*(words *)(to + at) & 0xffff) | high;
        }
        length--;
        from += from_bytes;
        to += columns;
    }
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

// Copy `count` elements of each row of a map, followed by zeros up to `columns`. Packed rows grow by one
// element per row, and so does `count`. Nothing beyond a row is read, because the record may end there.
static void NAME(copy_map_rows)(const char *from, size_t from_bytes, number_type type, int packed, int rows,
                                int count, int columns, char *to) {
    const size_t bytes = number_bytes(type);
    for (int r = 0; r < rows; r++, to += (size_t)columns * 4 / NUMBERS) {
        for (int at = 0; at < columns; at += LANES)
#if PAIRS
            *(halves *)(to + 2 * at) = at + LANES <= count ? *(const halves_unaligned *)(from + 2 * at)
                                                           : halves_some(from + 2 * at, count - at);
#else
            *(floats *)(to + 4 * at) =
                at < count ? load_some(from + (size_t)at * bytes, type, count - at) : every(0);
#endif
        from += from_bytes;
        if (packed) from_bytes += bytes, count++;
    }
}
