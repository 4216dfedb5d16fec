"""What is checked before a run makes a folder or starts a server, and how its models are run.

A refusal that would come after minutes of asking is made here instead: a Linear that fits no block,
a conversation that is too long, NaN among the weights, a GPU that is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .errors import EngineError, RunError
from .run_folder import identity

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .ladder import Order


def check(order: Order) -> tuple[Checkpoint, dict[str, str]]:
    """Refuse what can be told from names and headers; the parent and the run's identity otherwise."""
    from .checkpoint import fingerprint_weights, open_checkpoint
    from .quantize.plan import make_plan

    if not order.probes:
        raise RunError(
            "no-probes",
            where=order.spec.name,
            found="the spec has no probes",
            fix="add probes, or give --probes FILE",
        )
    if not order.rungs or len(set(order.rungs)) < len(order.rungs):
        raise RunError(
            "no-rungs",
            where="rungs",
            found=f"{', '.join(order.rungs) or 'none'}",
            fix="name each rung once, at least one",
        )
    check_device(order.device)
    parent = open_checkpoint(order.parent)
    for rung in order.rungs:
        make_plan(parent, rung, seed=order.seed)
    return parent, identity(order, fingerprint_weights(parent))


def check_deeply(order: Order, parent: Checkpoint, progress: Callable[[int, int], None]) -> None:
    """Refuse what would otherwise come up after minutes of asking: NaN weights, unusable conversations."""
    from .checkpoint import check_finite

    calibration(order, parent)
    done = 0
    for shard in parent.shards():
        for name, tensor in shard.tensors():
            check_finite(name, tensor, shard.path)
            done += 1
            progress(done, len(parent.names))


def check_device(device: str) -> None:
    """Refuse a device that is not there. Raises EngineError ``no-device``."""
    if device == "cpu":
        return
    import torch

    known = [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    if device not in (["cuda", *known] if known else []):
        raise EngineError(
            "no-device",
            where=device,
            found=f"this machine has cpu{', ' + ', '.join(known) if known else ' and no CUDA device'}",
            fix=f"use --device {known[0] if known else 'cpu'}",
        )


@contextmanager
def model_threads(parent: Checkpoint) -> Iterator[None]:
    """Torch's CPU threads inside the block: as the embedded engine has them, for the same reason.

    A small model's matrices gain little from a second core, and threads that wait for one another
    lose much when something else runs: calibrating the 8 M model on 2 cores took 6 s with one
    thread, 3.5 s with two, and 34 s with two beside one other busy process.
    """
    import torch

    from .engines.embedded.server import default_threads

    text = parent.config.get("text_config") or parent.config
    before = torch.get_num_threads()
    torch.set_num_threads(default_threads(int(text.get("hidden_size", 0))))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def calibration(order: Order, parent: Checkpoint) -> list[list[int]]:
    from .chat import Renderer
    from .conversations import render_all

    return render_all(Renderer.from_folder(order.parent), order.conversations, context_of(parent))


def context_of(parent: Checkpoint) -> int:
    """The longest conversation that a model takes, in tokens."""
    text = parent.config.get("text_config") or parent.config
    return int(text.get("max_position_embeddings", 1 << 20))


def parent_bits(parent: Checkpoint) -> float:
    """Mean bits per weight over the parent's Linears, from the types in its files."""
    from .checkpoint import canonical_name, parent_linears

    linears = parent_linears(parent)
    bits = weights = 0
    for stored, info in parent.infos.items():
        if (canonical_name(stored) or "").removesuffix(".weight") in linears and stored.endswith(".weight"):
            rows, columns = info.shape
            bits += 8 * info.bytes
            weights += rows * columns
    return round(bits / weights, 3)
