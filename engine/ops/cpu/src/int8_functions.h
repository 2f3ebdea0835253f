// Functions of as many numbers as a vector has and of whole rows, in float32.
#pragma once

#include <cmath>
#include <cstdint>
#include <immintrin.h>

#include "lanes8.h"

namespace maxsimd_int8 {

template <class Lanes, int COUNT>
inline typename Lanes::Floats polynomial(typename Lanes::Floats x, const float (&series)[COUNT]) {
    auto sum = Lanes::fill(series[COUNT - 1]);
#pragma GCC unroll 16
    for (int power = COUNT - 2; power >= 0; power--) sum = Lanes::fma(sum, x, Lanes::fill(series[power]));
    return sum;
}

// 2^x for -125 <= x <= 0, to the last bits.
template <class Lanes>
inline typename Lanes::Floats power_of_two(typename Lanes::Floats x) {
    constexpr float series[] = {
        1, 0.693147182f, 0.240226477f, 0.0555033237f, 0.00961843692f, 0.0013398875f, 0.00015353362f};
    const auto whole = Lanes::round(x);
    return Lanes::scale(polynomial<Lanes>(x - whole, series), whole);
}

// max(x, 0) - a Phi(-a), where a = |x|: the same fit as in functions.h, which says more.
template <class Lanes>
inline typename Lanes::Floats gelu(typename Lanes::Floats x) {
    constexpr float fit[] = {0.119605042f,   0.121111199f, 0.0977561027f, 0.135496259f,
                             -0.0665240884f, 0.220084816f, -0.165077299f, 0.0375479832f};
    const auto a = Lanes::min(Lanes::from_bits(Lanes::size_bits(x)), Lanes::fill(12.0f));
    const auto one = Lanes::fill(1.0f);
    const auto t = one / Lanes::fma(a, Lanes::fill(0.3f), one);
    const auto falling = power_of_two<Lanes>(a * a * Lanes::fill(-0.72134752f));  // -1/2 times log2(e)
    const auto share = t * polynomial<Lanes>(t, fit) * falling;
    return Lanes::fma(-a, share, Lanes::max(Lanes::fill(0.0f), x));  // which keeps NaN
}

inline float reduce_add(__m256 x) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

// Replaces a row by the layer norm of its sum with the residual; in eight lanes on every processor, since the order of
// a sum shows in its last bits. `sums` is scratch memory for a row and 8 more.
inline void normalise(float* row, const float* residual, const float* weight, const float* bias, float epsilon,
                      int64_t columns, float* sums) {
    __m256 total = _mm256_setzero_ps(), squares = _mm256_setzero_ps();
    for (int64_t i = 0; i < columns; i += 8) {
        const __m256i mask = Lanes8::first(columns - i);
        const __m256 sum = _mm256_add_ps(_mm256_maskload_ps(row + i, mask), _mm256_maskload_ps(residual + i, mask));
        _mm256_storeu_ps(sums + i, sum);
        total = _mm256_add_ps(total, sum);
    }
    const __m256 mean = _mm256_set1_ps(reduce_add(total) / columns);
    for (int64_t i = 0; i < columns; i += 8) {
        const __m256 present = _mm256_castsi256_ps(Lanes8::first(columns - i));
        const __m256 off = _mm256_and_ps(present, _mm256_sub_ps(_mm256_loadu_ps(sums + i), mean));
        squares = _mm256_fmadd_ps(off, off, squares);
    }
    const __m256 scale = _mm256_set1_ps(1 / std::sqrt(reduce_add(squares) / columns + epsilon));
    for (int64_t i = 0; i < columns; i += 8) {
        const __m256i mask = Lanes8::first(columns - i);
        const __m256 off = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(sums + i), mean), scale);
        const __m256 y = _mm256_fmadd_ps(off, _mm256_maskload_ps(weight + i, mask), _mm256_maskload_ps(bias + i, mask));
        _mm256_maskstore_ps(row + i, mask, y);
    }
}

}  // namespace maxsimd_int8
