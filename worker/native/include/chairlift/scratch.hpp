// Memory that is kept from call to call and only grows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

namespace chairlift {

// At least as many elements as asked for, aligned to a cache line; what was in them is lost when it grows.
template <class T>
class Scratch {
 public:
  T* reserve(std::int64_t count) {
    if (count > capacity_) {
      const auto bytes = static_cast<std::size_t>(count) * sizeof(T);
      memory_.reset(static_cast<T*>(::operator new(bytes, std::align_val_t{64})));
      std::memset(static_cast<void*>(memory_.get()), 0, bytes);
      capacity_ = count;
    }
    return memory_.get();
  }

 private:
  struct Delete {
    void operator()(T* memory) const { ::operator delete(memory, std::align_val_t{64}); }
  };
  std::unique_ptr<T, Delete> memory_;
  std::int64_t capacity_ = 0;
};

}  // namespace chairlift
