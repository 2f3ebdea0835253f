// The one inner loop of all kernels here: a tile of rows times blocks of 16 columns, with sums in registers.
//
// Operands are counted in 32-bit units along the dimension that is summed over: one float32, two bfloat16 or
// four int8. Rows are read as they are in memory, `stride` units apart. The other operand is packed: blocks of 16
// columns, `block_stride` apart, each [units][16], so that one load takes a unit of sixteen columns.
//
// Products of bfloat16 and int8 are written in assembly: GCC 12 moves their sums about (two moves for each int8
// product), which costs up to half the speed.
#pragma once

#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <type_traits>

namespace maxsimd {

using Unit = uint32_t;
constexpr int LANES = 16;

// Each kind of number has the count that a unit holds, and the type that the kernels read and write for it.
struct Float32 {
    using Value = float;
    using Sum = __m512;
    static constexpr int PER_UNIT = 1;
    static Sum zero() { return _mm512_setzero_ps(); }
    static Sum add(Sum sum, __m512i row, __m512i columns) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(row), _mm512_castsi512_ps(columns), sum);
    }
};

struct BFloat16 {
    using Value = uint16_t;
    using Sum = __m512;
    static constexpr int PER_UNIT = 2;
    static Sum zero() { return _mm512_setzero_ps(); }
    static Sum add(Sum sum, __m512i row, __m512i columns) {
        asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(row), "v"(columns));
        return sum;
    }
};

// Rows unsigned, columns signed; what is read and written is bfloat16.
struct Int8 {
    using Value = uint16_t;
    using Sum = __m512i;
    static constexpr int PER_UNIT = 4;
    static Sum zero() { return _mm512_setzero_si512(); }
    static Sum add(Sum sum, __m512i row, __m512i columns) {
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(row), "v"(columns));
        return sum;
    }
};

// Calls `work` with a number of the type that a caller means by `kind`: the first is 0.
template <class First, class... Others, class Work>
auto by_kind(int kind, const Work& work) {
    if constexpr (sizeof...(Others) == 0)
        return work(First{});
    else
        return kind == 0 ? work(First{}) : by_kind<Others...>(kind - 1, work);
}

// Adds to `sums`, which the caller has set.
template <class Number, int ROWS, int BLOCKS>
inline __attribute__((always_inline)) void multiply(const Unit* rows, int64_t stride, const Unit* packed,
                                                    int64_t block_stride, int64_t units,
                                                    typename Number::Sum (&sums)[ROWS][BLOCKS]) {
    for (int64_t unit = 0; unit < units; unit++) {
        __m512i columns[BLOCKS];
#pragma GCC unroll 4
        for (int block = 0; block < BLOCKS; block++)
            columns[block] = _mm512_loadu_si512(packed + block * block_stride + unit * LANES);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            const __m512i value = _mm512_set1_epi32((int)rows[row * stride + unit]);
#pragma GCC unroll 4
            for (int block = 0; block < BLOCKS; block++)
                sums[row][block] = Number::add(sums[row][block], value, columns[block]);
        }
    }
}

// The initial sums.
template <class Number, int ROWS, int BLOCKS>
inline __attribute__((always_inline)) void clear(typename Number::Sum (&sums)[ROWS][BLOCKS]) {
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
        for (int block = 0; block < BLOCKS; block++) sums[row][block] = Number::zero();
}

// As above, from zero.
template <class Number, int ROWS, int BLOCKS>
inline __attribute__((always_inline)) void multiply_anew(const Unit* rows, int64_t stride, const Unit* packed,
                                                         int64_t block_stride, int64_t units,
                                                         typename Number::Sum (&sums)[ROWS][BLOCKS]) {
    clear<Number, ROWS, BLOCKS>(sums);
    multiply<Number, ROWS, BLOCKS>(rows, stride, packed, block_stride, units, sums);
}

// The mask of the first `left` of 16 lanes.
inline __mmask16 first_lanes(int64_t left) {
    return left >= LANES ? 0xffff : left <= 0 ? 0 : (__mmask16)((1u << left) - 1);
}

inline __m512 load(const float* from, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, from); }

inline __m512 load(const uint16_t* from, __mmask16 mask) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
}

inline void store(float* to, __mmask16 mask, __m512 values) { _mm512_mask_storeu_ps(to, mask, values); }

inline void store(uint16_t* to, __mmask16 mask, __m512 values) {
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(values));
}

// Two vectors, side by side.
inline void store(float* to, __mmask32 mask, __m512 left, __m512 right) {
    _mm512_mask_storeu_ps(to, (__mmask16)mask, left);
    _mm512_mask_storeu_ps(to + LANES, (__mmask16)(mask >> LANES), right);
}

inline void store(uint16_t* to, __mmask32 mask, __m512 left, __m512 right) {
    _mm512_mask_storeu_epi16(to, mask, (__m512i)_mm512_cvtne2ps_pbh(right, left));
}

inline int64_t round_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// Whether pieces of rows that are `stride` units apart can be kept in the first-level cache together. At a distance of a
// multiple of 2 KiB they compete for few of its sets.
inline bool are_apart(int64_t stride) { return stride % 512 != 0; }

// The least distance of such rows of `units`. Five cache lines more: with one, the pieces of sixteen rows overlap.
inline int64_t apart(int64_t units) { return are_apart(units) ? units : units + 5 * LANES; }

// Sixteen rows of sixteen units, turned.
inline void transpose(__m512i (&rows)[LANES]) {
    __m512i turned[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i += 2) {
        turned[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        turned[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            rows[i + 2 * j] = _mm512_unpacklo_epi64(turned[i + j], turned[i + j + 2]);
            rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(turned[i + j], turned[i + j + 2]);
        }
    // Four units of four rows are in each quarter now.
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
#pragma GCC unroll 2
        for (int j = 0; j < LANES; j += 8) {
            turned[j + i] = _mm512_shuffle_i32x4(rows[j + i], rows[j + 4 + i], 0x88);
            turned[j + 4 + i] = _mm512_shuffle_i32x4(rows[j + i], rows[j + 4 + i], 0xdd);
        }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        rows[i] = _mm512_shuffle_i32x4(turned[i], turned[8 + i], 0x88);
        rows[8 + i] = _mm512_shuffle_i32x4(turned[i], turned[8 + i], 0xdd);
    }
}

// Rows [count][units], `stride` apart, turned into blocks of 16 columns; missing columns are zero.
inline void pack(const Unit* rows, int64_t stride, int64_t count, int64_t units, Unit* packed) {
    for (int64_t first = 0; first < count; first += LANES) {
        const int64_t present = count - first < LANES ? count - first : LANES;
        Unit* block = packed + first * units;
        for (int64_t unit = 0; unit < units; unit++)
            for (int64_t lane = 0; lane < LANES; lane++)
                block[unit * LANES + lane] = lane < present ? rows[(first + lane) * stride + unit] : 0;
    }
}

}  // namespace maxsimd
