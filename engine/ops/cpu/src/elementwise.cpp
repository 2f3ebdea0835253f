// The work between the products of a layer, a pass over its rows each.

#include <vector>

#include <omp.h>

#include "elementwise.h"

#pragma GCC visibility push(default)
extern "C" {

// out [rows][columns] = norm(x + residual) * weight + bias, float32 if `kind` is 0, else bfloat16. The norm is LayerNorm
// if `centered`, else RMSNorm. Residual and bias may be null. Strides are in elements.
void maxsimd_norm(int kind, const void* x, int64_t x_stride, const void* residual, int64_t residual_stride,
                  int64_t rows, int64_t columns, const float* weight, const float* bias, float epsilon, int centered,
                  void* out) {
    using namespace maxsimd;
    const auto compute = [&](auto number) {
        using Value = typename decltype(number)::Value;
        const RowNorm<Value> norm{
            (const Value*)x, (const Value*)residual, x_stride,   residual_stride, rows, columns, weight, bias,
            epsilon,         centered != 0,          (Value*)out};
#pragma omp parallel if (rows > 1)
        {
            std::vector<float> sums(round_up(columns, LANES));
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++) norm_row(norm, row, sums.data());
        }
    };
    by_kind<Float32, BFloat16>(kind, compute);
}

// Norms, where weights are given, and turns the first `query_heads` + `key_heads` heads of qkv [rows], which are
// `stride` elements apart, in place; float32 if `kind` is 0, else bfloat16. cos and sin are [rows][head_dim].
void maxsimd_norm_rotary(int kind, void* qkv, int64_t stride, int64_t rows, int64_t query_heads, int64_t key_heads,
                         int64_t head_dim, const void* cos, const void* sin, const float* query_weight,
                         const float* key_weight, float epsilon) {
    using namespace maxsimd;
    const int64_t heads = query_heads + key_heads;
    const auto compute = [&](auto number) {
        using Value = typename decltype(number)::Value;
        const Rotation<Value> rotation{
            (Value*)qkv,       stride,       rows,       query_heads, heads, head_dim, (const Value*)cos,
            (const Value*)sin, query_weight, key_weight, epsilon};
#pragma omp parallel for schedule(static) if (rows > 1)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t head = 0; head < heads; head++) turn(rotation, row, head);
    };
    by_kind<Float32, BFloat16>(kind, compute);
}
}
#pragma GCC visibility pop
