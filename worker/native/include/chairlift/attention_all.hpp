// The attention kernels of one instruction set. Internal linkage, as in vector.hpp.
#pragma once

#include "chairlift/attention_dot.hpp"
#include "chairlift/attention_few.hpp"
#include "chairlift/attention_many.hpp"

namespace chairlift {
namespace {

#if defined(__AVX512BF16__)
constexpr AttendFunction kManyBf16 = attend_dot<Bf16>;
constexpr AttendFunction kManyInt8 = attend_dot<Int8>;
#else
constexpr AttendFunction kManyBf16 = attend_many<Bf16>;
constexpr AttendFunction kManyInt8 = attend_many<Int8>;
#endif

constexpr AttentionKernels kAttention{kLanes,
                                      {attend_few<float>, attend_few<Bf16>, attend_few<Int8>},
                                      {attend_many<float>, kManyBf16, kManyInt8},
                                      map_exp,
                                      map_tanh};

}  // namespace
}  // namespace chairlift
