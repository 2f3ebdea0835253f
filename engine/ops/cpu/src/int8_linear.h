// Linear layers for processors that the other library does not run on: weights in int8, rows and results in float32;
// bias, then GELU or residual and layer norm. Each kind of processor has a file that names a kernel for `run` and is
// compiled for the instructions that it has.
//
// Rows are rounded to bytes between -127 and 127, each row with a scale of its own, and stored with 128 added, since
// processors multiply unsigned bytes by signed ones. Sums are exact integers, so that a row's results are the same to
// the last bit whatever other rows there are, and on every kernel that is given the same weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include <omp.h>

#include "int8_functions.h"

namespace maxsimd_int8 {

constexpr int OCTET = 8;  // inputs that rows are padded to a multiple of

// What Python hands over, field by field.
struct Layer {
    const float* x;  // [rows], x_stride apart
    int64_t x_stride, rows, inputs;
    const int32_t* weights;  // as the kernel says, padded with zeros to whole panels of columns
    const float* scales;  // [columns], padded to whole panels, as is the next
    const float* bias;  // zeros where there is none
    int64_t columns;
    bool gelu;
    float* out;  // [rows][columns]

    int64_t octets() const { return (inputs + OCTET - 1) / OCTET; }
};

// The same of the norm that may follow.
struct Norm {
    const float* residual;  // [rows], residual_stride apart
    int64_t residual_stride;
    const float *weight, *bias;  // [columns]
    float epsilon;
};

// The rows of a task in bytes, each a whole number of octets, and their scales.
struct Rows {
    // In halves of octets. Rows that are a multiple of 1024 bytes apart would share few places of the cache.
    int64_t stride;
    std::unique_ptr<int32_t[]> bytes;
    std::vector<float> scales;

    Rows(int64_t most, int64_t octets)
        : stride(2 * octets + (octets % 128 ? 0 : 16)), bytes(new int32_t[most * stride]), scales(most) {}
    int32_t* at(int64_t row) { return bytes.get() + row * stride; }
};

// Rounds a row to bytes and pads it with zeros; returns its scale, which is NaN if one of its numbers is not finite:
// after a product with infinity, GELU could make it a small number.
template <class Lanes>
float quantise(const float* row, int64_t inputs, int64_t octets, uint8_t* out) {
    auto largest = Lanes::zero();
    int64_t i = 0;
    for (; i + Lanes::COUNT <= inputs; i += Lanes::COUNT)
        largest = Lanes::max(largest, Lanes::size_bits(Lanes::load(row + i)));
    int32_t bits = Lanes::largest(largest);
    for (; i < inputs; i++) {
        const float value = std::fabs(row[i]);
        int32_t more;
        std::memcpy(&more, &value, sizeof more);
        bits = std::max(bits, more);
    }
    float size;
    std::memcpy(&size, &bits, sizeof size);
    // The inverse of a tiny number would be infinite.
    const float inverse = size > 1e-30f ? 127 / size : 0;
    // Adding this to a small number leaves its nearest integer, plus 128, in the lowest bits.
    const float rounder = 12582912.0f + 128;
    const auto factor = Lanes::fill(inverse), shift = Lanes::fill(rounder);
    i = 0;
    for (; i + 4 * Lanes::COUNT <= inputs; i += 4 * Lanes::COUNT) {
        typename Lanes::Floats shifted[4];
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++)
            shifted[part] = Lanes::load(row + i + part * Lanes::COUNT) * factor + shift;
        Lanes::store_lowest_bytes(out + i, shifted);
    }
    for (; i < inputs; i++) {
        const float shifted = row[i] * inverse + rounder;
        std::memcpy(&bits, &shifted, sizeof bits);
        out[i] = (uint8_t)bits;
    }
    std::memset(out + inputs, 128, octets * OCTET - inputs);  // whose weights are zero
    if (!std::isfinite(size)) return std::numeric_limits<float>::quiet_NaN();
    return size <= 1e-30f ? 0 : size / 127;
}

// A kernel for processors that add two products of bytes in 16 bits, which hold them if weights have 7 bits:
// 2 * 255 * 63 < 2^15. Two such sums would not fit, but what they are without the 128 does: 4 * 128 * 63 < 2^15. So
// they are added modulo 2^16 to what takes the 128 off, and only then widened.
//
// Weights are [blocks][octets][3][LANES]: for each column twice four weights, then -128 times the sums of the weights
// whose products are added, two 16-bit numbers.
template <class Vector, int ROWS, int PANEL_BLOCKS>
struct Widening {
    using Lanes = Vector;
    static constexpr int TILE_ROWS = ROWS, BLOCKS = PANEL_BLOCKS;
    static int64_t vectors(int64_t octets) { return 3 * octets; }  // of a block's weights

