// Raised whenever a function or a layout in shared memory changes, so that a stale library is refused by name.
extern "C" __attribute__((visibility("default"))) int chairlift_abi_version() { return 5; }
