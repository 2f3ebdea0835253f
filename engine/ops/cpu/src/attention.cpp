// Attention within each sequence of a packed step, in float32 or bfloat16 with float32 sums.
//
// A task is one sequence and one head of keys. Its keys and values, after those of its prefix if it has one, are
// packed once; then one tile of queries at a time goes through products, softmax and products again, all of it in the
// first-level cache. A query's sums run over its keys in order, from the first key of its sequence on, so that its
// result is the same to the last bit whatever tile it is in, and however many of its keys belong to a prefix.

#include <algorithm>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "amx.h"
#include "functions.h"
#include "team.h"
#include "tile.h"

namespace maxsimd {

constexpr int TILE_ROWS = 12, AMX_ROWS = 32;

// Rows [heads][rows][head_dim], with these distances between heads and between rows.
template <class Value>
struct Heads {
    const Value* values;
    int64_t head_stride, row_stride;
    const Value* at(int64_t head, int64_t row) const { return values + head * head_stride + row * row_stride; }
};

// Keys and values [key_heads][length][head_dim] that come before a sequence's own.
template <class Value>
struct Prefix {
    Heads<Value> k, v;
    int64_t length;
};

// What a sequence attends to: the keys of a prefix, if it has one, and then `own_keys` keys from its first row on.
template <class Value>
struct Sequence {
    int64_t first_row, queries, own_keys;
    const Prefix<Value>* prefix;  // or null

    int64_t before() const { return prefix ? prefix->length : 0; }
    int64_t keys() const { return before() + own_keys; }
    const Value* key(const Heads<Value>& own, int64_t head, int64_t i) const {
        return i < before() ? prefix->k.at(head, i) : own.at(head, first_row + i - before());
    }
    const Value* value(const Heads<Value>& own, int64_t head, int64_t i) const {
        return i < before() ? prefix->v.at(head, i) : own.at(head, first_row + i - before());
    }
};

// What the distance of a key from a query adds to their product, by head. The entry `reach` + d is for a key that
// comes d positions after its query; entries beyond 2 * `reach` are there to be read, and mean nothing.
struct Positions {
    const float* bias;           // [heads][stride], divided by the scale, or null
    const Unit *keys, *queries;  // [heads][units of a head][stride]: multiplied with queries, and with keys; or null
    int64_t reach, stride;

    int64_t at(int64_t position, int64_t key) const { return reach + key - position; }
};

template <class Value>
struct Attention {
    Heads<Value> q, k, v;
    Positions positions;
    int64_t heads, key_heads, head_dim;
    bool causal;
    int64_t window;  // how far off keys may be, plus one; 0 for no limit
    float scale;
    Value* out;  // [rows], out_stride apart, of heads side by side
    int64_t out_stride;

    // The keys that the query at a position may see, of the first `keys`.
    int64_t first_key(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }
    int64_t last_key(int64_t position, int64_t keys) const {
        if (causal) return std::min(keys, position + 1);
        return window ? std::min(keys, position + window) : keys;
    }
};

// Memory that begins at a cache line.
template <class Item>
struct Aligned : std::allocator<Item> {
    template <class Other>
    struct rebind {
        using other = Aligned<Other>;
    };
    Item* allocate(size_t count) { return (Item*)::operator new(count * sizeof(Item), std::align_val_t(64)); }
    void deallocate(Item* items, size_t) { ::operator delete(items, std::align_val_t(64)); }
};

template <class Number>
struct Scratch {
    template <class Item>
    using Vector = std::vector<Item, Aligned<Item>>;
    Vector<Unit> keys, values, queries;      // queries and sums for AMX alone: [rows of a tile][head_dim]
    Vector<float> sums;
    Vector<float> products;                  // [rows of a tile][columns], of queries and keys
    Vector<typename Number::Value> weights;  // likewise, what softmax makes of them
    int64_t columns, value_stride;                // keys rounded up; units between packed blocks of values

