"""What every driver speaks, with the standard library alone, since drivers run in their peers' own environments.

One JSON object a line. The driver first says {"ready": version and settings, for people}. Then each line
{"prompts": [[id, ...], ...], "max_tokens": [n, ...], "at_s": [s, ...]} is one piece of work: request i is sent at_s[i]
seconds after the start, greedy, end of sequence ignored. It answers, times in seconds after the start and in the
order of the requests, {"wall_s": s, "first_s": [...], "last_s": [...], "n_tokens": [...], "ids": [[id, ...], ...]};
ids are null where the peer's interface does not tell them. A request that failed ends the driver: its stderr says why.
End of input ends it. Whatever else a peer prints goes to stderr.
"""

import json
import os
import sys


class Watch:
    """First and last token times and the tokens of each request; the driver tells it of tokens as they come."""

    def __init__(self, n_requests):
        self.first_s = [None] * n_requests
        self.last_s = [None] * n_requests
        self.n_tokens = [0] * n_requests
        self.ids = [[] for _ in range(n_requests)]

    def saw(self, i, now_s, ids=(), n_tokens=None):
        """Request i had new tokens at now_s: their ids, or only their number."""
        n = len(ids) if n_tokens is None else n_tokens
        if n and self.first_s[i] is None:
            self.first_s[i] = now_s
        if n:
            self.last_s[i] = now_s
        self.n_tokens[i] += n
        self.ids[i] += ids

    def answer(self, wall_s, *, with_ids=True):
        """The driver's answer."""
        if None in self.first_s:
            raise RuntimeError(f"{self.first_s.count(None)} of {len(self.first_s)} requests gave no token")
        return {
            "wall_s": wall_s,
            "first_s": self.first_s,
            "last_s": self.last_s,
            "n_tokens": self.n_tokens,
            "ids": self.ids if with_ids else None,
        }


def serve(work):
    """`work(prompts, max_tokens, at_s)` returns an answer."""
    for line in sys.stdin:
        request = json.loads(line)
        say(work(request["prompts"], request["max_tokens"], request["at_s"]))


def claim_stdout():
    """Keep the real stdout for answers; everybody else's prints go to stderr."""
    global _out
    _out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


def say(message):
    _out.write(json.dumps(message) + "\n")
    _out.flush()
