"""The command line: one module per command, each with `run(argv)`; `parse` makes dataclasses from flags.

May import all other packages; only `veldt.__main__` imports it.
"""
