// A key or a value as whole numbers from -127 to 127: what a head's are multiplied by is a float32 right behind them,
// in the place of kScaleElements more. Zero where nothing was written.
#pragma once

#include <cstdint>
#include <cstring>

namespace chairlift {

struct Int8 {
  std::int8_t number;
};

constexpr std::int32_t kScaleElements = sizeof(float);

}  // namespace chairlift
