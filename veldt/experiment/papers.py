"""What the papers say about the settings of a recipe, as far as we know it; `recipe_pages` puts it beside ours.

A setting that is not listed here is one of which the paper says nothing, or of which we do not know what it says.
"""

from typing import Any, NamedTuple


class Published(NamedTuple):
    value: Any  # in the unit of our setting, or text where that cannot be said in one value
    why: str = ""  # ours is another
    where: str = ""  # empty: where the paper's other numbers are


class Paper(NamedTuple):
    name: str
    where: str  # its numbers are
    settings: dict[str, Published]


SCALE = "for one machine; --actors changes it"
FRAMES = "200 million frames, as most results on Atari have"
LOCKSTEP = "environments of one actor are stepped together, in one forward pass"
ONE_STEP_FEW = "few actors would let a learner that runs freely repeat the first items"

DQN = Paper(
    "Mnih et al., Human-level control through deep reinforcement learning, Nature 2015",
    "extended data table 1",
    {
        "steps": Published(50_000_000, where="methods"),
        "envs_per_actor": Published(1, LOCKSTEP, "the text"),
        "algorithm.gamma": Published(0.99),
        "algorithm.history": Published(4),
        "algorithm.clip_reward": Published(1.0, where="methods"),
        "algorithm.huber": Published(True, where="methods: the error is clipped to [-1, 1]"),
        "algorithm.double": Published(False, where="the text"),
        "algorithm.dueling": Published(False, where="the text"),
        "algorithm.n": Published(1, where="the text"),
        "actor.epsilon": Published(1.0),
        "actor.epsilon_end": Published(0.1),
        "actor.epsilon_steps": Published(1_000_000),
        "store.capacity": Published("1_000_000"),
        "store.selector": Published("uniform"),
        "store.min_size": Published(50_000),
        "store.samples_per_insert": Published(8.0, where="extended data table 1: an update of 32 every 4 actions"),
        "learner.batch": Published(32),
        "learner.optimizer": Published("rmsprop"),
        "learner.centered": Published(True, where="the authors' code"),
        "learner.lr": Published(0.00025),
        "learner.decay": Published(0.95, where="extended data table 1: gradient momentum, squared gradient momentum"),
        "learner.eps": Published(
            0.01, "0.01 / 32^2: the authors sum the gradient over the batch of 32, and ours is a mean"
        ),
        "learner.target_every": Published(
            10_000, "the authors' code counts agent steps, four of which make an update; the text counts updates"
        ),
        "eval.epsilon": Published(0.05, where="methods"),
    },
)

APEX_DQN = Paper(
    "Horgan et al., Distributed prioritized experience replay, 2018",
    "Ape-X DQN",
    {
        "actors": Published(360, SCALE),
        "steps": Published(5_700_000_000, FRAMES),
        "envs_per_actor": Published(1, LOCKSTEP),
        "algorithm.gamma": Published(0.99),
        "algorithm.n": Published(3),
        "algorithm.double": Published(True),
        "algorithm.dueling": Published(True),
        "algorithm.huber": Published(False),
        "algorithm.history": Published(4),
        "algorithm.clip_reward": Published(1.0),
        "actor.block": Published(50, "a block is the unit of the store too"),
        "actor.refresh": Published(100),
        "actor.epsilon": Published(0.4),
        "actor.alpha": Published(7.0),
        "store.capacity": Published("2_000_000"),
        "store.selector": Published("prioritized"),
        "store.alpha": Published(0.6),
        "store.beta": Published(0.4),
        "store.min_size": Published(50_000),
        "store.samples_per_insert": Published("about 1.3, not enforced", ONE_STEP_FEW),
        "store.actors_wait": Published(False),
        "learner.batch": Published(512),
        "learner.optimizer": Published("rmsprop"),
        "learner.centered": Published(True),
        "learner.lr": Published(0.00025 / 4),
        "learner.decay": Published(0.95),
        "learner.eps": Published(1.5e-7),
        "learner.clip_norm": Published(40.0),
        "learner.target_every": Published(2_500),
        "learner.prefetch": Published(16, "priorities come back sooner"),
        "learner.trim_every": Published(100),
    },
)

QUICK = "one machine has few actors, and learns soon with larger steps from smaller batches; see docs/results/atari.md"
CHANGED = (
    "store.capacity",
    "store.min_size",
    *(f"learner.{x}" for x in ("batch", "optimizer", "lr", "eps", "target_every")),
)
ONE_MACHINE = APEX_DQN._replace(
    settings={
        name: value._replace(why=QUICK) if name in CHANGED else value
        for name, value in APEX_DQN.settings.items()
        if name not in ("learner.centered", "learner.decay")  # of RMSProp
    }
)

