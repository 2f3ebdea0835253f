// Linear layers with bias, and GELU or residual and layer norm behind them: bfloat16 in and out, weights in
// bfloat16 or int8.
//
// A task takes a block of rows through a range of columns. With int8 weights it first quantises its rows, one
// scale a row, so that no quantised activation ever reaches memory.

#include <algorithm>
#include <cmath>
#include <vector>

#include <omp.h>

#include "tile.h"

namespace maxsimd {

constexpr int TILE_ROWS = 12, TILE_BLOCKS = 2, PANEL = TILE_BLOCKS * LANES;
constexpr int64_t MOST_ROWS = 8 * TILE_ROWS;  // of a task: they stay in the second-level cache

struct Linear {
    const uint16_t* x;  // bfloat16 [rows], x_stride apart
    int64_t x_stride, rows, inputs;
    const Unit* weights;         // packed, see tile.h
    const float* weight_scales;  // [columns], int8 only
    const int32_t* weight_sums;  // [columns], int8 only
    const float* bias;           // [columns] or null
    int64_t columns;
    bool gelu;
    uint16_t* out;  // bfloat16 [rows][columns]
};

// Layer norm of a linear layer's output plus another input of the same shape.
struct Norm {
    const uint16_t* residual;  // bfloat16 [rows], residual_stride apart; null for no norm
    int64_t residual_stride;
    const float *weight, *bias;  // [columns]
    float epsilon;
};

// x * Phi(x). Phi(x) - 1/2 is x times a polynomial in x * x, fitted on [-4.5, 4.5] (greatest error of the
// product 3e-5, a tenth of what bfloat16 rounds away); outside of it Phi is 0 or 1 as far as float32 can say.
inline __m512 gelu(__m512 x) {
    constexpr float fit[] = {0.15690508f, -0.07719228f, 0.05469175f, -0.04013447f, 0.02837208f, -0.01891483f,
                             0.01115702f, -0.00541324f, 0.00307923f, -0.00225917f, 0.00081934f};
    const __m512 bound = _mm512_set1_ps(4.5f);
    x = _mm512_max_ps(x, _mm512_set1_ps(-4.5f));  // at the very left there is nothing but a zero
    const __m512 near = _mm512_min_ps(x, bound);
    const __m512 s = _mm512_fmsub_ps(_mm512_mul_ps(near, near), _mm512_set1_ps(2 / (4.5f * 4.5f)),
                                     _mm512_set1_ps(1));
    __m512 sum = _mm512_set1_ps(fit[10]);
    for (int power = 9; power >= 0; power--) sum = _mm512_fmadd_ps(sum, s, _mm512_set1_ps(fit[power]));
    return _mm512_mul_ps(x, _mm512_fmadd_ps(near, sum, _mm512_set1_ps(0.5f)));
}

// A row of bfloat16 as unsigned bytes around 128, filled up with such zeros; returns its scale.
inline float quantise(const uint16_t* row, int64_t inputs, uint8_t* out) {
    // Without their sign, bfloat16 numbers are ordered as the integers that their bits are.
    __m512i largest = _mm512_setzero_si512();
    for (int64_t i = 0; i < inputs; i += 2 * LANES) {
        const int64_t left = inputs - i;
        const __mmask32 mask = left >= 2 * LANES ? 0xffffffff : (1u << left) - 1;
        const __m512i size = _mm512_and_si512(_mm512_maskz_loadu_epi16(mask, row + i), _mm512_set1_epi16(0x7fff));
        largest = _mm512_max_epu16(largest, size);
    }
    const __m512i upper = _mm512_srli_epi32(largest, 16);
    const __m512i lower = _mm512_and_si512(largest, _mm512_set1_epi32(0xffff));
    const int most = _mm512_reduce_max_epi32(_mm512_max_epi32(upper, lower)) << 16;
    float size;
    std::memcpy(&size, &most, sizeof size);
    const __m512 inverse = _mm512_set1_ps(size > 0 ? 127 / size : 0);
    // Added to a small number, this leaves its nearest integer in the lowest bits, and 128 on top of it.
    const __m512 rounder = _mm512_set1_ps(12582912.0f + 128);
    for (int64_t i = 0; i < round_up(inputs, 4); i += LANES) {
        const __m512 values = load_bfloat16(row + i, first_lanes(inputs - i));
        const __m512i rounded = _mm512_castps_si512(_mm512_fmadd_ps(values, inverse, rounder));
        _mm_mask_storeu_epi8(out + i, first_lanes(round_up(inputs, 4) - i), _mm512_cvtepi32_epi8(rounded));
    }
    return size / 127;
}

// What sums begin from, and what becomes of them: bfloat16 sums begin from the bias.
template <class Number>
struct Edge {
    __m512 bias;
    Edge(const Linear& linear, int64_t column, __mmask16 mask)
        : bias(linear.bias ? _mm512_maskz_loadu_ps(mask, linear.bias + column) : _mm512_setzero_ps()) {}
    __m512 begin() const { return bias; }
    __m512 end(__m512 sum, float) const { return sum; }
};

// The unsigned bytes are 128 too large, which adds 128 times the sum of a column's weights.
template <>
struct Edge<Int8> {
    __m512 bias, scales;
    __m512i excess;
    Edge(const Linear& linear, int64_t column, __mmask16 mask)
        : bias(linear.bias ? _mm512_maskz_loadu_ps(mask, linear.bias + column) : _mm512_setzero_ps()),
          scales(_mm512_maskz_loadu_ps(mask, linear.weight_scales + column)),
          excess(_mm512_slli_epi32(_mm512_maskz_loadu_epi32(mask, linear.weight_sums + column), 7)) {}
    __m512i begin() const { return _mm512_sub_epi32(_mm512_setzero_si512(), excess); }
    __m512 end(__m512i sum, float row_scale) const {
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scales, _mm512_set1_ps(row_scale)), bias);
    }
};

