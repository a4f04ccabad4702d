"""Generated gRPC stubs of Chairlift's API: `chairlift.v1`."""
