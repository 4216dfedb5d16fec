"""The bundled pair and what ``manners demo`` asks of it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

from ..conversations import Conversation
from ..spec import load_spec
from . import world

if TYPE_CHECKING:
    from ..ladder import Order
    from ..quantize.plan import Rung

PAIR = Path(__file__).with_name("pair")
BASE, PARENT = PAIR / "base", PAIR / "parent"
CALIBRATION = 64


def calibration(count: int = CALIBRATION, seed: int = 5) -> tuple[Conversation, ...]:
    """Conversations from the side that the fine-tune was taught on; none of the probes is among them."""
    rng, persona = random.Random(seed), load_spec("annie").persona
    made = []
    for number in range(1, count + 1):
        drawn = world.conversation(rng, persona, "annie", "tune", rng.choice((1, 1, 2, 5)))
        made.append(
            Conversation(
                id=f"calibration-{number}",
                category=drawn["category"],
                messages=tuple(drawn["messages"]),
                tools=tuple(drawn["tools"]),
            )
        )
    return tuple(made)


def demo_order(
    device: str = "cpu", rungs: tuple[Rung, ...] | None = None, command: str = "manners demo"
) -> Order:
    """Annie's spec in the demo's world, put to the bundled parent."""
    from ..ladder import RUNGS, Order

    spec = world.demo_spec(load_spec("annie"))
    return Order(
        spec=spec,
        probes=spec.probes,
        parent=PARENT,
        conversations=calibration(),
        rungs=rungs or RUNGS,
        device=device,
        command=command,
    )
