"""What the papers say about the settings of a recipe, as far as we know it; `recipe_pages` puts it beside ours.

A setting that is not listed here is one of which the paper says nothing, or of which we do not know what it says.
"""

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Paper:
    name: str
    where: str  # its numbers are
    settings: dict[str, Any]  # by dotted name, in the unit of our setting; text where that cannot be said in one value
    why: dict[str, str] = field(default_factory=dict)  # our value is another
    elsewhere: dict[str, str] = field(default_factory=dict)  # where a number is, if not with the others
    departures: tuple[str, ...] = ()  # what is not the paper's and not a setting; a run prints them too


def dotted(**groups: Any) -> dict[str, Any]:
    """algorithm=dict(n=3) as {"algorithm.n": 3}; what is in no group keeps its name."""
    out: dict[str, Any] = {}
    for name, value in groups.items():
        out |= {f"{name}.{key}": x for key, x in value.items()} if isinstance(value, dict) else {name: value}
    return out


SCALE = "for one machine; --actors changes it"
FRAMES = "200 million frames, as most results on Atari have"
LOCKSTEP = "environments of one actor are stepped together, in one forward pass"
ONE_STEP_FEW = "few actors would let a learner that runs freely repeat the first items"
MANY_ACTORS = {"actors": SCALE, "envs_per_actor": LOCKSTEP}

DQN = Paper(
    "Mnih et al., Human-level control through deep reinforcement learning, Nature 2015",
    "extended data table 1",
    dotted(
        steps=50_000_000,
        envs_per_actor=1,
        algorithm=dict(gamma=0.99, history=4, clip_reward=1.0, huber=True, double=False, dueling=False, n=1),
        actor=dict(epsilon=1.0, epsilon_end=0.1, epsilon_steps=1_000_000),
        store=dict(capacity="1_000_000", selector="uniform", min_size=50_000, samples_per_insert=8.0),
        learner=dict(batch=32, optimizer="rmsprop", centered=True, lr=0.00025, decay=0.95, eps=0.01, target_every=10_000),
        eval=dict(epsilon=0.05),
    ),
    why={
        "envs_per_actor": LOCKSTEP,
        "learner.eps": "0.01 / 32^2: the authors sum the gradient over the batch of 32, and ours is a mean",
        "learner.target_every": "the authors' code counts agent steps, four of which make an update; "
        "the text counts updates",
    },
    elsewhere={
        **dict.fromkeys(("steps", "algorithm.clip_reward", "eval.epsilon"), "methods"),
        **dict.fromkeys(("envs_per_actor", "algorithm.double", "algorithm.dueling", "algorithm.n"), "the text"),
        "algorithm.huber": "methods: the error is clipped to [-1, 1]",
        "store.samples_per_insert": "extended data table 1: an update of 32 every 4 actions",
        "learner.centered": "the authors' code",
        "learner.decay": "extended data table 1: gradient momentum, squared gradient momentum",
    },
)

APEX_DQN = Paper(
    "Horgan et al., Distributed prioritized experience replay, 2018",
    "Ape-X DQN",
    dotted(
        actors=360,
        steps=5_700_000_000,
        envs_per_actor=1,
        algorithm=dict(gamma=0.99, n=3, double=True, dueling=True, huber=False, history=4, clip_reward=1.0),
        actor=dict(block=50, refresh=100, epsilon=0.4, alpha=7.0),
        store=dict(capacity="2_000_000", selector="prioritized", alpha=0.6, beta=0.4, min_size=50_000)
        | dict(samples_per_insert="about 1.3, not enforced", actors_wait=False),
        learner=dict(batch=512, optimizer="rmsprop", centered=True, lr=0.00025 / 4, decay=0.95, eps=1.5e-7)
        | dict(clip_norm=40.0, target_every=2_500, prefetch=16, trim_every=100),
    ),
    why={
        **MANY_ACTORS,
        "steps": FRAMES,
        "actor.block": "a block is the unit of the store too",
        "store.samples_per_insert": ONE_STEP_FEW,
        "learner.prefetch": "priorities come back sooner",
    },
)

QUICK = "one machine has few actors, and learns soon with larger steps from smaller batches; see docs/results/atari.md"
CHANGED = (
    "store.capacity",
    "store.min_size",
    *(f"learner.{x}" for x in ("batch", "optimizer", "lr", "eps", "target_every")),
)
OF_RMSPROP = ("learner.centered", "learner.decay")
ONE_MACHINE = replace(
    APEX_DQN,
    settings={name: value for name, value in APEX_DQN.settings.items() if name not in OF_RMSPROP},
    why=APEX_DQN.why | dict.fromkeys(CHANGED, QUICK),
)

