"""HTML pages of a folder of reports, of all folders, and of a comparison of two. They need no network."""
