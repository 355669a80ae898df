"""A policy whose weights come from a checkpoint file."""

from __future__ import annotations

import numpy as np
import rlmesh
from rlmesh.adapters import Action, Actuator, ModelSpec, State
from rlmesh.numpy import Model


class Linear(Model):
    """Pushes by the sign of a weighted sum; `weights` is the path of a NumPy archive.

    The platform fetches what `checkpoints[]` of the request names, checks its digest and
    hands the path to `load` by the parameter named there.
    """

    spec = ModelSpec(
        input=State("x/cartpole"),
        output=Action(Actuator("x/push", 1)),
    )
    workflow_edition = "2026.06"
    params = rlmesh.ParamSpec(
        rlmesh.Param("weights", str, description="path of the checkpoint (.npz with 'weights')"),
    )

    def load(self, weights: str) -> None:
        with np.load(weights, allow_pickle=False) as checkpoint:
            self._weights = checkpoint["weights"].astype(np.float32).reshape(4, 1)

    def predict_batch(self, observations: np.ndarray) -> np.ndarray:
        return np.where(observations @ self._weights > 0.0, 1.0, -1.0).astype(np.float32)
