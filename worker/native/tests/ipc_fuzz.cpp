// What another process may have written into ring and status page, at random: no step outside of the memory, no answer
// that the headers do not know, no record for ever, and what is corrupt stays so.
//
// usage: ipc_fuzz SECONDS FIRST_SEED. Each round has a seed; the one that fails is named. `ipc_fuzz 0 SEED` repeats it.
#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "chairlift/checksum.hpp"
#include "chairlift/status.hpp"
#include "support.hpp"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#include <sanitizer/common_interface_defs.h>
#define AT_DEATH(callback) __sanitizer_set_death_callback(callback)
#else
#define AT_DEATH(callback) std::atexit(callback)
#endif

using namespace chairlift;

namespace {

std::uint64_t round_seed = 0;
bool all_well = false;

void name_the_round() {
  if (!all_well) std::fprintf(stderr, "ipc_fuzz 0 %llu\n", static_cast<unsigned long long>(round_seed));
}

// Memory of exactly its size, so that AddressSanitizer sees every step beyond it.
class Memory {
 public:
  explicit Memory(std::uint64_t bytes) : bytes_(bytes), memory_(static_cast<std::byte*>(std::aligned_alloc(64, bytes))) {
    CHECK(memory_ != nullptr);
    std::memset(memory_, 0, bytes_);
  }
  ~Memory() { std::free(memory_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* data() { return memory_; }
  std::uint64_t bytes() const { return bytes_; }

  // As another process would write it, in the middle of whatever goes on.
  void set_word(std::uint64_t place, std::uint64_t word) {
    std::atomic_ref(*reinterpret_cast<std::uint64_t*>(memory_ + place)).store(word, std::memory_order_relaxed);
  }
  std::uint64_t word(std::uint64_t place) {
    return std::atomic_ref(*reinterpret_cast<std::uint64_t*>(memory_ + place)).load(std::memory_order_relaxed);
  }

 private:
  std::uint64_t bytes_;
  std::byte* memory_;
};

constexpr std::uint64_t kTail = 64, kHead = 128;

// A number that some comparison may get wrong.
std::uint64_t edge(Noise& noise, std::uint64_t capacity) {
  const std::array<std::uint64_t, 14> edges{
      0, 1, 15, 16, 17, capacity / 2, capacity - 16, capacity, capacity + 16, 2 * capacity, kPadding, kPadding - 15,
      ~std::uint64_t{0}, ~std::uint64_t{15}};
  return edges[noise.below(edges.size())] + (noise.below(4) == 0 ? noise.below(3) - 1 : 0);
}

// A record header with a checksum that is right for what stands behind it, as far as that lies in the ring.
void forge_record(Memory& memory, Noise& noise, std::uint64_t capacity) {
  const std::uint64_t offset = 16 * noise.below(capacity / 16);
  const std::uint64_t lap = (memory.word(kHead) & ~(capacity - 1)) + capacity * (noise.below(3) - 1);
  const auto length = static_cast<std::uint32_t>(
      noise.below(4) == 0 ? kPadding : noise.below(2) == 0 ? noise.below(capacity + 32) : edge(noise, capacity));
  const std::uint64_t position = noise.below(8) == 0 ? edge(noise, capacity) : lap + offset;
  const std::uint64_t there = capacity - offset - sizeof(RecordHeader);
  const std::uint64_t payload = length == kPadding ? 0 : std::min<std::uint64_t>(length, there);
  std::byte prefix[12];
  std::memcpy(prefix, &length, 4);
  std::memcpy(prefix + 4, &position, 8);
  std::byte* place = memory.data() + sizeof(RingHeader) + offset;
  const std::uint32_t state = crc32c_extend(~0U, prefix, sizeof prefix);
  const RecordHeader header{length, ~crc32c_extend(state, place + sizeof(RecordHeader), payload), position};
  std::memcpy(place, &header, sizeof header);
}

void damage_ring(Memory& memory, Noise& noise, std::uint64_t capacity) {
  const std::uint64_t place = 8 * noise.below(memory.bytes() / 8);
  switch (noise.below(8)) {
    case 0:
      return memory.set_word(place, memory.word(place) ^ std::uint64_t{1} << noise.below(64));
    case 1:
      return memory.set_word(place, noise.next());
    case 2:
      return memory.set_word(place, edge(noise, capacity));
    case 3:  // an index that moves a little, or anywhere
      return memory.set_word(noise.below(2) == 0 ? kTail : kHead,
                             memory.word(kHead) + (noise.below(4) == 0 ? edge(noise, capacity) : 16 * noise.below(20)));
    case 4: {  // a piece of another lap
      const std::uint64_t from = 8 * noise.below(memory.bytes() / 8);
      const std::uint64_t length = 8 * noise.below((memory.bytes() - std::max(from, place)) / 8 + 1);
      std::memmove(memory.data() + place, memory.data() + from, length);
      return;
    }
    default:
      return forge_record(memory, noise, capacity);
  }
}

// Interesting beginnings: empty, full, wrapped, half written, at the end of the numbers.
void fill_ring(Memory& memory, Noise& noise, std::uint64_t capacity) {
  CHECK(chairlift_ring_format(memory.data(), memory.bytes(), capacity) == 0);
  const std::uint64_t start = noise.below(4) == 0 ? ~std::uint64_t{0} - 16 * noise.below(capacity / 8) - 15
                                                  : 16 * noise.below(capacity / 4);
  memory.set_word(kTail, start);
  memory.set_word(kHead, start);
  chairlift_sender* sender = chairlift_sender_open(memory.data(), memory.bytes());
  const auto payload = noise_bytes(noise.next(), capacity);
  for (std::uint64_t i = noise.below(20); i > 0; --i) {
    const std::uint64_t length = noise.below(3) == 0 ? noise.below(capacity / 2) : noise.below(40);
    if (noise.below(8) == 0) chairlift_sender_stage(sender, payload.data(), length, 0);
    else chairlift_sender_send(sender, payload.data(), length, 0);
  }
  chairlift_sender_close(sender);
}

// Everything both ends can do, in any order, until the memory changes under them again.
void use_ring(chairlift_sender* sender, chairlift_receiver* receiver, Noise& noise, std::uint64_t capacity,
              bool& corrupt) {
  // Of exactly the size that the Python side gives.
  const std::uint64_t buffer_bytes = noise.below(4) == 0 ? noise.below(64) : capacity / 2;
  const std::unique_ptr<std::byte[]> buffer(new std::byte[buffer_bytes]);
  for (std::uint64_t steps = noise.below(12); steps > 0; --steps) {
    switch (noise.below(6)) {
      case 0: {
        const std::uint64_t length = noise.below(2) == 0 ? noise.below(48) : edge(noise, capacity);
        const std::unique_ptr<std::byte[]> payload(new std::byte[std::min(length, capacity)]());
        const std::int32_t sent = chairlift_sender_send(sender, payload.get(), length, noise.below(2) * noise.below(99));
        CHECK(sent >= kSendCorrupt && sent <= kSentWake);
        break;
      }
      case 1:
        chairlift_sender_stage(sender, "torn", 4, 0);
        if (noise.below(2) == 0) chairlift_sender_abort(sender);
        break;
      case 2:
        chairlift_receiver_arm(receiver);
        chairlift_receiver_readable(receiver);
        chairlift_sender_used(sender);
        chairlift_receiver_used(receiver);
        break;
      default: {
        const std::int64_t length = chairlift_receiver_receive(receiver, buffer.get(), buffer_bytes);
        CHECK(length >= kBufferTooSmall && length != kReceiveClosed);
        CHECK(length <= static_cast<std::int64_t>(buffer_bytes));
        CHECK(!corrupt || length == kReceiveCorrupt);
        corrupt = length == kReceiveCorrupt;
      }
    }
  }
}

// However often: as many records as fit, then none.
void drain_ring(chairlift_receiver* receiver, std::uint64_t capacity) {
  const std::unique_ptr<std::byte[]> buffer(new std::byte[capacity / 2]);
  std::uint64_t received = 0;
  while (chairlift_receiver_receive(receiver, buffer.get(), capacity / 2) >= 0) CHECK(++received <= capacity / 16);
}

void damaged_ring(Noise& noise) {
  const std::uint64_t capacity = std::uint64_t{64} << noise.below(5);
  Memory memory(sizeof(RingHeader) + capacity);
  fill_ring(memory, noise, capacity);
  for (std::uint64_t i = noise.below(6); i > 0; --i) damage_ring(memory, noise, capacity);
  const std::uint64_t told = noise.below(16) == 0 ? noise.below(memory.bytes() + 1) : memory.bytes();
  chairlift_sender* sender = chairlift_sender_open(memory.data(), told);
  chairlift_receiver* receiver = chairlift_receiver_open(memory.data(), told);
  CHECK((sender == nullptr) == (receiver == nullptr));
  bool corrupt = false;
  for (int i = 0; sender != nullptr && i < 6; ++i) {
    use_ring(sender, receiver, noise, capacity, corrupt);
    damage_ring(memory, noise, capacity);
  }
  if (receiver != nullptr) drain_ring(receiver, capacity);
  chairlift_sender_close(sender);
  chairlift_receiver_close(receiver);
}

void damaged_page(Noise& noise) {
  const std::uint64_t num_values = 1 + noise.below(24);
  Memory memory((sizeof(StatusHeader) + num_values * 8 + 63) / 64 * 64);
  CHECK(chairlift_status_format(memory.data(), memory.bytes(), num_values) == 0);
  for (std::uint64_t i = noise.below(4); i > 0; --i) {
    memory.set_word(8 * noise.below(memory.bytes() / 8), noise.below(2) == 0 ? noise.next() : edge(noise, num_values * 8));
  }
  const std::uint64_t told = noise.below(4) == 0 ? noise.below(memory.bytes() + 1) : memory.bytes();
  if (chairlift_status_check(memory.data(), told, num_values) == 0) return;
  const std::unique_ptr<std::uint64_t[]> values(new std::uint64_t[num_values]());
  for (int i = 0; i < 4; ++i) {
    memory.set_word(8 * noise.below(memory.bytes() / 8), noise.below(2) == 0 ? noise.next() : edge(noise, 64));
    chairlift_status_read(memory.data(), values.get(), num_values);
    chairlift_status_write(memory.data(), values.get(), num_values);
    chairlift_status_store(memory.data(), noise.below(num_values), noise.next());
  }
}

#ifndef __SANITIZE_THREAD__  // which is right to complain
// A process that writes while this one reads.
void ring_under_fire(Noise& noise) {
  const std::uint64_t capacity = 256;
  Memory memory(sizeof(RingHeader) + capacity);
  fill_ring(memory, noise, capacity);
  std::atomic<bool> done{false};
  std::thread other([&memory, &done, seed = noise.next()] {
    Noise words(seed);
    while (!done.load(std::memory_order_relaxed)) damage_ring(memory, words, capacity);
  });
  for (int i = 0; i < 200; ++i) {
    chairlift_sender* sender = chairlift_sender_open(memory.data(), memory.bytes());
    chairlift_receiver* receiver = chairlift_receiver_open(memory.data(), memory.bytes());
    bool corrupt = false;
    if (sender != nullptr && receiver != nullptr) use_ring(sender, receiver, noise, capacity, corrupt);
    chairlift_sender_close(sender);
    chairlift_receiver_close(receiver);
    if (i % 20 == 0) memory.set_word(0, kRingMagic);
    if (i % 20 == 1) memory.set_word(8, capacity);
  }
  done.store(true, std::memory_order_relaxed);
  other.join();
}
#endif

void one_round(std::uint64_t seed) {
  round_seed = seed;
  Noise noise(seed);
  damaged_ring(noise);
  damaged_page(noise);
#ifndef __SANITIZE_THREAD__
  if (seed % 512 == 0) ring_under_fire(noise);
#endif
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 3);
  const std::chrono::seconds time(std::stoul(argv[1]));
  const std::uint64_t first = std::stoull(argv[2]);
  AT_DEATH(name_the_round);
  const auto end = std::chrono::steady_clock::now() + time;
  std::uint64_t rounds = 0;
  do one_round(first + rounds++);
  while (std::chrono::steady_clock::now() < end);
  all_well = true;
  std::printf("%llu rounds\n", static_cast<unsigned long long>(rounds));
}
