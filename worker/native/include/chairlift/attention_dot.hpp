// Many query tokens and a bfloat16 or int8 cache by dot products of bfloat16: pairs of elements are multiplied and added
// up in float32. Queries and weights are rounded to bfloat16 (to nearest even); scores and the softmax are float32, and
// what the weights are divided by is the sum of the rounded ones. Otherwise as in attention_many.hpp.
#pragma once

#if defined(__AVX512BF16__)

#include "chairlift/attention_many.hpp"

namespace chairlift {
namespace {

// Two bfloat16, the first in the lower half: elements 2i and 2i + 1 of a head, or keys 2i and 2i + 1 of an element.
struct Pair {
  std::uint32_t bits;
};

inline Words load(const Pair* from) { return load_as<Words>(from); }
inline void store(Pair* to, Words v) { __builtin_memcpy(to, &v, sizeof v); }

inline Floats multiply_add(Words a, Words b, Floats sums) {
  return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
}
inline Floats multiply_add(Pair a, Words b, Floats sums) { return multiply_add(a.bits - Words{}, b, sums); }

// Where the halves of 16 pairs are among 32 first and then 32 second ones; from 16 on.
template <int kFrom>
inline __m512i interleaved() {
  alignas(64) std::uint16_t order[32];
  for (int i = 0; i < 16; ++i) {
    order[2 * i] = static_cast<std::uint16_t>(kFrom + i);
    order[2 * i + 1] = static_cast<std::uint16_t>(kFrom + i + 32);
  }
  return _mm512_load_si512(order);
}

// The pairs (first[i], second[i]), rounded.
inline Words round_pairs(Floats first, Floats second) {
  const auto lower = (__m512i)_mm512_cvtne2ps_pbh(first, first);
  const auto upper = (__m512i)_mm512_cvtne2ps_pbh(second, second);
  return (Words)_mm512_permutex2var_epi16(lower, interleaved<0>(), upper);
}

// The tile's scratch memory.
struct DotScratch {
  Pair* queries;  // (pairs of head_dim, columns)
  Pair* keys;     // (kTile, pairs of head_dim)
  Pair* values;   // (kTile / 2, width)
  int pairs;      // of head_dim
};

inline DotScratch carve_dot(const QueryTile& tile, const Running& running) {
  DotScratch scratch{};
  scratch.pairs = (tile.head_dim + 1) / 2;
  scratch.keys = reinterpret_cast<Pair*>(running.values);
  scratch.values = scratch.keys + kTile * scratch.pairs;
  scratch.queries = reinterpret_cast<Pair*>(running.values + 2 * kTile * tile.width);
  return scratch;
}

inline void pair_queries(const QueryTile& tile, const DotScratch& scratch) {
  for (int p = 0; p < scratch.pairs; ++p) {
    const float* first = tile.query + 2 * p * tile.columns;
    const bool whole = 2 * p + 1 < tile.head_dim;
    for (int line = 0; line < tile.columns; line += kLanes) {
      const Floats second = whole ? load(first + tile.columns + line) : Floats{};
      store(scratch.queries + p * tile.columns + line, round_pairs(load(first + line), second));
    }
  }
}

// Up to 32 elements as bfloat16, in which int8 is exact; zeros beyond.
inline __m512i load_elements(const Bf16* from, int left) {
  const auto mask = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
  return _mm512_maskz_loadu_epi16(mask, from);
}
inline __m512i load_elements(const Int8* from, int left) {
  const auto mask = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
  const __m512i words = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(mask, from));
  const __m512i low = _mm512_cvtepi16_epi32(_mm512_castsi512_si256(words));
  const __m512i high = _mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(words, 1));
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low));
}

// The keys one after the other; an odd head_dim ends with a zero. What is written too much is written over.
template <class T>
inline void gather_keys(const T* const* keys, int n, int head_dim, const DotScratch& scratch) {
  for (int i = 0; i < n; ++i) {
    Pair* to = scratch.keys + i * scratch.pairs;
    for (int d = 0; d < head_dim; d += 32) {
      store(to + d / 2, (Words)load_elements(keys[i] + d, head_dim - d));
    }
  }
}

// Values of keys 2i and 2i + 1 element by element; an odd n ends with zeros.
template <class T>
inline void pair_values(const T* const* keys, std::int64_t unit, int n, const QueryTile& tile, Pair* out) {
  const __m512i low = interleaved<0>();
  const __m512i high = interleaved<16>();
  for (int i = 0; i < n; i += 2, out += tile.width) {
    for (int d = 0; d < tile.width; d += 32) {
      const int left = tile.head_dim - d;
      const __m512i first = load_elements(keys[i] + unit + d, left);
      const __m512i second = i + 1 < n ? load_elements(keys[i + 1] + unit + d, left) : __m512i{};
      store(out + d, (Words)_mm512_permutex2var_epi16(first, low, second));
      store(out + d + 16, (Words)_mm512_permutex2var_epi16(first, high, second));
    }
  }
}

