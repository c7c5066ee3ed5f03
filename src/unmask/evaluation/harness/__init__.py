"""lm-evaluation-harness: what it asks of a model of ours, and the class that it sees."""
