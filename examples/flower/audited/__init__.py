"""A Flower app that can be audited."""
