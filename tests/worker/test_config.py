"""How open settings are resolved."""

from typing import Any

import msgspec
import pytest
from chairlift_worker.attention.layer import LayerFacts
from chairlift_worker.compile_choice import CompileOptions
from chairlift_worker.config import ModelFacts, WorkerConfig, resolve
from chairlift_worker.host import FreeMemory
from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.setting_log import SettingError
from chairlift_worker.speculation.speculator import DraftLimits

GIB = 1 << 30
NO_GPU = dict.fromkeys(("flash_attention_2", "flash_attention_3"), "no GPU in this test")
FULL = (LayerFacts(num_kv_heads=3, head_dim=64, sliding_window=None),) * 30  # 30 * 2 * 3 * 64 * 4 = 46080 bytes a token
GEMMA = tuple(
    LayerFacts(num_kv_heads=3, head_dim=64, sliding_window=None if number % 6 == 5 else 512) for number in range(30)
)


def resolved(
    *, free: int = 16 * GIB, cores: int = 2, model: dict[str, Any] | None = None, **settings: Any
) -> WorkerConfig:
    facts: dict[str, Any] = {
        "context_len": 8192,
        "layers": FULL,
        "item_bytes": 4,
        "token_bytes": 40_000,
        "logits_bytes": 400_000,
        "dtype": "float32",
        "dtype_reason": "test",
        "attention_faults": NO_GPU,
    }
    return resolve(
        WorkerSettings(model="m", **settings),
        model=ModelFacts(**{**facts, **(model or {})}),
        memory=FreeMemory(free, "free in this test"),
        cores=cores,
    )


def reason(config: WorkerConfig, name: str) -> str:
    (entry,) = [entry for entry in config.settings if entry.name == name]
    return entry.reason


def test_on_a_large_machine_the_cache_takes_4_gib_unasked() -> None:
    config = resolved(free=100 * GIB)
    page_bytes = config.page_size * 46_080
    assert 4 * GIB - page_bytes < config.num_blocks * page_bytes <= 4 * GIB


def test_the_cache_takes_its_share_of_free_memory_after_the_buffers_are_paid_for() -> None:
    config = resolved(free=3 * GIB)
    buffers = 512 * 40_000 + 512 * 400_000
    page_bytes = 16 * 46_080
    assert config.num_blocks == (int(3 * GIB * 0.8) - buffers) // page_bytes


def test_an_int8_cache_has_a_page_for_every_68_bytes_that_a_head_takes_instead_of_256() -> None:
    """64 numbers and a float32, where float32 has 64 of those: 3.76 times as many pages, and swapped ones likewise."""
    space = {"free": 100 * GIB, "cpu_offload_space": 2.0}
    plain, rounded = resolved(**space), resolved(**space, kv_cache_dtype="int8")
    assert plain.num_blocks == 4 * GIB // (16 * 30 * 2 * 3 * 256)
    assert rounded.num_blocks == 4 * GIB // (16 * 30 * 2 * 3 * 68)
    assert plain.num_swap_blocks == 2 * GIB // (16 * 30 * 2 * 3 * 256)
    assert rounded.num_swap_blocks == 2 * GIB // (16 * 30 * 2 * 3 * 68)
    assert rounded.layout.groups[0].head_dim == 64


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_an_int8_cache_is_refused_with_a_backend_that_cannot_read_it(backend: str) -> None:
    with pytest.raises(SettingError, match=f"kv_cache_dtype = int8: attention backend {backend} cannot read it"):
        resolved(kv_cache_dtype="int8", attn_implementation=backend)
    assert not resolved(attn_implementation=backend).layout.is_int8


def test_an_int8_cache_is_refused_where_native_cannot_run() -> None:
    with pytest.raises(SettingError, match="kv_cache_dtype = int8: attention backend sdpa"):
        resolved(kv_cache_dtype="int8", model={"attention_faults": {**NO_GPU, "native": "no CPU in this test"}})


def test_a_share_that_was_set_is_not_capped() -> None:
    config = resolved(free=100 * GIB, max_memory_percent=0.5)
    assert config.num_blocks * 16 * 46_080 > 40 * GIB


def test_the_automatic_batch_is_never_under_256_tokens_but_one_set_by_hand_may_be() -> None:
    poor = {"token_bytes": 4 << 20, "logits_bytes": 1}
    assert resolved(free=2 * GIB, num_blocks=10, model=poor).max_batch_tokens == 256
    assert resolved(free=2 * GIB, max_batch_tokens=7).max_batch_tokens == 7


