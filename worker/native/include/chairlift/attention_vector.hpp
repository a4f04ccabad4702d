// What the attention kernels share: scores, and where keys are. Internal linkage, as in vector.hpp.
#pragma once

#include <cstdint>
#include <cstring>

#include "chairlift/attention_kernel.hpp"
#include "chairlift/vector.hpp"

namespace chairlift {
namespace {

// Scores as they enter the softmax.
inline Floats finish_scores(Floats raw, float scale, float softcap) {
  const Floats scores = raw * scale;
  return softcap == 0.0F ? scores : softcap * tanh(scores / softcap);
}

// Whether elements have to be multiplied by a number of their head.
template <class T>
constexpr bool kScaled = false;
template <>
constexpr bool kScaled<Int8> = true;

inline float scale_of(const Int8* head, int head_dim) { return load_as<float>(head + head_dim); }

// The address of a position's key; its value is span.unit elements further.
template <class T>
inline const T* page_begin(const KeySpan& span, std::int64_t page) {
  return static_cast<const T*>(span.cache) + span.table[page] * span.unit + span.offset;
}

// Addresses of the keys at [first, last).
template <class T>
inline void find_keys(const KeySpan& span, int first, int last, const T** keys) {
  std::int64_t page = first / span.page_size;
  std::int64_t slot = first % span.page_size;
  const T* key = page_begin<T>(span, page) + slot * span.token_stride;
  for (int i = 0; i < last - first; ++i) {
    if (slot == span.page_size) {
      slot = 0;
      key = page_begin<T>(span, ++page);
    }
    keys[i] = key;
    key += span.token_stride;
    ++slot;
  }
}

inline void map_exp(const float* in, float* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += kLanes) {
    float part[kLanes] = {};
    const auto bytes = static_cast<std::size_t>(n - i < kLanes ? n - i : kLanes) * sizeof(float);
    std::memcpy(part, in + i, bytes);
    store(part, exp(load(part)));
    std::memcpy(out + i, part, bytes);
  }
}

inline void map_tanh(const float* in, float* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += kLanes) {
    float part[kLanes] = {};
    const auto bytes = static_cast<std::size_t>(n - i < kLanes ? n - i : kLanes) * sizeof(float);
    std::memcpy(part, in + i, bytes);
    store(part, tanh(load(part)));
    std::memcpy(out + i, part, bytes);
  }
}

}  // namespace
}  // namespace chairlift
