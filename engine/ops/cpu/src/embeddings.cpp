// Embeddings of an encoder built as BERT's: for each row the sum of a row of each of three tables, and its layer norm.
// The sum stays in float32 until it is normalised.

#include <vector>

#include <omp.h>

#include "linear.h"

namespace maxsimd {

// A table [rows][columns], and which of its rows each row of the output takes; null for the first.
template <class Value>
struct Table {
    const Value* values;
    int64_t rows;
    const int64_t* ids;

    int64_t id(int64_t row) const { return ids ? ids[row] : 0; }
    bool has_all(int64_t count) const {
        for (int64_t row = 0; row < count; row++)
            if ((uint64_t)id(row) >= (uint64_t)rows) return false;
        return true;
    }
};

template <class Value>
void embed(const Table<Value>& words, const Table<Value>& types, const Table<Value>& positions, int64_t rows,
           int64_t columns, const Norm<Value>& norm, Value* out) {
#pragma omp parallel
    {
        std::vector<float> sums(round_up(columns, LANES));
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            const Value* word = words.values + words.id(row) * columns;
            const Value* type = types.values + types.id(row) * columns;
            const Value* position = positions.values + positions.id(row) * columns;
            __m512 total = _mm512_setzero_ps();
            for (int64_t i = 0; i < columns; i += LANES) {
                const __mmask16 mask = first_lanes(columns - i);
                __m512 sum = _mm512_add_ps(load(word + i, mask), load(type + i, mask));
                sum = _mm512_add_ps(sum, load(position + i, mask));
                _mm512_storeu_ps(sums.data() + i, sum);
                total = _mm512_add_ps(total, sum);
            }
            normalise_sums(sums.data(), total, norm, columns, out + row * columns);
        }
    }
}

}  // namespace maxsimd

#pragma GCC visibility push(default)
extern "C" {

// out [rows][columns], float32 if `kind` is 0, else bfloat16, as the three tables are; `type_ids` may be null. Returns 0,
// or 1 without having written anything where an id is not in its table.
int maxsimd_embed(int kind, const int64_t* word_ids, const int64_t* type_ids, const int64_t* position_ids, int64_t rows,
                  const void* words, int64_t word_count, const void* types, int64_t type_count, const void* positions,
                  int64_t position_count, int64_t columns, const float* norm_weight, const float* norm_bias,
                  float epsilon, void* out) {
    using namespace maxsimd;
    const auto compute = [&](auto number) {
        using Value = typename decltype(number)::Value;
        const Table<Value> word{(const Value*)words, word_count, word_ids};
        const Table<Value> type{(const Value*)types, type_count, type_ids};
        const Table<Value> position{(const Value*)positions, position_count, position_ids};
        if (!word.has_all(rows) || !type.has_all(rows) || !position.has_all(rows)) return 1;
        embed<Value>(word, type, position, rows, columns, {nullptr, 0, norm_weight, norm_bias, epsilon}, (Value*)out);
        return 0;
    };
    return by_kind<Float32, BFloat16>(kind, compute);
}
}
#pragma GCC visibility pop
