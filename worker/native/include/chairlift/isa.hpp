// Instruction sets: what this processor has, and the tables of functions that are compiled for each.
//
// A file that is compiled for an instruction set (CMakeLists.txt) offers a table, a constant, and no function: whether
// the processor has the set is asked here, by code for any processor, before anything of that file runs.
#pragma once

#include <cstdint>

#include "chairlift/attention.hpp"

namespace chairlift {

bool has_isa(std::int32_t isa);

// The table of an instruction set, by its number; null if the build or the processor lacks it.
template <class Kernels>
const Kernels* table_for(const Kernels* const (&tables)[kChairliftIsaAmx + 1], std::int32_t isa) {
  const auto usable = [&](std::int32_t number) { return tables[number] != nullptr && has_isa(number); };
  if (isa == kChairliftIsaBest) {
    for (std::int32_t best = kChairliftIsaAmx; best >= kChairliftIsaPortable; --best) {
      if (usable(best)) return tables[best];
    }
  }
  return isa >= kChairliftIsaPortable && isa <= kChairliftIsaAmx && usable(isa) ? tables[isa] : nullptr;
}

}  // namespace chairlift
