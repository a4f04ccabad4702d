from chairlift_worker.swap.policy import SwapCosts
from chairlift_worker.swap.sizing import size_pool

GIB = 1 << 30


def test_the_cheaper_way_is_taken() -> None:
    costs = SwapCosts(token_ns=1000.0, sector_ns=5000.0)  # a sector there and back costs ten tokens
    assert costs.prefers_swap(num_tokens=16, num_sectors=1)
    assert not costs.prefers_swap(num_tokens=10, num_sectors=1)
    assert not costs.prefers_swap(num_tokens=16, num_sectors=2)


def test_sizes() -> None:
    def size(space, available=10 * GIB, threshold=0.8):
        return size_pool(space=space, threshold=threshold, available_bytes=available, sector_bytes=1 << 20)

    assert size(0.0)[0] == 0
    assert size(2.0)[0] == 2048
    number, reason = size(9.0)
    assert number == 8 * 1024
    assert "9.0 GiB lowered" in reason
    assert size("auto")[0] == 8 * 1024
    assert size("auto", threshold=0.5)[0] == 5 * 1024
    assert size("auto", available=-5)[0] == 0
