"""Policies for the counting environment: two that behave and one that does not."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import rlmesh
from rlmesh.adapters import Action, Actuator, ModelSpec, State
from rlmesh.numpy import Model

if TYPE_CHECKING:
    from rlmesh.types import BatchPredictContext

SPEC = ModelSpec(
    input=State("x/counter"),
    output=Action(Actuator("x/guess", 1)),
)

MODES = (
    "none",
    "exit",  # os._exit(3) in a predict
    "exit_zero",
    "kill",  # SIGKILL to itself in a predict
    "raise",
    "hang",
    "slow_predict",  # sleeps `seconds` in a predict
    "wrong_shape",  # an action of another width than declared
    "short_batch",  # one row fewer than asked for
    "nan_action",
    "garbage",  # noise on stdout and stderr
    "raise_load",
    "exit_load",  # exit status 0 instead of being loaded
    "hang_load",
    "slow_load",  # sleeps `seconds` while loading
)


def follow(observations: np.ndarray) -> np.ndarray:
    """The guess that the hint says."""
    return np.where(observations[:, 2:3] > 0.0, 1.0, -1.0).astype(np.float32)


class Follower(Model):
    """Believes every hint."""

    spec = SPEC
    workflow_edition = "2026.06"

    def predict_batch(self, observations: np.ndarray) -> np.ndarray:
        return follow(observations)


class Doubter(Model):
    """Does the opposite of a third of the hints, drawn from the episode's own seed."""

    spec = SPEC
    workflow_edition = "2026.06"

    def predict_batch(self, observations: np.ndarray, context: BatchPredictContext) -> np.ndarray:
        actions = follow(observations)
        for row, episode in enumerate(context):
            if random.Random(episode["predict_seed"]).random() < 1 / 3:
                actions[row] = -actions[row]
        return actions


def noise() -> None:
    sys.stdout.flush()
    os.write(1, b"RLMesh serving model on tcp://127.0.0.1:1 (startup: none)\n")
    os.write(1, b"\x00\xff\xfe not utf-8\nhalf a line without an end")
    os.write(2, b"\xc3\x28 noise on stderr\r\n")


def hang() -> None:
    print("misbehaving model: hanging, as ordered", file=sys.stderr, flush=True)
    threading.Event().wait()


def die(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Misbehaving(Model):
    """`Follower` that does `mode` in predict `at` (1 is the first) of the episodes with `seed`
    (all when null), only the first time when `once` names a file that remembers it."""

    spec = SPEC
    workflow_edition = "2026.06"
    params = rlmesh.ParamSpec(
        rlmesh.Param("mode", "enum", choices=MODES, description="what to do wrong"),
        rlmesh.Param("at", int, description="predict of an episode that it happens in; 1 is the first"),
        rlmesh.Param("seconds", float, description="how long the slow modes take"),
    )

    def load(
        self,
        mode: str = "none",
        at: int = 2,
        seconds: float = 5.0,
        seed: int | None = None,
        once: str | None = None,
    ) -> None:
        self._mode = mode
        self._at = at
        self._seconds = seconds
        self._seed = seed
        self._once = once
        match mode:
            case "raise_load":
                raise RuntimeError("misbehaving model: raised while loading, as ordered")
            case "exit_load":
                die(0)
            case "hang_load":
                hang()
            case "slow_load":
                time.sleep(seconds)
            case "garbage":
                noise()

    def _due(self, context: BatchPredictContext) -> list[int]:
        """The rows whose turn it is."""
        rows = [
            row
            for row, episode in enumerate(context)
            if episode["predict_index"] == self._at - 1
            and (self._seed is None or episode["episode_seed"] == self._seed)
        ]
        if rows and self._once is not None:
            try:
                os.close(os.open(self._once, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            except FileExistsError:
                return []
        return rows

    def predict_batch(self, observations: np.ndarray, context: BatchPredictContext) -> np.ndarray:
        actions = follow(observations)
        if self._mode == "garbage":
            noise()
        rows = self._due(context)
        if not rows:
            return actions
        match self._mode:
            case "exit":
                print(f"misbehaving model: exiting with status 3 in predict {self._at}", file=sys.stderr)
                die(3)
            case "exit_zero":
                die(0)
            case "kill":
                print(f"misbehaving model: killing itself in predict {self._at}", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise RuntimeError(f"misbehaving model: raised in predict {self._at}, as ordered")
            case "hang":
                hang()
            case "slow_predict":
                time.sleep(self._seconds)
            case "wrong_shape":
                return np.zeros((len(actions), 5), dtype=np.float32)
            case "short_batch":
                return actions[:-1]
            case "nan_action":
                actions[rows] = np.nan
        return actions
