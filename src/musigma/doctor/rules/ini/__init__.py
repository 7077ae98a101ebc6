"""Rules about the weights as they were initialized."""
