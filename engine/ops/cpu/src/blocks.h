// Weights as GGUF files store them, in blocks with a scale each, and how they become numbers.
//
// Source: the definition of the blocks in ggml (github.com/ggml-org/ggml, src/ggml-common.h). Each product and each
// difference is rounded to float32 by itself, as the package gguf does it, so that both give the same bits.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "tile.h"

namespace maxsimd {

// By ggml's numbers.
enum BlockKind : uint8_t { F32 = 0, F16 = 1, Q4_0 = 2, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30 };

// The rows of a matrix [rows][inputs], each with the kind of its blocks.
struct BlockRows {
    const uint8_t* kinds;
    const uint8_t* const* rows;
};

constexpr int64_t STRIP = 2 * LANES;  // values that are taken out of their blocks at a time
constexpr int64_t SPAN = 256;         // values whose scales are read at a time: the largest block
constexpr int PARTS = SPAN / STRIP;

// The scales of a span, each for 16 values, and what is taken off its products, each for 32 values.
struct Scales {
    alignas(64) float scale[2 * PARTS], least[PARTS];
};

struct Strip {
    __m512 low, high;
};

inline __m512 float16(const uint8_t* at) {
    uint16_t bits;
    std::memcpy(&bits, at, sizeof bits);
    return _mm512_cvtph_ps(_mm256_set1_epi16((int16_t)bits));
}

inline __m256i bytes(const uint8_t* from) { return _mm256_loadu_si256((const __m256i*)from); }

inline __m256i low_bits(__m256i bytes, int shift, int mask) {
    return _mm256_and_si256(_mm256_srli_epi16(bytes, shift), _mm256_set1_epi8((char)mask));
}

inline Strip unsigned_bytes(__m256i bytes) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm256_castsi256_si128(bytes))),
            _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm256_extracti128_si256(bytes, 1)))};
}

inline Strip signed_bytes(__m256i bytes) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes))),
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)))};
}

inline Strip scaled(Strip strip, float low, float high) {
    return {_mm512_mul_ps(strip.low, _mm512_set1_ps(low)), _mm512_mul_ps(strip.high, _mm512_set1_ps(high))};
}

// Each kind reads the scales of `parts` parts of the span that begins at `row`, and its part `PART`.
template <uint8_t KIND>
struct Format;

template <>
struct Format<F32> {
    static constexpr int64_t SPAN_BYTES = SPAN * 4;
    static void read(const uint8_t*, int, Scales&) {}
    template <int PART>
    static Strip part(const uint8_t* span, const Scales&) {
        const float* from = (const float*)span + PART * STRIP;
        return {_mm512_loadu_ps(from), _mm512_loadu_ps(from + LANES)};
    }
};

template <>
struct Format<F16> {
    static constexpr int64_t SPAN_BYTES = SPAN * 2;
    static void read(const uint8_t*, int, Scales&) {}
    template <int PART>
    static Strip part(const uint8_t* span, const Scales&) {
        const uint8_t* from = span + PART * STRIP * 2;
        return {_mm512_cvtph_ps(bytes(from)), _mm512_cvtph_ps(bytes(from + 2 * LANES))};
    }
};

template <>
struct Format<BF16> {
    static constexpr int64_t SPAN_BYTES = SPAN * 2;
    static void read(const uint8_t*, int, Scales&) {}
    template <int PART>
    static Strip part(const uint8_t* span, const Scales&) {
        const uint16_t* from = (const uint16_t*)span + PART * STRIP;
        return {load(from, 0xffff), load(from + LANES, 0xffff)};
    }
};

// A block of 32 values is its scale and their bytes, BYTES in all.
template <int64_t BYTES>
struct SmallBlocks {
    static constexpr int64_t SPAN_BYTES = PARTS * BYTES;
    static void read(const uint8_t* span, int parts, Scales& scales) {
        for (int part = 0; part < parts; part++)
            scales.scale[2 * part] = scales.scale[2 * part + 1] = _mm512_cvtss_f32(float16(span + part * BYTES));
    }
};

