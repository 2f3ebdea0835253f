// Attention within each sequence of a packed step, in bfloat16 with float32 sums.
//
// A task is one sequence and one head of keys. Its keys and values, behind those of its prefix if it has one, are
// packed once; then a tile of queries at a time goes through products, softmax and products again, all of it in the
// first-level cache.

#include <algorithm>
#include <limits>
#include <vector>

#include "tile.h"

namespace maxsimd {

constexpr int TILE_ROWS = 12;

// Rows of bfloat16, [heads][rows][head_dim], with these distances between heads and between rows.
struct Heads {
    const uint16_t* values;
    int64_t head_stride, row_stride;
    const uint16_t* at(int64_t head, int64_t row) const { return values + head * head_stride + row * row_stride; }
};

// Keys and values [key_heads][length][head_dim] that stand before those of a sequence.
struct Prefix {
    Heads k, v;
    int64_t length;
};

// What a sequence attends to: so many keys of its own, from its first row on, behind those of a prefix.
struct Sequence {
    int64_t first_row, queries, own_keys;
    const Prefix* prefix;  // or null

    int64_t before() const { return prefix ? prefix->length : 0; }
    int64_t keys() const { return before() + own_keys; }
    const uint16_t* key(const Heads& own, int64_t head, int64_t i) const {
        return i < before() ? prefix->k.at(head, i) : own.at(head, first_row + i - before());
    }
    const uint16_t* value(const Heads& own, int64_t head, int64_t i) const {
        return i < before() ? prefix->v.at(head, i) : own.at(head, first_row + i - before());
    }
};

struct Attention {
    Heads q, k, v;
    int64_t heads, key_heads, head_dim;
    bool causal;
    int64_t window;  // how far off keys may be, plus one; 0 for no limit
    float scale;
    uint16_t* out;  // [rows][heads][head_dim]

    // The keys that the query at a position may see, of the first `keys`.
    int64_t first_key(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }
    int64_t last_key(int64_t position, int64_t keys) const {
        if (causal) return std::min(keys, position + 1);
        return window ? std::min(keys, position + window) : keys;
    }
};

struct Scratch {
    std::vector<Unit> keys, values;
    std::vector<float> products;    // [TILE_ROWS][columns], of queries and keys
    std::vector<uint16_t> weights;  // likewise, what softmax makes of them
    int64_t columns, value_stride;  // keys rounded up; units between packed blocks of values

    void fit(int64_t key_count, int64_t head_dim) {
        columns = round_up(key_count, 2 * LANES);
        value_stride = columns / 2 * LANES;
        keys.resize(columns * head_dim / 2);
        values.resize(head_dim / LANES * value_stride);
        products.resize(TILE_ROWS * columns);
        weights.resize(TILE_ROWS * columns);
    }
};

// 2^x for x <= 0, to about 4e-5 of its value: a hundredth of what bfloat16 rounds away.
inline __m512 power_of_two(__m512 x) {
    constexpr float series[] = {1, 0.69314718f, 0.24022651f, 0.05550411f, 0.00961813f};
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(x, whole);
    __m512 sum = _mm512_set1_ps(series[4]);
    for (int power = 3; power >= 0; power--) sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(series[power]));
    return _mm512_scalef_ps(sum, whole);
}

// Keys [keys][head_dim] into blocks of 16 columns, a unit being a pair of dimensions; the rest is zero.
inline void pack_keys(const Attention& a, const Sequence& sequence, int64_t head, Scratch& scratch) {
    const int64_t units = a.head_dim / 2, keys = sequence.keys();
    for (int64_t key = 0; key < scratch.columns; key++) {
        Unit* column = scratch.keys.data() + key / LANES * LANES * units + key % LANES;
        const auto* row = key < keys ? (const Unit*)sequence.key(a.k, head, key) : nullptr;
        for (int64_t unit = 0; unit < units; unit++) column[unit * LANES] = row ? row[unit] : 0;
    }
}

