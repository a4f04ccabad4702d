// One query token: its few heads against each key as dot products, keys and values read in place from the pages.
#pragma once

#include "chairlift/attention_vector.hpp"

namespace chairlift {
namespace {

#if defined(CHAIRLIFT_ATTENTION_AVX512)
constexpr int kFewHeads = 6;  // heads at a time: what the registers hold
#else
constexpr int kFewHeads = 3;
#endif
constexpr int kKeys = 4;            // keys at a time
constexpr int kValues = 32;         // values at a time: they stay in the first-level cache for all heads
constexpr int kPrefetch = 24;       // keys ahead
constexpr int kScoreStride = kSplit + kMaxLanes;

// Fetches what keys[i] points to, or the value after the last key; `keys` are followed by their values.
template <class T>
inline void prefetch(const T* const* keys, int num_keys, int i, std::int64_t unit, int head_dim) {
  if (i >= 2 * num_keys) return;
  const T* from = i < num_keys ? keys[i] : keys[i - num_keys] + unit;
  const auto* bytes = reinterpret_cast<const char*>(from);
  for (std::size_t at = 0; at < static_cast<std::size_t>(head_dim) * sizeof(T); at += 64) {
    __builtin_prefetch(bytes + at);
  }
}

// kHeads queries with four keys; queries as load_pair<T> has them.
template <int kHeads, class T>
inline void dot(const T* const* keys, const float* query, const QueryTile& tile, float* scores) {
  Floats sums[kHeads][kKeys] = {};
  const auto add = [&](int d, const auto& load_key) {
#pragma GCC unroll 4
    for (int k = 0; k < kKeys; ++k) {
      const Pair key = load_key(keys[k] + d);
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) {
        const float* q = query + h * tile.width + d;
        sums[h][k] = fma(key.high, load(q + kLanes), fma(key.low, load(q), sums[h][k]));
      }
    }
  };
  int d = 0;
  for (; d + 2 * kLanes <= tile.head_dim; d += 2 * kLanes) {
    add(d, [](const T* key) { return load_pair(key); });
  }
  if (d < tile.head_dim) {
    add(d, [left = tile.head_dim - d](const T* key) { return load_pair(key, left); });
  }
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
    store_sums(scores + h * kScoreStride, sums[h]);
  }
}

// values[h] += sum over n keys of weights[h][key] * value[key], for kPairs pairs of vectors from element d on.
template <int kHeads, int kPairs, class T, class Load>
inline void accumulate(const T* const* keys, std::int64_t unit, int n, const float* weights, int width, float* values,
                       const Load& load_value) {
  Pair sums[kHeads][kPairs];
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p) {
      sums[h][p] = load_pair(values + h * width + p * 2 * kLanes);
    }
  }
  for (int k = 0; k < n; ++k) {
    const T* value = keys[k] + unit;
    Pair parts[kPairs];
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p) {
      parts[p] = load_value(value + p * 2 * kLanes);
    }
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
      const Floats weight = splat(weights[h * kScoreStride + k]);
#pragma GCC unroll 4
      for (int p = 0; p < kPairs; ++p) {
        sums[h][p].low = fma(weight, parts[p].low, sums[h][p].low);
        sums[h][p].high = fma(weight, parts[p].high, sums[h][p].high);
      }
    }
  }
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p) {
      store(values + h * width + p * 2 * kLanes, sums[h][p].low);
      store(values + h * width + p * 2 * kLanes + kLanes, sums[h][p].high);
    }
  }
}

