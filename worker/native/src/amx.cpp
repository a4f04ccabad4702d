// Tiles are a large piece of each thread's state, so Linux wants to be asked once for the process (arch_prctl(2),
// Documentation/arch/x86/xstate.rst); without its word the first tile instruction is a fault.
#include "chairlift/amx.hpp"

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

bool ask() {
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

bool chairlift::has_amx() {
  static const bool has = ask();
  return has;
}
#else
bool chairlift::has_amx() { return false; }
#endif
