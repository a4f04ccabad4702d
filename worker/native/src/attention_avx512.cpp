// The attention kernels for AVX-512; compiled with its flags (CMakeLists.txt), called only where the processor has it.
#include "chairlift/attention_kernel.hpp"

#if defined(__AVX512F__)
#include "chairlift/attention_few.hpp"
#include "chairlift/attention_many.hpp"

const chairlift::AttentionKernels* chairlift::avx512_attention() {
  static constexpr AttentionKernels kernels{
      kLanes, {attend_few<float>, attend_few<Bf16>}, {attend_many<float>, attend_many<Bf16>}, map_exp, map_tanh};
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq")
             ? &kernels : nullptr;
}
#else
const chairlift::AttentionKernels* chairlift::avx512_attention() { return nullptr; }
#endif
