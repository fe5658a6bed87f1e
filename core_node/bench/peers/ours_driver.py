"""Our own engine in a process of its own, so that it is measured as the peers are. Arguments: model, threads, dtype."""

import asyncio
import json
import sys
import time
from pathlib import Path

import protocol

protocol.claim_stdout()

from core_node.engine.engine import CoreEngine  # noqa: E402
from core_node.engine.settings import CoreEngineSettings  # noqa: E402
from mesh.node.engine import RunId, RunSpec, Tokens  # noqa: E402
from mesh.node.sampling import SamplingParams  # noqa: E402


async def main(model, threads, dtype):
    settings = CoreEngineSettings(
        model_path=Path(model),
        model_id="bench",
        dtype=dtype,
        n_threads=threads,
        kv_pool_tokens=40_000,
        max_context_tokens=2048,
    )
    engine = CoreEngine(settings)
    await engine.start()
    n_runs = 0

    async def one(prompt, max_tokens, started):
        nonlocal n_runs
        n_runs += 1
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
        spec = RunSpec(
            run_id=RunId(str(n_runs)),
            token_ids=tuple(prompt),
            prompt_tokens=len(prompt),
            sampling=sampling,
            salt=b"",
        )
        ids, ttft = [], 0.0
        async for event in engine.generate(spec):
            if isinstance(event, Tokens):
                ttft = ttft or time.perf_counter() - started
                ids += event.ids
        return ids, ttft

    protocol.say({"ready": f"{engine.info.build}, {dtype}, {threads} threads"})
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        started = time.perf_counter()
        done = await asyncio.gather(*(one(p, request["max_tokens"], started) for p in request["prompts"]))
        wall_s = time.perf_counter() - started
        protocol.say({"wall_s": wall_s, "ttft_s": [t for _, t in done], "ids": [ids for ids, _ in done]})
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