    // Keys are rounded up to a multiple of `columns_at_once`.
    void fit(int64_t key_count, int64_t head_dim, int rows, int columns_at_once) {
        columns = round_up(key_count, columns_at_once);
        value_stride = columns / Number::PER_UNIT * LANES;
        keys.resize(columns * head_dim / Number::PER_UNIT);
        values.resize(head_dim / LANES * value_stride);
        products.resize(rows * columns);
        weights.resize(rows * columns);
        queries.resize(rows * head_dim / Number::PER_UNIT);
        sums.resize(rows * head_dim);
    }
};

// Keys [keys][head_dim] into blocks of 16 columns, a unit being one or two dimensions; the rest is zero.
template <class Number>
void pack_keys(const Attention<typename Number::Value>& a, const Sequence<typename Number::Value>& sequence,
               int64_t head, Scratch<Number>& scratch) {
    const int64_t units = a.head_dim / Number::PER_UNIT, keys = sequence.keys();
    int64_t key = 0;
    for (; units % LANES == 0 && key + LANES <= keys; key += LANES)
        for (int64_t unit = 0; unit < units; unit += LANES) {
            __m512i rows[LANES];
            for (int lane = 0; lane < LANES; lane++)
                rows[lane] = _mm512_loadu_si512((const Unit*)sequence.key(a.k, head, key + lane) + unit);
            transpose(rows);
            Unit* block = scratch.keys.data() + (key * units) + unit * LANES;
            for (int lane = 0; lane < LANES; lane++) _mm512_storeu_si512(block + lane * LANES, rows[lane]);
        }
    for (; key < scratch.columns; key++) {
        Unit* column = scratch.keys.data() + key / LANES * LANES * units + key % LANES;
        const auto* row = key < keys ? (const Unit*)sequence.key(a.k, head, key) : nullptr;
        for (int64_t unit = 0; unit < units; unit++) column[unit * LANES] = row ? row[unit] : 0;
    }
}

// Sixteen units of one value each, or of two values of neighbouring keys; null is zero.
inline __m512i unit_of(const float* value) { return value ? _mm512_loadu_si512(value) : _mm512_setzero_si512(); }

inline __m512i unit_of(const uint16_t* first, const uint16_t* second) {
    const auto wide = [](const uint16_t* value) {
        return value ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)value)) : _mm512_setzero_si512();
    };
    return _mm512_or_si512(wide(first), _mm512_slli_epi32(wide(second), 16));
}

// Values [keys][head_dim] into blocks of 16 columns, a unit being one or two keys; the rest is zero.
template <class Number>
void pack_values(const Attention<typename Number::Value>& a, const Sequence<typename Number::Value>& sequence,
                 int64_t head, Scratch<Number>& scratch) {
    const auto at = [&](int64_t key, int64_t column) {
        return key < sequence.keys() ? sequence.value(a.v, head, key) + column : nullptr;
    };
    for (int64_t key = 0; key < scratch.columns; key += Number::PER_UNIT)
        for (int64_t column = 0; column < a.head_dim; column += LANES) {
            __m512i unit;
            if constexpr (Number::PER_UNIT == 1)
                unit = unit_of(at(key, column));
            else
                unit = unit_of(at(key, column), at(key + 1, column));
            Unit* block = scratch.values.data() + column / LANES * scratch.value_stride;
            _mm512_storeu_si512(block + key / Number::PER_UNIT * LANES, unit);
        }
}

// Which of the 16 columns from `column` on are in [first, last).
inline __mmask16 between(int64_t column, int64_t first, int64_t last) {
    if (column >= first && column + LANES <= last) return 0xffff;
    return first_lanes(last - column) & ~first_lanes(first - column);
}

// Turns the products of one query with keys into weights, and returns their sum, by which they are not divided yet.
// Of the columns [from, to), the query sees those in [first, last). `scale` turns products into powers of two.
template <class Number>
inline float soften(const float* products, typename Number::Value* weights, float scale, int64_t first, int64_t last,
                    int64_t from, int64_t to) {
    __m512 greatest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    for (int64_t column = from; column < to; column += LANES)
        greatest =
            _mm512_mask_max_ps(greatest, between(column, first, last), greatest, _mm512_loadu_ps(products + column));
    greatest = _mm512_set1_ps(_mm512_reduce_max_ps(greatest) * scale);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t column = from; column < to; column += LANES) {
        const __m512 product = _mm512_loadu_ps(products + column);
        const __m512 power = _mm512_fmsub_ps(product, _mm512_set1_ps(scale), greatest);
        const __m512 weight = _mm512_maskz_mov_ps(between(column, first, last), power_of_two<Number>(power));
        sum = _mm512_add_ps(sum, weight);
        store(weights + column, 0xffff, weight);
    }
    return _mm512_reduce_add_ps(sum);
}

