// Products with packed weights: between the decoder (decoder.cpp) and the kernels that are compiled once for each
// instruction set.
//
// Weights (outputs, inputs) are packed once for all instruction sets (decoder/packing.py), in blocks of 16 outputs, with
// zeros up to whole blocks and whole groups of 32 inputs:
//
// | format   | a block                                                                                         |
// |----------|-------------------------------------------------------------------------------------------------|
// | float32  | (inputs, 16) float32                                                                            |
// | bfloat16 | (inputs / 2, 16, 2) bfloat16: a vector holds 16 outputs and two inputs, as dot products want it |
// | int8     | for each group: 16 scales and 16 offsets, bfloat16, then (8, 16, 4) bytes                       |
// | int4     | for each group: 16 scales and 16 offsets, bfloat16, then (4, 16, 4) bytes                       |
//
// A quantised weight is scale * q + offset with q unsigned. The low halves of int4's byte l hold the inputs that int8's
// byte 2 l would, the high halves those of 2 l + 1, counted in runs of 64 bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "chairlift/bf16.hpp"

namespace chairlift {

enum MatrixFormat : std::int32_t { kFormatFloat32 = 0, kFormatBfloat16 = 1, kFormatInt8 = 2, kFormatInt4 = 3 };
constexpr int kFormats = 4;

constexpr int kBlock = 16;  // outputs
constexpr int kRowsBeyond = 31;  // that kernels may read behind the last row of activations, to no effect
constexpr int kGroup = 32;  // inputs that share a scale

// Rows of activations, as `prepare` made them, times blocks of weights.
struct MatmulCall {
  const std::byte* rows;
  std::int64_t row_bytes;
  std::int32_t num_rows;
  std::int32_t num_inputs;  // a multiple of kGroup
  const std::byte* blocks;
  std::int64_t block_bytes;
  std::int32_t num_blocks;
  std::int32_t num_following;  // blocks behind these that the same thread will read next
  float* out;  // (num_rows, num_blocks * kBlock), written
  std::int64_t out_stride;
};

using MultiplyFunction = void (*)(const MatmulCall& call);

// What the decoder has done for it, in the vectors of one instruction set. Sums are float32.
struct DecoderKernels {
  // Bytes of a prepared row of n inputs, a multiple of 64.
  std::int64_t (*row_bytes[kFormats])(std::int64_t n);
  // n (a multiple of kGroup) activations into a prepared row of `inputs` ones, from place `at` on.
  void (*prepare[kFormats])(const float* in, std::int64_t n, std::int64_t inputs, std::int64_t at, std::byte* row);
  MultiplyFunction multiply[kFormats];
  // Row `output` of a block's weights, as floats.
  void (*unpack[kFormats])(const std::byte* block, std::int32_t output, std::int64_t inputs, float* out);
  // out = x / sqrt(mean(x^2) + eps) * weight
  void (*rms_norm)(const float* x, const float* weight, std::int64_t n, float eps, float* out);
  // x[i], x[i + half] turned by the angle whose cosine and sine are given, for i < half.
  void (*rotate)(float* x, const float* cosines, const float* sines, std::int64_t half);
  void (*add)(const float* in, std::int64_t n, float* to);
  void (*scale)(float factor, std::int64_t n, float* x);
  // Blocks of 16 gates and 16 others in turn: silu(gate) * other, or gelu (by tanh), n results.
  void (*gate)(const float* pairs, std::int64_t n, std::int32_t activation, float* out);
  void (*softcap)(float cap, std::int64_t n, float* x);
};

enum Activation : std::int32_t { kSilu = 0, kGeluTanh = 1 };

// Null where the build lacks the instruction set; isa.hpp says what the processor has.
extern const DecoderKernels* const kPortableDecoder;
extern const DecoderKernels* const kAvx2Decoder;
extern const DecoderKernels* const kAvx512Decoder;
extern const DecoderKernels* const kAvx512Bf16Decoder;
extern const MultiplyFunction kAmxMultiplyBf16;  // what AMX does better than the one before

}  // namespace chairlift
