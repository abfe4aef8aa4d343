"""Distances between a candidate's update and the observed one."""
