// torch brings its OpenMP runtime along under a name of its own choosing, so linking one here might load a second. The
// runtime that torch resolved is asked for its entry point instead.
#include "chairlift/parallel.hpp"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#define CHAIRLIFT_API extern "C" __attribute__((visibility("default")))

namespace {

using GompParallel = void (*)(void (*body)(void*), void* context, unsigned num_threads, unsigned flags);

int remember_torch(dl_phdr_info* info, std::size_t, void* path) {
  if (std::strstr(info->dlpi_name, "libtorch_cpu.so") == nullptr) return 0;
  *static_cast<std::string*>(path) = info->dlpi_name;
  return 1;
}

// Found through torch's own dependencies, so it is torch's runtime whichever others are loaded. GCC's runtime and
// LLVM's both have this entry.
GompParallel find_entry() {
  std::string path;
  dl_iterate_phdr(remember_torch, &path);
  if (path.empty()) return nullptr;
  void* torch = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (torch == nullptr) return nullptr;
  return reinterpret_cast<GompParallel>(dlsym(torch, "GOMP_parallel"));  // the handle is kept: so is the library
}

GompParallel entry() {
  static std::atomic<GompParallel> found{nullptr};
  GompParallel gomp = found.load(std::memory_order_acquire);
  if (gomp == nullptr) {
    gomp = find_entry();  // looked for again each time while there is none: torch may come later
    found.store(gomp, std::memory_order_release);
  }
  return gomp;
}

}  // namespace

void chairlift::parallel_region(int num_threads, void (*body)(void*), void* context) {
  if (num_threads <= 1) {
    body(context);
    return;
  }
  if (const GompParallel gomp = entry()) {
    gomp(body, context, static_cast<unsigned>(num_threads), 0);
    return;
  }
  std::vector<std::thread> threads;
  for (int i = 1; i < num_threads; ++i) {
    threads.emplace_back(body, context);
  }
  body(context);
  for (auto& thread : threads) {
    thread.join();
  }
}

CHAIRLIFT_API std::int32_t chairlift_parallel_pool() { return entry() != nullptr ? 1 : 0; }
