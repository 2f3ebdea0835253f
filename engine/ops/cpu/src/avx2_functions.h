// Functions of eight numbers at once and of whole rows, in float32, for processors with AVX2.
#pragma once

#include <cmath>
#include <cstdint>
#include <immintrin.h>

namespace maxsimd_avx2 {

inline float reduce_add(__m256 x) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

inline float reduce_max(__m256 x) {
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

// The mask of the first `left` of 8 lanes.
inline __m256i first_lanes(int64_t left) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(left < 8 ? left : 8)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

template <int COUNT>
inline __m256 polynomial(__m256 x, const float (&series)[COUNT]) {
    __m256 sum = _mm256_set1_ps(series[COUNT - 1]);
#pragma GCC unroll 16
    for (int power = COUNT - 2; power >= 0; power--) sum = _mm256_fmadd_ps(sum, x, _mm256_set1_ps(series[power]));
    return sum;
}

// 2^x for -125 <= x <= 0, to the last bits.
inline __m256 power_of_two(__m256 x) {
    constexpr float series[] = {
        1, 0.693147182f, 0.240226477f, 0.0555033237f, 0.00961843692f, 0.0013398875f, 0.00015353362f};
    const __m256 whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
    const __m256 mantissa = polynomial(_mm256_sub_ps(x, whole), series);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(mantissa), exponent));
}

// max(x, 0) - a Phi(-a), where a = |x|: the same fit as in functions.h, which says more.
inline __m256 gelu(__m256 x) {
    constexpr float fit[] = {0.119605042f,   0.121111199f, 0.0977561027f, 0.135496259f,
                             -0.0665240884f, 0.220084816f, -0.165077299f, 0.0375479832f};
    const __m256 size = _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));
    const __m256 a = _mm256_min_ps(size, _mm256_set1_ps(12));
    const __m256 one = _mm256_set1_ps(1);
    const __m256 t = _mm256_div_ps(one, _mm256_fmadd_ps(a, _mm256_set1_ps(0.3f), one));
    const __m256 minus_half = _mm256_set1_ps(-0.72134752f);  // -1/2 times log2(e)
    const __m256 falling = power_of_two(_mm256_mul_ps(_mm256_mul_ps(a, a), minus_half));
    const __m256 share = _mm256_mul_ps(_mm256_mul_ps(t, polynomial(t, fit)), falling);
    return _mm256_fnmadd_ps(a, share, _mm256_max_ps(_mm256_setzero_ps(), x));  // the second operand keeps NaN
}

// Replaces a row by the layer norm of its sum with the residual. `sums` is scratch memory for a row and 8 more.
inline void normalise(float* row, const float* residual, const float* weight, const float* bias, float epsilon,
                      int64_t columns, float* sums) {
    __m256 total = _mm256_setzero_ps(), squares = _mm256_setzero_ps();
    for (int64_t i = 0; i < columns; i += 8) {
        const __m256i mask = first_lanes(columns - i);
        const __m256 sum = _mm256_add_ps(_mm256_maskload_ps(row + i, mask), _mm256_maskload_ps(residual + i, mask));
        _mm256_storeu_ps(sums + i, sum);
        total = _mm256_add_ps(total, sum);
    }
    const __m256 mean = _mm256_set1_ps(reduce_add(total) / columns);
    for (int64_t i = 0; i < columns; i += 8) {
        const __m256 present = _mm256_castsi256_ps(first_lanes(columns - i));
        const __m256 off = _mm256_and_ps(present, _mm256_sub_ps(_mm256_loadu_ps(sums + i), mean));
        squares = _mm256_fmadd_ps(off, off, squares);
    }
    const __m256 scale = _mm256_set1_ps(1 / std::sqrt(reduce_add(squares) / columns + epsilon));
    for (int64_t i = 0; i < columns; i += 8) {
        const __m256i mask = first_lanes(columns - i);
        const __m256 off = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(sums + i), mean), scale);
        const __m256 y = _mm256_fmadd_ps(off, _mm256_maskload_ps(weight + i, mask), _mm256_maskload_ps(bias + i, mask));
        _mm256_maskstore_ps(row + i, mask, y);
    }
}

}  // namespace maxsimd_avx2
