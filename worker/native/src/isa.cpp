#include "chairlift/isa.hpp"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr unsigned kOsxsave = 1U << 27;   // leaf 1, ecx
constexpr unsigned kAmxBf16 = 1U << 22;   // leaf 7, edx
constexpr unsigned kAmxTile = 1U << 24;   // leaf 7, edx
constexpr unsigned kTileState = 3U << 17;  // of the enabled states: configuration and data
constexpr long kRequestPermission = 0x1023;
constexpr long kTileData = 18;

// Tiles are a large piece of each thread's state, so Linux wants to be asked once for the process (arch_prctl(2),
// Documentation/arch/x86/xstate.rst); without its word the first tile instruction is a fault.
bool ask_for_tiles() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kOsxsave) == 0) return false;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  unsigned low = 0;
  unsigned high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & kTileState) != kTileState) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

bool chairlift::has_isa(std::int32_t isa) {
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  static const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  static const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  static const bool amx = bf16 && ask_for_tiles();
  switch (isa) {
    case kChairliftIsaPortable: return true;
    case kChairliftIsaAvx2: return avx2;
    case kChairliftIsaAvx512: return avx512;
    case kChairliftIsaAvx512Bf16: return bf16;
    case kChairliftIsaAmx: return amx;
    default: return false;
  }
}
#else
bool chairlift::has_isa(std::int32_t isa) { return isa == kChairliftIsaPortable; }
#endif
