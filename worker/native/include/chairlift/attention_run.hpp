// One attention call: new keys and values are written, pieces attended to and parts put together by the same threads in
// one go, because waking threads costs as much as a small piece.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "chairlift/attention.hpp"
#include "chairlift/attention_kernel.hpp"
#include "chairlift/attention_plan.hpp"
#include "chairlift/scratch.hpp"

namespace chairlift {

constexpr std::int32_t kWriteTokens = 64;    // new tokens that a thread puts into pages at a time
constexpr std::int32_t kTurned = 4;          // queries that are transposed at a time: any kernel's lanes are a multiple
constexpr float kNothing = 1e-30F;           // what int8 takes for zero
constexpr std::int64_t kSerialWork = 1 << 17;  // multiplications under which waking other threads costs more

inline float to_float(float x) { return x; }
inline float to_float(Bf16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }

inline void convert(float x, float& to) { to = x; }
inline void convert(float x, Bf16& to) {  // to nearest, ties to even
  const auto word = std::bit_cast<std::uint32_t>(x);
  const auto rounded = (word + 0x7FFFU + ((word >> 16) & 1U)) >> 16;
  to.bits = static_cast<std::uint16_t>(std::isnan(x) ? (word >> 16) | 0x40U : rounded);
}

// n floats as whole numbers, and behind them what these are multiplied by. One that is no number makes it none.
template <class From>
void quantise(const void* from, void* to, std::int64_t n) {
  const auto* in = static_cast<const From*>(from);
  auto* numbers = static_cast<Int8*>(to);
  std::uint32_t most_bits = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    most_bits = std::max(most_bits, std::bit_cast<std::uint32_t>(to_float(in[i])) & 0x7FFFFFFFU);  // NaN is the largest
  }
  const auto most = std::bit_cast<float>(most_bits);
  const float inverse = most < kNothing ? 0.0F : 127.0F / most;
  for (std::int64_t i = 0; i < n; ++i) {  // the sum with 1.5 * 2^23 has the nearest whole number in its low bits
    numbers[i].number = static_cast<std::int8_t>(std::bit_cast<std::uint32_t>(to_float(in[i]) * inverse + 12582912.0F));
  }
  const float scale = most / 127.0F;
  std::memcpy(numbers + n, &scale, sizeof scale);
}

template <class From, class To>
void copy_elements(const void* from, void* to, std::int64_t n) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(From));
  } else {
    for (std::int64_t i = 0; i < n; ++i) {
      convert(to_float(static_cast<const From*>(from)[i]), static_cast<To*>(to)[i]);
    }
  }
}

using CopyFunction = void (*)(const void* from, void* to, std::int64_t n);
constexpr CopyFunction kCopy[2][3] = {{copy_elements<float, float>, copy_elements<float, Bf16>, quantise<float>},
                                      {copy_elements<Bf16, float>, copy_elements<Bf16, Bf16>, quantise<Bf16>}};
constexpr std::int64_t kBytes[3] = {sizeof(float), sizeof(Bf16), sizeof(Int8)};

// One attention call, done by any number of threads together.
class AttentionRun {
 public:
  AttentionRun(const ChairliftAttentionStep& step, const ChairliftAttentionLayer& layer,
            const ChairliftAttentionCall& call, const AttentionKernels& kernels, AttentionPlan& plan, float* partials)
      : step_(step),
        layer_(layer),
        call_(call),
        kernels_(kernels),
        plan_(plan),
        partials_(partials),
        heads_(layer.heads / layer.kv_heads),
        width_(static_cast<std::int32_t>(round_up(layer.head_dim, 2 * kernels.lanes))),
        head_stride_(layer.head_dim + (layer.cache_type == kChairliftInt8 ? kScaleElements : 0)),
        unit_(std::int64_t{layer.page_size} * layer.kv_heads * head_stride_),
        num_tokens_(step.row_first[step.num_rows]),
        num_writes_(call.key.data == nullptr ? 0 : (num_tokens_ + kWriteTokens - 1) / kWriteTokens) {}

  // Whether it is so little that one thread is the fastest.
  bool is_small() const {
    std::int64_t work = 0;
    for (const auto& group : plan_.groups) {
      work += std::int64_t{group.last_key - group.first_key} * group.num_queries * group.num_heads;
    }
    return work * layer_.head_dim < kSerialWork;
  }

