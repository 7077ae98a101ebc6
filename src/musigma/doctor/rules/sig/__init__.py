"""Rules about the signal that runs forward."""