def test_requests_per_batch_are_clamped_to_tokens_and_pages() -> None:
    assert resolved(max_batch_tokens=8, num_blocks=100).max_requests_per_batch == 8
    assert resolved(max_batch_tokens=4096, num_blocks=10).max_requests_per_batch == 10
    assert resolved(max_batch_tokens=4096, num_blocks=5000).max_requests_per_batch == 1024
    config = resolved(max_batch_tokens=64, num_blocks=5000, max_requests_per_batch=100)
    assert config.max_requests_per_batch == 64
    assert "100 lowered" in reason(config, "max_requests_per_batch")


def test_how_long_prompts_may_make_a_step_depends_on_the_scheduler_unless_set() -> None:
    assert resolved().max_step_stretch == 4.0
    assert resolved(scheduler_type="prefill_first").max_step_stretch == 0.0
    assert resolved(scheduler_type="prefill_first", max_step_stretch=2.5).max_step_stretch == 2.5
    assert resolved(max_step_stretch=0.0).max_step_stretch == 0.0
    with pytest.raises(SettingError, match=r"max_step_stretch = 0\.5"):
        resolved(max_step_stretch=0.5)


def test_the_safety_margin_depends_on_the_scheduler_unless_set() -> None:
    assert resolved().safety_margin == 0.15
    assert resolved(scheduler_type="prefill_first").safety_margin == 0.0
    assert resolved(safety_margin=0.0).safety_margin == 0.0


def test_sharing_is_off_for_sliding_layers_and_the_reason_is_said() -> None:
    config = resolved(model={"layers": GEMMA})
    assert config.allow_block_sharing is False
    assert "sliding" in reason(config, "allow_block_sharing")
    assert resolved().allow_block_sharing is True


def test_sharing_is_off_for_layers_of_several_shapes_and_the_reason_is_said() -> None:
    config = resolved(model={"layers": (*FULL, LayerFacts(num_kv_heads=1, head_dim=64, sliding_window=None))})
    assert config.allow_block_sharing is False
    assert "differ in shape" in reason(config, "allow_block_sharing")


def test_a_block_of_a_model_with_several_kinds_of_layers_is_a_sector_and_its_setting_says_of_what() -> None:
    config = resolved(num_blocks=100, model={"layers": GEMMA, "context_len": 100_000})
    assert config.layout.sector_elements * 4 == 16 * 25 * 2 * 3 * 64 * 4  # 25 sliding layers, or 5 times 5 full ones
    assert "80 tokens of the 5 layers with full attention or 16 tokens of the 25" in reason(config, "num_blocks")


def test_the_capacity_of_sliding_layers_is_bounded_by_the_context_alone_once_the_window_fits() -> None:
    mistral = (LayerFacts(num_kv_heads=3, head_dim=64, sliding_window=100),) * 30
    model = {"layers": mistral, "context_len": 32_768}
    # 99 tokens before a step of 64: 163 in a row touch at most 12 pages of 16
    assert resolved(num_blocks=12, max_prefill_chunk=64, model=model).cache_len == 32_768
    assert resolved(num_blocks=11, max_prefill_chunk=64, model=model).cache_len == 176


def test_the_capacity_of_mixed_layers_is_what_the_full_ones_have_beside_the_windows() -> None:
    # a window of 512 and steps of 64: 575 tokens in a row touch at most 37 pages of 16; each sector has 80 full tokens
    config = resolved(num_blocks=100, max_prefill_chunk=64, model={"layers": GEMMA, "context_len": 100_000})
    assert config.cache_len == (100 - 37) * 80


def test_so_few_blocks_that_no_request_fits_are_refused() -> None:
    with pytest.raises(SettingError, match="num_blocks = 1: a request of this model takes at least 2"):
        resolved(num_blocks=1, model={"layers": GEMMA})


def test_a_cache_that_cannot_be_had_is_an_error_that_names_setting_and_value() -> None:
    with pytest.raises(SettingError, match="num_blocks = 1000000: "):
        resolved(free=GIB, num_blocks=1_000_000)
    with pytest.raises(SettingError, match=r"max_memory_percent = 0.8: .* not one page"):
        resolved(free=1000)


def test_the_capacity_is_what_the_pages_hold() -> None:
    assert resolved(num_blocks=7, page_size=32).cache_len == 224


def test_every_setting_is_listed_once_with_a_reason() -> None:
    config = resolved()
    names = [entry.name for entry in config.settings]
    assert len(set(names)) == len(names)
    assert all(entry.reason for entry in config.settings)
    missing = set(WorkerSettings.__struct_fields__) - set(names) - {"max_context", "fault_injection"}
    assert not missing


def test_passes_are_neither_compiled_nor_captured_unless_asked_for() -> None:
    config = resolved()
    assert config.passes.are_plain
    shown = {entry.name: entry.value for entry in config.settings}
    assert shown["use_cuda_graph"] == "False"
    assert (shown["varlen_compile_config"], shown["decode_compile_config"]) == ("None", "None")
    assert shown["default_compile_level"] == "0"


