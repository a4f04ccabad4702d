// Many query tokens: a tile of them against a tile of keys as two matrix products, with the online softmax between
// (Milakov and Gimelshein 2018; Dao et al. 2022). Scores are kept key by key, so that the softmax runs down the lanes
// of a vector and never across.
#pragma once

#include "chairlift/attention_vector.hpp"

namespace chairlift {
namespace {

#if defined(CHAIRLIFT_AVX512)
constexpr int kProductRows = 12;
#else
constexpr int kProductRows = 6;
#endif

// How elements of a product are multiplied: an element of a with a vector of b.
inline Floats multiply_add(float a, Floats b, Floats sums) { return fma(splat(a), b, sums); }

// c (rows, columns) = or += a (rows, depth) * b (depth, columns). Element (r, k) of a is at r * a_row + k * a_depth.
template <class T>
struct Product {
  const T* a;
  std::ptrdiff_t a_row;
  std::ptrdiff_t a_depth;
  const T* b;
  float* c;
  int rows;
  int depth;
  int columns;  // a multiple of the lanes; also the distance between rows of b and c
  bool add;
};

template <int kRows, int kVectors, class T>
inline void multiply_block(const Product<T>& p, int row, int column) {
  Floats sums[kRows][kVectors] = {};
  float* c = p.c + row * p.columns + column;
  if (p.add) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = load(c + r * p.columns + v * kLanes);
      }
    }
  }
  const T* a = p.a + row * p.a_row;
  const T* b = p.b + column;
  for (int k = 0; k < p.depth; ++k) {
    decltype(load(b)) line[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      line[v] = load(b + v * kLanes);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const T factor = a[r * p.a_row];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = multiply_add(factor, line[v], sums[r][v]);
      }
    }
    a += p.a_depth;
    b += p.columns;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      store(c + r * p.columns + v * kLanes, sums[r][v]);
    }
  }
}

template <int kRows, int kVectors, class T>
inline void multiply_rows(const Product<T>& p, int row, int column) {
  if constexpr (kRows > 0) {
    for (; row + kRows <= p.rows; row += kRows) {
      multiply_block<kRows, kVectors>(p, row, column);
    }
    if (row < p.rows) multiply_rows<kRows - 1, kVectors>(p, row, column);
  }
}

template <class T>
inline void multiply(const Product<T>& p) {
  int column = 0;
  for (; column + 2 * kLanes <= p.columns; column += 2 * kLanes) {
    multiply_rows<kProductRows, 2>(p, 0, column);
  }
  if (column < p.columns) multiply_rows<kProductRows, 1>(p, 0, column);
}

// What the online softmax knows of each line, and the tile's scratch memory.
struct Running {
  float* highest;
  float* total;
  float* rescale;
  std::int32_t* positions;
  float* keys;    // (kTile, head_dim)
  float* values;  // (kTile, width)
  float* scores;  // (kTile, columns)
};

inline Running carve(const QueryTile& tile, float* scratch) {
  Running running{};
  const int columns = tile.columns;
  running.highest = scratch;
  running.total = scratch + columns;
  running.rescale = scratch + 2 * columns;
  running.positions = reinterpret_cast<std::int32_t*>(scratch + 3 * columns);
  running.scores = scratch + 4 * columns;
  running.values = running.scores + kTile * columns;
  running.keys = running.values + kTile * tile.width;
  for (int line = 0; line < columns; ++line) {
    running.highest[line] = -__builtin_inff();
    running.total[line] = 0.0F;
    running.positions[line] = tile.position + line / tile.group;
  }
  return running;
}

// n rows of head_dim elements as float32, `stride` floats apart and zero in between.
template <class T>
inline void widen(const T* const* rows, std::int64_t offset, int n, int head_dim, int stride, float* out) {
  for (int i = 0; i < n; ++i, out += stride) {
    const T* row = rows[i] + offset;
    float scale = 1.0F;
    if constexpr (kScaled<T>) scale = scale_of(row, head_dim);
    int d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) {
      store(out + d, kScaled<T> ? load(row + d) * scale : load(row + d));
    }
    if (d < head_dim) {
      T padded[kLanes] = {};
      __builtin_memcpy(padded, row + d, static_cast<std::size_t>(head_dim - d) * sizeof(T));
      float floats[kLanes];
      store(floats, kScaled<T> ? load(padded) * scale : load(padded));
      __builtin_memcpy(out + d, floats, static_cast<std::size_t>(head_dim - d) * sizeof(float));
    }
    for (d = head_dim; d < stride; ++d) {
      out[d] = 0.0F;
    }
  }
}

