"""Hand-written policies for the two environments: a good one and a poor one each.

Every policy answers a whole batch at once (`predict_batch`): row i of the
observations is one running episode, and row i of the answer is its action. The SDK
derives the single-episode form from it.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
from rlmesh.adapters import Action, Actuator, ModelSpec, State
from rlmesh.numpy import Model

if TYPE_CHECKING:
    from rlmesh.types import BatchPredictContext

CARTPOLE = ModelSpec(
    input=State("x/cartpole"),
    output=Action(Actuator("x/push", 1)),
)

LAKE = ModelSpec(
    input=State("x/cell"),
    output=Action(Actuator("x/move_scores", 4)),
)


def balance(observations: np.ndarray) -> np.ndarray:
    """Push towards where the pole will be: its angle plus how fast it turns."""
    angle, angular_velocity = observations[:, 2:3], observations[:, 3:4]
    return np.where(angle + angular_velocity > 0.0, 1.0, -1.0).astype(np.float32)


class Balancer(Model):
    """Balances the pole with its undivided attention."""

    spec = CARTPOLE
    workflow_edition = "2026.06"

    def predict_batch(self, observations: np.ndarray) -> np.ndarray:
        return balance(observations)


class Distracted(Model):
    """The same rule, but on some steps it pushes at random.

    A policy that draws random numbers takes them from `predict_seed`: it depends on
    the episode's seed and the number of the predict alone, so the same episode gets
    the same actions whatever runs beside it.
    """

    spec = CARTPOLE
    workflow_edition = "2026.06"
    distraction = 0.6

    def predict_batch(
        self, observations: np.ndarray, context: BatchPredictContext
    ) -> np.ndarray:
        actions = balance(observations)
        for row, episode in enumerate(context):
            draw = random.Random(episode["predict_seed"])
            if draw.random() < self.distraction:
                actions[row] = draw.choice((-1.0, 1.0))
        return actions


LEFT, DOWN, RIGHT, UP = range(4)


def scores(moves: list[int]) -> np.ndarray:
    """A row of scores for each cell of the lake that prefers the given move."""
    return np.eye(4, dtype=np.float32)[moves]


class CarefulWalker(Model):
    """Knows that the ice is slippery: walks so that a slip never ends in a hole,
    wherever the lake allows it."""

    spec = LAKE
    workflow_edition = "2026.06"
    table = scores(
        [LEFT, UP, UP, UP]
        + [LEFT, LEFT, LEFT, LEFT]
        + [UP, DOWN, LEFT, LEFT]
        + [LEFT, RIGHT, DOWN, LEFT]
    )

    def predict_batch(self, observations: np.ndarray) -> np.ndarray:
        return observations @ self.table


class HastyWalker(Model):
    """Takes the shortest way, as if the ice were not slippery."""

    spec = LAKE
    workflow_edition = "2026.06"
    table = scores(
        [DOWN, RIGHT, DOWN, LEFT]
        + [DOWN, LEFT, DOWN, LEFT]
        + [RIGHT, DOWN, DOWN, LEFT]
        + [LEFT, RIGHT, RIGHT, LEFT]
    )

    def predict_batch(self, observations: np.ndarray) -> np.ndarray:
        return observations @ self.table
