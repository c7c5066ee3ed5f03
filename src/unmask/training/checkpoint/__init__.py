"""Checkpoints: written whole or not at all, verified, sharded, resumed bit for bit."""
