// Threads of one parallel region that work through phases together: each takes pieces of a phase until none is left,
// then waits for the others. Waiting spins for a moment, then offers the core to whoever wants it, since that may be the
// thread that is waited for, and then sleeps. On cores that others use too, long spinning made a step take three times as
// long.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

namespace chairlift {

class Team {
 public:
  // For regions with at most `phases` phases.
  void reset(std::int32_t phases) {
    if (phases > capacity_) {
      next_ = std::make_unique<Counter[]>(static_cast<std::size_t>(phases));
      capacity_ = phases;
    }
    for (std::int32_t i = 0; i < phases; ++i) {
      next_[static_cast<std::size_t>(i)].value.store(0, std::memory_order_relaxed);
    }
    arrived_.store(0, std::memory_order_relaxed);
  }

  // The next piece of a phase that nobody has taken; at or beyond the number of pieces there is none left.
  std::int32_t take(std::int32_t phase) {
    return next_[static_cast<std::size_t>(phase)].value.fetch_add(1, std::memory_order_relaxed);
  }

  struct Run {
    std::int32_t first;
    std::int32_t last;  // exclusive; not above first: nothing is left
  };

  // The next run of pieces that nobody has taken, of `total`: long ones first, since a stream is read fastest in one go,
  // then shorter ones, so that all threads end together.
  Run take_run(std::int32_t phase, std::int32_t total, std::int32_t least, std::int32_t size) {
    auto& next = next_[static_cast<std::size_t>(phase)].value;
    std::int32_t first = next.load(std::memory_order_relaxed);
    std::int32_t last = first;
    do {
      if (first >= total) return {total, total};
      const std::int32_t share = (total - first) / (2 * size) / least * least;
      last = std::min(total, first + std::max(least, share));
    } while (!next.compare_exchange_weak(first, last, std::memory_order_relaxed));
    return {first, last};
  }

  // Returns when all `size` threads of the region have come here.
  void meet(std::int32_t size) {
    if (size == 1) return;
    const std::uint32_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      round_.notify_all();
      return;
    }
    for (int spins = 0; spins < kSpins; ++spins) {
      if (round_.load(std::memory_order_acquire) != round) return;
      pause();
    }
    for (int yields = 0; yields < kYields; ++yields) {
      if (round_.load(std::memory_order_acquire) != round) return;
      std::this_thread::yield();
    }
    round_.wait(round, std::memory_order_acquire);
  }

 private:
  static constexpr int kSpins = 300;   // some 5 microseconds
  static constexpr int kYields = 100;  // some 50 more where nobody else wants the core

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  struct alignas(64) Counter {
    std::atomic<std::int32_t> value{0};
  };

  std::unique_ptr<Counter[]> next_;
  std::int32_t capacity_ = 0;
  alignas(64) std::atomic<std::int32_t> arrived_{0};
  alignas(64) std::atomic<std::uint32_t> round_{0};
};

}  // namespace chairlift
