// Linear layers for processors with AVX2, and VNNI where they have it: weights in int8, rows and results in float32;
// bias, then GELU or residual and layer norm. A library of its own, because it is compiled for fewer instructions than
// the other.
//
// Rows are rounded to bytes between -127 and 127, each row with a scale of its own, and stored with 128 added, since
// AVX2 multiplies unsigned bytes by signed ones. It adds two products in 16 bits, which hold them if weights have 7
// bits: 2 * 255 * 63 < 2^15. Two such sums would not fit, but what they are without the 128 does: 4 * 128 * 63 < 2^15.
// So they are added modulo 2^16 to what takes the 128 off, which is stored with the weights, and only then widened.
//
// VNNI adds four products in 32 bits, so that weights may have 8 bits. Sums are exact integers in both, so that a row's
// results are the same to the last bit whatever other rows there are.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include <immintrin.h>
#include <omp.h>

#include "avx2_functions.h"

namespace maxsimd_avx2 {

constexpr int BLOCK = 8;  // columns that are packed and multiplied together
constexpr int OCTET = 8;  // inputs whose weights are side by side
constexpr int TILE_ROWS = 8;
constexpr int64_t MOST_ROWS = 8 * TILE_ROWS;  // of a task, so that they stay in the second-level cache

struct Layer {
    const float* x;  // [rows], x_stride apart
    int64_t x_stride, rows, inputs;
    // [blocks][octets][3][8]: for each column twice four weights, then -128 times the sums of the weights whose
    // products are added: two 16-bit numbers, or one of 32 bits for VNNI. Padded with zeros.
    const int32_t* weights;
    int64_t octets;
    const float* scales;  // [columns], padded to whole blocks, as is the next
    const float* bias;  // zeros where there is none
    int64_t columns;
    bool gelu;
    float* out;  // [rows][columns]
};

struct Norm {
    const float* residual;  // [rows], residual_stride apart; null for no norm
    int64_t residual_stride;
    const float *weight, *bias;  // [columns]
    float epsilon;
};

// The rows of a task in bytes, each a whole number of octets, and their scales.
struct Rows {
    // In halves of octets. Rows that are a multiple of 1024 bytes apart would share few places of the cache.
    int64_t stride;
    std::unique_ptr<int32_t[]> bytes;
    float scales[MOST_ROWS];

    explicit Rows(int64_t octets)
        : stride(2 * octets + (octets % 128 ? 0 : 16)), bytes(new int32_t[MOST_ROWS * stride]) {}
    int32_t* at(int64_t row) { return bytes.get() + row * stride; }
};

// Rounds a row to bytes and pads it with zeros; returns its scale, which is NaN if one of its numbers is.
inline float quantise(const float* row, int64_t inputs, int64_t octets, uint8_t* out) {
    const __m256 no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256 largest = _mm256_setzero_ps(), strange = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + BLOCK <= inputs; i += BLOCK) {
        const __m256 x = _mm256_loadu_ps(row + i);
        largest = _mm256_max_ps(largest, _mm256_and_ps(x, no_sign));
        strange = _mm256_or_ps(strange, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    }
    float size = reduce_max(largest);
    bool is_strange = _mm256_movemask_ps(strange) != 0;
    for (int64_t j = i; j < inputs; j++) {
        size = std::max(size, std::fabs(row[j]));
        is_strange |= std::isnan(row[j]);
    }
    if (is_strange) size = NAN;
    // The inverse of a tiny number would be infinite.
    const float inverse = size > 1e-30f ? 127 / size : 0;
    // Adding this to a small number leaves its nearest integer, plus 128, in the lowest bits.
    const float rounder = 12582912.0f + 128;
    const __m256 factor = _mm256_set1_ps(inverse), shift = _mm256_set1_ps(rounder);
    const __m256i lowest = _mm256_set1_epi32(0xff), in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    i = 0;
    for (; i + 4 * BLOCK <= inputs; i += 4 * BLOCK) {
        __m256i part[4];
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++)
            part[p] = _mm256_and_si256(
                lowest,
                _mm256_castps_si256(_mm256_add_ps(_mm256_mul_ps(_mm256_loadu_ps(row + i + p * BLOCK), factor), shift)));
        const __m256i left = _mm256_packus_epi32(part[0], part[1]), right = _mm256_packus_epi32(part[2], part[3]);
        const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(left, right), in_order);
        _mm256_storeu_si256((__m256i*)(out + i), bytes);
    }
    for (; i < inputs; i++) {
        const float shifted = row[i] * inverse + rounder;
        uint32_t bits;
        std::memcpy(&bits, &shifted, sizeof bits);
        out[i] = (uint8_t)bits;
    }
    std::memset(out + inputs, 128, octets * OCTET - inputs);  // whose weights are zero
    return size > 1e-30f || is_strange ? size / 127 : 0;
}

// Keeps the compiler from moving or spilling a register: it would put sums into memory to multiply earlier.
inline __attribute__((always_inline)) void pin(__m256i& x) { asm volatile("" : "+x"(x)); }

// The products of an octet of a row with those of 8 columns, in 32 bits.
struct Avx2 {
    static inline __attribute__((always_inline)) __m256i products(const int32_t* row, __m256i first, __m256i second,
                                                                  __m256i excess) {
        __m256i sum = _mm256_add_epi16(excess, _mm256_maddubs_epi16(_mm256_set1_epi32(row[0]), first));
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(_mm256_set1_epi32(row[1]), second));
        return _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
    }
};

