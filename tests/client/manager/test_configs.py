from __future__ import annotations

import logging
from collections.abc import Sequence

import chairlift_client as cl
import pytest
import transformers
from chairlift_client import ContinuousBatchingConfig, GenerationConfig, connect
from chairlift_client.manager import _batching_config, _generation_config
from chairlift_client.testing import FakeServer

SETTINGS = [
    cl.Setting("page_size", "16", "set"),
    cl.Setting("max_memory_percent", "0.8", "set"),
    cl.Setting("scheduler_type", "fifo", "default"),
    cl.Setting("allow_block_sharing", "true", "default"),
    cl.Setting("max_batch_tokens", "512", "free memory"),
]


def options(config: object, *, model_eos_token_ids: Sequence[int] = (), **own: object) -> dict[str, object]:
    found = _generation_config.request_options(
        config, max_new_tokens=None, eos_token_id=None, overrides=own, model_eos_token_ids=model_eos_token_ids
    )
    return {name: value for name, value in found.items() if value is not None}


def test_our_config_and_transformers_give_the_same_request() -> None:
    fields = {"max_new_tokens": 5, "eos_token_id": [3, 4], "do_sample": True, "temperature": 0.7, "top_k": 9}
    expected = {"max_new_tokens": 5, "stop_token_ids": [3, 4], "ignore_eos": True, "temperature": 0.7, "top_k": 9}
    assert options(GenerationConfig(**fields)) == expected
    assert options(transformers.GenerationConfig(**fields)) == expected


@pytest.mark.parametrize(
    ("config", "own", "expected"),
    [
        ({}, {}, {}),
        ({"do_sample": False}, {}, {"temperature": 0.0}),
        ({"do_sample": False, "top_k": 5}, {}, {"temperature": 0.0, "top_k": 5}),
        ({"do_sample": True}, {}, {"temperature": 1.0}),
        ({"temperature": 0.5}, {}, {"temperature": 0.5}),
        ({"temperature": 0.5, "top_p": 0.5}, {"temperature": 0.25}, {"temperature": 0.25, "top_p": 0.5}),
        ({"do_sample": False}, {"temperature": 0.25}, {"temperature": 0.25}),
        ({"do_sample": False}, {"top_k": 3}, {"top_k": 3}),
        ({"do_sample": False}, {"seed": 3}, {"temperature": 0.0, "seed": 3}),
        ({"eos_token_id": -1}, {}, {"stop_token_ids": [], "ignore_eos": True}),
    ],
)
def test_what_a_request_names_itself_wins_over_the_config(
    config: dict[str, object], own: dict[str, object], expected: dict[str, object]
) -> None:
    assert options(GenerationConfig(**config), **own) == expected


PROCESSORS = {
    "repetition_penalty": 1.5,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[5, 6], [9], [8]],
    "suppress_tokens": [4],
    "sequence_bias": [[[7], -1.5], [[3], 2.0]],
}


@pytest.mark.parametrize("kind", [GenerationConfig, transformers.GenerationConfig])
def test_processors_are_asked_for_by_transformers_names(kind: type) -> None:
    config = kind(**PROCESSORS)
    _generation_config.check_generation_config(config)
    asked = options(config, model_eos_token_ids=[9])
    expected = {
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 2,
        "banned_sequences": [[5, 6], [8]],  # to transformers EOS is no bad word
        "banned_token_ids": [4],
        "logit_bias": {7: -1.5, 3: 2.0},
    }
    assert {name: asked[name] for name in expected} == expected
    assert options(kind(bad_words_ids=[[9], [8]], eos_token_id=8))["banned_sequences"] == [[9]]
    assert options(kind(sequence_bias={(7,): -1.5}))["logit_bias"] == {7: -1.5}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"min_new_tokens": 0}, 0),
        ({"min_new_tokens": 3}, 3),
        ({"min_length": 12}, 7),
        ({"min_length": 4}, 0),
        ({"min_length": 12, "min_new_tokens": 3}, 3),
    ],
)
def test_the_least_length_is_counted_as_transformers_counts_it(config: dict, expected: int | None) -> None:
    for kind in (GenerationConfig, transformers.GenerationConfig):
        assert _generation_config.min_new_tokens(kind(**config), num_prompt_tokens=5) == expected


