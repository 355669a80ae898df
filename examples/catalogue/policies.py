"""Two walkers for every map of the catalogue."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING

import numpy as np
from rlmesh.adapters import Action, Actuator, ModelSpec, State
from rlmesh.numpy import Model

if TYPE_CHECKING:
    from rlmesh.types import BatchPredictContext

SPEC = ModelSpec(
    input=State("x/walk"),
    output=Action(Actuator("x/move_scores", 4)),
)
MOVES = np.array([(0, -1), (1, 0), (0, 1), (-1, 0)], dtype=np.float32)


class Straight(Model):
    """Walks towards the goal as the crow flies; a wall stops it for good."""

    spec = SPEC
    workflow_edition = "2026.06"

    def load(self) -> None:
        print("straight: loaded", file=sys.stderr, flush=True)

    def predict_batch(self, observations: np.ndarray) -> np.ndarray:
        ahead = observations[:, 2:4] - observations[:, 0:2]
        return ahead @ MOVES.T


class Explorer(Model):
    """Avoids walls and the cells it has been to: remembers each episode's visits."""

    spec = SPEC
    workflow_edition = "2026.06"

    def load(self) -> None:
        print("explorer: loaded", file=sys.stderr, flush=True)

    def predict_batch(self, observations: np.ndarray, context: BatchPredictContext) -> np.ndarray:
        scores = 0.1 * (observations[:, 2:4] - observations[:, 0:2]) @ MOVES.T
        scores[observations[:, 4:8] == 0.0] = -np.inf
        for row, episode in enumerate(context):
            visits = episode["state"].setdefault("visits", {})
            here = observations[row, 0:2]
            cell = (int(here[0]), int(here[1]))
            visits[cell] = visits.get(cell, 0) + 1
            jitter = random.Random(episode["predict_seed"])
            for move, (dy, dx) in enumerate(MOVES.astype(int)):
                scores[row, move] -= visits.get((cell[0] + dy, cell[1] + dx), 0)
                scores[row, move] += 0.01 * jitter.random()
        # An adapted action holds finite numbers only.
        return np.maximum(scores, -1e6).astype(np.float32)
