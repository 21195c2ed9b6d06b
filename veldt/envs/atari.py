"""Atari through ale-py's C++ vector environment: one new frame [84, 84] uint8 per step, and raw rewards.

An action is repeated for four frames, or five; the last two are merged by their maximum, converted to grey and resized to
84 x 84. Other settings of the papers are named protocols; `apex:minimal` is one with the game's own actions instead of all
18, `dqn:full` one with all 18. The window stacks frames (`history`), and the loss clips rewards
(`clip_reward`). A lost life reaches the learner as discount 0 in the middle of an episode.
"""

from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from veldt.envs.find import is_atari
from veldt.envs.vector import RETURN_ENDS
from veldt.errors import UserError, did_you_mean
from veldt.records.tree import Array


@dataclass(frozen=True)
class Protocol:
    noops: int = 30  # an episode begins with 0 ... this many frames of no-ops
    sticky: float = 0.0  # probability that the emulator repeats the last action instead of the new one
    life_loss: bool = True  # a lost life ends the return, but not the episode
    full_actions: bool = False  # all 18 actions, even those that do nothing in this game
    max_frames: int = 108_000  # after which an episode is truncated: 30 minutes of play (18,000: 5 minutes)
    frame_skip: int = 4


PROTOCOLS = {
    "dqn": Protocol(),  # Mnih et al. 2015; also A3C, Gorila
    "apex": Protocol(full_actions=True),  # Horgan et al. 2018
    "r2d2": Protocol(full_actions=True, life_loss=False),  # Kapturowski et al. 2019; also SEED RL
    # Machado et al. 2018; sticky actions take the place of no-ops
    "machado": Protocol(noops=0, sticky=0.25, life_loss=False, full_actions=True, max_frames=18_000, frame_skip=5),
    "dopamine": Protocol(noops=0, sticky=0.25, life_loss=False),  # Castro et al. 2018
}
ACTIONS = {"minimal": False, "full": True}  # what may follow the name and a colon -> full_actions


def find_protocol(name: str) -> Protocol:
    """`NAME`, `NAME:minimal` or `NAME:full`; empty: dqn."""
    name, colon, actions = (name or "dqn").partition(":")
    if name == "sticky":
        raise UserError(
            "The Atari protocol 'sticky' had numbers of two papers and is gone; use machado (18 actions, frame skip 5, "
            "18,000 frames) or dopamine (the game's own actions, frame skip 4, 108,000 frames)."
        )
    if name not in PROTOCOLS:
        raise UserError(f"There is no Atari protocol {name!r}.{did_you_mean(name, PROTOCOLS, PROTOCOLS)}")
    if not colon:
        return PROTOCOLS[name]
    if actions not in ACTIONS:
        raise UserError(f"Atari has no actions {actions!r}; use {name}:minimal (the game's own) or {name}:full (all 18).")
    return replace(PROTOCOLS[name], full_actions=ACTIONS[actions])


def frame_skip(env: str, protocol: str) -> int:
    """Frames of one env step; 1 for what is not Atari."""
    return find_protocol(protocol).frame_skip if is_atari(env) else 1


class Atari(VectorEnv[Any, Any, Any]):
    """n copies of one game, stepped in threads. Where a lost life ends the return, `info` says so in RETURN_ENDS."""

    def __init__(self, env: str, n: int, protocol: Protocol, render: bool = False) -> None:
        self.protocol, self.num_envs = protocol, n
        game = str(gym.spec(env).kwargs["game"])
        self.games = _games(game, n, protocol, size=(84, 84), grey=True)
        # A second emulator with the same seeds and actions renders the same game in colour and full size.
        self.screens = _games(game, n, protocol, size=(210, 160), grey=False) if render else None
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_fps": 60 // protocol.frame_skip}
        self.single_observation_space = spaces.Box(0, 255, (84, 84), np.uint8)
        self.single_action_space = self.games.single_action_space
        self.info: dict[str, Array] = {}  # the emulators' newest: lives, episode_frame_number
        self._screen: Array | None = None

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Array, dict[str, Array]]:
        frames, info = self.games.reset(seed=seed)
        if self.screens is not None:
            self._screen = self.screens.reset(seed=seed)[0][:, 0]
        self.info = info
        return frames[:, 0], info

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Array]]:
        frames, reward, terminated, truncated, info = self.games.step(actions)
        if self.screens is not None:
            self._screen = self.screens.step(actions)[0][:, 0]
        if self.protocol.life_loss:
            info[RETURN_ENDS] = info["lives"] < self.info["lives"]
        self.info = info
        return frames[:, 0], reward, terminated, truncated, info

    def render(self) -> tuple[Array, ...] | None:
        return None if self._screen is None else tuple(self._screen)

    def close(self, **kwargs: Any) -> None:
        """The emulators are closed when they are garbage collected."""


class SingleAtari(gym.Env[Any, Any]):
    """One game, in the same emulator: an episode begins only where it is reset."""

    def __init__(self, env: str, protocol: Protocol) -> None:
        self.vector = Atari(env, 1, protocol)
        self.observation_space = self.vector.single_observation_space
        self.action_space = self.vector.single_action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.vector.reset(seed=seed)[0][0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        frames, reward, terminated, truncated, info = self.vector.step(np.array([action]))
        ends = {RETURN_ENDS: info[RETURN_ENDS][0]} if RETURN_ENDS in info else {}
        return frames[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), ends


def _games(game: str, n: int, protocol: Protocol, size: tuple[int, int], grey: bool) -> VectorEnv[Any, Any, Any]:
    from ale_py.vector_env import AtariVectorEnv

    games: VectorEnv[Any, Any, Any] = AtariVectorEnv(
        game,
        n,
        img_height=size[0],
        img_width=size[1],
        grayscale=grey,
        stack_num=1,
        frameskip=protocol.frame_skip,
        noop_max=protocol.noops,
        repeat_action_probability=protocol.sticky,
        full_action_space=protocol.full_actions,
        max_num_frames_per_episode=protocol.max_frames,
        reward_clipping=False,
        use_fire_reset=False,
    )
    return games
