// The decoder's kernels for AVX-512; compiled with its flags (CMakeLists.txt), called only where the processor has it.
#include "chairlift/matmul.hpp"

#if defined(__AVX512F__)
#include "chairlift/decoder_float.hpp"

constinit const chairlift::DecoderKernels* const chairlift::kAvx512Decoder = &kFloatDecoder;
#else
constinit const chairlift::DecoderKernels* const chairlift::kAvx512Decoder = nullptr;
#endif
