// Parallel regions in the OpenMP pool that torch uses: a second pool would fight the first one for the cores.
#pragma once

#include <cstdint>

namespace chairlift {

// Runs body(context) in each of num_threads threads, the caller's among them, and returns when all are done. The body
// must not throw. Give torch's own number of threads, or 1, which involves no pool.
void parallel_region(int num_threads, void (*body)(void*), void* context);

// In a body: how many threads run it. They may be fewer than were asked for, where OpenMP is told to have fewer.
int region_threads();

}  // namespace chairlift

extern "C" {

// Whose threads run the regions: 1 torch's OpenMP pool; 0 threads started for each region, because no torch is loaded.
std::int32_t chairlift_parallel_pool();

}  // extern "C"
