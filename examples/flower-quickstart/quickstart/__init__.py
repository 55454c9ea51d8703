"""A usual PyTorch app for Flower."""
