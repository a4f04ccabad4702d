from pathlib import Path

import pytest
import torch
from chairlift_worker.model import ModelError
from chairlift_worker.model.dtype import choose_dtype, read_cpu_flags


@pytest.mark.parametrize("flag", ["avx512_bf16", "amx_bf16"])
def test_auto_is_bfloat16_where_the_processor_computes_it(flag: str) -> None:
    dtype, reason = choose_dtype("auto", cpu_flags=frozenset({"avx2", flag}))
    assert dtype is torch.bfloat16
    assert flag in reason


def test_auto_is_float32_elsewhere() -> None:
    dtype, reason = choose_dtype("auto", cpu_flags=frozenset({"avx2", "avx512f"}))
    assert dtype is torch.float32
    assert "not" in reason


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_what_is_asked_is_taken(name: str) -> None:
    assert choose_dtype(name, cpu_flags=frozenset()) == (getattr(torch, name), "as set")


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ModelError, match="dtype = int8"):
        choose_dtype("int8")


def test_flags_are_read_from_the_first_processor(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx2 amx_bf16\n\nprocessor\t: 1\nflags\t: fpu\n")
    assert read_cpu_flags(tmp_path / "cpuinfo") == {"fpu", "avx2", "amx_bf16"}
    assert read_cpu_flags(tmp_path / "nothing") == frozenset()
