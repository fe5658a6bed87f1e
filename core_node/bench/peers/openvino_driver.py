"""OpenVINO GenAI's continuous batching, in process. Arguments: model folder (IR), threads, precision hint.

Installation: ../README.md. The precision said at the start is what the compiled model reports, which is f32 for any
hint on a CPU that has no bf16 instructions.
"""

import sys
import time
from pathlib import Path

import protocol

protocol.claim_stdout()

import numpy as np  # noqa: E402
import openvino as ov  # noqa: E402
import openvino_genai as genai  # noqa: E402


def main(folder, threads, precision):
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    scheduler.enable_prefix_caching = True
    scheduler.max_num_seqs = 64
    properties = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": precision,
        "PERFORMANCE_HINT": "LATENCY",
    }
    pipe = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
    n_requests = 0

    def add(prompt, max_tokens):
        nonlocal n_requests
        config = genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        n_requests += 1
        return pipe.add_request(n_requests, ov.Tensor(np.array([prompt], dtype=np.int64)), config)

    def work(prompts, max_tokens, at_s):
        watch, handles = protocol.Watch(len(prompts)), {}
        to_send = sorted(range(len(prompts)), key=lambda i: at_s[i])
        started = time.perf_counter()
        while to_send or pipe.has_non_finished_requests():
            now = time.perf_counter() - started
            while to_send and at_s[to_send[0]] <= now:
                i = to_send.pop(0)
                handles[i] = add(prompts[i], max_tokens[i])
            if not pipe.has_non_finished_requests():
                time.sleep(max(0.0, at_s[to_send[0]] - now))
                continue
            pipe.step()
            now = time.perf_counter() - started
            for i, handle in handles.items():
                while handle.can_read():
                    for output in handle.read().values():
                        watch.saw(i, now, list(output.generated_ids))
        return watch.answer(time.perf_counter() - started)

    protocol.say(
        {
            "ready": f"OpenVINO {ov.__version__.partition('-')[0]}, GenAI {genai.__version__}, hint {precision}, "
            f"{_facts(folder, threads, precision)}, {threads} threads, prefix caching, 1 GB of KV"
        }
    )
    protocol.serve(work)


def _facts(folder, threads, precision):
    """What a model compiled with the same properties says of itself."""
    core = ov.Core()
    properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision}
    model = core.compile_model(str(Path(folder) / "openvino_model.xml"), "CPU", properties)
    names = {"INFERENCE_PRECISION_HINT": "computes in", "KV_CACHE_PRECISION": "KV in"}
    return ", ".join(f"{said} {model.get_property(name).get_type_name()}" for name, said in names.items())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
