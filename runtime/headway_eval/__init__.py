"""Judges what a lever did to a model's answers: against a baseline, on text and on tasks, by thresholds.

Uses the engine itself, in this process: what is judged are the weights, KV types and kernels that serve.
"""
