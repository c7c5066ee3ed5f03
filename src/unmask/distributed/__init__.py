"""Distributed training: the group of processes, how a network is distributed over them, and the watchdog."""
