// One query token: its heads against each key as dot products, keys and values read in place from the pages. All heads
// go through a page together, so that memory is read in order.
#pragma once

#include "chairlift/attention_vector.hpp"

namespace chairlift {
namespace {

#if defined(CHAIRLIFT_AVX512)
constexpr int kFewHeads = 6;  // heads at a time: what the registers hold
#else
constexpr int kFewHeads = 3;
#endif
constexpr int kKeys = 4;       // keys at a time
constexpr int kValueBytes = 16384;  // of values at a time: they stay in the first-level cache for all heads
constexpr int kAheadBytes = 32768;  // of keys or values that are fetched, into the second cache, before they are needed
constexpr int kAhead = 96;          // the most keys or values of that
constexpr int kScoreStride = kSplit + kMaxLanes;

// Always inline: GCC takes a function of nothing but prefetches for one without effect, and drops calls of it.
template <class T>
[[gnu::always_inline]] inline void prefetch(const T* from, int head_dim) {
  const auto* bytes = reinterpret_cast<const char*>(from);
  for (std::size_t at = 0; at < static_cast<std::size_t>(head_dim) * sizeof(T); at += 64) {
    __builtin_prefetch(bytes + at, 0, 2);
  }
}

// How the elements from d on are loaded: all 2 * kLanes of them, or those that are left of head_dim.
struct Whole {
  template <Half kHalf, class T>
  Floats load(const T* from) const {
    return load_half<kHalf>(from);
  }
};
struct Rest {
  int left;

  template <Half kHalf, class T>
  Floats load(const T* from) const {
    return load_half<kHalf>(from, left);
  }
};

// sums += products of kHeads queries and kKeys keys over kLanes elements. A query stays in its register for all keys.
template <Half kHalf, int kHeads, class T, class Loader>
[[gnu::always_inline]] inline void add_products(const T* const* keys, int d, const float* query, int width,
                                                Loader loader, Floats (&sums)[kHeads][kKeys]) {
  Floats queries[kHeads];
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
    queries[h] = load(query + h * width + d + (kHalf == Half::kLow ? 0 : kLanes));
  }
#pragma GCC unroll 4
  for (int k = 0; k < kKeys; ++k) {
    const Floats key = loader.template load<kHalf>(keys[k] + d);
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
      sums[h][k] = fma(key, queries[h], sums[h][k]);
    }
  }
}

// kHeads queries with kKeys keys; queries in the order of load_half.
template <int kHeads, class T>
inline void dot(const T* const* keys, const float* query, const QueryTile& tile, float* scores) {
  Floats sums[kHeads][kKeys] = {};
  int d = 0;
  for (; d + 2 * kLanes <= tile.head_dim; d += 2 * kLanes) {
    add_products<Half::kLow>(keys, d, query, tile.width, Whole{}, sums);
    add_products<Half::kHigh>(keys, d, query, tile.width, Whole{}, sums);
  }
  if (d < tile.head_dim) {
    const Rest rest{tile.head_dim - d};
    add_products<Half::kLow>(keys, d, query, tile.width, rest, sums);
    add_products<Half::kHigh>(keys, d, query, tile.width, rest, sums);
  }
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
    store_sums(scores + h * kScoreStride, sums[h]);
  }
}

// sums[h] += sum over n values of weights[h][i] * values[i], for kPairs times 2 * kLanes elements from d on.
template <int kHeads, int kPairs, class T, class Loader>
inline void accumulate(const T* const* values, int offset, int d, int n, const float* weights, const QueryTile& tile, float* out,
                       Loader loader) {
  constexpr int kStep = 2 * kLanes;
  Floats sums[kHeads][2 * kPairs];
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
    for (int v = 0; v < 2 * kPairs; ++v) {
      sums[h][v] = load(out + h * tile.width + d + v * kLanes);
    }
  }
  for (int k = 0; k < n; ++k) {
    const T* value = values[k] + offset + d;
    Floats weight[kHeads];
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
      weight[h] = splat(weights[h * kScoreStride + k]);
    }
#pragma GCC unroll 2
    for (int p = 0; p < kPairs; ++p) {
      const Floats low = loader.template load<Half::kLow>(value + p * kStep);
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) {
        sums[h][2 * p] = fma(weight[h], low, sums[h][2 * p]);
      }
      const Floats high = loader.template load<Half::kHigh>(value + p * kStep);
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) {
        sums[h][2 * p + 1] = fma(weight[h], high, sums[h][2 * p + 1]);
      }
    }
  }
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
    for (int v = 0; v < 2 * kPairs; ++v) {
      store(out + h * tile.width + d + v * kLanes, sums[h][v]);
    }
  }
}

