// Cuts a product into tiles that keep their sums in registers. Internal linkage, as in vector.hpp.
#pragma once

#include "chairlift/matmul.hpp"
#include "chairlift/vector.hpp"

namespace chairlift {
namespace {

constexpr int kBlockVectors = kBlock / kLanes;

inline std::int64_t up_to(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

inline const std::byte* row_at(const MatmulCall& call, int row) { return call.rows + row * call.row_bytes; }
inline const std::byte* block_at(const MatmulCall& call, int block) { return call.blocks + block * call.block_bytes; }
inline float* out_at(const MatmulCall& call, int row, int block) {
  return call.out + row * call.out_stride + block * kBlock;
}

// Asks for what a tile of these blocks will read, into the second cache, while the tile before it is computed: memory
// brings a stream to its end and no further.
template <int kBlocks>
struct Ahead {
  const std::byte* at;
  std::int64_t stride;

  Ahead(const MatmulCall& call, int block)
      : at(block + 2 * kBlocks <= call.num_blocks + call.num_following ? block_at(call, block + kBlocks) : nullptr),
        stride(call.block_bytes) {}

  // The line that begins so many bytes into each block.
  inline void fetch(std::int64_t offset) const {
    if (at == nullptr) return;
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      __builtin_prefetch(at + b * stride + offset, 0, 2);
    }
  }
};

// A kernel's tile of kRows rows and as many blocks as fit the registers beside them, then blocks one by one.
template <class Kernel, int kRows>
inline void multiply_blocks(const MatmulCall& call, int row) {
  constexpr int kBlocks = Kernel::blocks(kRows);
  int block = 0;
  for (; block + kBlocks <= call.num_blocks; block += kBlocks) {
    Kernel::template tile<kRows, kBlocks>(call, row, block);
  }
  if constexpr (kBlocks > 2) {
    for (; block + 2 <= call.num_blocks; block += 2) {
      Kernel::template tile<kRows, 2>(call, row, block);
    }
  }
  if constexpr (kBlocks > 1) {
    for (; block < call.num_blocks; ++block) {
      Kernel::template tile<kRows, 1>(call, row, block);
    }
  }
}

template <class Kernel, int kRows>
inline void multiply_rows_of(const MatmulCall& call, int row, int rows) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      multiply_blocks<Kernel, kRows>(call, row);
    } else {
      multiply_rows_of<Kernel, kRows - 1>(call, row, rows);
    }
  }
}

// The rows in tiles of about equal height.
template <class Kernel>
void multiply_tiles(const MatmulCall& call) {
  const int tiles = (call.num_rows + Kernel::kMostRows - 1) / Kernel::kMostRows;
  int row = 0;
  for (int tile = 0; tile < tiles; ++tile) {
    const int end = call.num_rows * (tile + 1) / tiles;
    multiply_rows_of<Kernel, Kernel::kMostRows>(call, row, end - row);
    row = end;
  }
}

}  // namespace
}  // namespace chairlift
