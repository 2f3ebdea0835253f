// The arguments of a linear layer, and its epilogue: scales and bias, then an activation, a gate, a sum, or a sum and
// its layer norm. The epilogue reads one row at a time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "functions.h"
#include "tile.h"

namespace maxsimd {

constexpr int PANEL = 2 * LANES;  // columns that are multiplied together; packed columns are a multiple

// Packed weights of some blocks of 16 columns, one after the other: of each block the first `lines` cache lines, of as
// many as a column has units.
struct Stretch {
    const Unit* start = nullptr;
    int64_t blocks = 0, lines = 0, units = 0;

    Stretch part(int64_t first, int64_t last) const {
        return {start + first * units * LANES, last - first, lines, units};
    }
};

// The rows that a thread takes at a time: at most `most`, so that they stay in the second-level cache from product to
// product, and whole tiles of `whole` rows, because fewer take as long.
struct BlockSizes {
    int64_t most, whole;

    // With at most so many rows threads divide the columns of each product, so that each reads a part of the weights.
    constexpr int64_t most_together() const { return most * 3 / 2; }

    // The first row of one of `blocks` blocks of nearly the same size, in whole tiles.
    constexpr int64_t start(int64_t rows, int64_t block, int64_t blocks) const {
        return std::min(rows, (rows + whole - 1) / whole * block / blocks * whole);
    }
};

// How many whole panels a number of bytes has room for, at least one.
inline int64_t whole_panels(int64_t bytes, int64_t units) {
    return std::max<int64_t>(1, bytes / std::max<int64_t>(1, PANEL * units * (int64_t)sizeof(Unit)));
}

// Activations, after the bias. Gates come in the first 16 of each 32 columns, and what they multiply in the other 16.
enum class Activation { NONE, GELU, GATED_SILU, GATED_GELU, GATED_GELU_TANH, GATED_RELU };

template <class Number>
struct Linear {
    using Value = typename Number::Value;
    const Value* x;  // [rows], x_stride apart
    int64_t x_stride, rows, inputs;
    const Unit* weights;         // packed, see tile.h; padded with zeros to whole panels
    int64_t packed_units;        // of a column; padded with zeros too
    const float* weight_scales;  // [columns], int8 only
    const int32_t* weight_sums;  // [columns], int8 only
    const float* bias;           // [columns] or null
    int64_t columns;
    Activation activation;
    Value* out;        // [rows], out_stride apart: columns, or half of them if there are gates
    Stretch upcoming;  // the weights of the layer that the same thread computes next, if it is known
    const Value* added = nullptr;  // [rows], added_stride apart: added to the output; or null
    int64_t added_stride = 0;
    int64_t out_stride = activation > Activation::GELU ? columns / 2 : columns;

    int64_t units() const { return (inputs + Number::PER_UNIT - 1) / Number::PER_UNIT; }
    const Unit* block(int64_t column) const { return weights + column * packed_units; }
    // The weights of some panels.
    Stretch stretch(int64_t begin, int64_t end) const {
        return {block(begin * PANEL), (end - begin) * PANEL / LANES, packed_units, packed_units};
    }
};

// Prefetches weights into the second-level cache, a few lines at a time.
class Ahead {
  public:
    // Part `part` of `parts` of a stretch.
    Ahead(const Stretch& stretch, int64_t part, int64_t parts) : stretch_(stretch) {
        const int64_t all = stretch.blocks * stretch.lines, first = all * part / parts;
        left_ = all * (part + 1) / parts - first;
        if (left_ == 0) return;
        block_ = stretch.start + first / stretch.lines * stretch.units * LANES;
        in_block_ = stretch.lines - first % stretch.lines;
        next_ = block_ + first % stretch.lines * LANES;
    }
    int64_t lines() const { return left_; }
    void fetch(int64_t lines) {
        lines = std::min(lines, left_);
        left_ -= lines;
        while (lines > 0) {
            const int64_t count = std::min(lines, in_block_);
            for (int64_t i = 0; i < count; i++) _mm_prefetch((const char*)(next_ + i * LANES), _MM_HINT_T1);
            next_ += count * LANES;
            lines -= count;
            in_block_ -= count;
            if (in_block_ == 0) {
                next_ = block_ += stretch_.units * LANES;
                in_block_ = stretch_.lines;
            }
        }
    }

