"""Evaluation: bounds, scores, and measurements with their protocol."""

# Draws of times and masks for the bound of a given text, from Python, the command line or a harness.
SCORE_DRAWS = 64
