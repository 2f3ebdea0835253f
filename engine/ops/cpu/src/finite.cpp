// Whether numbers are NaN or infinite: those with all bits of the exponent set.

#include "tile.h"

namespace maxsimd {

// The bits of one 64-byte vector's numbers that are not finite.
inline uint64_t not_finite(__m512i numbers, __m512i exponent, bool wide) {
    const __m512i bits = _mm512_and_si512(numbers, exponent);
    return wide ? _mm512_cmpeq_epi32_mask(bits, exponent) : _mm512_cmpeq_epi16_mask(bits, exponent);
}

inline bool all_finite(const uint8_t* bytes, int64_t size, uint32_t exponent_bits, bool wide) {
    const __m512i exponent = _mm512_set1_epi32((int)exponent_bits);
    uint64_t found = 0;
    int64_t at = 0;
    for (; at + 64 <= size; at += 64) found |= not_finite(_mm512_loadu_si512(bytes + at), exponent, wide);
    if (at < size) {
        const __m512i rest = _mm512_maskz_loadu_epi8(((uint64_t)1 << (size - at)) - 1, bytes + at);
        found |= not_finite(rest, exponent, wide);
    }
    return found == 0;
}

}  // namespace maxsimd

#pragma GCC visibility push(default)
extern "C" {

// The first of `count` arrays, each at values[i] with sizes[i] bytes, that has a number which is not finite; -1 if
// there is none. exponents[i] has the exponent's bits of its kind of number, twice where that has two bytes.
int64_t maxsimd_first_not_finite(const void* const* values, const int64_t* sizes, const int64_t* exponents,
                                 const int64_t* widths, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const auto* bytes = (const uint8_t*)values[i];
        if (!maxsimd::all_finite(bytes, sizes[i], (uint32_t)exponents[i], widths[i] == 4)) return i;
    }
    return -1;
}
}
#pragma GCC visibility pop
