// The activations of a task: a copy of its rows in units, padded with zeros, and quantised if the weights are int8.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "linear.h"

namespace maxsimd {

// Quantises a row of bfloat16 to unsigned bytes whose zero is 128, padded with such zeros; returns its scale, which is
// NaN if one of its numbers is not finite: after a product with infinity, GELU could make it a small number.
inline float quantise(const uint16_t* row, int64_t inputs, uint8_t* out) {
    // Without their sign, bfloat16 numbers have the same order as their bits read as integers.
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
    // Adding this to a small number leaves its nearest integer, plus 128, in the lowest bits.
    const __m512 rounder = _mm512_set1_ps(12582912.0f + 128);
    for (int64_t i = 0; i < round_up(inputs, 4); i += LANES) {
        const __m512 values = load(row + i, first_lanes(inputs - i));
        const __m512i rounded = _mm512_castps_si512(_mm512_fmadd_ps(values, inverse, rounder));
        _mm_mask_storeu_epi8(out + i, first_lanes(round_up(inputs, 4) - i), _mm512_cvtepi32_epi8(rounded));
    }
    return std::isfinite(size) ? size / 127 : std::numeric_limits<float>::quiet_NaN();
}

// Memory for `most` rows, each a whole number of cache lines and of tiles.
class Rows {
  public:
    // Whether rows that are `stride` units apart can all be kept in the first-level cache. At a distance of a multiple
    // of 2 KiB they compete for few of its sets.
    static bool are_apart(int64_t stride) { return stride % 512 != 0; }

    Rows(int64_t most, int64_t units)
        : units_(round_up(units, LANES)),
          stride_(are_apart(units_) ? units_ : units_ + LANES),
          storage_(new Unit[most * stride_ + LANES]),
          scales_(most) {}

    int64_t stride() const { return stride_; }  // in units
    const float* scales(int64_t row) const { return scales_.data() + row; }  // int8 only
    Unit* at(int64_t row) { return (Unit*)round_up((int64_t)storage_.get(), 64) + row * stride_; }

    // Copies a row of a layer's input to row `to`.
    template <class Number>
    void take(const Linear<Number>& linear, int64_t row, int64_t to) {
        const auto* x = linear.x + row * linear.x_stride;
        std::memset(at(to) + units_ - LANES, 0, LANES * sizeof(Unit));
        if constexpr (std::is_same_v<Number, Int8>)
            scales_[to] = quantise(x, linear.inputs, (uint8_t*)at(to));
        else
            std::memcpy(at(to), x, linear.inputs * sizeof *x);
    }

  private:
    int64_t units_, stride_;
    std::unique_ptr<Unit[]> storage_;  // not initialised
    std::vector<float> scales_;
};

}  // namespace maxsimd
