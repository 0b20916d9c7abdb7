"""What models are given to read and do."""
