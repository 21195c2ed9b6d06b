"""Experiments: from a recipe and flags to a trained run directory.

    config settings         what a run depends on; changing it by names, and checking it
    recipes                 named settings that are known to work
    run session             the public calls train, resume and Run; the training loop
    directory checkpoint    what a run leaves on disk
    saving progress         when checkpoints and lines of metrics are due
    ram introduction        the RAM plan, and what is printed before training
    launch                  the runtime, gate and device that a config asks for
    sweep video             many runs; a film of one episode

May import everything but cli and bench.
"""
