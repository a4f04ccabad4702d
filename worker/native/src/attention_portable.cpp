// The attention kernels for any processor.
#include "chairlift/attention_all.hpp"

constinit const chairlift::AttentionKernels* const chairlift::kPortableAttention = &kAttention;
