"""One published result, one file."""