def test_a_request_cannot_name_what_is_no_sampling_parameter() -> None:
    with pytest.raises(TypeError, match="repetition_penalty"):
        options(GenerationConfig(), repetition_penalty=1.5)


def test_stop_strings_end_a_generation_and_stay_in_its_text_as_in_transformers() -> None:
    config = transformers.GenerationConfig(stop_strings=["x", "y"])
    _generation_config.check_generation_config(config)
    asked = options(config)
    assert (asked["stop"], asked["include_stop"]) == (["x", "y"], True)
    assert options(GenerationConfig()) == {}


@pytest.mark.parametrize(
    "entry",
    [
        {"encoder_repetition_penalty": 1.5},
        {"num_beams": 4},
        {"num_return_sequences": 2},
        {"max_length": 100},
        {"begin_suppress_tokens": [1]},
        {"sequence_bias": {(1, 2): 0.5}},
        {"max_time": 3.0},
        {"output_scores": True},
        {"an_entry_of_the_future": 1},
    ],
)
def test_an_entry_that_the_service_cannot_honour_is_refused_by_name(entry: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(entry))):
        _generation_config.check_generation_config(transformers.GenerationConfig(**entry))


def test_entries_that_ask_for_nothing_pass() -> None:
    _generation_config.check_generation_config(transformers.GenerationConfig())
    _generation_config.check_generation_config(
        transformers.GenerationConfig(
            repetition_penalty=1.0, num_beams=1, num_return_sequences=1, use_cache=True, pad_token_id=0, bos_token_id=1
        )
    )


def test_greedy_with_a_temperature_is_greedy_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _generation_config.check_generation_config(GenerationConfig(do_sample=False, temperature=0.7))
    assert "greedily" in caplog.text
    assert options(GenerationConfig(do_sample=False, temperature=0.7)) == {"temperature": 0.0}


def test_seeds_differ_between_the_requests_of_a_batch(server: FakeServer) -> None:
    server.allow_tokens(0)
    with connect(server.target).continuous_batching_context_manager(GenerationConfig(seed=40)) as manager:
        ids = manager.add_requests([[1], [1]])
        own = manager.add_request([1], seed=7)
        seeds = {name: request.message.seed for name, request in server._engine.requests.items()}
        server.allow_tokens(None)
    assert [seeds[ids[0]], seeds[ids[1]], seeds[own or ""]] == [40, 41, 7]


@pytest.mark.parametrize("kind", [ContinuousBatchingConfig, transformers.generation.ContinuousBatchingConfig])
@pytest.mark.parametrize(
    "stated",
    [
        {},
        {"page_size": 16},
        {"max_memory_percent": 0.8, "page_size": 16, "scheduler_type": "fifo"},
        {"allow_block_sharing": True, "max_batch_tokens": 512},
        {"per_request_processors": True, "use_cuda_graph": False, "cpu_offload_space": 0.0},
        {"num_blocks": None, "safety_margin": None},
    ],
)
def test_what_holds_in_the_service_may_be_stated(kind: type, stated: dict[str, object]) -> None:
    assert _batching_config.compare(kind(**stated), SETTINGS) == _batching_config.SessionConfig()


