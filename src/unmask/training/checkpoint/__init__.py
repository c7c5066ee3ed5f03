"""Checkpoints: written atomically, verified, optionally sharded, and resumed bit for bit."""
