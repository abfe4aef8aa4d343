"""Solve by the Gauss–Newton step and the loop that all second-order attacks share."""
