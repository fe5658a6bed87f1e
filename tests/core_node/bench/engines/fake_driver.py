"""A driver of an engine that computes nothing: it answers as its first argument says. Standard library only."""

import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4] / "core_node" / "bench" / "peers"))

import protocol

protocol.claim_stdout()


def work(prompts, max_tokens, at_s):
    mode = sys.argv[1]
    if mode == "dies":
        print("out of luck", file=sys.stderr)
        sys.exit(3)
    if mode == "hangs":
        time.sleep(600)
    if mode == "garbles":
        protocol._out.write("no JSON\n")
        protocol._out.flush()
    watch = protocol.Watch(len(prompts))
    for i, n in enumerate(max_tokens):
        watch.saw(i, at_s[i] + 0.5, [1])
        watch.saw(i, at_s[i] + 1.5, [2] * (n - 1 - (mode == "stops early")))
    return watch.answer(2.0)


if __name__ == "__main__":
    if sys.argv[1] == "no start":
        sys.exit("no such device")
    child = subprocess.Popen(["sleep", "600"]) if sys.argv[1] == "has a child" else None
    protocol.say({"ready": json.dumps({"child": child.pid if child else 0})})
    protocol.serve(work)
