"""Which backend is taken, and when the decode fast path is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chairlift_worker.attention.choice import Chosen, choose_backend, choose_max_blocks, find_faults
from support.layouts import layout_of

CPU = find_faults(device=torch.device("cpu"), dtype=torch.float32)
FLASH_2 = {"native": "the model is on a GPU", "flash_attention_3": "not installed"}
FLASH_3 = {"native": "the model is on a GPU"}
NO_FLASH = FLASH_2 | {"flash_attention_2": "not installed"}


@pytest.mark.parametrize(
    ("asked", "faults", "auto_switch", "taken", "warned"),
    [
        ("auto", CPU, True, "native", False),
        ("native", CPU, True, "native", False),
        ("sdpa", CPU, True, "sdpa", False),
        ("eager", CPU, True, "eager", False),
        ("paged|eager", CPU, True, "eager", False),
        ("paged|eager", CPU, False, "eager", False),
        ("sdpa", FLASH_2, True, "flash_attention_2", True),
        ("paged|eager", FLASH_2, True, "flash_attention_2", True),
        ("eager", FLASH_3, True, "flash_attention_3", True),
        ("sdpa", FLASH_3, False, "sdpa", False),
        ("paged|eager", FLASH_3, False, "eager", False),
        ("sdpa", NO_FLASH, True, "sdpa", False),
        ("flash_attention_2", FLASH_3, True, "flash_attention_2", False),
        ("auto", FLASH_3, False, "flash_attention_3", False),
        ("auto", FLASH_2, True, "flash_attention_2", False),
        ("auto", NO_FLASH, True, "sdpa", False),
    ],
)
def test_the_backend_is_what_was_asked_or_the_best_there_is(
    asked: str, faults: dict[str, str], auto_switch: bool, taken: str, warned: bool
) -> None:
    chosen = choose_backend(asked, auto_switch=auto_switch, faults=faults)
    assert chosen.value == taken
    assert chosen.reason
    assert (chosen.warning is not None) == warned
    if chosen.warning:
        assert asked in chosen.warning
        assert taken in chosen.warning
        assert "auto_switch_to_flash" in chosen.warning


@pytest.mark.parametrize("asked", ["flash_attention_2", "flash_attention_3"])
def test_flash_attention_is_refused_by_name_without_a_gpu(asked: str) -> None:
    with pytest.raises(ValueError, match=rf"attn_implementation = {asked}: cannot run here: .* needs a GPU"):
        choose_backend(asked, auto_switch=True, faults=CPU)


def test_the_native_backend_has_no_float16_and_the_default_then_says_why_it_is_another() -> None:
    faults = find_faults(device=torch.device("cpu"), dtype=torch.float16)
    with pytest.raises(ValueError, match=r"attn_implementation = native: .* not in float16"):
        choose_backend("native", auto_switch=True, faults=faults)
    chosen = choose_backend("auto", auto_switch=True, faults=faults)
    assert chosen.value == "sdpa"
    assert "not in float16" in chosen.reason


def max_blocks(
    asked: int | None = None, *, backend: str = "native", windows: tuple[int | None, ...] = (None,), **lengths: Any
) -> Chosen[int]:
    return choose_max_blocks(
        asked,
        backend=backend,
        layout=layout_of(*windows, page_size=16),
        context_len=8192,
        max_lengths=(lengths.get("prompt"), lengths.get("generated")),
    )


def test_block_tables_have_room_for_the_longest_request_or_32_blocks() -> None:
    assert max_blocks().value == 32
    assert max_blocks(prompt=1000).value == 32
    assert max_blocks(generated=1000).value == 32
    assert max_blocks(prompt=1000, generated=24).value == 64
    assert max_blocks(prompt=1000, generated=25).value == 65
    assert max_blocks(7, prompt=1000, generated=25).value == 7
    assert max_blocks(0, prompt=1000, generated=25).value == 0
    assert max_blocks(10**9).value == 8192 // 16
    assert all(chosen.warning is None for chosen in (max_blocks(), max_blocks(0), max_blocks(7)))


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ({"windows": (None, 5)}, "sliding-window layers"),
        ({"windows": (5,)}, "sliding-window layers"),
        ({"backend": "sdpa"}, "sdpa does not read block tables"),
        ({"backend": "eager"}, "eager does not read block tables"),
    ],
)
def test_where_there_is_no_fast_path_it_is_off_and_only_who_asked_for_it_is_warned(where: dict, why: str) -> None:
    for asked in (None, 0, 9):
        chosen = max_blocks(asked, **where)
        assert chosen.value == 0
        assert why in chosen.reason
        assert (chosen.warning is not None) == (asked == 9)
    assert "max_blocks_per_request = 9" in str(chosen.warning)
    assert why in str(chosen.warning)
