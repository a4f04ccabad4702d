// CRC-32C (Castagnoli; RFC 3720, appendix B.4), with the processor's own instruction where it has one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace chairlift {

namespace detail {

using Crc32cTables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Crc32cTables make_crc32c_tables() {
  Crc32cTables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78U : 0U);
    tables[0][byte] = crc;
  }
  for (std::size_t slice = 1; slice < 8; ++slice) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t crc = tables[slice - 1][byte];
      tables[slice][byte] = (crc >> 8) ^ tables[0][crc & 0xFF];
    }
  }
  return tables;
}

inline constexpr Crc32cTables kCrc32cTables = make_crc32c_tables();

}  // namespace detail

// Eight bytes at a time through tables, for processors without the instruction. The state is not inverted.
inline std::uint32_t crc32c_portable(std::uint32_t crc, const std::byte* bytes, std::size_t count) {
  const auto& tables = detail::kCrc32cTables;
  for (; count >= 8; bytes += 8, count -= 8) {
    std::uint64_t word = 0;
    for (int i = 7; i >= 0; --i) word = (word << 8) | std::to_integer<std::uint64_t>(bytes[i]);
    word ^= crc;
    crc = 0;
    for (std::size_t i = 0; i < 8; ++i) crc ^= tables[7 - i][(word >> (8 * i)) & 0xFF];
  }
  for (; count > 0; ++bytes, --count) {
    crc = (crc >> 8) ^ tables[0][(crc ^ std::to_integer<std::uint32_t>(*bytes)) & 0xFF];
  }
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) inline std::uint32_t crc32c_sse42(std::uint32_t crc, const std::byte* bytes,
                                                                    std::size_t count) {
  std::uint64_t state = crc;
  for (; count >= 8; bytes += 8, count -= 8) {
    std::uint64_t word;
    std::memcpy(&word, bytes, 8);
    state = _mm_crc32_u64(state, word);
  }
  auto narrow = static_cast<std::uint32_t>(state);
  for (; count > 0; ++bytes, --count) narrow = _mm_crc32_u8(narrow, std::to_integer<unsigned char>(*bytes));
  return narrow;
}
#endif

// Carries a state (start: ~0, end: invert) over more bytes.
inline std::uint32_t crc32c_extend(std::uint32_t crc, const std::byte* bytes, std::size_t count) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2") != 0;
  if (has_instruction) return crc32c_sse42(crc, bytes, count);
#endif
  return crc32c_portable(crc, bytes, count);
}

}  // namespace chairlift