template <>
struct Format<Q8_0> : SmallBlocks<34> {
    template <int PART>
    static Strip part(const uint8_t* span, const Scales& scales) {
        return scaled(signed_bytes(bytes(span + PART * 34 + 2)), scales.scale[2 * PART], scales.scale[2 * PART]);
    }
};

// The first 16 values are in the lower four bits of sixteen bytes, the others in the upper ones.
template <>
struct Format<Q4_0> : SmallBlocks<18> {
    template <int PART>
    static Strip part(const uint8_t* span, const Scales& scales) {
        const __m128i packed = _mm_loadu_si128((const __m128i*)(span + PART * 18 + 2));
        const __m256i both = _mm256_set_m128i(_mm_srli_epi16(packed, 4), packed);
        const __m256i q = _mm256_sub_epi8(low_bits(both, 0, 15), _mm256_set1_epi8(8));
        return scaled(signed_bytes(q), scales.scale[2 * PART], scales.scale[2 * PART]);
    }
};

// The scale of scales, the scale of minima, then a scale and a minimum for each part in six bits: of the first four
// parts in the lower bits of four bytes each, of the others in four bits of the last four bytes and in the upper bits.
struct AboveMinimum {
    static void read(const uint8_t* block, int, Scales& scales) {
        uint32_t words[3];
        std::memcpy(words, block + 4, sizeof words);
        const uint64_t upper_scales = words[0] >> 6 & 0x03030303, upper_minima = words[1] >> 6 & 0x03030303;
        const uint64_t last_scales = (words[2] & 0x0f0f0f0f) | upper_scales << 4;
        const uint64_t last_minima = (words[2] >> 4 & 0x0f0f0f0f) | upper_minima << 4;
        const auto times = [](uint64_t eight, const uint8_t* by) {
            const __m256i wide = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)eight));
            return _mm256_mul_ps(_mm256_cvtepi32_ps(wide), _mm512_castps512_ps256(float16(by)));
        };
        const __m256 found = times((words[0] & 0x3f3f3f3f) | last_scales << 32, block);
        const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
        _mm512_store_ps(scales.scale, _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(found)));
        _mm256_store_ps(scales.least, times((words[1] & 0x3f3f3f3f) | last_minima << 32, block + 2));
    }
    template <int PART>
    static Strip above(__m256i q, const Scales& scales) {
        const Strip strip = scaled(unsigned_bytes(q), scales.scale[2 * PART], scales.scale[2 * PART]);
        const __m512 least = _mm512_set1_ps(scales.least[PART]);
        return {_mm512_sub_ps(strip.low, least), _mm512_sub_ps(strip.high, least)};
    }
};

// Values of four bits: 32 bytes have two parts.
template <>
struct Format<Q4_K> : AboveMinimum {
    static constexpr int64_t SPAN_BYTES = 144;
    template <int PART>
    static Strip part(const uint8_t* block, const Scales& scales) {
        return above<PART>(low_bits(bytes(block + 16 + PART / 2 * 32), PART % 2 * 4, 15), scales);
    }
};

// Likewise, behind 32 bytes with a fifth bit for each part.
template <>
struct Format<Q5_K> : AboveMinimum {
    static constexpr int64_t SPAN_BYTES = 176;
    template <int PART>
    static Strip part(const uint8_t* block, const Scales& scales) {
        const __m256i lower = low_bits(bytes(block + 48 + PART / 2 * 32), PART % 2 * 4, 15);
        const __m256i fifth = _mm256_slli_epi16(low_bits(bytes(block + 16), PART, 1), 4);
        return above<PART>(_mm256_or_si256(lower, fifth), scales);
    }
};

