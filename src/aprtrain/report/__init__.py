"""What a run says while it goes on and afterwards."""
