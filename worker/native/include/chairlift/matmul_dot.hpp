// Products by AVX-512's dot products: two bfloat16, or four bytes, at a time. Quantised weights meet activations that
// are quantised too, to signed bytes with a scale for each group of 32 inputs.
#pragma once

#include "chairlift/matmul_float.hpp"

namespace chairlift {
namespace {

template <class T>
inline __m512i broadcast_word(const T* from) {
  std::int32_t word;
  __builtin_memcpy(&word, from, sizeof word);
  return _mm512_set1_epi32(word);
}

struct DotBf16Weights : FloatShape {
  template <int kRows, int kBlocks>
  static inline void tile(const MatmulCall& call, int row, int block) {
    Sums<kRows, kBlocks> sums;
    const auto* rows = reinterpret_cast<const Bf16*>(row_at(call, row));
    const std::int64_t stride = call.row_bytes / static_cast<std::int64_t>(sizeof(Bf16));
    const std::byte* weights[kBlocks];
    for (int b = 0; b < kBlocks; ++b) {
      weights[b] = block_at(call, block + b);
    }
    const Ahead<kBlocks> ahead(call, block);
    for (std::int64_t k = 0; k < call.num_inputs; k += 2) {
      ahead.fetch(k * kBlock * 2);
      __m512i line[kBlocks];
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) {
        line[b] = _mm512_loadu_si512(weights[b] + k * kBlock * 2);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const __m512i pair = broadcast_word(rows + r * stride + k);
#pragma GCC unroll 4
        for (int b = 0; b < kBlocks; ++b) {
          sums.of[r][b] = (Floats)_mm512_dpbf16_ps((__m512)sums.of[r][b], (__m512bh)line[b], (__m512bh)pair);
        }
      }
    }
    sums.store_to(call, row, block);
  }
};

// A prepared row: inputs as signed bytes, then a scale and a sum for each group.
struct GroupNumbers {
  float scale;
  float sum;
};

template <int kBits>
struct DotQuantisedWeights {
  static constexpr int kMostRows = 8;
  static constexpr int blocks(int rows) { return rows <= 2 ? 4 : rows <= 4 ? 2 : 1; }  // twice as many sums each
  static constexpr std::int64_t kGroupBytes = QuantisedWeights<kBits>::kGroupBytes;

  template <int kRows, int kBlocks>
  static inline void tile(const MatmulCall& call, int row, int block) {
    Sums<kRows, kBlocks> sums;
    const std::byte* weights[kBlocks];
    for (int b = 0; b < kBlocks; ++b) {
      weights[b] = block_at(call, block + b);
    }
    const Ahead<kBlocks> ahead(call, block);
    for (std::int64_t group = 0; group < call.num_inputs / kGroup; ++group) {
#pragma GCC unroll 16
      for (std::int64_t line = 0; line < kGroupBytes; line += 64) {
        ahead.fetch(group * kGroupBytes + line);
      }
      const std::byte* rows = row_at(call, row) + group * kGroup;
      __m512i parts[kRows][kBlocks] = {};
#pragma GCC unroll 4
      for (int pair = 0; pair < kGroup / 8; ++pair) {
        __m512i first[kBlocks];
        __m512i second[kBlocks];
#pragma GCC unroll 4
        for (int b = 0; b < kBlocks; ++b) {
          load_quads(weights[b] + 2 * kBlock * sizeof(Bf16), pair, first[b], second[b]);
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const __m512i early = broadcast_word(rows + r * call.row_bytes + 8 * pair);
          const __m512i late = broadcast_word(rows + r * call.row_bytes + 8 * pair + 4);
#pragma GCC unroll 4
          for (int b = 0; b < kBlocks; ++b) {
            parts[r][b] = _mm512_dpbusd_epi32(parts[r][b], first[b], early);
            parts[r][b] = _mm512_dpbusd_epi32(parts[r][b], second[b], late);
          }
        }
      }
      add_group<kRows, kBlocks>(call, row, group, weights, parts, sums);
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) {
        weights[b] += kGroupBytes;
      }
    }
    sums.store_to(call, row, block);
  }

  // The quads 2 * pair and 2 * pair + 1 of a group.
  static inline void load_quads(const std::byte* q, int pair, __m512i& first, __m512i& second) {
    if constexpr (kBits == 8) {
      first = _mm512_loadu_si512(q + pair * 128);
      second = _mm512_loadu_si512(q + pair * 128 + 64);
    } else {
      const __m512i both = _mm512_loadu_si512(q + pair * 64);
      const __m512i low = _mm512_set1_epi8(0x0F);
      first = _mm512_and_si512(both, low);
      second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    }
  }

  template <int kRows, int kBlocks, class S>
  static inline void add_group(const MatmulCall& call, int row, std::int64_t group, const std::byte* const* weights,
                               __m512i (*parts)[kBlocks], S& sums) {
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      const auto* scales = reinterpret_cast<const Bf16*>(weights[b]);
      const Floats scale = load(scales);
      const Floats offset = load(scales + kBlock);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const auto* numbers = reinterpret_cast<const GroupNumbers*>(row_at(call, row + r) + call.num_inputs) + group;
        const Floats part = (Floats)_mm512_cvtepi32_ps(parts[r][b]);
        sums.of[r][b] = fma(part, scale * numbers->scale, sums.of[r][b]);
        sums.of[r][b] = fma(splat(numbers->sum), offset, sums.of[r][b]);
      }
    }
  }
};

inline std::int64_t bf16_row_bytes(std::int64_t n) { return up_to(n * 2, 64); }
inline void prepare_bf16(const float* in, std::int64_t n, std::int64_t, std::int64_t at, std::byte* row) {
  for (std::int64_t i = 0; i < n; i += 2 * kLanes) {
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)load(in + i + kLanes), (__m512)load(in + i));
    _mm512_storeu_si512(row + (at + i) * 2, (__m512i)both);
  }
}

inline std::int64_t byte_row_bytes(std::int64_t n) {
  return up_to(n + n / kGroup * static_cast<std::int64_t>(sizeof(GroupNumbers)), 64);
}
inline void prepare_bytes(const float* in, std::int64_t n, std::int64_t inputs, std::int64_t at, std::byte* row) {
  auto* numbers = reinterpret_cast<GroupNumbers*>(row + inputs) + at / kGroup;
  for (std::int64_t group = 0; group < n / kGroup; ++group) {
    const __m512 low = (__m512)load(in + group * kGroup);
    const __m512 high = (__m512)load(in + group * kGroup + kLanes);
    const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
    const float scale = most / 127.0F;
    const __m512 inverse = _mm512_set1_ps(scale > 0.0F ? 1.0F / scale : 0.0F);
    const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse));
    const __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
    std::byte* to = row + at + group * kGroup;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(first));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + kLanes), _mm512_cvtsepi32_epi8(second));
    const int total = _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
    numbers[group] = {scale, scale * static_cast<float>(total)};
  }
}

}  // namespace
}  // namespace chairlift
