from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from chairlift_client.testing import EOS_TOKEN_ID, FakeServer
from support.program import chairlift

PROGRAM = str(Path(sys.executable).with_name("chairlift"))


def json_lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_generate_prints_the_text_and_ends_the_line(server: FakeServer) -> None:
    done = chairlift("generate", "žluť ", "--max-new-tokens", "13", "--target", server.target)
    assert (done.returncode, done.stdout, done.stderr) == (0, "žluť žluť\n", "")


@pytest.mark.parametrize(
    ("args", "stdin", "answer"),
    [
        (["-"], "ab", "abab"),
        (["--ids", "72,105"], "", "HiHi"),
        (["--prompt-file", "prompt.txt"], "", "file"),
    ],
)
def test_the_prompt_comes_from_where_it_is_told_to(
    server: FakeServer, tmp_path: Path, args: list[str], stdin: str, answer: str
) -> None:
    (tmp_path / "prompt.txt").write_text("file")
    args = [str(tmp_path / arg) if arg.endswith(".txt") else arg for arg in args]
    done = chairlift("generate", *args, "--max-new-tokens", "4", "--target", server.target, stdin=stdin)
    assert (done.returncode, done.stdout) == (0, answer + "\n")


def test_the_environment_names_the_target(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_TARGET", server.target)
    done = chairlift("health")
    assert (done.returncode, done.stdout) == (0, "SERVING\n")


def test_generate_json_prints_one_event_a_line_with_the_protos_names(server: FakeServer) -> None:
    done = chairlift("generate", "ab", "--max-new-tokens", "2", "--logprobs", "1", "--json", "--target", server.target)
    accepted, first, second, finished = json_lines(done.stdout)
    assert accepted["accepted"]["prompt_tokens"] == 2
    assert first["delta"] | {"text": "a", "token_ids": [97], "index": 0, "num_tokens": 1} == first["delta"]
    assert second["delta"]["logprobs"] == [{"chosen": -0.125, "top": [{"token_id": 98, "logprob": -0.125}]}]
    assert finished["finished"]["reason"] == "FINISH_REASON_LENGTH"
    assert finished["finished"]["usage"] == {"prompt_tokens": 2, "cached_tokens": 0, "generated_tokens": 2}


def test_every_flag_of_generate_reaches_its_field(server: FakeServer) -> None:
    server.allow_tokens(0)
    flags = (
        "--max-new-tokens 3 --temperature 0.5 --top-k 7 --top-p 0.25 --min-p 0.125 --seed 11 --stop-token-ids 5,6 "
        "--ignore-eos --logprobs 1 --request-id mine --session ours --keep-special-tokens --output ids "
        "--priority -4 --json"
    )
    with subprocess.Popen(
        [PROGRAM, "generate", "ab", *flags.split(), "--target", server.target], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert b'"accepted"' in process.stdout.readline()
        message = server._engine.requests["mine"].message
        server.allow_tokens(None)
        assert process.wait(30) == 0
    sampling = message.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.25, 0.125)
    assert (message.max_new_tokens, message.seed, message.session, message.logprobs.top_n) == (3, 11, "ours", 1)
    assert message.priority == -4
    assert (list(message.stop.token_ids), message.stop.ignore_eos) == ([5, 6], True)
    output = message.output
    assert (output.text, output.token_ids, output.skip_special_tokens) == (False, True, False)


def test_every_flag_of_processors_reaches_its_field(server: FakeServer) -> None:
    server.allow_tokens(0)
    flags = (
        "--repetition-penalty 1.5 --presence-penalty -0.5 --frequency-penalty 0.25 --no-repeat-ngram-size 3 "
        "--logit-bias 7=-2 --logit-bias 8=0.5 --allowed-token-ids 97,98 --banned-token-ids 98 --banned-words no "
        "--banned-words never --banned-sequences 1,2 --banned-sequences 3 --min-new-tokens 2 --max-new-tokens 3 "
        "--logprobs 5 --logprob-source raw --request-id mine --json"
    )
    with subprocess.Popen(
        [PROGRAM, "generate", "ab", *flags.split(), "--target", server.target], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        accepted = json.loads(process.stdout.readline())["accepted"]
        message = server._engine.requests["mine"].message
        server.allow_tokens(None)
        events = [json.loads(line) for line in process.stdout]
        assert process.wait(30) == 0
    asked = message.sampling
    assert (asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty) == (1.5, -0.5, 0.25)
    assert (asked.no_repeat_ngram_size, dict(asked.logit_bias)) == (3, {7: -2.0, 8: 0.5})
    assert (list(asked.allowed_token_ids), list(asked.banned_token_ids)) == ([97, 98], [98])
    assert list(asked.banned_words) == ["no", "never"]
    assert [list(banned.ids) for banned in asked.banned_sequences] == [[1, 2], [3]]
    assert (message.stop.min_new_tokens, message.logprobs.source) == (2, 2)
    assert (accepted["sampling"]["repetition_penalty"], accepted["min_new_tokens"]) == (1.5, 2)
    deltas = [event["delta"] for event in events if "delta" in event]
    assert [token for delta in deltas for token in delta["token_ids"]] == [97, 97, 97], "98 is banned"
    assert all(len(entry["top"]) == 5 for delta in deltas for entry in delta["logprobs"])


def test_several_answers_are_shown_one_after_the_other(server: FakeServer) -> None:
    args = ["generate", "abc", "--max-new-tokens", "4", "--num-choices", "3", "--target", server.target]
    shown = "--- choice 0\nabca\n--- choice 1\nbcab\n--- choice 2\ncabc\n"
    assert chairlift(*args).stdout == shown
    assert chairlift(*args, "--output", "ids").stdout.splitlines()[1::2] == [
        "97 98 99 97",
        "98 99 97 98",
        "99 97 98 99",
    ]
    endings = [
        event["finished"]["choice"]
        for event in json_lines(chairlift(*args, "--json").stdout)[1:]
        if "finished" in event
    ]
    assert sorted(endings) == [0, 1, 2]


def test_a_prompt_is_scored(server: FakeServer) -> None:
    args = ["generate", "abc", "--max-new-tokens", "0", "--prompt-logprobs", "1", "--target", server.target]
    assert chairlift(*args).returncode == 2
    _, judged, finished = json_lines(chairlift(*args, "--json").stdout)
    first, *others = judged["delta"]["prompt_logprobs"]
    assert (first["top"], [entry["chosen"] for entry in others]) == ([], [-0.125, -0.25])
    assert finished["finished"]["usage"]["generated_tokens"] == 0


def test_ids_are_printed_between_spaces(server: FakeServer) -> None:
    done = chairlift("generate", "--ids", f"7,8,{EOS_TOKEN_ID}", "--output", "ids", "--target", server.target)
    assert done.stdout == f"7 8 {EOS_TOKEN_ID}\n"


def test_a_refusal_is_exit_code_1_and_one_line_on_standard_error(server: FakeServer) -> None:
    done = chairlift("generate", "--ids", "1,999", "--target", server.target)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "chairlift: INVALID_ARGUMENT (UNKNOWN_TOKEN_ID): request.token_ids.ids[1]: no token 999"
    ]
    done = chairlift("generate", "--ids", "1,999", "--json", "--target", server.target)
    (error,) = json_lines(done.stderr)
    assert (done.returncode, done.stdout) == (1, "")
    assert (error["status"], error["reason"]) == ("INVALID_ARGUMENT", "UNKNOWN_TOKEN_ID")
    assert "999" in str(error["message"])


def test_an_error_after_some_text_stands_on_a_line_of_its_own(server: FakeServer) -> None:
    server.allow_tokens(2)
    done = chairlift("generate", "ab", "--deadline", "0.5", "--target", server.target)
    assert (done.returncode, done.stdout) == (1, "ab\n")
    assert done.stderr.startswith("chairlift: DEADLINE_EXCEEDED")


def test_nobody_there_is_exit_code_1(tmp_path: Path) -> None:
    done = chairlift("info", "--json", "--target", f"unix:{tmp_path}/none")
    (error,) = json_lines(done.stderr)
    assert (done.returncode, error["status"], error["reason"]) == (1, "UNAVAILABLE", "")


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["fly"],
        ["generate"],
        ["generate", "a", "--ids", "1"],
        ["generate", "--ids", "1,x"],
        ["generate", "--prompt-file", "/nowhere"],
        ["generate", "a", "--top-k", "many"],
        ["generate", "a", "--deadline", "0"],
        ["generate", "a", "--max-new-tokens", "-1"],
        ["generate", "a", "--logprobs", "1"],
        ["generate", "a", "--max-new", "3"],
        ["generate", "a", "--target", "nowhere"],
        ["cancel"],
        ["bench"],
        ["bench", "--workload", "/nowhere"],
        ["bench", "--workload", "x", "--rate", "1", "--concurrency", "1"],
    ],
    ids=" ".join,
)
def test_wrong_use_is_exit_code_2_and_says_why(args: list[str]) -> None:
    done = chairlift(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip()


def test_health_follows_the_service(server: FakeServer) -> None:
    server.set_serving(serving=False)
    done = chairlift("health", "--target", server.target)
    assert (done.returncode, done.stdout) == (1, "NOT_SERVING\n")
    server.set_serving(serving=True)
    assert json.loads(chairlift("health", "--json", "--target", server.target).stdout) == {"status": "SERVING"}


def test_info_shows_server_settings_statistics_and_model(tmp_path: Path) -> None:
    with FakeServer(f"unix:{tmp_path}/s", config={"page_size": "16"}) as server:
        shown = json.loads(chairlift("info", "--json", "--target", server.target).stdout)
        text = chairlift("info", "--target", server.target).stdout
    assert (shown["version"], shown["state"]) == ("fake", "SERVER_STATE_SERVING")
    assert shown["config"] == [{"name": "page_size", "value": "16", "reason": "set"}]
    assert shown["model"]["vocab_size"] == 257
    names = (
        "requests_waiting requests_running requests_swapped blocks_total blocks_free blocks_cached swap_blocks_used "
        "steps generated_tokens prompt_tokens cached_prompt_tokens preemptions_swap preemptions_recompute "
        "worker_restarts"
    )
    assert set(names.split()) <= shown["statistics"].keys()
    assert all(type(value) is int for value in shown["statistics"].values())
    for shown_name in ("page_size", "vocab_size", "blocks_free"):
        assert shown_name in text


def test_cancel_tells_what_became_of_each(server: FakeServer) -> None:
    done = chairlift("cancel", "a", "b", "--json", "--target", server.target)
    assert done.returncode == 0
    assert json.loads(done.stdout) == {
        "outcomes": [{"request_id": "a", "status": "NOT_FOUND"}, {"request_id": "b", "status": "NOT_FOUND"}]
    }


def test_tokenize_and_flush_prefix_cache(server: FakeServer) -> None:
    assert chairlift("tokenize", "Hi", "--target", server.target).stdout == "72 105\n"
    assert chairlift("tokenize", "-", "--target", server.target, stdin="Hi").stdout == "72 105\n"
    shown = json.loads(chairlift("tokenize", "Hi", "--json", "--target", server.target).stdout)
    assert shown == {"token_ids": [72, 105], "tokens": ["<0x48>", "<0x69>"], "truncated": False}
    asked = ("--json", "--offsets", "--max-tokens", "1", "--target", server.target)
    shown = json.loads(chairlift("tokenize", "Hi", *asked).stdout)
    assert (shown["offsets"], shown["truncated"]) == ([[0, 1]], True)
    assert chairlift("tokenize", "Hi", "--offsets", "--target", server.target).returncode == 2
    done = chairlift("flush-prefix-cache", "--json", "--target", server.target)
    assert json.loads(done.stdout) == {"num_blocks": 0}


def test_the_commands_of_operators(server: FakeServer) -> None:
    def told(*args: str) -> dict[str, int]:
        done = chairlift(*args, "--json", "--target", server.target)
        assert (done.returncode, done.stderr) == (0, "")
        answer: dict[str, int] = json.loads(done.stdout)
        return answer

    assert told("pause") == {"num_requests": 0}
    assert told("update-weights", "new") == {"num_tensors": 0, "num_requests": 0, "num_blocks": 0}
    again = chairlift("pause", "--json", "--target", server.target)
    assert (again.returncode, json.loads(again.stderr)["reason"]) == (1, "WRONG_STATE")
    assert told("resume") == {}
    assert told("stop") == {"num_requests": 0}
    assert told("resume") == {}
    assert told("drain", "--deadline", "5") == {}
    assert chairlift("resume", "--target", server.target).stdout == "resumed\n"
    assert chairlift("pause", "--target", server.target).stdout == "paused; 0 requests stand still\n"


def test_an_interrupted_generate_cancels_its_request(server: FakeServer) -> None:
    server.allow_tokens(1)
    with subprocess.Popen(
        [PROGRAM, "generate", "ab", "--json", "--target", server.target], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert '"accepted"' in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    end = time.monotonic() + 5
    while server.request_ids:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_reader_that_has_seen_enough_is_no_error(server: FakeServer) -> None:
    command = f"{PROGRAM} generate ab --max-new-tokens 3000 --json --target {server.target} | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)


def test_a_service_that_is_full_is_told_with_the_time_to_wait(server: FakeServer) -> None:
    for _ in range(4):
        server.fail_next("Generate", grpc.StatusCode.RESOURCE_EXHAUSTED, "full", reason="QUEUE_FULL", retry_after=1.5)
    (error,) = json_lines(chairlift("generate", "a", "--json", "--target", server.target).stderr)
    assert (error["status"], error["reason"], error["retry_after"]) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL", 1.5)