@pytest.mark.parametrize("kind", [ContinuousBatchingConfig, transformers.generation.ContinuousBatchingConfig])
@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ({"page_size": 128}, "page_size is 16, not 128"),
        ({"scheduler_type": "prefill_first"}, "scheduler_type is fifo, not prefill_first"),
        ({"allow_block_sharing": False}, "allow_block_sharing is true, not False"),
        ({"max_memory_percent": 0.5, "max_batch_tokens": 1}, "max_batch_tokens is 512, not 1"),
        ({"use_cuda_graph": True}, "use_cuda_graph=True is not something that this service can do"),
        ({"cpu_offload_space": 8.0}, "cpu_offload_space=8.0 is not something"),
        ({"cpu_offload_space": None}, "cpu_offload_space=None is not something"),
        ({"max_blocks_per_request": 64}, "max_blocks_per_request=64"),
    ],
)
def test_a_difference_from_the_service_is_refused_by_name(kind: type, stated: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        _batching_config.compare(kind(**stated), SETTINGS)


def test_a_default_of_transformers_counts_as_not_stated_but_ours_as_stated() -> None:
    _batching_config.compare(transformers.generation.ContinuousBatchingConfig(page_size=256), SETTINGS)
    with pytest.raises(ValueError, match="page_size is 16, not 256"):
        _batching_config.compare(ContinuousBatchingConfig(page_size=256), SETTINGS)


def test_our_config_has_every_field_of_transformers_that_is_not_deprecated() -> None:
    theirs = set(transformers.generation.ContinuousBatchingConfig.__dataclass_fields__)
    ours = set(ContinuousBatchingConfig.__dataclass_fields__)
    assert theirs - ours == {"use_default_compile_configs", "max_cached_graphs"}
    assert ours <= theirs


def test_a_page_below_four_tokens_and_the_old_name_of_the_page_are_told() -> None:
    with pytest.raises(ValueError, match="at least 4"):
        ContinuousBatchingConfig(page_size=3)
    with pytest.warns(FutureWarning, match="page_size"):
        old = ContinuousBatchingConfig(block_size=16)
    assert _batching_config.compare(old, SETTINGS)


def test_return_logprobs_and_seed_are_the_managers_own(server: FakeServer) -> None:
    config = ContinuousBatchingConfig(return_logprobs=True, seed=100)
    outputs = connect(server.target).generate_batch([[1], [2]], continuous_batching_config=config, max_new_tokens=3)
    assert [o.logprobs for o in outputs.values()] == [[0, -0.125, -0.25]] * 2


def test_a_difference_is_found_before_anything_is_added(server: FakeServer) -> None:
    model = connect(server.target)
    with pytest.raises(ValueError, match="page_size"):
        model.generate_batch([[1]], continuous_batching_config=ContinuousBatchingConfig(page_size=16))
    assert server.request_ids == []


COMPILED = '{"backend":"inductor","mode":"default","fullgraph":false,"dynamic":true,"options":null}'
PASSES = [
    cl.Setting("use_cuda_graph", "False", "default"),
    cl.Setting("q_padding_interval_size", "64", "default"),
    cl.Setting("default_compile_level", "1", "set"),
    cl.Setting("varlen_compile_config", COMPILED, "default_compile_level 1"),
    cl.Setting("decode_compile_config", "None", "the decode fast path is off"),
]


@pytest.mark.parametrize("kind", [ContinuousBatchingConfig, transformers.generation.ContinuousBatchingConfig])
def test_how_passes_are_run_may_be_stated_as_transformers_states_it(kind: type) -> None:
    compiled = transformers.CompileConfig(mode="default", dynamic=True)
    for config in (
        {"use_cuda_graph": (False, False), "q_padding_interval_size": 0, "default_compile_level": 1},
        {"use_cuda_graph": False, "varlen_compile_config": compiled, "decode_compile_config": None},
    ):
        _batching_config.compare(kind(**config), PASSES)
    for config, told in (
        ({"use_cuda_graph": (True, False)}, r"use_cuda_graph is False, not \(True, False\)"),
        ({"use_cuda_graph": (True, True)}, r"use_cuda_graph is False, not \(True, True\)"),
        ({"q_padding_interval_size": 32}, "q_padding_interval_size is 64, not 32"),
        ({"varlen_compile_config": transformers.CompileConfig()}, "varlen_compile_config is {"),
        ({"decode_compile_config": compiled}, "decode_compile_config is None"),
    ):
        with pytest.raises(ValueError, match=told):
            _batching_config.compare(kind(**config), PASSES)