// Values [keys][head_dim] into blocks of 16 columns, a unit being a pair of keys; the rest is zero.
inline void pack_values(const Attention& a, const Sequence& sequence, int64_t head, Scratch& scratch) {
    const int64_t keys = sequence.keys();
    for (int64_t key = 0; key < scratch.columns; key += 2) {
        const uint16_t* first = key < keys ? sequence.value(a.v, head, key) : nullptr;
        const uint16_t* second = key + 1 < keys ? sequence.value(a.v, head, key + 1) : nullptr;
        for (int64_t column = 0; column < a.head_dim; column += LANES) {
            __m512i pair = _mm512_setzero_si512();
            if (first) pair = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(first + column)));
            if (second) {
                const __m512i upper = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(second + column)));
                pair = _mm512_or_si512(pair, _mm512_slli_epi32(upper, 16));
            }
            Unit* block = scratch.values.data() + column / LANES * scratch.value_stride;
            _mm512_storeu_si512(block + key / 2 * LANES, pair);
        }
    }
}

// Which of the 16 columns from `column` on are in [first, last).
inline __mmask16 between(int64_t column, int64_t first, int64_t last) {
    if (column >= first && column + LANES <= last) return 0xffff;
    return first_lanes(last - column) & ~first_lanes(first - column);
}

// Products of one query with keys into weights, not yet divided by their sum, which is returned. Of columns
// [from, to) those in [first, last) are seen. `scale` makes powers of two of the products.
inline float soften(const float* products, uint16_t* weights, float scale, int64_t first, int64_t last, int64_t from,
                    int64_t to) {
    __m512 greatest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    for (int64_t column = from; column < to; column += LANES)
        greatest = _mm512_mask_max_ps(greatest, between(column, first, last), greatest,
                                      _mm512_loadu_ps(products + column));
    greatest = _mm512_set1_ps(_mm512_reduce_max_ps(greatest) * scale);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t column = from; column < to; column += LANES) {
        const __m512 product = _mm512_loadu_ps(products + column);
        const __m512 weight = _mm512_maskz_mov_ps(
            between(column, first, last), power_of_two(_mm512_fmsub_ps(product, _mm512_set1_ps(scale), greatest)));
        sum = _mm512_add_ps(sum, weight);
        store_bfloat16(weights + column, 0xffff, weight);
    }
    return _mm512_reduce_add_ps(sum);
}

template <int ROWS, int BLOCKS>
inline void product_tile(const Attention& a, const uint16_t* queries, const Scratch& scratch, int64_t column,
                       float* products) {
    const int64_t units = a.head_dim / 2;
    __m512 sums[ROWS][BLOCKS];
    multiply_anew<BFloat16, ROWS, BLOCKS>((const Unit*)queries, a.q.row_stride / 2, scratch.keys.data() + column * units,
                                     units * LANES, units, sums);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
        for (int block = 0; block < BLOCKS; block++)
            _mm512_storeu_ps(products + row * scratch.columns + column + block * LANES, sums[row][block]);
}

template <int ROWS, int BLOCKS>
inline void mix_tile(const Attention& a, const Scratch& scratch, int64_t from, int64_t to, int64_t column,
                     const float* totals, uint16_t* out) {
    __m512 sums[ROWS][BLOCKS];
    multiply_anew<BFloat16, ROWS, BLOCKS>(
        (const Unit*)(scratch.weights.data() + from), scratch.columns / 2,
        scratch.values.data() + column / LANES * scratch.value_stride + from / 2 * LANES, scratch.value_stride,
        (to - from) / 2, sums);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) {
        const __m512 share = _mm512_set1_ps(totals[row] > 0 ? 1 / totals[row] : 0);  // nothing seen: zero
#pragma GCC unroll 4
        for (int block = 0; block < BLOCKS; block++)
            store_bfloat16(out + row * a.heads * a.head_dim + column + block * LANES, 0xffff,
                           _mm512_mul_ps(sums[row][block], share));
    }
}

