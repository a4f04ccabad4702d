"""vLLM in the place of a service, for arrivals.py; run by the Python that vLLM is installed for.

usage: vllm_arrivals.py MODEL WORKLOAD.json FRACTION... -> one line of JSON

The saturated rate first, then times to the first token at each fraction of it.
"""

# ruff: noqa: PLC0415 - the environment must be set first
import asyncio
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["HF_HUB_OFFLINE"] = "1"


async def first_token_s(engine, row, name):
    """Seconds from sending a request to its first token; the request runs to its end."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=row["max_new_tokens"], ignore_eos=True, detokenize=False)
    sent, first = time.perf_counter(), None
    async for _ in engine.generate({"prompt_token_ids": row["prompt"]}, params, request_id=name):
        first = first or time.perf_counter() - sent
    return first


async def at_rate(engine, rows, rate, seed):
    """Times to the first token with Poisson arrivals; all at once without a rate. Beside them, the seconds in all."""
    await engine.reset_prefix_cache()
    gaps, loop = random.Random(seed), asyncio.get_running_loop()
    due = begin = loop.time()
    tasks = []
    for number, row in enumerate(rows):
        if rate:
            due += gaps.expovariate(rate)
            await asyncio.sleep(max(0.0, due - loop.time()))
        tasks.append(asyncio.create_task(first_token_s(engine, row, f"{seed}-{rate}-{number}")))
    times = await asyncio.gather(*tasks)
    return times, loop.time() - begin


async def run(model, rows, fractions):
    """All figures."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=model, dtype="bfloat16", max_model_len=2048, enable_prefix_caching=True)
    )
    try:
        seconds = [(await at_rate(engine, rows, None, seed))[1] for seed in range(3)]
        saturated = len(rows) / statistics.median(seconds[1:])
        found = {"saturated": saturated}
        for fraction in fractions:
            times, _ = await at_rate(engine, rows, fraction * saturated, 7)
            found[fraction] = {"rate": fraction * saturated, "times": times}
        print(json.dumps(found), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), [float(f) for f in sys.argv[3:]]))
