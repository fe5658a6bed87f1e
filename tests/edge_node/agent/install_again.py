"""Installs one model after the other until it is killed: `python install_again.py FOLDER FILE FILE`."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from pathlib import Path

from edge_node.agent import model_store
from edge_node.agent.model_store import ModelStore, from_file


async def main(folder: Path, files: list[Path]) -> None:
    model_store.check_header = lambda path: None  # what takes time here is the disk, as on a box with a large model
    model_store._COPY_BYTES = 4096
    store = ModelStore(folder)
    store.started()
    while True:
        for file in files:
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            await store.install(digest, file.stem, from_file(file), n_threads=1, self_test=False)
            store.started()
            print(file.stem, flush=True)


asyncio.run(main(Path(sys.argv[1]), [Path(p) for p in sys.argv[2:]]))