// Of the key-value head whose values begin `offset` elements into each of `values`.
template <int kHeads, class T>
inline void weigh(const T* const* values, int offset, int n, const float* weights, const QueryTile& tile, float* out) {
  constexpr int kStep = 2 * kLanes;
  int d = 0;
  for (; d + 2 * kStep <= tile.head_dim; d += 2 * kStep) {
    accumulate<kHeads, 2>(values, offset, d, n, weights, tile, out, Whole{});
  }
  for (; d + kStep <= tile.head_dim; d += kStep) {
    accumulate<kHeads, 1>(values, offset, d, n, weights, tile, out, Whole{});
  }
  if (d < tile.head_dim) {
    accumulate<kHeads, 1>(values, offset, d, n, weights, tile, out, Rest{tile.head_dim - d});
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

// Addresses of n keys, then of their values, then more that may be fetched: the order in which they are needed.
template <class T>
inline void find_all(const KeySpan& span, int n, const T** at) {
  find_keys<T>(span, span.first, span.last, at);
  for (int i = 0; i < n; ++i) {
    at[n + i] = at[i] + span.unit;
  }
  for (int i = 0; i < kAhead + kKeys; ++i) {
    at[2 * n + i] = at[2 * n - 1];
  }
}

// lines (lines, kScoreStride) *= the numbers of the n keys, or values, that each of them is for.
inline void apply_scales(const Int8* const* at, int n, const QueryTile& tile, int head_stride, float* lines) {
  float scales[kScoreStride] = {};
  for (int first = 0, head = 0; first < tile.lines; first += tile.group, head += head_stride) {
    for (int i = 0; i < n; ++i) {
      scales[i] = scale_of(at[i] + head, tile.head_dim);
    }
    for (int line = first; line < first + tile.group; ++line) {
      float* to = lines + line * kScoreStride;
      for (int i = 0; i < n; i += kLanes) {
        store(to + i, load(to + i) * load(scales + i));
      }
    }
  }
}

template <class T>
void attend_few(const QueryTile& tile, const KeySpan& span, const Partial& partial, float* scratch) {
  const T* at[2 * kSplit + kAhead + kKeys];
  const int n = span.last - span.first;
  const int width = static_cast<int>(span.token_stride);  // elements of a token's keys of all heads
  const int bytes = width * static_cast<int>(sizeof(T));
  const int ahead = kAheadBytes / bytes < kAhead ? kAheadBytes / bytes + 1 : kAhead;
  find_all(span, n, at);
  for (int i = 0; i < ahead; ++i) {
    prefetch(at[i], width);
  }
  float* scores = scratch;
  float* query = scratch + tile.lines * kScoreStride;
  for (int line = 0; line < tile.lines; ++line) {
    pair(static_cast<const T*>(nullptr), tile.query + line * tile.width, query + line * tile.width, tile.width);
  }
  for (int k = 0; k < n; k += kKeys) {
    for (int i = 0; i < kKeys; ++i) {
      prefetch(at[k + ahead + i], width);
    }
    for (int first = 0, head = 0; first < tile.lines; first += tile.group, head += span.head_stride) {
      const T* keys[kKeys];
      for (int i = 0; i < kKeys; ++i) {
        keys[i] = at[k + i < n ? k + i : n - 1] + head;  // the score of a key that is not there is never looked at
      }
      for_heads(first, first + tile.group, [&]<int kHeads>(int line) {
        dot<kHeads>(keys, query + line * tile.width, tile, scores + line * kScoreStride + k);
      });
    }
  }
  if constexpr (kScaled<T>) apply_scales(at, n, tile, span.head_stride, scores);
  for (int line = 0; line < tile.lines; ++line) {
    soften(scores + line * kScoreStride, n, tile, partial.highest + line, partial.total + line);
  }
  if constexpr (kScaled<T>) apply_scales(at + n, n, tile, span.head_stride, scores);
  std::memset(partial.values, 0, static_cast<std::size_t>(tile.lines * tile.width) * sizeof(float));
  const int step = kValueBytes / bytes < 4 ? 4 : kValueBytes / bytes;
  for (int k = 0; k < n; k += step) {
    const int count = n - k < step ? n - k : step;
    for (int i = k + step; i < k + step + step && i < n; ++i) {
      prefetch(at[n + i], width);
    }
    for (int first = 0, head = 0; first < tile.lines; first += tile.group, head += span.head_stride) {
      for_heads(first, first + tile.group, [&]<int kHeads>(int line) {
        weigh<kHeads>(at + n + k, head, count, scores + line * kScoreStride + k, tile,
                      partial.values + line * tile.width);
      });
    }
  }
  for (int line = 0; line < tile.lines; ++line) {
    unpair(static_cast<const T*>(nullptr), partial.values + line * tile.width, tile.width);
  }
}

}  // namespace
}  // namespace chairlift
