"""Writes the two checkpoints beside this file (they are committed; this says what is in them)."""

from __future__ import annotations

import pathlib

import numpy as np

CHECKPOINTS = {
    # cart position, cart velocity, pole angle, pole angular velocity
    "trained": (0.0, 0.0, 1.0, 1.0),
    "early": (0.0, 0.0, 1.0, 0.0),
}

if __name__ == "__main__":
    for name, weights in CHECKPOINTS.items():
        path = pathlib.Path(__file__).with_name(f"{name}.npz")
        np.savez(path, weights=np.array(weights, dtype=np.float32))
        print(path)
