"""The public ops, one file each, and their registration with torch."""