template <class Number, int ROWS, int BLOCKS>
inline void product_tile(const Attention<typename Number::Value>& a, const typename Number::Value* queries,
                         Scratch<Number>& scratch, int64_t column) {
    const int64_t units = a.head_dim / Number::PER_UNIT;
    float* products = scratch.products.data() + column;
    __m512 sums[ROWS][BLOCKS];
    multiply_anew<Number, ROWS, BLOCKS>((const Unit*)queries, a.q.row_stride / Number::PER_UNIT,
                                        scratch.keys.data() + column * units, units * LANES, units, sums);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
        for (int block = 0; block < BLOCKS; block++)
            _mm512_storeu_ps(products + row * scratch.columns + block * LANES, sums[row][block]);
}

// As `product_tile`, for queries from a position on, with the products of queries and of keys with positions. Sixteen
// neighbouring keys are multiplied with what belongs to their sixteen distances, so that a query's products with
// positions are as many as those with keys, and none has to be looked up.
template <class Number, int ROWS, int BLOCKS>
inline void positioned_tile(const Attention<typename Number::Value>& a, const typename Number::Value* queries,
                            Scratch<Number>& scratch, int64_t column, int64_t position, int64_t head) {
    const int64_t units = a.head_dim / Number::PER_UNIT, stride = a.positions.stride;
    const int64_t first = head * units * stride + a.positions.at(position, column);
    const Unit *near_keys = a.positions.keys + first, *near_queries = a.positions.queries + first;
    const Unit *rows = (const Unit*)queries, *keys = scratch.keys.data() + column * units;
    const int64_t row_stride = a.q.row_stride / Number::PER_UNIT;
    typename Number::Sum sums[ROWS][BLOCKS];
    for (auto& row : sums)
        for (auto& sum : row) sum = Number::zero();
    for (int64_t unit = 0; unit < units; unit++) {
        __m512i key[BLOCKS];
#pragma GCC unroll 4
        for (int block = 0; block < BLOCKS; block++)
            key[block] = _mm512_loadu_si512(keys + (block * units + unit) * LANES);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            const __m512i query = _mm512_set1_epi32(rows[row * row_stride + unit]);
            const int64_t at = unit * stride - row;
#pragma GCC unroll 4
            for (int block = 0; block < BLOCKS; block++) {
                const int64_t here = at + block * LANES;
                sums[row][block] = Number::add(sums[row][block], query, key[block]);
                sums[row][block] = Number::add(sums[row][block], query, _mm512_loadu_si512(near_keys + here));
                sums[row][block] = Number::add(sums[row][block], _mm512_loadu_si512(near_queries + here), key[block]);
            }
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
        for (int block = 0; block < BLOCKS; block++)
            _mm512_storeu_ps(scratch.products.data() + row * scratch.columns + column + block * LANES,
                             sums[row][block]);
}

// Adds to the products of the query at a position, in columns [from, to), the bias of their distances.
template <class Value>
inline void add_bias(const Attention<Value>& a, float* products, int64_t position, int64_t head, int64_t from,
                     int64_t to) {
    const float* bias = a.positions.bias + head * a.positions.stride + a.positions.at(position, 0);
    for (int64_t column = from; column < to; column += LANES)
        _mm512_storeu_ps(products + column,
                         _mm512_add_ps(_mm512_loadu_ps(products + column), _mm512_loadu_ps(bias + column)));
}

template <class Number, int ROWS, int BLOCKS>
inline void mix_tile(const Attention<typename Number::Value>& a, const Scratch<Number>& scratch, int64_t from,
                     int64_t to, int64_t column, const float* totals, typename Number::Value* out) {
    constexpr int PER_UNIT = Number::PER_UNIT;
    const Unit* values = scratch.values.data() + column / LANES * scratch.value_stride + from / PER_UNIT * LANES;
    __m512 sums[ROWS][BLOCKS];
    multiply_anew<Number, ROWS, BLOCKS>((const Unit*)(scratch.weights.data() + from), scratch.columns / PER_UNIT,
                                        values, scratch.value_stride, (to - from) / PER_UNIT, sums);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) {
        const __m512 share = _mm512_set1_ps(totals[row] > 0 ? 1 / totals[row] : 0);  // nothing seen: zero
#pragma GCC unroll 4
        for (int block = 0; block < BLOCKS; block++)
            store(out + row * a.out_stride + column + block * LANES, 0xffff, _mm512_mul_ps(sums[row][block], share));
    }
}

