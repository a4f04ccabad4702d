"""The module compiled: logits of the untouched transformers model, one code for all sizes, and what a failure does."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chairlift_worker.compile_choice import CompileOptions
from chairlift_worker.executor import ModelExecutor
from chairlift_worker.faults import Faults
from chairlift_worker.graph_choice import GraphOptions
from chairlift_worker.pass_config import PassConfig
from structlog.testing import capture_logs
from support.engine import Rig, Shape, loaded
from support.paged import MAX_ROWS, some_ids
from support.passes import PassDesk
from support.tiny_models import generate_ids, reference_logits, tiny_model
from support.workloads import Job
from torch._dynamo.backends import registry
from torch._dynamo.backends.registry import register_backend
from torch._dynamo.utils import counters

TOLERANCE = 1e-4
BACKEND = "made_in_a_test"
NUM_PROBES = 2  # calls by which code of all sizes is made
EAGER = CompileOptions(backend="eager", fullgraph=True, dynamic=True)  # traces as any backend, compiles nothing
INDUCTOR = CompileOptions(fullgraph=True, dynamic=True)
# Inductor imports what torch itself has deprecated.
with_inductor = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        yield folder


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def both(options: CompileOptions, **graphs: Any) -> PassConfig:
    return PassConfig(varlen_compile=options, decode_compile=options, graphs=GraphOptions(**graphs))


def num_codes() -> int:
    """How many pieces of code the compiler has made in this test."""
    return counters["stats"]["unique_graphs"]


def registered(backend: Callable[..., Any], **options: Any) -> CompileOptions:
    """Options that name this backend."""
    register_backend(backend, name=BACKEND)
    return CompileOptions(backend=BACKEND, **options)


@pytest.fixture
def _unregistered() -> Iterator[None]:
    yield
    registry._COMPILER_FNS.pop(BACKEND, None)
    registry._BACKENDS.pop(BACKEND, None)


def counting(calls: list[int]) -> CompileOptions:
    """Like EAGER; notes the number of tokens of each call."""

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        def code(*arguments: Any) -> Any:
            calls.append(0)
            return graph(*arguments)

        return code

    return registered(backend, fullgraph=True, dynamic=True)


def steps_of_every_kind(desk: PassDesk, kind: str) -> int:
    """Steps of both paths and many sizes, one token and one row among them; each row has its sequence's own logits.

    Returns how many.
    """
    sequences = [desk.sequence(some_ids(60, seed=seed)) for seed in range(MAX_ROWS)]
    a, b, c, *_ = sequences
    steps = [
        [(a, 5)],
        [(a, 1)],
        [(a, 1), (b, 9)],
        [(a, 1), (b, 1)],
        [(a, 1), (b, 1), (c, 30)],
        *([(sequence, 1) for sequence in sequences[:count]] for count in (3, 6, 1)),
        [(sequence, 4) for sequence in sequences],
    ]
    for wanted in steps:
        logits = desk.step(*(sequence.row(size) for sequence, size in wanted))
        for (sequence, _), got in zip(wanted, logits, strict=True):
            expected = reference_logits(tiny_model(kind), sequence.tokens.tolist()[: sequence.computed])[-1]
            torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
    return len(steps)


@pytest.mark.usefixtures("_unregistered")
@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        *((kind, "native") for kind in ("llama", "gpt2", "gemma2", "gemma3", "qwen3")),
        ("llama", "sdpa"),
        ("gemma2", "eager"),
    ],
)
def test_a_traced_module_has_the_models_own_logits_from_one_code_for_all_sizes(kind: str, backend: str) -> None:
    calls: list[int] = []
    desk = PassDesk(tiny_model(kind), both(counting(calls)), backend=backend)
    with capture_logs() as logs:
        num_steps = steps_of_every_kind(desk, kind)
    assert [entry["event"] for entry in logs] == ["compiling", "compiled"]
    assert num_codes() == 1
    assert len(calls) == NUM_PROBES + num_steps, "some steps did not run the code"


@pytest.mark.usefixtures("_unregistered")
@pytest.mark.parametrize("depth", [1, 2])
def test_code_that_was_made_in_the_first_thread_serves_in_the_one_that_runs_the_steps(depth: int) -> None:
    calls: list[int] = []
    passes = PassConfig(varlen_compile=counting(calls))
    rig = Rig(loaded(tiny_model("llama")), Shape(depth=depth, passes=passes))
    ModelExecutor(runner=rig.runner, mover=rig.mover, faults=Faults("")).warm_up()
    before = len(calls)
    assert before > NUM_PROBES
    try:
        rig.add(Job(prompt=tuple(some_ids(9)), max_new_tokens=6).message(1))
        rig.run()
    finally:
        rig.close()
    assert rig.outcomes[1].ids == generate_ids(tiny_model("llama"), some_ids(9), 6).ids
    assert num_codes() == 1
    assert len(calls) == before + len(rig.executor.plans)


@with_inductor
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma3", marks=pytest.mark.full)])
def test_compiled_by_inductor_the_module_has_the_models_own_logits(kind: str, cache_home: Path) -> None:
    desk = PassDesk(tiny_model(kind), both(INDUCTOR))
    with capture_logs() as logs:
        steps_of_every_kind(desk, kind)
    assert [entry["event"] for entry in logs] == ["compiling", "compiled"]
    assert num_codes() == 1
    assert list((cache_home / "chairlift" / "inductor").iterdir())


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_second_start_with_the_same_cache_folder_makes_no_code_anew(cache_home: Path) -> None:
    script = textwrap.dedent(f"""
        import sys
        import torch
        from torch._dynamo.utils import counters
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        from chairlift_worker.compile_choice import CompileOptions
        from chairlift_worker.pass_config import PassConfig
        from support.paged import some_ids
        from support.passes import PassDesk
        from support.tiny_models import gemma3_config, write_model
        torch.set_num_threads(1)
        options = CompileOptions(fullgraph=True, dynamic=True)
        folder = write_model(__import__("pathlib").Path(sys.argv[1]), gemma3_config(num_hidden_layers=2))
        desk = PassDesk(folder, PassConfig(varlen_compile=options))
        desk.step(desk.sequence(some_ids(9)).row(9))
        made = counters["inductor"]
        print(made["fxgraph_cache_hit"], made["fxgraph_cache_miss"], counters["stats"]["unique_graphs"])
    """)

    def start(number: int) -> list[int]:
        arguments = [sys.executable, "-c", script, str(cache_home / f"model {number}")]
        environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
        done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=300, env=environment)
        return [int(word) for word in done.stdout.split()[-3:]]

    hits, misses, codes = start(1)
    assert hits + misses == codes == 1
    assert start(2) == [1, 0, 1]


def test_the_code_takes_weights_that_came_later() -> None:
    desk = PassDesk(tiny_model("untied"), both(EAGER))
    sequence = desk.sequence(some_ids(20))
    desk.step(sequence.row(5))
    head = desk.model.module.lm_head.weight
    before = head.clone()
    try:
        with torch.inference_mode():
            head.mul_(2)
        logits = desk.step(sequence.row(5))
    finally:
        with torch.inference_mode():
            head.copy_(before)
    expected = 2 * reference_logits(tiny_model("untied"), some_ids(20)[:10])[-1]
    torch.testing.assert_close(logits[0], expected, atol=2 * TOLERANCE, rtol=0)


def test_both_paths_are_compiled_while_the_worker_warms_up_and_nothing_is_afterwards() -> None:
    passes = PassConfig(varlen_compile=EAGER, decode_compile=CompileOptions(backend="eager", dynamic=True))
    rig = Rig(loaded(tiny_model("llama")), Shape(max_blocks_per_request=8, passes=passes))
    with capture_logs() as logs:
        ModelExecutor(runner=rig.runner, mover=rig.mover, faults=Faults("")).warm_up()
    assert [(entry["event"], entry["path"]) for entry in logs] == [
        (event, path) for path in ("varlen", "decode") for event in ("compiling", "compiled")
    ]
    before = num_codes()
    with capture_logs() as logs:
        for uid in range(1, 6):
            rig.add(Job(prompt=tuple(some_ids(3 * uid)), max_new_tokens=6).message(uid))
        rig.run()
    assert not logs
    assert rig.runner.steps_by_path["decode"] > 1
    assert num_codes() == before


def test_the_two_paths_have_options_of_their_own() -> None:
    desk = PassDesk(tiny_model("llama"), PassConfig(decode_compile=EAGER))
    with capture_logs() as logs:
        desk.step(desk.sequence(some_ids(9)).row(9))
        assert not logs
        steps_of_every_kind(desk, "llama")
    assert [(entry["event"], entry["path"]) for entry in logs] == [("compiling", "decode"), ("compiled", "decode")]


def test_code_of_fixed_sizes_is_made_before_anything_is_served_and_padded_to() -> None:
    options = CompileOptions(backend="eager", dynamic=False)
    desk = PassDesk(tiny_model("llama"), both(options, q_interval=256))
    with capture_logs() as logs:
        steps_of_every_kind(desk, "llama")
    # varlen: 256 and 512 tokens; decode: 2, 4 and 6 rows
    assert num_codes() == 5
    progress = [(entry["event"], entry["path"], entry.get("done")) for entry in logs if entry["event"] != "compiled"]
    assert progress == [
        ("compiling", "varlen", None),
        ("still compiling", "varlen", 1),
        ("compiling", "decode", None),
        ("still compiling", "decode", 1),
        ("still compiling", "decode", 2),
    ]
    assert [entry["codes"] for entry in logs if entry["event"] == "compiling"] == [2, 3]


@pytest.mark.parametrize("options", [EAGER, CompileOptions(backend="eager", dynamic=False)], ids=["dynamic", "static"])
def test_compiled_steps_can_be_captured_as_well(options: CompileOptions) -> None:
    passes = both(options, varlen=True, decode=True, q_interval=256, kv_interval=256)
    desk = PassDesk(tiny_model("llama"), passes, num_inputs=2)
    steps_of_every_kind(desk, "llama")
    assert desk.runner._forward.num_captured > 2


def expect_one_warning(logs: list[Any], cause: str) -> None:
    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert len(warnings) == 1
    assert "uncompiled" in warnings[0]["event"]
    assert cause in warnings[0]["cause"]
    assert "\n" not in warnings[0]["cause"]


@pytest.mark.usefixtures("_unregistered")
def test_a_backend_that_raises_leaves_the_steps_uncompiled_with_one_warning() -> None:
    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        raise RuntimeError("no such\ninstruction")

    desk = PassDesk(tiny_model("llama"), both(registered(backend, dynamic=True)))
    with capture_logs() as logs:
        steps_of_every_kind(desk, "llama")
    expect_one_warning(logs, "no such instruction")


@pytest.mark.usefixtures("_unregistered")
def test_code_that_fails_while_it_serves_is_left_for_good_and_the_step_is_made_again() -> None:
    calls = 0

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        def code(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 5:
                raise RuntimeError("broken code")
            return graph(*arguments)

        return code

    desk = PassDesk(tiny_model("llama"), both(registered(backend, dynamic=True)))
    with capture_logs() as logs:
        steps_of_every_kind(desk, "llama")
    expect_one_warning(logs, "broken code")
    assert calls == 5


@pytest.mark.usefixtures("_unregistered")
def test_code_that_finds_no_memory_says_so_and_stays() -> None:
    is_short = False

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        def code(*arguments: Any) -> Any:
            if is_short:
                raise MemoryError("for now")
            return graph(*arguments)

        return code

    desk = PassDesk(tiny_model("llama"), both(registered(backend, dynamic=True)))
    sequence = desk.sequence(some_ids(9))
    desk.step(sequence.row(3))
    before = num_codes()
    row = sequence.row(4)
    with capture_logs() as logs:
        is_short = True
        with pytest.raises(MemoryError, match="for now"):
            desk.step(row)
        is_short = False
        logits = desk.step(row)
    assert not logs
    assert num_codes() == before
    assert not desk.runner._forward._varlen.has_failed
    expected = reference_logits(tiny_model("llama"), some_ids(9)[:7])[-1]
    torch.testing.assert_close(logits[0], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (CompileOptions(backend="no_such_backend"), "no_such_backend"),
        (CompileOptions(options={"no_such_option": 1}), "no_such_option"),
    ],
)
def test_what_torch_refuses_leaves_the_steps_uncompiled_with_one_warning(options: CompileOptions, cause: str) -> None:
    desk = PassDesk(tiny_model("llama"), both(options))
    with capture_logs() as logs:
        steps_of_every_kind(desk, "llama")
    expect_one_warning(logs, cause)


@with_inductor
def test_without_a_cpp_compiler_the_steps_run_uncompiled_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    desk = PassDesk(tiny_model("llama"), both(INDUCTOR))
    with capture_logs() as logs:
        steps_of_every_kind(desk, "llama")
    expect_one_warning(logs, "compiler")


def test_what_the_model_itself_raises_is_raised_and_the_code_stays() -> None:
    desk = PassDesk(tiny_model("llama"), both(EAGER))
    sequence = desk.sequence(some_ids(9))
    desk.step(sequence.row(3))
    with capture_logs() as logs, pytest.raises(IndexError):
        desk.step(desk.sequence([10**6] * 5).row(5))
    assert not logs
    assert desk.runner._forward._varlen.is_ready
    assert not desk.runner._forward._varlen.has_failed
