// Eight numbers at once, by AVX2: what the int8 layers need of a vector, under names that lanes16.h gives too.
#pragma once

#include <algorithm>
#include <cstdint>
#include <immintrin.h>

namespace maxsimd_int8 {

struct Lanes8 {
    static constexpr int COUNT = 8;
    using Floats = __m256;
    using Integers = __m256i;

    static Floats fill(float x) { return _mm256_set1_ps(x); }
    static Floats load(const float* from) { return _mm256_loadu_ps(from); }
    static Floats fma(Floats x, Floats y, Floats z) { return _mm256_fmadd_ps(x, y, z); }
    static Floats min(Floats x, Floats y) { return _mm256_min_ps(x, y); }
    static Floats max(Floats x, Floats y) { return _mm256_max_ps(x, y); }  // y where either is NaN
    static Floats round(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static Floats to_floats(Integers x) { return _mm256_cvtepi32_ps(x); }
    static Floats from_bits(Integers x) { return _mm256_castsi256_ps(x); }
    // x without its sign, as bits: their order as integers is that of the numbers, with NaN above all.
    static Integers size_bits(Floats x) {
        return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
    }
    // x times 2^exponent, where neither that nor the result is too small or too large.
    static Floats scale(Floats x, Floats exponent) {
        const __m256i shifted = _mm256_slli_epi32(_mm256_cvtps_epi32(exponent), 23);
        return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), shifted));
    }

    // The first `count` numbers.
    static void store(float* to, int64_t count, Floats x) {
        if (count >= COUNT)
            _mm256_storeu_ps(to, x);
        else
            _mm256_maskstore_ps(to, first(count), x);
    }
    // The mask of the first `count` lanes.
    static __m256i first(int64_t count) {
        const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)std::min<int64_t>(count, COUNT)), lanes);
    }
    // The lowest byte of each number, in order.
    static void store_lowest_bytes(uint8_t* to, const Floats (&x)[4]) {
        __m256i part[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) part[i] = _mm256_and_si256(_mm256_castps_si256(x[i]), _mm256_set1_epi32(0xff));
        const __m256i left = _mm256_packus_epi32(part[0], part[1]), right = _mm256_packus_epi32(part[2], part[3]);
        const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(left, right), in_order);
        _mm256_storeu_si256((__m256i*)to, bytes);
    }

    static Integers zero() { return _mm256_setzero_si256(); }
    static Integers fill(int32_t x) { return _mm256_set1_epi32(x); }
    static Integers load(const int32_t* from) { return _mm256_loadu_si256((const __m256i*)from); }
    static Integers max(Integers x, Integers y) { return _mm256_max_epi32(x, y); }
    static Integers add(Integers x, Integers y) { return _mm256_add_epi32(x, y); }
    static Integers add_in_16_bits(Integers x, Integers y) { return _mm256_add_epi16(x, y); }
    // Unsigned bytes times signed ones; two products are added in 16 bits.
    static Integers multiply_bytes(Integers x, Integers y) { return _mm256_maddubs_epi16(x, y); }
    // Pairs of 16 bits added in 32.
    static Integers widen(Integers x) { return _mm256_madd_epi16(x, _mm256_set1_epi16(1)); }
    static int32_t largest(Integers x) {
        __m128i most = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        most = _mm_max_epi32(most, _mm_unpackhi_epi64(most, most));
        return std::max(_mm_cvtsi128_si32(most), _mm_extract_epi32(most, 1));
    }
    // Keeps the compiler from moving or spilling a register: it would put sums into memory to multiply earlier.
    static inline __attribute__((always_inline)) void pin(Integers& x) { asm volatile("" : "+x"(x)); }
};

}  // namespace maxsimd_int8
