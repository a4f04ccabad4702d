// What a decoder layer does besides products and attention. Internal linkage, as in vector.hpp.
#pragma once

#include "chairlift/matmul_tiles.hpp"

namespace chairlift {
namespace {

inline void rms_norm(const float* x, const float* weight, std::int64_t n, float eps, float* out) {
  Floats squares{};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Floats v = load(x + i);
    squares = fma(v, v, squares);
  }
  float total = sum(squares);
  for (std::int64_t rest = i; rest < n; ++rest) {
    total += x[rest] * x[rest];
  }
  const float factor = 1.0F / __builtin_sqrtf(total / static_cast<float>(n) + eps);
  for (i = 0; i + kLanes <= n; i += kLanes) {
    store(out + i, load(x + i) * factor * load(weight + i));
  }
  for (; i < n; ++i) {
    out[i] = x[i] * factor * weight[i];
  }
}

inline void rotate(float* x, const float* cosines, const float* sines, std::int64_t half) {
  std::int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Floats first = load(x + i);
    const Floats second = load(x + half + i);
    const Floats cosine = load(cosines + i);
    const Floats sine = load(sines + i);
    store(x + i, first * cosine - second * sine);
    store(x + half + i, second * cosine + first * sine);
  }
  for (; i < half; ++i) {
    const float first = x[i];
    const float second = x[half + i];
    x[i] = first * cosines[i] - second * sines[i];
    x[half + i] = second * cosines[i] + first * sines[i];
  }
}

inline void add_to(const float* in, std::int64_t n, float* to) {
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    store(to + i, load(to + i) + load(in + i));
  }
  for (; i < n; ++i) {
    to[i] += in[i];
  }
}

inline void scale_by(float factor, std::int64_t n, float* x) {
  for (std::int64_t i = 0; i < n; ++i) {
    x[i] *= factor;
  }
}

inline Floats activate(Floats x, std::int32_t activation) {
  if (activation == kSilu) return x / (1.0F + exp(-x));
  const Floats inner = 0.7978845608028654F * (x + 0.044715F * x * x * x);
  return 0.5F * x * (1.0F + tanh(inner));
}

inline void gate(const float* pairs, std::int64_t n, std::int32_t activation, float* out) {
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const float* at = pairs + i / kBlock * 2 * kBlock + i % kBlock;
    store(out + i, activate(load(at), activation) * load(at + kBlock));
  }
}

inline void softcap(float cap, std::int64_t n, float* x) {
  for (std::int64_t i = 0; i < n; i += kLanes) {
    float part[kLanes] = {};
    const auto bytes = static_cast<std::size_t>(n - i < kLanes ? n - i : kLanes) * sizeof(float);
    __builtin_memcpy(part, x + i, bytes);
    store(part, cap * tanh(load(part) / cap));
    __builtin_memcpy(x + i, part, bytes);
  }
}

inline float bf16_to_float(Bf16 x) {
  const std::uint32_t word = static_cast<std::uint32_t>(x.bits) << 16;
  float value;
  __builtin_memcpy(&value, &word, sizeof value);
  return value;
}

inline void unpack_float(const std::byte* block, std::int32_t output, std::int64_t inputs, float* out) {
  const auto* weights = reinterpret_cast<const float*>(block) + output;
  for (std::int64_t k = 0; k < inputs; ++k) {
    out[k] = weights[k * kBlock];
  }
}

inline void unpack_bf16(const std::byte* block, std::int32_t output, std::int64_t inputs, float* out) {
  const auto* weights = reinterpret_cast<const Bf16*>(block) + 2 * output;
  for (std::int64_t k = 0; k < inputs; ++k) {
    out[k] = bf16_to_float(weights[k / 2 * 2 * kBlock + k % 2]);
  }
}

template <int kBits>
inline void unpack_quantised(const std::byte* block, std::int32_t output, std::int64_t inputs, float* out) {
  constexpr std::int64_t kGroupBytes = 2 * kBlock * sizeof(Bf16) + kBlock * kGroup * kBits / 8;
  for (std::int64_t k = 0; k < inputs; ++k) {
    const std::byte* group = block + k / kGroup * kGroupBytes;
    const auto* scales = reinterpret_cast<const Bf16*>(group);
    const std::byte* q = group + 2 * kBlock * sizeof(Bf16);
    const auto quad = k % kGroup / 4;
    const auto place = (kBits == 8 ? quad : quad / 2) * 4 * kBlock + output * 4 + k % 4;
    const auto whole = static_cast<unsigned>(q[place]);
    const unsigned value = kBits == 8 ? whole : (quad % 2 == 0 ? whole & 0xFU : whole >> 4);
    out[k] = bf16_to_float(scales[output]) * static_cast<float>(value) + bf16_to_float(scales[kBlock + output]);
  }
}

}  // namespace
}  // namespace chairlift
