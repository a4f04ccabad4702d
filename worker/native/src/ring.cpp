// The ring of include/chairlift/ring.hpp, which says how the memory is laid out and why it is safe.
#include "chairlift/ring.hpp"

#include <bit>
#include <cstring>
#include <new>

#include "chairlift/checksum.hpp"

using namespace chairlift;

// Both ends live in their process's own memory. What an end has written itself it never reads back from the ring.
struct chairlift_sender {
  RingHeader* ring;
  std::byte* data;
  std::uint64_t capacity;
  std::uint64_t tail;         // as published
  std::uint64_t staged;       // end of the records that wait for commit
  std::uint64_t staged_size;  // their bytes, without padding
  std::uint64_t head_seen;    // the receiver's index when last looked at
  bool corrupt;
};

struct chairlift_receiver {
  RingHeader* ring;
  std::byte* data;
  std::uint64_t capacity;
  std::uint64_t head;       // as published
  std::uint64_t tail_seen;  // the sender's index when last looked at
  bool corrupt;
};

namespace {

constexpr std::uint64_t framed(std::uint64_t length) {
  return sizeof(RecordHeader) + ((length + kRecordAlignment - 1) & ~(kRecordAlignment - 1));
}

bool indices_valid(std::uint64_t head, std::uint64_t tail, std::uint64_t capacity) {
  return tail - head <= capacity && head % kRecordAlignment == 0 && tail % kRecordAlignment == 0;
}

std::uint32_t record_checksum(std::uint32_t length, std::uint64_t position, const std::byte* payload,
                              std::size_t payload_bytes) {
  std::byte prefix[12];
  std::memcpy(prefix, &length, 4);
  std::memcpy(prefix + 4, &position, 8);
  return ~crc32c_extend(crc32c_extend(~0U, prefix, sizeof prefix), payload, payload_bytes);
}

void write_record_header(std::byte* place, std::uint32_t length, std::uint64_t position, const std::byte* payload,
                         std::size_t payload_bytes) {
  const RecordHeader header{length, record_checksum(length, position, payload, payload_bytes), position};
  std::memcpy(place, &header, sizeof header);
}

// The capacity of the ring in this memory; 0 where it holds none. Read once: another process can change it at any time.
std::uint64_t checked_capacity(const void* memory, std::uint64_t memory_bytes) {
  if (memory == nullptr || memory_bytes < sizeof(RingHeader)) return 0;
  const auto* ring = static_cast<const RingHeader*>(memory);
  const std::uint64_t capacity = *static_cast<const volatile std::uint64_t*>(&ring->capacity);
  if (ring->magic != kRingMagic || capacity < kMinCapacity || capacity > kMaxCapacity) return 0;
  return std::has_single_bit(capacity) && memory_bytes - sizeof(RingHeader) >= capacity ? capacity : 0;
}

std::byte* data_of(RingHeader* ring) { return reinterpret_cast<std::byte*>(ring) + sizeof(RingHeader); }

// Whether `size` more bytes fit, looking at the receiver's index only if the remembered one says no.
SendOutcome find_room(chairlift_sender& sender, std::uint64_t size, std::uint64_t leave) {
  const std::uint64_t limit = sender.capacity - leave;
  if (sender.staged + size - sender.head_seen <= limit) return kSent;
  const std::uint64_t head = sender.ring->head.load(std::memory_order_acquire);
  if (!indices_valid(head, sender.tail, sender.capacity)) {
    sender.corrupt = true;
    return kSendCorrupt;
  }
  sender.head_seen = head;
  return sender.staged + size - head <= limit ? kSent : kFull;
}

// Looks for published records beyond the ones known; false where there are none. Sets corrupt.
bool refresh_tail(chairlift_receiver& receiver) {
  receiver.tail_seen = receiver.ring->tail.load(std::memory_order_acquire);
  receiver.corrupt = !indices_valid(receiver.head, receiver.tail_seen, receiver.capacity);
  return receiver.tail_seen != receiver.head;
}

// Where the record at `position` starts once padding there is skipped; false where the padding is corrupt.
bool skip_padding(const chairlift_receiver& receiver, RecordHeader& header, std::uint64_t& position) {
  const std::uint64_t rest = receiver.capacity - (position & (receiver.capacity - 1));
  const bool sound = header.position == position && header.checksum == record_checksum(kPadding, position, nullptr, 0);
  if (!sound || rest >= receiver.tail_seen - position) return false;  // a record always follows padding
  position += rest;
  std::memcpy(&header, receiver.data, sizeof header);
  return true;
}

std::int64_t read_record(chairlift_receiver& receiver, std::byte* buffer, std::uint64_t buffer_bytes) {
  std::uint64_t position = receiver.head;
  RecordHeader header;
  std::memcpy(&header, receiver.data + (position & (receiver.capacity - 1)), sizeof header);
  if (header.length == kPadding && !skip_padding(receiver, header, position)) return kReceiveCorrupt;
  const std::uint64_t offset = position & (receiver.capacity - 1);
  const std::uint64_t size = framed(header.length);
  if (header.position != position || size > receiver.tail_seen - position || size > receiver.capacity - offset) {
    return kReceiveCorrupt;
  }
  if (header.length > buffer_bytes) return kBufferTooSmall;
  // The copy is what gets checked, not the memory that another process could still change.
  if (header.length > 0) std::memcpy(buffer, receiver.data + offset + sizeof header, header.length);
  if (header.checksum != record_checksum(header.length, position, buffer, header.length)) return kReceiveCorrupt;
  receiver.head = position + size;
  receiver.ring->head.store(receiver.head, std::memory_order_release);
  return header.length;
}

}  // namespace

