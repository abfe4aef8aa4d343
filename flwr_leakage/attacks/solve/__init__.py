"""Solve least squares by a Gauss–Newton step and a loop that all second-order attacks share."""
