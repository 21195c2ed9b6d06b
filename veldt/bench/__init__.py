"""Measurements: this package against the limit of the machine, and against other libraries, alternating in one run.
Medians. May import everything; nothing imports it but `cli.bench` and the zygote."""
