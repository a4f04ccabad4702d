// Between the plan of an attention call (attention.cpp) and the kernels that are compiled once for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "chairlift/attention.hpp"
#include "chairlift/bf16.hpp"
#include "chairlift/int8.hpp"

namespace chairlift {

// Positions [first, last) of one row, as one key-value head has them.
struct KeySpan {
  const void* cache;
  const std::int32_t* table;
  std::int64_t page_size;
  std::int64_t token_stride;  // elements from a token of a page to the next
  std::int64_t unit;          // elements of a unit, and so from a key to its value
  std::int64_t offset;        // elements from a page's begin to the head's first key
  std::int32_t head_stride;   // elements from a head of a token to the next
  std::int32_t first;
  std::int32_t last;
};

// Many: the queries that share a key-value head, `group` heads of each of some consecutive tokens; line r is head
// r % group of the token at position + r / group. Few: the queries of one token, `group` for each key-value head in turn.
struct QueryTile {
  const float* query;  // few: (lines, width); many: (head_dim, columns); zeros beyond head_dim and lines
  std::int32_t lines;
  std::int32_t columns;  // lines rounded up to the lanes
  std::int32_t group;
  std::int32_t head_dim;
  std::int32_t width;     // head_dim rounded up to twice the lanes
  std::int32_t position;  // of the first token
  std::int32_t window;
  float scale;
  float softcap;
};

// Softmax over a part of the context, not yet divided.
struct Partial {
  float* highest;  // (lines,) highest score
  float* total;    // (lines,) sum of exp(score - highest)
  float* values;   // (lines, width) sum of exp(score - highest) * value
};

using AttendFunction = void (*)(const QueryTile& tile, const KeySpan& span, const Partial& partial, float* scratch);
using MapFunction = void (*)(const float* in, float* out, std::int64_t n);

// Functions by the type of the cache (ChairliftAttentionType).
struct AttentionKernels {
  std::int32_t lanes;
  AttendFunction few[3];   // one token, a span of at most kSplit positions
  AttendFunction many[3];  // any number of tokens, a span of any length
  MapFunction exp;
  MapFunction tanh;
};

constexpr std::int32_t kSplit = 128;  // context of a one-token row that is attended to in one piece
constexpr std::int32_t kTile = 64;    // positions that a tile of queries meets at a time
constexpr std::int32_t kMaxLanes = 16;

constexpr std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

// Floats of scratch that the functions need.
constexpr std::int64_t few_scratch(std::int64_t lines, std::int64_t width) {
  return lines * (kSplit + kMaxLanes + width);
}
constexpr std::int64_t many_scratch(std::int64_t columns, std::int64_t width) {
  return kTile * (2 * width + columns) + (width / 2 + 4) * columns;
}

// Null where the build lacks the instruction set; isa.hpp says what the processor has.
extern const AttentionKernels* const kPortableAttention;
extern const AttentionKernels* const kAvx2Attention;
extern const AttentionKernels* const kAvx512Attention;
extern const AttentionKernels* const kAvx512Bf16Attention;

}  // namespace chairlift
