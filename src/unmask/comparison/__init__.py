"""Comparison of systems: trained on the same tokens of the same data, measured by one protocol.

A recipe is a system; a system with a seed is a trial.
"""
