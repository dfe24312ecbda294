"""Simulators and data."""
