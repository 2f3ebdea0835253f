// Linear layers for processors with AVX2 alone: weights in int8, rows and results in float32; bias, then GELU or
// residual and layer norm. A library of its own, because it is compiled for fewer instructions than the other.
//
// Rows are rounded to unsigned bytes whose zero is 128, each row with a scale of its own. AVX2 adds two products of
// bytes in 16 bits, which hold them if weights have 7 bits: 2 * 255 * 63 < 2^15. Sums are exact integers, so that a
// row's results are the same to the last bit whatever other rows there are.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include <immintrin.h>
#include <omp.h>

#include "avx2_functions.h"

namespace maxsimd_avx2 {

constexpr int BLOCK = 8, PANEL = 2 * BLOCK;  // columns of a packed block, and columns that are multiplied together
constexpr int TILE_ROWS = 4;
constexpr int64_t MOST_ROWS = 16 * TILE_ROWS;  // of a task, so that they stay in the second-level cache

struct Layer {
    const float* x;  // [rows], x_stride apart
    int64_t x_stride, rows, inputs;
    const int32_t* weights;  // [blocks][units][8], four weights a unit; padded with zeros to whole panels
    int64_t units;
    const float* scales;   // [columns], padded to whole panels, as are the next two
    const int32_t* sums;   // the sums of each column's weights
    const float* bias;     // zeros where there is none
    int64_t columns;
    bool gelu;
    float* out;  // [rows][columns]
};

struct Norm {
    const float* residual;  // [rows], residual_stride apart; null for no norm
    int64_t residual_stride;
    const float *weight, *bias;  // [columns]
    float epsilon;
};

// The rows of a task in bytes, each a whole number of units, and their scales.
struct Rows {
    int64_t stride;  // in units
    std::unique_ptr<int32_t[]> bytes;
    float scales[MOST_ROWS];

    explicit Rows(int64_t units) : stride(units + (units % 256 ? 0 : 16)), bytes(new int32_t[MOST_ROWS * stride]) {}
    int32_t* at(int64_t row) { return bytes.get() + row * stride; }
};

// Rounds a row to bytes and pads it with zeros; returns its scale, which is NaN if one of its numbers is.
inline float quantise(const float* row, int64_t inputs, int64_t units, uint8_t* out) {
    const __m256 no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256 largest = _mm256_setzero_ps(), strange = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + BLOCK <= inputs; i += BLOCK) {
        const __m256 x = _mm256_loadu_ps(row + i);
        largest = _mm256_max_ps(largest, _mm256_and_ps(x, no_sign));
        strange = _mm256_or_ps(strange, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    }
    float size = reduce_max(largest);
    bool is_strange = _mm256_movemask_ps(strange) != 0;
    for (int64_t j = i; j < inputs; j++) {
        size = std::max(size, std::fabs(row[j]));
        is_strange |= std::isnan(row[j]);
    }
    if (is_strange) size = NAN;
    // The inverse of a tiny number would be infinite.
    const float inverse = size > 1e-30f ? 127 / size : 0;
    // Adding this to a small number leaves its nearest integer, plus 128, in the lowest bits.
    const float rounder = 12582912.0f + 128;
    const __m256 factor = _mm256_set1_ps(inverse), shift = _mm256_set1_ps(rounder);
    const __m256i lowest = _mm256_set1_epi32(0xff), in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    i = 0;
    for (; i + 4 * BLOCK <= inputs; i += 4 * BLOCK) {
        __m256i part[4];
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++)
            part[p] = _mm256_and_si256(
                lowest,
                _mm256_castps_si256(_mm256_add_ps(_mm256_mul_ps(_mm256_loadu_ps(row + i + p * BLOCK), factor), shift)));
        const __m256i left = _mm256_packus_epi32(part[0], part[1]), right = _mm256_packus_epi32(part[2], part[3]);
        const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(left, right), in_order);
        _mm256_storeu_si256((__m256i*)(out + i), bytes);
    }
    for (; i < inputs; i++) {
        const float shifted = row[i] * inverse + rounder;
        uint32_t bits;
        std::memcpy(&bits, &shifted, sizeof bits);
        out[i] = (uint8_t)bits;
    }
    std::memset(out + inputs, 128, units * 4 - inputs);  // whose weights are zero
    return size > 1e-30f || is_strange ? size / 127 : 0;
}

// A tile of rows times a panel of columns, into `sums` [ROWS][PANEL].
template <int ROWS>
inline __attribute__((always_inline)) void multiply(const int32_t* rows, int64_t stride, const int32_t* left,
                                                    const int32_t* right, int64_t units, __m256i (&sums)[ROWS][2]) {
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; row++) sums[row][0] = sums[row][1] = _mm256_setzero_si256();
    for (int64_t unit = 0; unit < units; unit++) {
        const __m256i columns[2] = {_mm256_loadu_si256((const __m256i*)(left + unit * BLOCK)),
                                    _mm256_loadu_si256((const __m256i*)(right + unit * BLOCK))};
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++) {
            const __m256i value = _mm256_set1_epi32(rows[row * stride + unit]);
#pragma GCC unroll 2
            for (int block = 0; block < 2; block++)
                sums[row][block] = _mm256_add_epi32(
                    sums[row][block], _mm256_madd_epi16(_mm256_maddubs_epi16(value, columns[block]), ones));
        }
    }
}

