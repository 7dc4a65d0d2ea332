"""End-to-end tests on a real Kubernetes cluster, and the cluster itself (`e2e.cluster`)."""
