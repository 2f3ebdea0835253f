// Linear layers and attention, computed by threads that run already: each function is called by all threads of an
// OpenMP team, and a thread may return from it before the others are done.
//
// The results are the same to the last bit as those of calls that start threads of their own.
#pragma once

#include "linear.h"

namespace maxsimd {

// Threads divide the columns, or the rows if there are many. With a norm, threads wait for each other before it.
template <class Number>
void run_in_team(const Linear<Number>& linear, const Norm<typename Number::Value>& norm);

// The calling thread computes all rows by itself, in all columns.
template <class Number>
void run_rows(const Linear<Number>& linear, const Norm<typename Number::Value>& norm);

// Returns the sizes of blocks for products of this kind of number on this processor.
template <class Number>
BlockSizes block_sizes();

// Queries, keys and values of whole sequences, rows `stride` apart, with the heads of a row side by side; and what comes
// of them, likewise, rows `out_stride` apart. A causal query sees the keys up to its own, and a `window` that is not 0
// limits them as in `maxsimd_attention`.
template <class Value>
struct SelfAttention {
    const Value *q, *k, *v;
    int64_t stride, heads, key_heads, head_dim;
    float scale;
    Value* out;
    int64_t out_stride;
    bool causal = false;
    int64_t window = 0;
};

// `sequences` is [count][4], as `maxsimd_attention` has it, without prefixes.
template <class Number>
void attend_in_team(const SelfAttention<typename Number::Value>& self, const int64_t* sequences, int64_t count);

}  // namespace maxsimd
