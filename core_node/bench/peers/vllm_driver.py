"""vLLM for CPUs, in process. Arguments: Hugging Face folder, threads, dtype, `compiled` or `eager`. Installation:
../README.md. Compiled is vLLM's own default; it compiles for a minute or more at each start.
"""

import os
import sys
import time

import protocol

protocol.claim_stdout()


def main(folder, threads, dtype, mode):
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    import vllm

    llm = vllm.LLM(
        folder,
        dtype=dtype,
        enforce_eager=mode == "eager",
        skip_tokenizer_init=True,
        max_model_len=2048,
        enable_prefix_caching=True,
        max_num_seqs=64,
    )
    engine = llm.llm_engine
    n_requests = 0

    def work(prompts, max_tokens, at_s):
        nonlocal n_requests
        watch, index = protocol.Watch(len(prompts)), {}
        to_send = sorted(range(len(prompts)), key=lambda i: at_s[i])
        started = time.perf_counter()
        while to_send or engine.has_unfinished_requests():
            now = time.perf_counter() - started
            while to_send and at_s[to_send[0]] <= now:
                i = to_send.pop(0)
                n_requests += 1
                index[str(n_requests)] = i
                params = vllm.SamplingParams(
                    temperature=0.0, max_tokens=max_tokens[i], ignore_eos=True, detokenize=False
                )
                engine.add_request(str(n_requests), {"prompt_token_ids": prompts[i]}, params)
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, at_s[to_send[0]] - now))
                continue
            outputs = engine.step()
            now = time.perf_counter() - started
            for output in outputs:
                i = index[output.request_id]
                ids = list(output.outputs[0].token_ids)
                watch.saw(i, now, ids[watch.n_tokens[i] :])
        return watch.answer(time.perf_counter() - started)

    protocol.say(
        {
            "ready": f"vLLM {vllm.__version__}, {dtype}, {mode}, threads bound to 0-{threads - 1}, prefix caching, "
            "1 GB of KV"
        }
    )
    protocol.serve(work)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
