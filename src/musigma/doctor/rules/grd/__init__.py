"""Rules about the gradient that runs backward."""
