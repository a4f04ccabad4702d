// The attention kernels for AVX2 with FMA; compiled with its flags (CMakeLists.txt), called only where the processor has it.
#include "chairlift/attention_kernel.hpp"

#if defined(__AVX2__) && defined(__FMA__)
#include "chairlift/attention_few.hpp"
#include "chairlift/attention_many.hpp"

const chairlift::AttentionKernels* chairlift::avx2_attention() {
  static constexpr AttentionKernels kernels{
      kLanes, {attend_few<float>, attend_few<Bf16>}, {attend_many<float>, attend_many<Bf16>}, map_exp, map_tanh};
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &kernels : nullptr;
}
#else
const chairlift::AttentionKernels* chairlift::avx2_attention() { return nullptr; }
#endif
