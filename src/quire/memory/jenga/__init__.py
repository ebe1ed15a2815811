"""Jenga: one pool of pages for layers with pages of different sizes."""
