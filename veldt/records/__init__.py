"""The data: arrays by name (`tree`), steps and their time alignment (`step`), blocks and windows (`block`), stacked history
(`history`). Imports numpy, gymnasium's spaces and `veldt.errors`; runs without torch and numba.
"""