extern "C" {

std::int32_t chairlift_ring_format(void* memory, std::uint64_t memory_bytes, std::uint64_t capacity) {
  if (memory == nullptr || capacity < kMinCapacity || capacity > kMaxCapacity || !std::has_single_bit(capacity)) return -1;
  if (memory_bytes < sizeof(RingHeader) + capacity) return -1;
  auto* ring = new (memory) RingHeader{};
  ring->capacity = capacity;
  ring->magic = kRingMagic;
  return 0;
}

chairlift_sender* chairlift_sender_open(void* memory, std::uint64_t memory_bytes) {
  const std::uint64_t capacity = checked_capacity(memory, memory_bytes);
  if (capacity == 0) return nullptr;
  auto* ring = static_cast<RingHeader*>(memory);
  const std::uint64_t tail = ring->tail.load(std::memory_order_acquire);
  const std::uint64_t head = ring->head.load(std::memory_order_acquire);
  const bool corrupt = !indices_valid(head, tail, capacity);
  return new (std::nothrow) chairlift_sender{ring, data_of(ring), capacity, tail, tail, 0, head, corrupt};
}

chairlift_receiver* chairlift_receiver_open(void* memory, std::uint64_t memory_bytes) {
  const std::uint64_t capacity = checked_capacity(memory, memory_bytes);
  if (capacity == 0) return nullptr;
  auto* ring = static_cast<RingHeader*>(memory);
  const std::uint64_t head = ring->head.load(std::memory_order_acquire);
  return new (std::nothrow) chairlift_receiver{ring, data_of(ring), capacity, head, head, false};
}

void chairlift_sender_close(chairlift_sender* sender) { delete sender; }

void chairlift_receiver_close(chairlift_receiver* receiver) { delete receiver; }

std::int32_t chairlift_sender_stage(chairlift_sender* sender, const void* payload, std::uint64_t length,
                                    std::uint64_t leave) {
  if (sender == nullptr) return kSendClosed;
  if (sender->corrupt) return kSendCorrupt;
  const std::uint64_t usable = sender->capacity / 2;
  if (length > usable || leave > usable || sender->staged_size + framed(length) + leave > usable) return kTooLarge;
  const std::uint64_t size = framed(length);
  const std::uint64_t offset = sender->staged & (sender->capacity - 1);
  const std::uint64_t rest = sender->capacity - offset;
  const std::uint64_t padding = size > rest ? rest : 0;
  const SendOutcome room = find_room(*sender, padding + size, leave);
  if (room != kSent) return room;
  if (padding > 0) write_record_header(sender->data + offset, kPadding, sender->staged, nullptr, 0);
  const std::uint64_t position = sender->staged + padding;
  std::byte* place = sender->data + (position & (sender->capacity - 1));
  const auto* bytes = static_cast<const std::byte*>(payload);
  if (length > 0) std::memcpy(place + sizeof(RecordHeader), bytes, length);
  write_record_header(place, static_cast<std::uint32_t>(length), position, bytes, length);
  sender->staged = position + size;
  sender->staged_size += size;
  return kSent;
}

std::int32_t chairlift_sender_commit(chairlift_sender* sender) {
  if (sender == nullptr) return kSendClosed;
  sender->tail = sender->staged;
  sender->staged_size = 0;
  sender->ring->tail.store(sender->tail, std::memory_order_seq_cst);
  return sender->ring->asleep.load(std::memory_order_seq_cst) != 0 ? kSentWake : kSent;
}

void chairlift_sender_abort(chairlift_sender* sender) {
  if (sender == nullptr) return;
  sender->staged = sender->tail;
  sender->staged_size = 0;
}

std::int32_t chairlift_sender_send(chairlift_sender* sender, const void* payload, std::uint64_t length,
                                   std::uint64_t leave) {
  const std::int32_t outcome = chairlift_sender_stage(sender, payload, length, leave);
  return outcome == kSent ? chairlift_sender_commit(sender) : outcome;
}

std::uint64_t chairlift_sender_used(const chairlift_sender* sender) {
  return sender == nullptr ? 0 : sender->tail - sender->ring->head.load(std::memory_order_acquire);
}

std::int64_t chairlift_receiver_receive(chairlift_receiver* receiver, void* buffer, std::uint64_t buffer_bytes) {
  if (receiver == nullptr) return kReceiveClosed;
  if (!receiver->corrupt && receiver->tail_seen == receiver->head && !refresh_tail(*receiver)) return kEmpty;
  if (receiver->corrupt) return kReceiveCorrupt;
  const std::int64_t outcome = read_record(*receiver, static_cast<std::byte*>(buffer), buffer_bytes);
  receiver->corrupt = outcome == kReceiveCorrupt;
  return outcome;
}

std::int32_t chairlift_receiver_readable(const chairlift_receiver* receiver) {
  if (receiver == nullptr) return 0;
  return receiver->corrupt || receiver->ring->tail.load(std::memory_order_acquire) != receiver->head ? 1 : 0;
}

std::int32_t chairlift_receiver_arm(chairlift_receiver* receiver) {
  if (receiver == nullptr) return 0;
  receiver->ring->asleep.store(1, std::memory_order_seq_cst);
  if (receiver->ring->tail.load(std::memory_order_seq_cst) == receiver->head && !receiver->corrupt) return 0;
  chairlift_receiver_disarm(receiver);
  return 1;
}

void chairlift_receiver_disarm(chairlift_receiver* receiver) {
  if (receiver != nullptr) receiver->ring->asleep.store(0, std::memory_order_relaxed);
}

std::uint64_t chairlift_receiver_used(const chairlift_receiver* receiver) {
  return receiver == nullptr ? 0 : receiver->ring->tail.load(std::memory_order_acquire) - receiver->head;
}

}  // extern "C"
