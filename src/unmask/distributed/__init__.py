"""Several processes: who they are, how a network is spread over them, what watches them."""