APEX_DPG = Paper(
    APEX_DQN.name,
    "Ape-X DPG",
    {
        "actors": Published(64, SCALE),
        "envs_per_actor": Published(1, LOCKSTEP),
        "algorithm.gamma": Published(0.99),
        "algorithm.n": Published(5),
        "algorithm.clip_dqda": Published(1.0),
        "algorithm.critic": Published((400, 300)),
        "algorithm.actor": Published((300, 200)),
        "actor.sigma": Published(0.3),
        "store.capacity": Published("1_000_000"),
        "store.selector": Published("prioritized"),
        "store.alpha": Published(0.6),
        "store.beta": Published(0.4),
        "store.samples_per_insert": Published("not enforced", ONE_STEP_FEW),
        "learner.batch": Published(256),
        "learner.optimizer": Published("adam"),
        "learner.lr": Published(1e-4),
        "learner.target_every": Published(100),
    },
)

IMPALA = Paper(
    "Espeholt et al., IMPALA: scalable distributed deep-RL with importance weighted actor-learner architectures, 2018",
    "its numbers for Atari",
    {
        "steps": Published(50_000_000),
        "algorithm.gamma": Published(0.99),
        "algorithm.unroll": Published(20),
        "algorithm.history": Published(4),
        "algorithm.lstm": Published(0),
        "algorithm.clip_reward": Published(1.0),
        "algorithm.clip_rho": Published(1.0),
        "algorithm.clip_c": Published(1.0),
        "algorithm.clip_pg": Published(1.0, where="the authors' code"),
        "algorithm.baseline_cost": Published(0.5),
        "algorithm.entropy_cost": Published(0.01),
        "algorithm.sum_losses": Published(True, where="the authors' code"),
        "learner.batch": Published(32),
        "learner.optimizer": Published("rmsprop"),
        "learner.centered": Published(False),
        "learner.square_start": Published(1.0, where="TensorFlow's RMSProp"),
        "learner.lr": Published(6e-4),
        "learner.anneal": Published(True),
        "learner.decay": Published(0.99),
        "learner.eps": Published(0.01),
        "learner.clip_norm": Published(40.0),
    },
)

SEED = Paper(
    "Espeholt et al., SEED RL: scalable and efficient deep-RL with accelerated central inference, 2020",
    "",
    {"inference": Published("central")},
)

R2D2 = Paper(
    "Kapturowski et al., Recurrent experience replay in distributed reinforcement learning, 2019",
    "table 2",
    {
        "actors": Published(256, SCALE),
        "envs_per_actor": Published(1, LOCKSTEP),
        "algorithm.gamma": Published(0.997),
        "algorithm.n": Published(5, where="the text"),
        "algorithm.history": Published(4),
        "algorithm.clip_reward": Published(0.0),
        "algorithm.burn_in": Published(40),
        "algorithm.length": Published(80),
        "algorithm.stride": Published(40),
        "algorithm.stored_state": Published(True),
        "algorithm.clip_last_reward": Published(0.0, where="SEED RL's code; the paper does not say"),
        "algorithm.eta": Published(0.9),
        "algorithm.rescaling": Published(True),
        "algorithm.h_epsilon": Published(1e-3),
        "algorithm.lstm": Published(512),
        "algorithm.head": Published(512),
        "actor.refresh": Published(400),
        "actor.epsilon": Published(0.4, where="as Ape-X"),
        "actor.alpha": Published(7.0, where="as Ape-X"),
        "store.capacity": Published("4_000_000"),
        "store.selector": Published("prioritized"),
        "store.alpha": Published(0.9),
        "store.beta": Published(0.6),
        "store.samples_per_insert": Published(0.8, where="appendix: the replay ratio"),
        "learner.batch": Published(64),
        "learner.optimizer": Published("adam"),
        "learner.lr": Published(1e-4),
        "learner.eps": Published(1e-3),
        "learner.clip_norm": Published(40.0, where="as Ape-X"),
        "learner.target_every": Published(2_500),
    },
)

R2D3 = Paper(
    "Gulcehre et al., Making efficient use of demonstrations to solve hard exploration problems, 2020",
    "its numbers for Hard-Eight",
    {
        "actors": Published(256, SCALE),
        "envs_per_actor": Published(1, LOCKSTEP),
        "demo_ratio": Published(1 / 256),
        "algorithm.gamma": Published(0.997),
        "algorithm.n": Published(5),
        "algorithm.burn_in": Published(40),
        "algorithm.length": Published(40),
        "algorithm.stride": Published(40),
        "algorithm.stored_state": Published(False),
        "algorithm.eta": Published(0.9),
        "store.alpha": Published(0.9),
        "store.beta": Published(0.6),
        "learner.batch": Published(64),
    },
)

PAPERS = {
    "dqn": DQN,
    "apex-dqn": ONE_MACHINE,
    "apex-dqn-paper": APEX_DQN,
    "apex-dpg": APEX_DPG,
    "impala": IMPALA,
    "seed-vtrace": SEED,
    "r2d2": R2D2,
    "r2d3": R2D3,
}
