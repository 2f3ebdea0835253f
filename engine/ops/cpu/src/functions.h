// Functions of sixteen numbers at once, each as exact as the precision in which its result is written.
#pragma once

#include "tile.h"

namespace maxsimd {

template <int COUNT>
inline __m512 polynomial(__m512 x, const float (&series)[COUNT]) {
    __m512 sum = _mm512_set1_ps(series[COUNT - 1]);
#pragma GCC unroll 16
    for (int power = COUNT - 2; power >= 0; power--) sum = _mm512_fmadd_ps(sum, x, _mm512_set1_ps(series[power]));
    return sum;
}

// 2^x for x <= 0: for float32 to the last bits, for bfloat16 to 4e-5 of its value, a hundredth of what is rounded
// away.
template <class Number>
inline __m512 power_of_two(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(x, whole);
    if constexpr (std::is_same_v<Number, Float32>) {
        constexpr float series[] = {
            1, 0.693147182f, 0.240226477f, 0.0555033237f, 0.00961843692f, 0.0013398875f, 0.00015353362f};
        return _mm512_scalef_ps(polynomial(rest, series), whole);
    } else {
        constexpr float series[] = {1, 0.69314718f, 0.24022651f, 0.05550411f, 0.00961813f};
        return _mm512_scalef_ps(polynomial(rest, series), whole);
    }
}

// x * Phi(x). Phi(x) - 1/2 is x times a polynomial in x * x, fitted on [-4.5, 4.5] (greatest error of the
// product 3e-5, a tenth of what bfloat16 rounds away); outside of it Phi is 0 or 1 as far as float32 can say.
template <class Number>
inline __m512 gelu(__m512 x) {
    constexpr float fit[] = {0.15690508f, -0.07719228f, 0.05469175f, -0.04013447f, 0.02837208f, -0.01891483f,
                             0.01115702f, -0.00541324f, 0.00307923f, -0.00225917f, 0.00081934f};
    const __m512 bound = _mm512_set1_ps(4.5f);
    x = _mm512_max_ps(_mm512_set1_ps(-4.5f), x);  // below -4.5 the result is zero; NaN stays NaN
    const __m512 near = _mm512_min_ps(x, bound);
    const __m512 s = _mm512_fmsub_ps(_mm512_mul_ps(near, near), _mm512_set1_ps(2 / (4.5f * 4.5f)), _mm512_set1_ps(1));
    return _mm512_mul_ps(x, _mm512_fmadd_ps(near, polynomial(s, fit), _mm512_set1_ps(0.5f)));
}

// For float32 it is max(x, 0) - a Phi(-a), where a = |x|. Phi(-a) exp(a^2 / 2) is t = 1 / (1 + 0.3 a) times a
// polynomial in t, fitted on [0, 10] to 5e-8 of its value; further out the product is zero beside x.
template <>
inline __m512 gelu<Float32>(__m512 x) {
    constexpr float fit[] = {0.119605042f,   0.121111199f, 0.0977561027f, 0.135496259f,
                             -0.0665240884f, 0.220084816f, -0.165077299f, 0.0375479832f};
    const __m512 a = _mm512_min_ps(_mm512_set1_ps(12), _mm512_abs_ps(x));
    const __m512 one = _mm512_set1_ps(1);
    const __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(a, _mm512_set1_ps(0.3f), one));
    const __m512 minus_half = _mm512_set1_ps(-0.72134752f);  // -1/2 times log2(e)
    const __m512 falling = power_of_two<Float32>(_mm512_mul_ps(_mm512_mul_ps(a, a), minus_half));
    const __m512 share = _mm512_mul_ps(_mm512_mul_ps(t, polynomial(t, fit)), falling);
    return _mm512_fnmadd_ps(a, share, _mm512_max_ps(_mm512_setzero_ps(), x));
}

// 1 / (1 + exp(-x)).
template <class Number>
inline __m512 logistic(__m512 x) {
    const __m512 one = _mm512_set1_ps(1);
    const __m512 falling = power_of_two<Number>(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-1.44269504f)));
    const __m512 above = _mm512_div_ps(one, _mm512_add_ps(one, falling));
    const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(x));
    return _mm512_mask_mul_ps(above, negative, falling, above);
}

template <class Number>
inline __m512 silu(__m512 x) {
    return _mm512_mul_ps(x, logistic<Number>(x));
}

// GELU's approximation by tanh: (1 + tanh(u)) / 2 is the logistic function of 2 u.
template <class Number>
inline __m512 gelu_by_tanh(__m512 x) {
    const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_mul_ps(x, x), x), _mm512_set1_ps(0.044715f), x);
    return _mm512_mul_ps(x, logistic<Number>(_mm512_mul_ps(cubic, _mm512_set1_ps(1.5957691f))));
}

// NaN stays NaN.
inline __m512 relu(__m512 x) { return _mm512_max_ps(_mm512_setzero_ps(), x); }

}  // namespace maxsimd
