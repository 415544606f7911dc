"""What runs on this machine, for any plan: stages, supervision, reservations, limits."""
