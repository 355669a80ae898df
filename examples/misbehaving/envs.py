"""A cheap, exactly repeatable environment, and one that misbehaves on order.

For tests of what evaluates: `Counter` has short episodes whose score, length and
success are a pure function of the episode's seed, its trial index and the actions.
`Misbehaving` is the same environment until the moment its parameters name.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import gymnasium
import numpy as np
import rlmesh
from gymnasium import spaces
from rlmesh.adapters import Action, Actuator, EnvTags, StateTag

TAGS = EnvTags(
    observation=StateTag("x/counter"),
    action=Action(Actuator("x/guess", 1)),
)

MODES = (
    "none",
    "exit",  # os._exit(3) in a step
    "exit_zero",  # os._exit(0) in a step: gone without a complaint
    "kill",  # SIGKILL to itself in a step, as the kernel does when memory is short
    "raise",
    "raise_reset",
    "hang",
    "hang_reset",
    "slow_step",  # sleeps `seconds` in a step
    "memory",  # takes memory in a step, 4 GiB at most, as a leak does in time
    "shm",  # writes to /dev/shm in a step until it is full, 4 GiB at most
    "wrong_shape",  # an observation of another shape than declared
    "nan_observation",
    "nan_reward",
    "no_success",  # the success flag is missing from the final info
    "never_ends",
    "garbage",  # noise on stdout and stderr, some of it not UTF-8
    "raise_make",
    "exit_make",  # exit status 0 instead of being constructed
    "hang_make",
    "slow_make",  # sleeps `seconds` while being constructed
)


def mix(seed: int, trial: int) -> int:
    """64 well-mixed bits of a seed and a trial index (splitmix64)."""
    bits = 0xFFFFFFFFFFFFFFFF
    value = (seed * 0x9E3779B97F4A7C15 + trial * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & bits
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & bits
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & bits
    return value ^ (value >> 31)


class CounterEnv(gymnasium.Env):
    """Guess a sign per step, 3 to 7 times.

    The observation is (step, length, hint, trial). The hint's sign is the right guess
    three times out of four. A right guess scores 1/16 to 16/16 (exact in binary, so
    that sums do not depend on rounding); an episode succeeds when more than half of
    its guesses were right.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, shape=(4,), dtype=np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, shape=(1,), dtype=np.float32)
        self.seed = 0
        self._code = 0
        self._trial = 0
        self._length = 3
        self._steps = 0
        self._right = 0

    def _bits(self, step: int) -> tuple[float, bool, float]:
        """What is right at a step, whether the hint lies, and the score of a right guess."""
        byte = (self._code >> (8 * step)) & 0xFF
        return (1.0 if byte & 1 else -1.0, byte & 6 == 0, ((byte >> 4) + 1) / 16)

    def _observe(self) -> np.ndarray:
        right, lies, points = self._bits(self._steps)
        hint = (-right if lies else right) * points
        return np.array([self._steps, self._length, hint, self._trial], dtype=np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.seed = int(self.np_random.integers(2**32)) if seed is None else seed
        self._trial = rlmesh.trial_index(options) or 0
        self._code = mix(self.seed, self._trial)
        self._length = 3 + (self._code >> 56) % 5
        self._steps = self._right = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        right, _, points = self._bits(self._steps)
        hit = (float(action[0]) > 0.0) == (right > 0.0)
        self._steps += 1
        self._right += hit
        done = self._steps >= self._length
        info = {"is_success": self._right * 2 > self._length} if done else {}
        return self._observe(), points if hit else 0.0, done, False, info


class Counter(rlmesh.EnvFactory):
    """The environment that behaves."""

    tags = TAGS
    reset_options = ("trial_index",)
    workflow_edition = "2026.06"

    def make(self) -> gymnasium.Env:
        return CounterEnv()


def noise() -> None:
    """Everything a careless library might print, and a line that looks like the SDK's own."""
    sys.stdout.flush()
    os.write(1, b"RLMesh serving env on tcp://127.0.0.1:1 (startup: none)\n")
    os.write(1, b"\x00\xff\xfe not utf-8 \x1b[31mred\x1b[0m {\"json\": \n")
    os.write(1, b"half a line without an end")
    os.write(2, b"\xc3\x28 noise on stderr\r\n" + b"x" * 10_000 + b"\n")


def hang() -> None:
    print("misbehaving environment: hanging, as ordered", file=sys.stderr, flush=True)
    threading.Event().wait()


def die(status: int) -> None:
    """Ends the process as a crash does, but with its last words written."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class MisbehavingEnv(gymnasium.Wrapper):
    def __init__(
        self, env: CounterEnv, mode: str, at: int, seed: int | None, seconds: float, once: str | None
    ) -> None:
        super().__init__(env)
        self._mode = mode
        self._at = at
        self._seed = seed
        self._seconds = seconds
        self._once = once
        self._steps = 0

    def _due(self) -> bool:
        """Whether it is this episode's turn, and, with `once`, nobody's turn came before."""
        if self._seed is not None and self.env.seed != self._seed:
            return False
        if self._once is None:
            return True
        try:
            os.close(os.open(self._once, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        return True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        result = self.env.reset(seed=seed, options=options)
        self._steps = 0
        if self._mode == "raise_reset" and self._due():
            raise RuntimeError("misbehaving environment: raised in reset, as ordered")
        if self._mode == "hang_reset" and self._due():
            hang()
        return result

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._steps += 1
        if self._mode == "never_ends":
            if terminated:
                # Goes on with the same episode from its start.
                observation, _ = self.env.reset(seed=self.env.seed)
            return observation, reward, False, False, {}
        if self._mode == "no_success" and terminated:
            info = {key: value for key, value in info.items() if key != "is_success"}
        if self._mode == "garbage":
            noise()
        if self._steps != self._at or not self._due():
            return observation, reward, terminated, truncated, info
        match self._mode:
            case "exit":
                print(f"misbehaving environment: exiting with status 3 in step {self._at}", file=sys.stderr)
                die(3)
            case "exit_zero":
                die(0)
            case "kill":
                print(f"misbehaving environment: killing itself in step {self._at}", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise RuntimeError(f"misbehaving environment: raised in step {self._at}, as ordered")
            case "hang":
                hang()
            case "slow_step":
                time.sleep(self._seconds)
            case "memory":
                hoard = [bytearray(b"x") * (16 << 20) for _ in range(256)]
                raise RuntimeError(f"misbehaving environment: nobody minded {len(hoard)} times 16 MiB")
            case "shm":
                with open("/dev/shm/misbehaving", "wb", buffering=0) as file:
                    for _ in range(256):
                        file.write(b"x" * (16 << 20))
                raise RuntimeError("misbehaving environment: nobody minded a full /dev/shm")
            case "wrong_shape":
                observation = np.zeros(7, dtype=np.float32)
            case "nan_observation":
                observation = np.full_like(observation, np.nan)
            case "nan_reward":
                reward = float("nan")
        return observation, reward, terminated, truncated, info


class Misbehaving(rlmesh.EnvFactory):
    """`Counter` that does `mode` in step `at` (1 is the first) of the episodes with `seed`
    (all when null), only the first time when `once` names a file that remembers it."""

    tags = TAGS
    reset_options = ("trial_index",)
    workflow_edition = "2026.06"
    params = rlmesh.ParamSpec(
        rlmesh.Param("mode", "enum", choices=MODES, description="what to do wrong"),
        rlmesh.Param("at", int, description="step that it happens in; 1 is the first"),
        rlmesh.Param("seconds", float, description="how long the slow modes take"),
    )

    def make(
        self,
        mode: str = "none",
        at: int = 2,
        seconds: float = 5.0,
        seed: int | None = None,
        once: str | None = None,
    ) -> gymnasium.Env:
        match mode:
            case "raise_make":
                raise RuntimeError("misbehaving environment: raised while being constructed, as ordered")
            case "exit_make":
                die(0)
            case "hang_make":
                hang()
            case "slow_make":
                time.sleep(seconds)
            case "garbage":
                noise()
        return MisbehavingEnv(CounterEnv(), mode, at, seed, seconds, once)