// The queries in rows [row, row + ROWS) of a sequence, for one head.
template <class Number, int ROWS>
void attend_tile(const Attention<typename Number::Value>& a, Scratch<Number>& scratch,
                 const Sequence<typename Number::Value>& sequence, int64_t row, int64_t head) {
    const auto* queries = a.q.at(head, sequence.first_row + row);
    const int64_t position = sequence.before() + row, keys = sequence.keys();
    const int64_t from = a.first_key(position) / LANES * LANES;
    const int64_t to = std::max(from, round_up(a.last_key(position + ROWS - 1, keys), LANES));
    const auto products = [&](auto blocks, int64_t column) {
        if (a.positions.keys)
            positioned_tile<Number, ROWS, blocks()>(a, queries, scratch, column, position, head);
        else
            product_tile<Number, ROWS, blocks()>(a, queries, scratch, column);
    };
    int64_t column = from;
    for (; column + LANES < to; column += 2 * LANES) products(std::integral_constant<int, 2>{}, column);
    if (column < to) products(std::integral_constant<int, 1>{}, column);
    if (a.positions.bias)
        for (int i = 0; i < ROWS; i++)
            add_bias(a, scratch.products.data() + i * scratch.columns, position + i, head, from, to);
    const float scale = a.scale * 1.44269504f;  // times log2(e)
    float totals[ROWS];
    for (int i = 0; i < ROWS; i++)
        totals[i] =
            soften<Number>(scratch.products.data() + i * scratch.columns, scratch.weights.data() + i * scratch.columns,
                           scale, a.first_key(position + i), a.last_key(position + i, keys), from, to);
    auto* out = a.out + (sequence.first_row + row) * a.out_stride + head * a.head_dim;
    for (column = 0; column + LANES < a.head_dim; column += 2 * LANES)
        mix_tile<Number, ROWS, 2>(a, scratch, from, to, column, totals, out);
    if (column < a.head_dim) mix_tile<Number, ROWS, 1>(a, scratch, from, to, column, totals, out);
}

template <class Number, int ROWS>
void attend_rows(int present, const Attention<typename Number::Value>& a, Scratch<Number>& scratch,
                 const Sequence<typename Number::Value>& sequence, int64_t row, int64_t head) {
    if constexpr (ROWS > 1) {
        if (present < ROWS) {
            attend_rows<Number, ROWS - 1>(present, a, scratch, sequence, row, head);
            return;
        }
    }
    attend_tile<Number, ROWS>(a, scratch, sequence, row, head);
}

#ifdef MAXSIMD_AMX

// Whether attention is computed in AMX tiles, 32 dimensions and 32 keys at a time.
template <class Value>
bool is_in_tiles(const Attention<Value>& a) {
    return std::is_same_v<Value, uint16_t> && uses_amx() && a.head_dim % (2 * LANES) == 0 && !a.positions.keys;
}

// Multiplies the units [first, last) of rows with packed columns. Blocks of 16 columns are `block_stride` units apart.
template <int HALVES>
void multiply_in_tiles(const Unit* rows, int64_t row_stride, const Unit* blocks, int64_t block_stride, int64_t first,
                       int64_t last, int64_t from, int64_t to, float* out, int64_t out_stride) {
    for (int64_t column = from; column < to; column += 2 * LANES) {
        const Unit *left = blocks + column / LANES * block_stride, *right = left + block_stride;
        clear_sums();
        for (int64_t unit = first; unit < last; unit += LANES)
            add_tiles<BFloat16, HALVES>(rows + unit, rows + HALF * row_stride + unit, row_stride, row_stride,
                                        left + unit * LANES, right + unit * LANES);
        store_sums<HALVES>((Unit*)out + column, out_stride);
    }
}

