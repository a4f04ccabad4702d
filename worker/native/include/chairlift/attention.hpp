// Attention through the paged cache: the step's new keys and values are put into their pages, then every query token
// attends to its row's pages in place.
//
// The cache is one buffer of units, each [page_size][kv_heads][head_dim] elements; of an int8 cache [head_dim + 4]: behind
// the numbers of a head the float32 that they are multiplied by, the largest of what was written over 127. A table entry is the number of its
// page's first unit; a layer's keys are in unit entry + unit_offset, its values in the unit after that.
//
// What a row gets depends on that row alone: its context is cut at fixed lengths, never by the number of threads, and
// the parts are put together in order. All sums are float32. Unless the cache is float32, rows of several tokens round queries and
// weights to bfloat16 where the processor has dot products of it; everything else is multiplied in float32.
#pragma once

#include <cstdint>

extern "C" {

enum ChairliftAttentionType : std::int32_t {
  kChairliftFloat32 = 0,
  kChairliftBfloat16 = 1,
  kChairliftInt8 = 2,  // of a cache alone
};

enum ChairliftAttentionIsa : std::int32_t {
  kChairliftIsaBest = 0,  // the best that this machine has
  kChairliftIsaPortable = 1,
  kChairliftIsaAvx2 = 2,
  kChairliftIsaAvx512 = 3,
  kChairliftIsaAvx512Bf16 = 4,
  kChairliftIsaAmx = 5,  // the attention itself is that of the one before
};

enum ChairliftAttentionStatus : std::int32_t {
  kChairliftAttentionOk = 0,
  kChairliftAttentionBadShape = 1,  // a size below 1, heads not a multiple of kv_heads, an unknown type
  kChairliftAttentionNoIsa = 2,     // this machine lacks that instruction set
  kChairliftAttentionBadTable = 3,  // a page that is needed has no unit in the cache
  kChairliftAttentionNoMemory = 4,
};

// The rows of a step; the same for all layers of one page table. Layouts are shared with attention/native_kernel.py.
struct ChairliftAttentionStep {
  const std::int32_t* row_first;  // (rows + 1,) packed place of each row's first query token; last: number of tokens
  const std::int32_t* row_start;  // (rows,) position of that token
  const std::int32_t* tables;     // (rows, table_stride); entries of pages below the window are never read
  std::int64_t table_stride;
  std::int32_t num_rows;
  std::int32_t num_threads;  // must be torch's number: another one makes the pool start and end threads each time
};

// One layer.
struct ChairliftAttentionLayer {
  void* cache;
  const float* sinks;  // (heads,) scores that take their share of the softmax and give nothing; or null
  std::int64_t num_units;
  std::int32_t cache_type;  // ChairliftAttentionType
  std::int32_t io_type;     // of queries, new keys, new values and output
  std::int32_t isa;         // ChairliftAttentionIsa
  std::int32_t page_size;
  std::int32_t heads;
  std::int32_t kv_heads;
  std::int32_t head_dim;
  std::int32_t unit_offset;
  std::int32_t window;  // positions that a query sees, its own included; 0: all before it
  float scale;
  float softcap;  // scores become softcap * tanh(scores / softcap); 0: off
};

// (tokens, heads, head_dim) with unit stride in the last place; strides in elements.
struct ChairliftAttentionTensor {
  const void* data;
  std::int64_t token_stride;
  std::int64_t head_stride;
};

// The packed tokens of a step in one layer. Null keys and values: they are in the cache already.
struct ChairliftAttentionCall {
  ChairliftAttentionTensor query;
  ChairliftAttentionTensor key;
  ChairliftAttentionTensor value;
  ChairliftAttentionTensor out;  // written
};

// Returns a ChairliftAttentionStatus; unless it is Ok, nothing was written.
std::int32_t chairlift_attend(const ChairliftAttentionStep* step, const ChairliftAttentionLayer* layer,
                              const ChairliftAttentionCall* call);

// Whether this machine and this build have that instruction set.
std::int32_t chairlift_attention_has_isa(std::int32_t isa);

// The vectorised functions inside, for tests: n values through exp (0 below -87.3) or tanh. 0, or kChairliftAttentionNoIsa.
std::int32_t chairlift_attention_exp(std::int32_t isa, const float* in, float* out, std::int64_t n);
std::int32_t chairlift_attention_tanh(std::int32_t isa, const float* in, float* out, std::int64_t n);

}  // extern "C"
