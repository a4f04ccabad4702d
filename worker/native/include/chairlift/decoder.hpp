// A whole forward pass of a decoder model in one call: embedding, layers, last norm, output layer. For models that are
// built as Llama is, with the variations that ChairliftDecoderLayer names.
//
// Weights are packed (matmul.hpp). Between the products all numbers are float32; a product's activations are made what
// its weights' format calls for. What a row gets depends on that row alone.
#pragma once

#include <cstdint>

#include "chairlift/attention.hpp"

extern "C" {

enum ChairliftDecoderStatus : std::int32_t {
  kChairliftDecoderOk = 0,
  kChairliftDecoderBadShape = 1,  // a size below 1, a token or layer that does not exist, an unknown format
  kChairliftDecoderNoIsa = 2,     // this machine lacks that instruction set
  kChairliftDecoderBadTable = 3,  // a page that is needed has no unit in the cache
  kChairliftDecoderNoMemory = 4,
};

// Packed weights of a linear layer. Layouts of all structs are shared with decoder/native_decoder.py.
struct ChairliftMatrix {
  const void* blocks;   // null: there is no such layer
  const float* bias;    // (outputs,) or null
  std::int32_t format;  // MatrixFormat
  std::int32_t outputs;
  std::int32_t inputs;
  std::int32_t reserved;
};

struct ChairliftDecoderLayer {
  ChairliftMatrix qkv;      // queries of all heads, then keys, then values
  ChairliftMatrix out;      // of the attention
  ChairliftMatrix gate_up;  // blocks of 16 gates and 16 others in turn
  ChairliftMatrix down;
  const float* attention_norm;       // (hidden,) before the attention
  const float* after_attention_norm;  // after it, before the residual; or null
  const float* mlp_norm;             // before the feed-forward part
  const float* after_mlp_norm;        // after it, before the residual; or null
  const float* query_norm;  // (head_dim,) of each head, or null
  const float* key_norm;
  std::int32_t rope;   // number of its table of angles; -1: none
  std::int32_t group;  // number of its page tables
  ChairliftAttentionLayer attention;  // io_type is float32
};

struct ChairliftDecoder {
  const ChairliftDecoderLayer* layers;
  ChairliftMatrix embedding;  // (vocabulary, hidden), looked up by row
  ChairliftMatrix head;
  const float* norm;  // (hidden,) the last one
  std::int32_t num_layers;
  std::int32_t hidden;
  std::int32_t inner;       // width of the feed-forward part
  std::int32_t activation;  // Activation
  std::int32_t isa;         // ChairliftAttentionIsa
  float eps;
  float embedding_scale;
  float softcap;  // of the logits; 0: off
};

// Cosines and sines of each position's angles: (positions, head_dim / 2) each.
struct ChairliftRope {
  const float* cosines;
  const float* sines;
};

struct ChairliftDecoderStep {
  const ChairliftAttentionStep* groups;  // one for each set of page tables; the rows are the same in all
  const ChairliftRope* ropes;
  const std::int64_t* tokens;     // (tokens,) ids
  const std::int64_t* positions;  // (tokens,)
  const std::int64_t* sampled;    // (num_sampled,) places of the tokens whose logits are wanted
  float* logits;                  // (num_sampled, logits_stride), written
  std::int64_t logits_stride;     // at least the head's outputs, rounded up to 16
  std::int32_t num_tokens;
  std::int32_t num_sampled;
  std::int32_t num_groups;
  std::int32_t num_ropes;
  std::int32_t num_threads;  // must be torch's number
};

// Returns a ChairliftDecoderStatus; unless it is Ok, nothing was written.
std::int32_t chairlift_decode(const ChairliftDecoder* decoder, const ChairliftDecoderStep* step);

// Bytes of a packed block of a format with that many inputs; 0 for an unknown format.
std::int64_t chairlift_block_bytes(std::int32_t format, std::int64_t inputs);

// One product, for tests: rows (num_rows, inputs) times the matrix, into (num_rows, stride). One thread.
std::int32_t chairlift_multiply(std::int32_t isa, const ChairliftMatrix* matrix, const float* rows,
                                std::int32_t num_rows, float* out, std::int64_t stride);

}  // extern "C"
