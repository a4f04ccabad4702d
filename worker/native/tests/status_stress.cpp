// One writer, one reader: snapshots are of one moment and never go back. Signals stop both at random places, in the
// middle of a change or of a look too. usage: status_stress SNAPSHOTS
#include "chairlift/status.hpp"

#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <array>
#include <string>
#include <thread>

#include "support.hpp"

namespace {

constexpr std::size_t kValues = 18;
using Values = std::array<std::uint64_t, kValues>;

void pause_a_moment(int) {
  const timespec moment{0, 50'000};
  nanosleep(&moment, nullptr);
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 2);
  const std::uint64_t count = std::stoull(argv[1]);
  alignas(64) std::array<std::byte, sizeof(chairlift::StatusHeader) + kValues * 8> page{};
  CHECK(chairlift_status_format(page.data(), page.size() - 1, kValues) == -1);
  CHECK(chairlift_status_check(page.data(), page.size(), kValues) == 0);
  CHECK(chairlift_status_format(page.data(), page.size(), kValues) == 0);
  CHECK(chairlift_status_check(page.data(), page.size(), kValues) == 1);
  CHECK(chairlift_status_check(page.data(), page.size(), kValues - 1) == 0);

  struct sigaction action{};
  action.sa_handler = pause_a_moment;
  CHECK(sigaction(SIGUSR1, &action, nullptr) == 0);
  std::atomic<bool> done{false};
  const pthread_t reader = pthread_self();
  std::thread writer([&] {
    Values values;
    for (std::uint64_t n = 1; !done.load(std::memory_order_relaxed); ++n) {
      values.fill(n << 32 | n);
      chairlift_status_write(page.data(), values.data(), kValues);
      if (n % 64 == 0) std::this_thread::yield();
      if (n % 256 == 0) CHECK(pthread_kill(reader, SIGUSR1) == 0);
    }
  });
  std::uint64_t last = 0;
  std::uint64_t changes = 0;
  for (std::uint64_t i = 0; i < count || changes < 2; ++i) {
    if (i % 16 == 0) CHECK(pthread_kill(writer.native_handle(), SIGUSR1) == 0);
    Values values;
    const bool snapshot = chairlift_status_read(page.data(), values.data(), kValues) == 1;
    for (const std::uint64_t value : values) {
      CHECK(value >> 32 == (value & 0xFFFFFFFF));
      CHECK(!snapshot || value == values[0]);
    }
    CHECK(!snapshot || values[0] >= last);
    changes += values[0] != last ? 1 : 0;
    if (snapshot) last = values[0];
  }
  done.store(true, std::memory_order_relaxed);
  writer.join();

  // A writer that died half-way: the version stays odd, reading ends all the same.
  auto* header = reinterpret_cast<chairlift::StatusHeader*>(page.data());
  header->version.fetch_or(1);
  Values values;
  CHECK(chairlift_status_read(page.data(), values.data(), kValues) == 0);
  CHECK(values[0] >= last);
  values.fill(7);
  chairlift_status_write(page.data(), values.data(), kValues);
  CHECK(chairlift_status_read(page.data(), values.data(), kValues) == 1 && values[kValues - 1] == 7);
}
