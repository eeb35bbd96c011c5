"""Checks of the arguments of a call: what the user's mistake raises, before anything is sent."""