// The queries in rows [row, row + ROWS) of a sequence, for one head.
template <int ROWS>
void attend_tile(const Attention& a, Scratch& scratch, const Sequence& sequence, int64_t row, int64_t head) {
    const uint16_t* queries = a.q.at(head, sequence.first_row + row);
    const int64_t position = sequence.before() + row, keys = sequence.keys();
    const int64_t from = a.first_key(position) / (2 * LANES) * (2 * LANES);
    const int64_t to = std::max(from, round_up(a.last_key(position + ROWS - 1, keys), 2 * LANES));
    for (int64_t column = from; column < to; column += 2 * LANES)
        product_tile<ROWS, 2>(a, queries, scratch, column, scratch.products.data());
    const float scale = a.scale * 1.44269504f;  // of e in powers of two
    float totals[ROWS];
    for (int i = 0; i < ROWS; i++)
        totals[i] = soften(scratch.products.data() + i * scratch.columns, scratch.weights.data() + i * scratch.columns,
                           scale, a.first_key(position + i), a.last_key(position + i, keys), from, to);
    uint16_t* out = a.out + ((sequence.first_row + row) * a.heads + head) * a.head_dim;
    int64_t column = 0;
    for (; column + LANES < a.head_dim; column += 2 * LANES)
        mix_tile<ROWS, 2>(a, scratch, from, to, column, totals, out);
    if (column < a.head_dim) mix_tile<ROWS, 1>(a, scratch, from, to, column, totals, out);
}

template <int ROWS>
void attend_rows(int present, const Attention& a, Scratch& scratch, const Sequence& sequence, int64_t row,
                 int64_t head) {
    if constexpr (ROWS > 1) {
        if (present < ROWS) {
            attend_rows<ROWS - 1>(present, a, scratch, sequence, row, head);
            return;
        }
    }
    attend_tile<ROWS>(a, scratch, sequence, row, head);
}

void attend_sequence(const Attention& a, Scratch& scratch, const Sequence& sequence, int64_t key_head) {
    scratch.fit(sequence.keys(), a.head_dim);
    pack_keys(a, sequence, key_head, scratch);
    pack_values(a, sequence, key_head, scratch);
    const int64_t queries = sequence.queries, tiles = (queries + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t repeats = a.heads / a.key_heads;
    for (int64_t head = key_head * repeats; head < (key_head + 1) * repeats; head++)
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t row = queries * tile / tiles, stop = queries * (tile + 1) / tiles;
            attend_rows<TILE_ROWS>((int)(stop - row), a, scratch, sequence, row, head);
        }
}

}  // namespace maxsimd

#pragma GCC visibility push(default)
extern "C" {

// q [heads][rows][head_dim], k and v [key_heads][rows][head_dim], bfloat16 with strides in elements (of heads and
// of rows, six numbers, rows' even); head_dim a multiple of 16. `sequences` is [count][4]: first row, how many of
// its queries to compute from there, how many keys of its own they may see, and which prefix stands before these,
// or -1. `prefixes` is [n][7]: the addresses of keys and values, their strides as above, and their length. Writes
// out [rows][heads][head_dim].
void maxsimd_attention(const void* q, const void* k, const void* v, const int64_t* strides, int64_t heads,
                       int64_t key_heads, int64_t head_dim, const int64_t* sequences, int64_t count,
                       const int64_t* prefixes, int64_t prefix_count, int causal, int64_t window, float scale,
                       void* out) {
    using namespace maxsimd;
    const Attention attention{{(const uint16_t*)q, strides[0], strides[1]},
                              {(const uint16_t*)k, strides[2], strides[3]},
                              {(const uint16_t*)v, strides[4], strides[5]},
                              heads,
                              key_heads,
                              head_dim,
                              causal != 0,
                              window,
                              scale,
                              (uint16_t*)out};
    std::vector<Prefix> before;
    for (const int64_t* at = prefixes; at < prefixes + 7 * prefix_count; at += 7)
        before.push_back({{(const uint16_t*)at[0], at[2], at[3]}, {(const uint16_t*)at[1], at[4], at[5]}, at[6]});
#pragma omp parallel
    {
        Scratch scratch;
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < count * key_heads; task++) {
            const int64_t* at = sequences + task / key_heads * 4;
            const Sequence sequence{at[0], at[1], at[2], at[3] < 0 ? nullptr : &before[at[3]]};
            attend_sequence(attention, scratch, sequence, task % key_heads);
        }
    }
}
}
#pragma GCC visibility pop
