"""Forward processes: q(z_t | x), q(z_s | z_t, x) and the prior, each equation once."""
