"""Epilogues: elementwise work on the sum of a collective, before it is rounded and stored."""
