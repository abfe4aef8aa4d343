"""Estimators of spectra and damped solves, given products only."""