def test_an_explicit_compile_config_wins_over_the_level_on_its_path_only() -> None:
    config = resolved(default_compile_level=2, varlen_compile_config="backend=eager")
    assert config.passes.varlen_compile == CompileOptions(backend="eager")
    assert config.passes.decode_compile == CompileOptions(mode="max-autotune-no-cudagraphs", dynamic=True)
    assert reason(config, "decode_compile_config") == "default_compile_level 2"
    assert not config.passes.are_plain


def test_under_flash_attention_a_level_does_not_compile_the_varlen_path() -> None:
    config = resolved(default_compile_level=1, model={"attention_faults": {"flash_attention_3": "not installed"}})
    assert config.attn_implementation == "flash_attention_2"
    assert config.passes.varlen_compile is None
    assert "flash_attention_2" in reason(config, "varlen_compile_config")


def test_models_with_windows_have_no_decode_path_to_compile_or_to_capture() -> None:
    config = resolved(
        use_cuda_graph=True, default_compile_level=1, decode_compile_config="mode=default", model={"layers": GEMMA}
    )
    assert config.passes.graphs.varlen
    assert not config.passes.graphs.decode
    assert config.passes.varlen_compile is not None
    assert config.passes.decode_compile is None
    assert [warning for warning in config.warnings if "decode_compile_config = mode=default is not used" in warning]


def test_a_padding_interval_alone_turns_graphs_on() -> None:
    config = resolved(q_padding_interval_size=32)
    assert (config.passes.graphs.q_interval, config.passes.graphs.kv_interval) == (32, 16_384)
    assert config.passes.graphs.varlen
    assert config.passes.graphs.decode
    assert resolved(q_padding_interval_size=32, use_cuda_graph=False).passes.graphs.are_on is False


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"varlen_compile_config": "speed=9"}, "varlen_compile_config = speed=9: .*`speed`"),
        ({"decode_compile_config": "mode=quick"}, "decode_compile_config = mode=quick: "),
        ({"use_cuda_graph": True, "attn_implementation": "sdpa"}, "use_cuda_graph = True: attention backend sdpa"),
    ],
)
def test_what_cannot_be_compiled_or_captured_is_refused_by_name(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingError, match=told):
        resolved(**settings)


def test_there_are_no_drafts_unless_asked_for() -> None:
    assert resolved().drafts is None
    assert resolved(speculative="ngram").drafts == DraftLimits(num_tokens=7, min_len=2, max_len=4)
    limits = DraftLimits(num_tokens=3, min_len=1, max_len=1)
    asked = {"speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 1}
    assert resolved(speculative="ngram", **asked).drafts == limits


def test_with_async_batching_drafts_are_off_and_the_user_is_told() -> None:
    config = resolved(speculative="ngram", use_async_batching=True)
    assert config.drafts is None
    assert {entry.name: entry.value for entry in config.settings}["speculative"] == "none"
    assert [warning for warning in config.warnings if warning.startswith("speculative = ngram is not used: ")]


def test_a_shortest_match_longer_than_the_longest_is_refused() -> None:
    with pytest.raises(SettingError, match="prompt_lookup_min = 5: prompt_lookup_max is 4"):
        resolved(speculative="ngram", prompt_lookup_min=5)


def test_logits_of_drafts_and_of_judged_prompts_are_paid_for_before_the_cache_is() -> None:
    page_bytes = 16 * 46_080
    buffers = 512 * 40_000 + (8 * 10 + 128) * 400_000
    config = resolved(free=3 * GIB, speculative="ngram", max_requests_per_batch=10)
    assert config.num_blocks == (int(3 * GIB * 0.8) - buffers) // page_bytes


def test_ranks_share_what_the_machine_has() -> None:
    """Three ranks with a third of the heads, and of the memory, each: as many pages as one rank has."""
    shares = {"layers": (LayerFacts(num_kv_heads=1, head_dim=64, sliding_window=None),) * 30}
    alone = resolved(free=100 * GIB, cpu_offload_space=1.5)
    free = FreeMemory(100 * GIB, "free in this test").shared_by(3)
    assert free.num_bytes == 100 * GIB // 3
    split = resolved(free=free.num_bytes, model=shares, tp_size=3, cpu_offload_space=1.5)
    assert split.num_blocks == alone.num_blocks
    assert split.num_swap_blocks == alone.num_swap_blocks
    assert split.layout.sector_elements * 3 == alone.layout.sector_elements


@pytest.mark.parametrize(
    "settings", [{}, {"speculative": "ngram", "cpu_offload_space": 0.5}, {"kv_cache_dtype": "int8"}]
)
def test_other_ranks_read_the_resolved_settings_as_they_are(settings: dict[str, Any]) -> None:
    config = resolved(model={"layers": GEMMA}, tp_size=3, **settings)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=WorkerConfig) == config
