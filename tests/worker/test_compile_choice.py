"""What is compiled, by level, explicit config and backend; transformers' own meaning of the levels is the reference."""

import pytest
from chairlift_worker.compile_choice import CompileOptions, choose_compile, of_level, parse_options
from transformers import CompileConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.initialization import resolve_compile_configs


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("is_flash", [False, True])
def test_a_level_means_what_it_means_in_transformers(level: int, is_flash: bool) -> None:
    theirs = ContinuousBatchingConfig(default_compile_level=level)
    resolve_compile_configs(theirs, None, is_flash_attn=is_flash, decode_fast_path_available=True)
    backend = "flash_attention_2" if is_flash else "native"
    for path, their in (("varlen", theirs.varlen_compile_config), ("decode", theirs.decode_compile_config)):
        ours = choose_compile(None, level=level, path=path, backend=backend, has_fast_path=True).value
        assert (ours is None) == (their is None)
        if ours is not None:
            assert {name: getattr(ours, name) for name in ours.__struct_fields__} == their.to_dict()


def test_level_0_compiles_nothing() -> None:
    for path in ("varlen", "decode"):
        assert choose_compile(None, level=0, path=path, backend="native", has_fast_path=True).value is None


def test_under_flash_attention_the_varlen_path_is_not_compiled_by_a_level_and_the_reason_is_said() -> None:
    for backend in ("flash_attention_2", "flash_attention_3"):
        chosen = choose_compile(None, level=3, path="varlen", backend=backend, has_fast_path=True)
        assert chosen.value is None
        assert "longest context" in chosen.reason
        assert choose_compile(None, level=3, path="decode", backend=backend, has_fast_path=True).value == of_level(3)


@pytest.mark.parametrize("backend", ["native", "flash_attention_2"])
def test_an_explicit_config_wins_over_the_level(backend: str) -> None:
    for path in ("varlen", "decode"):
        chosen = choose_compile("backend=eager", level=3, path=path, backend=backend, has_fast_path=True)
        assert (chosen.value, chosen.reason) == (CompileOptions(backend="eager"), "as set")


def test_without_a_fast_path_its_code_is_not_made_and_a_warning_comes_only_where_it_was_asked_for() -> None:
    asked = choose_compile("mode=default", level=0, path="decode", backend="sdpa", has_fast_path=False)
    assert asked.value is None
    assert asked.warning is not None
    assert "decode_compile_config = mode=default is not used" in asked.warning
    by_level = choose_compile(None, level=2, path="decode", backend="sdpa", has_fast_path=False)
    assert (by_level.value, by_level.warning) == (None, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mode=max-autotune,dynamic=true", CompileOptions(mode="max-autotune", dynamic=True)),
        ("backend=eager fullgraph=true", CompileOptions(backend="eager", fullgraph=True)),
        ("dynamic=null", CompileOptions()),
        ('{"options": {"epilogue_fusion": true, "max_autotune": false}}', None),
    ],
)
def test_options_are_pairs_or_json(text: str, expected: CompileOptions | None) -> None:
    wanted = expected or CompileOptions(options={"epilogue_fusion": True, "max_autotune": False})
    assert parse_options(text, name="n") == wanted
    assert parse_options(str(wanted), name="n") == wanted


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("bakend=inductor", "unknown field `bakend`"),
        ('{"bakend": "inductor"}', "unknown field `bakend`"),
        ("mode=fast", "'fast'"),
        ("dynamic=perhaps", r"\$.dynamic"),
        ("fullgraph", "no KEY=VALUE pair"),
        ("mode=default,mode=default", "no KEY=VALUE pair of its own"),
        ('{"mode": "default", "options": {}}', "not both"),
        ('{"options": {"freezing": true}}', "could not be updated"),
        ("{not json", "varlen_compile_config = {not json"),
    ],
)
def test_what_torch_compile_does_not_know_is_refused_by_name(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        parse_options(text, name="varlen_compile_config")
    assert str(caught.value).startswith(f"varlen_compile_config = {text}: ")
    assert "\n" not in str(caught.value)


def test_every_entry_of_transformers_config_can_be_said() -> None:
    assert set(CompileOptions.__struct_fields__) == set(CompileConfig().to_dict())
