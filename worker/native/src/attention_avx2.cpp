// The attention kernels for AVX2 with FMA; compiled with its flags (CMakeLists.txt), called only where the processor has it.
#include "chairlift/attention_kernel.hpp"

#if defined(__AVX2__) && defined(__FMA__)
#include "chairlift/attention_all.hpp"

constinit const chairlift::AttentionKernels* const chairlift::kAvx2Attention = &kAttention;
#else
constinit const chairlift::AttentionKernels* const chairlift::kAvx2Attention = nullptr;
#endif
