// The decoder's kernels for AVX-512 with its dot products of bfloat16 and of bytes; compiled with their flags
// (CMakeLists.txt), called only where the processor has both.
#include "chairlift/matmul.hpp"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#include "chairlift/decoder_float.hpp"
#include "chairlift/matmul_dot.hpp"

namespace chairlift {
namespace {

constexpr DecoderKernels kDotDecoder = [] {
  DecoderKernels all = kFloatDecoder;
  all.row_bytes[kFormatBfloat16] = bf16_row_bytes;
  all.prepare[kFormatBfloat16] = prepare_bf16;
  all.multiply[kFormatBfloat16] = multiply_tiles<DotBf16Weights>;
  for (int format = kFormatInt8; format <= kFormatInt4; ++format) {
    all.row_bytes[format] = byte_row_bytes;
    all.prepare[format] = prepare_bytes;
  }
  all.multiply[kFormatInt8] = multiply_tiles<DotQuantisedWeights<8>>;
  all.multiply[kFormatInt4] = multiply_tiles<DotQuantisedWeights<4>>;
  return all;
}();

}  // namespace
}  // namespace chairlift

constinit const chairlift::DecoderKernels* const chairlift::kAvx512Bf16Decoder = &kDotDecoder;
#else
constinit const chairlift::DecoderKernels* const chairlift::kAvx512Bf16Decoder = nullptr;
#endif
