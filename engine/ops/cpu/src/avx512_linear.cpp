// int8 layers for processors with AVX-512 but without BF16, with VNNI or without it. A library of its own, because the
// one for those with BF16 is compiled for more instructions.

#include "int8_linear.h"
#include "lanes16.h"

namespace maxsimd_int8 {

// VNNI adds four products in 32 bits, so that weights may have 8 bits. Weights are [blocks][1 + 2 octets][16]: for each
// column -128 times the sum of its weights, which its sums begin with, then all weights, four at a time.
struct Vnni {
    using Lanes = Lanes16;
    static constexpr int TILE_ROWS = 12, BLOCKS = 2;
    static int64_t vectors(int64_t octets) { return 1 + 2 * octets; }

    template <int PRESENT>
    static inline __attribute__((always_inline)) void multiply(const int32_t* rows, int64_t stride,
                                                               const int32_t* weights, int64_t octets,
                                                               __m512i (&sums)[PRESENT][BLOCKS]) {
        const int32_t* blocks[BLOCKS];
#pragma GCC unroll 2
        for (int block = 0; block < BLOCKS; block++) {
            blocks[block] = weights + vectors(octets) * Lanes::COUNT * block;
#pragma GCC unroll 16
            for (int row = 0; row < PRESENT; row++) sums[row][block] = Lanes::load(blocks[block]);
            blocks[block] += Lanes::COUNT;
        }
        for (int64_t unit = 0; unit < 2 * octets; unit++) {
            __m512i packed[BLOCKS];
#pragma GCC unroll 2
            for (int block = 0; block < BLOCKS; block++)
                packed[block] = Lanes::load(blocks[block] + unit * Lanes::COUNT);
#pragma GCC unroll 16
            for (int row = 0; row < PRESENT; row++) {
                const __m512i values = Lanes::fill(rows[row * stride + unit]);
#pragma GCC unroll 2
                for (int block = 0; block < BLOCKS; block++) add_products(sums[row][block], values, packed[block]);
            }
        }
    }

    // In assembly, because all else is compiled for processors that lack the instruction.
    static inline __attribute__((always_inline)) void add_products(__m512i& sum, __m512i x, __m512i y) {
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
    }
};

}  // namespace maxsimd_int8

#pragma GCC visibility push(default)
extern "C" {

// Whether this processor has every instruction that a kernel uses.
int maxsimd_avx512_is_supported() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
}
int maxsimd_avx512_vnni_is_supported() { return maxsimd_avx512_is_supported() && __builtin_cpu_supports("avx512vnni"); }

// The norm may be null. Weights are in panels of 32 columns; they have 7 bits, as `Widening` explains, or 8 for VNNI.
void maxsimd_avx512_linear(const maxsimd_int8::Layer* layer, const maxsimd_int8::Norm* norm) {
    maxsimd_int8::run<maxsimd_int8::Widening<maxsimd_int8::Lanes16, 8, 2>>(*layer, norm);
}
void maxsimd_avx512_vnni_linear(const maxsimd_int8::Layer* layer, const maxsimd_int8::Norm* norm) {
    maxsimd_int8::run<maxsimd_int8::Vnni>(*layer, norm);
}
}
#pragma GCC visibility pop
