// Whether numbers are NaN, or as large as a limit. Without their sign, numbers have the order of their bits read as
// integers, with infinity and NaN last.

#include "tile.h"

namespace maxsimd {

// The bits of one 64-byte vector's numbers that are not below the limit.
inline uint64_t too_large(__m512i numbers, __m512i limit, bool wide) {
    const __m512i sizes = _mm512_and_si512(numbers, _mm512_set1_epi32(wide ? 0x7fffffff : 0x7fff7fff));
    return wide ? _mm512_cmpge_epi32_mask(sizes, limit) : _mm512_cmpge_epi16_mask(sizes, limit);
}

inline bool all_below(const uint8_t* bytes, int64_t size, uint32_t limit_bits, bool wide) {
    const __m512i limit = _mm512_set1_epi32((int)limit_bits);
    uint64_t found = 0;
    int64_t at = 0;
    for (; at + 64 <= size; at += 64) found |= too_large(_mm512_loadu_si512(bytes + at), limit, wide);
    if (at < size) {
        const __m512i rest = _mm512_maskz_loadu_epi8(((uint64_t)1 << (size - at)) - 1, bytes + at);
        found |= too_large(rest, limit, wide);
    }
    return found == 0;
}

}  // namespace maxsimd

#pragma GCC visibility push(default)
extern "C" {

// The first of `count` arrays, each at values[i] with sizes[i] bytes, that has NaN or a number which is not below a
// limit; -1 if there is none. limits[i] has the limit's bits, at most those of infinity, twice where a number has two
// bytes.
int64_t maxsimd_first_not_finite(const void* const* values, const int64_t* sizes, const int64_t* limits,
                                 const int64_t* widths, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const auto* bytes = (const uint8_t*)values[i];
        if (!maxsimd::all_below(bytes, sizes[i], (uint32_t)limits[i], widths[i] == 4)) return i;
    }
    return -1;
}
}
#pragma GCC visibility pop
