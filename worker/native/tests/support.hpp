// What the native tests share: a check that stays on in release builds, a ring in private memory, reproducible noise.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "chairlift/ring.hpp"

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (false)

// splitmix64 (Steele, Lea, Flood 2014).
class Noise {
 public:
  explicit Noise(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }

  std::uint64_t below(std::uint64_t bound) { return next() % bound; }

 private:
  std::uint64_t state_;
};

// A ring of exactly its size, so that AddressSanitizer sees every step beyond it.
class TestRing {
 public:
  explicit TestRing(std::uint64_t capacity) : bytes_(sizeof(chairlift::RingHeader) + capacity) {
    memory_ = static_cast<std::byte*>(std::aligned_alloc(64, bytes_));
    CHECK(memory_ != nullptr);
    std::memset(memory_, 0, bytes_);
    CHECK(chairlift_ring_format(memory_, bytes_, capacity) == 0);
    reopen();
  }

  ~TestRing() {
    chairlift_sender_close(sender);
    chairlift_receiver_close(receiver);
    std::free(memory_);
  }

  TestRing(const TestRing&) = delete;
  TestRing& operator=(const TestRing&) = delete;

  // As if both processes had died and others had come.
  void reopen() {
    chairlift_sender_close(sender);
    chairlift_receiver_close(receiver);
    sender = chairlift_sender_open(memory_, bytes_);
    receiver = chairlift_receiver_open(memory_, bytes_);
    CHECK(sender != nullptr && receiver != nullptr);
  }

  chairlift::RingHeader& header() { return *reinterpret_cast<chairlift::RingHeader*>(memory_); }
  std::byte* data() { return memory_ + sizeof(chairlift::RingHeader); }
  std::uint64_t bytes() const { return bytes_; }

  // Moves both ends forward by `distance` bytes, a multiple of 16.
  void advance(std::uint64_t distance) {
    for (; distance > 0; distance -= 16) {
      CHECK(chairlift_sender_send(sender, "", 0, 0) == chairlift::kSent);
      CHECK(chairlift_receiver_receive(receiver, nullptr, 0) == 0);
    }
  }

  chairlift_sender* sender = nullptr;
  chairlift_receiver* receiver = nullptr;

 private:
  std::uint64_t bytes_;
  std::byte* memory_;
};

inline std::vector<unsigned char> noise_bytes(std::uint64_t seed, std::size_t length) {
  Noise noise(seed);
  std::vector<unsigned char> bytes(length + 8);
  for (std::size_t i = 0; i < length; i += 8) {
    const std::uint64_t word = noise.next();
    std::memcpy(bytes.data() + i, &word, 8);
  }
  bytes.resize(length);
  return bytes;
}
