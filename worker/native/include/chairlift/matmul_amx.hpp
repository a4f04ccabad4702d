// Products of many rows by AMX: tiles of 16 rows and 32 inputs meet tiles of 32 inputs and 16 outputs, which is what a
// run of a packed block is already. Written over a policy that has the tile registers, so that the same code runs on
// registers that are emulated (tests/amx_test.cpp) where no processor has real ones.
//
// | registers | rows of two tiles         | rows of one tile        |
// |-----------|---------------------------|-------------------------|
// | 0 to 3    | sums, 2 tiles by 2 blocks | sums, 1 tile by 4 blocks |
// | 4, 5      | activations               | 4: activations          |
// | 6, 7      | weights of two blocks     | 6, 7: weights in turn    |
#pragma once

#include "chairlift/matmul.hpp"

namespace chairlift {
namespace {

constexpr int kTileRows = 16;
constexpr std::int64_t kTileInputs = 32;
constexpr std::int64_t kTileBytes = 1024;  // of a block's weights for 32 inputs

template <class Tiles>
struct AmxProduct {
  const MatmulCall& call;

  const std::byte* row_at(int row) const { return call.rows + row * call.row_bytes; }
  const std::byte* block_at(int block) const { return call.blocks + block * call.block_bytes; }
  std::int64_t steps() const { return call.num_inputs / kTileInputs; }

  // The sums of a tile into `out`: all 16 rows in place, fewer by way of a buffer.
  template <int kTile>
  void store(int row, int block) const {
    const int rows = call.num_rows - row < kTileRows ? call.num_rows - row : kTileRows;
    float* out = call.out + row * call.out_stride + block * kBlock;
    if (rows == kTileRows) {
      Tiles::template store<kTile>(out, call.out_stride * 4);
      return;
    }
    alignas(64) float buffer[kTileRows * kBlock];
    Tiles::template store<kTile>(buffer, kBlock * 4);
    for (int r = 0; r < rows; ++r) {
      __builtin_memcpy(out + r * call.out_stride, buffer + r * kBlock, kBlock * 4);
    }
  }

  void two_by_two(int row, int block) const {
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    Tiles::template zero<2>();
    Tiles::template zero<3>();
    for (std::int64_t step = 0; step < steps(); ++step) {
      Tiles::template load<4>(row_at(row) + step * 64, call.row_bytes);
      Tiles::template load<6>(block_at(block) + step * kTileBytes, 64);
      Tiles::template load<7>(block_at(block + 1) + step * kTileBytes, 64);
      Tiles::template load<5>(row_at(row + kTileRows) + step * 64, call.row_bytes);
      Tiles::template dot<0, 4, 6>();
      Tiles::template dot<1, 4, 7>();
      Tiles::template dot<2, 5, 6>();
      Tiles::template dot<3, 5, 7>();
    }
    store<0>(row, block);
    store<1>(row, block + 1);
    store<2>(row + kTileRows, block);
    store<3>(row + kTileRows, block + 1);
  }

  void one_by_four(int row, int block) const {
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    Tiles::template zero<2>();
    Tiles::template zero<3>();
    for (std::int64_t step = 0; step < steps(); ++step) {
      Tiles::template load<4>(row_at(row) + step * 64, call.row_bytes);
      Tiles::template load<6>(block_at(block) + step * kTileBytes, 64);
      Tiles::template dot<0, 4, 6>();
      Tiles::template load<7>(block_at(block + 1) + step * kTileBytes, 64);
      Tiles::template dot<1, 4, 7>();
      Tiles::template load<6>(block_at(block + 2) + step * kTileBytes, 64);
      Tiles::template dot<2, 4, 6>();
      Tiles::template load<7>(block_at(block + 3) + step * kTileBytes, 64);
      Tiles::template dot<3, 4, 7>();
    }
    store<0>(row, block);
    store<1>(row, block + 1);
    store<2>(row, block + 2);
    store<3>(row, block + 3);
  }

  void one_by_one(int row, int block) const {
    Tiles::template zero<0>();
    for (std::int64_t step = 0; step < steps(); ++step) {
      Tiles::template load<4>(row_at(row) + step * 64, call.row_bytes);
      Tiles::template load<6>(block_at(block) + step * kTileBytes, 64);
      Tiles::template dot<0, 4, 6>();
    }
    store<0>(row, block);
  }

  void run() const {
    int row = 0;
    for (; row + kTileRows < call.num_rows; row += 2 * kTileRows) {
      int block = 0;
      for (; block + 2 <= call.num_blocks; block += 2) {
        two_by_two(row, block);
      }
      if (block < call.num_blocks) {
        one_by_one(row, block);
        one_by_one(row + kTileRows, block);
      }
    }
    if (row >= call.num_rows) return;
    int block = 0;
    for (; block + 4 <= call.num_blocks; block += 4) {
      one_by_four(row, block);
    }
    for (; block < call.num_blocks; ++block) {
      one_by_one(row, block);
    }
  }
};

// Rows of activations are bfloat16; tiles may read up to 31 rows beyond the last one.
template <class Tiles>
void multiply_amx(const MatmulCall& call) {
  Tiles::begin();
  AmxProduct<Tiles>{call}.run();
  Tiles::end();
}

}  // namespace
}  // namespace chairlift
