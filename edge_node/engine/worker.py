"""The llama.cpp process: `python -m edge_node.engine.worker SOCKET_FD ARENA_FD`. Started by child.py only.

Two threads. The reader turns frames into messages; when the socket ends, the agent is gone and the process exits
at once, also from within a long computation. The main thread owns llama.cpp: it handles all messages that are
there, computes a step, sends what the runs have to tell, and sleeps when there is nothing to do. An exception that
is not of mesh.errors is a bug after which nothing can be trusted: the process ends, and the agent starts another.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from edge_node.engine.arena import Arena
from edge_node.engine.blob import BlobLayout
from edge_node.engine.book import CoreLimits
from edge_node.engine.core import EngineCore
from edge_node.engine.llama import LlamaBackend, build_name
from edge_node.engine.messages import (
    LENGTH,
    CachedTokens,
    Call,
    Cancel,
    CheckIntegrity,
    Event,
    Export,
    Failure,
    FromChild,
    GetLoad,
    Join,
    KvTokens,
    OpenImport,
    Pause,
    Ready,
    Release,
    Reply,
    Request,
    RunSelfTest,
    Start,
    Submit,
    ToChild,
    Write,
    decode,
    encode,
)
from edge_node.engine.probe import probe_layout
from mesh.errors import MeshError
from mesh.model.tokenizer import load_tokenizer
from mesh.node.engine import EngineLoad, SelfTest

Inbox = queue.SimpleQueue[ToChild]


class Worker:
    """The main thread's loop over one loaded model."""

    def __init__(self, sock: socket.socket, inbox: Inbox, core: EngineCore, arena: Arena, layout: BlobLayout) -> None:
        self._sock = sock
        self._inbox = inbox
        self._core = core
        self._arena = arena
        self._layout = layout

    def run(self) -> None:
        """Serve for ever."""
        busy = False
        while True:
            if not busy:
                self._handle(self._inbox.get())
            while not self._inbox.empty():
                self._handle(self._inbox.get())
            busy = self._core.step()
            self._tell()

    def _tell(self) -> None:
        frames = [
            encode(Failure.from_error("run", key, event) if isinstance(event, MeshError) else Event(key, event))
            for key, event in self._core.book.take_events()
        ]
        if frames:
            self._sock.sendall(b"".join(frames))

    def _handle(self, message: ToChild) -> None:
        match message:
            case Submit(key, spec):
                try:
                    self._core.book.submit(key, spec)
                except MeshError as error:
                    self._sock.sendall(encode(Failure.from_error("run", key, error)))
            case Cancel(key):
                self._core.book.cancel(key)
            case Call(call_id, request):
                reply = self._answer(call_id, request)
                self._tell()  # what a command made happen is known before its answer is
                self._sock.sendall(encode(reply))
            case Start():
                raise AssertionError("started twice")

    def _answer(self, call_id: int, request: Request) -> FromChild:
        try:
            return Reply(call_id, self._do(request))
        except MeshError as error:
            return Failure.from_error("call", call_id, error)

    def _do(self, request: Request) -> int | str | EngineLoad | SelfTest | None:
        core = self._core
        match request:
            case Pause(run_id):
                core.book.pause(run_id)
            case Release(run_id):
                core.book.release(run_id)
            case KvTokens(run_id):
                return core.kv.kv_tokens(run_id)
            case Export(run_id, start, stop, slot):
                k, v = core.kv.export(run_id, start, stop)
                to_k, to_v = self._arena.rows(slot, self._layout, stop - start)
                to_k[:], to_v[:] = k, v
            case OpenImport(spec):
                return core.kv.open_import(spec)
            case Write(run_id, start, stop, slot):
                core.kv.write(run_id, start, *self._arena.rows(slot, self._layout, stop - start))
            case Join(run_id, head):
                core.kv.join(run_id, head)
            case CachedTokens(token_ids, salt):
                return core.kv.cached_tokens(token_ids, salt)
            case GetLoad():
                return core.load()
            case RunSelfTest():
                return core.self_test()
            case CheckIntegrity():
                try:
                    core.check()
                except AssertionError as exc:
                    return str(exc) or "memory accounting is off"
        return None


def _read_frames(sock: socket.socket, inbox: Inbox) -> None:
    with sock.makefile("rb") as stream:
        while len(head := stream.read(LENGTH.size)) == LENGTH.size:
            (length,) = LENGTH.unpack(head)
            body = stream.read(length)
            if len(body) < length:
                break
            inbox.put(decode(body))
    os._exit(0)  # the agent is gone; nothing here outlives it


def _load(start: Start, arena_fd: int) -> tuple[EngineCore, Arena, BlobLayout]:
    """Load the model. Raises errors of mesh.errors."""
    layout = BlobLayout(n_layers=start.n_layers, n_kv_heads=start.n_kv_heads, head_dim=start.head_dim)
    with ThreadPoolExecutor(1) as aside:  # the vocabulary is read while llama.cpp reads the weights
        tokenizer_later = aside.submit(load_tokenizer, Path(start.model_path))
        backend = _load_backend(start)
        tokenizer = tokenizer_later.result()
    probe_layout(backend, layout, start.vocab_size)
    limits = CoreLimits(
        capacity_tokens=start.n_ctx_tokens,
        max_context_tokens=start.max_context_tokens,
        max_running=start.max_running,
        max_sequences=start.max_sequences,
        max_step_tokens=start.max_step_tokens,
        max_waiting=start.max_waiting,
        max_stall_s=start.max_stall_s,
    )
    core = EngineCore(
        backend,
        layout,
        limits,
        eos_token_ids=frozenset(start.eos_token_ids),
        new_stream=tokenizer.stream,
        clock=time.perf_counter,
    )
    return core, Arena(arena_fd, start.slot_bytes), layout


def _load_backend(start: Start) -> LlamaBackend:
    return LlamaBackend(
        model_path=Path(start.model_path),
        n_threads=start.n_threads,
        n_ctx_tokens=start.n_ctx_tokens,
        n_sequences=start.max_sequences,
        max_step_tokens=start.max_step_tokens,
    )


def main(socket_fd: int, arena_fd: int) -> None:
    """Load, say so, serve. Returns only if loading failed."""
    # A terminal's Ctrl-C and a service manager's stop go to the whole group; the agent drains and then hangs up.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=socket_fd)
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_read_frames, args=(sock, inbox), name="reader", daemon=True).start()
    start = inbox.get()
    assert isinstance(start, Start), "the first message must be Start"
    try:
        core, arena, layout = _load(start, arena_fd)
    except MeshError as error:
        sock.sendall(encode(Failure.from_error("start", 0, error)))
        return
    sock.sendall(encode(Ready(build_name())))
    Worker(sock, inbox, core, arena, layout).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
