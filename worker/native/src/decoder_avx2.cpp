// The decoder's kernels for AVX2 with FMA; compiled with its flags (CMakeLists.txt), called only where the processor has it.
#include "chairlift/matmul.hpp"

#if defined(__AVX2__) && defined(__FMA__)
#include "chairlift/decoder_float.hpp"

constinit const chairlift::DecoderKernels* const chairlift::kAvx2Decoder = &kFloatDecoder;
#else
constinit const chairlift::DecoderKernels* const chairlift::kAvx2Decoder = nullptr;
#endif
