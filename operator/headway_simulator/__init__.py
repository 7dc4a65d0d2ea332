"""Simulates a service under load: the engine's own scheduler, the operator's own decisions, no GPU.

The one package that imports both the operator's decisions and the runtime's torch-free scheduler.
"""
