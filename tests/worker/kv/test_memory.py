"""What a request holds of each group's sectors, and when it goes back."""

import pytest
from chairlift_worker.kv.memory import PagedMemory
from chairlift_worker.kv.sharing import NOTHING
from chairlift_worker.request import Request
from support.layouts import layout_of
from support.scheduling import add_message


def memory_of(*windows: int | None, num_pages: int = 20, page_size: int = 4) -> PagedMemory:
    return PagedMemory(num_pages=num_pages, layout=layout_of(*windows, page_size=page_size), sharing=False)


def attached(memory: PagedMemory, *, prompt_len: int = 40, uid: int = 1, max_new_tokens: int = 4) -> Request:
    request = Request(add_message(uid, list(range(prompt_len)), max_new_tokens))
    memory.attach(request, NOTHING)
    return request


def compute(memory: PagedMemory, request: Request, num_tokens: int) -> None:
    assert memory.grow(request, request.computed + num_tokens)
    memory.check([request])
    request.computed += num_tokens
    memory.commit(request)
    memory.check([request])


def test_what_the_window_leaves_behind_goes_back_and_the_rest_stays() -> None:
    memory = memory_of(None, 10)
    request = attached(memory)
    compute(memory, request, 20)
    full, sliding = request.table.sectors
    assert (len(full), len(sliding)) == (5, 5)
    assert -1 not in full
    # the next token is at position 20 and sees 11 to 20: the pages of 0-3 and 4-7 are done with
    assert sliding.tolist()[:2] == [-1, -1]
    assert -1 not in sliding.tolist()[2:]
    assert request.table.num_held == 8
    assert memory.pool.num_free == 20 - 8
    compute(memory, request, 1)  # now 12 to 21
    assert sliding.tolist()[:3] == [-1, -1, -1]


def test_every_token_sees_its_whole_window_and_a_page_goes_back_as_soon_as_it_may() -> None:
    memory = memory_of(7, page_size=3)
    request = attached(memory)
    for computed in range(1, 41):
        compute(memory, request, 1)
        kept = {place for place, sector in enumerate(request.table.sectors[0]) if sector >= 0}
        seen = {position // 3 for position in range(max(0, computed - 6), computed)}  # by the token that comes next
        assert kept == seen


def test_growing_is_all_or_nothing_over_the_groups() -> None:
    memory = memory_of(None, 10, num_pages=5)
    request = attached(memory)
    assert not memory.grow(request, 12)  # 3 pages of each
    assert request.table.num_held == 0
    assert memory.grow(request, 8)
    assert memory.pool.num_free == 1
    assert not memory.grow(request, 9)
    assert memory.pool.num_free == 1


def test_sectors_that_one_kind_of_layers_gives_back_serve_the_other() -> None:
    memory = memory_of(None, 4, num_pages=7)
    request = attached(memory, prompt_len=24)
    for _ in range(20):  # 20 tokens: 5 pages of full attention, and 1 or 2 of the window of 4
        compute(memory, request, 1)
    assert request.table.num_held == 5 + 1


def test_a_released_request_holds_nothing_and_its_sectors_are_free_once() -> None:
    memory = memory_of(None, 5, 9)
    request = attached(memory)
    compute(memory, request, 24)
    assert memory.pool.num_free < 20
    table = request.table
    memory.release(request)
    assert memory.pool.num_free == 20
    assert request.table.num_held == request.computed == 0
    assert request.table is not table
    assert table.sectors[0].tolist() != [], "a plan in flight can still read it"
    memory.check([])


def test_demand_counts_for_each_group_what_is_not_held_yet() -> None:
    memory = memory_of(None, 10)
    request = Request(add_message(1, list(range(40)), 21))  # 60 slots in the end
    # full: 10 pages now, 15 at most; window: 9 + 8 tokens in a row touch at most 5 pages of 4
    assert memory.demand([request], 8) == 10 + 5
    assert memory.demand_at_most([request], 8) == 15 + 5
    memory.attach(request, NOTHING)
    assert memory.grow(request, 8)
    assert memory.demand([request], 8) == 8 + 3
    assert memory.demand_at_most([request], 8) == 13 + 3
    request.computed = 8
    memory.commit(request)
    compute(memory, request, 8)  # holds 4 full pages, and of the window those of 7 to 15: 3
    assert memory.demand([request], 8) == 6 + 2
    assert memory.demand_at_most([request], 8) == 11 + 2


def test_a_memory_of_several_kinds_of_layers_does_not_share_prefixes() -> None:
    with pytest.raises(ValueError, match="prefix sharing"):
        PagedMemory(num_pages=4, layout=layout_of(None, 5), sharing=True)


def test_the_check_finds_a_sector_in_two_tables() -> None:
    memory = memory_of(None, 5)
    one, two = attached(memory), attached(memory, uid=2)
    compute(memory, one, 4)
    assert memory.grow(two, 4)
    two.table.sectors[1][0] = one.table.sectors[0][0]
    with pytest.raises(AssertionError, match="a sector is in two tables of no family"):
        memory.check([one, two])
    two.table.sectors[0][0] = two.table.sectors[1][0]
    with pytest.raises(AssertionError, match="holds a sector twice"):
        memory.check([one, two])


def test_the_check_finds_a_sector_that_went_back_too_early_or_too_late() -> None:
    memory = memory_of(5)
    request = attached(memory)
    compute(memory, request, 20)
    request.computed -= 8
    with pytest.raises(AssertionError, match="below its window"):
        memory.check([request])
    request.computed += 16
    with pytest.raises(AssertionError, match="lacks pages"):
        memory.check([request])


def test_the_check_finds_a_lost_sector() -> None:
    memory = memory_of(None, 5)
    request = attached(memory)
    compute(memory, request, 4)
    with pytest.raises(AssertionError, match="is counted wrongly"):
        memory.check([])
