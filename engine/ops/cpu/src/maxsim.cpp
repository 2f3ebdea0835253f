// MaxSim over ragged token embeddings: products stay in registers, and only their maxima are written.
//
// A query is packed once; a document's tokens are read in tiles of rows, from where documents lie end to end or
// each from where it lies by itself.

#include <limits>
#include <vector>

#include "tile.h"

namespace maxsimd {

// Maxima by query token. A maximum leaves NaN out, so `whole` has the query tokens that met none.
template <int BLOCKS>
struct Best {
    __m512 similarity[BLOCKS];
    __mmask16 whole[BLOCKS];
};

// Not inlined: the loop over units needs all registers for the addresses of rows.
template <class Number, int ROWS, int BLOCKS>
__attribute__((noinline)) void keep_maxima(const Unit* rows, const Unit* query, int64_t units, Best<BLOCKS>& best) {
    // Documents are read from memory once: the next tile is prefetched while this one is multiplied.
    for (int64_t ahead = 0; ahead < ROWS * units; ahead += LANES)
        _mm_prefetch((const char*)(rows + ROWS * units + ahead), _MM_HINT_T0);
    typename Number::Sum sums[ROWS][BLOCKS];
    multiply_anew<Number, ROWS, BLOCKS>(rows, units, query, units * LANES, units, sums);
#pragma GCC unroll 4
    for (int block = 0; block < BLOCKS; block++) {
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++)
            best.similarity[block] = _mm512_max_ps(best.similarity[block], sums[row][block]);
        // A comparison of two rows finds a NaN in either.
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row += 2)
            best.whole[block] =
                _mm512_mask_cmp_ps_mask(best.whole[block], sums[row][block], sums[(row + 1) % ROWS][block], _CMP_ORD_Q);
    }
}

// The sum, over up to BLOCKS * 16 query tokens, of each one's best similarity in the document; NaN if one of them is.
template <class Number, int BLOCKS>
float best_matches(const Unit* document, int64_t tokens, const Unit* query, int64_t query_tokens, int64_t units) {
    Best<BLOCKS> best;
    for (auto& block : best.whole) block = 0xffff;
    for (auto& block : best.similarity) block = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    int64_t token = 0;
    for (; token + 12 <= tokens; token += 12)
        keep_maxima<Number, 12, BLOCKS>(document + token * units, query, units, best);
    for (; token + 4 <= tokens; token += 4)
        keep_maxima<Number, 4, BLOCKS>(document + token * units, query, units, best);
    for (; token < tokens; token++) keep_maxima<Number, 1, BLOCKS>(document + token * units, query, units, best);
    float sum = 0;
    for (int block = 0; block < BLOCKS; block++) {
        const __mmask16 present = first_lanes(query_tokens - block * LANES);
        if (present & ~best.whole[block]) return std::numeric_limits<float>::quiet_NaN();
        sum += _mm512_mask_reduce_add_ps(present, best.similarity[block]);
    }
    return sum;
}

// Documents end to end, in the numbers that are computed with.
struct EndToEnd {
    const Unit* values;
    const int64_t* offsets;
    int64_t units;

    int64_t tokens(int64_t document) const { return offsets[document + 1] - offsets[document]; }
    const Unit* rows(int64_t document, std::vector<Unit>&) const { return values + offsets[document] * units; }
};

constexpr int64_t AHEAD = 4096;  // bytes

// Kinds of numbers that documents come in, as the callers count them.
enum Kind : int64_t { FLOAT32, BFLOAT16, INT8, FLOAT16 };

inline __m512 load(Kind kind, const void* row, int64_t first, __mmask16 mask) {
    switch (kind) {
        case FLOAT32:
            return load((const float*)row + first, mask);
        case BFLOAT16:
            return load((const uint16_t*)row + first, mask);
        case INT8:
            return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, (const int8_t*)row + first)));
        default:
            return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, (const uint16_t*)row + first));
    }
}

template <Kind KIND, class Value>
inline void convert_some(const char* row, __m512 scale, int64_t first, __mmask16 mask, Value* to) {
    __m512 numbers = load(KIND, row, first, mask);
    if constexpr (KIND == INT8) numbers = _mm512_mul_ps(numbers, scale);
    store(to + first, mask, numbers);
}

template <Kind KIND, class Value>
void convert(const void* values, const float* scales, int64_t tokens, int64_t dim, Value* to) {
    constexpr int64_t size = KIND == FLOAT32 ? 4 : KIND == INT8 ? 1 : 2;
    const int64_t whole = dim / LANES * LANES;
    for (int64_t token = 0; token < tokens; token++, to += dim) {
        const char* row = (const char*)values + token * dim * size;
        const __m512 scale = _mm512_set1_ps(KIND == INT8 ? scales[token] : 1);
        // Documents lie anywhere: what is read is fetched before it is needed, as far ahead as memory is slow.
        for (int64_t byte = 0; byte < dim * size; byte += 64) _mm_prefetch(row + AHEAD + byte, _MM_HINT_T0);
        // The mask of whole vectors is a constant, which leaves no masked instructions.
        for (int64_t first = 0; first < whole; first += LANES) convert_some<KIND>(row, scale, first, 0xffff, to);
        if (whole < dim) convert_some<KIND>(row, scale, whole, first_lanes(dim - whole), to);
    }
}

