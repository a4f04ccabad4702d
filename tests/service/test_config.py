"""Settings: precedence of their sources, refusals that name setting, value and source, and what is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from chairlift_service.addresses import TcpAddress, UnixAddress
from chairlift_service.config import ConfigError, ServiceSettings, check_model, load
from chairlift_worker.ipc.settings import WorkerSettings

MODEL = ["--model", "demo"]


def test_a_model_that_is_a_path_must_be_there(tmp_path: Path) -> None:
    for model in (str(tmp_path), "demo", "owner/name"):
        check_model(load(["--model", model], {}))
    with pytest.raises(ConfigError, match=r"model = \./not/there \(from --model\): no such folder or file"):
        check_model(load(["--model", "./not/there"], {}))


def test_the_documented_defaults_hold() -> None:
    config = load(MODEL, {})
    assert config.listen == (TcpAddress("127.0.0.1", 50051),)
    assert config.admin_listen is None
    service = config.service
    assert (service.drain_timeout, service.result_ttl, service.max_message_bytes) == (30, 300, 16 * 1024 * 1024)
    assert (service.model_defaults, service.insecure) == (True, False)
    assert config.worker == WorkerSettings(model="demo")
    assert not config.print_config
    assert config.warnings == ()


@pytest.mark.parametrize(
    ("flags", "environment", "file", "value", "origin"),
    [
        (["--page-size", "8"], {"CHAIRLIFT_PAGE_SIZE": "16"}, "page_size = 32", 8, "--page-size"),
        ([], {"CHAIRLIFT_PAGE_SIZE": "16"}, "page_size = 32", 16, "CHAIRLIFT_PAGE_SIZE"),
        ([], {}, "page_size = 32", 32, "FILE"),
        ([], {}, "", None, "default"),
    ],
)
def test_flags_win_over_environment_over_file_over_defaults(tmp_path, flags, environment, file, value, origin) -> None:
    path = tmp_path / "c.toml"
    path.write_text(file)
    config = load([*MODEL, "--config", str(path), *flags], environment)
    assert config.worker.page_size == value
    assert config.origins["page_size"] == origin.replace("FILE", str(path))


def test_every_setting_can_be_given_by_flag_environment_and_file(tmp_path: Path) -> None:
    values = {
        "model": "m", "dtype": "float32", "attn_implementation": "eager", "page_size": 8, "num_blocks": 9,
        "max_memory_percent": 0.5, "max_batch_tokens": 64, "max_prefill_chunk": 7, "max_requests_per_batch": 3,
        "scheduler_type": "prefill_first", "safety_margin": 0.25, "allow_block_sharing": False, "return_logprobs": True,
        "max_context": 100, "num_threads": 2, "trust_remote_code": True, "fault_injection": "x",
        "listen": ["unix:/a", "localhost:0"], "admin_listen": "unix:/b", "insecure": False, "drain_timeout": 1.5,
        "start_timeout": 2.0, "step_timeout": 3.0, "worker_restart_limit": 4.0,
        "result_ttl": 0.0, "result_memory": 1, "max_message_bytes": 65536,
        "max_waiting_requests": 5, "max_waiting_tokens": 6, "model_defaults": False, "log_level": "debug",
        "log_format": "json", "cpu_offload_space": 2.5, "cpu_offload_space_safety_threshold": 0.5,
        "use_async_batching": True, "auto_switch_to_flash": False, "max_prompt_length": 11, "max_generated_length": 12,
        "tls_cert": "c.pem", "tls_key": "k.pem", "tls_client_ca": "a.pem", "auth_token_file": "t",
        "max_connection_age": 60.0, "max_connection_age_grace": 5.0, "max_connection_idle": 7.5,
        "max_blocks_per_request": 0, "model_config": ["sliding_window=4096", 'a="b"'],
        "use_cuda_graph": True, "q_padding_interval_size": 32, "kv_padding_interval_size": 128,
        "model_impl": "transformers", "quantization": "int8", "cpu_isa": "avx2", "kv_cache_dtype": "int8",
        "speculative": "ngram", "speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 5,
        "max_step_stretch": 3.0, "default_compile_level": 2, "varlen_compile_config": "mode=default,dynamic=true",
        "decode_compile_config": '{"backend": "eager"}', "metrics_listen": "unix:/c", "otlp_endpoint": "http://o:4317",
        "reader_buffer_tokens": 7, "slow_reader_timeout": 8.5, "gateway": "off", "tp_size": 3, "cpu_group_timeout": 9.5,
    }  # fmt: skip
    names = {*ServiceSettings.__struct_fields__, *WorkerSettings.__struct_fields__}
    assert set(values) == names, "a new setting needs its line here"
    flags, environment, lines = [], {}, []
    for name, value in values.items():
        kebab = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{kebab}" if value else f"--no-{kebab}")
        else:
            for item in value if isinstance(value, list) else [value]:
                flags += [f"--{kebab}", str(item)]
        environment["CHAIRLIFT_" + name.upper()] = ",".join(value) if isinstance(value, list) else str(value).lower()
        lines.append(f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}")
    path = tmp_path / "c.toml"
    path.write_text("\n".join(lines))
    for config in (load(flags, {}), load([], environment), load([], {"CHAIRLIFT_CONFIG": str(path)})):
        both = (config.service, config.worker)
        got = {name: getattr(struct, name) for struct in both for name in struct.__struct_fields__}
        assert got == values | {name: tuple(values[name]) for name in ("listen", "model_config")}
        assert config.listen == (UnixAddress("/a"), TcpAddress("localhost", 0))


def test_a_switch_for_each_path_is_a_pair() -> None:
    for config in (
        load([*MODEL, "--use-cuda-graph", "true,false"], {}),
        load(MODEL, {"CHAIRLIFT_USE_CUDA_GRAPH": "true, false"}),
    ):
        assert config.worker.use_cuda_graph == (True, False)
    assert load([*MODEL, "--use-cuda-graph"], {}).worker.use_cuda_graph is True
    assert load([*MODEL, "--use-cuda-graph", "false"], {}).worker.use_cuda_graph is False
    assert load(MODEL, {}).worker.use_cuda_graph is None


def test_a_pair_in_the_file_is_an_array(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("use_cuda_graph = [false, true]")
    assert load([*MODEL, "--config", str(path)], {}).worker.use_cuda_graph == (False, True)


def test_entries_with_commas_are_a_json_array_in_the_environment() -> None:
    entries = ('layer_types=["full_attention", "sliding_attention"]', "sliding_window=4096")
    variable = r'["layer_types=[\"full_attention\", \"sliding_attention\"]", "sliding_window=4096"]'
    assert load(MODEL, {"CHAIRLIFT_MODEL_CONFIG": variable}).worker.model_config == entries
    assert load([*MODEL, *(f"--model-config={entry}" for entry in entries)], {}).worker.model_config == entries


@pytest.mark.parametrize(
    ("flags", "environment", "parts"),
    [
        ([], {}, ["model is not set", "--model"]),
        ([*MODEL, "--page-size", "3"], {}, ["page_size = 3", "--page-size", ">= 4"]),
        ([*MODEL, "--page-size", "many"], {}, ["page_size = many", "--page-size"]),
        ([*MODEL, "--page-size", ""], {}, ["page_size = ''", "--page-size"]),
        (["--model", ""], {}, ["model = ''", "--model"]),
        ([*MODEL, "--page-size", "99999999999"], {}, ["page_size = 99999999999", "<= 65536"]),
        ([*MODEL, "--max-batch-tokens", "99999999999999"], {}, ["max_batch_tokens = 99999999999999", "<= 1048576"]),
        ([*MODEL, "--num-threads", "100000"], {}, ["num_threads = 100000", "<= 4096"]),
        ([*MODEL, "--cpu-offload-space", "inf"], {}, ["cpu_offload_space = inf", "<= 1048576"]),
        ([*MODEL, "--attn-implementation", "flash"], {}, ["attn_implementation = flash", "flash_attention_2"]),
        ([*MODEL, "--use-cuda-graph", "maybe"], {}, ["use_cuda_graph = maybe", "--use-cuda-graph"]),
        ([*MODEL, "--use-cuda-graph", "true,false,true"], {}, ["use_cuda_graph = true, false, true", "length 2"]),
        ([*MODEL, "--default-compile-level", "4"], {}, ["default_compile_level = 4", "<= 3"]),
        ([*MODEL, "--q-padding-interval-size", "-1"], {}, ["q_padding_interval_size = -1", ">= 0"]),
        ([*MODEL, "--varlen-compile-config", ""], {}, ["varlen_compile_config = ''"]),
        ([*MODEL, "--max-blocks-per-request", "-1"], {}, ["max_blocks_per_request = -1", ">= 0"]),
        ([*MODEL, "--max-prompt-length", "0"], {}, ["max_prompt_length = 0", ">= 1"]),
        ([*MODEL, "--dtype", "int4"], {}, ["dtype = int4", "--dtype", "bfloat16"]),
        ([*MODEL, "--safety-margin", "1.5"], {}, ["safety_margin = 1.5", "<= 1"]),
        ([*MODEL, "--safety-margin", "nan"], {}, ["safety_margin = nan"]),
        ([*MODEL, "--drain-timeout", "inf"], {}, ["drain_timeout = inf"]),
        ([*MODEL, "--drain-timeout", "-1"], {}, ["drain_timeout = -1", ">= 0"]),
        ([*MODEL, "--nonsense", "1"], {}, ["--nonsense"]),
        ([*MODEL, "--page", "8"], {}, ["--page"]),
        ([*MODEL, "--insecure=yes"], {}, ["--insecure"]),
        (MODEL, {"CHAIRLIFT_INSECURE": "maybe"}, ["insecure = maybe", "CHAIRLIFT_INSECURE"]),
        (MODEL, {"CHAIRLIFT_PAGESIZE": "8"}, ["CHAIRLIFT_PAGESIZE = 8"]),
        (MODEL, {"CHAIRLIFT_page_size": "8"}, ["CHAIRLIFT_page_size = 8"]),
        ([*MODEL, "--page-size", "8"], {"CHAIRLIFT_PAGE_SIZE": "2"}, ["page_size = 2", "CHAIRLIFT_PAGE_SIZE"]),
        ([*MODEL, "--page-size", "8", "--block-size", "8"], {}, ["block_size", "page_size"]),
        ([*MODEL, "--block-size", "2"], {}, ["page_size = 2", "--block-size"]),
        ([*MODEL, "--listen", "nowhere"], {}, ["listen = nowhere", "--listen", "HOST:PORT"]),
        ([*MODEL, "--listen", "0.0.0.0:1"], {}, ["listen = 0.0.0.0:1", "--insecure"]),
        ([*MODEL, "--admin-listen", "[::]:1"], {}, ["admin_listen = [::]:1", "--insecure"]),
        ([*MODEL, "--metrics-listen", "0.0.0.0:1"], {}, ["metrics_listen = 0.0.0.0:1", "--insecure"]),
        ([*MODEL, "--metrics-listen", "127.0.0.1:50051"], {}, ["metrics_listen = 127.0.0.1:50051", "twice"]),
        ([*MODEL, "--listen", "unix:/a", "--admin-listen", "unix:/a"], {}, ["admin_listen = unix:/a", "twice"]),
        ([*MODEL, "--tls-cert", "c"], {}, ["tls_cert = c", "--tls-cert", "tls_key must be set"]),
        ([*MODEL, "--tls-key", "k"], {}, ["tls_key = k", "tls_cert must be set"]),
        ([*MODEL, "--tls-client-ca", "a"], {}, ["tls_client_ca = a", "tls_cert must be set"]),
        ([*MODEL, "--tls-cert", "c", "--tls-key", "k", "--insecure"], {}, ["insecure = true", "tls_cert"]),
        ([*MODEL, "--max-connection-age", "0"], {}, ["max_connection_age = 0", ">= 0.001"]),
        ([*MODEL, "--config", "/does/not/exist"], {}, ["/does/not/exist", "No such file"]),
    ],
)
def test_a_bad_setting_is_refused_in_one_line_with_name_value_and_source(flags, environment, parts) -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags, environment)
    line = str(caught.value)
    assert "\n" not in line
    assert [part for part in parts if part not in line] == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("page_size = 2", ["page_size = 2", "c.toml", ">= 4"]),
        ('page_size = "8"', ["page_size = 8", "c.toml", "int"]),  # a file has types
        ("insecure = 1", ["insecure = 1", "bool"]),
        ("pagesize = 8", ["pagesize = 8", "c.toml"]),
        ("page-size = 8", ["page-size = 8", "c.toml"]),
        ("[worker]\npage_size = 8", ["worker", "c.toml"]),
        ("page_size = \nmodel = 1", ["c.toml", "line 1"]),
        ("listen = []", ["listen", "c.toml"]),
        ("listen = [1]", ["listen = 1", "c.toml"]),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load([*MODEL, "--config", str(tmp_path / "c.toml")], {})
    assert "\n" not in str(caught.value)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_variables_of_others_are_left_alone() -> None:
    assert load(MODEL, {"CHAIRLIFT_TARGET": "localhost:1", "PAGE_SIZE": "2"}).worker.page_size is None


@pytest.mark.parametrize(
    ("flags", "environment", "warning"),
    [
        (["--block-size", "16"], {}, "--block-size is a deprecated name: use --page-size"),
        ([], {"CHAIRLIFT_BLOCK_SIZE": "16"}, "CHAIRLIFT_BLOCK_SIZE is a deprecated name: use CHAIRLIFT_PAGE_SIZE"),
    ],
)
def test_the_deprecated_name_of_page_size_is_taken_with_a_warning(flags, environment, warning) -> None:
    config = load([*MODEL, *flags], environment)
    assert config.worker.page_size == 16
    assert config.warnings == (warning,)


def test_other_machines_are_let_in_only_when_that_is_said() -> None:
    config = load([*MODEL, "--listen", "0.0.0.0:7", "--insecure"], {})
    assert config.listen == (TcpAddress("0.0.0.0", 7),)
    config = load([*MODEL, "--listen", "0.0.0.0:7", "--tls-cert", "c", "--tls-key", "k"], {})
    assert config.listen == (TcpAddress("0.0.0.0", 7),)


def test_print_config_shows_every_setting_its_value_and_where_it_is_from() -> None:
    config = load(
        [*MODEL, "--print-config", "--listen", "unix:/a", "--listen", "unix:/b"], {"CHAIRLIFT_DTYPE": "float32"}
    )
    assert config.print_config
    rows = [re.fullmatch(r"(\w+) += (.*?) +# (.*)", line).groups() for line in str(config).splitlines()]
    assert len(rows) == len(ServiceSettings.__struct_fields__) + len(WorkerSettings.__struct_fields__)
    for row in [
        ("model", "demo", "--model"),
        ("dtype", "float32", "CHAIRLIFT_DTYPE"),
        ("listen", "unix:/a, unix:/b", "--listen"),
        ("page_size", "unset", "default"),
        ("model_defaults", "true", "default"),
    ]:
        assert row in rows


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(["--help"], {})
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in (*ServiceSettings.__struct_fields__, *WorkerSettings.__struct_fields__):
        assert f"--{name.replace('_', '-')}" in text
