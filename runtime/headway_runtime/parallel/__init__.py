"""Tensor parallelism: several processes, ranks, that each hold a share of every layer of one model.

Rank 0 is the engine's own process. It schedules, samples and guesses, and tells the others what to compute.
"""
