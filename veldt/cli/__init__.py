"""The command line: one module for each command, with `run(argv)`; `parse` makes flags from dataclasses. The list of
commands is in `veldt.__main__`. May import everything."""
