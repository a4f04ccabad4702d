"""The worker's settings as a user gives them: one source of names, types, bounds and help.

The service makes command-line flags, environment variables and TOML keys of these fields and passes the result on;
the worker resolves what is None by model and device (config.py). Names and meaning follow transformers'
ContinuousBatchingConfig where it has them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "human", "json"]
PositiveInt = Annotated[int, Meta(ge=1)]


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was asked of the worker. None means: resolve it."""

    model: Annotated[str, Meta(min_length=1, description="folder, .gguf file, hub id, or `demo`")]
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="type of weights and computation; auto takes what this processor computes natively"),
    ] = "auto"
    attn_implementation: Annotated[
        Literal["auto", "native", "sdpa", "eager", "paged|eager", "flash_attention_2", "flash_attention_3"],
        Meta(
            description="attention backend: native reads and writes the pages in place on a CPU, sdpa is torch's, "
            "eager (also paged|eager) the plain reference, flash_attention_... are for GPUs; auto takes the best"
        ),
    ] = "auto"
    model_impl: Annotated[
        Literal["auto", "native", "transformers"],
        Meta(
            description="what computes the model: native is the whole pass in native code, for models built as Llama "
            "is, on a CPU; transformers is the model's own module; auto takes native where it can"
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8", "int4"],
        Meta(
            description="weights of the native pass: int8 and int4 have a scale for each 32 inputs; int4 keeps the "
            "output layer at 8 bits"
        ),
    ] = "none"
    cpu_isa: Annotated[
        Literal["best", "portable", "avx2", "avx512", "avx512_bf16", "amx"],
        Meta(description="instruction set of the native kernels"),
    ] = "best"
    auto_switch_to_flash: Annotated[
        bool, Meta(description="take FlashAttention instead of sdpa and eager where it is installed and can run")
    ] = True
    page_size: Annotated[
        Annotated[int, Meta(ge=4, le=2**16)] | None, Meta(description="tokens of key-value cache per page, at least 4")
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "int8"],
        Meta(
            description="type of keys and values in the cache: auto is the model's own; int8, for the native backend, "
            "has a scale for each token and head, so that about twice as many tokens fit"
        ),
    ] = "auto"
    num_blocks: Annotated[
        PositiveInt | None, Meta(description="pages of key-value cache; unset: what memory allows")
    ] = None
    max_memory_percent: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(description="share of the free memory that the cache may take, if num_blocks is unset"),
    ] = None
    max_batch_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=2**20)] | None, Meta(description="query tokens per forward pass")
    ] = None
    max_prefill_chunk: Annotated[
        PositiveInt | None, Meta(description="largest share of a step that one request gets")
    ] = None
    max_requests_per_batch: Annotated[PositiveInt | None, Meta(description="requests per forward pass")] = None
    max_prompt_length: Annotated[
        PositiveInt | None, Meta(description="hint: tokens of the longest prompt; sizes max_blocks_per_request")
    ] = None
    max_generated_length: Annotated[
        PositiveInt | None, Meta(description="hint: tokens of the longest output; sizes max_blocks_per_request")
    ] = None
    max_blocks_per_request: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="pages that a request may have in the decode fast path, longer ones take the general path; "
            "0 turns it off; unset: by max_prompt_length and max_generated_length, or 32"
        ),
    ] = None
    scheduler_type: Annotated[
        Literal["fifo", "prefill_first"],
        Meta(description="fifo: decoding, then part-way prompts, then waiting; prefill_first: part-way prompts first"),
    ] = "fifo"
    max_step_stretch: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="while requests generate, prompts get so few tokens of a step that it takes about so many "
            "times as long as one without them at most, at least 1; 0: no bound; unset: 4 for fifo, 0 for prefill_first"
        ),
    ] = None
    safety_margin: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(description="below this share of free cache no new request is started; 0 turns it off"),
    ] = None
    cpu_offload_space: Annotated[
        Annotated[float, Meta(ge=0, le=2**20)] | Literal["auto"],
        Meta(
            description="GiB of host memory for what evicted requests have computed; 0 is off, auto takes what it may"
        ),
    ] = 0.0
    cpu_offload_space_safety_threshold: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        Meta(description="share of available memory that cpu_offload_space may take"),
    ] = 0.8
    use_cuda_graph: Annotated[
        bool | tuple[bool, bool] | None,
        Meta(
            description="capture steps as graphs of padded shapes and replay them: true, false, or VARLEN,DECODE for "
            "each path; a CPU only checks what a GPU would replay; unset: on if a padding interval is set"
        ),
    ] = None
    q_padding_interval_size: Annotated[
        Annotated[int, Meta(ge=0, le=2**20)],
        Meta(description="tokens to whose multiples steps with prompts are padded for graphs; 0: 64 if there are any"),
    ] = 0
    kv_padding_interval_size: Annotated[
        Annotated[int, Meta(ge=0, le=2**30)],
        Meta(description="tokens to whose multiples contexts are padded for graphs; 0: 16384 if there are any"),
    ] = 0
    default_compile_level: Annotated[
        Annotated[int, Meta(ge=0, le=3)],
        Meta(
            description="torch.compile of both paths: 0 is off, 1 compiles, 2 also tries several ways to multiply, "
            "3 for each padded shape; a higher level warms up longer"
        ),
    ] = 0
    varlen_compile_config: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="torch.compile of steps with prompts, instead of the level: KEY=VALUE,... or a JSON object, of "
            "backend, mode, fullgraph, dynamic, options",
        ),
    ] = None
    decode_compile_config: Annotated[
        Annotated[str, Meta(min_length=1)] | None, Meta(description="the same for the decode fast path")
    ] = None
    use_async_batching: Annotated[
        bool, Meta(description="plan the next step while one runs; on a CPU it gains little, steps compete for cores")
    ] = False
    speculative: Annotated[
        Literal["none", "ngram"],
        Meta(
            description="speculative decoding: ngram looks up in a request's own text what followed its last tokens "
            "before, and checks several such tokens in a step where that pays; outputs stay what they are"
        ),
    ] = "none"
    speculative_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=64)], Meta(description="tokens that speculation checks of a request in a step")
    ] = 7
    prompt_lookup_min: Annotated[
        Annotated[int, Meta(ge=1, le=64)], Meta(description="last tokens that must be found again, at least")
    ] = 2
    prompt_lookup_max: Annotated[
        Annotated[int, Meta(ge=1, le=64)], Meta(description="last tokens that are compared; the longest match counts")
    ] = 4
    allow_block_sharing: Annotated[
        bool, Meta(description="prefix cache, for models whose layers are all full attention")
    ] = True
    return_logprobs: Annotated[bool, Meta(description="log-probability of each token by default")] = False
    tp_size: Annotated[
        Annotated[int, Meta(ge=1, le=64)],
        Meta(
            description="tensor parallelism: processes, or ranks, that share each layer of the model between them; it "
            "must divide the model's key-value heads"
        ),
    ] = 1
    cpu_group_timeout: Annotated[
        Annotated[float, Meta(ge=1)] | None,
        Meta(
            description="seconds that a rank waits for another one before the worker ends, and is replaced; unset: it "
            "waits until step_timeout ends it"
        ),
    ] = None
    max_context: Annotated[PositiveInt | None, Meta(description="lowers the model's context length")] = None
    model_config: Annotated[
        tuple[str, ...],
        Meta(
            description="KEY=VALUE for an entry of the model's config, VALUE in JSON or a plain string; repeatable; "
            "in the environment several are a JSON array"
        ),
    ] = ()
    num_threads: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None,
        Meta(description="threads of a forward pass; unset: all cores it may use"),
    ] = None
    trust_remote_code: Annotated[bool, Meta(description="run Python code that a model folder brings")] = False
    log_level: Annotated[LogLevel, Meta(description="least level that is logged, by both processes")] = "info"
    log_format: Annotated[LogFormat, Meta(description="auto: human in a terminal, JSON otherwise")] = "auto"
    fault_injection: Annotated[
        str, Meta(description="test only: faults to make on purpose, see worker/README.md; empty is off")
    ] = ""