// Scores of keys [first, first + n) as they enter the softmax, of kLanes lines; the highest so far.
template <bool kMasked>
inline Floats finish_tile(const QueryTile& tile, const Running& running, int first, int n, int line) {
  const Floats none = splat(-__builtin_inff());
  float* scores = running.scores + line;
  const auto positions = load_as<Ints>(running.positions + line);
  const Ints reach = tile.window > 0 ? positions - tile.window : splat(std::int32_t{-1});
  Floats top = none;
  for (int k = 0; k < n; ++k) {
    Floats score = finish_scores(load(scores + k * tile.columns), tile.scale, tile.softcap);
    if constexpr (kMasked) {
      const Ints key = splat(first + k);
      score = ((key <= positions) & (key > reach)) ? score : none;
    }
    store(scores + k * tile.columns, score);
    top = max(top, score);
  }
  return max(load(running.highest + line), top);
}

// Scores of keys [first, first + n) become weights, and the running values take them in.
template <bool kMasked>
inline void soften_tile(const QueryTile& tile, const Running& running, int first, int n) {
  const Floats none = splat(-__builtin_inff());
  for (int line = 0; line < tile.columns; line += kLanes) {
    float* scores = running.scores + line;
    const Floats now = finish_tile<kMasked>(tile, running, first, n, line);
    const Floats shift = now == none ? Floats{} : now;  // nothing seen yet: -inf - -inf would be NaN
    const Floats rescale = exp(load(running.highest + line) - shift);
    Floats total = load(running.total + line) * rescale;
    for (int k = 0; k < n; ++k) {
      const Floats weights = exp(load(scores + k * tile.columns) - shift);
      store(scores + k * tile.columns, weights);
      total += weights;
    }
    store(running.highest + line, now);
    store(running.total + line, total);
    store(running.rescale + line, rescale);
  }
}

// Whether a line of the tile does not see all of the keys [first, first + n).
inline bool is_masked(const QueryTile& tile, int first, int n) {
  const int last_position = tile.position + (tile.lines - 1) / tile.group;
  return first + n - 1 > tile.position || (tile.window > 0 && first <= last_position - tile.window);
}

inline void rescale_values(const QueryTile& tile, const float* rescale, float* values) {
  for (int line = 0; line < tile.lines; ++line) {
    if (rescale[line] == 1.0F) continue;
    const Floats factor = splat(rescale[line]);
    for (int d = 0; d < tile.width; d += kLanes) {
      float* at = values + line * tile.width + d;
      store(at, load(at) * factor);
    }
  }
}

template <class T>
void attend_many(const QueryTile& tile, const KeySpan& span, const Partial& partial, float* scratch) {
  const T* keys[kTile];
  const Running running = carve(tile, scratch);
  std::memset(partial.values, 0, static_cast<std::size_t>(tile.lines * tile.width) * sizeof(float));
  for (int first = span.first; first < span.last;) {
    const int end = first - first % kTile + kTile;  // cut at the same places whatever the span
    const int n = (end < span.last ? end : span.last) - first;
    find_keys<T>(span, first, first + n, keys);
    widen(keys, 0, n, tile.head_dim, tile.head_dim, running.keys);
    multiply<float>({running.keys, tile.head_dim, 1, tile.query, running.scores, n, tile.head_dim, tile.columns,
                     false});
    if (is_masked(tile, first, n)) {
      soften_tile<true>(tile, running, first, n);
    } else {
      soften_tile<false>(tile, running, first, n);
    }
    rescale_values(tile, running.rescale, partial.values);
    widen(keys, span.unit, n, tile.head_dim, tile.width, running.values);
    multiply<float>({running.scores, 1, tile.columns, running.values, partial.values, tile.lines, n, tile.width,
                     true});
    first += n;
  }
  std::memcpy(partial.highest, running.highest, static_cast<std::size_t>(tile.lines) * sizeof(float));
  std::memcpy(partial.total, running.total, static_cast<std::size_t>(tile.lines) * sizeof(float));
}

}  // namespace
}  // namespace chairlift
