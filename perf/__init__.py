"""Measures graphar beside its peers, verifies every row it prints, and writes the result below build/reports."""
