"""Jenga: one pool of pages for unlike layers."""
