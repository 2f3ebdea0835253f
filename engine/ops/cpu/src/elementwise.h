// The norm of a row with the sum before it, and the rotary positions of queries and keys with the norm of each head.
//
// A row is computed by itself, so that its results are the same to the last bit whatever other rows there are.
#pragma once

#include <cmath>

#include "tile.h"

namespace maxsimd {

// RMSNorm, or LayerNorm where `centered`, of rows plus a residual; weights are float32.
template <class Value>
struct RowNorm {
    const Value *x, *residual;  // [rows], strides apart; the residual may be null
    int64_t x_stride, residual_stride, rows, columns;
    const float *weight, *bias;  // [columns]; the bias may be null
    float epsilon;
    bool centered;
    Value* out;  // [rows], out_stride apart
    int64_t out_stride = columns;
};

template <class Value>
void norm_row(const RowNorm<Value>& norm, int64_t row, float* sums) {
    for (int64_t i = 0; i < norm.columns; i += LANES) {
        const __mmask16 mask = first_lanes(norm.columns - i);
        __m512 sum = load(norm.x + row * norm.x_stride + i, mask);
        if (norm.residual) sum = _mm512_add_ps(sum, load(norm.residual + row * norm.residual_stride + i, mask));
        _mm512_storeu_ps(sums + i, sum);
    }
    __m512 mean = _mm512_setzero_ps();
    if (norm.centered) {
        for (int64_t i = 0; i < norm.columns; i += LANES) mean = _mm512_add_ps(mean, _mm512_loadu_ps(sums + i));
        mean = _mm512_set1_ps(_mm512_reduce_add_ps(mean) / norm.columns);
    }
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < norm.columns; i += LANES) {
        const __m512 off = _mm512_maskz_sub_ps(first_lanes(norm.columns - i), _mm512_loadu_ps(sums + i), mean);
        squares = _mm512_fmadd_ps(off, off, squares);
    }
    const __m512 scale = _mm512_set1_ps(1 / std::sqrt(_mm512_reduce_add_ps(squares) / norm.columns + norm.epsilon));
    for (int64_t i = 0; i < norm.columns; i += LANES) {
        const __mmask16 mask = first_lanes(norm.columns - i);
        const __m512 off = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(sums + i), mean), scale);
        const __m512 bias = norm.bias ? load(norm.bias + i, mask) : _mm512_setzero_ps();
        store(norm.out + row * norm.out_stride + i, mask, _mm512_fmadd_ps(off, load(norm.weight + i, mask), bias));
    }
}

// Queries and keys [rows][heads][head_dim], `stride` apart, that are normed and turned where they are.
template <class Value>
struct Rotation {
    Value* qkv;
    int64_t stride, rows, query_heads, heads, head_dim;  // `heads` counts queries and keys together
    const Value *cos, *sin;                              // [rows][head_dim]
    const float *query_weight, *key_weight;              // [head_dim] or null for no norm
    float epsilon;
};

template <class Value>
void turn(const Rotation<Value>& rotation, int64_t row, int64_t head) {
    const int64_t half = rotation.head_dim / 2;
    Value *first = rotation.qkv + row * rotation.stride + head * rotation.head_dim, *second = first + half;
    const float* weight = head < rotation.query_heads ? rotation.query_weight : rotation.key_weight;
    __m512 scale = _mm512_set1_ps(1);
    if (weight) {
        __m512 squares = _mm512_setzero_ps();
        for (int64_t i = 0; i < rotation.head_dim; i += LANES) {
            const __m512 x = load(first + i, first_lanes(rotation.head_dim - i));
            squares = _mm512_fmadd_ps(x, x, squares);
        }
        const float mean = _mm512_reduce_add_ps(squares) / rotation.head_dim;
        scale = _mm512_set1_ps(1 / std::sqrt(mean + rotation.epsilon));
    }
    const Value *cos = rotation.cos + row * rotation.head_dim, *sin = rotation.sin + row * rotation.head_dim;
    for (int64_t i = 0; i < half; i += LANES) {
        const __mmask16 mask = first_lanes(half - i);
        __m512 x = load(first + i, mask), y = load(second + i, mask);
        if (weight) {
            x = _mm512_mul_ps(_mm512_mul_ps(x, scale), load(weight + i, mask));
            y = _mm512_mul_ps(_mm512_mul_ps(y, scale), load(weight + half + i, mask));
        }
        const __m512 turned_x = _mm512_mul_ps(x, load(cos + i, mask)), minus = _mm512_mul_ps(y, load(sin + i, mask));
        const __m512 turned_y = _mm512_mul_ps(y, load(cos + half + i, mask));
        store(first + i, mask, _mm512_sub_ps(turned_x, minus));
        store(second + i, mask, _mm512_fmadd_ps(x, load(sin + half + i, mask), turned_y));
    }
}

}  // namespace maxsimd
