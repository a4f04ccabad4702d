// How an attention call is cut into pieces that any thread may take: a function of the rows alone.
#pragma once

#include <cstdint>
#include <vector>

#include "chairlift/attention_kernel.hpp"

namespace chairlift {

// Queries that meet the same keys, and their part of the context cut into splits: of a row with one token the queries of
// all heads, so that each page is read in one go; of longer rows those of some tokens that share a key-value head.
struct AttentionGroup {
  std::int32_t row;
  std::int32_t first_query;  // in the row
  std::int32_t num_queries;
  std::int32_t kv_head;    // the first one
  std::int32_t num_heads;  // query heads of each token
  std::int32_t first_key;
  std::int32_t last_key;  // exclusive
  std::int32_t split;     // positions in a piece; pieces are cut at its multiples
  std::int32_t num_splits;
  std::int32_t unfinished;  // pieces; counted down atomically, the thread that ends the last one puts all together
  std::int64_t partials;    // where in the partials those of the first piece begin, if there are several
};

struct AttentionPiece {
  std::int32_t group;
  std::int32_t split;
};

struct AttentionPlan {
  std::vector<AttentionGroup> groups;
  std::vector<AttentionPiece> pieces;
  std::int64_t partial_floats = 0;
  std::int32_t most_lines = 0;  // of a piece

  // Fills the plan anew. `width` is the kernels' width of a line.
  void make(const ChairliftAttentionStep& step, const ChairliftAttentionLayer& layer, std::int64_t width);
};

// Floats of the partial results of a piece: per line the highest score, the total, and `width` values.
constexpr std::int64_t partial_floats(std::int64_t lines, std::int64_t width) { return lines * (width + 2); }

// Whether every page that the step writes or reads has two units in the cache.
bool tables_are_valid(const ChairliftAttentionStep& step, const ChairliftAttentionLayer& layer);

// First position that the query at a position sees.
constexpr std::int32_t first_visible(std::int32_t position, std::int32_t window) {
  return window > 0 && position >= window ? position - window + 1 : 0;
}

}  // namespace chairlift
