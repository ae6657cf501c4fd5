"""`apr lint`: checks a file against best practices."""
