// Sixteen numbers at once, by AVX-512; lanes8.h says more.
#pragma once

#include <algorithm>
#include <cstdint>
#include <immintrin.h>

namespace maxsimd_int8 {

struct Lanes16 {
    static constexpr int COUNT = 16;
    using Floats = __m512;
    using Integers = __m512i;

    static Floats fill(float x) { return _mm512_set1_ps(x); }
    static Floats load(const float* from) { return _mm512_loadu_ps(from); }
    static Floats fma(Floats x, Floats y, Floats z) { return _mm512_fmadd_ps(x, y, z); }
    static Floats min(Floats x, Floats y) { return _mm512_min_ps(x, y); }
    static Floats max(Floats x, Floats y) { return _mm512_max_ps(x, y); }
    static Floats round(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static Floats to_floats(Integers x) { return _mm512_cvtepi32_ps(x); }
    static Floats from_bits(Integers x) { return _mm512_castsi512_ps(x); }
    static Integers size_bits(Floats x) {
        return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
    }
    static Floats scale(Floats x, Floats exponent) { return _mm512_scalef_ps(x, exponent); }

    static void store(float* to, int64_t count, Floats x) {
        _mm512_mask_storeu_ps(to, (__mmask16)((1u << std::min<int64_t>(count, COUNT)) - 1), x);
    }
    static void store_lowest_bytes(uint8_t* to, const Floats (&x)[4]) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            _mm_storeu_si128((__m128i*)(to + i * COUNT), _mm512_cvtepi32_epi8(_mm512_castps_si512(x[i])));
    }

    static Integers zero() { return _mm512_setzero_si512(); }
    static Integers fill(int32_t x) { return _mm512_set1_epi32(x); }
    static Integers load(const int32_t* from) { return _mm512_loadu_si512(from); }
    static Integers max(Integers x, Integers y) { return _mm512_max_epi32(x, y); }
    static Integers add(Integers x, Integers y) { return _mm512_add_epi32(x, y); }
    static Integers add_in_16_bits(Integers x, Integers y) { return _mm512_add_epi16(x, y); }
    static Integers multiply_bytes(Integers x, Integers y) { return _mm512_maddubs_epi16(x, y); }
    static Integers widen(Integers x) { return _mm512_madd_epi16(x, _mm512_set1_epi16(1)); }
    static int32_t largest(Integers x) { return _mm512_reduce_max_epi32(x); }
    static inline __attribute__((always_inline)) void pin(Integers& x) { asm volatile("" : "+v"(x)); }
};

}  // namespace maxsimd_int8
