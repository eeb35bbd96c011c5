"""Pages: of a folder of reports, of all folders, and of two compared. One Jinja template, and no network."""
