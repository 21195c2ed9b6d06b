"""Known bugs of replay, put back one at a time: `make test-mutants` shows the test that catches each.

Every mutant is one small replacement in a copy of the package. The tests that it names are run against that copy, and one
of them has to fail; first they all have to pass without any mutant. Run as a script:

    python tests/mutants.py              all of them
    python tests/mutants.py stale wrap   those whose names contain one of these
    python tests/mutants.py --write      all of them; then the table in docs/testing.md is written anew
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- mutants: written by tests/mutants.py --write -->\n", "<!-- end of mutants -->\n"
LIMIT = 150  # seconds for the tests of one mutant

# hypothesis gives the same examples as ever, and does not look for smaller ones when one has failed.
PLUGIN = """
from hypothesis import HealthCheck, Phase, settings
settings.register_profile("mutants", derandomize=True, database=None, suppress_health_check=list(HealthCheck),
                          phases=(Phase.explicit, Phase.generate))
"""


@dataclass(frozen=True)
class Mutant:
    name: str
    bug: str  # what goes wrong, in one sentence
    file: str  # in which file, under veldt/
    old: str  # occurs there once
    new: str
    tests: tuple[str, ...]  # pytest paths or node ids, of which at least one fails
    seen: tuple[str, ...] = ()  # where it happened: owner/repository#number on GitHub
    hangs: bool = False  # running out of time counts as caught


APEX = "tests/topologies/test_apex.py::"
ATARI = "tests/envs/test_atari.py::"
BELLMAN = "tests/learning/test_bellman.py::"
BLOCK = "tests/records/test_block.py::"
BOTTLENECK = "tests/watching/test_bottleneck.py::"
CAPTURED = "tests/learning/test_captured.py::"
DPG = "tests/algorithms/test_dpg.py::"
DQN = "tests/algorithms/test_dqn.py::"
ENVS = "tests/envs/test_envs.py::"
EVALUATOR = "tests/acting/test_evaluator.py::"
LEARNER = "tests/learning/test_learner.py::"
LIMITERS = "tests/storing/test_limiters.py::"
MASKS = "tests/test_masks.py::"
NETS = "tests/nets/test_nets.py::"
POLICY = "tests/acting/test_policy.py::"
PROPERTIES = "tests/records/test_properties.py::"
RANKS = "tests/storing/test_ranks.py::"
RECIPES = "tests/experiment/test_recipes.py::"
RECORDER = "tests/acting/test_recorder.py::"
RETURNS = "tests/learning/test_returns.py::"
SELECTORS = "tests/storing/test_selectors.py::"
SLOTS = "tests/storing/test_slots.py::"
STORE = "tests/storing/test_store.py::"
SUMTREE = "tests/storing/test_sumtree.py::"
WINDOWS = "tests/storing/test_windows.py::"
DISTRIBUTIONS = "tests/learning/test_distributions.py::"
OPTIM = "tests/learning/test_optim.py::"
VTRACE = "tests/algorithms/test_vtrace.py::"
IMPALA = "tests/topologies/test_impala.py::"
HOGWILD = "tests/learning/test_hogwild.py::"
WORKERS = "tests/topologies/test_workers.py::"
INFERENCE = "tests/acting/test_inference.py::"
QT_OPT = "tests/algorithms/test_qt_opt.py::"
R2D2 = "tests/algorithms/test_r2d2.py::"
ACTOR = "tests/acting/test_actor.py::"

ALONE = PROPERTIES + "test_a_vector_gives_the_transitions_of_its_environments_alone"
STREAM = PROPERTIES + "test_every_sampled_window_is_a_run_of_the_stream"
ITEMS = RECORDER + "test_every_window_start_is_an_item_once"
MACHINE = STORE + "TestReplay"
DEFINITION = VTRACE + "test_vtrace_is_the_sum_of_the_definition"
LOSS = VTRACE + "test_loss_and_gradient_are_their_definition"
SAW = VTRACE + "test_with_the_weights_that_acted_the_learner_finds_the_recorded_policy"
LEARNED = R2D2 + "test_loss_gradient_and_priorities_are_their_definition"
STORED = R2D2 + "test_the_stored_state_is_that_of_the_episode_so_far"
RECORDED = R2D2 + "test_with_the_weights_that_acted_the_learner_finds_the_recorded_values"
AT_FIRST = R2D2 + "test_initial_priorities_are_their_definition"
PADDING = R2D2 + "test_padding_and_the_action_of_a_last_row_do_not_matter"
PROTOCOL = ATARI + "test_every_protocol_equals_gymnasiums_with_the_same_settings[dqn]"

MUTANTS = [
    # Environments
    Mutant(
        "truncation-not-last",
        "A truncated episode is not marked as ended, so that the observation after the reset follows as its next one.",
        "envs/vector.py",
        "flags[1] = np.logical_or(terminated, truncated)",
        "flags[1] = terminated",
        (ALONE,),
        ("DLR-RM/stable-baselines3#934", "vwxyzjn/cleanrl#460"),
    ),
    Mutant(
        "autoreset-not-marked",
        "The record after an automatic reset is not marked as the first of an episode.",
        "envs/vector.py",
        "flags[0] = last_before",
        "flags[0] = False",
        (ALONE,),
        ("vwxyzjn/cleanrl#499", "sail-sg/envpool#194"),
    ),
    Mutant(
        "autoreset-any-mode",
        "A vector environment that resets within the last step is accepted, and its final observations are lost.",
        "envs/vector.py",
        "if mode != AutoresetMode.NEXT_STEP:",
        "if mode is None:",
        (ENVS + "test_other_autoreset_modes_are_refused",),
        ("openai/gym#3177",),
    ),
    Mutant(
        "reset-remembers-the-end",
        "A reset just after an episode's end keeps the flag, and the first step of the new episode begins another.",
        "envs/vector.py",
        '        self._last = step["last"]\n        if not self._began',
        "        if not self._began",
        (STREAM,),
    ),
    Mutant(
        "truncation-as-termination",
        "A time limit is taken for a terminal state, and values depend on it.",
        "envs/vector.py",
        "discount[:] = np.logical_not(terminated)",
        "discount[:] = np.logical_not(terminated | truncated)",
        (PROPERTIES + "test_a_time_limit_changes_no_value",),
        ("vwxyzjn/cleanrl#198",),
    ),
    Mutant(
        "termination-as-truncation",
        "A terminal state is bootstrapped like a truncated one.",
        "envs/vector.py",
        "discount[:] = np.logical_not(terminated)",
        "discount[:] = 1.0",
        (ALONE,),
    ),
    Mutant(
        "environments-share-their-buffer",
        "Records are views of an array that the environments write their next observations into.",
        "envs/make.py",
        "return SyncVectorEnv([factory] * n, autoreset_mode=AutoresetMode.NEXT_STEP)",
        "return SyncVectorEnv([factory] * n, autoreset_mode=AutoresetMode.NEXT_STEP, copy=False)",
        (ALONE,),
    ),
    Mutant(
        "bad-observation-valid",
        "An observation that is not finite is zeroed, but can still be trained on.",
        "envs/vector.py",
        'step["valid"][bad] = False',
        'step["valid"][bad] = True',
        (ENVS + "test_only_the_environment_with_the_bad_observation_is_blanked",),
    ),
    Mutant(
        "bad-observation-costs-its-reward",
        "The reward that came with a bad observation is missing in the return.",
        "envs/vector.py",
        'np.where(np.isfinite(step["reward"]), step["reward"], np.float32(0))',
        'np.where(bad, np.float32(0), step["reward"])',
        (ENVS + "test_a_finite_reward_counts_in_every_return_and_episodes_with_bad_rows_are_counted",),
    ),
    Mutant(
        "resets-hide-bad-observations",
        "The good observation after a reset starts the count of bad ones again.",
        "envs/vector.py",
        'self._bad_in_a_row[~step["first"]] = 0',
        "self._bad_in_a_row[:] = 0",
        (ENVS + "test_good_observations_after_resets_do_not_hide_an_environment_that_is_broken",),
    ),
    Mutant(
        "life-loss-ends-the-episode",
        "A lost life ends the episode, not the return alone.",
        "envs/vector.py",
        'step["discount"][info[RETURN_ENDS]] = 0.0',
        'step["discount"][info[RETURN_ENDS]] = 0.0\n            step["last"] = step["last"] | info[RETURN_ENDS]',
        (ATARI + "test_a_lost_life_ends_the_return_and_not_the_episode",),
        ("rlcode/reinforcement-learning#128",),
    ),
    Mutant(
        "life-loss-ignored",
        "A lost life does not end the return, though the protocol says so.",
        "envs/vector.py",
        'step["discount"][info[RETURN_ENDS]] = 0.0',
        'step["discount"][info[RETURN_ENDS] & False] = 0.0',
        (ATARI + "test_a_lost_life_ends_the_return_and_not_the_episode",),
    ),
    Mutant(
        "new-lives-are-lost-lives",
        "The lives that come back with a new game count as a lost life, and its first record has discount 0.",
        "envs/atari.py",
        'info[RETURN_ENDS] = info["lives"] < self.info["lives"]',
        'info[RETURN_ENDS] = info["lives"] != self.info["lives"]',
        (PROTOCOL,),
    ),
    Mutant(
        "sticky-actions-swapped",
        "Actions are sticky in the protocols without sticky actions, and in no other.",
        "envs/atari.py",
        "repeat_action_probability=protocol.sticky",
        "repeat_action_probability=0.25 - protocol.sticky",
        (PROTOCOL,),
    ),
    Mutant(
        "no-op-starts-missing",
        "Episodes begin without no-ops, and every one is the same.",
        "envs/atari.py",
        "noop_max=protocol.noops",
        "noop_max=0",
        (ATARI + "test_no_op_starts_are_random_where_the_protocol_has_them",),
    ),
    Mutant(
        "no-op-starts-beside-sticky-actions",
        "Episodes begin with no-ops in the protocols of sticky actions too.",
        "envs/atari.py",
        "noop_max=protocol.noops",
        "noop_max=30",
        (ATARI + "test_no_op_starts_are_random_where_the_protocol_has_them",),
    ),
    Mutant(
        "frame-skip-missing",
        "Every frame is a step.",
        "envs/atari.py",
        "frameskip=protocol.frame_skip",
        "frameskip=1",
        (PROTOCOL,),
    ),
    Mutant(
        "frame-skip-of-another-paper",
        "Every protocol skips four frames, Machado et al.'s too.",
        "envs/atari.py",
        "frameskip=protocol.frame_skip",
        "frameskip=4",
        (ATARI + "test_every_protocol_equals_gymnasiums_with_the_same_settings[machado]",),
    ),
    Mutant(
        "full-actions-swapped",
        "The minimal set of actions and that of all 18 are swapped.",
        "envs/atari.py",
        "full_action_space=protocol.full_actions",
        "full_action_space=not protocol.full_actions",
        (ATARI + "test_the_papers_settings",),
    ),
    Mutant(
        "frames-counted-as-steps",
        "The limit of an episode's frames is taken for one of steps, and is four times as long.",
        "envs/atari.py",
        "max_num_frames_per_episode=protocol.max_frames",
        "max_num_frames_per_episode=4 * protocol.max_frames",
        (ATARI + "test_a_capped_episode_is_truncated_where_gymnasium_truncates",),
    ),
    Mutant(
        "environment-clips-rewards",
        "The environment clips rewards, so that reported returns are not the game's.",
        "envs/atari.py",
        "reward_clipping=False",
        "reward_clipping=True",
        (ATARI + "test_records_equal_gymnasiums_preprocessing_and_stacking[SpaceInvaders]",),
    ),
    Mutant(
        "environment-presses-fire",
        "The environment presses FIRE after a reset, which no protocol does.",
        "envs/atari.py",
        "use_fire_reset=False",
        "use_fire_reset=True",
        (PROTOCOL,),
    ),
    # Acting
    Mutant(
        "reset-counted-as-a-step",
        "The ignored action after an episode's end counts as an environment step, and lengthens the next episode.",
        "acting/actor.py",
        "np.count_nonzero(applied), last.any()",
        "len(applied), last.any()",
        (ACTOR + "test_env_steps_are_applied_actions_and_never_resets",),
        ("vwxyzjn/cleanrl#499",),
    ),
    Mutant(
        "returns-of-clipped-rewards",
        "The returns that are reported are sums of clipped rewards.",
        "acting/actor.py",
        "returns += reward",
        "returns += np.minimum(1.0, np.maximum(-1.0, reward))",
        (ACTOR + "test_returns_are_sums_of_raw_rewards",),
    ),
    Mutant(
        "cut-as-termination",
        "Episodes that a checkpoint cuts short end as if in a terminal state.",
        "acting/actor.py",
        '            group.record["last"] = np.ones_like(group.record["last"])',
        '            group.record["last"] = np.ones_like(group.record["last"])\n'
        '            group.record["discount"] = np.zeros_like(group.record["discount"])',
        (ACTOR + "test_a_cut_ends_running_episodes_as_truncated_and_leaves_them_out_of_the_returns",),
    ),
    Mutant(
        "cut-not-marked",
        "Episodes that a checkpoint cuts short run on into the next ones.",
        "acting/actor.py",
        '            group.record["last"] = np.ones_like(group.record["last"])\n',
        "",
        (ACTOR + "test_a_cut_ends_running_episodes_as_truncated_and_leaves_them_out_of_the_returns",),
    ),
    Mutant(
        "acting-history-wraps-off-by-one",
        "When the buffer of the acting policy wraps, its stack keeps the frames of one step before.",
        "records/history.py",
        "row[:, :keep] = row[:, -keep:]",
        "row[:, :keep] = row[:, -keep - 1 : -1]",
        (POLICY + "test_history_is_what_a_window_of_the_same_rows_reads",),
    ),
    Mutant(
        "acting-history-survives-a-reset",
        "After a restart the acting policy still stacks frames from before it.",
        "acting/policy.py",
        "for kept in (self._history, self._state, self._held, self._ready):",
        "for kept in (self._state, self._held, self._ready):",
        (POLICY + "test_a_reset_forgets_the_history",),
    ),
    Mutant(
        "recurrent-state-not-reset",
        "The recurrent state is carried over into the next episode.",
        "acting/policy.py",
        "tensor[begins] = 0",
        "tensor[begins] += 0",
        (POLICY + "test_recurrent_state_starts_at_zero_with_every_episode",),
        ("instadeepai/Mava#1006", "bold-lab-ai/JaxMARL#127"),
    ),
    Mutant(
        "published-weights-are-a-view",
        "The weights that actors get change under them while the learner goes on.",
        "shared.py",
        "read_only({name: x.copy() for name, x in value.items()})",
        "read_only({name: x[:] for name, x in value.items()})",
        (LEARNER + "test_published_weights_are_frozen",),
    ),
    # Recording
    Mutant(
        "action-misaligned",
        "An action is stored beside the observation before the one that it was taken at.",
        "acting/recorder.py",
        "column[:, end] = row[name]",
        'column[:, end - (name == "action")] = row[name]',
        (STREAM,),
    ),
    Mutant(
        "reward-misaligned",
        "A reward is stored beside the observation before the one that it came with.",
        "acting/recorder.py",
        "column[:, end] = row[name]",
        'column[:, end - (name == "reward")] = row[name]',
        (STREAM,),
    ),
    Mutant(
        "blocks-are-views-of-the-tape",
        "The rows of a block are those that the recorder goes on writing into.",
        "acting/recorder.py",
        "rows = {name: array.copy() for name, array in tape.rows.items()}",
        "rows = {name: array[:] for name, array in tape.rows.items()}",
        (RECORDER + "test_blocks_are_read_only_and_apart_from_the_tape",),
        ("ray-project/ray#18358",),
    ),
    Mutant(
        "tape-drops-off-by-one",
        "The context that the next block begins with is that of one step before.",
        "acting/recorder.py",
        "array[:, :keep] = array[:, fresh : self.end].copy()",
        "array[:, :keep] = array[:, fresh - 1 : self.end - 1].copy()",
        (RECORDER + "test_what_a_tape_drops_is_gone_and_what_it_keeps_is_in_place",),
    ),
    Mutant(
        "old-row-after-the-newest",
        "After the newest row lies one of an earlier block that reads as valid: the next observation of a flushed stream.",
        "acting/recorder.py",
        'self._columns["valid"][:, keep:] = False',
        'self._columns["valid"][:, keep + 1 :] = False',
        (RECORDER + "test_what_a_tape_drops_is_gone_and_what_it_keeps_is_in_place",),
        ("DLR-RM/stable-baselines3#1853", "huggingface/lerobot#918", "tensorforce/tensorforce#138"),
    ),
    Mutant(
        "restart-goes-on-with-the-old-tape",
        "After a restart the new episodes are written behind the rows of the lost ones, as if they went on.",
        "acting/recorder.py",
        "self._tapes.pop(group, None)",
        "self._tapes.get(group, None)",
        (STREAM,),
    ),
    Mutant(
        "states-of-the-next-step",
        "The recurrent state stored for a window is that of one step later.",
        "acting/recorder.py",
        "states = slice(window.history - 1, window.history - 1 + self.schema.fresh, window.stride)",
        "states = slice(window.history, window.history + self.schema.fresh, window.stride)",
        (STREAM,),
    ),
    Mutant(
        "items-sent-twice",
        "A block that is sent short has the items that the next one has again.",
        "acting/recorder.py",
        "items[:, fresh // window.stride :] = False",
        "items[:, self.schema.fresh // window.stride :] = False",
        (ITEMS,),
    ),
    Mutant(
        "sent-before-the-lookahead",
        "A block is sent short before the rows that its last returns need are there, and these steps are lost.",
        "acting/recorder.py",
        "fresh = (tape.end - window.before - window.after) // window.stride * window.stride",
        "fresh = (tape.end - window.before) // window.stride * window.stride",
        (ITEMS,),
    ),
    # Blocks and windows
    Mutant(
        "block-one-row-short",
        "A block ends one row before its last window does, which reads on in the next block.",
        "records/block.py",
        "return self.length - self.stride + self.lookahead",
        "return self.length - self.stride + max(0, self.lookahead - 1)",
        (BLOCK + "test_every_window_of_a_block_lies_within_it",),
        ("pytorch/rl#2208",),
    ),
    Mutant(
        "ignored-action-trains",
        "The ignored action of an episode's last record becomes a transition to the next episode.",
        "records/block.py",
        "return valid[..., :size] & ~last[..., :size] & reaches",
        "return valid[..., :size] & reaches",
        (BLOCK + "test_trainable_is_its_definition",),
        ("vwxyzjn/cleanrl#499",),
    ),
    Mutant(
        "next-observation-unwritten",
        "A step trains although the row it is bootstrapped from was never written.",
        "records/block.py",
        "reaches = valid[..., lookahead : lookahead + size]",
        "reaches = valid[..., :size]",
        (BLOCK + "test_trainable_is_its_definition",),
        ("huggingface/lerobot#918", "tensorforce/tensorforce#138"),
    ),
    Mutant(
        "last-steps-never-train",
        "The steps within n of an episode's end are never trained on, and with them the reward that ends it.",
        "records/block.py",
        "reaches = valid[..., row] & (last[..., row] | reaches)",
        "reaches = valid[..., row] & ~last[..., row] & reaches",
        (BLOCK + "test_trainable_is_its_definition",),
    ),
    Mutant(
        "items-of-the-first-step-only",
        "A window is an item only if its very first step trains, and steps at the start of episodes are lost.",
        "records/block.py",
        "for j in range(window.length):",
        "for j in range(1):",
        (BLOCK + "test_an_item_is_a_window_with_something_to_learn",),
    ),
    Mutant(
        "stack-across-episodes",
        "Stacked frames reach back into the episode before.",
        "records/history.py",
        "same[-1] & ~first[:, j + 1 : j + 1 + rows] & valid[:, j : j + rows]",
        "same[-1] & valid[:, j : j + rows]",
        (BLOCK + "test_stacked_history_ends_at_the_episode_and_at_gaps",),
        ("google/dopamine#213", "berkeleydeeprlcourse/homework#52"),
    ),
    Mutant(
        "stack-without-the-first-frame",
        "Stacks near the start of an episode lack its first frame.",
        "records/history.py",
        "same[-1] & ~first[:, j + 1 : j + 1 + rows] & valid[:, j : j + rows]",
        "same[-1] & ~first[:, j : j + rows] & valid[:, j : j + rows]",
        (BLOCK + "test_stacked_history_ends_at_the_episode_and_at_gaps",),
    ),
    Mutant(
        "stack-across-gaps",
        "Stacked frames reach back over a frame that was lost.",
        "records/history.py",
        "same[-1] & ~first[:, j + 1 : j + 1 + rows] & valid[:, j : j + rows]",
        "same[-1] & ~first[:, j + 1 : j + 1 + rows]",
        (BLOCK + "test_stacked_history_ends_at_the_episode_and_at_gaps",),
    ),
    Mutant(
        "blanking-misses-a-frame",
        "One frame of the episode before stays in a sampled stack of a large observation.",
        "storing/windows.py",
        "begin = np.uint64(width * blank[i]) if",
        "begin = np.uint64(width * max(0, blank[i] - 1)) if",
        (WINDOWS + "test_windows_are_the_rows_from_first_on_and_zeros_where_blank",),
    ),
    Mutant(
        "blanking-ignores-episodes",
        "Sampled stacks reach back into the episode before.",
        "storing/windows.py",
        "if first[i, t] or not valid[i, t - 1]:",
        "if not valid[i, t - 1]:",
        (STREAM,),
        ("google/dopamine#213",),
    ),
    Mutant(
        "blanking-ignores-gaps",
        "Sampled stacks reach back over a frame that was lost.",
        "storing/windows.py",
        "if first[i, t] or not valid[i, t - 1]:",
        "if first[i, t]:",
        (WINDOWS + "test_earlier_rows_are_those_of_earlier_episodes_and_beyond_gaps",),
    ),
    Mutant(
        "blanking-off-by-one",
        "The stack of an episode's very first step keeps the episode before.",
        "storing/windows.py",
        "for t in range(at, 0, -1):",
        "for t in range(at - 1, 0, -1):",
        (STREAM,),
    ),
    Mutant(
        "blanking-missing",
        "A sample is not blanked before the episode, and the loss stacks it as it is.",
        "storing/windows.py",
        "self._blanks = schema.window.slices and schema.window.before > 0",
        "self._blanks = False",
        (STREAM,),
    ),
    Mutant(
        "small-observations-not-blanked",
        "Observations small enough to be packed with other columns keep the episode before.",
        "storing/windows.py",
        "columns[name][earlier] = 0",
        "columns[name][earlier] += 0",
        (STREAM,),
    ),
    Mutant(
        "large-observations-not-blanked",
        "Observations too large to be packed keep the episode before.",
        "storing/windows.py",
        "blank if is_observation(name) else None",
        "None",
        (STORE + "test_what_lies_before_the_episode_reads_as_zero_in_large_and_in_small_observations",),
    ),
    Mutant(
        "buffer-reused-while-held",
        "A sample is written over the one before, though someone still reads that.",
        "storing/windows.py",
        "if sys.getrefcount(kept[i]) == ALONE:",
        "if sys.getrefcount(kept[i]) >= ALONE:",
        (STORE + "test_a_sample_that_is_held_does_not_change",),
    ),
    # The store
    Mutant(
        "sample-is-a-view",
        "A sample of a single item is a view of the store.",
        "storing/windows.py",
        "                columns[name][earlier] = 0\n        return columns",
        "                columns[name][earlier] = 0\n        if len(first) == 1:\n"
        "            rows = slice(first[0], first[0] + schema.window.rows)\n"
        "            return schema.layout.columns({name: array[rows][None] for name, array in self.rows.items()})\n"
        "        return columns",
        (STORE + "test_a_sample_of_one_item_is_a_copy_too",),
    ),
    Mutant(
        "state-is-a-view",
        "What a checkpoint saves of the store changes while the store goes on.",
        "storing/ring.py",
        '"items": self.items.copy()',
        '"items": self.items',
        (STORE + "test_nothing_that_comes_out_is_a_view_of_the_store",),
    ),
    Mutant(
        "window-of-another-start",
        "Windows begin at the number of their start, not at its row, and overlap wrongly.",
        "storing/windows.py",
        "first[i] = slot * rows + (leaves[i] - slot * starts) * stride",
        "first[i] = slot * rows + (leaves[i] - slot * starts)",
        (MACHINE,),
    ),
    Mutant(
        "window-in-another-slot",
        "Slots are taken to be one row shorter than they are, and windows begin in the block before.",
        "storing/windows.py",
        "first[i] = slot * rows + (leaves[i] - slot * starts) * stride",
        "first[i] = slot * (rows - 1) + (leaves[i] - slot * starts) * stride",
        (MACHINE,),
        ("pytorch/rl#2208", "younggyoseo/FastTD3#6"),
    ),
    Mutant(
        "stale-priority",
        "A priority that comes late is given to the newer item that lies in the same slot.",
        "storing/replay.py",
        "        if oldest <= keys[i] < stop:\n            leaf = keys[i] + shift\n",
        "        if keys[i] < stop:\n            leaf = keys[i] % len(items)\n",
        (STORE + "test_a_stale_priority_is_ignored_and_counted",),
    ),
    Mutant(
        "wrong-leaf-after-the-ring-wraps",
        "Once the ring has wrapped, priorities are given to other items than those sampled.",
        "storing/replay.py",
        "shift = oldest % len(items) - oldest",
        "shift = -oldest",
        (MACHINE,),
    ),
    Mutant(
        "wrong-key-of-the-oldest",
        "The first item of the oldest block gets the key of a block that is not there yet.",
        "storing/windows.py",
        "(age if age >= 0 else age + count)",
        "(age if age > 0 else age + count)",
        (MACHINE,),
    ),
    Mutant(
        "keys-of-another-part",
        "The priorities of a prefetched batch are written to the items of another one.",
        "storing/store.py",
        "return Sample(self.keys[keep], rows",
        "return Sample(self.keys[: len(self.weights[keep])], rows",
        (STORE + "test_the_parts_of_a_sample_are_the_sample",),
    ),
    Mutant(
        "overwritten-without-eviction",
        "A full ring writes over its oldest block without forgetting it.",
        "storing/ring.py",
        "return self.next - self.oldest == self.n_slots",
        "return self.next - self.oldest == self.n_slots + 1",
        (MACHINE,),
    ),
    Mutant(
        "evicted-items-keep-their-mass",
        "The items of an evicted block can still be drawn.",
        "storing/replay.py",
        "        self.selector.remove(leaves)\n        self.size -= len(leaves)",
        "        self.size -= len(leaves)",
        (MACHINE,),
        ("ray-project/ray#54284",),
    ),
    Mutant(
        "capacity-exceeded",
        "A block is let in as long as the store was not full before it, and the capacity is exceeded.",
        "storing/replay.py",
        "self.size + more > self.hard_capacity",
        "self.size > self.hard_capacity",
        (STORE + "test_slack_is_used_by_inserts_and_given_back_by_trim",),
    ),
    Mutant(
        "trim-evicts-one-too-many",
        "A store that is just full loses one more block.",
        "storing/replay.py",
        "while self.size > self.capacity:",
        "while self.size >= self.capacity:",
        (STORE + "test_slack_is_used_by_inserts_and_given_back_by_trim",),
    ),
    Mutant(
        "duplicates-accepted",
        "A message that comes twice is stored twice.",
        "storing/ring.py",
        "self.latest.get(source.channel, -1) >= source.number",
        "self.latest.get(source.channel, -1) > source.number",
        (STORE + "test_a_message_is_taken_once",),
    ),
    Mutant(
        "samples-counted-as-one",
        "A sample counts as one item for the limiter, whatever its size.",
        "storing/replay.py",
        "self.sampled += n",
        "self.sampled += 1",
        (MACHINE,),
    ),
    # Priorities
    Mutant(
        "floor-removed",
        "An item whose error was zero once can never be drawn again.",
        "storing/selectors.py",
        "mass = np.maximum(priorities, FLOOR)",
        "mass = priorities.copy()",
        (STORE + "test_sample_returns_at_once_in_any_state",),
    ),
    Mutant(
        "alpha-ignored",
        "Items are drawn in proportion to their priority, not to its power alpha.",
        "storing/selectors.py",
        "np.power(mass, self.alpha, out=mass)",
        "np.power(mass, 1.0, out=mass)",
        (SELECTORS + "test_probabilities_and_weights_are_the_papers",),
    ),
    Mutant(
        "weights-inverted",
        "Importance weights have the wrong sign in their exponent: what is drawn often counts more, not less.",
        "storing/selectors.py",
        "(size * probability) ** -self.beta",
        "(size * probability) ** self.beta",
        (SELECTORS + "test_probabilities_and_weights_are_the_papers",),
    ),
    Mutant(
        "normalised-by-the-draw",
        "Weights are divided by the largest of all batches that were drawn at once, so that they depend on the prefetch.",
        "storing/store.py",
        "self.weights[keep] / self.weights[keep].max()",
        "self.weights[keep]",
        (STORE + "test_the_parts_of_a_sample_are_the_sample",),
    ),
    Mutant(
        "beta-not-annealed",
        "Beta stays where it began.",
        "topologies/stores.py",
        "store.beta + done * (store.beta_end - store.beta)",
        "store.beta",
        (RECIPES + "test_weights_with_an_annealed_beta_are_their_definition",),
    ),
    Mutant(
        "heap-never-sorted",
        "Ranks are places in a heap that is never sorted.",
        "storing/ranks.py",
        "if SORTED * self._changed > self.count:",
        "if False:",
        (RANKS + "test_draws_follow_the_ranks",),
    ),
    Mutant(
        "heap-hole-not-sifted-up",
        "The item that takes the place of a removed one never moves up, though it may be larger than its parent there.",
        "storing/ranks.py",
        "while at > 0 and keys[heap[(at - 1) // 2]] < key:",
        "while at > 0 and at + 1 == count and keys[heap[(at - 1) // 2]] < key:",
        (RANKS + "test_the_heap_holds_what_was_set",),
    ),
    Mutant(
        "weights-not-normalised",
        "Importance weights are not divided by the largest, and scale the learning rate up.",
        "storing/selectors.py",
        "weights /= weights.max()",
        "weights /= 1.0",
        (SELECTORS + "test_probabilities_and_weights_are_the_papers",),
    ),
    Mutant(
        "weights-by-the-smallest",
        "Importance weights are divided by the smallest, so that they are one and more.",
        "storing/selectors.py",
        "weights /= weights.max()",
        "weights /= weights.min()",
        (SELECTORS + "test_probabilities_and_weights_are_the_papers",),
    ),
    Mutant(
        "strata-not-random",
        "The middle of each stratum is drawn, so that the same items come every time.",
        "storing/selectors.py",
        "(np.arange(n) + rng.random(n)) / n",
        "(np.arange(n) + 0.5) / n",
        (SELECTORS + "test_draws_follow_the_probabilities",),
    ),
    Mutant(
        "not-stratified",
        "Draws are independent instead of one from each stratum.",
        "storing/selectors.py",
        "(np.arange(n) + rng.random(n)) / n",
        "rng.random(n)",
        (SELECTORS + "test_each_stratum_gives_one_draw",),
    ),
    Mutant(
        "largest-priority-rounded",
        "New items get the largest priority rounded to an integer.",
        "storing/selectors.py",
        "self.largest = max(self.largest, mass.max(initial=0.0))",
        "self.largest = max(self.largest, float(int(mass.max(initial=0.0))))",
        (MACHINE,),
        ("instadeepai/flashbax#58",),
    ),
    Mutant(
        "nan-priority-accepted",
        "A priority that is not a number is accepted.",
        "storing/selectors.py",
        "well &= (x[i] >= 0) & (x[i] < np.inf)",
        "well &= not (x[i] < 0)",
        (SELECTORS + "test_bad_priorities_are_refused",),
        ("werner-duvaud/muzero-general#40",),
    ),
    Mutant(
        "queue-as-a-stack",
        "A queue gives its newest items first.",
        "storing/ring.py",
        "leaves = self.item_leaves(self.oldest, self.next)[:n]",
        "leaves = self.item_leaves(self.oldest, self.next)[-n:]",
        (STORE + "TestQueue",),
    ),
    # The sum tree
    Mutant(
        "nan-mass-accepted",
        "A mass that is not a number makes every sum above it not a number.",
        "storing/selectors.py",
        "    if not all_valid(mass):\n        return False\n",
        "",
        (SUMTREE + "test_bad_masses_are_refused_and_change_nothing",),
        ("werner-duvaud/muzero-general#40",),
    ),
    Mutant(
        "zero-mass-drawn-at-the-end",
        "Where rounding leaves a little mass beyond the last child, a leaf without mass is drawn.",
        "storing/selectors.py",
        "                while nodes[group + np.uint64(child)] == 0:\n                    child -= 1\n",
        "",
        (SUMTREE + "test_a_leaf_without_mass_is_never_drawn",),
        (
            "JuliaReinforcementLearning/ReinforcementLearningCore.jl#83",
            "JuliaReinforcementLearning/ReinforcementLearningTrajectories.jl#59",
        ),
    ),
    Mutant(
        "zero-mass-drawn-at-a-boundary",
        "A draw that falls on a boundary takes the leaf before it, even if that has no mass.",
        "storing/selectors.py",
        "passed = left >= upto",
        "passed = left > upto",
        (SUMTREE + "test_a_leaf_without_mass_is_never_drawn",),
        ("JuliaReinforcementLearning/ReinforcementLearningCore.jl#83",),
    ),
    Mutant(
        "float32-sums",
        "Sums are rounded to float32.",
        "storing/selectors.py",
        "    return left + ((nodes[at] + nodes[at + one]) + (nodes[at + two] + nodes[at + three]))",
        "    return np.float64(np.float32(left + ((nodes[at] + nodes[at + one]) + (nodes[at + two] + nodes[at + three]))))",
        (SUMTREE + "test_a_million_updates_leave_no_drift",),
        ("instadeepai/flashbax#52",),
    ),
    Mutant(
        "sums-updated-by-differences",
        "Parents are adjusted by the difference of a leaf, and drift away from the sum of their children.",
        "storing/selectors.py",
        "        changed[i] = np.uint64(index[i])\n        nodes[changed[i]] = mass[i]\n    count = len(index)\n",
        "        at = np.uint64(index[i])\n"
        "        change = mass[i] - nodes[at]\n"
        "        nodes[at] = mass[i]\n"
        "        for level in range(1, len(levels) - 1):\n"
        "            at = at >> np.uint64(3)\n"
        "            nodes[np.uint64(levels[level]) + at] += change\n"
        "    return True\n"
        "    count = len(index)\n",
        (SUMTREE + "test_a_million_updates_leave_no_drift",),
    ),
    Mutant(
        "upper-levels-not-updated",
        "Only the two levels above the leaves are updated.",
        "storing/selectors.py",
        "    count = len(index)\n    for level in range(1, len(levels) - 1):",
        "    count = len(index)\n    for level in range(1, min(3, len(levels) - 1)):",
        (SUMTREE + "test_a_million_updates_leave_no_drift",),
    ),
    # Limiters
    Mutant(
        "ratio-inverted",
        "Inserts per sample are held where samples per insert are asked for.",
        "storing/limiters.py",
        "return self.ratio * (inserted - self.min_size) - (sampled + items) >= -self.tolerance",
        "return (inserted - self.min_size) - self.ratio * (sampled + items) >= -self.tolerance",
        (LIMITERS + "test_samples_per_insert_holds_its_law",),
    ),
    Mutant(
        "inserts-counted-in-blocks",
        "An insert counts as one item, whatever the size of its block.",
        "storing/limiters.py",
        "return self.ratio * (inserted + items - self.min_size) - sampled <= self.tolerance",
        "return self.ratio * (inserted + 1 - self.min_size) - sampled <= self.tolerance",
        (LIMITERS + "test_samples_per_insert_holds_its_law",),
    ),
    Mutant(
        "both-sides-wait",
        "The tolerance is narrower than a block and a batch, and actor and learner wait for each other.",
        "storing/limiters.py",
        "tolerance=2 * ratio * burst + batch",
        "tolerance=0.25 * ratio * burst",
        (LIMITERS + "TestLiveness",),
        ("google-deepmind/reverb#103",),
    ),
    Mutant(
        "minimum-of-what-ever-was",
        "The minimum size is compared with what was ever inserted, not with what is there.",
        "storing/limiters.py",
        "        return size >= max(1, self.min_size)",
        "        return inserted >= max(1, self.min_size)",
        (MACHINE,),
    ),
    Mutant(
        "queue-gives-part-of-a-batch",
        "A queue gives a batch when it has but a single item.",
        "storing/limiters.py",
        "return size >= items",
        "return size >= 1",
        (LIMITERS + "test_a_queue_is_bounded_and_gives_whole_batches",),
    ),
    # Returns and losses
    Mutant(
        "n-step-across-truncation",
        "n-step returns run on from a truncated episode into the next one.",
        "learning/returns.py",
        "                if last[b, t + k]:",
        "                if last[b, t + k] and discount[b, t + k] == 0:",
        (RETURNS + "test_n_step_is_the_sum_of_the_definition",),
        ("younggyoseo/FastTD3#6", "Toni-SM/skrl#224"),
    ),
    Mutant(
        "n-step-across-episodes-in-torch",
        "n-step returns run on from any episode into the next one.",
        "learning/returns.py",
        "alive = alive & ~last[..., row]",
        "alive = alive | last[..., row]",
        (RETURNS + "test_numpy_and_torch_agree_to_the_bit",),
        ("younggyoseo/FastTD3#6",),
    ),
    Mutant(
        "gamma-not-to-the-power-n",
        "Later rewards and the bootstrap are discounted by gamma, not by its powers.",
        "learning/returns.py",
        "product[b, t] *= gamma",
        "product[b, t] = gamma",
        (RETURNS + "test_n_step_is_the_sum_of_the_definition",),
        ("younggyoseo/FastTD3#6",),
    ),
    Mutant(
        "done-mask-off-by-one",
        "The mask of terminal states is that of one step before.",
        "learning/returns.py",
        "product[b, t] *= discount[b, t + k]",
        "product[b, t] *= discount[b, t + k - 1]",
        (RETURNS + "test_n_step_is_the_sum_of_the_definition",),
        ("younggyoseo/FastTD3#7",),
    ),
    Mutant(
        "reward-of-the-step-before",
        "The return sums the rewards of arriving at a step instead of those of leaving it.",
        "learning/returns.py",
        "total[b, t] += product[b, t] * reward[b, t + k]",
        "total[b, t] += product[b, t] * reward[b, t + k - 1]",
        (RETURNS + "test_n_step_is_the_sum_of_the_definition",),
    ),
    Mutant(
        "bootstrap-at-n",
        "Where an episode was truncated within n steps, the value of a row of the next episode is taken.",
        "algorithms/base.py",
        "truncated = (step.m < self.n) & (step.discount > 0)",
        "truncated = (step.m < self.n) & (step.discount < 0)",
        (DQN + "test_n_step_target_by_hand",),
        ("younggyoseo/FastTD3#6",),
    ),
    Mutant(
        "priority-bootstrapped-at-n",
        "Initial priorities take the value n steps on, even beyond the end of the episode.",
        "algorithms/base.py",
        "rows + step.m, axis=-1",
        "rows + self.n + 0 * step.m, axis=-1",
        (DQN + "test_initial_priorities_are_the_error_of_the_weights_that_acted",),
    ),
    Mutant(
        "store-keeps-clipped-rewards",
        "Rewards are clipped in place, so that the store keeps the clipped ones.",
        "algorithms/base.py",
        "return reward.clip(-self.clip_reward, self.clip_reward)",
        "return np.clip(reward, -self.clip_reward, self.clip_reward, out=reward)",
        (DQN + "test_rewards_are_clipped_one_by_one_and_only_in_the_loss",),
    ),
    Mutant(
        "action-of-the-next-step",
        "The loss trains the action of the next step.",
        "algorithms/base.py",
        'batch["action"][:, at], r_t',
        'batch["action"][:, at + 1], r_t',
        (DQN + "test_the_target_is_the_reward_and_the_discounted_largest_value_of_the_target_network",),
    ),
    Mutant(
        "bootstrap-from-the-online-network",
        "The target is computed with the network that is being trained.",
        "algorithms/dqn.py",
        "q_t = among_legal(target(s_t)",
        "q_t = among_legal(net(s_t)",
        (DQN + "test_the_target_is_the_reward_and_the_discounted_largest_value_of_the_target_network",),
        ("higgsfield/RL-Adventure#32",),
    ),
    Mutant(
        "bootstrap-from-an-illegal-action",
        "The target is the largest value of all actions, of illegal ones too.",
        "algorithms/dqn.py",
        "q_t = among_legal(target(s_t), legal_t)",
        "q_t = target(s_t)",
        (MASKS + "test_dqn_bootstraps_with_the_best_legal_action_of_the_row_that_it_bootstraps_at",),
    ),
    Mutant(
        "mask-of-another-row-than-the-bootstrap",
        "Where an episode was truncated, the mask of the row n steps later is taken.",
        "algorithms/base.py",
        "legal_t = _put(short, legal_t, batch[MASK][:, at + k])",
        "legal_t = legal_t",
        (MASKS + "test_dqn_bootstraps_with_the_best_legal_action_of_the_row_that_it_bootstraps_at",),
    ),
    Mutant(
        "random-actions-ignore-the-mask",
        "A random action is drawn from all actions.",
        "algorithms/dqn.py",
        "if len(legal) == 0:",
        "if len(legal) != actions:",
        (MASKS + "test_random_actions_are_uniform_over_the_legal_ones",),
    ),
    Mutant(
        "learner-policy-not-masked",
        "Actors sample from the masked policy, and the learner compares with the unmasked one.",
        "algorithms/vtrace.py",
        "pi = distribution.among(parameters[:, :-1], self.legal(batch, slice(at, -1)))",
        "pi = parameters[:, :-1]",
        (MASKS + "test_vtrace_compares_masked_policies_and_moves_no_illegal_action",),
    ),
    Mutant(
        "padding-without-legal-actions",
        "The value of a row that has no legal action is minus infinity.",
        "algorithms/base.py",
        "q.masked_fill(~legal & legal.any(-1, keepdim=True), -torch.inf)",
        "q.masked_fill(~legal, -torch.inf)",
        (MASKS + "test_dqn_where_an_episode_ends_needs_no_legal_action",),
    ),
    Mutant(
        "double-chooses-with-the-target-network",
        "Double DQN chooses its action with the target network, which is plain DQN.",
        "algorithms/dqn.py",
        "among_legal(net(s_t), legal_t).argmax(1, keepdim=True)",
        "q_t.argmax(1, keepdim=True)",
        (DQN + "test_double_takes_the_online_networks_action_at_the_target_networks_value",),
        ("higgsfield/RL-Adventure#5", "keon/deep-q-learning#35"),
    ),
    Mutant(
        "gradient-through-the-bootstrap",
        "The gradient flows through the target as well.",
        "algorithms/dqn.py",
        "        with torch.no_grad():\n            q_t =",
        "        with torch.enable_grad():\n            q_t =",
        (DQN + "test_huber_clips_the_error_in_the_gradient_to_one",),
    ),
    Mutant(
        "weights-ignored",
        "Importance weights are not used in the loss.",
        "algorithms/dqn.py",
        "loss = torch.dot(batch.weights, error) / len(error)",
        "loss = error.mean()",
        (DQN + "test_importance_weights_multiply_each_samples_loss",),
    ),
    Mutant(
        "priorities-are-weighted",
        "Priorities are multiplied by the importance weights, and shrink each time an item is drawn.",
        "algorithms/dqn.py",
        "priorities = (y - q_tm1).abs_()",
        "priorities = (y - q_tm1).abs_() * batch.weights",
        (DQN + "test_importance_weights_multiply_each_samples_loss",),
    ),
    # DPG
    Mutant(
        "dpg-online-bootstrap",
        "The target of DPG is computed with the networks that are being trained.",
        "algorithms/dpg.py",
        "target.qs(x_t, target.pi(x_t))",
        "net.qs(x_t, net.pi(x_t))",
        (DPG + "test_target_and_priorities_from_their_definition",),
    ),
    Mutant(
        "dpg-descends",
        "The actor follows the critic downhill.",
        "algorithms/dpg.py",
        "actor = -(dqda * pi)",
        "actor = (dqda * pi)",
        (DPG + "test_the_actor_ascends_the_critic_with_each_part_of_its_slope_clipped",),
    ),
    Mutant(
        "dpg-clips-the-norm",
        "The slope by the action is clipped as a whole, not each part of it.",
        "algorithms/dpg.py",
        "dqda = dqda.clamp(-self.clip_dqda, self.clip_dqda)",
        "dqda = dqda * (self.clip_dqda / dqda.norm(dim=1, keepdim=True)).clamp(max=1)",
        (DPG + "test_the_actor_ascends_the_critic_with_each_part_of_its_slope_clipped",),
    ),
    Mutant(
        "dpg-raw-actions",
        "The critic is trained on actions in the environment's units, and asked for their value in its own.",
        "algorithms/dpg.py",
        "net.qs(x_tm1, net.unit(a_tm1))",
        "net.qs(x_tm1, a_tm1.flatten(1))",
        (DPG + "test_target_and_priorities_from_their_definition",),
    ),
    Mutant(
        "dpg-noise-in-raw-units",
        "Exploration noise has the same size whatever the range of the actions.",
        "algorithms/dpg.py",
        "noise = explore[:, None] * rng.standard_normal(tuple(pi.shape))",
        "noise = explore[:, None] * rng.standard_normal(tuple(pi.shape)) / net.radius.numpy()",
        (DPG + "test_actions_are_the_policys_with_noise_in_units_of_half_their_range",),
    ),
    # QT-Opt
    Mutant(
        "qt-opt-two-maxima",
        "Each of the two target networks is evaluated at the action that it prefers itself.",
        "algorithms/qt_opt.py",
        "second = lagged.q(lagged.see(s_t), a[:, None])[:, 0]",
        "second = self.best(lagged, lagged.see(s_t), rng)[1]",
        (QT_OPT + "test_labels_are_the_smaller_value_of_both_networks_at_the_action_that_the_first_prefers",),
    ),
    Mutant(
        "qt-opt-larger-of-both",
        "Labels bootstrap from the larger value of the two target networks.",
        "algorithms/qt_opt.py",
        "torch.minimum(first, second)",
        "torch.maximum(first, second)",
        (QT_OPT + "test_labels_are_the_smaller_value_of_both_networks_at_the_action_that_the_first_prefers",),
    ),
    Mutant(
        "qt-opt-no-floor",
        "The samples of the maximiser collapse to one action when its elites agree.",
        "algorithms/qt_opt.py",
        "deviation = deviation.clamp_min(floor)",
        "deviation = deviation.clamp_min(0)",
        (QT_OPT + "test_the_second_round_is_fitted_to_the_elites_and_not_narrower_than_the_floor",),
    ),
    Mutant(
        "qt-opt-forgets-the-best",
        "The maximiser returns the best action of its last round, even if an earlier round had a better one.",
        "algorithms/qt_opt.py",
        "better = found[:, :1] > most",
        "better = found[:, :1] > -torch.inf",
        (QT_OPT + "test_the_best_of_all_rounds_is_returned",),
    ),
    Mutant(
        "qt-opt-no-lag",
        "The second target network is the newest copy of the first, not one that is some updates old.",
        "learning/targets.py",
        "if number <= self.version - self.config.lag",
        "if number <= self.version",
        (BELLMAN + "test_both_target_networks_are_their_definition",),
    ),
    Mutant(
        "labels-never-too-old",
        "Labels stay in their store however old the target networks are that made them.",
        "storing/labelled.py",
        "< self._now() - self.max_age].tolist()",
        "< self._now() - 10 * self.max_age].tolist()",
        (BELLMAN + "test_no_label_is_given_out_that_is_too_old",),
    ),
    Mutant(
        "labels-sent-twice",
        "A block of labels that was sent is sent again.",
        "learning/bellman.py",
        "            self._block = None\n            self.labels",
        "            self.labels",
        (BELLMAN + "test_a_block_that_is_refused_is_kept_and_sent_once",),
    ),
    Mutant(
        "logged-data-alone",
        "The fraction of a run's own steps stays 0.",
        "storing/labelled.py",
        "self.fraction() if self.size >= self.least else 0.0",
        "0.0",
        (BELLMAN + "test_labelling_begins_with_logged_data_and_the_fraction_of_own_steps_is_what_is_asked_for",),
    ),
    # Streams
    Mutant(
        "first-actor-first",
        "Whenever the store takes less than comes, the first actor is served first, and the others starve.",
        "runtime/services.py",
        "self._turn = turn if first < 0 else first",
        "self._turn = turn if first < 0 else 0",
        ("tests/runtime/test_services.py::test_a_store_that_takes_less_than_comes_is_shared_by_all",),
    ),
    # The learner
    Mutant(
        "target-never-copied",
        "The target network keeps its first weights.",
        "learning/learner.py",
        "config.target_every == 0:\n            self.target_vector.copy_(self.vector)",
        "config.target_every == 0:\n            self.target_vector.copy_(self.target_vector)",
        (LEARNER + "test_an_update_is_a_step_down_its_loss",),
    ),
    Mutant(
        "target-copied-every-step",
        "The target network follows the network at every step.",
        "learning/learner.py",
        "if alone and self.steps % self.config.target_every == 0:",
        "if alone:",
        (LEARNER + "test_an_update_is_a_step_down_its_loss",),
    ),
    Mutant(
        "priorities-of-other-items",
        "Priorities are written back in another order than that of the items.",
        "learning/learner.py",
        "self.store.update(sample.keys, loss",
        "self.store.update(sample.keys[::-1], loss",
        (LEARNER + "test_an_update_is_a_step_down_its_loss",),
    ),
    Mutant(
        "poisoned-batch-trains",
        "A batch is skipped only where both its loss and its gradient are not finite.",
        "learning/learner.py",
        "fine = all(map(math.isfinite, (norm, *(value.item() for value in loss.losses.values()))))",
        "fine = any(map(math.isfinite, (norm, *(value.item() for value in loss.losses.values()))))",
        (LEARNER + "test_a_poisoned_batch_changes_nothing_but_a_counter",),
    ),
    Mutant(
        "store-never-trimmed",
        "The store is never brought back to its capacity.",
        "learning/learner.py",
        "            self.store.trim()",
        "            pass",
        (LEARNER + "test_the_store_is_trimmed_every_so_often",),
    ),
    Mutant(
        "cut-keeps-the-prepared-batch",
        "A batch that was drawn early, before a checkpoint, is learned after it.",
        "learning/feed.py",
        "self._samples.clear()\n        self._prepared = None",
        "self._samples.clear()",
        (
            "tests/learning/test_feed.py::test_clear_drops_batches_that_were_not_used",
            LEARNER + "test_a_cut_forgets_the_batch_that_was_begun",
        ),
    ),
    Mutant(
        "gradient-scaled-up",
        "A small gradient is scaled up to the norm that large ones are clipped to.",
        "learning/optim.py",
        "if self.clip_norm and norm > self.clip_norm:",
        "if self.clip_norm:",
        ("tests/learning/test_updater.py::test_the_gradient_is_clipped_to_its_norm",),
    ),
    Mutant(
        "skipped-on-the-device-moves-the-averages",
        "An update in a graph that is not finite leaves the weights alone, and decays the optimizer's averages.",
        "learning/optim.py",
        "square.lerp_(self.gradient.square(), fine * (1 - b2))",
        "square.lerp_(self.gradient.square(), torch.ones_like(fine) * (1 - b2))",
        (CAPTURED + "test_a_poisoned_batch_changes_nothing_on_the_device_and_is_counted_later",),
    ),
    Mutant(
        "bootstrap-behind-a-truncation",
        "In a graph an n-step return that a truncation cuts short is bootstrapped from a row of the next episode.",
        "algorithms/base.py",
        "torch.where(discount > 0, m, self.n)",
        "torch.where(discount > 0, torch.full_like(m, self.n), self.n)",
        (CAPTURED + "test_an_update_on_the_device_is_the_update",),
    ),
    Mutant(
        "state-kept-across-episodes-on-the-device",
        "In a graph the LSTM keeps its state where an episode begins.",
        "nets/networks.py",
        "stays, outputs = (~first).to(x)",
        "stays, outputs = (first | True).to(x)",
        (CAPTURED + "test_an_update_on_the_device_is_the_update",),
    ),
    # Networks
    Mutant(
        "uint8-not-scaled",
        "Pixels reach the network as 0 ... 255.",
        "nets/torsos.py",
        "x.float().mul_(1 / 255)",
        "x.float().mul_(1.0)",
        (NETS + "test_uint8_is_scaled_to_one_and_other_numbers_are_taken_as_they_are",),
    ),
    Mutant(
        "dueling-streams-share-a-layer",
        "The two streams of a dueling network are linear layers on one shared hidden layer.",
        "algorithms/dqn.py",
        "env.n_actions, self.dueling, torso.width if self.dueling else 0))",
        "env.n_actions, self.dueling, 0))",
        (DQN + "test_the_dueling_network_for_atari_is_wang_et_als",),
    ),
    Mutant(
        "dueling-without-the-mean",
        "The dueling head adds value and advantages, and does not subtract their mean.",
        "nets/networks.py",
        "return value + advantage - advantage.mean(-1, keepdim=True)",
        "return value + advantage",
        (NETS + "test_dueling_subtracts_the_mean_over_actions",),
    ),
    Mutant(
        "dueling-mean-over-the-batch",
        "The dueling head subtracts the mean over the batch, so that the values of a state depend on its batch.",
        "nets/networks.py",
        "return value + advantage - advantage.mean(-1, keepdim=True)",
        "return value + advantage - advantage.mean(0, keepdim=True)",
        (NETS + "test_the_values_of_a_state_do_not_depend_on_its_batch_mates",),
    ),
    Mutant(
        "channels-last-reshaped",
        "Images with their channels last are reshaped instead of transposed.",
        "nets/torsos.py",
        "x.movedim(-1, -3).contiguous() if image.channels_last else x",
        "x",
        (NETS + "test_colour_images_may_have_their_channels_last",),
    ),
    # Memory
    Mutant(
        "slots-rounded-down",
        "The last part of a block that the capacity needs is left out, and the store never reaches it.",
        "storing/slots.py",
        "-(-int(items * (1 + slack)) // schema.starts)",
        "int(items * (1 + slack)) // schema.starts",
        (STORE + "test_a_store_given_steps_has_room_for_them",),
    ),
    Mutant(
        "context-not-counted",
        "The rows that blocks repeat as context are left out of the bytes, and the store outgrows them.",
        "storing/slots.py",
        "block = schema.nbytes + ",
        "block = schema.fresh * schema.layout.nbytes + ",
        (STORE + "test_a_store_given_bytes_stays_within_them",),
    ),
    Mutant(
        "ladder-over-empty-seats",
        "Seats that stay empty keep the greedy rungs of the ladder, and the run's own actors never act greedily.",
        "topologies/__init__.py",
        "config.actor.explore(i * n, n, n * config.own_actors)",
        "config.actor.explore(i * n, n, n * config.total_actors)",
        (APEX + "test_empty_seats_take_no_rungs_of_the_ladder",),
    ),
    Mutant(
        "pages-not-reserved",
        "Slots are written before their pages are allocated: where RAM is short, the process dies of a SIGBUS.",
        "storing/slots.py",
        "        self._reserve((slot,))\n",
        "",
        (SLOTS + "test_every_page_is_allocated_before_it_is_written",),
    ),
    # V-trace
    Mutant(
        "vtrace-c-not-clipped",
        "Weights that steps pass back are not clipped, and their products explode.",
        "learning/returns.py",
        "min(c, ratio[b, t]) * correction",
        "ratio[b, t] * correction",
        (DEFINITION,),
    ),
    Mutant(
        "vtrace-rho-not-clipped",
        "The weight of a step is not clipped.",
        "learning/returns.py",
        "delta = min(rho, ratio[b, t]) *",
        "delta = ratio[b, t] *",
        (DEFINITION,),
    ),
    Mutant(
        "vtrace-advantage-of-the-value",
        "The advantage is bootstrapped from the next value instead of the next target.",
        "learning/returns.py",
        "discounted * after - value[b, t])",
        "discounted * value[b, t + 1] - value[b, t])",
        (DEFINITION,),
    ),
    Mutant(
        "vtrace-advantage-of-the-value-in-torch",
        "The advantage is bootstrapped from the next value instead of the next target, on an accelerator.",
        "learning/returns.py",
        "gammas * target[..., 1:] - value",
        "gammas * value[..., 1:] - value",
        (DEFINITION,),
    ),
    Mutant(
        "vtrace-bootstrap-off-by-one",
        "The last step of an unroll is bootstrapped from its own value instead of that of the row after it.",
        "learning/returns.py",
        "after = value[b, ratio.shape[1]]",
        "after = value[b, ratio.shape[1] - 1]",
        (
            DEFINITION,
            VTRACE + "test_the_row_after_the_unroll_is_bootstrapped_from",
        ),
    ),
    Mutant(
        "vtrace-passed-over-an-end",
        "What was found in an episode is passed back into the one before it.",
        "learning/returns.py",
        "                correction = np.float32(0)\n            after",
        "                correction = correction * 1\n            after",
        (
            DEFINITION,
            VTRACE + "test_nothing_is_passed_back_over_the_end_of_an_episode",
        ),
    ),
    Mutant(
        "vtrace-passed-over-an-end-in-torch",
        "What was found in an episode is passed back into the one before it, on an accelerator.",
        "learning/returns.py",
        "decay = gammas * lambda_ * ratio.clip(max=clip_c) * trains",
        "decay = gammas * lambda_ * ratio.clip(max=clip_c)",
        (DEFINITION,),
    ),
    Mutant(
        "vtrace-reward-of-the-step-before",
        "The reward of arriving at a step is taken for that of its action.",
        "learning/returns.py",
        "delta = min(rho, ratio[b, t]) * (reward[b, t + 1]",
        "delta = min(rho, ratio[b, t]) * (reward[b, t]",
        (DEFINITION,),
    ),
    # IMPALA
    Mutant(
        "behaviour-policy-recomputed",
        "The learner works out the policy that acted with its own weights, so that every ratio is 1.",
        "algorithms/vtrace.py",
        'mu = batch["logits"][:, at:-1]',
        "mu = parameters[:, :-1].detach()",
        (
            LOSS,
            VTRACE + "test_the_ratio_is_to_the_recorded_policy",
        ),
    ),
    Mutant(
        "behaviour-policy-of-the-next-row",
        "The policy that acted is read one row late.",
        "algorithms/vtrace.py",
        'batch["logits"][:, at:-1]',
        'batch["logits"][:, at + 1 :]',
        (LOSS,),
    ),
    Mutant(
        "ratio-upside-down",
        "The importance weight is mu / pi.",
        "algorithms/vtrace.py",
        "log_ratio = log_pi - distribution.log_prob(mu, taken)",
        "log_ratio = distribution.log_prob(mu, taken) - log_pi",
        (LOSS,),
    ),
    Mutant(
        "last-row-trained",
        "The last row of an episode, whose action was never applied, is trained on.",
        "algorithms/vtrace.py",
        'trainable(batch.host["valid"][:, at:], batch.host["last"][:, at:], 1)',
        'trainable(batch.host["valid"][:, at:], batch.host["last"][:, at:] & False, 1)',
        (
            VTRACE + "test_ends_and_padding_do_not_train",
            LOSS,
        ),
    ),
    Mutant(
        "padding-trained",
        "Rows that are not valid are trained on.",
        "algorithms/vtrace.py",
        'trainable(batch.host["valid"][:, at:], batch.host["last"][:, at:], 1)',
        'trainable(batch.host["valid"][:, at:] | True, batch.host["last"][:, at:], 1)',
        (
            VTRACE + "test_ends_and_padding_do_not_train",
            LOSS,
        ),
    ),
    Mutant(
        "mean-over-padding",
        "Losses are averaged over all rows, those that do not train too.",
        "algorithms/vtrace.py",
        "steps = max(1, int(trains.sum()))",
        "steps = trains.size",
        (LOSS,),
    ),
    Mutant(
        "entropy-punished",
        "The policy is punished for its entropy.",
        "algorithms/vtrace.py",
        "- self.entropy_cost * entropy",
        "+ self.entropy_cost * entropy",
        (LOSS,),
    ),
    Mutant(
        "policy-descends",
        "The policy gradient has the wrong sign.",
        "algorithms/vtrace.py",
        "- learned.advantage",
        "+ learned.advantage",
        (LOSS,),
    ),
    Mutant(
        "value-of-the-next-row",
        "The value that learns is that of the next row.",
        "algorithms/vtrace.py",
        "((learned.target - value[:, :-1]) / net.scale)",
        "((learned.target - value[:, 1:]) / net.scale)",
        (LOSS,),
    ),
    Mutant(
        "policy-gradient-clipped-as-values",
        "The importance weights of the policy gradient are clipped where those of the value targets are.",
        "algorithms/vtrace.py",
        "(self.clip_rho, self.clip_c, self.clip_pg)",
        "(self.clip_rho, self.clip_c, self.clip_rho)",
        (VTRACE + "test_every_setting_does_what_its_definition_does[narrow policy gradient]",),
    ),
    Mutant(
        "one-step-not-weighted",
        "1-step importance sampling does not weight the policy gradient.",
        "algorithms/vtrace.py",
        "advantage=out.advantage * ratio.clamp(max=self.clip_pg)",
        "advantage=out.advantage",
        (VTRACE + "test_every_setting_does_what_its_definition_does[one-step]",),
    ),
    Mutant(
        "last-reward-always-clipped",
        "R2D2's LSTM gets the last reward clipped to [-1, 1], so that large rewards look alike.",
        "algorithms/r2d2.py",
        "self.clip_last_reward) if self.clip_last_reward else reward",
        "self.clip_last_reward) if self.clip_last_reward else reward.clamp(-1, 1)",
        (LEARNED,),
    ),
    Mutant(
        "last-action-not-shifted",
        "An LSTM is told the action that is about to be taken instead of the last one.",
        "algorithms/base.py",
        "taken = torch.cat((starts[TAKEN][:, None], own), 1) *",
        "taken = net.encode(batch[net.taken][:, at:]) *",
        (SAW,),
    ),
    Mutant(
        "last-action-across-episodes",
        "The first row of an episode is told the last action of the one before.",
        "algorithms/base.py",
        'own), 1) * (~batch["first"][:, at:])[:, :, None]',
        "own), 1)",
        (SAW,),
    ),
    Mutant(
        "lstm-not-reset-inside",
        "An episode that begins inside an unroll goes on with the state that the unroll began with.",
        "nets/networks.py",
        "(s[lane].masked_fill(fresh[:, None], 0) for s in (h, c))",
        "(s[lane] for s in (h, c))",
        (
            SAW,
            NETS + "test_an_lstm_begins_anew_with_every_episode",
        ),
    ),
    Mutant(
        "lstm-cell-not-reset",
        "Where an episode begins only the LSTM's output is reset, not its cell.",
        "nets/networks.py",
        "(s[lane].masked_fill(fresh[:, None], 0) for s in (h, c))",
        "(h[lane].masked_fill(fresh[:, None], 0), c[lane])",
        (SAW,),
    ),
    Mutant(
        "lstm-rows-of-another-episode",
        "Rows get the outputs of the sequence before theirs.",
        "nets/networks.py",
        "number = begins.reshape(-1).cumsum() - 1",
        "number = (begins.reshape(-1).cumsum() - 2).clip(0)",
        (NETS + "test_episodes_are_sequences_of_their_own_and_every_row_is_found_again",),
    ),
    Mutant(
        "lstm-runs-through-episodes",
        "An episode that begins inside an unroll goes on with the state of the one before.",
        "nets/networks.py",
        "if first is None or not first.any():\n            return self.forward(x, h, c)[0]",
        "if True:\n            return self.forward(x, h, c)[0]",
        (SAW,),
    ),
    Mutant(
        "burn-in-not-reset",
        "The last episode of a burn-in begins with the state that the window was given.",
        "nets/networks.py",
        "(h.masked_fill(fresh, 0)[None], c.masked_fill(fresh, 0)[None])",
        "(h[None], c[None])",
        (NETS + "test_an_lstm_is_its_equations_wherever_episodes_begin",),
    ),
    Mutant(
        "burn-in-through-episodes",
        "The state after a burn-in comes from the first episode that begins in it, and runs through the others.",
        "nets/networks.py",
        "steps - 1 - first[:, ::-1].argmax(1)",
        "first.argmax(1)",
        (NETS + "test_an_lstm_is_its_equations_wherever_episodes_begin",),
    ),
    Mutant(
        "lstm-from-zero",
        "The learner begins every unroll with a state of zero instead of the recorded one.",
        "nets/networks.py",
        "self.core.outputs(x, state[H], state[C], rows.first)",
        "self.core.outputs(x, 0 * state[H], 0 * state[C], rows.first)",
        (SAW,),
    ),
    Mutant(
        "state-recorded-after-the-step",
        "The recurrent state is recorded as it is after the step.",
        "acting/policy.py",
        "for name, tensor in before.items():",
        "for name, tensor in after.items():",
        (
            POLICY + "test_the_state_that_is_recorded_is_the_one_before_the_step",
            SAW,
        ),
    ),
    Mutant(
        "state-of-the-wrong-row",
        "An unroll is given the recurrent state of the row after its start.",
        "acting/recorder.py",
        "slice(window.history - 1, window.history - 1 + self.schema.fresh, window.stride)",
        "slice(window.history, window.history + self.schema.fresh, window.stride)",
        (SAW,),
    ),
    Mutant(
        "stacks-across-episodes",
        "The stacks of an unroll reach over into the episode before.",
        "records/history.py",
        "same = _same_episode(first, valid, history)",
        "same = _same_episode(first & False, valid, history)",
        (
            SAW,
            BLOCK + "test_the_stacks_of_all_rows_are_those_of_each",
        ),
    ),
    Mutant(
        "drawn-recorded-clipped",
        "A Gaussian records what it drew brought into bounds, which it did not draw with that probability.",
        "learning/distributions.py",
        "drawn = (mean + np.exp(log_std) * noise).astype(np.float32)",
        "drawn = (mean + np.exp(log_std) * noise).clip(-1, 1).astype(np.float32)",
        (DISTRIBUTIONS + "test_bounded_actions_are_drawn_in_units_of_half_their_range",),
    ),
    Mutant(
        "choices-share-one-number",
        "All choices of an action are drawn with the same random number.",
        "learning/distributions.py",
        "left = random[i, 1 + j] * total",
        "left = random[i, 1] * total",
        (DISTRIBUTIONS + "test_frequencies_are_probabilities",),
    ),
    Mutant(
        "normalized-over-all-choices",
        "Probabilities add up to 1 over all choices of an action together.",
        "learning/distributions.py",
        "if len(self.choices) == 1:\n            return F.log_softmax",
        "if len(self.choices) >= 1:\n            return F.log_softmax",
        (DISTRIBUTIONS + "test_probabilities_are_their_definition_and_add_up_to_one",),
    ),
    Mutant(
        "variance-below-zero",
        "RMSProp takes the root of a variance that cancellation made negative.",
        "learning/optim.py",
        "max(s[i] - m[i] * m[i], np.float32(0))",
        "(s[i] - m[i] * m[i])",
        (OPTIM + "test_the_variance_of_a_constant_gradient_is_not_negative",),
    ),
    Mutant(
        "epsilon-of-a-summed-gradient",
        "DQN adds the epsilon of the authors' summed gradient to the variance of a mean gradient.",
        "experiment/recipes/q_learning.py",
        "eps=0.01 / 32**2",
        "eps=0.01",
        ("tests/experiment/test_papers_optimizers.py::test_a_thousand_updates_are_those_of_the_paper",),
    ),
    Mutant(
        "uncentered-is-centered",
        "RMSProp that should not be centred subtracts the mean anyway.",
        "learning/optim.py",
        "if centered:  # otherwise",
        "if True:  # otherwise",
        (OPTIM + "test_rmsprop_is_the_formula",),
    ),
    Mutant(
        "cut-publishes-late",
        "At a checkpoint weights that were held back are published instead of the newest.",
        "learning/learner.py",
        "self.feed.clear()\n        self._publish_newest()",
        "self.feed.clear()\n        self.publisher.publish(self.steps, self.env_steps)",
        (LEARNER + "test_a_cut_publishes_the_newest_weights_and_holds_back_from_there",),
    ),
    Mutant(
        "resume-publishes-late",
        "After a resume the weights from before it are published, for as long as they are held back.",
        "learning/learner.py",
        "-1))\n        self._publish_newest()",
        "-1))\n        self.publisher.publish(self.steps, self.env_steps)",
        (LEARNER + "test_a_restored_learner_publishes_what_was_restored",),
    ),
    Mutant(
        "rate-of-a-moment",
        "A line shortly after another one has the rates of the short time between them.",
        "watching/bottleneck.py",
        "elif now - self._next[name][0] >= self.seconds:",
        "elif now - self._next[name][0] >= 0:",
        (BOTTLENECK + "test_a_line_soon_after_another_one_has_no_rate_of_the_short_time_between",),
    ),
    Mutant(
        "rate-without-the-time-of-its-line",
        "The time that a line takes is missing in the rates of the next one.",
        "experiment/progress.py",
        "self.rates.of(line, now, ",
        "self.rates.of(line, time.monotonic(), ",
        (BOTTLENECK + "test_the_time_that_a_line_takes_is_not_missing_in_the_next_rate",),
    ),
    Mutant(
        "evaluation-with-moving-weights",
        "The policy takes newer weights in the middle of an evaluation.",
        "acting/actor.py",
        "policy.refresh = 0",
        "policy.refresh = 1",
        (EVALUATOR + "test_an_evaluation_is_played_by_one_version_and_reports_its_numbers",),
    ),
    Mutant(
        "evaluation-dated-by-its-end",
        "An evaluation is logged with the env steps at its end, not with those of its weights.",
        "acting/actor.py",
        '"eval_env_steps": env_steps}',
        '"eval_env_steps": self.counters.get("env_steps")}',
        (EVALUATOR + "test_an_evaluation_is_played_by_one_version_and_reports_its_numbers",),
    ),
    Mutant(
        "lagged-weights-are-the-newest",
        "Weights that are held back are a view of the learner's own.",
        "learning/params.py",
        "weights._replace(vector=weights.vector.copy())",
        "weights",
        (LEARNER + "test_published_weights_may_be_held_back",),
    ),
    Mutant(
        "version-of-the-newest",
        "The version that is recorded is that of the newest weights, not of those that acted.",
        "acting/policy.py",
        "np.full(n, self.version)",
        'np.full(n, getattr(self.params, "weights").version)',
        (POLICY + "test_a_policy_that_is_asked_to_says_which_weights_it_acted_with",),
    ),
    Mutant(
        "bootstrap-without-scale",
        "Values that are learned in units of their size are bootstrapped from as if they were not.",
        "algorithms/actor_critic.py",
        "out[..., -1] * self.scale",
        "out[..., -1]",
        (VTRACE + "test_values_may_be_learned_in_units_of_their_size",),
    ),
    Mutant(
        "size-of-values-over-padding",
        "The size of values is a mean over all rows, those that do not train too.",
        "algorithms/vtrace.py",
        "(learned.target.square().clamp_max(MOST_SQUARE) * mask).sum() / steps\n",
        "learned.target.square().mean()\n",
        (VTRACE + "test_the_size_of_values_is_a_mean_that_forgets_slowly",),
    ),
    Mutant(
        "values-follow-their-scale",
        "When the size of values changes the head does not, so values that are bootstrapped from grow without end.",
        "algorithms/actor_critic.py",
        "self.head.weight[-1] *= before / self.scale",
        "pass",
        (IMPALA + "test_the_scale_follows_the_returns_and_values_do_not_follow_the_scale",),
    ),
    Mutant(
        "central-reset-keeps-state",
        "Central inference: a group that begins anew keeps the history and the recurrent state of the life before.",
        "acting/policy.py",
        "x[lanes] = 0",
        "pass",
        (INFERENCE + "test_a_group_that_begins_anew_has_no_past",),
    ),
    Mutant(
        "central-state-of-others",
        "Central inference: the new recurrent states are put where the first environments have theirs, not the askers.",
        "acting/policy.py",
        "self._states[name][index] = x",
        "self._states[name][: len(x)] = x",
        (INFERENCE + "test_groups_together_are_answered_as_each_alone",),
    ),
    Mutant(
        "central-state-crosses-episodes",
        "Central inference: the recurrent state is not zeroed where an episode begins.",
        "acting/graphed.py",
        'x[index].masked_fill_(new["first"].view(-1, *[1] * (x.ndim - 1)), 0)',
        "x[index]",
        (INFERENCE + "test_groups_together_are_answered_as_each_alone",),
    ),
    Mutant(
        "central-history-stands-still",
        "Central inference: the newest frame does not push out the oldest.",
        "acting/graphed.py",
        "x[index, 1:], new[name]",
        "x[index, :-1], new[name]",
        (INFERENCE + "test_groups_together_are_answered_as_each_alone",),
    ),
    Mutant(
        "central-withdrawn-row-stays",
        "Central inference: the row of an actor that died stays in the batch, and the others get each other's actions.",
        "acting/policy.py",
        "            column[self.n * place : stop - self.n] = column[self.n * (place + 1) : stop].copy()\n",
        "            pass\n",
        (INFERENCE + "test_a_question_is_withdrawn_by_a_reset_and_the_others_are_answered_right",),
    ),
    Mutant(
        "central-blocked-actor-waits",
        "Central inference: an actor that has nothing left to do waits until the time is over.",
        "acting/policy.py",
        "self.together in self._asks or time.monotonic() >= self.due",
        "time.monotonic() >= self.due",
        (INFERENCE + "test_an_actor_that_has_nothing_left_to_do_is_not_kept_waiting",),
    ),
    Mutant(
        "central-asked-twice",
        "Central inference: groups that were answered count as if they still asked.",
        "acting/policy.py",
        "self._asks = [0] * len(self._asks)\n",
        "pass\n",
        (INFERENCE + "test_an_actor_that_has_nothing_left_to_do_is_not_kept_waiting",),
    ),
    Mutant(
        "central-exploration-of-others",
        "Central inference: environments explore as much as the first ones of the run do.",
        "acting/policy.py",
        "np.asarray(self.explore, np.float64)[lanes]",
        "np.asarray(self.explore, np.float64)[: len(lanes)]",
        (INFERENCE + "test_every_environment_explores_as_much_as_it_is_told",),
    ),
    Mutant(
        "answered-twice-by-two-lives",
        "A server that was killed after it answered answers again in its next life, with other actions.",
        "runtime/services.py",
        "if number in self._answered[channel]:",
        "if False:",
        (INFERENCE + "test_a_new_life_answers_none_of_many_twice",),
    ),
    Mutant(
        "dead-asker-blocks-its-group",
        "What an actor asked before it was killed keeps its successor from being answered.",
        "runtime/services.py",
        "earlier = self._open.pop(place, None)",
        "earlier: tuple[int] | None = None",
        (INFERENCE + "test_what_a_dead_client_asked_does_not_hold_up_its_successor",),
    ),
    # R2D2
    Mutant(
        "stored-state-after-the-burn-in",
        "A window is given the recurrent state of the row after its burn-in, which is then run through once more.",
        "acting/recorder.py",
        "slice(window.history - 1, window.history - 1 + self.schema.fresh, window.stride)",
        "slice(window.before, window.before + self.schema.fresh, window.stride)",
        (
            STORED,
            RECORDED,
        ),
    ),
    Mutant(
        "stored-state-not-moved",
        "The states of a block's context are not moved with its rows, so every block but the first has those of others.",
        "acting/recorder.py",
        "        for array in (*self.rows.values(), *self.states.values()):\n            array[:, :keep]",
        "        for array in self.rows.values():\n            array[:, :keep]",
        (STORED,),
    ),
    Mutant(
        "stored-state-not-used",
        "Every window begins with a state of zero, stored state or not.",
        "algorithms/r2d2.py",
        "name: x if self.stored_state else torch.zeros_like(x) for name, x in starts",
        "name: torch.zeros_like(x) for name, x in starts",
        (
            LEARNED,
            RECORDED,
        ),
    ),
    Mutant(
        "zero-state-is-the-stored-one",
        "A window that should begin with a state of zero begins with the stored one.",
        "algorithms/r2d2.py",
        "name: x if self.stored_state else torch.zeros_like(x) for name, x in starts",
        "name: x for name, x in starts",
        (LEARNED,),
    ),
    Mutant(
        "target-burnt-in-online",
        "The target network begins with the state that the online network was burnt in to.",
        "algorithms/r2d2.py",
        "            v = self.h_inverse",
        "            targets = targets._replace(q_target=target(rows[:, self.burn_in :], state)); v = self.h_inverse",
        (
            R2D2 + "test_each_network_makes_its_own_state",
            LEARNED,
        ),
    ),
    Mutant(
        "target-not-burnt-in",
        "The target network begins with the stored state itself.",
        "algorithms/r2d2.py",
        "target(later, target.burn_in(earlier, state))",
        "target(later, state)",
        (
            R2D2 + "test_each_network_makes_its_own_state",
            LEARNED,
        ),
    ),
    Mutant(
        "gradient-into-the-burn-in",
        "The burn-in is trained through.",
        "nets/networks.py",
        "    @torch.no_grad()\n    def burn_in",
        "    def burn_in",
        (
            R2D2 + "test_no_gradient_goes_into_the_burn_in",
            LEARNED,
        ),
    ),
    Mutant(
        "r2d2-padding-trained",
        "Steps that are padding, or whose return is not there, are trained on.",
        "algorithms/r2d2.py",
        'trainable(batch.host["valid"], batch.host["last"], self.n)',
        'trainable(batch.host["valid"] | True, batch.host["last"], self.n)',
        (
            PADDING,
            LEARNED,
        ),
    ),
    Mutant(
        "r2d2-last-row-trained",
        "The last row of an episode, whose action was never applied, is trained on.",
        "algorithms/r2d2.py",
        'trainable(batch.host["valid"], batch.host["last"], self.n)',
        'trainable(batch.host["valid"], batch.host["last"] & False, self.n)',
        (
            PADDING,
            LEARNED,
        ),
    ),
    Mutant(
        "priority-mean-over-all-rows",
        "The mean in a window's priority is over all its rows, those that do not train too.",
        "algorithms/r2d2.py",
        "td.sum(-1) / trains.sum(-1).clip(1)",
        "td.mean(-1)",
        (
            LEARNED,
            AT_FIRST,
        ),
    ),
    Mutant(
        "initial-priority-of-padding",
        "The errors of rows that do not train count in the first priorities.",
        "algorithms/r2d2.py",
        "td = xp.where(trains, td, xp.zeros_like(td))",
        "pass",
        (AT_FIRST,),
    ),
    Mutant(
        "priority-is-the-largest-error",
        "The priority of a window is its largest error alone.",
        "algorithms/r2d2.py",
        "return self.eta * largest + (1 - self.eta) * td.sum(-1) / trains.sum(-1).clip(1)",
        "return largest",
        (
            LEARNED,
            AT_FIRST,
        ),
    ),
    Mutant(
        "priority-is-the-mean-error",
        "The priority of a window is its mean error alone.",
        "algorithms/r2d2.py",
        "return self.eta * largest + (1 - self.eta) * td.sum(-1) / trains.sum(-1).clip(1)",
        "return td.sum(-1) / trains.sum(-1).clip(1)",
        (
            LEARNED,
            AT_FIRST,
        ),
    ),
    Mutant(
        "initial-priorities-not-rescaled",
        "The first priorities are errors of returns, those of the learner errors under h.",
        "algorithms/base.py",
        'np.abs(y - columns["q"][..., : len(rows)])',
        'np.abs(self.h_inverse(y) - self.h_inverse(columns["q"][..., : len(rows)]))',
        (AT_FIRST,),
    ),
    Mutant(
        "initial-priorities-of-the-burn-in",
        "The first priority of a window is that of the rows of its burn-in.",
        "algorithms/r2d2.py",
        "range(window.before, window.before + schema.fresh, window.stride)",
        "range(window.history - 1, window.history - 1 + schema.fresh, window.stride)",
        (AT_FIRST,),
    ),
    Mutant(
        "no-action-before-a-window",
        "At a window's first row there is no last action.",
        "algorithms/base.py",
        "torch.cat((starts[TAKEN][:, None], own), 1)",
        "torch.cat((0 * starts[TAKEN][:, None], own), 1)",
        (
            RECORDED,
            LEARNED,
        ),
    ),
    Mutant(
        "no-reward-before-a-window",
        "At a window's first row there is no last reward.",
        "algorithms/base.py",
        'self.stacked), batch["reward"][:, at:]\n',
        'self.stacked), nn.functional.pad(batch["reward"][:, at + 1 :], (1, 0))\n',
        (
            RECORDED,
            LEARNED,
        ),
    ),
    Mutant(
        "r2d2-last-action-across-episodes",
        "The first row of an episode is told the last action of the one before.",
        "algorithms/base.py",
        '(~batch["first"][:, at:])[:, :, None]',
        '(~batch["last"][:, at:])[:, :, None]',
        (
            RECORDED,
            LEARNED,
        ),
    ),
    Mutant(
        "state-moves-on-with-the-greedy-action",
        "The network is told that the greedy action was taken, where it was a random one.",
        "algorithms/r2d2.py",
        'net.encode(on_device(columns["action"], net.device))',
        'net.encode(on_device(np.where(columns["q"] < columns["v"], 0, columns["action"]), net.device))',
        (
            R2D2 + "test_the_state_moves_on_with_the_action_that_was_taken",
            STORED,
        ),
    ),
    Mutant(
        "r2d2-state-crosses-episodes",
        "An episode that begins inside a window goes on with the state of the one before.",
        "algorithms/base.py",
        'return Rows(obs, taken, reward, batch.host["first"][:, at:])',
        'return Rows(obs, taken, reward, np.zeros_like(batch.host["first"][:, at:]))',
        (
            R2D2 + "test_nothing_before_an_episode_is_known_in_it",
            RECORDED,
        ),
    ),
    Mutant(
        "r2d2-return-into-the-next-episode",
        "A return goes on into the first row of the next episode.",
        "algorithms/r2d2.py",
        'for name in ("reward", "discount", "last")))',
        'for name in ("reward", "discount", "first")))',
        (LEARNED,),
    ),
    Mutant(
        "r2d2-bootstrap-beyond-the-end",
        "The return of a truncated episode is bootstrapped from a row after it.",
        "algorithms/r2d2.py",
        "bootstrap = step.m + torch.arange",
        "bootstrap = 0 * step.m + self.n + torch.arange",
        (LEARNED,),
    ),
    Mutant(
        "r2d2-target-chooses",
        "The target network chooses the action that it is bootstrapped with.",
        "algorithms/r2d2.py",
        "best = among_legal(q, self",
        "best = among_legal(q_target, self",
        (
            R2D2 + "test_the_bootstrap_is_the_targets_value_of_the_online_networks_choice",
            LEARNED,
        ),
    ),
    Mutant(
        "target-value-not-unrescaled",
        "The value that is bootstrapped with stays under h.",
        "algorithms/r2d2.py",
        "v = self.h_inverse(q_target.gather(2, best).squeeze(2))",
        "v = q_target.gather(2, best).squeeze(2)",
        (LEARNED,),
    ),
    Mutant(
        "target-not-rescaled",
        "The target is a return, the value that learns it is under h.",
        "algorithms/r2d2.py",
        "y = self.h(step.reward + step.discount * v.gather",
        "y = (step.reward + step.discount * v.gather",
        (LEARNED,),
    ),
    Mutant(
        "inverse-of-h-without-its-square",
        "The inverse of h lacks its square.",
        "learning/returns.py",
        "(root * root - 1)",
        "(root - 1)",
        (R2D2 + "test_h_and_its_inverse_undo_each_other",),
    ),
    Mutant(
        "r2d2-weights-ignored",
        "Importance weights do not weight the loss.",
        "algorithms/r2d2.py",
        "torch.dot(batch.weights, 0.5 * td",
        "torch.dot(torch.ones_like(batch.weights), 0.5 * td",
        (LEARNED,),
    ),
    Mutant(
        "delta-q-without-the-truth",
        "Delta-Q counts windows whose episode began before the block, whose true state nobody knows.",
        "algorithms/r2d2.py",
        "first[:, :o].any(1) & ",
        "",
        (
            R2D2 + "test_delta_q_leaves_out_windows_of_episodes_that_began_elsewhere",
            R2D2 + "test_delta_q_is_its_definition",
        ),
    ),
    Mutant(
        "action-before-the-update",
        "A3C: the first action of an unroll is chosen before the update, so it is not of the weights that learn from it.",
        "acting/recorder.py",
        "if self.early:",
        "if False:",
        (WORKERS + "test_one_worker_is_a_synchronous_actor_critic_update_by_update",),
    ),
    Mutant(
        "mean-squares-not-shared",
        "A3C: each worker has mean squares of its own although they are to be shared.",
        "learning/hogwild.py",
        'self._optimizer.averages["square"] = torch.from_numpy(self.square)',
        "pass",
        (HOGWILD + "test_rmsprop_is_its_formula",),
    ),
    Mutant(
        "restart-begins-again",
        "A3C: a restarted worker writes its first weights over those that all have learned.",
        "learning/hogwild.py",
        "if not self._begun[0]:",
        "if True:",
        (HOGWILD + "test_a_restarted_worker_does_not_begin_again",),
    ),
    Mutant(
        "old-copy",
        "A3C: a worker goes on with its first copy of the weights.",
        "learning/hogwild.py",
        "self._copy[:] = self.shared.vector",
        "pass",
        (HOGWILD + "test_a_worker_acts_and_learns_on_a_copy_that_others_do_not_change",),
    ),
]


def mutate(mutant: Mutant, package: Path) -> str:
    """The text of the mutated file."""
    text = (package / mutant.file).read_text()
    assert text.count(mutant.old) == 1, f"{mutant.name}: its text occurs {text.count(mutant.old)} times in {mutant.file}"
    return text.replace(mutant.old, mutant.new)


def run_tests(tests: Iterable[str], mutant: Mutant | None = None) -> tuple[int, str]:
    """pytest's exit status and output, against a copy of the package with this mutant in it; -1: out of time."""
    with tempfile.TemporaryDirectory(prefix="veldt-mutant-") as folder:
        # Times are copied too, so that what numba compiled before is used again where nothing changed.
        package = Path(shutil.copytree(ROOT / "veldt", Path(folder) / "veldt"))
        if mutant is not None:
            (package / mutant.file).write_text(mutate(mutant, package))
        (Path(folder) / "mutants_plugin.py").write_text(PLUGIN)
        env = {name: value for name, value in os.environ.items() if name != "VELDT_EXAMPLES"} | {"PYTHONPATH": folder}
        check = [sys.executable, "-c", "from importlib.util import find_spec; print(find_spec('veldt').origin)"]
        found = subprocess.run(check, cwd=folder, env=env, capture_output=True, text=True, timeout=60).stdout.strip()
        if Path(found) != package / "__init__.py":
            sys.exit(f"the tests would run against {found or 'nothing'} instead of the copy in {folder}")
        # The script, because `python -m pytest` would find the package in the working folder first.
        pytest = Path(sys.executable).parent / "pytest"
        options = ["-x", "-rfE", "-p", "no:cacheprovider", "-p", "mutants_plugin", "--hypothesis-profile=mutants"]
        try:
            limit = None if mutant is None else LIMIT
            done = subprocess.run(
                [pytest, *options, *tests], cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            return -1, ""
        return done.returncode, done.stdout + done.stderr


def failed(output: str) -> list[str]:
    """The node ids of the tests that failed."""
    lines = (line for line in output.splitlines() if line.startswith("FAILED "))
    return [line.removeprefix("FAILED ").split(" - ")[0] for line in lines]


def catch(mutant: Mutant) -> tuple[bool, str, float]:
    """Whether it is caught, by which test, and after how many seconds."""
    began = time.monotonic()
    status, output = run_tests(mutant.tests, mutant)
    seconds = time.monotonic() - began
    if status == -1:
        return mutant.hangs, "out of time", seconds
    found = failed(output)
    if status == 1 and found:
        return True, found[0], seconds
    if status == 0:
        return False, "SURVIVED", seconds
    sys.exit(f"{mutant.name}: pytest ended with {status}, but no test failed:\n{output[-4000:]}")


def table() -> str:
    """All mutants, as they are in docs/testing.md."""
    lines = ["| bug | where it happened | mutated file | caught by |", "|---|---|---|---|"]
    for mutant in MUTANTS:
        tests = ", ".join(f"`{test.split('::')[-1]}`" for test in mutant.tests)
        seen = ", ".join(map(link, mutant.seen))
        lines.append(f"| {mutant.bug} | {seen} | `{mutant.file}` | {tests} |")
    return "\n".join(lines) + "\n"


def link(issue: str) -> str:
    repository, number = issue.split("#")
    return f"[{repository.split('/')[1]} #{number}](https://github.com/{repository}/issues/{number})"


def written(text: str) -> str:
    """The document with the table as it should be."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


def main(words: list[str]) -> int:
    write, words = "--write" in words, [word for word in words if word != "--write"]
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    if not chosen:
        sys.exit(f"no mutant is named like {', '.join(words)}")
    began = time.monotonic()
    tests = list(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
    status, output = run_tests(tests)
    if status:
        sys.exit(f"without any mutant the tests have to pass:\n{output[-4000:]}")
    print(f"{len(tests)} tests pass without any mutant ({time.monotonic() - began:.0f} s)", flush=True)
    survivors = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mutant, (caught, how, seconds) in zip(chosen, pool.map(catch, chosen), strict=True):
            if not caught:
                survivors.append(mutant.name)
            print(f"{mutant.name:38} {seconds:5.1f} s  {how}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught in {time.monotonic() - began:.0f} s")
    if survivors:
        print(f"not caught: {', '.join(survivors)}")
        return 1
    if write:
        DOCS.write_text(written(DOCS.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
