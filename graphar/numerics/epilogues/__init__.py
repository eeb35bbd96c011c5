"""Epilogues: elementwise work on the sum of an all-reduce, before it is rounded and stored."""
