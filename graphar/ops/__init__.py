"""The public ops, a file each, and how they are registered with torch."""
