// A page of 64-bit values in shared memory: one writer, any number of readers, none of which ever waits.
//
//   byte  0   magic (8)  number of values (8)      written once
//        64   version (8)                          odd while the values change
//       128   values (8 each)
//
// A reader takes a snapshot between two equal, even versions. Values are stored with release and loaded with acquire, so
// that whoever sees a new value also sees the odd version before it. Where the writer died half-way, or keeps writing,
// the reader gives up after some tries and has values that are each whole, though of different moments.
//
// How many values there are is checked once. From then on each side goes by the number that it knows itself, never by
// what stands in the page, which the other process can change.
#pragma once

#include <atomic>
#include <cstdint>

#include "chairlift/ring.hpp"

namespace chairlift {

struct StatusHeader {
  alignas(64) std::uint64_t magic;
  std::uint64_t num_values;
  alignas(64) std::atomic<std::uint64_t> version;
};

static_assert(sizeof(StatusHeader) == 128 && sizeof(std::atomic<std::uint64_t>) == 8);

inline constexpr std::uint64_t kStatusMagic = 0x3154415453545043;  // "CPTSTAT1"

}  // namespace chairlift

extern "C" {

// Makes a page of zeros. Returns 0, or -1 where the memory is too small.
CHAIRLIFT_API std::int32_t chairlift_status_format(void* memory, std::uint64_t memory_bytes, std::uint64_t num_values);
// Whether the memory holds a page of as many values: 1 or 0.
CHAIRLIFT_API std::int32_t chairlift_status_check(const void* memory, std::uint64_t memory_bytes,
                                                  std::uint64_t num_values);
// Changes all values in one go. For this and the next two the page was checked for as many values.
CHAIRLIFT_API void chairlift_status_write(void* memory, const std::uint64_t* values, std::uint64_t num_values);
// Changes one value, outside any snapshot.
CHAIRLIFT_API void chairlift_status_store(void* memory, std::uint64_t index, std::uint64_t value);
// Copies all values. Returns 1 for a snapshot, 0 where values may be of different moments.
CHAIRLIFT_API std::int32_t chairlift_status_read(const void* memory, std::uint64_t* values, std::uint64_t num_values);

}  // extern "C"
