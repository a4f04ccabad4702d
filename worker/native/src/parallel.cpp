// torch brings its OpenMP runtime along under a name of its own choosing, so linking one here might load a second. The
// runtime that torch resolved is asked for its entry point instead.
#include "chairlift/parallel.hpp"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#define CHAIRLIFT_API extern "C" __attribute__((visibility("default")))

namespace {

using GompParallel = void (*)(void (*body)(void*), void* context, unsigned num_threads, unsigned flags);
using NumThreads = int (*)();

struct Runtime {
  GompParallel parallel;
  NumThreads num_threads;
};

int remember_torch(dl_phdr_info* info, std::size_t, void* path) {
  if (std::strstr(info->dlpi_name, "libtorch_cpu.so") == nullptr) return 0;
  *static_cast<std::string*>(path) = info->dlpi_name;
  return 1;
}

// Found through torch's own dependencies, so it is torch's runtime whichever others are loaded. GCC's runtime and
// LLVM's both have these entries.
const Runtime* find_runtime() {
  static Runtime runtime;
  std::string path;
  dl_iterate_phdr(remember_torch, &path);
  if (path.empty()) return nullptr;
  void* torch = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (torch == nullptr) return nullptr;
  // The handle is kept: so is the library.
  const Runtime found{reinterpret_cast<GompParallel>(dlsym(torch, "GOMP_parallel")),
                      reinterpret_cast<NumThreads>(dlsym(torch, "omp_get_num_threads"))};
  if (found.parallel == nullptr || found.num_threads == nullptr) return nullptr;
  static std::once_flag once;
  std::call_once(once, [&] { runtime = found; });
  return &runtime;
}

const Runtime* torch_runtime() {
  static std::atomic<const Runtime*> known{nullptr};
  const Runtime* runtime = known.load(std::memory_order_acquire);
  if (runtime == nullptr) {
    runtime = find_runtime();  // looked for again each time while there is none: torch may come later
    known.store(runtime, std::memory_order_release);
  }
  return runtime;
}

thread_local int own_region_threads = 1;  // where no torch is loaded

}  // namespace

void chairlift::parallel_region(int num_threads, void (*body)(void*), void* context) {
  if (num_threads <= 1) {
    body(context);
    return;
  }
  if (const Runtime* runtime = torch_runtime()) {
    runtime->parallel(body, context, static_cast<unsigned>(num_threads), 0);
    return;
  }
  const auto run = [&] {
    own_region_threads = num_threads;
    body(context);
    own_region_threads = 1;
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < num_threads; ++i) {
    threads.emplace_back(run);
  }
  run();
  for (auto& thread : threads) {
    thread.join();
  }
}

int chairlift::region_threads() {
  const Runtime* runtime = torch_runtime();
  return runtime == nullptr ? own_region_threads : runtime->num_threads();
}

CHAIRLIFT_API std::int32_t chairlift_parallel_pool() { return torch_runtime() != nullptr ? 1 : 0; }
