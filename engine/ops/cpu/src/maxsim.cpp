// MaxSim over ragged token embeddings: products stay in registers, and only their maxima are written.
//
// A query is packed once; a document's tokens are read in tiles of rows.

#include <limits>
#include <vector>

#include "tile.h"

namespace maxsimd {

template <class Number, int ROWS, int BLOCKS>
inline void keep_maxima(const Unit* rows, const Unit* query, int64_t units, __m512 (&best)[BLOCKS]) {
    // Documents are read from memory once: the next tile is prefetched while this one is multiplied.
    for (int64_t ahead = 0; ahead < ROWS * units; ahead += LANES)
        _mm_prefetch((const char*)(rows + ROWS * units + ahead), _MM_HINT_T0);
    typename Number::Sum sums[ROWS][BLOCKS];
    multiply_anew<Number, ROWS, BLOCKS>(rows, units, query, units * LANES, units, sums);
#pragma GCC unroll 4
    for (int block = 0; block < BLOCKS; block++)
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) best[block] = _mm512_max_ps(best[block], sums[row][block]);
}

// The sum, over up to BLOCKS * 16 query tokens, of each one's best similarity in the document.
template <class Number, int BLOCKS>
float best_matches(const Unit* document, int64_t tokens, const Unit* query, int64_t query_tokens, int64_t units) {
    __m512 best[BLOCKS];
    for (auto& block : best) block = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    int64_t token = 0;
    for (; token + 12 <= tokens; token += 12)
        keep_maxima<Number, 12, BLOCKS>(document + token * units, query, units, best);
    for (; token + 4 <= tokens; token += 4)
        keep_maxima<Number, 4, BLOCKS>(document + token * units, query, units, best);
    for (; token < tokens; token++) keep_maxima<Number, 1, BLOCKS>(document + token * units, query, units, best);
    float sum = 0;
    for (int block = 0; block < BLOCKS; block++)
        sum += _mm512_mask_reduce_add_ps(first_lanes(query_tokens - block * LANES), best[block]);
    return sum;
}

template <class Number>
void score_pairs(const Unit* queries, const int64_t* query_offsets, const Unit* documents,
                 const int64_t* document_offsets, const int64_t* pairs, int64_t count, int64_t units, float* scores) {
#pragma omp parallel
    {
        std::vector<Unit> packed;
        int64_t packed_query = -1;
#pragma omp for schedule(dynamic, 8)
        for (int64_t i = 0; i < count; i++) {
            const int64_t query = pairs[2 * i], document = pairs[2 * i + 1];
            const int64_t first = query_offsets[query], query_tokens = query_offsets[query + 1] - first;
            const int64_t start = document_offsets[document], tokens = document_offsets[document + 1] - start;
            if (tokens == 0) continue;  // the caller has filled in the score of an empty document
            if (query != packed_query) {
                packed.resize(round_up(query_tokens, LANES) * units);
                pack(queries + first * units, units, query_tokens, units, packed.data());
                packed_query = query;
            }
            const Unit* rows = documents + start * units;
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
    maxsimd::score_pairs<maxsimd::Float32>((const maxsimd::Unit*)queries, query_offsets,
                                           (const maxsimd::Unit*)documents, document_offsets, pairs, count, dim,
                                           scores);
}

// As above; dim must be even.
void maxsimd_maxsim_bfloat16(const void* queries, const int64_t* query_offsets, const void* documents,
                             const int64_t* document_offsets, const int64_t* pairs, int64_t count, int64_t dim,
                             float* scores) {
    maxsimd::score_pairs<maxsimd::BFloat16>((const maxsimd::Unit*)queries, query_offsets,
                                            (const maxsimd::Unit*)documents, document_offsets, pairs, count, dim / 2,
                                            scores);
}
}
#pragma GCC visibility pop