// Bytes are 128 too large, which adds 128 times the sum of a column's weights.
inline void finish(const Layer& layer, __m256i sum, float row_scale, int64_t row, int64_t column) {
    const __m256i excess = _mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)(layer.sums + column)), 7);
    const __m256 scale = _mm256_mul_ps(_mm256_loadu_ps(layer.scales + column), _mm256_set1_ps(row_scale));
    __m256 y =
        _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(sum, excess)), scale, _mm256_loadu_ps(layer.bias + column));
    if (layer.gelu) y = gelu(y);
    float* to = layer.out + row * layer.columns + column;
    const int64_t present = layer.columns - column;
    if (present >= BLOCK)
        _mm256_storeu_ps(to, y);
    else if (present > 0)
        _mm256_maskstore_ps(to, first_lanes(present), y);
}

template <int ROWS>
void tile(const Layer& layer, Rows& rows, int present, int64_t at, int64_t first, int64_t column) {
    if constexpr (ROWS > 1)
        if (present < ROWS) return tile<ROWS - 1>(layer, rows, present, at, first, column);
    __m256i sums[ROWS][2];
    const int32_t* left = layer.weights + column * layer.units;
    multiply<ROWS>(rows.at(at), rows.stride, left, left + BLOCK * layer.units, layer.units, sums);
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
        for (int block = 0; block < 2; block++)
            finish(layer, sums[row][block], rows.scales[at + row], first + at + row, column + block * BLOCK);
}

void run(const Layer& layer, const Norm& norm) {
    if (layer.rows == 0) return;
    const int64_t threads = omp_get_max_threads(), panels = (layer.columns + PANEL - 1) / PANEL;
    // Blocks of rows of nearly equal size. If there are few rows, threads divide the columns.
    const int64_t most_blocks = (layer.rows + MOST_ROWS - 1) / MOST_ROWS;
    const int64_t tiles = (layer.rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t blocks = std::min(tiles, (most_blocks + threads - 1) / threads * threads);
    const int64_t splits = std::min(panels, (threads + blocks - 1) / blocks);
#pragma omp parallel
    {
        Rows rows(layer.units);
        std::vector<float> scratch(norm.residual ? layer.columns + BLOCK : 0);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < blocks * splits; task++) {
            const int64_t block = task / splits, split = task % splits;
            const int64_t first = layer.rows * block / blocks, count = layer.rows * (block + 1) / blocks - first;
            for (int64_t row = 0; row < count; row++)
                rows.scales[row] = quantise(layer.x + (first + row) * layer.x_stride, layer.inputs, layer.units,
                                            (uint8_t*)rows.at(row));
            for (int64_t panel = panels * split / splits; panel < panels * (split + 1) / splits; panel++)
                for (int64_t row = 0; row < count; row += TILE_ROWS)
                    tile<TILE_ROWS>(layer, rows, (int)std::min<int64_t>(TILE_ROWS, count - row), row, first,
                                    panel * PANEL);
        }
        if (norm.residual) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < layer.rows; row++)
                normalise(layer.out + row * layer.columns, norm.residual + row * norm.residual_stride, norm.weight,
                          norm.bias, norm.epsilon, layer.columns, scratch.data());
        }
    }
}

}  // namespace maxsimd_avx2

#pragma GCC visibility push(default)
extern "C" {

// Whether this processor has every instruction that the kernels use.
int maxsimd_avx2_is_supported() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

// x [rows][inputs] -> out [rows][columns], in float32; x_stride is in elements. Weights of 7 bits are packed as
// [columns / 8][units][8], their columns padded with zeros to a multiple of 16, and so are scales, sums and bias. With a
// residual [rows][columns], whose rows are residual_stride apart, out is the layer norm of the sum of the layer's
// output and the residual.
void maxsimd_avx2_linear(const float* x, int64_t x_stride, int64_t rows, int64_t inputs, const int32_t* weights,
                         int64_t units, const float* scales, const int32_t* sums, const float* bias, int64_t columns,
                         int gelu, const float* residual, int64_t residual_stride, const float* norm_weight,
                         const float* norm_bias, float epsilon, float* out) {
    maxsimd_avx2::run({x, x_stride, rows, inputs, weights, units, scales, sums, bias, columns, gelu != 0, out},
                      {residual, residual_stride, norm_weight, norm_bias, epsilon});
}
}
#pragma GCC visibility pop