APEX_DPG = Paper(
    APEX_DQN.name,
    "Ape-X DPG",
    dotted(
        actors=64,
        envs_per_actor=1,
        algorithm=dict(gamma=0.99, n=5, clip_dqda=1.0, critic=(400, 300), actor=(300, 200)),
        actor=dict(sigma=0.3),
        store=dict(capacity="1_000_000", selector="prioritized", alpha=0.6, beta=0.4, evict="priority")
        | dict(samples_per_insert="not enforced"),
        learner=dict(batch=256, optimizer="adam", lr=1e-4, target_every=100),
    ),
    why=MANY_ACTORS
    | {"store.samples_per_insert": ONE_STEP_FEW}
    | {"store.evict": "here it chooses among the four oldest blocks, not among all items; its effect was not measured"},
    departures=(
        "the first layer of actor and critic is normalised before its tanh (LayerNorm)",
        "the paper does not give Adam's epsilon",
    ),
)

IMPALA = Paper(
    "Espeholt et al., IMPALA: scalable distributed deep-RL with importance weighted actor-learner architectures, 2018",
    "its numbers for Atari",
    dotted(
        steps=50_000_000,
        algorithm=dict(gamma=0.99, unroll=20, history=4, lstm=0, clip_reward=1.0, clip_rho=1.0, clip_c=1.0, clip_pg=1.0)
        | dict(baseline_cost=0.5, entropy_cost=0.01, sum_losses=True),
        learner=dict(batch=32, optimizer="rmsprop", centered=False, square_start=1.0, lr=6e-4, anneal=True)
        | dict(decay=0.99, eps=0.01, clip_norm=40.0),
    ),
    elsewhere={
        **dict.fromkeys(("algorithm.clip_pg", "algorithm.sum_losses"), "the authors' code"),
        "learner.square_start": "TensorFlow's RMSProp",
    },
)

SPANNING = (
    "windows span the ends of episodes, as SEED RL's; the next episode starts from a state of zero, no return crosses"
)

SEED = Paper(
    "Espeholt et al., SEED RL: scalable and efficient deep-RL with accelerated central inference, 2020",
    "",
    {"inference": "central"},
)

R2D2 = Paper(
    "Kapturowski et al., Recurrent experience replay in distributed reinforcement learning, 2019",
    "table 2",
    dotted(
        actors=256,
        envs_per_actor=1,
        algorithm=dict(gamma=0.997, n=5, history=4, clip_reward=0.0, burn_in=40, length=80, stride=40)
        | dict(stored_state=True, clip_last_reward=0.0, eta=0.9, rescaling=True, h_epsilon=1e-3)
        | dict(lstm=512, head=512),
        actor=dict(refresh=400, epsilon=0.4, alpha=7.0),
        store=dict(capacity="4_000_000", selector="prioritized", alpha=0.9, beta=0.6, samples_per_insert=0.8),
        learner=dict(batch=64, optimizer="adam", lr=1e-4, eps=1e-3, clip_norm=40.0, target_every=2_500),
    ),
    why=MANY_ACTORS,
    elsewhere={
        **dict.fromkeys(("actor.epsilon", "actor.alpha", "learner.clip_norm"), "as Ape-X"),
        "algorithm.n": "the text",
        "algorithm.clip_last_reward": "SEED RL's code; the paper does not say",
        "store.samples_per_insert": "appendix: the replay ratio",
    },
    departures=(SPANNING,),
)

R2D3 = Paper(
    "Gulcehre et al., Making efficient use of demonstrations to solve hard exploration problems, 2020",
    "its numbers for Hard-Eight",
    dotted(
        actors=256,
        envs_per_actor=1,
        demo_ratio=1 / 256,
        algorithm=dict(gamma=0.997, n=5, burn_in=40, length=40, stride=40, stored_state=False, eta=0.9),
        store=dict(alpha=0.9, beta=0.6),
        learner=dict(batch=64),
    ),
    why=MANY_ACTORS,
    departures=(SPANNING,),
)

MAIL = "the authors, in letters that others published"
ASYNCHRONOUS = dotted(
    workers=16,
    statistics="shared",
    algorithm=dict(gamma=0.99, unroll=5, history=4, clip_reward=1.0),
    learner=dict(optimizer="rmsprop", centered=False, lr="from LogUniform(1e-4, 1e-2)", anneal=True, decay=0.99, eps=0.1),
)
ASYNC_ELSEWHERE = {
    **dict.fromkeys(("learner.eps", "learner.decay"), MAIL),
    "algorithm.clip_reward": "as DQN",
}
ASYNC_WHY = {
    "workers": SCALE.replace("--actors", "--workers"),
    "learner.lr": "the authors' one choice for all games; veldt sweep draws rates",
}
A3C = Paper(
    "Mnih et al., Asynchronous methods for deep reinforcement learning, 2016",
    "section 5.1 and the supplement",
    {**ASYNCHRONOUS, **dotted(algorithm=dict(entropy_cost=0.01, value_cost=0.5, lstm=0), steps=80_000_000)},
    why=ASYNC_WHY,
    elsewhere={**ASYNC_ELSEWHERE, "algorithm.value_cost": MAIL, "steps": f"{MAIL}: 320 million frames in a day"},
)
ASYNC_Q = replace(
    A3C,
    settings={**ASYNCHRONOUS, **dotted(target_every=10_000, actor=dict(epsilon=1.0, epsilon_steps=1_000_000))}
    | dotted(actor=dict(epsilon_ends=(0.1, 0.01, 0.5), epsilon_odds=(0.4, 0.3, 0.3))),
    elsewhere=ASYNC_ELSEWHERE,
)

