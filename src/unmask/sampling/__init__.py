"""Sampling: canvas → queries → predictions → steps, and the loop that stands between sampler and network."""