// In assembly, because all else is compiled for processors that lack the instruction.
struct Vnni {
    static inline __attribute__((always_inline)) __m256i products(const int32_t* row, __m256i first, __m256i second,
                                                                  __m256i excess) {
        __m256i sum = excess;
        asm("vpdpbusd %1, %2, %0" : "+x"(sum) : "x"(first), "x"(_mm256_set1_epi32(row[0])));
        asm("vpdpbusd %1, %2, %0" : "+x"(sum) : "x"(second), "x"(_mm256_set1_epi32(row[1])));
        return sum;
    }
};

// A tile of rows times a block of columns.
template <class Kind, int ROWS>
inline __attribute__((always_inline)) void multiply(const int32_t* rows, int64_t stride, const int32_t* weights,
                                                    int64_t octets, __m256i (&sums)[ROWS]) {
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++) sums[row] = _mm256_setzero_si256();
    for (int64_t octet = 0; octet < octets; octet++) {
        const __m256i* packed = (const __m256i*)weights + 3 * octet;
        const __m256i first = _mm256_loadu_si256(packed), second = _mm256_loadu_si256(packed + 1);
        const __m256i excess = _mm256_loadu_si256(packed + 2);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++) {
            const int32_t* values = rows + row * stride + 2 * octet;
            sums[row] = _mm256_add_epi32(sums[row], Kind::products(values, first, second, excess));
            pin(sums[row]);
        }
    }
}

inline void finish(const Layer& layer, __m256i sum, float row_scale, int64_t row, int64_t column) {
    const __m256 scale = _mm256_mul_ps(_mm256_loadu_ps(layer.scales + column), _mm256_set1_ps(row_scale));
    __m256 y = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, _mm256_loadu_ps(layer.bias + column));
    if (layer.gelu) y = gelu(y);
    float* to = layer.out + row * layer.columns + column;
    const int64_t present = layer.columns - column;
    if (present >= BLOCK)
        _mm256_storeu_ps(to, y);
    else
        _mm256_maskstore_ps(to, first_lanes(present), y);
}

template <class Kind, int ROWS>
void tile(const Layer& layer, Rows& rows, int present, int64_t at, int64_t first, int64_t column) {
    if constexpr (ROWS > 1)
        if (present < ROWS) return tile<Kind, ROWS - 1>(layer, rows, present, at, first, column);
    __m256i sums[ROWS];
    multiply<Kind, ROWS>(rows.at(at), rows.stride, layer.weights + 3 * layer.octets * column, layer.octets, sums);
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++) finish(layer, sums[row], rows.scales[at + row], first + at + row, column);
}

template <class Kind>
void run(const Layer& layer, const Norm& norm) {
    if (layer.rows == 0) return;
    const int64_t threads = omp_get_max_threads(), panels = (layer.columns + BLOCK - 1) / BLOCK;
    // Blocks of rows of nearly equal size. If there are few rows, threads divide the columns.
    const int64_t most_blocks = (layer.rows + MOST_ROWS - 1) / MOST_ROWS;
    const int64_t tiles = (layer.rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t blocks = std::min(tiles, (most_blocks + threads - 1) / threads * threads);
    const int64_t splits = std::min(panels, (threads + blocks - 1) / blocks);
#pragma omp parallel
    {
        Rows rows(layer.octets);
        std::vector<float> scratch(norm.residual ? layer.columns + BLOCK : 0);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < blocks * splits; task++) {
            const int64_t block = task / splits, split = task % splits;
            const int64_t first = layer.rows * block / blocks, count = layer.rows * (block + 1) / blocks - first;
            for (int64_t row = 0; row < count; row++)
                rows.scales[row] = quantise(layer.x + (first + row) * layer.x_stride, layer.inputs, layer.octets,
                                            (uint8_t*)rows.at(row));
            for (int64_t panel = panels * split / splits; panel < panels * (split + 1) / splits; panel++)
                for (int64_t row = 0; row < count; row += TILE_ROWS)
                    tile<Kind, TILE_ROWS>(layer, rows, (int)std::min<int64_t>(TILE_ROWS, count - row), row, first,
                                          panel * BLOCK);
        }
        if (norm.residual) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < layer.rows; row++)
                normalise(layer.out + row * layer.columns, norm.residual + row * norm.residual_stride, norm.weight,
                          norm.bias, norm.epsilon, layer.columns, scratch.data());
        }
    }
}

}  // namespace maxsimd_avx2

#pragma GCC visibility push(default)
extern "C" {

// Whether this processor has every instruction that the kernels use, but for VNNI; and whether it has that in 256 bits.
int maxsimd_avx2_is_supported() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
int maxsimd_avx2_has_vnni() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl");
}

// x [rows][inputs] -> out [rows][columns], in float32; x_stride is in elements. Weights are packed as
// [columns / 8][octets][3][8], which `Layer` explains, and have 7 bits unless they are for VNNI; scales and bias are
// padded to whole blocks of 8 columns. With a residual [rows][columns], whose rows are residual_stride apart, out is the
// layer norm of the sum of the layer's output and the residual.
void maxsimd_avx2_linear(int vnni, const float* x, int64_t x_stride, int64_t rows, int64_t inputs,
                         const int32_t* weights, int64_t octets, const float* scales, const float* bias,
                         int64_t columns, int gelu, const float* residual, int64_t residual_stride,
                         const float* norm_weight, const float* norm_bias, float epsilon, float* out) {
    using namespace maxsimd_avx2;
    const Layer layer{x, x_stride, rows, inputs, weights, octets, scales, bias, columns, gelu != 0, out};
    const Norm norm{residual, residual_stride, norm_weight, norm_bias, epsilon};
    vnni ? run<Vnni>(layer, norm) : run<Avx2>(layer, norm);
}
}
#pragma GCC visibility pop
