"""Pytest puts this folder on the path: helpers beside this file are for the folders below, too."""
