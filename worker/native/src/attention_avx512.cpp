// The attention kernels for AVX-512; compiled with its flags (CMakeLists.txt), called only where the processor has it.
#include "chairlift/attention_kernel.hpp"

#if defined(__AVX512F__)
#include "chairlift/attention_all.hpp"

constinit const chairlift::AttentionKernels* const chairlift::kAvx512Attention = &kAttention;
#else
constinit const chairlift::AttentionKernels* const chairlift::kAvx512Attention = nullptr;
#endif