  private:
    const Stretch stretch_;
    const Unit *block_ = nullptr, *next_ = nullptr;
    int64_t left_, in_block_ = 0;
};

// Layer norm of a linear layer's output plus another input of the same shape.
template <class Value>
struct Norm {
    const Value* residual;  // [rows], residual_stride apart; null for no norm
    int64_t residual_stride;
    const float *weight, *bias;  // [columns]
    float epsilon;
};

// The epilogue of the sums of sixteen columns.
template <class Number>
struct Edge {
    __mmask16 mask;
    __m512 bias;
    Edge(const Linear<Number>& linear, int64_t column)
        : mask(first_lanes(linear.columns - column)),
          bias(linear.bias ? load(linear.bias + column, mask) : _mm512_setzero_ps()) {}
    __m512 end(const Unit* sums, const float*, int64_t) const { return _mm512_add_ps(_mm512_loadu_ps(sums), bias); }
};

// Activations are unsigned bytes, 128 too large, which adds 128 times the sum of a column's weights.
template <>
struct Edge<Int8> {
    __mmask16 mask;
    __m512 bias, scales;
    __m512i excess;
    Edge(const Linear<Int8>& linear, int64_t column)
        : mask(first_lanes(linear.columns - column)),
          bias(linear.bias ? load(linear.bias + column, mask) : _mm512_setzero_ps()),
          scales(load(linear.weight_scales + column, mask)),
          excess(_mm512_slli_epi32(_mm512_maskz_loadu_epi32(mask, linear.weight_sums + column), 7)) {}
    __m512 end(const Unit* sums, const float* row_scales, int64_t row) const {
        const __m512 sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_loadu_si512(sums), excess));
        return _mm512_fmadd_ps(sum, _mm512_mul_ps(scales, _mm512_set1_ps(row_scales[row])), bias);
    }
};

template <class Number>
inline __m512 activated(Activation activation, __m512 x) {
    switch (activation) {
        case Activation::GELU:
        case Activation::GATED_GELU:
            return gelu<Number>(x);
        case Activation::GATED_SILU:
            return silu<Number>(x);
        case Activation::GATED_GELU_TANH:
            return gelu_by_tanh<Number>(x);
        case Activation::GATED_RELU:
            return relu(x);
        default:
            return x;
    }
}

// Sums [count][PANEL] of rows into the output at `row` and `column`; int8 rows have scales.
template <class Number>
__attribute__((noinline)) void finish(const Linear<Number>& linear, const Unit* sums, const float* scales,
                                      int64_t count, int64_t row, int64_t column) {
    const Edge<Number> edges[] = {{linear, column}, {linear, column + LANES}};
    if (linear.activation > Activation::GELU) {
        for (int64_t i = 0; i < count; i++) {
            const __m512 gate = edges[0].end(sums + i * PANEL, scales, i);
            const __m512 y = _mm512_mul_ps(activated<Number>(linear.activation, gate),
                                           edges[1].end(sums + i * PANEL + LANES, scales, i));
            store(linear.out + (row + i) * linear.out_stride + column / 2, 0xffff, y);
        }
        return;
    }
    const __mmask32 mask = edges[0].mask | (__mmask32)edges[1].mask << LANES;
    for (int64_t i = 0; i < count; i++) {
        __m512 y[2];
#pragma GCC unroll 2
        for (int block = 0; block < 2; block++) {
            y[block] = edges[block].end(sums + i * PANEL + block * LANES, scales, i);
            if (linear.activation == Activation::GELU) y[block] = gelu<Number>(y[block]);
            if (linear.added)
                y[block] = _mm512_add_ps(
                    y[block],
                    load(linear.added + (row + i) * linear.added_stride + column + block * LANES, edges[block].mask));
        }
        store(linear.out + (row + i) * linear.out_stride + column, mask, y[0], y[1]);
    }
}

// The norm of a row of sums, whose `total` is given lane by lane; lanes beyond the columns are zero.
template <class Value>
inline void normalise_sums(const float* sums, __m512 total, const Norm<Value>& norm, int64_t columns, Value* out) {
    const float mean = _mm512_reduce_add_ps(total) / columns;
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < columns; i += LANES) {
        const __mmask16 mask = first_lanes(columns - i);
        const __m512 off = _mm512_maskz_sub_ps(mask, _mm512_loadu_ps(sums + i), _mm512_set1_ps(mean));
        squares = _mm512_fmadd_ps(off, off, squares);
    }
    const float scale = 1 / std::sqrt(_mm512_reduce_add_ps(squares) / columns + norm.epsilon);
    for (int64_t i = 0; i < columns; i += LANES) {
        const __mmask16 mask = first_lanes(columns - i);
        const __m512 off = _mm512_sub_ps(_mm512_loadu_ps(sums + i), _mm512_set1_ps(mean));
        const __m512 y = _mm512_fmadd_ps(_mm512_mul_ps(off, _mm512_set1_ps(scale)), load(norm.weight + i, mask),
                                         load(norm.bias + i, mask));
        store(out + i, mask, y);
    }
}

// Replaces a row of the output by norm(row + residual). `sums` is scratch memory for one row.
template <class Value>
__attribute__((noinline)) void normalise(Value* row, const Value* residual, const Norm<Value>& norm, int64_t columns,
                                         float* sums) {
    __m512 total = _mm512_setzero_ps();
    for (int64_t i = 0; i < columns; i += LANES) {
        const __mmask16 mask = first_lanes(columns - i);
        const __m512 sum = _mm512_add_ps(load(row + i, mask), load(residual + i, mask));
        _mm512_storeu_ps(sums + i, sum);
        total = _mm512_add_ps(total, sum);
    }
    normalise_sums(sums, total, norm, columns, row);
}

}  // namespace maxsimd
