#include "chairlift/attention_plan.hpp"

#include <algorithm>

namespace chairlift {
namespace {

constexpr std::int32_t kTileLines = 64;    // lines of a tile of queries, about
constexpr std::int32_t kLeastQueries = 4;  // tokens of a tile of queries, however many heads share
constexpr std::int32_t kTileSplit = 512;   // context of a row of a single tile that is attended to in one piece

std::int32_t tile_queries(std::int32_t group) { return std::max(kLeastQueries, kTileLines / group); }

}  // namespace

void AttentionPlan::make(const ChairliftAttentionStep& step, const ChairliftAttentionLayer& layer,
                         std::int64_t width) {
  groups.clear();
  pieces.clear();
  partial_floats = 0;
  most_lines = 0;
  const std::int32_t heads = layer.heads / layer.kv_heads;

  const auto add = [&](AttentionGroup group) {
    const std::int32_t position = step.row_start[group.row] + group.first_query;
    group.first_key = first_visible(position, layer.window);
    group.last_key = position + group.num_queries;
    const std::int32_t lines = group.num_queries * group.num_heads;
    const bool whole = group.split == 0;
    group.num_splits = whole ? 1 : (group.last_key - 1) / group.split - group.first_key / group.split + 1;
    group.unfinished = group.num_splits;
    group.partials = partial_floats;
    if (group.num_splits > 1) partial_floats += group.num_splits * chairlift::partial_floats(lines, width);
    most_lines = std::max(most_lines, lines);
    groups.push_back(group);
  };

  // The longest pieces come first, so that no thread is left with one at the end.
  for (const bool single : {false, true}) {
    for (std::int32_t row = 0; row < step.num_rows; ++row) {
      const std::int32_t tokens = step.row_first[row + 1] - step.row_first[row];
      if ((tokens == 1) != single) continue;
      const std::int32_t tile = single ? 1 : tile_queries(heads);
      const std::int32_t split = single ? kSplit : (tokens <= tile ? kTileSplit : 0);
      const auto begin = static_cast<std::int32_t>(groups.size());
      for (std::int32_t query = (tokens - 1) / tile * tile; query >= 0; query -= tile) {
        for (std::int32_t head = 0; head < (single ? 1 : layer.kv_heads); ++head) {
          add({.row = row,
               .first_query = query,
               .num_queries = std::min(tile, tokens - query),
               .kv_head = head,
               .num_heads = single ? layer.heads : heads,
               .first_key = 0,
               .last_key = 0,
               .split = split,
               .num_splits = 0,
               .unfinished = 0,
               .partials = 0});
        }
      }
      // All heads of the same pages one after the other: what one fetches, the next may find.
      const auto end = static_cast<std::int32_t>(groups.size());
      std::int32_t most = 0;
      for (std::int32_t group = begin; group < end; ++group) {
        most = std::max(most, groups[static_cast<std::size_t>(group)].num_splits);
      }
      for (std::int32_t part = 0; part < most; ++part) {
        for (std::int32_t group = begin; group < end; ++group) {
          if (part < groups[static_cast<std::size_t>(group)].num_splits) pieces.push_back({group, part});
        }
      }
    }
  }
}

bool tables_are_valid(const ChairliftAttentionStep& step, const ChairliftAttentionLayer& layer) {
  for (std::int32_t row = 0; row < step.num_rows; ++row) {
    const std::int32_t tokens = step.row_first[row + 1] - step.row_first[row];
    const std::int32_t start = step.row_start[row];
    if (tokens < 1 || start < 0) return false;
    const std::int32_t last = (start + tokens - 1) / layer.page_size;
    if (last >= step.table_stride) return false;
    const std::int32_t* table = step.tables + row * step.table_stride;
    for (std::int32_t page = first_visible(start, layer.window) / layer.page_size; page <= last; ++page) {
      const std::int64_t keys = std::int64_t{table[page]} + layer.unit_offset;
      if (table[page] < 0 || keys + 1 >= layer.num_units) return false;
    }
  }
  return true;
}

}  // namespace chairlift
