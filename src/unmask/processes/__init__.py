"""Forward processes: q(z_t | x), q(z_s | z_t, x) and the prior; the two laws for any prior are in base.py."""