  // What each thread does; it returns when nothing is left to take, though others may still be at work. Writes are taken
  // first, so by the time a piece is taken each write is done or under way.
  void work() noexcept {
    thread_local Scratch<float> scratch;
    float* memory = scratch.reserve(scratch_floats());
    const auto num_pieces = static_cast<std::int32_t>(plan_.pieces.size());
    for (;;) {
      const std::int32_t number = next_.fetch_add(1, std::memory_order_relaxed);
      if (number < num_writes_) {
        write(number * kWriteTokens, std::min(num_tokens_, (number + 1) * kWriteTokens));
        writes_done_.fetch_add(1, std::memory_order_release);
        continue;
      }
      if (number - num_writes_ >= num_pieces) return;
      for (int spins = 0; writes_done_.load(std::memory_order_acquire) < num_writes_; ++spins) {
        if (spins > 200) std::this_thread::yield();
      }
      attend(plan_.pieces[static_cast<std::size_t>(number - num_writes_)], memory);
    }
  }

 private:
  std::int64_t lines_floats() const { return plan_.most_lines * std::int64_t{width_}; }
  std::int64_t columns(std::int64_t lines) const { return round_up(lines, kernels_.lanes); }
  std::int64_t query_floats() const {
    return std::max(lines_floats(), layer_.head_dim * columns(plan_.most_lines));
  }
  std::int64_t scratch_floats() const {
    return query_floats() + partial_floats(plan_.most_lines, width_) +
           std::max(few_scratch(layer_.heads, width_), many_scratch(columns(plan_.most_lines), width_));
  }

  void write(std::int32_t first, std::int32_t last) {
    const auto* begin = step_.row_first;
    auto row = static_cast<std::int32_t>(std::upper_bound(begin, begin + step_.num_rows, first) - begin) - 1;
    for (std::int32_t token = first; token < last; ++token) {
      if (token >= begin[row + 1]) ++row;
      const std::int32_t position = step_.row_start[row] + token - begin[row];
      const std::int64_t base = step_.tables[row * step_.table_stride + position / layer_.page_size];
      const std::int64_t slot = position % layer_.page_size;
      const std::int64_t at = (base + layer_.unit_offset) * unit_ + slot * layer_.kv_heads * head_stride_;
      write_token(call_.key, token, at);
      write_token(call_.value, token, at + unit_);
    }
  }

  void write_token(const ChairliftAttentionTensor& from, std::int32_t token, std::int64_t at) {
    const std::int64_t in = kBytes[layer_.io_type];
    const std::int64_t out = kBytes[layer_.cache_type];
    const auto* source = static_cast<const std::byte*>(from.data) + token * from.token_stride * in;
    auto* target = static_cast<std::byte*>(layer_.cache) + at * out;
    for (std::int32_t head = 0; head < layer_.kv_heads; ++head) {
      kCopy[layer_.io_type][layer_.cache_type](source + head * from.head_stride * in,
                                               target + head * head_stride_ * out, layer_.head_dim);
    }
  }

  // The address of a query head of a token in `tensor`.
  std::byte* head_of(const ChairliftAttentionTensor& tensor, const AttentionGroup& group, std::int32_t line) const {
    const std::int64_t token = step_.row_first[group.row] + group.first_query + line / group.num_heads;
    const std::int64_t head = group.kv_head * heads_ + line % group.num_heads;
    auto* data = static_cast<std::byte*>(const_cast<void*>(tensor.data));
    return data + (token * tensor.token_stride + head * tensor.head_stride) * kBytes[layer_.io_type];
  }

  void attend(AttentionPiece piece, float* memory) {
    AttentionGroup& group = plan_.groups[static_cast<std::size_t>(piece.group)];
    const std::int32_t lines = group.num_queries * group.num_heads;
    const bool few = step_.row_first[group.row + 1] - step_.row_first[group.row] == 1;
    float* query = memory;
    float* own = query + query_floats();
    float* scratch = own + partial_floats(plan_.most_lines, width_);
    float* first = group.num_splits == 1 ? own : partials_ + group.partials;
    const QueryTile tile{.query = query,
                         .lines = lines,
                         .columns = static_cast<std::int32_t>(columns(lines)),
                         .group = heads_,
                         .head_dim = layer_.head_dim,
                         .width = width_,
                         .position = step_.row_start[group.row] + group.first_query,
                         .window = layer_.window,
                         .scale = layer_.scale,
                         .softcap = layer_.softcap};
    load_queries(group, tile, few, query, scratch);
    const auto function = (few ? kernels_.few : kernels_.many)[layer_.cache_type];
    function(tile, span_of(group, piece.split), partial_at(first, lines, piece.split), scratch);
    if (std::atomic_ref(group.unfinished).fetch_sub(1, std::memory_order_acq_rel) == 1) {
      put_together(group, lines, first, scratch);
    }
  }