// `rows` and `scales` are of the tile, `out_row` its first row in the output.
template <class Number, int ROWS, int BLOCKS>
void multiply_tile(const Linear& linear, const Unit* rows, int64_t stride, const float* scales, int64_t out_row,
                   int64_t column, int64_t units) {
    typename Number::Sum sums[ROWS][BLOCKS];
#pragma GCC unroll 4
    for (int block = 0; block < BLOCKS; block++) {
        const int64_t at = column + block * LANES;
        const auto begin = Edge<Number>(linear, at, first_lanes(linear.columns - at)).begin();
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) sums[row][block] = begin;
    }
    multiply<Number, ROWS, BLOCKS>(rows, stride, linear.weights + column * units, units * LANES, units, sums);
#pragma GCC unroll 4
    for (int block = 0; block < BLOCKS; block++) {
        const int64_t at = column + block * LANES;
        const __mmask16 mask = first_lanes(linear.columns - at);
        const Edge<Number> edge(linear, at, mask);
        uint16_t* out = linear.out + out_row * linear.columns + at;
        if (linear.gelu) {
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; row++)
                store_bfloat16(out + row * linear.columns, mask, gelu(edge.end(sums[row][block], scales[row])));
        } else {
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; row++)
                store_bfloat16(out + row * linear.columns, mask, edge.end(sums[row][block], scales[row]));
        }
    }
}

template <class Number, int ROWS>
void multiply_rows(int present, const Linear& linear, const Unit* rows, int64_t stride, const float* scales,
                   int64_t out_row, int64_t column, int64_t units) {
    if constexpr (ROWS > 1) {
        if (present < ROWS) {
            multiply_rows<Number, ROWS - 1>(present, linear, rows, stride, scales, out_row, column, units);
            return;
        }
    }
    if (linear.columns - column > LANES)
        multiply_tile<Number, ROWS, 2>(linear, rows, stride, scales, out_row, column, units);
    else
        multiply_tile<Number, ROWS, 1>(linear, rows, stride, scales, out_row, column, units);
}

template <class Number>
void multiply_task(const Linear& linear, const Unit* rows, int64_t stride, const float* scales, int64_t first_row,
                   int64_t count, int64_t first_column, int64_t last_column, int64_t units) {
    // Tiles of nearly equal height, so that none is too low to keep the multipliers busy.
    const int64_t tiles = (count + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t column = first_column; column < last_column; column += PANEL)
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t row = count * tile / tiles, stop = count * (tile + 1) / tiles;
            multiply_rows<Number, TILE_ROWS>((int)(stop - row), linear, rows + row * stride, stride, scales + row,
                                             first_row + row, column, units);
        }
}

// A row of the output, made norm(row + residual).
inline void normalise(uint16_t* row, const uint16_t* residual, const Norm& norm, int64_t columns, float* sums) {
    __m512 total = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < columns; i += LANES) {
        const __mmask16 mask = first_lanes(columns - i);
        const __m512 sum = _mm512_add_ps(load_bfloat16(row + i, mask), load_bfloat16(residual + i, mask));
        _mm512_storeu_ps(sums + i, sum);
        total = _mm512_add_ps(total, sum);
    }
    const float mean = _mm512_reduce_add_ps(total) / columns;
    for (int64_t i = 0; i < columns; i += LANES) {
        const __mmask16 mask = first_lanes(columns - i);
        const __m512 off = _mm512_maskz_sub_ps(mask, _mm512_loadu_ps(sums + i), _mm512_set1_ps(mean));
        squares = _mm512_fmadd_ps(off, off, squares);
    }
    const float scale = 1 / std::sqrt(_mm512_reduce_add_ps(squares) / columns + norm.epsilon);
    for (int64_t i = 0; i < columns; i += LANES) {
        const __mmask16 mask = first_lanes(columns - i);
        const __m512 off = _mm512_sub_ps(_mm512_loadu_ps(sums + i), _mm512_set1_ps(mean));
        const __m512 weight = _mm512_maskz_loadu_ps(mask, norm.weight + i);
        const __m512 y = _mm512_fmadd_ps(_mm512_mul_ps(off, _mm512_set1_ps(scale)), weight,
                                         _mm512_maskz_loadu_ps(mask, norm.bias + i));
        store_bfloat16(row + i, mask, y);
    }
}

