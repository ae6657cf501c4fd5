"""The student and teacher networks as one decoder module."""