// scores (n, columns) *= the numbers of the keys; those of the values go to value_scales, then a zero.
inline void apply_scales(const Int8* const* keys, std::int64_t unit, int n, const QueryTile& tile, float* scores,
                         float* value_scales) {
  for (int k = 0; k < n; ++k, scores += tile.columns) {
    const float scale = scale_of(keys[k], tile.head_dim);
    value_scales[k] = scale_of(keys[k] + unit, tile.head_dim);
    for (int line = 0; line < tile.columns; line += kLanes) {
      store(scores + line, load(scores + line) * scale);
    }
  }
  value_scales[n] = 0.0F;
}

// 2 to the power x within 2^-17: less than what rounding to bfloat16 adds. -infinity gives 0, NaN stays NaN.
inline Floats exp2_roughly(Floats x) {
  const Floats r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);  // what is above the whole number below; of infinity 0
  Floats p = splat(1.353417063e-2F);
  p = fma(p, r, splat(5.201146325e-2F));
  p = fma(p, r, splat(2.414427490e-1F));
  p = fma(p, r, splat(6.930038381e-1F));
  p = fma(p, r, splat(1.000002593F));
  return _mm512_scalef_ps(p, x);
}

inline Floats highest_raw(const float* scores, int columns, int n) {
  Floats top = splat(-__builtin_inff());
  for (int k = 0; k < n; ++k) {
    top = max(top, load(scores + k * columns));
  }
  return top;
}

// Scores of keys [first, first + n) become weights, as pairs of keys in the place of the scores. Where values have
// scales, the weights are multiplied by them before they are rounded, and their sum is that of the weights themselves.
template <bool kMasked, bool kHasScales>
inline void soften_pairs(const QueryTile& tile, const Running& running, int first, int n, const float* value_scales) {
  constexpr float kLog2E = 1.44269504088896341F;
  const Floats none = splat(-__builtin_inff());
  const Words ones = 0x3F803F80U - Words{};
  const bool raw = !kMasked && tile.softcap == 0.0F && tile.scale > 0.0F;  // scores need no pass of their own
  const Floats factor = splat(raw ? tile.scale * kLog2E : kLog2E);
  for (int line = 0; line < tile.columns; line += kLanes) {
    float* scores = running.scores + line;
    Pair* pairs = reinterpret_cast<Pair*>(running.scores) + line;
    const Floats before = load(running.highest + line);
    const Floats now = raw ? max(before, highest_raw(scores, tile.columns, n) * tile.scale)
                           : finish_tile<kMasked>(tile, running, first, n, line);
    const Floats shift = now == none ? Floats{} : now;  // nothing seen yet: -inf - -inf would be NaN
    const Floats less = shift * -kLog2E;
    const Floats rescale = exp(before - shift);  // exactly 1 where nothing higher came
    Floats total = load(running.total + line) * rescale;
    if (n % 2 == 1) store(scores + n * tile.columns, none);
    for (int k = 0; k < n; k += 2) {
      const Floats even = exp2_roughly(fma(load(scores + k * tile.columns), factor, less));
      const Floats odd = exp2_roughly(fma(load(scores + (k + 1) * tile.columns), factor, less));
      const Words both = kHasScales ? round_pairs(even * value_scales[k], odd * value_scales[k + 1])
                                    : round_pairs(even, odd);
      store(pairs + k / 2 * tile.columns, both);
      total = kHasScales ? total + (even + odd) : multiply_add(both, ones, total);
    }
    store(running.highest + line, now);
    store(running.total + line, total);
    store(running.rescale + line, rescale);
  }
}

template <class T>
void attend_dot(const QueryTile& tile, const KeySpan& span, const Partial& partial, float* memory) {
  const T* keys[kTile];
  float value_scales[kTile + 1];
  const Running running = carve(tile, memory);
  const DotScratch scratch = carve_dot(tile, running);
  pair_queries(tile, scratch);
  std::memset(partial.values, 0, static_cast<std::size_t>(tile.lines * tile.width) * sizeof(float));
  for (int first = span.first; first < span.last;) {
    const int end = first - first % kTile + kTile;  // cut at the same places whatever the span
    const int n = (end < span.last ? end : span.last) - first;
    find_keys<T>(span, first, first + n, keys);
    gather_keys(keys, n, tile.head_dim, scratch);
    multiply<Pair>({scratch.keys, scratch.pairs, 1, scratch.queries, running.scores, n, scratch.pairs, tile.columns,
                    false});
    if constexpr (kScaled<T>) apply_scales(keys, span.unit, n, tile, running.scores, value_scales);
    if (is_masked(tile, first, n)) {
      soften_pairs<true, kScaled<T>>(tile, running, first, n, value_scales);
    } else {
      soften_pairs<false, kScaled<T>>(tile, running, first, n, value_scales);
    }
    rescale_values(tile, running.rescale, partial.values);
    pair_values(keys, span.unit, n, tile, scratch.values);
    multiply<Pair>({reinterpret_cast<const Pair*>(running.scores), 1, tile.columns, scratch.values, partial.values,
                    tile.lines, (n + 1) / 2, tile.width, true});
    first += n;
  }
  std::memcpy(partial.highest, running.highest, static_cast<std::size_t>(tile.lines) * sizeof(float));
  std::memcpy(partial.total, running.total, static_cast<std::size_t>(tile.lines) * sizeof(float));
}

}  // namespace
}  // namespace chairlift

#endif
