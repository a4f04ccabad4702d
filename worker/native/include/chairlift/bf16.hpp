// The upper half of a float32.
#pragma once

#include <cstdint>

namespace chairlift {

struct Bf16 {
  std::uint16_t bits;
};

}  // namespace chairlift