// The lower four bits of all values, the upper two, a signed scale for each 16 values, and the scale of these.
template <>
struct Format<Q6_K> {
    static constexpr int64_t SPAN_BYTES = 210;
    static void read(const uint8_t* block, int, Scales& scales) {
        const __m128i packed = _mm_loadu_si128((const __m128i*)(block + 192));
        const __m512 wide = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(packed));
        _mm512_store_ps(scales.scale, _mm512_mul_ps(wide, float16(block + 208)));
    }
    template <int PART>
    static Strip part(const uint8_t* block, const Scales& scales) {
        constexpr int half = PART / 4, quarter = PART % 4;
        const __m256i lower = low_bits(bytes(block + half * 64 + quarter % 2 * 32), quarter / 2 * 4, 15);
        const __m256i upper = _mm256_slli_epi16(low_bits(bytes(block + 128 + half * 32), quarter * 2, 3), 4);
        const __m256i q = _mm256_sub_epi8(_mm256_or_si256(lower, upper), _mm256_set1_epi8(32));
        return scaled(signed_bytes(q), scales.scale[2 * PART], scales.scale[2 * PART + 1]);
    }
};

// Calls `take` with the number of each of `parts` parts of a span, and its values.
template <class Kind, class Take, int... PART>
inline void take_parts(const uint8_t* span, int parts, const Take& take, std::integer_sequence<int, PART...>) {
    Scales scales;
    Kind::read(span, parts, scales);
    (void)((PART < parts && (take(PART, Kind::template part<PART>(span, scales)), true)) && ...);
}

// Likewise for the values of a row from `at` on: `parts` parts of a span that begins there.
template <class Take>
inline void take_span(uint8_t kind, const uint8_t* row, int64_t at, int parts, const Take& take) {
    const auto of = [&](auto format) {
        using Kind = decltype(format);
        take_parts<Kind>(row + at / SPAN * Kind::SPAN_BYTES, parts, take, std::make_integer_sequence<int, PARTS>());
    };
    switch (kind) {
        case F32:
            return of(Format<F32>());
        case F16:
            return of(Format<F16>());
        case BF16:
            return of(Format<BF16>());
        case Q4_0:
            return of(Format<Q4_0>());
        case Q8_0:
            return of(Format<Q8_0>());
        case Q4_K:
            return of(Format<Q4_K>());
        case Q5_K:
            return of(Format<Q5_K>());
        case Q6_K:
            return of(Format<Q6_K>());
    }
}

// Packs LANES rows from `first` on in bfloat16, as tile.h says; rows from `count` on are zero. `inputs` is a multiple
// of STRIP.
inline void unpack_block(const BlockRows& matrix, int64_t first, int64_t count, int64_t inputs, Unit* packed) {
    __m512i span[LANES][PARTS];
    std::memset(span, 0, sizeof span);
    for (int64_t at = 0; at < inputs; at += SPAN) {
        const int parts = (int)(std::min(SPAN, inputs - at) / STRIP);
        for (int64_t lane = 0; lane < std::min<int64_t>(LANES, count - first); lane++)
            take_span(matrix.kinds[first + lane], matrix.rows[first + lane], at, parts, [&](int part, Strip strip) {
                span[lane][part] = (__m512i)_mm512_cvtne2ps_pbh(strip.high, strip.low);
            });
        for (int part = 0; part < parts; part++, packed += LANES * LANES) {
            __m512i rows[LANES];
            for (int lane = 0; lane < LANES; lane++) rows[lane] = span[lane][part];
            transpose(rows);
            for (int unit = 0; unit < LANES; unit++) _mm512_storeu_si512(packed + unit * LANES, rows[unit]);
        }
    }
}

// Takes a row out of its blocks.
inline void unpack_row(const BlockRows& matrix, int64_t row, int64_t inputs, float* out) {
    for (int64_t at = 0; at < inputs; at += SPAN) {
        const int parts = (int)(std::min(SPAN, inputs - at) / STRIP);
        take_span(matrix.kinds[row], matrix.rows[row], at, parts, [&](int part, Strip strip) {
            _mm512_storeu_ps(out + at + part * STRIP, strip.low);
            _mm512_storeu_ps(out + at + part * STRIP + LANES, strip.high);
        });
    }
}

}  // namespace maxsimd
