"""The gateway in front of a service's replicas: spreads, holds and streams requests.

It imports neither the runtime nor the operator: what it knows of a replica is HTTP, what it knows of
the operator is a table of backends and a public key.
"""
