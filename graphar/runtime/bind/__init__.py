"""Binders: a function for each kind of work that makes the plan of a call."""
