// One property of the ring after another, in one thread.
#include <array>

#include "chairlift/checksum.hpp"
#include "support.hpp"

using namespace chairlift;

namespace {

constexpr std::uint64_t kCapacity = 256;
constexpr std::uint64_t kMaxRecord = kCapacity / 2 - sizeof(RecordHeader);

using Buffer = std::array<unsigned char, kCapacity>;

std::int64_t receive(TestRing& ring, Buffer& buffer) {
  return chairlift_receiver_receive(ring.receiver, buffer.data(), buffer.size());
}

void checksums_equal_the_published_vector() {
  const char* digits = "123456789";
  const auto* bytes = reinterpret_cast<const std::byte*>(digits);
  CHECK(~crc32c_extend(~0U, bytes, 9) == 0xE3069283U);  // RFC 3720's polynomial; the usual check value
  CHECK(~crc32c_portable(~0U, bytes, 9) == 0xE3069283U);
  const auto noise = noise_bytes(1, 1000);
  for (std::size_t length = 0; length <= noise.size(); ++length) {
    const auto* start = reinterpret_cast<const std::byte*>(noise.data());
    CHECK(crc32c_extend(~0U, start, length) == crc32c_portable(~0U, start, length));
  }
}

void every_length_passes_at_every_offset() {
  for (std::uint64_t offset = 0; offset < kCapacity; offset += 16) {
    for (std::uint64_t length = 0; length <= kMaxRecord; ++length) {
      TestRing ring(kCapacity);
      ring.advance(offset);
      const auto first = noise_bytes(length, length);
      const auto second = noise_bytes(length + 1000, length);
      CHECK(chairlift_sender_send(ring.sender, first.data(), length, 0) == kSent);
      const auto outcome = chairlift_sender_send(ring.sender, second.data(), length, 0);
      Buffer buffer{};
      CHECK(receive(ring, buffer) == static_cast<std::int64_t>(length));
      CHECK(std::memcmp(buffer.data(), first.data(), length) == 0);
      if (outcome == kFull) CHECK(chairlift_sender_send(ring.sender, second.data(), length, 0) == kSent);
      CHECK(receive(ring, buffer) == static_cast<std::int64_t>(length));
      CHECK(std::memcmp(buffer.data(), second.data(), length) == 0);
      CHECK(receive(ring, buffer) == kEmpty);
      CHECK(chairlift_sender_used(ring.sender) == 0 && chairlift_receiver_used(ring.receiver) == 0);
    }
  }
}

void a_record_over_the_limit_is_refused_even_by_an_empty_ring() {
  const auto bytes = noise_bytes(3, kCapacity * 2);
  for (std::uint64_t offset = 0; offset < kCapacity; offset += 16) {
    TestRing ring(kCapacity);
    ring.advance(offset);
    for (std::uint64_t length : {kMaxRecord + 1, kCapacity - 1, kCapacity, kCapacity + 1, ~std::uint64_t{0}}) {
      CHECK(chairlift_sender_send(ring.sender, bytes.data(), length, 0) == kTooLarge);
    }
    CHECK(chairlift_sender_send(ring.sender, bytes.data(), 0, ~std::uint64_t{0}) == kTooLarge);
    CHECK(chairlift_sender_send(ring.sender, bytes.data(), kMaxRecord - 16, 16) == kSent);
  }
}

void a_full_ring_refuses_and_loses_nothing() {
  TestRing ring(kCapacity);
  unsigned char count = 0;
  while (chairlift_sender_send(ring.sender, &count, 1, 0) == kSent) ++count;
  CHECK(count == kCapacity / 32);  // 16 of header and 1 of payload take 32
  Buffer buffer{};
  for (unsigned char i = 0; i < count; ++i) {
    CHECK(receive(ring, buffer) == 1);
    CHECK(buffer[0] == i);
  }
  CHECK(receive(ring, buffer) == kEmpty);
}

void what_is_to_be_left_stays_for_those_who_may_take_it() {
  TestRing ring(kCapacity);
  int count = 0;
  while (chairlift_sender_send(ring.sender, "", 0, 64) == kSent) ++count;
  CHECK(count == (256 - 64) / 16);
  for (int i = 0; i < 64 / 16; ++i) CHECK(chairlift_sender_send(ring.sender, "", 0, 0) == kSent);
  CHECK(chairlift_sender_send(ring.sender, "", 0, 0) == kFull);
}

void staged_records_appear_together_or_not_at_all() {
  TestRing ring(kCapacity);
  Buffer buffer{};
  CHECK(chairlift_sender_stage(ring.sender, "ab", 2, 0) == kSent);
  CHECK(chairlift_sender_stage(ring.sender, "cde", 3, 0) == kSent);
  CHECK(receive(ring, buffer) == kEmpty);
  chairlift_sender_abort(ring.sender);
  CHECK(chairlift_sender_send(ring.sender, "f", 1, 0) == kSent);
  CHECK(receive(ring, buffer) == 1 && buffer[0] == 'f');
  CHECK(chairlift_sender_stage(ring.sender, "ab", 2, 0) == kSent);
  CHECK(chairlift_sender_stage(ring.sender, "cde", 3, 0) == kSent);
  CHECK(chairlift_sender_commit(ring.sender) == kSent);
  CHECK(receive(ring, buffer) == 2 && receive(ring, buffer) == 3 && receive(ring, buffer) == kEmpty);
}

void records_staged_together_share_the_limit() {
  const auto bytes = noise_bytes(4, kMaxRecord);
  TestRing ring(kCapacity);
  CHECK(chairlift_sender_stage(ring.sender, bytes.data(), 48, 0) == kSent);
  CHECK(chairlift_sender_stage(ring.sender, bytes.data(), 49, 0) == kTooLarge);
  CHECK(chairlift_sender_stage(ring.sender, bytes.data(), 48, 0) == kSent);
  CHECK(chairlift_sender_stage(ring.sender, bytes.data(), 0, 0) == kTooLarge);
  CHECK(chairlift_sender_commit(ring.sender) == kSent);
  CHECK(chairlift_sender_stage(ring.sender, bytes.data(), 0, 0) == kSent);
}

void a_sender_that_dies_before_commit_leaves_what_was_committed() {
  for (std::uint64_t offset = 0; offset < kCapacity; offset += 16) {
    TestRing ring(kCapacity);
    ring.advance(offset);
    CHECK(chairlift_sender_send(ring.sender, "kept", 4, 0) == kSent);
    CHECK(chairlift_sender_stage(ring.sender, "lost", 4, 0) == kSent);
    CHECK(chairlift_sender_stage(ring.sender, "lost too", 8, 0) == kSent);
    ring.reopen();
    Buffer buffer{};
    CHECK(receive(ring, buffer) == 4 && std::memcmp(buffer.data(), "kept", 4) == 0);
    CHECK(receive(ring, buffer) == kEmpty);
    CHECK(chairlift_sender_send(ring.sender, "next", 4, 0) == kSent);
    CHECK(receive(ring, buffer) == 4 && std::memcmp(buffer.data(), "next", 4) == 0);
  }
}

void every_flipped_bit_of_a_record_is_noticed() {
  for (std::uint64_t offset : {std::uint64_t{0}, kCapacity - 32}) {  // the second one with padding before the record
    for (std::uint64_t byte = 0; byte < kCapacity; ++byte) {
      for (int bit = 0; bit < 8; ++bit) {
        TestRing ring(kCapacity);
        ring.advance(offset);
        const auto payload = noise_bytes(5, 40);
        CHECK(chairlift_sender_send(ring.sender, payload.data(), 40, 0) == kSent);
        ring.data()[byte] ^= static_cast<std::byte>(1 << bit);
        const bool in_record = byte < 16 + 40;
        const bool in_padding = offset != 0 && byte >= offset && byte < offset + 16;
        Buffer buffer{};
        const bool noticed = receive(ring, buffer) == kReceiveCorrupt;
        CHECK(noticed == (in_record || in_padding));
        if (noticed) CHECK(receive(ring, buffer) == kReceiveCorrupt && chairlift_receiver_readable(ring.receiver) == 1);
      }
    }
  }
}

void a_record_of_an_earlier_lap_is_not_taken_for_a_new_one() {
  TestRing ring(kCapacity);
  CHECK(chairlift_sender_send(ring.sender, "old", 3, 0) == kSent);
  std::array<std::byte, 32> old;
  std::memcpy(old.data(), ring.data(), old.size());
  Buffer buffer{};
  CHECK(receive(ring, buffer) == 3);
  ring.advance(kCapacity - 32);
  CHECK(chairlift_sender_send(ring.sender, "new", 3, 0) == kSent);
  std::memcpy(ring.data(), old.data(), old.size());
  CHECK(receive(ring, buffer) == kReceiveCorrupt);
}

void impossible_indices_are_corrupt_and_lead_nowhere() {
  Noise noise(6);
  for (int round = 0; round < 2000; ++round) {
    TestRing ring(kCapacity);
    ring.header().tail.store(round % 2 == 0 ? noise.next() | 1 : kCapacity + 16 + 16 * noise.below(1U << 20));
    Buffer buffer{};
    CHECK(receive(ring, buffer) == kReceiveCorrupt);
    ring.header().head.store(16 + 16 * noise.below(1U << 20));  // before anything was sent
    ring.reopen();
    CHECK(chairlift_sender_send(ring.sender, "x", 1, 0) == kSendCorrupt);
  }
}

void garbage_is_never_parsed() {
  Noise noise(7);
  for (int round = 0; round < 5000; ++round) {
    TestRing ring(kCapacity);
    const auto garbage = noise_bytes(noise.next(), kCapacity);
    std::memcpy(ring.data(), garbage.data(), kCapacity);
    const std::uint64_t head = 16 * noise.below(64);
    ring.header().head.store(head);
    ring.header().tail.store(head + 16 + 16 * noise.below(kCapacity / 16));
    // Half the time a header that gets as far as the checksum.
    if (noise.below(2) == 0) {
      const RecordHeader header{static_cast<std::uint32_t>(noise.below(4) == 0 ? kPadding : noise.below(300)), 0, head};
      std::memcpy(ring.data() + head % kCapacity, &header, sizeof header);
    }
    ring.reopen();
    Buffer buffer{};
    CHECK(receive(ring, buffer) == kReceiveCorrupt);
  }
}

void only_a_sleeping_receiver_asks_to_be_woken() {
  TestRing ring(kCapacity);
  Buffer buffer{};
  CHECK(chairlift_receiver_arm(ring.receiver) == 0);
  CHECK(chairlift_sender_send(ring.sender, "x", 1, 0) == kSentWake);
  CHECK(chairlift_sender_send(ring.sender, "x", 1, 0) == kSentWake);  // still asleep: a dead ringer costs nothing
  chairlift_receiver_disarm(ring.receiver);
  CHECK(chairlift_sender_send(ring.sender, "x", 1, 0) == kSent);
  CHECK(chairlift_receiver_arm(ring.receiver) == 1);
  CHECK(chairlift_sender_send(ring.sender, "x", 1, 0) == kSent);
  for (int i = 0; i < 4; ++i) CHECK(receive(ring, buffer) == 1);
  CHECK(chairlift_receiver_readable(ring.receiver) == 0 && chairlift_receiver_arm(ring.receiver) == 0);
}

void what_is_no_ring_is_refused() {
  alignas(64) std::array<std::byte, 1024> memory{};
  CHECK(chairlift_sender_open(memory.data(), memory.size()) == nullptr);
  CHECK(chairlift_receiver_open(memory.data(), memory.size()) == nullptr);
  for (std::uint64_t capacity : {0, 1, 32, 63, 96, 512 + 64, 1024}) {
    CHECK(chairlift_ring_format(memory.data(), memory.size(), capacity) == -1);
  }
  CHECK(chairlift_ring_format(memory.data(), memory.size(), 512) == 0);
  CHECK(chairlift_receiver_open(memory.data(), 512) == nullptr);
  Buffer buffer{};
  CHECK(chairlift_receiver_receive(nullptr, buffer.data(), buffer.size()) == kReceiveClosed);
  CHECK(chairlift_sender_send(nullptr, "", 0, 0) == kSendClosed);
}

void a_record_larger_than_the_buffer_stays() {
  TestRing ring(kCapacity);
  Buffer buffer{};
  CHECK(chairlift_sender_send(ring.sender, "four", 4, 0) == kSent);
  CHECK(chairlift_receiver_receive(ring.receiver, buffer.data(), 3) == kBufferTooSmall);
  CHECK(receive(ring, buffer) == 4);
}

}  // namespace

int main() {
  checksums_equal_the_published_vector();
  every_length_passes_at_every_offset();
  a_record_over_the_limit_is_refused_even_by_an_empty_ring();
  a_full_ring_refuses_and_loses_nothing();
  what_is_to_be_left_stays_for_those_who_may_take_it();
  staged_records_appear_together_or_not_at_all();
  records_staged_together_share_the_limit();
  a_sender_that_dies_before_commit_leaves_what_was_committed();
  every_flipped_bit_of_a_record_is_noticed();
  a_record_of_an_earlier_lap_is_not_taken_for_a_new_one();
  impossible_indices_are_corrupt_and_lead_nowhere();
  garbage_is_never_parsed();
  only_a_sleeping_receiver_asks_to_be_woken();
  what_is_no_ring_is_refused();
  a_record_larger_than_the_buffer_stays();
}
