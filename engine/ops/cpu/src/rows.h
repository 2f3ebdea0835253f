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
    // Rounds 32 numbers; the bytes of two neighbours are the lowest of their 32 bits.
    const auto pairs = [&](int64_t i) {
        const int64_t left = inputs - i;
        const __mmask32 mask = left >= 2 * LANES ? 0xffffffff : left <= 0 ? 0 : (1u << left) - 1;
        const __m512i both = _mm512_maskz_loadu_epi16(mask, row + i);
        const __m512i upper = _mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000));
        const __m512i lower = _mm512_slli_epi32(both, 16);
        const auto rounded = [&](__m512i values) {
            return _mm512_castps_si512(_mm512_fmadd_ps(_mm512_castsi512_ps(values), inverse, rounder));
        };
        return _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, rounded(lower), _mm512_slli_epi32(rounded(upper), 8));
    };
    alignas(64) static constexpr uint16_t even[] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                                    32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
    for (int64_t i = 0; i < round_up(inputs, 4); i += 4 * LANES) {
        const __m512i bytes = _mm512_permutex2var_epi16(pairs(i), _mm512_load_si512(even), pairs(i + 2 * LANES));
        const int64_t left = round_up(inputs, 4) - i;
        _mm512_mask_storeu_epi8(out + i, left >= 4 * LANES ? ~0ull : (1ull << left) - 1, bytes);
    }
    return std::isfinite(size) ? size / 127 : std::numeric_limits<float>::quiet_NaN();
}

// Memory for `most` rows, each a whole number of cache lines and of tiles, which are apart.
class Rows {
  public:
    Rows(int64_t most, int64_t units)
        : units_(round_up(units, LANES)),
          stride_(apart(units_)),
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
