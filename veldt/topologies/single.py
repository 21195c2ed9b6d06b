"""One actor, one store, one learner: the chain uncut.

[ Actor - Recorder - LocalPolicy ] -> [ Store ] -> [ Learner ] -> [ Params ] -> (back to the policy)
"""

from __future__ import annotations

from veldt.actor import Actor, Evaluator
from veldt.counters import Counters
from veldt.learner import Learner
from veldt.params import LatestParams
from veldt.policy import LocalPolicy
from veldt.program import INCARNATION, Program
from veldt.recipes import Config
from veldt.recorder import Recorder
from veldt.seeds import derive
from veldt.step import EnvSpec


def single(program: Program, config: Config, env: EnvSpec) -> None:
    algorithm, schema, seed = config.algorithm, config.schema(env), config.seed
    counters = program.add("counters", Counters)
    params = program.add("params", LatestParams)
    store = program.add("store", config.make_store, schema)
    # The learner comes before the policies: the first weights are its own.
    learner = program.add(
        "learner",
        Learner,
        algorithm,
        env,
        store,
        params,
        counters,
        config.learner,
        config.steps,
        derive(seed, "learner"),
        config.device,
    )
    policy = program.add(
        "policy/0", LocalPolicy, algorithm, env, params, counters, config.explore, derive(seed, "policy", 0), on=learner
    )
    recorder = program.add(
        "recorder/0", Recorder, policy, store, algorithm, schema, actor=0, incarnation=INCARNATION, on=learner
    )
    program.add("actor/0", Actor, config.envs, config.actor.envs, recorder, counters, seed, on=learner)
    if config.eval.every:
        epsilon, policy_seed = config.eval.epsilon, derive(seed, "greedy")
        greedy = program.add("policy/greedy", LocalPolicy, algorithm, env, params, counters, epsilon, policy_seed)
        every, episodes, max_length = config.eval.every, config.eval.episodes, config.eval.max_length
        program.add("evaluator", Evaluator, config.envs, greedy, counters, every, episodes, max_length, seed, on=greedy)