// As `attend_tile`, for up to AMX_ROWS queries.
template <int HALVES>
void attend_in_tiles(int count, const Attention<uint16_t>& a, Scratch<BFloat16>& scratch,
                     const Sequence<uint16_t>& sequence, int64_t row, int64_t head) {
    constexpr int at_once = 2 * LANES;
    const int64_t units = a.head_dim / BFloat16::PER_UNIT, columns = scratch.columns;
    // Copied, because the tile of the last queries reads more rows than there are.
    for (int i = 0; i < count; i++)
        std::memcpy(scratch.queries.data() + i * units, a.q.at(head, sequence.first_row + row + i),
                    units * sizeof(Unit));
    const int64_t position = sequence.before() + row, keys = sequence.keys();
    const int64_t from = a.first_key(position) / at_once * at_once;
    const int64_t to = std::max(from, round_up(a.last_key(position + count - 1, keys), at_once));
    multiply_in_tiles<HALVES>(scratch.queries.data(), units, scratch.keys.data(), units * LANES, 0, units, from, to,
                              scratch.products.data(), columns);
    const float scale = a.scale * 1.44269504f;  // times log2(e)
    float totals[AMX_ROWS];
    for (int i = 0; i < count; i++) {
        float* products = scratch.products.data() + i * columns;
        uint16_t* weights = scratch.weights.data() + i * columns;
        if (a.positions.bias) add_bias(a, products, position + i, head, from, to);
        const int64_t first = a.first_key(position + i), last = a.last_key(position + i, keys);
        const int64_t begin = std::max(from, first / LANES * LANES), end = std::max(begin, round_up(last, LANES));
        totals[i] = soften<BFloat16>(products, weights, scale, first, last, begin, end);
        std::fill(weights + from, weights + begin, 0);
        std::fill(weights + end, weights + to, 0);
    }
    multiply_in_tiles<HALVES>((const Unit*)scratch.weights.data(), columns / BFloat16::PER_UNIT, scratch.values.data(),
                              scratch.value_stride, from / BFloat16::PER_UNIT, to / BFloat16::PER_UNIT, 0, a.head_dim,
                              scratch.sums.data(), a.head_dim);
    for (int i = 0; i < count; i++) {
        const __m512 share = _mm512_set1_ps(totals[i] > 0 ? 1 / totals[i] : 0);  // nothing seen: zero
        uint16_t* out = a.out + (sequence.first_row + row + i) * a.out_stride + head * a.head_dim;
        for (int64_t column = 0; column < a.head_dim; column += at_once) {
            const float* sums = scratch.sums.data() + i * a.head_dim + column;
            store(out + column, 0xffffffff, _mm512_mul_ps(_mm512_loadu_ps(sums), share),
                  _mm512_mul_ps(_mm512_loadu_ps(sums + LANES), share));
        }
    }
}

#endif

template <class Number>
void attend_sequence(const Attention<typename Number::Value>& a, Scratch<Number>& scratch,
                     const Sequence<typename Number::Value>& sequence, int64_t key_head) {
    const int64_t repeats = a.heads / a.key_heads, first = key_head * repeats;
#ifdef MAXSIMD_AMX
    if constexpr (std::is_same_v<Number, BFloat16>)
        if (is_in_tiles(a)) {
            const TileRegisters registers;
            scratch.fit(sequence.keys(), a.head_dim, AMX_ROWS, 2 * LANES);
            pack_keys(a, sequence, key_head, scratch);
            pack_values(a, sequence, key_head, scratch);
            for (int64_t head = first; head < first + repeats; head++)
                for (int64_t row = 0; row < sequence.queries; row += AMX_ROWS) {
                    const int count = (int)std::min<int64_t>(AMX_ROWS, sequence.queries - row);
                    if (count > HALF)
                        attend_in_tiles<2>(count, a, scratch, sequence, row, head);
                    else
                        attend_in_tiles<1>(count, a, scratch, sequence, row, head);
                }
            return;
        }
#endif
    scratch.fit(sequence.keys(), a.head_dim, TILE_ROWS, LANES);
    pack_keys(a, sequence, key_head, scratch);
    pack_values(a, sequence, key_head, scratch);
    const int64_t queries = sequence.queries, tiles = (queries + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t head = first; head < first + repeats; head++)
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t row = queries * tile / tiles, stop = queries * (tile + 1) / tiles;
            attend_rows<Number, TILE_ROWS>((int)(stop - row), a, scratch, sequence, row, head);
        }
}

