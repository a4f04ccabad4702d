// Products in float32 by fused multiplication and addition, whatever the weights' format: for any instruction set.
#pragma once

#include "chairlift/matmul_tiles.hpp"

namespace chairlift {
namespace {

// How many rows and blocks at once have their sums in registers. Tall tiles read weights fewer times: of a dozen rows the
// first pass takes as long as memory needs to bring the weights. AVX-512 has twice the registers, each twice as wide.
struct FloatShape {
  static constexpr int kMostRows = kBlockVectors == 1 ? 12 : 6;
  static constexpr int blocks(int rows) {
    if (kBlockVectors == 1) return rows <= 6 ? 4 : 2;
    return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
  }
};

template <int kRows, int kVectors>
struct Sums {
  Floats of[kRows][kVectors] = {};

  inline void store_to(const MatmulCall& call, int row, int block) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        store(out_at(call, row + r, block) + v * kLanes, of[r][v]);
      }
    }
  }
};

struct FloatWeights : FloatShape {
  template <int kRows, int kBlocks>
  static inline void tile(const MatmulCall& call, int row, int block) {
    constexpr int kVectors = kBlocks * kBlockVectors;
    Sums<kRows, kVectors> sums;
    const auto* rows = reinterpret_cast<const float*>(row_at(call, row));
    const std::int64_t stride = call.row_bytes / static_cast<std::int64_t>(sizeof(float));
    const float* weights[kBlocks];
    for (int b = 0; b < kBlocks; ++b) {
      weights[b] = reinterpret_cast<const float*>(block_at(call, block + b));
    }
    const Ahead<kBlocks> ahead(call, block);
    for (std::int64_t k = 0; k < call.num_inputs; ++k) {
      ahead.fetch(k * kBlock * 4);
      Floats line[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        line[v] = load(weights[v / kBlockVectors] + k * kBlock + v % kBlockVectors * kLanes);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Floats factor = splat(rows[r * stride + k]);
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
          sums.of[r][v] = fma(factor, line[v], sums.of[r][v]);
        }
      }
    }
    sums.store_to(call, row, block);
  }
};

struct Bf16Weights : FloatShape {
  template <int kRows, int kBlocks>
  static inline void tile(const MatmulCall& call, int row, int block) {
    constexpr int kVectors = kBlocks * kBlockVectors;
    Sums<kRows, kVectors> sums;
    const auto* rows = reinterpret_cast<const float*>(row_at(call, row));
    const std::int64_t stride = call.row_bytes / static_cast<std::int64_t>(sizeof(float));
    const Bf16* weights[kBlocks];
    for (int b = 0; b < kBlocks; ++b) {
      weights[b] = reinterpret_cast<const Bf16*>(block_at(call, block + b));
    }
    const Ahead<kBlocks> ahead(call, block);
    for (std::int64_t k = 0; k < call.num_inputs; k += 2) {
      ahead.fetch(k * kBlock * 2);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        const auto pair = load_as<Words>(weights[v / kBlockVectors] + k * kBlock + v % kBlockVectors * 2 * kLanes);
        const auto even = (Floats)(pair << 16);
        const auto odd = (Floats)(pair & 0xFFFF0000U);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          sums.of[r][v] = fma(splat(rows[r * stride + k]), even, sums.of[r][v]);
          sums.of[r][v] = fma(splat(rows[r * stride + k + 1]), odd, sums.of[r][v]);
        }
      }
    }
    sums.store_to(call, row, block);
  }
};

// Prepared rows: floats, and behind them the sum of each group, which the weights' offsets are multiplied with.
template <int kBits>
struct QuantisedWeights : FloatShape {
  static constexpr std::int64_t kGroupBytes = 2 * kBlock * sizeof(Bf16) + kBlock * kGroup * kBits / 8;

  template <int kRows, int kBlocks>
  static inline void tile(const MatmulCall& call, int row, int block) {
    constexpr int kVectors = kBlocks * kBlockVectors;
    Sums<kRows, kVectors> sums;
    const auto* rows = reinterpret_cast<const float*>(row_at(call, row));
    const std::int64_t stride = call.row_bytes / static_cast<std::int64_t>(sizeof(float));
    for (std::int64_t group = 0; group < call.num_inputs / kGroup; ++group) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        const std::byte* at = block_at(call, block + v / kBlockVectors) + group * kGroupBytes;
        const auto* scales = reinterpret_cast<const Bf16*>(at) + v % kBlockVectors * kLanes;
        add_group<kRows>(rows + group * kGroup, stride, at + 2 * kBlock * sizeof(Bf16), v % kBlockVectors,
                         load(scales), sums, v);
        const Floats offsets = load(scales + kBlock);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          sums.of[r][v] = fma(splat(rows[r * stride + call.num_inputs + group]), offsets, sums.of[r][v]);
        }
      }
    }
    sums.store_to(call, row, block);
  }

  // Adds scale * (sum of q times activation) of one vector of outputs over a group.
  template <int kRows, class S>
  static inline void add_group(const float* rows, std::int64_t stride, const std::byte* q, int vector, Floats scales,
                               S& sums, int v) {
    Floats part[kRows] = {};
    for (int quad = 0; quad < kGroup / 4; ++quad) {
      const auto words = quad_of(q, quad, vector);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const Floats weight = __builtin_convertvector((Ints)((words >> (8 * i)) & 0xFFU), Floats);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          part[r] = fma(splat(rows[r * stride + quad * 4 + i]), weight, part[r]);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      sums.of[r][v] = fma(part[r], scales, sums.of[r][v]);
    }
  }

  // Four inputs of each output of a vector: a word for each output.
  static inline Words quad_of(const std::byte* q, int quad, int vector) {
    if constexpr (kBits == 8) {
      return load_as<Words>(q + (quad * kBlock + vector * kLanes) * 4);
    } else {
      const auto both = load_as<Words>(q + (quad / 2 * kBlock + vector * kLanes) * 4);
      return (quad % 2 == 0 ? both : both >> 4) & 0x0F0F0F0FU;
    }
  }
};

inline std::int64_t float_row_bytes(std::int64_t n) { return up_to(n * 4, 64); }
inline void prepare_floats(const float* in, std::int64_t n, std::int64_t, std::int64_t at, std::byte* row) {
  __builtin_memcpy(row + at * 4, in, static_cast<std::size_t>(n) * sizeof(float));
}

inline std::int64_t summed_row_bytes(std::int64_t n) { return up_to((n + n / kGroup) * 4, 64); }
inline void prepare_summed(const float* in, std::int64_t n, std::int64_t inputs, std::int64_t at, std::byte* row) {
  prepare_floats(in, n, inputs, at, row);
  auto* sums = reinterpret_cast<float*>(row) + inputs + at / kGroup;
  for (std::int64_t group = 0; group < n / kGroup; ++group) {
    Floats total{};
    for (int i = 0; i < kGroup; i += kLanes) {
      total += load(in + group * kGroup + i);
    }
    sums[group] = sum(total);
  }
}

}  // namespace
}  // namespace chairlift
