"""The parts that attacks are composed of: spaces, predictions, matches, priors, fields, optimisers."""
