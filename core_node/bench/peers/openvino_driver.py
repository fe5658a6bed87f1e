"""OpenVINO GenAI's continuous batching, in process. Arguments: model folder (IR), threads.

pip install openvino-genai==2026.4.1.0; the IR comes from `optimum-cli export openvino -m HF_FOLDER
--task text-generation-with-past --weight-format fp16 OUT` (optimum-intel, nncf, torch; without torchvision).
"""

import sys
import time

import protocol

protocol.claim_stdout()

import numpy as np  # noqa: E402
import openvino as ov  # noqa: E402
import openvino_genai as genai  # noqa: E402


def main(folder, threads):
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.enable_prefix_caching = True
    scheduler.max_num_seqs = 64
    properties = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "bf16",
        "PERFORMANCE_HINT": "LATENCY",
    }
    pipe = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
    n_requests = 0

    def burst(prompts, max_tokens):
        nonlocal n_requests
        config = genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        started = time.perf_counter()
        handles = []
        for prompt in prompts:
            handles.append(pipe.add_request(n_requests, ov.Tensor(np.array([prompt], dtype=np.int64)), config))
            n_requests += 1
        ttft, ids = [0.0] * len(prompts), [[] for _ in prompts]
        while pipe.has_non_finished_requests():
            pipe.step()
            now = time.perf_counter() - started
            for i, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        if not ids[i]:
                            ttft[i] = now
                        ids[i] += output.generated_ids
        return time.perf_counter() - started, ttft, ids

    protocol.say({"ready": f"OpenVINO GenAI {genai.__version__}, bf16, {threads} threads, prefix caching"})
    protocol.serve(burst)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
