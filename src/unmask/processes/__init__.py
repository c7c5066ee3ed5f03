"""Forward processes: q(z_t | x), q(z_s | z_t, x) and the prior; base.py has both equations for any prior."""
