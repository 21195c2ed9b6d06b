"""The command line: one module per command, each with `run(argv)`; tyro makes dataclasses from flags.

May import all other packages; only `veldt.__main__` imports it.
"""