// Called by all threads of a team. `sequences` is [count][4], as described below.
template <class Number>
void attend_tasks(const Attention<typename Number::Value>& a, const int64_t* sequences, int64_t count,
                  const Prefix<typename Number::Value>* prefixes) {
    Scratch<Number> scratch;
#pragma omp for schedule(dynamic) nowait
    for (int64_t task = 0; task < count * a.key_heads; task++) {
        const int64_t* at = sequences + task / a.key_heads * 4;
        const Sequence<typename Number::Value> sequence{at[0], at[1], at[2], at[3] < 0 ? nullptr : prefixes + at[3]};
        attend_sequence(a, scratch, sequence, task % a.key_heads);
    }
}

// `prefixes` is [prefix_count][7].
template <class Number>
void attend(const Attention<typename Number::Value>& a, const int64_t* sequences, int64_t count,
            const int64_t* prefixes, int64_t prefix_count) {
    using Value = typename Number::Value;
    std::vector<Prefix<Value>> before;
    for (const int64_t* at = prefixes; at < prefixes + 7 * prefix_count; at += 7)
        before.push_back({{(const Value*)at[0], at[2], at[3]}, {(const Value*)at[1], at[4], at[5]}, at[6]});
#pragma omp parallel
    attend_tasks<Number>(a, sequences, count, before.data());
}

template <class Number>
void attend_in_team(const SelfAttention<typename Number::Value>& self, const int64_t* sequences, int64_t count) {
    const int64_t head = self.head_dim, row = self.stride;
    attend_tasks<Number>({{self.q, head, row},
                          {self.k, head, row},
                          {self.v, head, row},
                          {},
                          self.heads,
                          self.key_heads,
                          head,
                          self.causal,
                          self.window,
                          self.scale,
                          self.out,
                          self.out_stride},
                         sequences, count, nullptr);
}

template void attend_in_team<Float32>(const SelfAttention<float>&, const int64_t*, int64_t);
template void attend_in_team<BFloat16>(const SelfAttention<uint16_t>&, const int64_t*, int64_t);

}  // namespace maxsimd

#pragma GCC visibility push(default)
extern "C" {

// q [heads][rows][head_dim], k and v [key_heads][rows][head_dim], float32 if `kind` is 0 or bfloat16 if it is 1, with
// strides in elements (of heads and of rows, six numbers, those of bfloat16 rows even); head_dim a multiple of 16.
// `sequences` is [count][4]: the first row, the number of queries to compute from there, the number of the sequence's
// own keys that they may see, and the index of the prefix that comes before these, or -1. `prefixes` is [n][7]: the
// addresses of keys and values, their strides as above, and their length. `positions` is null, or five numbers: the
// addresses of bias, keys and queries (0 for none) by distance, the greatest distance, and the entries of a row, which
// are twice that, one, and 63 more. Writes out [rows][heads][head_dim].
void maxsimd_attention(int kind, const void* q, const void* k, const void* v, const int64_t* strides, int64_t heads,
                       int64_t key_heads, int64_t head_dim, const int64_t* sequences, int64_t count,
                       const int64_t* prefixes, int64_t prefix_count, const int64_t* positions, int causal,
                       int64_t window, float scale, void* out) {
    using namespace maxsimd;
    Positions by_distance{};
    if (positions)
        by_distance = {(const float*)positions[0], (const Unit*)positions[1], (const Unit*)positions[2], positions[3],
                       positions[4]};
    const auto compute = [&](auto number) {
        using Value = typename decltype(number)::Value;
        const Attention<Value> attention{{(const Value*)q, strides[0], strides[1]},
                                         {(const Value*)k, strides[2], strides[3]},
                                         {(const Value*)v, strides[4], strides[5]},
                                         by_distance,
                                         heads,
                                         key_heads,
                                         head_dim,
                                         causal != 0,
                                         window,
                                         scale,
                                         (Value*)out,
                                         heads * head_dim};
        attend<decltype(number)>(attention, sequences, count, prefixes, prefix_count);
    };
    by_kind<Float32, BFloat16>(kind, compute);
}
}
#pragma GCC visibility pop
