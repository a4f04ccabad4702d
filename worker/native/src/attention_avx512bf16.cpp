// The attention kernels for AVX-512 with its bfloat16 dot products; compiled with their flags (CMakeLists.txt), called
// only where the processor has them.
#include "chairlift/attention_kernel.hpp"

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#include "chairlift/attention_all.hpp"

constinit const chairlift::AttentionKernels* const chairlift::kAvx512Bf16Attention = &kAttention;
#else
constinit const chairlift::AttentionKernels* const chairlift::kAvx512Bf16Attention = nullptr;
#endif
