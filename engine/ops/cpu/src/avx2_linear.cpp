// int8 layers for processors with AVX2. A library of its own, because it is compiled for fewer instructions than the
// others.

#include "int8_linear.h"
#include "lanes8.h"

#pragma GCC visibility push(default)
extern "C" {

// Whether this processor has every instruction that the kernel uses.
int maxsimd_avx2_is_supported() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

// The norm may be null. Weights have 7 bits, in blocks of 8 columns, as `Widening` explains.
void maxsimd_avx2_linear(const maxsimd_int8::Layer* layer, const maxsimd_int8::Norm* norm) {
    maxsimd_int8::run<maxsimd_int8::Widening<maxsimd_int8::Lanes8, 8, 1>>(*layer, norm);
}
}
#pragma GCC visibility pop
