// The attention kernels for AVX-512 with its bfloat16 dot products; compiled with their flags (CMakeLists.txt), called
// only where the processor has them.
#include "chairlift/attention_kernel.hpp"

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#include "chairlift/attention_few.hpp"
#include "chairlift/attention_many.hpp"

const chairlift::AttentionKernels* chairlift::avx512_bf16_attention() {
  static constexpr AttentionKernels kernels{
      kLanes, {attend_few<float>, attend_few<Bf16>}, {attend_many<float>, attend_many<Bf16>}, map_exp, map_tanh};
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512f") ? &kernels : nullptr;
}
#else
const chairlift::AttentionKernels* chairlift::avx512_bf16_attention() { return nullptr; }
#endif
