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

    async def one(i, prompt, max_tokens, at_s, started, watch):
        nonlocal n_runs
        await asyncio.sleep(at_s)
        n_runs += 1
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
        spec = RunSpec(
            run_id=RunId(str(n_runs)),
            token_ids=tuple(prompt),
            prompt_tokens=len(prompt),
            sampling=sampling,
            salt=b"",
        )
        async for event in engine.generate(spec):
            if isinstance(event, Tokens):
                watch.saw(i, time.perf_counter() - started, event.ids)

    protocol.say({"ready": f"{engine.info.build}, {dtype}, {threads} threads, prefix caching"})
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        prompts = request["prompts"]
        watch, started = protocol.Watch(len(prompts)), time.perf_counter()
        work = zip(prompts, request["max_tokens"], request["at_s"], strict=True)
        await asyncio.gather(*(one(i, *each, started, watch) for i, each in enumerate(work)))
        protocol.say(watch.answer(time.perf_counter() - started))
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
