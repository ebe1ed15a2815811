"""Simulation: the engine under runners that compute no model. Never a second scheduler."""