template <int kHeads, class T>
inline void weigh(const T* const* keys, std::int64_t unit, int n, const float* weights, const QueryTile& tile,
                  float* values) {
  const auto whole = [](const T* value) { return load_pair(value); };
  constexpr int step = 2 * kLanes;
  int d = 0;
  for (; d + 2 * step <= tile.head_dim; d += 2 * step) {
    accumulate<kHeads, 2>(keys, unit + d, n, weights, tile.width, values + d, whole);
  }
  for (; d + step <= tile.head_dim; d += step) {
    accumulate<kHeads, 1>(keys, unit + d, n, weights, tile.width, values + d, whole);
  }
  if (d < tile.head_dim) {
    accumulate<kHeads, 1>(keys, unit + d, n, weights, tile.width, values + d,
                          [left = tile.head_dim - d](const T* value) { return load_pair(value, left); });
  }
}

// Calls body with kFewHeads at a time and what is left over, as compile-time numbers: body(count, first line).
template <int kCount = kFewHeads, class Body>
inline void for_heads(int first, int lines, const Body& body) {
  if constexpr (kCount > 0) {
    for (; first + kCount <= lines; first += kCount) {
      body.template operator()<kCount>(first);
    }
    for_heads<kCount - 1>(first, lines, body);
  }
}

// Raw scores become weights; returns through highest and total.
inline void soften(float* scores, int n, const QueryTile& tile, float* highest_out, float* total_out) {
  const float none = -__builtin_inff();
  Floats top = splat(none);
  for (int i = n; i % kLanes != 0; ++i) {
    scores[i] = 0.0F;  // a number, whatever it was
  }
  for (int i = 0; i < n; i += kLanes) {
    store(scores + i, finish_scores(load(scores + i), tile.scale, tile.softcap));
  }
  for (int i = n; i % kLanes != 0; ++i) {
    scores[i] = none;
  }
  for (int i = 0; i < n; i += kLanes) {
    top = max(top, load(scores + i));
  }
  const float found = highest(top);
  Floats total{};
  for (int i = 0; i < n; i += kLanes) {
    const Floats weights = exp(load(scores + i) - found);
    store(scores + i, weights);
    total += weights;
  }
  *highest_out = found;
  *total_out = sum(total);
}

template <class T>
void attend_few(const QueryTile& tile, const KeySpan& span, const Partial& partial, float* scratch) {
  const T* keys[kSplit + kKeys];
  const int n = span.last - span.first;
  find_keys<T>(span, span.first, span.last, keys);
  for (int i = n; i % kKeys != 0; ++i) {
    keys[i] = keys[n - 1];  // its score is never looked at
  }
  float* scores = scratch;
  float* query = scratch + tile.lines * kScoreStride;
  for (int line = 0; line < tile.lines; ++line) {
    pair(static_cast<const T*>(nullptr), tile.query + line * tile.width, query + line * tile.width, tile.width);
  }
  for (int k = 0; k < n; k += kKeys) {
    for (int i = 0; i < kKeys; ++i) {
      prefetch(keys, n, k + kPrefetch + i, span.unit, tile.head_dim);
    }
    for_heads(0, tile.lines, [&]<int kHeads>(int line) {
      dot<kHeads>(keys + k, query + line * tile.width, tile, scores + line * kScoreStride + k);
    });
  }
  for (int line = 0; line < tile.lines; ++line) {
    soften(scores + line * kScoreStride, n, tile, partial.highest + line, partial.total + line);
  }
  std::memset(partial.values, 0, static_cast<std::size_t>(tile.lines * tile.width) * sizeof(float));
  for (int k = 0; k < n; k += kValues) {
    const int count = n - k < kValues ? n - k : kValues;
    for (int i = 0; i < kValues; ++i) {
      prefetch(keys, n, n + k + kValues + i, span.unit, tile.head_dim);
    }
    for_heads(0, tile.lines, [&]<int kHeads>(int line) {
      weigh<kHeads>(keys + k, span.unit, count, scores + line * kScoreStride + k, tile,
                    partial.values + line * tile.width);
    });
  }
  for (int line = 0; line < tile.lines; ++line) {
    unpair(static_cast<const T*>(nullptr), partial.values + line * tile.width, tile.width);
  }
}

}  // namespace
}  // namespace chairlift
