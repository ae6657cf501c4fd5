"""Keys, signatures of files and folders, and what they cover."""