template <class Number>
void run(const Linear& linear, const Norm& norm) {
    if (linear.rows == 0) return;
    constexpr bool quantised = std::is_same_v<Number, Int8>;
    const int64_t units = quantised ? (linear.inputs + 3) / 4 : linear.inputs / 2;
    const int64_t threads = omp_get_max_threads(), panels = (linear.columns + PANEL - 1) / PANEL;
    // Blocks of rows of equal size, as many for each thread as for the others; few rows are shared out by columns.
    const int64_t tiles = (linear.rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t blocks = std::min(tiles, round_up((linear.rows + MOST_ROWS - 1) / MOST_ROWS, 2 * threads));
    const int64_t splits = std::min(panels, (2 * threads + blocks - 1) / blocks);
    const int64_t most = (linear.rows + blocks - 1) / blocks;
#pragma omp parallel
    {
        std::vector<Unit> quantised_rows(quantised ? most * units : 0);
        std::vector<float> scales(most);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < blocks * splits; task++) {
            const int64_t block = task / splits, split = task % splits;
            const int64_t first_row = linear.rows * block / blocks;
            const int64_t count = linear.rows * (block + 1) / blocks - first_row;
            const int64_t first_column = panels * split / splits * PANEL;
            const int64_t last_column = std::min(linear.columns, panels * (split + 1) / splits * PANEL);
            const uint16_t* x = linear.x + first_row * linear.x_stride;
            const Unit* rows = (const Unit*)x;
            int64_t stride = linear.x_stride / 2;
            if constexpr (quantised) {
                for (int64_t i = 0; i < count; i++)
                    scales[i] = quantise(x + i * linear.x_stride, linear.inputs,
                                         (uint8_t*)(quantised_rows.data() + i * units));
                rows = quantised_rows.data();
                stride = units;
            }
            multiply_task<Number>(linear, rows, stride, scales.data(), first_row, count, first_column, last_column,
                                  units);
        }
        if (norm.residual) {
            std::vector<float> sums(round_up(linear.columns, LANES));
#pragma omp for schedule(static)
            for (int64_t row = 0; row < linear.rows; row++)
                normalise(linear.out + row * linear.columns, norm.residual + row * norm.residual_stride, norm,
                          linear.columns, sums.data());
        }
    }
}

}  // namespace maxsimd

#pragma GCC visibility push(default)
extern "C" {

// Rows [count][units], end to end, packed into blocks of 16 columns: [ceil(count / 16)][units][16].
void maxsimd_pack(const void* rows, int64_t count, int64_t units, void* packed) {
    maxsimd::pack((const maxsimd::Unit*)rows, units, count, units, (maxsimd::Unit*)packed);
}

// x [rows][inputs] -> out [rows][columns], both bfloat16; inputs and x_stride must be even. With a residual
// [rows][columns], its rows residual_stride apart, out is the layer norm of its sum with it.
void maxsimd_linear_bfloat16(const void* x, int64_t x_stride, int64_t rows, int64_t inputs, const void* weights,
                             const float* bias, int64_t columns, int gelu, const void* residual,
                             int64_t residual_stride, const float* norm_weight, const float* norm_bias,
                             float epsilon, void* out) {
    maxsimd::run<maxsimd::BFloat16>(
        {(const uint16_t*)x, x_stride, rows, inputs, (const maxsimd::Unit*)weights, nullptr, nullptr, bias, columns,
         gelu != 0, (uint16_t*)out},
        {(const uint16_t*)residual, residual_stride, norm_weight, norm_bias, epsilon});
}

// As above with int8 weights, a scale for each column and the sum of its weights; inputs may be any number.
void maxsimd_linear_int8(const void* x, int64_t x_stride, int64_t rows, int64_t inputs, const void* weights,
                         const float* weight_scales, const int32_t* weight_sums, const float* bias,
                         int64_t columns, int gelu, const void* residual, int64_t residual_stride,
                         const float* norm_weight, const float* norm_bias, float epsilon, void* out) {
    maxsimd::run<maxsimd::Int8>(
        {(const uint16_t*)x, x_stride, rows, inputs, (const maxsimd::Unit*)weights, weight_scales, weight_sums,
         bias, columns, gelu != 0, (uint16_t*)out},
        {(const uint16_t*)residual, residual_stride, norm_weight, norm_bias, epsilon});
}
}
#pragma GCC visibility pop
