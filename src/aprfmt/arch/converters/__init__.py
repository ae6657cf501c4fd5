"""Converters that families share; one of a single family is defined in the file of its rows."""
