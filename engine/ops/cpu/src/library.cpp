// The function to call before any other of this library.

#pragma GCC visibility push(default)
extern "C" {

// Whether this processor has every instruction that the kernels use.
int maxsimd_is_supported() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16") &&
           __builtin_cpu_supports("fma");
}
}
#pragma GCC visibility pop
