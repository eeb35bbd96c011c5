"""The page of a report folder: index.html, made from its JSON files alone."""
