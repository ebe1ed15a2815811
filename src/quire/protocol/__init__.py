"""Data that crosses a boundary: model and cache specs, a step's plan and result, sampling parameters, wire formats."""
