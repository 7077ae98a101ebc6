"""What is measured: the batch, the weights, one recorded forward and backward, and what one step changes."""
