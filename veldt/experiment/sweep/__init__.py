"""Sweeps: one experiment of many runs (settings x grid x seeds), described by a YAML file.

    name: ladder-deepsea          # default: the file's stem
    recipe: apex-dqn
    env: veldt/DeepSea-v0
    seeds: [0, 1, 2]              # or a number n: 0 ... n-1
    at_once: 2                    # runs at the same time; default 1
    episodes: 20                  # greedy episodes of the last evaluation
    reach: 0.9                    # optional: also report when an evaluation first reached this return
    timeout_s: 600                # per run; a run that takes longer is stopped and counts as failed; default: a day
    set: {steps: 30_000, eval.every: 2_000}     # for every run
    settings:                     # by name; each may have its own recipe: and env:
      ladder: {}
      one epsilon 0.1: {actor.alpha: 0, actor.epsilon: 0.1}
    grid:                         # all combinations, for each of the settings if there are any
      learner.lr: [1e-3, 1e-4]

Every run is an ordinary `veldt train` in its own directory, followed by `veldt eval`, in a child process that dies with
the sweep. The same command again skips finished runs and resumes the others.

    sweeps/NAME/sweep.yaml               the file that was run
                table.md, curves.png     the results
                SETTING/seed-0/          the run's directory
                        seed-0.yaml      its config
                        seed-0.log       its output
                        seed-0.json      its last evaluation; the run is finished once this file exists

    spec.py     Spec: the file, checked
    running.py  Sweep: runs what is not finished, several runs at a time
    table.py    scores of the finished runs, and the table of them
"""
