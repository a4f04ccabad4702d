// The decoder's kernels for AVX-512; compiled with its flags (CMakeLists.txt), called only where the processor has it.
#include "chairlift/matmul.hpp"

#if defined(__AVX512F__)
#include "chairlift/decoder_ops.hpp"
#include "chairlift/matmul_float.hpp"

const chairlift::DecoderKernels* chairlift::avx512_decoder() {
  static constexpr DecoderKernels kernels{
      .row_bytes = {float_row_bytes, float_row_bytes, summed_row_bytes, summed_row_bytes},
      .prepare = {prepare_floats, prepare_floats, prepare_summed, prepare_summed},
      .multiply = {multiply_tiles<FloatWeights>, multiply_tiles<Bf16Weights>, multiply_tiles<QuantisedWeights<8>>,
                   multiply_tiles<QuantisedWeights<4>>},
      .unpack = {unpack_float, unpack_bf16, unpack_quantised<8>, unpack_quantised<4>},
      .rms_norm = rms_norm,
      .rotate = rotate,
      .add = add_to,
      .scale = scale_by,
      .gate = gate,
      .softcap = softcap,
  };
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq")
             ? &kernels
             : nullptr;
}
#else
const chairlift::DecoderKernels* chairlift::avx512_decoder() { return nullptr; }
#endif
