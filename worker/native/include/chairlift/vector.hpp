// Vectors of floats of the instruction set that this file is compiled for. Everything has internal linkage: a function
// compiled for one instruction set must never be linked in place of another's. For the same reason nothing of the
// standard library is used that is not plain C.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "chairlift/bf16.hpp"
#include "chairlift/int8.hpp"

namespace chairlift {
namespace {

#if defined(CHAIRLIFT_LANES)  // tests: wide vectors on a machine that has none
constexpr int kLanes = CHAIRLIFT_LANES;
#elif defined(__AVX512F__)
#define CHAIRLIFT_AVX512
constexpr int kLanes = 16;
#elif defined(__AVX2__) && defined(__FMA__)
#define CHAIRLIFT_AVX2
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using Floats = float __attribute__((vector_size(kLanes * 4)));
using Ints = std::int32_t __attribute__((vector_size(kLanes * 4)));
using Words = std::uint32_t __attribute__((vector_size(kLanes * 4)));
using Bytes = std::int8_t __attribute__((vector_size(kLanes)));
using Halves = std::uint16_t __attribute__((vector_size(kLanes * 2)));

inline Floats splat(float x) { return x - Floats{}; }
inline Ints splat(std::int32_t x) { return x - Ints{}; }

template <class V, class T>
inline V load_as(const T* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

inline Floats load(const float* from) { return load_as<Floats>(from); }
inline void store(float* to, Floats v) { __builtin_memcpy(to, &v, sizeof v); }

inline Floats load(const Bf16* from) {
#if defined(CHAIRLIFT_AVX512)
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)load_as<Halves>(from)), 16);
#elif defined(CHAIRLIFT_AVX2)
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)load_as<Halves>(from)), 16);
#else
  return (Floats)(__builtin_convertvector(load_as<Halves>(from), Words) << 16);
#endif
}

inline Floats load(const Int8* from) {
#if defined(CHAIRLIFT_AVX512)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_as<__m128i>(from)));
#elif defined(CHAIRLIFT_AVX2)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(load_as<std::int64_t>(from))));
#else
  return __builtin_convertvector(load_as<Bytes>(from), Floats);
#endif
}

// Two vectors of consecutive elements, one at a time and in an order of its own: see `unpair`. Of bfloat16 the even
// elements, then the odd ones: that takes a shift or a mask, and no widening.
enum class Half { kLow, kHigh };

template <Half kHalf, class T>
inline Floats load_half(const T* from) {
  return load(kHalf == Half::kLow ? from : from + kLanes);
}

template <Half kHalf>
inline Floats load_half(const Bf16* from) {
  const auto words = load_as<Words>(from);
  return (Floats)(kHalf == Half::kLow ? words << 16 : words & 0xFFFF0000U);
}

// The same of the first n of 2 * kLanes elements, and zeros.
template <Half kHalf, class T>
inline Floats load_half(const T* from, int n) {
  T padded[2 * kLanes] = {};
  __builtin_memcpy(padded, from, static_cast<std::size_t>(n) * sizeof(T));
  return load_half<kHalf>(padded);
}

// width floats from natural order into that of load_half, and back.
template <class T>
inline void pair(const T*, const float* in, float* out, int width) {
  __builtin_memcpy(out, in, static_cast<std::size_t>(width) * sizeof(float));
}
inline void pair(const Bf16*, const float* in, float* out, int width) {
  for (int d = 0; d < width; d += 2 * kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      out[d + i] = in[d + 2 * i];
      out[d + kLanes + i] = in[d + 2 * i + 1];
    }
  }
}
template <class T>
inline void unpair(const T*, float*, int) {}
inline void unpair(const Bf16*, float* values, int width) {
  for (int d = 0; d < width; d += 2 * kLanes) {
    float natural[2 * kLanes];
    for (int i = 0; i < kLanes; ++i) {
      natural[2 * i] = values[d + i];
      natural[2 * i + 1] = values[d + kLanes + i];
    }
    __builtin_memcpy(values + d, natural, sizeof natural);
  }
}

inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(CHAIRLIFT_AVX512)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(CHAIRLIFT_AVX2)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

inline Floats max(Floats a, Floats b) {
#if defined(CHAIRLIFT_AVX512)
  return _mm512_max_ps(a, b);
#elif defined(CHAIRLIFT_AVX2)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

inline float highest(Floats v) {
  float top = v[0];
  for (int i = 1; i < kLanes; ++i) {
    top = v[i] > top ? v[i] : top;
  }
  return top;
}

inline float sum(Floats v) {
  float parts[kLanes];
  store(parts, v);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) {
      parts[i] += parts[i + half];
    }
  }
  return parts[0];
}

// The sums of four vectors.
inline void store_sums(float* to, const Floats v[4]) {
#if defined(CHAIRLIFT_AVX512)
  __m256 half[4];
  for (int i = 0; i < 4; ++i) {
    half[i] = _mm256_add_ps(_mm512_castps512_ps256(v[i]),
                            _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v[i]), 1)));
  }
#elif defined(CHAIRLIFT_AVX2)
  const Floats* half = v;
#endif
#if defined(CHAIRLIFT_AVX512) || defined(CHAIRLIFT_AVX2)
  const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
#else
  for (int i = 0; i < 4; ++i) {
    to[i] = sum(v[i]);
  }
#endif
}

// exp within 2 ulp; below -87.3 it is 0, NaN stays NaN. Range reduction and polynomial are those of Cephes' expf
// (Moshier, netlib.org/cephes): x = n ln 2 + r, exp(r) = 1 + r + r^2 P(r).
inline Floats exp(Floats x) {
  const Floats round = splat(12582912.0F);  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
  const Floats top = splat(88.3762626647949F);
  x = x > top ? top : x;
  const Floats shifted = fma(x, splat(1.44269504088896341F), round);
  const Floats n = shifted - round;
  Floats r = fma(n, splat(-0.693359375F), x);
  r = fma(n, splat(2.12194440e-4F), r);
  Floats p = splat(1.9875691500e-4F);
  p = fma(p, r, splat(1.3981999507e-3F));
  p = fma(p, r, splat(8.3334519073e-3F));
  p = fma(p, r, splat(4.1665795894e-2F));
  p = fma(p, r, splat(1.6666665459e-1F));
  p = fma(p, r, splat(5.0000001201e-1F));
  p = fma(p, r * r, r) + 1.0F;
  const Words power = ((Words)shifted - (Words)round + 127U) << 23;
  return x < splat(-87.3F) ? Floats{} : p * (Floats)power;
}

// tanh within 4 ulp; near 0 by Cephes' tanhf polynomial, where 1 - 2 / (exp(2x) + 1) would cancel.
inline Floats tanh(Floats x) {
  const Floats size = (Floats)((Words)x & 0x7FFFFFFFU);
  const Floats far = 1.0F - 2.0F / (exp(size + size) + 1.0F);
  const Floats z = x * x;
  Floats p = splat(-5.70498872745e-3F);
  p = fma(p, z, splat(2.06390887954e-2F));
  p = fma(p, z, splat(-5.37397155531e-2F));
  p = fma(p, z, splat(1.33314422036e-1F));
  p = fma(p, z, splat(-3.33332819422e-1F));
  const Floats near = fma(p * z, x, x);
  const Floats signed_far = (Floats)((Words)far | ((Words)x & 0x80000000U));
  return size < 0.625F ? near : signed_far;
}

}  // namespace
}  // namespace chairlift
