"""llama.cpp's server as the package xllamacpp carries it, prebuilt: for machines without a compiler, and fair only on a
CPU that has no more than AVX2. Arguments: GGUF file, port, threads, slots, context tokens of all slots together."""

import sys
import threading

import xllamacpp


def main(model, port, threads, slots, context_tokens):
    settings = xllamacpp.CommonParams()
    settings.model.path = model
    settings.hostnames = ["127.0.0.1"]
    settings.port = port
    settings.n_parallel = slots
    settings.n_ctx = context_tokens
    settings.cpuparams.n_threads = threads
    settings.cpuparams_batch.n_threads = threads
    settings.ui = False
    server = xllamacpp.Server(settings)
    print(f"{server.listening_address}; {xllamacpp.get_system_info()}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
