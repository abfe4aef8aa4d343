"""Attacks by optimisation, which search for a candidate whose gradient is near the observed one."""
