"""How a checkpoint's weights are quantized, by what its configuration says, and what a user may ask instead.

Imports no torch. What is read here decides which tensors a checkpoint must hold; reading those is the
business of `models.stored_weights`.
"""
