// The products by AMX on emulated tile registers, against plain loops.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "chairlift/matmul_amx.hpp"
#include "support.hpp"

namespace {

float to_float(std::uint16_t bits) {
  const std::uint32_t word = static_cast<std::uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

// Registers of 16 rows of 64 bytes, as Intel's manual has them: TDPBF16PS adds, for each pair of inputs, two products.
struct EmulatedTiles {
  static inline std::uint8_t memory[8][16][64];
  static inline int open = 0;

  static void begin() { ++open; }
  static void end() { --open; }

  template <int kTile>
  static void zero() {
    std::memset(memory[kTile], 0, sizeof memory[kTile]);
  }

  template <int kTile>
  static void load(const std::byte* from, std::int64_t stride) {
    for (int row = 0; row < 16; ++row) {
      std::memcpy(memory[kTile][row], from + row * stride, 64);
    }
  }

  template <int kTile>
  static void store(float* to, std::int64_t stride) {
    for (int row = 0; row < 16; ++row) {
      std::memcpy(reinterpret_cast<std::byte*>(to) + row * stride, memory[kTile][row], 64);
    }
  }

  template <int kSums, int kRows, int kWeights>
  static void dot() {
    for (int m = 0; m < 16; ++m) {
      for (int n = 0; n < 16; ++n) {
        float sum;
        std::memcpy(&sum, memory[kSums][m] + n * 4, 4);
        for (int k = 0; k < 16; ++k) {
          for (int half = 0; half < 2; ++half) {
            std::uint16_t a;
            std::uint16_t b;
            std::memcpy(&a, memory[kRows][m] + k * 4 + half * 2, 2);
            std::memcpy(&b, memory[kWeights][k] + n * 4 + half * 2, 2);
            sum += to_float(a) * to_float(b);
          }
        }
        std::memcpy(memory[kSums][m] + n * 4, &sum, 4);
      }
    }
  }
};

void test_product(int rows, int blocks, int inputs) {
  using namespace chairlift;
  std::mt19937 random(static_cast<unsigned>(rows * 1000 + blocks * 100 + inputs));
  std::uniform_int_distribution<int> bits(0x3F00, 0x3FFF);  // bfloat16 from 0.5 to 2
  const std::int64_t row_bytes = inputs * 2;
  std::vector<std::uint16_t> activations(static_cast<std::size_t>((rows + 31) * inputs));
  std::vector<std::uint16_t> weights(static_cast<std::size_t>(blocks * inputs * kBlock));  // packed
  for (auto& value : activations) value = static_cast<std::uint16_t>(bits(random) | (random() % 2 << 15));
  for (auto& value : weights) value = static_cast<std::uint16_t>(bits(random) | (random() % 2 << 15));
  const std::int64_t stride = blocks * kBlock + 7;
  std::vector<float> out(static_cast<std::size_t>(rows * stride), -1.0F);
  multiply_amx<EmulatedTiles>({.rows = reinterpret_cast<const std::byte*>(activations.data()),
                               .row_bytes = row_bytes,
                               .num_rows = rows,
                               .num_inputs = inputs,
                               .blocks = reinterpret_cast<const std::byte*>(weights.data()),
                               .block_bytes = std::int64_t{inputs} * kBlock * 2,
                               .num_blocks = blocks,
                               .num_following = 0,
                               .out = out.data(),
                               .out_stride = stride});
  CHECK(EmulatedTiles::open == 0);
  for (int m = 0; m < rows; ++m) {
    for (int n = 0; n < blocks * kBlock; ++n) {
      double wanted = 0;
      for (int k = 0; k < inputs; ++k) {
        const int at = (n / kBlock * inputs + k / 2 * 2) * kBlock + n % kBlock * 2 + k % 2;
        wanted += double{to_float(activations[static_cast<std::size_t>(m * inputs + k)])} *
                  double{to_float(weights[static_cast<std::size_t>(at)])};
      }
      CHECK(std::abs(out[static_cast<std::size_t>(m * stride + n)] - wanted) < 1e-4 * inputs);
    }
    for (std::int64_t n = blocks * kBlock; n < stride; ++n) {
      CHECK(out[static_cast<std::size_t>(m * stride + n)] == -1.0F);
    }
  }
}

}  // namespace

int main() {
  for (const int rows : {1, 5, 15, 16, 17, 31, 32, 33, 47, 48}) {
    for (const int blocks : {1, 2, 3, 4, 5, 8}) {
      for (const int inputs : {32, 96}) {
        test_product(rows, blocks, inputs);
      }
    }
  }
  return 0;
}
