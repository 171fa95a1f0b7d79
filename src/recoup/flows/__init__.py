"""Normalizing flows, built from invertible layers."""
