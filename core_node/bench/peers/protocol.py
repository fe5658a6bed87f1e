"""What every driver speaks, with the standard library alone, since drivers run in their peers' own environments.

One JSON object a line. The driver first says {"ready": version and settings, for people}. Then each line
{"prompts": [[id, ...], ...], "max_tokens": n} is one burst: all requests at once, greedy, end of sequence ignored. It
answers {"wall_s": s, "ttft_s": [s, ...], "ids": [[id, ...], ...]}. End of input ends it. Whatever else a peer prints
goes to stderr.
"""

import json
import os
import sys


def serve(burst):
    """`burst(prompts, max_tokens)` returns (wall_s, ttft_s, ids)."""
    for line in sys.stdin:
        request = json.loads(line)
        wall_s, ttft_s, ids = burst(request["prompts"], request["max_tokens"])
        say({"wall_s": wall_s, "ttft_s": ttft_s, "ids": ids})


def claim_stdout():
    """Keep the real stdout for answers; everybody else's prints go to stderr."""
    global _out
    _out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


def say(message):
    _out.write(json.dumps(message) + "\n")
    _out.flush()
