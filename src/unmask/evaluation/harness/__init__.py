"""Integration with lm-evaluation-harness: its requests answered by our models, and the class that it sees."""
