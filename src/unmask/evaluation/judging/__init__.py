"""Evaluating generated texts: judges, numbers beside a perplexity, and samplers compared as curves."""
