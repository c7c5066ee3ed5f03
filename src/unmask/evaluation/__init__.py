"""Evaluation: bounds, scores, and measurements with their protocol."""
