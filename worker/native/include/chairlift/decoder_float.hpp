// The decoder's kernels that need nothing but vectors of floats. Internal linkage, as in vector.hpp.
#pragma once

#include "chairlift/decoder_ops.hpp"
#include "chairlift/matmul_float.hpp"

namespace chairlift {
namespace {

constexpr DecoderKernels kFloatDecoder{
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

}  // namespace
}  // namespace chairlift
