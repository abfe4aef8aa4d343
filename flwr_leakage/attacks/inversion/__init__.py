"""Attacks by optimisation: a candidate whose gradient comes near the observed one."""
