// The decoder's kernels for AVX-512 with its dot products of bfloat16 and of bytes; compiled with their flags
// (CMakeLists.txt), called only where the processor has both.
#include "chairlift/matmul.hpp"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#include "chairlift/decoder_ops.hpp"
#include "chairlift/matmul_dot.hpp"

const chairlift::DecoderKernels* chairlift::avx512_bf16_decoder() {
  static constexpr DecoderKernels kernels{
      .row_bytes = {float_row_bytes, bf16_row_bytes, byte_row_bytes, byte_row_bytes},
      .prepare = {prepare_floats, prepare_bf16, prepare_bytes, prepare_bytes},
      .multiply = {multiply_tiles<FloatWeights>, multiply_tiles<DotBf16Weights>,
                   multiply_tiles<DotQuantisedWeights<8>>, multiply_tiles<DotQuantisedWeights<4>>},
      .unpack = {unpack_float, unpack_bf16, unpack_quantised<8>, unpack_quantised<4>},
      .rms_norm = rms_norm,
      .rotate = rotate,
      .add = add_to,
      .scale = scale_by,
      .gate = gate,
      .softcap = softcap,
  };
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
                 __builtin_cpu_supports("avx512vl")
             ? &kernels
             : nullptr;
}
#else
const chairlift::DecoderKernels* chairlift::avx512_bf16_decoder() { return nullptr; }
#endif
