// The decoder's kernels for any processor.
#include "chairlift/decoder_float.hpp"

constinit const chairlift::DecoderKernels* const chairlift::kPortableDecoder = &kFloatDecoder;
