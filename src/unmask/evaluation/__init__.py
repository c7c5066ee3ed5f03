"""Evaluation: bounds, scores and the protocol beside each number."""
