// Vectors of sixteen 32-bit lanes, by the compiler's vector extensions. An operation is one instruction on
// AVX-512 and several on other processors.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
// Without this, the compiler keeps arrays of vectors in memory, such as the sums of 7 and 8 rows.
#define UNROLLED _Pragma("clang loop unroll(full)")

typedef float floats __attribute__((vector_size(64)));
typedef float floats_unaligned __attribute__((vector_size(64), aligned(4)));
typedef int32_t words __attribute__((vector_size(64)));
typedef uint32_t unsigned_words __attribute__((vector_size(64)));
typedef int32_t words_unaligned __attribute__((vector_size(64), aligned(4)));
typedef uint16_t halves __attribute__((vector_size(32)));
typedef uint16_t halves_unaligned __attribute__((vector_size(32), aligned(2)));
typedef uint16_t halves_twice __attribute__((vector_size(64)));
typedef _Float16 float16s __attribute__((vector_size(32)));

typedef enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 } number_type;

INLINE size_t number_bytes(number_type type) { return type == FLOAT32 ? 4 : 2; }

INLINE floats every(float x) { return (floats){0} + x; }

// Per lane, a if the condition holds, else b.
INLINE floats either(words condition, floats a, floats b) {
    return (floats)(((words)a & condition) | ((words)b & ~condition));
}

INLINE floats larger(floats a, floats b) { return either(a > b, a, b); }

INLINE words larger_word(words a, words b) { return (words)either(a > b, (floats)a, (floats)b); }

INLINE unsigned_words larger_unsigned(unsigned_words a, unsigned_words b) {
    return (unsigned_words)either((words)(a > b), (floats)a, (floats)b);
}

// Reduce all lanes to one value: fold halves onto each other.
#define FOLD(x, with)                                                                                       \
    x = with(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));        \
    x = with(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));        \
    x = with(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));        \
    x = with(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));

INLINE floats sum_of_two(floats a, floats b) { return a + b; }

INLINE float largest_lane(floats x) {
    FOLD(x, larger)
    return x[0];
}

INLINE float sum_of_lanes(floats x) {
    FOLD(x, sum_of_two)
    return x[0];
}

// A mask of the first `count` lanes.
INLINE words lanes_below(int count) {
    const words lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return lane < count;
}

INLINE floats widened(halves bits, number_type type) {
    if (type == FLOAT16) return __builtin_convertvector((float16s)bits, floats);
    return (floats)(__builtin_convertvector(bits, words) << 16);
}

INLINE floats load(const char *at, number_type type) {
    if (type == FLOAT32) return *(const floats_unaligned *)at;
    return widened(*(const halves_unaligned *)at, type);
}

INLINE floats load_some(const char *at, number_type type, int count) {
    if (count >= LANES) return load(at, type);
    char whole[64] __attribute__((aligned(64))) = {0};
    memcpy(whole, at, (size_t)count * number_bytes(type));
    return load(whole, type);
}

// Round to the nearest bfloat16, ties to even. NaN stays NaN: a NaN from bfloat16 inputs or from arithmetic
// has zeros in the lower half of its bits, so nothing carries into the upper half. With AVX512-BF16, numbers
// below 2^-126 become 0, as in its products.
INLINE halves narrowed(floats x) {
#ifdef __AVX512BF16__
    return (halves)_mm512_cvtneps_pbh((__m512)x);
#else
    words bits = (words)x;
    bits += 0x7fff + ((bits >> 16) & 1);
    return __builtin_convertvector(bits >> 16, halves);
#endif
}

INLINE void store_some(char *at, number_type type, floats x, int count) {
    if (type == FLOAT32) {
        if (count >= LANES) *(floats_unaligned *)at = x;
        else memcpy(at, &x, (size_t)count * 4);
        return;
    }
    halves bits = narrowed(x);
    if (count >= LANES) *(halves_unaligned *)at = bits;
    else memcpy(at, &bits, (size_t)count * 2);
}

// 2^left for |left| <= 1/2, by a polynomial. The coefficients are those of the Taylor series of
// 2^left, with the last one adjusted to the interval.
INLINE floats power_of_remainder(floats left) {
    floats sum = every(1.339887e-3f);
    sum = sum * left + 9.618437e-3f;
    sum = sum * left + 5.550339e-2f;
    sum = sum * left + 2.402265e-1f;
    sum = sum * left + 6.931472e-1f;
    return sum * left + 1.0f;
}

// e^x for x <= 0, with a relative error of 3.4e-6. NaN stays NaN.
INLINE floats exponential(floats x) {
    const float least = -87.0f, base = 1.44269504f;
#ifdef __AVX512F__
    const __m512 exponent = _mm512_max_ps((__m512)every(least), (__m512)x) * base;  // the second operand, if it is NaN
    const __m512 whole = _mm512_roundscale_ps(exponent, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (floats)_mm512_scalef_ps((__m512)power_of_remainder((floats)(exponent - whole)), whole);
#else
    const float to_integer = 12582912.0f;  // 1.5 * 2^23; adding it rounds to an integer
    const floats exponent = either(x < least, every(least), x) * base;
    const floats whole = exponent + to_integer;
    const words power = (words)whole << 23;
    const floats found = (floats)((words)power_of_remainder(exponent - (whole - to_integer)) + power);
    return either(x == x, found, x);
#endif
}

// 1 / x for 1 <= x < 2^126, with a relative error of 1e-7.
INLINE floats reciprocal(floats x) {
#ifdef __AVX512F__
    const floats near = (floats)_mm512_rcp14_ps((__m512)x);
    return near * (2.0f - x * near);
#else
    return 1.0f / x;
#endif
}

// Transpose sixteen rows of sixteen words, in four rounds that interleave rows i and i + 8.
INLINE void transpose(words row[LANES]) {
    for (int round = 0; round < 4; round++) {
        words next[LANES];
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = __builtin_shufflevector(row[i], row[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5,
                                                  21, 6, 22, 7, 23);
            next[2 * i + 1] = __builtin_shufflevector(row[i], row[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12,
                                                      28, 13, 29, 14, 30, 15, 31);
        }
        for (int i = 0; i < LANES; i++) row[i] = next[i];
    }
}
