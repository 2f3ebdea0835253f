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

// Phi(-a) for a >= 0: a parabola for each of 31 spans around the multiples of 0.15, fitted to 1.7e-3 of its value at
// worst, and to 1e-4 below 1.9; half a unit in the last place of bfloat16 is 2e-3. Beyond 4.575 it is zero.
struct NormalTail {
    alignas(64) float constant[32] = {0.5000009f,    0.5001814f,    0.501586f,     0.5049309f,
                                      0.51007414f,   0.51588756f,   0.5203965f,    0.52114505f,
                                      0.5156911f,    0.5021119f,    0.4793882f,    0.44760433f,
                                      0.4079253f,    0.36238098f,   0.31352243f,   0.264034f,
                                      0.21637946f,   0.1725399f,    0.13387027f,   0.101073675f,
                                      0.07426964f,   0.053122357f,  0.036992773f,  0.025084997f,
                                      0.016567355f,  0.010659022f,  0.0066817007f, 0.0040816837f,
                                      0.0024302325f, 0.0014105291f, 7.981926e-04f, 0},
                      linear[32] = {-0.39915517f,   -0.40311733f,   -0.4155078f,     -0.43334594f,
                                    -0.45299575f,   -0.4703158f,    -0.48136428f,    -0.48302707f,
                                    -0.47345614f,   -0.45227036f,   -0.42047647f,    -0.38019645f,
                                    -0.33425328f,   -0.28571656f,   -0.23749013f,    -0.19200052f,
                                    -0.15101561f,   -0.115592f,     -0.086128145f,   -0.062487815f,
                                    -0.044156473f,  -0.030398447f,  -0.020392388f,   -0.01333334f,
                                    -0.008498675f,  -0.0052818423f, -0.003201222f,   -0.0018923897f,
                                    -0.0010912714f, -6.139604e-04f, -3.3704416e-04f, 0},
                      square[32] = {0.007509961f,   0.029696092f,   0.05727288f,   0.08113438f,
                                    0.09993414f,    0.112847306f,   0.11961922f,   0.12053752f,
                                    0.11633767f,    0.108072124f,   0.09694853f,   0.08418432f,
                                    0.070883155f,   0.05795f,       0.046048004f,  0.035593487f,
                                    0.02678053f,    0.019624166f,   0.014011374f,  0.009751027f,
                                    0.0066166455f,  0.0043788557f,  0.0028269603f, 0.0017807488f,
                                    0.0010946769f,  6.5680523e-04f, 3.846925e-04f, 2.1997323e-04f,
                                    1.2281505e-04f, 6.695775e-05f,  3.564964e-05f, 0};
};

// x * Phi(x), as max(x, 0) - a Phi(-a), where a = |x|. NaN stays NaN.
template <class Number>
inline __m512 gelu(__m512 x) {
    static constexpr NormalTail fit;
    const __m512 a = _mm512_min_ps(_mm512_set1_ps(31 * 0.15f), _mm512_abs_ps(x));
    // Adding this to a small number leaves its nearest integer in the lowest bits, which choose one of 32 numbers.
    const __m512i span =
        _mm512_castps_si512(_mm512_fmadd_ps(a, _mm512_set1_ps(1 / 0.15f), _mm512_set1_ps(12582912.0f)));
    const auto chosen = [&](const float (&from)[32]) {
        return _mm512_permutex2var_ps(_mm512_load_ps(from), span, _mm512_load_ps(from + LANES));
    };
    const __m512 share =
        _mm512_fmadd_ps(_mm512_fmadd_ps(chosen(fit.square), a, chosen(fit.linear)), a, chosen(fit.constant));
    return _mm512_fnmadd_ps(a, share, _mm512_max_ps(_mm512_setzero_ps(), x));
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

// 1 / x for x >= 1: for bfloat16 to 2^-14 of its value, since a division takes as long as eight of these.
template <class Number>
inline __m512 reciprocal(__m512 x) {
    if constexpr (std::is_same_v<Number, Float32>)
        return _mm512_div_ps(_mm512_set1_ps(1), x);
    else
        return _mm512_rcp14_ps(x);
}

// 1 / (1 + exp(-x)).
template <class Number>
inline __m512 logistic(__m512 x) {
    const __m512 one = _mm512_set1_ps(1);
    const __m512 falling = power_of_two<Number>(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-1.44269504f)));
    const __m512 above = reciprocal<Number>(_mm512_add_ps(one, falling));
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
