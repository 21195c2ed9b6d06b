"""The command line: one module a command, each with `run(argv)`."""
