"""Rules about normalization layers."""