// Documents by their addresses, each in a kind of its own; in int8 with a scale for each token.
template <class Number>
struct Apart {
    const int64_t* kinds;
    const void* const* values;
    const float* const* scales;
    const int64_t* lengths;
    int64_t dim;

    int64_t tokens(int64_t document) const { return lengths[document]; }

    // In `room`, unless they are of the right kind already.
    const Unit* rows(int64_t document, std::vector<Unit>& room) const {
        using Value = typename Number::Value;
        const Kind kind = (Kind)kinds[document];
        if (kind == (std::is_same_v<Number, Float32> ? FLOAT32 : BFLOAT16)) return (const Unit*)values[document];
        const int64_t count = lengths[document];
        room.resize(count * dim / Number::PER_UNIT);
        Value* to = (Value*)room.data();
        if (kind == FLOAT32) convert<FLOAT32>(values[document], nullptr, count, dim, to);
        if (kind == BFLOAT16) convert<BFLOAT16>(values[document], nullptr, count, dim, to);
        if (kind == INT8) convert<INT8>(values[document], scales[document], count, dim, to);
        if (kind == FLOAT16) convert<FLOAT16>(values[document], nullptr, count, dim, to);
        return room.data();
    }
};

template <class Number, class Documents>
void score_pairs(const Unit* queries, const int64_t* query_offsets, const Documents& documents, const int64_t* pairs,
                 int64_t count, int64_t units, float* scores) {
#pragma omp parallel
    {
        std::vector<Unit> packed, room;
        int64_t packed_query = -1;
#pragma omp for schedule(dynamic, 8)
        for (int64_t i = 0; i < count; i++) {
            const int64_t query = pairs[2 * i], document = pairs[2 * i + 1];
            const int64_t first = query_offsets[query], query_tokens = query_offsets[query + 1] - first;
            const int64_t tokens = documents.tokens(document);
            if (tokens == 0) continue;  // the caller has filled in the score of an empty document
            if (query != packed_query) {
                packed.resize(round_up(query_tokens, LANES) * units);
                pack(queries + first * units, units, query_tokens, units, packed.data());
                packed_query = query;
            }
            const Unit* rows = documents.rows(document, room);
            float score = 0;
            int64_t done = 0;
            for (; query_tokens - done > LANES; done += 2 * LANES)
                score +=
                    best_matches<Number, 2>(rows, tokens, packed.data() + done * units, query_tokens - done, units);
            if (done < query_tokens)
                score +=
                    best_matches<Number, 1>(rows, tokens, packed.data() + done * units, query_tokens - done, units);
            scores[i] = score;
        }
    }
}

}  // namespace maxsimd

#pragma GCC visibility push(default)
extern "C" {

// queries [Tq][dim] and documents [Td][dim] with offsets, pairs [count][2] of indices -> scores [count].
void maxsimd_maxsim_float32(const void* queries, const int64_t* query_offsets, const void* documents,
                            const int64_t* document_offsets, const int64_t* pairs, int64_t count, int64_t dim,
                            float* scores) {
    const maxsimd::EndToEnd all{(const maxsimd::Unit*)documents, document_offsets, dim};
    maxsimd::score_pairs<maxsimd::Float32>((const maxsimd::Unit*)queries, query_offsets, all, pairs, count, dim,
                                           scores);
}

// As above; dim must be even.
void maxsimd_maxsim_bfloat16(const void* queries, const int64_t* query_offsets, const void* documents,
                             const int64_t* document_offsets, const int64_t* pairs, int64_t count, int64_t dim,
                             float* scores) {
    const maxsimd::EndToEnd all{(const maxsimd::Unit*)documents, document_offsets, dim / 2};
    maxsimd::score_pairs<maxsimd::BFloat16>((const maxsimd::Unit*)queries, query_offsets, all, pairs, count, dim / 2,
                                            scores);
}

// The same with documents by their addresses: of each its kind, its values [length][dim] and, in int8, its scales
// [length].
void maxsimd_maxsim_apart_float32(const void* queries, const int64_t* query_offsets, const int64_t* kinds,
                                  const void* const* values, const float* const* scales, const int64_t* lengths,
                                  const int64_t* pairs, int64_t count, int64_t dim, float* scored) {
    const maxsimd::Apart<maxsimd::Float32> all{kinds, values, scales, lengths, dim};
    maxsimd::score_pairs<maxsimd::Float32>((const maxsimd::Unit*)queries, query_offsets, all, pairs, count, dim,
                                           scored);
}

// As above; dim must be even.
void maxsimd_maxsim_apart_bfloat16(const void* queries, const int64_t* query_offsets, const int64_t* kinds,
                                   const void* const* values, const float* const* scales, const int64_t* lengths,
                                   const int64_t* pairs, int64_t count, int64_t dim, float* scored) {
    const maxsimd::Apart<maxsimd::BFloat16> all{kinds, values, scales, lengths, dim};
    maxsimd::score_pairs<maxsimd::BFloat16>((const maxsimd::Unit*)queries, query_offsets, all, pairs, count, dim / 2,
                                            scored);
}
}
#pragma GCC visibility pop
