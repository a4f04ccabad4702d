// Two threads, records of random sizes in random batches, each checked byte for byte; the receiver parks on an eventfd
// with a time-out that only a lost wake-up can reach. usage: ring_stress RECORDS
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "support.hpp"

using namespace chairlift;

namespace {

constexpr int kParkMilliseconds = 20000;

std::uint64_t record_length(std::uint64_t index, std::uint64_t max_record) {
  Noise noise(index ^ 0xABCD);
  const bool small = noise.below(8) != 0;
  return noise.below(small ? std::min<std::uint64_t>(64, max_record + 1) : max_record + 1);
}

void ring_bell(int bell) {
  const std::uint64_t one = 1;
  CHECK(write(bell, &one, sizeof one) == sizeof one);
}

// Sends records [0, count): single ones, batches, and now and then a batch that is forgotten and staged again.
void send_all(TestRing& ring, std::uint64_t count, std::uint64_t max_record, int bell) {
  Noise noise(11);
  for (std::uint64_t index = 0; index < count;) {
    const std::uint64_t batch = std::min(1 + noise.below(4), count - index);
    std::uint64_t staged = 0;
    for (; staged < batch; ++staged) {
      const auto payload = noise_bytes(index + staged, record_length(index + staged, max_record));
      if (chairlift_sender_stage(ring.sender, payload.data(), payload.size(), 0) != kSent) break;
    }
    if (staged == 0) std::this_thread::yield();
    if (noise.below(16) == 0) {
      chairlift_sender_abort(ring.sender);
      continue;
    }
    if (chairlift_sender_commit(ring.sender) == kSentWake) ring_bell(bell);
    index += staged;
  }
}

void park(TestRing& ring, int bell) {
  if (chairlift_receiver_arm(ring.receiver) == 1) return;
  pollfd waiting{bell, POLLIN, 0};
  CHECK(poll(&waiting, 1, kParkMilliseconds) == 1);
  std::uint64_t rings = 0;
  CHECK(read(bell, &rings, sizeof rings) == sizeof rings);
  chairlift_receiver_disarm(ring.receiver);
}

void receive_all(TestRing& ring, std::uint64_t count, std::uint64_t max_record, int bell) {
  std::vector<unsigned char> buffer(max_record);
  for (std::uint64_t index = 0; index < count;) {
    const std::int64_t length = chairlift_receiver_receive(ring.receiver, buffer.data(), buffer.size());
    if (length == kEmpty) {
      park(ring, bell);
      continue;
    }
    const auto expected = noise_bytes(index, record_length(index, max_record));
    CHECK(length == static_cast<std::int64_t>(expected.size()));
    CHECK(std::memcmp(buffer.data(), expected.data(), expected.size()) == 0);
    ++index;
  }
}

void run(std::uint64_t capacity, std::uint64_t count) {
  TestRing ring(capacity);
  const std::uint64_t max_record = capacity / 2 - sizeof(RecordHeader);
  const int bell = eventfd(0, EFD_CLOEXEC);
  CHECK(bell >= 0);
  std::thread sender([&] { send_all(ring, count, max_record, bell); });
  receive_all(ring, count, max_record, bell);
  sender.join();
  CHECK(chairlift_receiver_readable(ring.receiver) == 0 && chairlift_sender_used(ring.sender) == 0);
  close(bell);
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 2);
  const std::uint64_t count = std::stoull(argv[1]);
  for (std::uint64_t capacity : {64, 256, 4096, 65536}) run(capacity, count / 4);
}
