"""Experiments: from a recipe and flags to a trained run directory.

    config settings       what a run depends on; changing it by names, and checking it
    recipes               named settings that are known to work
    papers recipe_pages   what the papers say of them; docs/recipes, where both are side by side
    run                   the public calls train, resume and Run; a film of one episode
    prepare session       what a config leads to on this machine, and what is printed of it; the training loop
    directory checkpoint  what a run leaves on disk
    joined                an actor that the run did not start
    sweep trials          many runs: the file that asks for them; running them, and the table of their results

May import everything but cli and bench.
"""
