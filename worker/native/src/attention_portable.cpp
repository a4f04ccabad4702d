// The attention kernels for any processor.
#include "chairlift/attention_few.hpp"
#include "chairlift/attention_many.hpp"

const chairlift::AttentionKernels* chairlift::portable_attention() {
  static constexpr AttentionKernels kernels{
      kLanes, {attend_few<float>, attend_few<Bf16>}, {attend_many<float>, attend_many<Bf16>}, map_exp, map_tanh};
  return &kernels;
}
