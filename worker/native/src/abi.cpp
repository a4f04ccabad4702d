extern "C" __attribute__((visibility("default"))) int chairlift_abi_version() { return 1; }
