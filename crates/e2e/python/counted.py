"""An environment with three tasks and a model that note each time they are constructed.

`NOTES` names the file. Only what a run starts is noted, not what describes the classes
(served processes have RLMESH_ADDRESS set). With `TOGETHER`, an episode begins once so many
environments of its room were constructed: the first process can't finish everything alone
while the others are still starting.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import rlmesh
from gymnasium import spaces
from rlmesh.adapters import Action, Actuator, EnvTags, ModelSpec, State, StateTag
from rlmesh.numpy import Model

ROOMS = {"small": 2, "large": 3, "huge": 5}


def note(what: str) -> None:
    if "RLMESH_ADDRESS" in os.environ:
        line = f"{what} {os.getpid()}\n".encode()
        with open(os.environ["NOTES"], "ab", buffering=0) as notes:
            notes.write(line)


class Room(gymnasium.Env):
    """Takes as many steps as the room is large; each scores its size."""

    def __init__(self, room: str) -> None:
        self.observation_space = spaces.Box(-10.0, 10.0, shape=(1,), dtype=np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, shape=(1,), dtype=np.float32)
        self._room = room
        self._size = ROOMS[room]
        self._steps = 0

    def _wait_for_others(self) -> None:
        together = int(os.environ.get("TOGETHER", "0"))
        while together > 0:
            with open(os.environ["NOTES"], encoding="utf-8") as notes:
                if sum(line.startswith(f"env {self._room} ") for line in notes) >= together:
                    return
            time.sleep(0.02)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._wait_for_others()
        self._steps = 0
        return np.zeros(1, dtype=np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        done = self._steps >= self._size
        return np.zeros(1, dtype=np.float32), float(self._size), done, False, {"is_success": done}


class Rooms(rlmesh.EnvFactory):
    tags = EnvTags(observation=StateTag("x/room"), action=Action(Actuator("x/walk", 1)))
    workflow_edition = "2026.06"
    params = rlmesh.ParamSpec(
        rlmesh.Param("room", "enum", choices=tuple(ROOMS), description="which room"),
        rlmesh.Param("paint", str, description="a dial without effect"),
    )

    @classmethod
    def enumerate_variants(cls) -> Iterator[rlmesh.Variant]:
        for room in ROOMS:
            yield rlmesh.Variant(f"room/{room}", {"room": room}, name=f"The {room} room")

    def make(self, room: str = "small", paint: str = "white") -> gymnasium.Env:
        note(f"env {room} {paint}")
        return Room(room)


class Walker(Model):
    spec = ModelSpec(input=State("x/room"), output=Action(Actuator("x/walk", 1)))
    workflow_edition = "2026.06"

    def load(self) -> None:
        note("model")

    def predict_batch(self, observations: np.ndarray) -> np.ndarray:
        return np.ones((len(observations), 1), dtype=np.float32)
