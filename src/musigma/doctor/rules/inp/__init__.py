"""Rules about the data."""
