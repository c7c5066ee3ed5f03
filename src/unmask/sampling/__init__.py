"""Sampling: canvas → queries → predictions → steps, and the loop between sampler and network."""
