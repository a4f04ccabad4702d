// A ring of variable-length records in shared memory: one sender, one receiver, no locks, no system calls.
//
// Positions are bytes since the ring was made, 64 bits, never reset; the place of a position is position mod capacity.
//
//   byte  0   magic (8)  capacity (8)                       written once, by chairlift_ring_format
//        64   tail (8)     end of the published records     written by the sender only
//       128   head (8)     start of the unread records      written by the receiver only
//       192   asleep (4)   the receiver parks, or is about to; written by the receiver only
//       256   data (capacity, a power of two)
//
//   data, all multiples of 16:
//             free       head                        tail        free
//      |................|record|record|...|record|..............|pad|
//                        one lap at most: tail - head <= capacity
//
//   record:  length (4)  checksum (4)  position (8)  payload (length)  zero to 15 unused bytes
//   padding: length is 0xFFFFFFFF and the record takes the rest of the lap, so that no payload is split at the wrap.
//
// The position doubles as sequence number: a record left from an earlier lap carries a smaller one. The checksum is a
// CRC-32C of length, position and payload.
//
// Usable capacity: a record may need the rest of a lap as padding before it, so that only half the capacity is sure to
// be had at any position. What is sent at once (records with their 16-byte headers, rounded up to 16, and what is to be
// left free) is therefore at most capacity / 2; that much always fits into an empty ring. The largest payload is
// capacity / 2 - 16 bytes.
//
// Ordering. The sender fills the free part, then stores tail; the receiver loads tail, reads, then stores head. tail
// and asleep form the sleeper's protocol: each side stores its own word and then loads the other's, all four
// sequentially consistent, so that at least one of them sees the other (this is the full fence between flag and second
// look; written as ordered operations because ThreadSanitizer understands these and not fences).
//
// A sender that dies anywhere before the store of tail has published nothing of what it was writing. A receiver that
// dies before the store of head leaves the record to be read again. Neither ever waits for the other.
//
// Both ends distrust the memory: an index or a record that cannot be is kCorrupt, for ever after, and never parsed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace chairlift {

struct RingHeader {
  alignas(64) std::uint64_t magic;
  std::uint64_t capacity;
  alignas(64) std::atomic<std::uint64_t> tail;
  alignas(64) std::atomic<std::uint64_t> head;
  alignas(64) std::atomic<std::uint32_t> asleep;
};

struct RecordHeader {
  std::uint32_t length;
  std::uint32_t checksum;
  std::uint64_t position;
};

static_assert(sizeof(RingHeader) == 256 && sizeof(RecordHeader) == 16);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

inline constexpr std::uint64_t kRingMagic = 0x31474E4952545043;  // "CPTRING1"
inline constexpr std::uint64_t kRecordAlignment = 16;
inline constexpr std::uint64_t kMinCapacity = 64;
inline constexpr std::uint64_t kMaxCapacity = std::uint64_t{1} << 32;  // lengths fit 32 bits, with room for kPadding
inline constexpr std::uint32_t kPadding = 0xFFFFFFFF;

// What sending says.
enum SendOutcome : std::int32_t {
  kFull = 0,      // nothing was staged; try again later
  kSent = 1,      // staged or published, and the receiver is awake
  kSentWake = 2,  // published, and the receiver sleeps: ring its doorbell
  kTooLarge = -1,
  kSendCorrupt = -2,
  kSendClosed = -3,
};

// What receiving says, where it is no length.
enum ReceiveOutcome : std::int64_t {
  kEmpty = -1,
  kReceiveCorrupt = -2,
  kReceiveClosed = -3,
  kBufferTooSmall = -4,
};

}  // namespace chairlift

#define CHAIRLIFT_API __attribute__((visibility("default")))

extern "C" {

struct chairlift_sender;
struct chairlift_receiver;

// Makes an empty ring of zeroed memory, 64-byte aligned, of 256 + capacity bytes. Returns 0, or -1 where that cannot be.
CHAIRLIFT_API std::int32_t chairlift_ring_format(void* memory, std::uint64_t memory_bytes, std::uint64_t capacity);

// An end of a ring, or null where the memory holds none. It goes on where the last holder of that end stopped.
CHAIRLIFT_API chairlift_sender* chairlift_sender_open(void* memory, std::uint64_t memory_bytes);
CHAIRLIFT_API chairlift_receiver* chairlift_receiver_open(void* memory, std::uint64_t memory_bytes);
CHAIRLIFT_API void chairlift_sender_close(chairlift_sender* sender);
CHAIRLIFT_API void chairlift_receiver_close(chairlift_receiver* receiver);

// Writes a record without publishing it. `leave` bytes must stay free after it.
CHAIRLIFT_API std::int32_t chairlift_sender_stage(chairlift_sender* sender, const void* payload, std::uint64_t length,
                                                  std::uint64_t leave);
// Publishes all staged records at once.
CHAIRLIFT_API std::int32_t chairlift_sender_commit(chairlift_sender* sender);
// Forgets all staged records.
CHAIRLIFT_API void chairlift_sender_abort(chairlift_sender* sender);
// Stages and publishes one record.
CHAIRLIFT_API std::int32_t chairlift_sender_send(chairlift_sender* sender, const void* payload, std::uint64_t length,
                                                 std::uint64_t leave);
// Bytes between head and tail.
CHAIRLIFT_API std::uint64_t chairlift_sender_used(const chairlift_sender* sender);

// Copies the next record to `buffer` and takes it off the ring. Returns its length or a ReceiveOutcome.
CHAIRLIFT_API std::int64_t chairlift_receiver_receive(chairlift_receiver* receiver, void* buffer,
                                                      std::uint64_t buffer_bytes);
// Whether there is something to read (or the ring is corrupt, which reading will tell).
CHAIRLIFT_API std::int32_t chairlift_receiver_readable(const chairlift_receiver* receiver);
// Says that the receiver is about to park, and looks again: 1 where it must not, and then it counts as awake.
CHAIRLIFT_API std::int32_t chairlift_receiver_arm(chairlift_receiver* receiver);
// Says that the receiver is awake.
CHAIRLIFT_API void chairlift_receiver_disarm(chairlift_receiver* receiver);
CHAIRLIFT_API std::uint64_t chairlift_receiver_used(const chairlift_receiver* receiver);

}  // extern "C"
