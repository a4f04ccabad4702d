// One forward pass, done by the threads of one parallel region: waking them once a step instead of once a product is
// what makes small batches fast.
#pragma once

#include <atomic>
#include <optional>

#include "chairlift/attention_run.hpp"
#include "chairlift/decoder.hpp"
#include "chairlift/matmul.hpp"
#include "chairlift/scratch.hpp"
#include "chairlift/team.hpp"

namespace chairlift {

// Memory of a pass that all its threads share; kept from pass to pass.
struct DecoderMemory {
  Team team;
  Scratch<float> hidden;  // (tokens, hidden) the residual stream
  Scratch<float> other;   // (tokens, hidden) what is to be normalised before it joins the residual stream
  Scratch<float> qkv;
  Scratch<float> attended;
  Scratch<std::byte> rows;   // prepared activations
  Scratch<std::byte> inner;  // the same of the feed-forward part
  Scratch<float> partials;
  AttentionPlan plan;
};

std::int64_t block_bytes(std::int32_t format, std::int64_t inputs);

class DecoderRun {
 public:
  DecoderRun(const ChairliftDecoder& decoder, const ChairliftDecoderStep& step, const DecoderKernels& kernels,
             const AttentionKernels& attention, DecoderMemory& memory);

  // What each thread does. `size` is the number of threads in the region.
  void work(std::int32_t size) noexcept;

 private:
  struct Thread;

  struct Product {
    const ChairliftMatrix& matrix;
    const std::byte* rows;
    std::int64_t row_bytes;
    std::int32_t num_rows;
    std::int32_t least_blocks;  // that a thread takes at a time
  };

  template <class Use>
  void share(Thread& thread, std::int32_t count, std::int32_t piece, Use use);
  template <class Make>
  const std::byte* make_rows(Thread& thread, const ChairliftMatrix& matrix, std::int32_t count, Make make);
  template <class Finish>
  void multiply(Thread& thread, const Product& product, Finish finish);
  void multiply_into(Thread& thread, const Product& product, float* out, std::int64_t stride);
  void add_product(Thread& thread, const Product& product, const float* norm);

  void embed(Thread& thread);
  void run_layer(Thread& thread, const ChairliftDecoderLayer& layer);
  void turn(Thread& thread, const ChairliftDecoderLayer& layer);
  void attend(Thread& thread);
  void feed_forward(Thread& thread, const ChairliftDecoderLayer& layer);
  void make_logits(Thread& thread);

  float* hidden_of(std::int64_t token) const { return hidden_ + token * decoder_.hidden; }

  const ChairliftDecoder& decoder_;
  const ChairliftDecoderStep& step_;
  const DecoderKernels& kernels_;
  const AttentionKernels& attention_kernels_;
  DecoderMemory& memory_;
  float* hidden_;
  float* other_;
  float* qkv_;
  float* attended_;
  std::byte* rows_;
  std::byte* inner_;
  ChairliftAttentionCall attention_call_{};
  std::optional<AttentionRun> attention_;  // the layer's
};

}  // namespace chairlift
