"""Generated texts: judges, what is counted beside a perplexity, and samplers as curves."""
