"""HTML pages for one folder of reports, for all folders, and for a comparison of two. They need no network."""