GORILA = Paper(
    "Nair et al., Massively parallel methods for deep reinforcement learning, 2015",
    "the text; what it does not say is as in DQN",
    {name: value for name, value in DQN.settings.items() if not name.startswith(("learner.", "store.", "eval."))}
    | dotted(
        bundles=100,
        shards=31,
        replay="local",
        steps="up to 6 days",
        actor=dict(epsilon=1.0, epsilon_end=0.1, epsilon_steps="1,000,000 updates"),
        store=dict(capacity="1_000_000", selector="uniform", samples_per_insert=8.0),
        learner=dict(batch=32, optimizer="adagrad", lr="not published", target_every=60_000),
        guard=dict(max_age="not published", deviations="several", against="own"),
    ),
    why={
        "bundles": "one a core of one machine; --bundles changes it",
        "shards": "one machine",
        "envs_per_actor": LOCKSTEP,
        "steps": FRAMES,
        "actor.epsilon_steps": "env steps: a learner makes an update every four",
        "store.capacity": "all bundles share the RAM of one machine",
        "learner.lr": "not tuned",
        "guard.max_age": "see docs/decisions.md",
        "guard.deviations": "see docs/decisions.md",
        "guard.against": "keeps out a learner whose losses are always too large; see docs/decisions.md",
    },
    elsewhere={
        **dict.fromkeys(("envs_per_actor", "store.samples_per_insert", "learner.batch"), "as DQN"),
        **{name: "as DQN" for name in DQN.settings if name.startswith("algorithm.")},
    },
)

FEWER = "for one machine: the paper's generations have 10,000 episodes, on up to 1,440 cores"
ES = Paper(
    "Salimans et al., Evolution strategies as a scalable alternative to reinforcement learning, 2017",
    "Atari: the text",
    dotted(
        steps=250_000_000,
        actors=720,
        envs_per_actor=1,
        algorithm=dict(batch_norm=True, lstm=0, bins=0),
        learner=dict(optimizer="adam", anneal=False, table=250_000_000, sigma=0.02, lr=0.01, weight_decay=0.005)
        | dict(pairs=5_000, noiseless=0.003),
    ),
    why={
        **MANY_ACTORS,
        "learner.pairs": FEWER,
        "learner.table": "it takes 256 MB instead of 1 GB",
    },
    elsewhere={
        "learner.table": "the authors' code",
        **{
            f"learner.{x}": "the authors' code, for Humanoid"
            for x in ("optimizer", "sigma", "lr", "weight_decay", "pairs", "noiseless", "anneal")
        },
    },
)

ROBOTS = "tuned here, for a small task: the paper's needs millions of updates"
QT_OPT = Paper(
    "Kalashnikov et al., QT-Opt: scalable deep reinforcement learning for vision-based robotic manipulation, 2018",
    "the text, as we remember it",
    dotted(
        updaters=1_000,
        actors=7,
        envs_per_actor=1,
        algorithm=dict(gamma=0.9, n=1, rounds=2, samples=64, elites=6, objective="cross-entropy"),
        targets=dict(average=0.9999, lag=6_000),
        learner=dict(batch=32, optimizer="sgd", lr=1e-4),
        store=dict(samples_per_insert="not enforced"),
        labels=dict(samples_per_label="not enforced"),
    ),
    why={
        **MANY_ACTORS,
        "updaters": "for one machine; --updaters changes it",
        **dict.fromkeys(("targets.average", "targets.lag"), ROBOTS),
        **dict.fromkeys(("learner.batch", "learner.optimizer", "learner.lr"), ROBOTS),
        **dict.fromkeys(
            ("store.samples_per_insert", "labels.samples_per_label"), "0 frees them, and a run can be repeated"
        ),
    },
    departures=(
        "one trainer, where the paper has ten",
        "the network is small and sees a camera image of 48 x 48",
    ),
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
    "a3c": A3C,
    **dict.fromkeys(("async-q", "async-nstep-q", "async-sarsa"), ASYNC_Q),
    "gorila": GORILA,
    "es": ES,
    "qt-opt": QT_OPT,
}
