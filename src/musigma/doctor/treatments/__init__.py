"""What mends: one treatment is one file; it works on a copy and says what it did."""
