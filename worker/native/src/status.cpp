// The page of include/chairlift/status.hpp.
#include "chairlift/status.hpp"

#include <new>

using namespace chairlift;

namespace {

using Value = std::atomic<std::uint64_t>;

constexpr int kTries = 1000;  // a write takes well under a microsecond, so do a thousand reads not all meet one

StatusHeader* header_of(void* memory) { return static_cast<StatusHeader*>(memory); }
const StatusHeader* header_of(const void* memory) { return static_cast<const StatusHeader*>(memory); }

Value* values_of(void* memory) { return reinterpret_cast<Value*>(static_cast<char*>(memory) + sizeof(StatusHeader)); }
const Value* values_of(const void* memory) {
  return reinterpret_cast<const Value*>(static_cast<const char*>(memory) + sizeof(StatusHeader));
}

}  // namespace

extern "C" {

std::int32_t chairlift_status_format(void* memory, std::uint64_t memory_bytes, std::uint64_t num_values) {
  if (memory == nullptr || memory_bytes < sizeof(StatusHeader)) return -1;
  if (num_values > (memory_bytes - sizeof(StatusHeader)) / sizeof(Value)) return -1;
  auto* header = new (memory) StatusHeader{};
  for (std::uint64_t i = 0; i < num_values; ++i) new (values_of(memory) + i) Value{0};
  header->num_values = num_values;
  header->magic = kStatusMagic;
  return 0;
}

std::int32_t chairlift_status_check(const void* memory, std::uint64_t memory_bytes, std::uint64_t num_values) {
  if (memory == nullptr || memory_bytes < sizeof(StatusHeader)) return 0;
  if (num_values > (memory_bytes - sizeof(StatusHeader)) / sizeof(Value)) return 0;
  return header_of(memory)->magic == kStatusMagic && header_of(memory)->num_values == num_values ? 1 : 0;
}

void chairlift_status_write(void* memory, const std::uint64_t* values, std::uint64_t num_values) {
  StatusHeader* header = header_of(memory);
  // | 1: a writer that died half-way left the version odd.
  const std::uint64_t odd = header->version.load(std::memory_order_relaxed) | 1;
  header->version.store(odd, std::memory_order_relaxed);
  for (std::uint64_t i = 0; i < num_values; ++i) values_of(memory)[i].store(values[i], std::memory_order_release);
  header->version.store(odd + 1, std::memory_order_release);
}

void chairlift_status_store(void* memory, std::uint64_t index, std::uint64_t value) {
  values_of(memory)[index].store(value, std::memory_order_release);
}

std::int32_t chairlift_status_read(const void* memory, std::uint64_t* values, std::uint64_t num_values) {
  const StatusHeader* header = header_of(memory);
  for (int i = 0; i < kTries; ++i) {
    const std::uint64_t before = header->version.load(std::memory_order_acquire);
    for (std::uint64_t k = 0; k < num_values; ++k) values[k] = values_of(memory)[k].load(std::memory_order_acquire);
    if (before % 2 == 0 && header->version.load(std::memory_order_relaxed) == before) return 1;
  }
  return 0;
}

}  // extern "C"
