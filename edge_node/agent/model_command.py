"""`kvmesh model status | install | back`: the models of a box, beside each other, one in force."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import grpc.aio
import typer
from rich.console import Console
from rich.progress import Progress

from mesh.configfile import load_settings
from mesh.errors import InvalidRequest, NotFound
from mesh.settings import EdgeSettings

Config = Annotated[Path, typer.Option("--config", metavar="FILE", help="The agent's settings.")]


def register(app: typer.Typer) -> None:
    """Entry point of `kvmesh.commands`."""
    model = typer.Typer(no_args_is_help=True, help="The models of an edge box: which is in force, a new one, back.")
    app.add_typer(model, name="model")

    @model.command("status")
    def status(config: Config) -> None:
        """What is in each slot, and what is in force."""
        from edge_node.agent.model_store import MODELS_FOLDER, ModelStore

        settings = load_settings(EdgeSettings, config, {})
        store = ModelStore(settings.state_folder / MODELS_FOLDER)
        current = store.current()
        console = Console()
        if current is None:
            console.print(f"none installed; the agent serves {settings.model.path}", highlight=False)
        for slot, found in store.slots().items():
            if found is None:
                console.print(f"{slot}: empty")
                continue
            marks = ["in force"] * (current is not None and current.slot == slot)
            marks += [] if found.record.proven else ["not proven yet"]
            marks += [f"failed: {found.record.failed}"] if found.record.failed else []
            text = f"{slot}: {found.record.model_id} {found.record.digest[:16]} {', '.join(marks)}"
            console.print(text, highlight=False)

    @model.command("install")
    def install(
        name: Annotated[str, typer.Argument(help="Name or SHA-256 of a model that the mesh gives, or a GGUF file.")],
        config: Config,
        digest: Annotated[str, typer.Option(help="SHA-256 that a file must have.")] = "",
    ) -> None:
        """Fetch, verify, check and test a model beside the old one, then put it in force for the agent's next start."""
        settings = load_settings(EdgeSettings, config, {})
        installed = asyncio.run(_install(settings, name, digest))
        Console().print(f"{installed} is in force from the agent's next start on; `kvmesh model back` undoes it")

    @model.command("back")
    def back(config: Config) -> None:
        """Put the other model in force, for the agent's next start."""
        from edge_node.agent.model_store import MODELS_FOLDER, ModelStore

        settings = load_settings(EdgeSettings, config, {})
        found = ModelStore(settings.state_folder / MODELS_FOLDER).back("an operator put the other one in force")
        Console().print(f"{found.record.model_id} is in force from the agent's next start on")


async def _install(settings: EdgeSettings, name: str, digest: str) -> str:
    from edge_node.agent.model_store import MODELS_FOLDER, ModelStore, from_file, from_mesh
    from mesh.identity.ca import NodeCredentials
    from mesh.machine import usable_threads
    from mesh.model.description import model_digest
    from mesh.rpc.blobs.fetch import list_blobs
    from mesh.rpc.channel import node_channel

    store = ModelStore(settings.state_folder / MODELS_FOLDER)
    threads = settings.engine.n_threads or usable_threads()
    file = Path(name)
    if await asyncio.to_thread(file.is_file):
        found = await asyncio.to_thread(model_digest, file)
        if digest and found != digest:
            raise InvalidRequest(f"{file} has SHA-256 {found}, not {digest}", field="digest")
        installed = await store.install(found, settings.model.id, from_file(file), n_threads=threads)
        return installed.record.model_id
    credentials = NodeCredentials.load(settings.identity.folder)
    peer = settings.placement

    def dial() -> grpc.aio.Channel:
        return node_channel(str(peer.address), credentials, peer.node_id)

    given = [b for b in await list_blobs(dial) if b.kind == "model"]
    blob = next((b for b in given if name in (b.name, b.digest)), None)
    if blob is None:
        names = ", ".join(f"{b.name} ({b.digest[:12]})" for b in given) or "none"
        raise NotFound(f"the mesh gives no model {name[:80]!r}; it gives {names}", field="name")
    with Progress() as bar:
        task = bar.add_task(blob.name, total=blob.size_bytes)
        fetch = from_mesh(dial, blob.digest, lambda here, size: bar.update(task, completed=here))
        installed = await store.install(blob.digest, blob.name, fetch, n_threads=threads)
    return installed.record.model_id
