// The decoder's kernels for AVX2 with FMA; compiled with its flags (CMakeLists.txt), called only where the processor has it.
#include "chairlift/matmul.hpp"

#if defined(__AVX2__) && defined(__FMA__)
#include "chairlift/decoder_ops.hpp"
#include "chairlift/matmul_float.hpp"

const chairlift::DecoderKernels* chairlift::avx2_decoder() {
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
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
             ? &kernels
             : nullptr;
}
#else
const chairlift::DecoderKernels* chairlift::avx2_decoder() { return nullptr; }
#endif
