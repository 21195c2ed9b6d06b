"""What is said of the bottleneck of programs in which no store lies between actors and a learner.

A program that declares no sentences gets one that follows from its metrics alone (`watching.bottleneck`).
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Sentences:
    """Of processes that act and learn side by side: what is said of them where there is a bottleneck.

    They are texts as of a `Metric`. Three more words may be in them: {part} is the part that takes most of their time, as
    `parts` calls it, {share} how much it takes, {faster} what would make it shorter. A node class declares those of its
    program as `SENTENCES`.
    """

    known_by: tuple[str, ...]  # metrics that every line of such a program has
    parts: Mapping[str, str]  # links, and what they are called
    busy: str  # said where nothing waits
    cores: str  # and where all cores are busy
    count: str = ""  # the metric that says how many there are, where one for each core is enough
    waits: str = ""  # the metric that says how much they wait
    idle: str = ""  # said where they do
    server: str = ""  # the link of what serves them
    blocked: str = ""  # the metric that says how much they wait for that
    served: str = ""  # said where that is the reason


_SPENT = "{busy/learner} of the time in gradients, {busy/policy} in acting, {busy/env} in environments"
BUNDLES = Sentences(  # of gorila
    ("busy/shard", "wait/learner"),
    {},
    busy=f"The bundles are the bottleneck: they spend {_SPENT}: add --bundles.",
    cores=f"All {{cores:n}} cores are busy. The bundles spend {_SPENT}; the servers are busy {{busy/shard}}.",
    waits="wait/learner",
    idle=f"The bundles wait {{wait/learner}} of their time for another process; they spend {_SPENT}.",
    server="shard",
    blocked="wait/shards",
    served="The parameter servers are the bottleneck: they are busy {busy/shard} of their time, and the learners wait "
    "{wait/shards} of theirs for them: add --shards.",
)
WORKERS = Sentences(  # of a3c: none waits for another
    ("workers", "busy/env"),
    {"environments": "in environments", "policy": "in their network", "learner": "in updates"},
    busy="The workers spend {share} of their time {part}: add --workers (now {workers:n}), one for each of the {cores:n} "
    "cores.",
    cores="The workers spend {share} of their time {part}, and all {cores:n} cores have one: more cores would make it "
    "faster.",
    count="workers",
)
EVALUATING = Sentences(  # of es: a master waits for all of a generation
    ("busy/worker", "busy/master"),
    {"environments": "environments", "workers": "network"},
    busy="The workers are the bottleneck, most of the time with the {part}: add --actors (now {actors:n}).",
    cores="The workers are busy, most of the time with the {part}, and so are all {cores:n} cores: {faster} or more cores.",
    waits="wait/worker",
    idle="The workers wait {wait/worker} of their time for the last episodes of a generation: more learner.pairs, a cap on "
    "their length (--learner.cap), or --learner.mode first.",
    server="master",
    blocked="wait/worker",
    served="The master's update is the bottleneck: the workers wait {wait/worker} of their time for the next generation: "
    "more learner.pairs in each, or a smaller network.",
)

SENTENCES = (BUNDLES, WORKERS, EVALUATING)