  KeySpan span_of(const AttentionGroup& group, std::int32_t split) const {
    KeySpan span{.cache = layer_.cache,
                 .table = step_.tables + group.row * step_.table_stride,
                 .page_size = layer_.page_size,
                 .token_stride = std::int64_t{layer_.kv_heads} * head_stride_,
                 .unit = unit_,
                 .offset = layer_.unit_offset * unit_ + std::int64_t{group.kv_head} * head_stride_,
                 .head_stride = head_stride_,
                 .first = group.first_key,
                 .last = group.last_key};
    if (group.num_splits > 1) {
      const std::int32_t begin = (group.first_key / group.split + split) * group.split;
      span.first = std::max(group.first_key, begin);
      span.last = std::min(group.last_key, begin + group.split);
    }
    return span;
  }

  Partial partial_at(float* first, std::int32_t lines, std::int32_t split) const {
    float* at = first + split * partial_floats(lines, width_);
    return {at, at + lines, at + 2 * lines};
  }

  // Queries line by line for few, element by element (transposed) for many.
  void load_queries(const AttentionGroup& group, const QueryTile& tile, bool few, float* query, float* line) {
    const auto copy = kCopy[layer_.io_type][kChairliftFloat32];
    std::fill_n(query, few ? tile.lines * tile.width : tile.head_dim * tile.columns, 0.0F);
    if (few) {
      for (std::int32_t r = 0; r < tile.lines; ++r) {
        copy(head_of(call_.query, group, r), query + r * tile.width, tile.head_dim);
      }
      return;
    }
    for (std::int32_t begin = 0; begin < tile.lines; begin += kTurned) {
      const std::int32_t count = std::min(kTurned, tile.lines - begin);
      for (std::int32_t r = 0; r < count; ++r) {
        copy(head_of(call_.query, group, begin + r), line + r * tile.head_dim, tile.head_dim);
      }
      // As many each time, so that the compiler knows the number; lines that are not there are zeros.
      std::fill(line + count * tile.head_dim, line + kTurned * tile.head_dim, 0.0F);
      for (std::int32_t d = 0; d < tile.head_dim; ++d) {
        for (std::int32_t r = 0; r < kTurned; ++r) {
          query[d * tile.columns + begin + r] = line[r * tile.head_dim + d];
        }
      }
    }
  }

  // The output of a group from its splits, in their order.
  void put_together(const AttentionGroup& group, std::int32_t lines, float* first, float* line) {
    for (std::int32_t r = 0; r < lines; ++r) {
      const float sink = layer_.sinks == nullptr ? -std::numeric_limits<float>::infinity()
                                                 : layer_.sinks[group.kv_head * heads_ + r % group.num_heads];
      float highest = sink;
      for (std::int32_t split = 0; split < group.num_splits; ++split) {
        highest = std::max(highest, partial_at(first, lines, split).highest[r]);
      }
      float total = std::exp(sink - highest);
      bool is_first = true;
      for (std::int32_t split = 0; split < group.num_splits; ++split) {
        const Partial part = partial_at(first, lines, split);
        if (part.total[r] == 0.0F) continue;  // nothing there that this line sees
        const float share = std::exp(part.highest[r] - highest);
        const float* values = part.values + std::int64_t{r} * width_;
        total += share * part.total[r];
        for (std::int32_t d = 0; d < layer_.head_dim; ++d) {
          line[d] = share * values[d] + (is_first ? 0.0F : line[d]);
        }
        is_first = false;
      }
      if (is_first) std::fill_n(line, layer_.head_dim, 0.0F);
      const float inverse = 1.0F / total;
      for (std::int32_t d = 0; d < layer_.head_dim; ++d) {
        line[d] *= inverse;
      }
      kCopy[kChairliftFloat32][layer_.io_type](line, head_of(call_.out, group, r), layer_.head_dim);
    }
  }

  const ChairliftAttentionStep& step_;
  const ChairliftAttentionLayer& layer_;
  const ChairliftAttentionCall& call_;
  const AttentionKernels& kernels_;
  AttentionPlan& plan_;
  float* partials_;
  std::int32_t heads_;  // per key-value head
  std::int32_t width_;
  std::int32_t head_stride_;  // in the cache
  std::int64_t unit_;
  std::int32_t num_tokens_;
  std::int32_t num_writes_;
  alignas(64) std::atomic<std::int32_t> next_{0};
  alignas(64) std::atomic<std::int32_t> writes_done_{0};
};

// The kernels of an instruction set (ChairliftAttentionIsa); null where the build or the machine lacks it.
const AttentionKernels* find_attention(std::int32_t isa);

// Whether all sizes of a layer make sense.
bool has_shape(const ChairliftAttentionStep& step, const ChairliftAttentionLayer& layer);

}  // namespace chairlift
