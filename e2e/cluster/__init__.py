"""A real single-node Kubernetes for tests, built from source, run without Docker or an image registry.

`python -m e2e.cluster build` compiles the parts into a cache outside the checkout, `up` starts them in a
network namespace and a control group of their own, `down` removes everything again. The package needs
nothing but the standard library and knows nothing about Headway except which image it builds.
"""
