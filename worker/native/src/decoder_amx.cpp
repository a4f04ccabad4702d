// The decoder's kernels for AMX; compiled with its flags (CMakeLists.txt), called only where the processor has it. Few
// rows, and all but bfloat16, are left to AVX-512's dot products.
#include "chairlift/matmul.hpp"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#include "chairlift/matmul_amx.hpp"
#include "chairlift/matmul_dot.hpp"

namespace chairlift {
namespace {

constexpr int kFewRows = 4;  // at most so many are faster without tiles: weights are then read once, by one pass

struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The intrinsics want their register numbers written out.
#define CHAIRLIFT_EACH_TILE(CALL) \
  if constexpr (kTile == 0) CALL(0); \
  if constexpr (kTile == 1) CALL(1); \
  if constexpr (kTile == 2) CALL(2); \
  if constexpr (kTile == 3) CALL(3); \
  if constexpr (kTile == 4) CALL(4); \
  if constexpr (kTile == 5) CALL(5); \
  if constexpr (kTile == 6) CALL(6); \
  if constexpr (kTile == 7) CALL(7)

struct RealTiles {
  static void begin() {
    static constexpr TileConfig config;
    _tile_loadconfig(&config);
  }
  static void end() { _tile_release(); }

  template <int kTile>
  static void zero() {
    CHAIRLIFT_EACH_TILE(_tile_zero);
  }

  template <int kTile>
  static void load(const std::byte* from, std::int64_t stride) {
#define CHAIRLIFT_LOAD(tile) _tile_loadd(tile, from, stride)
    CHAIRLIFT_EACH_TILE(CHAIRLIFT_LOAD);
#undef CHAIRLIFT_LOAD
  }

  template <int kTile>
  static void store(float* to, std::int64_t stride) {
#define CHAIRLIFT_STORE(tile) _tile_stored(tile, to, stride)
    CHAIRLIFT_EACH_TILE(CHAIRLIFT_STORE);
#undef CHAIRLIFT_STORE
  }

  template <int kSums, int kRows, int kWeights>
  static void dot() {
    if constexpr (kSums == 0 && kWeights == 6) _tile_dpbf16ps(0, 4, 6);
    if constexpr (kSums == 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kSums == 2 && kRows == 4) _tile_dpbf16ps(2, 4, 6);
    if constexpr (kSums == 2 && kRows == 5) _tile_dpbf16ps(2, 5, 6);
    if constexpr (kSums == 3 && kRows == 4) _tile_dpbf16ps(3, 4, 7);
    if constexpr (kSums == 3 && kRows == 5) _tile_dpbf16ps(3, 5, 7);
  }
};

void multiply_bf16(const MatmulCall& call) {
  if (call.num_rows <= kFewRows) {
    multiply_tiles<DotBf16Weights>(call);
  } else {
    multiply_amx<RealTiles>(call);
  }
}

}  // namespace
}  // namespace chairlift

constinit const chairlift::MultiplyFunction chairlift::kAmxMultiplyBf16 = &chairlift::multiply_bf16;
#else
constinit const chairlift::MultiplyFunction chairlift::kAmxMultiplyBf16 = nullptr;
#endif