    template <int PRESENT>
    static inline __attribute__((always_inline)) void multiply(const int32_t* rows, int64_t stride,
                                                               const int32_t* weights, int64_t octets,
                                                               typename Lanes::Integers (&sums)[PRESENT][BLOCKS]) {
#pragma GCC unroll 16
        for (int row = 0; row < PRESENT; row++)
#pragma GCC unroll 2
            for (int block = 0; block < BLOCKS; block++) sums[row][block] = Lanes::zero();
        for (int64_t octet = 0; octet < octets; octet++) {
            typename Lanes::Integers packed[BLOCKS][3];
#pragma GCC unroll 2
            for (int block = 0; block < BLOCKS; block++)
#pragma GCC unroll 3
                for (int part = 0; part < 3; part++)
                    packed[block][part] =
                        Lanes::load(weights + (vectors(octets) * block + 3 * octet + part) * Lanes::COUNT);
#pragma GCC unroll 16
            for (int row = 0; row < PRESENT; row++) {
                const int32_t* values = rows + row * stride + 2 * octet;
#pragma GCC unroll 2
                for (int block = 0; block < BLOCKS; block++) {
                    auto sum = Lanes::add_in_16_bits(packed[block][2],
                                                     Lanes::multiply_bytes(Lanes::fill(values[0]), packed[block][0]));
                    sum = Lanes::add_in_16_bits(sum, Lanes::multiply_bytes(Lanes::fill(values[1]), packed[block][1]));
                    sums[row][block] = Lanes::add(sums[row][block], Lanes::widen(sum));
                    Lanes::pin(sums[row][block]);
                }
            }
        }
    }
};

template <class Lanes>
inline void finish(const Layer& layer, typename Lanes::Integers sum, float row_scale, int64_t row, int64_t column) {
    const auto scale = Lanes::load(layer.scales + column) * Lanes::fill(row_scale);
    auto y = Lanes::fma(Lanes::to_floats(sum), scale, Lanes::load(layer.bias + column));
    if (layer.gelu) y = gelu<Lanes>(y);
    Lanes::store(layer.out + row * layer.columns + column, layer.columns - column, y);
}

// A tile of rows times a panel of columns, at most ROWS rows.
template <class Kernel, int ROWS>
void tile(const Layer& layer, Rows& rows, int64_t present, int64_t at, int64_t first, int64_t column) {
    if constexpr (ROWS > 1)
        if (present < ROWS) return tile<Kernel, ROWS - 1>(layer, rows, present, at, first, column);
    using Lanes = typename Kernel::Lanes;
    typename Lanes::Integers sums[ROWS][Kernel::BLOCKS];
    Kernel::template multiply<ROWS>(rows.at(at), rows.stride, layer.weights + Kernel::vectors(layer.octets()) * column,
                                    layer.octets(), sums);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
        for (int block = 0; block < Kernel::BLOCKS; block++)
            if (block == 0 || column + block * Lanes::COUNT < layer.columns)
                finish<Lanes>(layer, sums[row][block], rows.scales[at + row], first + at + row,
                              column + block * Lanes::COUNT);
}

// The layer, and the norm unless there is none.
template <class Kernel>
void run(const Layer& layer, const Norm* norm) {
    if (layer.rows == 0) return;
    constexpr int PANEL = Kernel::BLOCKS * Kernel::Lanes::COUNT, TILE_ROWS = Kernel::TILE_ROWS;
    constexpr int64_t MOST_ROWS = 8 * TILE_ROWS;  // of a task, so that they stay in the second-level cache
    const int64_t threads = omp_get_max_threads(), panels = (layer.columns + PANEL - 1) / PANEL;
    // Blocks of rows of nearly equal size. If there are few rows, threads divide the columns.
    const int64_t most_blocks = (layer.rows + MOST_ROWS - 1) / MOST_ROWS;
    const int64_t tiles = (layer.rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t blocks = std::min(tiles, (most_blocks + threads - 1) / threads * threads);
    const int64_t splits = std::min(panels, (threads + blocks - 1) / blocks);
#pragma omp parallel
    {
        Rows rows(MOST_ROWS, layer.octets());
        std::vector<float> scratch(norm ? layer.columns + Lanes8::COUNT : 0);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < blocks * splits; task++) {
            const int64_t block = task / splits, split = task % splits;
            const int64_t first = layer.rows * block / blocks, count = layer.rows * (block + 1) / blocks - first;
            for (int64_t row = 0; row < count; row++)
                rows.scales[row] = quantise<typename Kernel::Lanes>(
                    layer.x + (first + row) * layer.x_stride, layer.inputs, layer.octets(), (uint8_t*)rows.at(row));
            // Tiles of nearly equal height, so that none is too low to keep the multipliers busy.
            const int64_t heights = (count + TILE_ROWS - 1) / TILE_ROWS;
            for (int64_t panel = panels * split / splits; panel < panels * (split + 1) / splits; panel++)
                for (int64_t height = 0; height < heights; height++) {
                    const int64_t row = count * height / heights, stop = count * (height + 1) / heights;
                    tile<Kernel, TILE_ROWS>(layer, rows, stop - row, row, first, panel * PANEL);
                }
        }
        if (norm) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < layer.rows; row++)
                normalise(layer.out + row * layer.columns, norm->residual + row * norm->residual_stride, norm->weight,
                          norm->bias, norm->epsilon, layer.columns, scratch.data());
        }
    }
}

}  // namespace maxsimd_int8
