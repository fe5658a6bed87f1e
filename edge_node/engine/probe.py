"""Right after loading: does this model keep KV the way we read it? Runs in the child process."""

from __future__ import annotations

from edge_node.engine.backend import Backend, BatchItem, DecodeStatus
from edge_node.engine.blob import BlobLayout, check
from mesh.errors import InvalidRequest, PayloadCorrupt


def probe_layout(backend: Backend, layout: BlobLayout, vocab_size: int) -> None:
    """Compute two tokens, look at their state, leave nothing. Raises InvalidRequest if the model is not what its
    header said, so that a wrong layout is found at the start and not in the middle of a transfer."""
    if backend.vocab_size != vocab_size:
        raise InvalidRequest(
            f"llama.cpp counts {backend.vocab_size} tokens, the file's header {vocab_size}", field="model"
        )
    token_ids = [0, 1][: max(1, min(2, vocab_size))]
    try:
        if backend.decode([BatchItem(backend.scratch, 0, token_ids, True)]) is not DecodeStatus.OK:
            raise InvalidRequest(f"llama.cpp cannot compute with it: {backend.last_errors()}", field="model")
        check(backend.save(backend.scratch), layout, 0, len(token_ids))
    except PayloadCorrupt as exc:
        raise InvalidRequest(f"llama.cpp keeps this model's KV in an unknown layout: {exc}", field="model") from exc
    finally:
        backend.remove(backend.scratch)
